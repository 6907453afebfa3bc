"""The configuration of on-policy distillation as types; values and their meaning stand in conf/experiment/7-opd/."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from common.backends.verl_distill import Teacher
from common.backends.verl_plan import Cluster
from common.config import AlgoConfig, Common, load_algo
from common.distill import DistillConfig
from common.lora import LoraSettings, learning_rate
from common.models import DecoderConfig
from common.schema import ConfigError, build, one_of, within
from common.sft import SftConfig
from experiments.exp_7_opd_distillation.data import TASKS, CorpusConfig

METHODS = ("none", "sft", "policy_gradient", "distill")
CREDIT = ("all", "until_fault")
TEACHERS = ("wide", "narrow")


@dataclass(frozen=True)
class Branch:
    """What an arm does after the start of its task.

    ``few``: only the task's ``few_items`` training prompts. ``credit``: until_fault trains on tokens up to the first failed
    check (chains alone), and a policy gradient then also earns half of its reward for the share of steps before it.
    ``teacher``: narrow never saw a game that needed mending. ``changes``: keys of the method's own configuration.
    """

    task: str
    method: str
    study: str = "main"
    algo: str | None = None
    lr: float | None = None
    few: bool = False
    credit: str = "all"
    teacher: str = "wide"
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskConfig:
    """One task: shapes and pre-training steps of student and teachers, training prompts, the budget of an arm.

    ``samples``: the teacher's answers to each training prompt in SFT's pool, ``few_samples`` to each of the few.
    ``curve_steps``: optimizer steps after which success is measured.
    """

    student: DecoderConfig = field(default_factory=DecoderConfig)
    teacher: DecoderConfig = field(default_factory=DecoderConfig)
    student_steps: int = 100
    teacher_steps: int = 1000
    narrow_steps: int = 0
    train_items: int = 400
    samples: int = 1
    few_items: int = 16
    few_samples: int = 8
    max_new_tokens: int = 32
    episodes_per_step: int = 128
    branch_flops: float = 2e11
    curve_steps: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class EvaluationConfig:
    """``items`` tasks of each length and ``samples`` episodes of each at the end; ``curve_items`` of all trained lengths
    together on the way, ``percents`` of the budget at which they are measured too."""

    items: int = 100
    samples: int = 2
    curve_items: int = 160
    percents: list[int] = field(default_factory=list)
    temperature: float = 1.0


@dataclass(kw_only=True)
class Settings(Common):
    """All keys of the experiment."""

    model_path: str | None
    teacher_path: str | None
    lora: LoraSettings
    corpus: CorpusConfig
    student_corpus: CorpusConfig
    narrow_corpus: CorpusConfig
    pretraining: SftConfig
    chain: TaskConfig
    dial: TaskConfig
    sft: SftConfig
    evaluation: EvaluationConfig
    branches: dict[str, Branch]
    cluster: Cluster | None = None
    judge: Teacher | None = None
    dry: bool = False

    def check(self) -> None:
        """Raises ConfigError on values that cannot work together."""
        super().check()
        self.check_paths()
        for name in TASKS:
            task: TaskConfig = getattr(self, name)
            for key in ("student_steps", "teacher_steps", "train_items", "samples", "few_samples", "max_new_tokens"):
                within(f"{name}.{key}", getattr(task, key), 1)
            within(f"{name}.few_items", task.few_items, 1, task.train_items)
            within(f"{name}.branch_flops", task.branch_flops, 0, above=True)
        for part in ("corpus", "student_corpus", "narrow_corpus"):
            longest = self.dial.teacher.max_length if self.model_path is None else None
            within(f"{part}.row_tokens", getattr(self, part).row_tokens, 16, longest)
            within(f"{part}.noise", getattr(self, part).noise, 0, 0.9)
        for key in ("items", "samples", "curve_items"):
            within(f"evaluation.{key}", getattr(self.evaluation, key), 1)
        shapes = [(f"{task}.{who}", getattr(getattr(self, task), who)) for task in TASKS for who in ("student", "teacher")]
        for part, model in shapes:
            if model.hidden % model.heads or model.hidden // model.heads % 2:
                raise ConfigError(f"{part}.hidden={model.hidden}: must be an even multiple of {part}.heads={model.heads}.")
        for name, branch in self.branches.items():
            one_of(f"branches.{name}.task", branch.task, TASKS)
            one_of(f"branches.{name}.method", branch.method, METHODS)
            one_of(f"branches.{name}.study", branch.study, ("main", "ablation", "both"))
            one_of(f"branches.{name}.credit", branch.credit, CREDIT)
            one_of(f"branches.{name}.teacher", branch.teacher, TEACHERS)
            if branch.credit == "until_fault" and branch.task != "chain":
                raise ConfigError(f"branches.{name}.credit=until_fault: only task=chain has a first failed check.")
            if branch.teacher == "narrow" and self.task_config(name).narrow_steps < 1:
                raise ConfigError(f"branches.{name}.teacher=narrow: needs {branch.task}.narrow_steps of at least 1.")
            self.arm_config(name)
        for arm in self.arms or []:
            one_of("arms", arm, self.branches)

    def check_paths(self) -> None:
        """A pre-trained student needs a pre-trained teacher, and the other way round."""
        if (self.model_path is None) != (self.teacher_path is None):
            raise ConfigError(
                f"model_path={self.model_path} with teacher_path={self.teacher_path}: name both student and teacher, "
                "which must share a tokenizer, or neither."
            )
        if self.scale in ("gpu", "cluster") and self.model_path is None:
            raise ConfigError(
                f"model_path=null: scale={self.scale} needs a local model folder or a hub name, model_path=<folder>."
            )

    def chosen(self) -> list[str]:
        """The arms of the run: those named, else all of the study."""
        return self.arms or [name for name, branch in self.branches.items() if branch.study in (self.study, "both")]

    def task_config(self, arm: str) -> TaskConfig:
        """The configuration of an arm's task."""
        task: TaskConfig = getattr(self, self.branches[arm].task)
        return task

    def arm_config(self, name: str) -> SftConfig | AlgoConfig | DistillConfig | None:
        """An arm's method in full; ConfigError for a key that the method does not have."""
        branch, task = self.branches[name], self.task_config(name)
        where = f"branches.{name}.changes"
        typed = {key: value for key, value in self.algo.items() if value is not None and name in self.chosen()}
        own = None if branch.lr is None else learning_rate(branch.lr, self.lora)
        rate = typed.get("lr", own)
        lr = {} if rate is None else {"lr": rate}
        turns = TASKS[branch.task].turn_limit(max(TASKS[branch.task].TRAINED))
        played = {"max_new_tokens": task.max_new_tokens, "max_turns": turns}
        if branch.method == "none":
            return None
        if branch.method == "sft":
            return build(SftConfig, {**vars(self.sft), **branch.changes, **lr}, where)
        if branch.method == "distill":
            group = branch.changes.get("group_size", DistillConfig.group_size)
            shared = {**played, "prompts_per_step": max(1, task.episodes_per_step // group)}
            return build(DistillConfig, {**shared, **branch.changes, **lr}, where)
        algo = load_algo(branch.algo or "grpo", played, branch.changes, lr, typed)
        if "prompts_per_step" in {*branch.changes, *typed}:
            return algo
        return replace(algo, prompts_per_step=max(1, task.episodes_per_step // algo.group_size))
