"""The configuration of prompt distillation as types; values and their meaning stand in conf/experiment/7-8/."""

from dataclasses import dataclass, field
from typing import Any

from common.config import Common
from common.distill import DistillConfig
from common.lora import LoraSettings
from common.models import DecoderConfig
from common.schema import ConfigError, build, one_of, within
from common.sft import SftConfig
from common.teacher_server import ServerConfig
from experiments.exp_7_08_prompt_distillation import rules
from experiments.exp_7_08_prompt_distillation.data import CorpusConfig


@dataclass(frozen=True)
class Branch:
    """An arm: which model, what it learns from, and how it is asked in the end.

    ``model``: base (the teacher's weights) or small. ``method``: none, sft, distill (on-policy, the prompt as privileged
    context). ``labels``: of training, teacher or gold. ``thought``: the teacher's thinking is kept in the training rows
    (sft) or put before the teacher's judgement (distill). ``inputs``: training texts, None: all. ``after``: the arm whose
    student it goes on from. ``changed``: it learns the changed rules. ``prompted``, ``think``: how it is asked.
    ``on_changed``: measured under the changed rules too. ``timed``: measured on the clock beside the teacher. ``budget``:
    multiple of student_tokens.
    """

    method: str
    model: str = "base"
    study: str = "main"
    labels: str = "teacher"
    thought: bool = False
    inputs: int | None = None
    after: str | None = None
    changed: bool = False
    prompted: bool = False
    think: bool = False
    on_changed: bool = False
    timed: bool = False
    lr: float | None = None
    budget: float = 1.0
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SamplingConfig:
    """How teacher and students are asked."""

    temperature: float = 0.15
    top_p: float = 0.8
    max_new_tokens: int = 32
    batch_size: int = 256


@dataclass(frozen=True)
class EvaluationConfig:
    """``items``: texts of a split. ``permutations``: of the teacher's errors. ``timed``: texts answered one by one on the
    clock, and ``timed_batch`` at once, ``repeats`` times each in turns."""

    items: int = 500
    permutations: int = 1000
    timed: int = 20
    timed_batch: int = 128
    repeats: int = 3


@dataclass(kw_only=True)
class Settings(Common):
    """All keys of the experiment."""

    model_path: str | None
    small_path: str | None
    sentences: str | None
    prompt_file: str | None
    teacher: str
    server: ServerConfig
    lora: LoraSettings
    model: DecoderConfig
    small: DecoderConfig
    bases: int
    corpus: CorpusConfig
    pretraining: SftConfig
    pretraining_steps: int
    small_steps: int
    inputs: int
    changed_share: float
    sampling: SamplingConfig
    sft: SftConfig
    student_tokens: float
    evaluation: EvaluationConfig
    branches: dict[str, Branch]

    def check(self) -> None:
        """Raises ConfigError on values that cannot work together."""
        super().check()
        for key in ("bases", "pretraining_steps", "small_steps", "inputs"):
            within(key, getattr(self, key), 1)
        within("student_tokens", self.student_tokens, 0, above=True)
        within("changed_share", self.changed_share, 0, 1, above=True)
        one_of("teacher", self.teacher, ("local", "server"))
        for key in ("items", "permutations", "timed", "timed_batch", "repeats"):
            within(f"evaluation.{key}", getattr(self.evaluation, key), 1)
        for key in ("max_new_tokens", "batch_size"):
            within(f"sampling.{key}", getattr(self.sampling, key), 1)
        within("corpus.smallest", self.corpus.smallest, 2 * rules.LENGTH, rules.VOCABULARY)
        for key in ("direct", "curriculum"):
            within(f"corpus.{key}", getattr(self.corpus, key), 0, 1)
        for part, model in (("model", self.model), ("small", self.small)):
            if model.hidden % model.heads or model.hidden // model.heads % 2:
                raise ConfigError(f"{part}.hidden={model.hidden}: must be an even multiple of {part}.heads={model.heads}.")
        self.check_paths()
        for name in self.branches:
            self.check_branch(name)
        for arm in self.arms or []:
            one_of("arms", arm, self.branches)

    @property
    def real(self) -> bool:
        """Pre-trained models and a reader's sentences instead of tiny models and rule tables."""
        return self.model_path is not None

    def check_paths(self) -> None:
        """A pre-trained teacher needs sentences and a student; a tiny one has texts of its own."""
        if self.scale == "gpu" and not self.real:
            raise ConfigError("model_path=null: scale=gpu needs the teacher's folder or hub name, model_path=<folder>.")
        if self.real and (self.sentences is None or self.small_path is None):
            raise ConfigError(
                f"model_path={self.model_path}: it needs sentences=<file> (a line each, label<TAB>sentence or the sentence "
                "alone) and small_path=<folder or hub name> of the student."
            )
        if not self.real and (self.sentences or self.small_path or self.teacher == "server"):
            raise ConfigError(
                "model_path=null: sentences, small_path and teacher=server need a pre-trained model, model_path=..."
            )

    def check_branch(self, name: str) -> None:
        """One arm's keys."""
        branch, where = self.branches[name], f"branches.{name}"
        one_of(f"{where}.method", branch.method, ("none", "sft", "distill"))
        one_of(f"{where}.model", branch.model, ("base", "small"))
        one_of(f"{where}.study", branch.study, ("main", "ablation", "both"))
        one_of(f"{where}.labels", branch.labels, ("teacher", "gold"))
        within(f"{where}.budget", branch.budget, 0, above=True)
        if branch.inputs is not None and name in self.chosen():
            within(f"{where}.inputs", branch.inputs, 1, self.inputs)
        if branch.after is not None:
            one_of(f"{where}.after", branch.after, self.branches)
            first = self.branches[branch.after]
            if first.method != "sft" or first.model != branch.model or first.after is not None:
                raise ConfigError(f"{where}.after={branch.after}: must name an arm of method=sft on the same model.")
        if self.real and name in self.chosen() and (branch.changed or branch.method == "distill" or branch.thought):
            raise ConfigError(f"arms: {name} needs the rule tables, which have no place beside model_path={self.model_path}.")
        if branch.changed and not branch.on_changed:
            raise ConfigError(f"{where}.changed=true: it must be measured on what it learns, {where}.on_changed=true.")
        self.sft_config(name)
        if branch.method == "distill":
            self.distill_config(name)

    def chosen(self) -> list[str]:
        """The arms of the run: those named, else all of the study."""
        return self.arms or [name for name, branch in self.branches.items() if branch.study in (self.study, "both")]

    def rate(self, name: str) -> dict[str, float]:
        """The arm's learning rate, or algo.lr of the command line."""
        typed = self.algo.get("lr") if name in self.chosen() else None
        rate = typed or self.branches[name].lr
        return {} if rate is None else {"lr": rate}

    def sft_config(self, name: str) -> SftConfig:
        """The supervised configuration of an arm."""
        changes = self.branches[name].changes if self.branches[name].method == "sft" else {}
        return build(SftConfig, {**vars(self.sft), **self.rate(name), **changes}, f"branches.{name}.changes")

    def distill_config(self, name: str) -> DistillConfig:
        """The on-policy configuration of an arm; its answers are a label and the end."""
        own = {"max_new_tokens": 4, "group_size": 1, **self.rate(name), **self.branches[name].changes}
        return build(DistillConfig, own, f"branches.{name}.changes")
