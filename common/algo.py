"""One policy-gradient algorithm as a configuration: AlgoConfig, its presets in conf/algo/, what cannot be combined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import OmegaConf

from common.schema import ConfigError, build, convert, one_of, suggest, within

CONF = Path(__file__).resolve().parents[1] / "conf"
PREFERENCE_NAMES = ("dpo", "kto", "online_dpo")  # trained by common.preference, the others by common.grpo and common.ppo


@dataclass(frozen=True)
class AlgoConfig:
    """One policy-gradient algorithm in full; presets stand in conf/algo/, see `load_algo`."""

    name: str
    advantage: str = "group_norm"
    std_ddof: int = 1
    std_eps: float = 1e-4
    prompts_per_step: int = 64
    group_size: int = 8
    epochs: int = 1
    minibatches: int = 1
    lr: float = 5e-4
    value_lr: float = 1e-3
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    grad_clip: float = 1.0
    warmup_steps: int = 0
    lr_decay: str = "none"
    clip_low: float = 0.2
    clip_high: float = 0.2
    policy_loss: str = "ppo_clip"
    loss_agg: str = "token_mean"
    drop_zero_variance: bool = True
    refill_rounds: int = 0
    refill_with: str = "prompts"
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    mask_truncated: bool = False
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_in: str = "loss"
    entropy_coef: float = 0.0
    gamma: float = 1.0
    lam: float = 0.95
    gae_level: str = "token"
    value_clip: float = 0.2
    value_coef: float = 0.5
    whiten: bool = False
    value_warmup_steps: int = 0
    temperature: float = 1.0
    max_new_tokens: int = 64
    max_turns: int = 1

    def __post_init__(self) -> None:
        for key, allowed in _ALGO_WORDS.items():
            one_of(f"algo.{key}", getattr(self, key), allowed)
        for key, (low, high, above) in _ALGO_RANGES.items():
            within(f"algo.{key}", getattr(self, key), low, high, above=above)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if (self.name == "ppo") != (self.advantage == "gae"):
            raise ConfigError(
                f"algo.advantage={self.advantage} with algo.name={self.name}: gae needs the value head of ppo, and ppo "
                "needs gae; allowed are ppo with gae or another name with another advantage."
            )
        grouped = self.advantage in ("group_norm", "group_centre", "rloo")
        if grouped and self.group_size < 2:
            raise ConfigError(f"algo.group_size={self.group_size}: algo.advantage={self.advantage} needs at least 2.")
        if self.drop_zero_variance and not grouped:
            raise ConfigError(
                f"algo.drop_zero_variance=true with algo.advantage={self.advantage}: only group_norm, group_centre and "
                "rloo compare answers within a group; set it to false."
            )
        if self.refill_rounds and not self.drop_zero_variance:
            raise ConfigError(f"algo.refill_rounds={self.refill_rounds}: needs algo.drop_zero_variance=true, or 0.")
        if self.refill_with == "answers" and not self.refill_rounds:
            raise ConfigError("algo.refill_with=answers with algo.refill_rounds=0: needs at least 1 round.")
        if self.kl_coef and self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ConfigError(
                "algo.kl_estimator=k1 with algo.kl_in=loss: the mean gradient of k1 is 0, so it would hold nothing back; "
                "allowed are k2 or k3 in the loss, or algo.kl_in=reward."
            )
        batch = self.prompts_per_step * self.group_size
        if batch % self.minibatches:
            raise ConfigError(
                f"algo.minibatches={self.minibatches}: must divide the {batch} episodes of a step "
                f"(prompts_per_step={self.prompts_per_step} times group_size={self.group_size})."
            )
        if self.overlong_buffer > self.max_new_tokens:
            raise ConfigError(
                f"algo.overlong_buffer={self.overlong_buffer}: must be at most max_new_tokens={self.max_new_tokens}."
            )
        if max(self.betas) >= 1 or min(self.betas) < 0:
            raise ConfigError(f"algo.betas={list(self.betas)}: both must be at least 0 and below 1.")


_ALGO_WORDS: dict[str, tuple[Any, ...]] = {
    "name": (
        *("grpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce", "reinforce_baseline"),
        *("reinforce_pp", "reinforce_pp_baseline", "ppo", *PREFERENCE_NAMES),
    ),
    "advantage": ("group_norm", "group_centre", "rloo", "batch_centre", "reward", "reward_to_go", "gae"),
    "std_ddof": (0, 1),
    "lr_decay": ("none", "linear", "cosine"),
    "policy_loss": ("ppo_clip", "gspo", "cispo"),
    "loss_agg": ("token_mean", "seq_mean", "seq_sum_const"),
    "refill_with": ("prompts", "answers"),
    "kl_estimator": ("k1", "k2", "k3"),
    "kl_in": ("loss", "reward"),
    "gae_level": ("token", "turn"),
}
_ALGO_RANGES: dict[str, tuple[float | None, float | None, bool]] = {  # low, high, low itself excluded
    **dict.fromkeys(
        ("prompts_per_step", "group_size", "epochs", "minibatches", "max_new_tokens", "max_turns"), (1, None, False)
    ),
    **dict.fromkeys(("lr", "value_lr", "adam_eps", "grad_clip", "clip_high", "temperature"), (0, None, True)),
    **dict.fromkeys(("std_eps", "weight_decay", "kl_coef", "value_coef", "value_clip", "overlong_penalty"), (0, None, False)),
    **dict.fromkeys(("warmup_steps", "refill_rounds", "overlong_buffer", "value_warmup_steps"), (0, None, False)),
    **dict.fromkeys(("gamma", "lam"), (0, 1, False)),
    "clip_low": (0, 1, True),
}


def load_algo(preset: str, *layers: Mapping[str, Any], conf: Path = CONF) -> AlgoConfig:
    """The preset conf/algo/<preset>.yaml with `layers` on top, left to right; null (None) keeps what is below.

    Raises ConfigError for an unknown preset or key, a wrong type or an impossible combination.
    """
    one_of("algo preset", preset, sorted(path.stem for path in (conf / "algo").glob("*.yaml")))
    path = conf / "algo" / f"{preset}.yaml"
    values = dict(_preset(path, path.stat().st_mtime_ns))
    for layer in layers:
        values.update({key: value for key, value in layer.items() if value is not None})
    return build(AlgoConfig, values, "algo")


@cache
def _preset(path: Path, changed_ns: int) -> dict[str, Any]:
    """A preset's values; kept until the file changes, because an experiment checks a dozen arms each time."""
    values: Any = OmegaConf.to_container(OmegaConf.load(path))
    return values


def check_layer(layer: Mapping[str, Any], key: str = "algo") -> None:
    """Raises ConfigError if a partial algorithm configuration holds an unknown key or a wrong type; null is fine."""
    hints = get_type_hints(AlgoConfig)
    for name, value in layer.items():
        if name not in hints:
            known = [f"{key}.{item.name}" for item in fields(AlgoConfig)]
            raise ConfigError(f"{key}.{name}={value}: unknown key.{suggest(f'{key}.{name}', known)}")
        if value is not None:
            convert(hints[name], value, f"{key}.{name}")
