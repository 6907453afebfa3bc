"""The configuration of the experiment as types; values and their meaning stand in conf/experiment/7-10/."""

from dataclasses import dataclass, field
from typing import Any

from common.adaptthink import AdaptThinkConfig
from common.config import AlgoConfig, Common, load_algo
from common.lora import LoraSettings, learning_rate
from common.models import DecoderConfig
from common.modes import MODES
from common.schema import ConfigError, build, one_of, within
from common.sft import SftConfig
from experiments.exp_7_10_adaptthink import chains

METHODS = ("none", "adaptthink", "grpo", "router", "routed")


@dataclass(frozen=True)
class Branch:
    """What an arm does after the start. ``mode``: how it answers when measured. ``answer_tokens``: of a NoThinking answer.

    ``skips``: how often its start skips thinking, in place of start_skips. ``levels``: trains on these alone. ``level_curves``:
    records the learning curve of every level. ``router_delta``: a router skips thinking on levels where that costs the start
    less.

    ``changes``: keys of the method's own configuration. ``lr`` stands apart because validation chooses it. ``budget``:
    multiple of branch_flops.
    """

    method: str
    study: str = "main"
    mode: str = "free"
    answer_tokens: int = 8
    skips: float | None = None
    levels: list[int] = field(default_factory=list)
    level_curves: bool = False
    router_delta: float = 0.05
    lr: float | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    budget: float = 1.0


@dataclass(frozen=True)
class ProblemFiles:
    """Problems with a text answer in place of the generated chains: files or hub names, see problems.py."""

    train: str
    test: dict[str, str]
    answer_format: str = ""
    skip_bad_answers: bool = False


@dataclass(frozen=True)
class EvaluationConfig:
    """``items`` tasks per split. At the end ``samples`` answers to each, and ``forced_samples`` in each forced mode;

    along the way ``curve_samples`` to ``curve_items`` at each of ``points``.
    """

    items: int = 40
    samples: int = 6
    forced_samples: int = 3
    curve_items: int = 20
    curve_samples: int = 2
    points: int = 10


@dataclass(kw_only=True)
class Settings(Common):
    """All keys of the experiment."""

    model: DecoderConfig
    model_path: str | None
    chat_template: str | None
    lora: LoraSettings
    problems: ProblemFiles | None
    bases: int
    pretraining: SftConfig
    pretraining_steps: int
    pretraining_growth: float
    pretraining_direct: list[float]
    pretraining_slips: float
    start: SftConfig
    start_steps: int
    start_skips: float
    train_items: int
    reference_samples: int
    temperature: float
    max_new_tokens: int
    sample_batch: int
    branch_flops: float
    adaptthink: dict[str, Any]
    length_penalty: float
    evaluation: EvaluationConfig
    branches: dict[str, Branch]

    def check(self) -> None:
        """Raises ConfigError on values that cannot work together."""
        super().check()
        counts = ("bases", "pretraining_steps", "start_steps", "train_items", "reference_samples")
        for key in (*counts, "max_new_tokens", "sample_batch"):
            within(key, getattr(self, key), 1)
        within("temperature", self.temperature, 0, above=True)
        within("branch_flops", self.branch_flops, 0, above=True)
        for key in ("pretraining_growth", "pretraining_slips", "start_skips", "length_penalty"):
            within(key, getattr(self, key), 0, 1)
        if len(self.pretraining_direct) != len(chains.CORPUS_LEVELS):
            raise ConfigError(
                f"pretraining_direct={self.pretraining_direct}: needs one share for each of {chains.CORPUS_LEVELS}."
            )
        for index, share in enumerate(self.pretraining_direct):
            within(f"pretraining_direct[{index}]", share, 0, 1)
        for key in ("items", "samples", "forced_samples", "curve_items", "curve_samples", "points"):
            within(f"evaluation.{key}", getattr(self.evaluation, key), 1)
        if self.model.hidden % self.model.heads or self.model.hidden // self.model.heads % 2:
            raise ConfigError(f"model.hidden={self.model.hidden}: must be an even multiple of model.heads={self.model.heads}.")
        if (self.problems is None) != (self.model_path is None):
            raise ConfigError(
                f"model_path={self.model_path} with problems={'null' if self.problems is None else 'set'}: a pre-trained model "
                "needs problems of its own, and the generated chains need the tiny model; set both or neither."
            )
        for name, branch in self.branches.items():
            one_of(f"branches.{name}.method", branch.method, METHODS)
            one_of(f"branches.{name}.study", branch.study, ("main", "ablation", "both"))
            one_of(f"branches.{name}.mode", branch.mode, MODES)
            one_of(f"branches.{name}.answer_tokens", branch.answer_tokens, chains.ANSWERS)
            within(f"branches.{name}.budget", branch.budget, 0, above=True)
            within(f"branches.{name}.router_delta", branch.router_delta, 0, 1)
            for level in branch.levels:
                one_of(f"branches.{name}.levels", level, chains.LEVELS)
            self.arm_config(name)
        for arm in self.arms or []:
            one_of("arms", arm, self.branches)
        for name in self.chosen() if self.problems is not None else ():
            if self.branches[name].levels:
                raise ConfigError(
                    f"arms={name}: trains on levels of the generated chains alone; problems have none, leave it out."
                )

    def chosen(self) -> list[str]:
        """The arms of the run: those named, else all of the study."""
        return self.arms or [name for name, branch in self.branches.items() if branch.study in (self.study, "both")]

    def arm_config(self, name: str) -> Any:
        """An arm's method in full: AdaptThinkConfig, or the AlgoConfig of GRPO or DPO. ConfigError for unknown keys."""
        branch, where = self.branches[name], f"branches.{name}.changes"
        lr = {} if branch.lr is None else {"lr": learning_rate(branch.lr, self.lora)}
        sampling = {key: getattr(self, key) for key in ("max_new_tokens", "sample_batch", "temperature")}
        shared = {**sampling, **self.adaptthink}
        if branch.method in ("none", "routed"):
            if branch.changes:
                raise ConfigError(f"{where}: method={branch.method} has no keys to change.")
            return None
        if branch.method == "adaptthink":
            return build(AdaptThinkConfig, {**shared, **lr, **self.typed(AdaptThinkConfig, name), **branch.changes}, where)
        if branch.method == "router":
            return load_algo("dpo", lr, branch.changes)
        known = {
            key: shared[key] for key in ("prompts_per_step", "group_size", "max_new_tokens", "temperature") if key in shared
        }
        return load_algo("grpo", known, lr, branch.changes, self.algo if name in self.chosen() else {})

    def typed(self, kind: type, name: str) -> dict[str, Any]:
        """Keys of `algo` from the command line that the method has too, such as algo.lr."""
        known = set(kind.__dataclass_fields__) if name in self.chosen() else set()  # type: ignore[attr-defined]
        return {key: value for key, value in self.algo.items() if value is not None and key in known}


__all__ = ["AlgoConfig", "Branch", "EvaluationConfig", "ProblemFiles", "Settings"]
