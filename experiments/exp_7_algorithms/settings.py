"""The configuration of the comparison as types; values and their meaning stand in conf/experiment/7-algorithms/."""

from dataclasses import dataclass, field, replace
from typing import Any

from common.algo import PREFERENCE_NAMES
from common.config import AlgoConfig, Common, load_algo
from common.distill import DistillConfig
from common.models import DecoderConfig
from common.rejection import RejectionConfig
from common.schema import ConfigError, build, one_of, within
from common.sft import SftConfig
from experiments.exp_7_algorithms.data import CorpusConfig

METHODS = (
    "none", "sft", "rejection", "star", "dpo", "step_dpo", "kto", "online_dpo", "policy_gradient", "rlhf", "distill",
    "self_distill", "best_of",
)  # fmt: skip
PRESETS = {"dpo": "dpo", "step_dpo": "dpo", "kto": "kto", "online_dpo": "online_dpo"}


@dataclass(frozen=True)
class Branch:
    """What an arm does after the common start. ``algo``: preset of a policy gradient. ``budget``: multiple of branch_flops.

    ``changes``: keys of the method's own configuration. ``lr`` stands apart because validation chooses it.
    """

    method: str
    study: str = "main"
    algo: str | None = None
    lr: float | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    budget: float = 1.0


@dataclass(frozen=True)
class PreferenceData:
    """What DPO, KTO and the reward model learn from: the start's answers to ``prompts`` training chains.

    ``candidates`` answers each; at most ``per_prompt`` pairs of each, for step-DPO ``steps_per_prompt``.
    """

    prompts: int = 200
    candidates: int = 8
    per_prompt: int = 3
    steps_per_prompt: int = 3


@dataclass(frozen=True)
class RewardModelConfig:
    """The learned reward: pairs of ``prompts`` chains, ``per_prompt`` each, and ``steps`` of Bradley-Terry training."""

    prompts: int = 100
    candidates: int = 8
    per_prompt: int = 6
    steps: int = 60
    training: SftConfig = field(default_factory=SftConfig)


@dataclass(frozen=True)
class TeacherConfig:
    """The larger model that on-policy distillation learns from, and its own pre-training and start."""

    model: DecoderConfig = field(default_factory=DecoderConfig)
    pretraining_steps: int = 1000
    start_steps: int = 100


@dataclass(frozen=True)
class EvaluationConfig:
    """``items`` chains per split, ``samples`` answers each, at the end.

    ``curve_samples`` answers to ``curve_items`` chains at each of ``points`` on the way.
    """

    items: int = 250
    samples: int = 4
    curve_items: int = 250
    curve_samples: int = 2
    points: int = 4
    temperature: float = 1.0


