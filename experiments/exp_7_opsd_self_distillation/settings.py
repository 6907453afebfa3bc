"""The configuration of on-policy self-distillation as types; values and their meaning stand in conf/experiment/7-opsd/."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from common.config import AlgoConfig, Common, load_algo
from common.distill import DistillConfig
from common.lora import LoraSettings, learning_rate
from common.models import DecoderConfig
from common.schema import ConfigError, build, one_of, within
from common.sft import SftConfig
from experiments.exp_7_opsd_self_distillation.data import STYLES, CorpusConfig
from experiments.exp_7_opsd_self_distillation.tasks import KINDS, SHOWN

METHODS = ("none", "sft", "policy_gradient", "self_distill")


@dataclass(frozen=True)
class Branch:
    """What an arm does after its base, on one kind of task.

    ``shown``: what the self-teacher sees beyond the question. ``style``: the base's worked answers next to an answer or a
    solution, smooth or plain. ``changes``: keys of the method's own configuration.
    """

    kind: str
    method: str
    study: str = "main"
    algo: str | None = None
    lr: float | None = None
    shown: str = "nothing"
    style: str = "smooth"
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationConfig:
    """``items`` tasks of a split and ``samples`` answers to each at the end; ``curve_items`` tasks, one answer each, after
    the optimizer steps ``curve_steps``."""

    items: int = 200
    samples: int = 2
    curve_items: int = 200
    curve_steps: list[int] = field(default_factory=list)
    temperature: float = 1.0


@dataclass(kw_only=True)
class Settings(Common):
    """All keys of the experiment."""

    model_path: str | None
    lora: LoraSettings
    model: DecoderConfig
    bases: int
    corpus: CorpusConfig
    pretraining: SftConfig
    pretraining_steps: int
    train_items: int
    max_new_tokens: int
    episodes_per_step: int
    branch_flops: float
    sft: SftConfig
    evaluation: EvaluationConfig
    branches: dict[str, Branch]

    def check(self) -> None:
        """Raises ConfigError on values that cannot work together."""
        super().check()
        for key in ("bases", "pretraining_steps", "train_items", "max_new_tokens", "episodes_per_step"):
            within(key, getattr(self, key), 1)
        within("branch_flops", self.branch_flops, 0, above=True)
        if self.scale == "gpu" and self.model_path is None:
            raise ConfigError("model_path=null: scale=gpu needs a local model folder or a hub name, model_path=<folder>.")
        within("corpus.row_tokens", self.corpus.row_tokens, 48, self.model.max_length if self.model_path is None else None)
        for key in ("slip", "recheck"):
            within(f"corpus.{key}", getattr(self.corpus, key), 0, 0.9)
        one_of("corpus.style", self.corpus.style, STYLES)
        for name in self.corpus.shares:
            kind, _, shown = name.partition("/")
            one_of("corpus.shares", kind, KINDS)
            one_of("corpus.shares", shown, SHOWN)
        for key in ("items", "samples", "curve_items"):
            within(f"evaluation.{key}", getattr(self.evaluation, key), 1)
        if self.model.hidden % self.model.heads or self.model.hidden // self.model.heads % 2:
            raise ConfigError(f"model.hidden={self.model.hidden}: must be an even multiple of model.heads={self.model.heads}.")
        for name, branch in self.branches.items():
            one_of(f"branches.{name}.kind", branch.kind, KINDS)
            one_of(f"branches.{name}.method", branch.method, METHODS)
            one_of(f"branches.{name}.study", branch.study, ("main", "ablation", "both"))
            one_of(f"branches.{name}.shown", branch.shown, SHOWN)
            one_of(f"branches.{name}.style", branch.style, STYLES)
            if branch.method == "self_distill" and branch.shown == "nothing":
                raise ConfigError(f"branches.{name}.shown=nothing: a self-teacher must see more than the student.")
            if branch.shown != "nothing" and f"{branch.kind}/{branch.shown}" not in self.corpus.shares:
                known = ", ".join(self.corpus.shares)
                raise ConfigError(
                    f"branches.{name}.shown={branch.shown}: the corpus holds no such text of its kind, only {known}."
                )
            self.arm_config(name)
        for arm in self.arms or []:
            one_of("arms", arm, self.branches)

    def chosen(self) -> list[str]:
        """The arms of the run: those named, else all of the study."""
        return self.arms or [name for name, branch in self.branches.items() if branch.study in (self.study, "both")]

    def arm_config(self, name: str) -> SftConfig | AlgoConfig | DistillConfig | None:
        """An arm's method in full; ConfigError for a key that the method does not have."""
        branch = self.branches[name]
        where = f"branches.{name}.changes"
        typed = {key: value for key, value in self.algo.items() if value is not None and name in self.chosen()}
        own = None if branch.lr is None else learning_rate(branch.lr, self.lora)
        rate = typed.get("lr", own)
        lr = {} if rate is None else {"lr": rate}
        if branch.method == "none":
            return None
        if branch.method == "sft":
            return build(SftConfig, {**vars(self.sft), **branch.changes, **lr}, where)
        if branch.method == "self_distill":
            group = branch.changes.get("group_size", DistillConfig.group_size)
            shared = {"max_new_tokens": self.max_new_tokens, "prompts_per_step": max(1, self.episodes_per_step // group)}
            return build(DistillConfig, {**shared, **branch.changes, **lr}, where)
        algo = load_algo(branch.algo or "grpo", {"max_new_tokens": self.max_new_tokens}, branch.changes, lr, typed)
        if "prompts_per_step" in {*branch.changes, *typed}:
            return algo
        return replace(algo, prompts_per_step=max(1, self.episodes_per_step // algo.group_size))
