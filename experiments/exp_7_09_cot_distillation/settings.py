"""The configuration of the experiment as types; values and their meaning stand in conf/experiment/7-9/."""

from dataclasses import dataclass, field, replace
from typing import Any

from common.config import AlgoConfig, Common, load_algo
from common.models import DecoderConfig
from common.rejection import RejectionConfig
from common.schema import ConfigError, build, one_of, within
from common.sft import SftConfig
from experiments.exp_7_09_cot_distillation.data import CorpusConfig
from experiments.exp_7_09_cot_distillation.selection import Selection
from experiments.exp_7_09_cot_distillation.traces import STYLES

METHODS = ("none", "teacher", "distill", "rejection", "grpo")


@dataclass(frozen=True)
class ModelConfig:
    """A model and the documents that it is pre-trained on, from nothing or from the teacher that ``base`` names."""

    model: DecoderConfig
    corpus: CorpusConfig
    pretraining_steps: int
    base: str | None = None


@dataclass(frozen=True)
class Branch:
    """An arm. ``model``: the student that it starts from, or the teacher that is measured. ``select``: what is learnt from.

    ``changes``: keys of rejection sampling or of the policy gradient. ``budget``: multiple of branch_flops.
    """

    method: str
    study: str = "main"
    model: str = "student"
    lr: float | None = None
    select: Selection = field(default_factory=Selection)
    changes: dict[str, Any] = field(default_factory=dict)
    budget: float = 1.0


@dataclass(frozen=True)
class EvaluationConfig:
    """``items`` problems per split, ``samples`` answers each; ``imitation_samples`` on the problems that the teacher got
    wrong."""

    items: int = 200
    samples: int = 2
    imitation_samples: int = 4
    temperature: float = 1.0


@dataclass(kw_only=True)
class Settings(Common):
    """All keys of the experiment."""

    students: dict[str, ModelConfig]
    teachers: dict[str, ModelConfig]
    pretraining: SftConfig
    train_items: int
    answers_per_item: int
    teacher_temperature: float
    max_new_tokens: int
    branch_flops: float
    sft: SftConfig
    rejection: RejectionConfig
    episodes_per_step: int
    evaluation: EvaluationConfig
    branches: dict[str, Branch]

    def check(self) -> None:
        """Raises ConfigError on values that cannot work together."""
        super().check()
        for key in ("train_items", "answers_per_item", "max_new_tokens", "episodes_per_step"):
            within(key, getattr(self, key), 1)
        for key in ("branch_flops", "teacher_temperature"):
            within(key, getattr(self, key), 0, above=True)
        for key in ("items", "samples", "imitation_samples"):
            within(f"evaluation.{key}", getattr(self.evaluation, key), 1)
        for kind in ("students", "teachers"):
            for name, config in getattr(self, kind).items():
                self.check_model(f"{kind}.{name}", config)
        for name, branch in self.branches.items():
            self.check_branch(name, branch)
        for arm in self.arms or []:
            one_of("arms", arm, self.branches)

    def check_model(self, where: str, config: ModelConfig) -> None:
        """Shape and documents of one model."""
        shape, corpus = config.model, config.corpus
        if shape.hidden % shape.heads or shape.hidden // shape.heads % 2:
            raise ConfigError(f"{where}.model.hidden={shape.hidden}: must be an even multiple of heads={shape.heads}.")
        one_of(f"{where}.corpus.style", corpus.style, STYLES)
        for key in ("facts", "checked", "direct", "texts"):
            within(f"{where}.corpus.{key}", getattr(corpus, key), 0, 1)
        for key in ("slip", "check", "look"):
            within(f"{where}.corpus.habits.{key}", getattr(corpus.habits, key), 0, 1)
        within(f"{where}.corpus.row_tokens", corpus.row_tokens, 16)
        within(f"{where}.pretraining_steps", config.pretraining_steps, 1)
        if config.base is not None:
            first = [name for name, other in self.teachers.items() if other.base is None and other is not config]
            one_of(f"{where}.base", config.base, ["null", *first])
            if self.teachers[config.base].model != shape:
                raise ConfigError(f"{where}.base={config.base}: a model goes on from one of its own shape.")

    def check_branch(self, name: str, branch: Branch) -> None:
        """One arm: its words, its numbers, and that its method has the keys it changes."""
        where = f"branches.{name}"
        one_of(f"{where}.method", branch.method, METHODS)
        one_of(f"{where}.study", branch.study, ("main", "ablation", "both"))
        one_of(f"{where}.model", branch.model, self.teachers if branch.method == "teacher" else self.students)
        within(f"{where}.budget", branch.budget, 0, above=True)
        for teacher in branch.select.teachers:
            one_of(f"{where}.select.teachers", teacher, self.teachers)
        within(f"{where}.select.candidates", branch.select.candidates, 1, self.answers_per_item * len(branch.select.teachers))
        if branch.select.candidates % len(branch.select.teachers):
            raise ConfigError(f"{where}.select.candidates={branch.select.candidates}: must divide among its teachers.")
        if branch.method == "rejection":
            self.rejection_config(name)
        elif branch.method == "grpo":
            self.grpo_config(name)
        elif branch.changes:
            raise ConfigError(f"{where}.changes={branch.changes}: method={branch.method} has no keys to change.")

    def chosen(self) -> list[str]:
        """The arms of the run: those named, else all of the study."""
        return self.arms or [name for name, branch in self.branches.items() if branch.study in (self.study, "both")]

    def rate(self, name: str) -> dict[str, float]:
        """The arm's learning rate, or that of the command line, as a key; empty where neither is given."""
        typed, own = (self.algo.get("lr") if name in self.chosen() else None), self.branches[name].lr
        return {"lr": typed} if typed is not None else {} if own is None else {"lr": own}

    def sft_config(self, name: str) -> SftConfig:
        """How an arm trains on rows."""
        return replace(self.sft, **self.rate(name))

    def rejection_config(self, name: str) -> RejectionConfig:
        """How an arm samples and filters its own answers."""
        shared = {**vars(self.rejection), "max_new_tokens": self.max_new_tokens}
        return build(RejectionConfig, {**shared, **self.branches[name].changes}, f"branches.{name}.changes")

    def grpo_config(self, name: str) -> AlgoConfig:
        """The policy gradient of an arm."""
        typed = self.algo if name in self.chosen() else {}
        algo = load_algo(
            "grpo", {"max_new_tokens": self.max_new_tokens}, {**self.rate(name), **self.branches[name].changes}, typed
        )
        return replace(algo, prompts_per_step=max(1, self.episodes_per_step // algo.group_size))