@dataclass(kw_only=True)
class Settings(Common):
    """All keys of the experiment."""

    model: DecoderConfig
    bases: int
    corpus: CorpusConfig
    pretraining: SftConfig
    pretraining_steps: int
    start: SftConfig
    start_steps: int
    start_hinted: float
    start_direct: float
    teacher: TeacherConfig
    train_items: int
    max_new_tokens: int
    episodes_per_step: int
    branch_flops: float
    sft: SftConfig
    rejection: RejectionConfig
    preference: PreferenceData
    reward_model: RewardModelConfig
    evaluation: EvaluationConfig
    branches: dict[str, Branch]

    def check(self) -> None:
        """Raises ConfigError on values that cannot work together."""
        super().check()
        for key in ("bases", "pretraining_steps", "start_steps", "train_items", "max_new_tokens", "episodes_per_step"):
            within(key, getattr(self, key), 1)
        within("branch_flops", self.branch_flops, 0, above=True)
        within("corpus.facts", self.corpus.facts, 0, 1)
        within("corpus.hinted", self.corpus.hinted, 0, 1)
        within("corpus.row_tokens", self.corpus.row_tokens, 16)
        within("corpus.direct", self.corpus.direct, 0, 1)
        for key in ("start_hinted", "start_direct"):
            within(key, getattr(self, key), 0, 1)
        for key in ("prompts", "candidates", "per_prompt"):
            for part in ("preference", "reward_model"):
                within(f"{part}.{key}", getattr(getattr(self, part), key), 1, self.train_items if key == "prompts" else None)
        for key in ("items", "samples", "curve_items", "curve_samples", "points"):
            within(f"evaluation.{key}", getattr(self.evaluation, key), 1)
        for part, model in (("model", self.model), ("teacher.model", self.teacher.model)):
            if model.hidden % model.heads or model.hidden // model.heads % 2:
                raise ConfigError(f"{part}.hidden={model.hidden}: must be an even multiple of {part}.heads={model.heads}.")
        for name, branch in self.branches.items():
            one_of(f"branches.{name}.method", branch.method, METHODS)
            one_of(f"branches.{name}.study", branch.study, ("main", "ablation", "both"))
            within(f"branches.{name}.budget", branch.budget, 0, above=True)
            self.arm_config(name)
        for arm in self.arms or []:
            one_of("arms", arm, self.branches)

    def chosen(self) -> list[str]:
        """The arms of the run: those named, else all of the study."""
        return self.arms or [name for name, branch in self.branches.items() if branch.study in (self.study, "both")]

    def arm_config(self, name: str) -> Any:
        """An arm's method in full: SftConfig, RejectionConfig, AlgoConfig, DistillConfig or the N of best-of-N.

        ConfigError for a key that the method does not have.
        """
        branch, changes = self.branches[name], dict(self.branches[name].changes)
        where = f"branches.{name}.changes"
        if branch.method == "none":
            return build(Empty, changes, where)
        if branch.method == "best_of":
            return build(BestOf, changes, where)
        if branch.method == "sft":
            return self.sft_config(name, changes)
        if branch.method in ("rejection", "star"):
            shared = {**vars(self.rejection), "max_new_tokens": self.max_new_tokens}
            return build(RejectionConfig, {**shared, **changes}, where)
        lr = {} if branch.lr is None else {"lr": branch.lr}
        if branch.method in ("distill", "self_distill"):
            group = changes.get("group_size", DistillConfig.group_size)
            shared = {"max_new_tokens": self.max_new_tokens, "prompts_per_step": self.episodes_per_step // group}
            return build(DistillConfig, {**shared, **lr, **self.typed_rate(name), **changes}, where)
        return self.algo_config(name, {**lr, **changes})

    def sft_config(self, name: str, changes: dict[str, Any] | None = None) -> SftConfig:
        """The supervised configuration of an arm that trains on rows."""
        rate = self.branches[name].lr
        layers = {**vars(self.sft), **({} if rate is None else {"lr": rate}), **self.typed_rate(name), **(changes or {})}
        return build(SftConfig, layers, f"branches.{name}.changes")

    def algo_config(self, name: str, changes: dict[str, Any]) -> AlgoConfig:
        """A policy gradient's or a preference method's preset with the arm's changes and the command line's."""
        branch = self.branches[name]
        preset = PRESETS.get(branch.method) or branch.algo or "grpo"
        typed = self.algo if name in self.chosen() else {}
        algo = load_algo(preset, {"max_new_tokens": self.max_new_tokens}, changes, typed)
        if (algo.name in PREFERENCE_NAMES) != (branch.method in PRESETS):
            raise ConfigError(f"branches.{name}.algo={preset}: does not fit method={branch.method}.")
        own = {**changes, **{key: value for key, value in typed.items() if value is not None}}
        if branch.method in ("dpo", "step_dpo", "kto") or "prompts_per_step" in own:
            return algo
        return replace(algo, prompts_per_step=max(1, self.episodes_per_step // algo.group_size))

    def typed_rate(self, name: str) -> dict[str, float]:
        """algo.lr from the command line, for methods without a policy gradient too."""
        rate = self.algo.get("lr")
        return {"lr": rate} if rate is not None and name in self.chosen() else {}


@dataclass(frozen=True)
class Empty:
    """An arm that trains nothing has no keys."""


@dataclass(frozen=True)
class BestOf:
    """``samples``: answers to each chain, of which the verifier keeps the best."""

    samples: int = 4

    def __post_init__(self) -> None:
        within("best_of.samples", self.samples, 1)
