"""The configuration of AWorld as types; values and their meaning stand in conf/experiment/7-16/."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from common.algo import AlgoConfig, load_algo
from common.backends.verl_plan import Cluster
from common.config import Common
from common.lora import LoraSettings, learning_rate
from common.models import DecoderConfig
from common.schema import ConfigError, build, one_of, within
from common.sft import SftConfig
from experiments.exp_7_16_aworld.data import SPLITS
from experiments.exp_7_16_aworld.desk import Patience, conditions_of
from experiments.exp_7_16_aworld.protocol import SYNTAXES
from experiments.exp_7_16_aworld.scripts import Mix
from experiments.exp_7_16_aworld.servers import SERVERS

METHODS = ("none", "sft", "grpo", "pace", "clients")
TOOLS = ("servers", "local", "record", "replay")


@dataclass(frozen=True)
class WorldCounts:
    """Worlds of each split that are used."""

    start: int = 12
    train: int = 6
    validation: int = 2
    test: int = 2


@dataclass(frozen=True)
class Branch:
    """What an arm does after the start. ``study``: named runs only where `arms` names it.

    ``changes``: keys of the method's configuration. ``price``: reward lost per unit of cost. ``steady``: no conditions.
    """

    method: str
    study: str = "main"
    algo: str = "grpo"
    lr: float | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    price: float = 0.0
    steady: bool = False
    budget: float = 1.0


@dataclass(frozen=True)
class EvaluationConfig:
    """``questions``: of the test (or validation) worlds, ``samples`` episodes of each; ``curve_questions`` once at each of
    ``points`` on the way."""

    questions: int = 60
    samples: int = 4
    temperature: float = 0.7
    curve_questions: int = 60
    points: int = 4


@dataclass(frozen=True)
class Pace:
    """How rollouts are timed: mean latency of a call, episodes at once, episodes one at a time, steps of GRPO."""

    latency_s: float = 0.2
    together: int = 64
    alone: int = 8
    steps: int = 2

    def __post_init__(self) -> None:
        for key in ("together", "alone", "steps"):
            within(f"pace.{key}", getattr(self, key), 1)


@dataclass(kw_only=True)
class Settings(Common):
    """All keys of the experiment."""

    model: DecoderConfig
    model_path: str | None
    lora: LoraSettings
    max_new_tokens: int
    syntax: str
    bases: int
    worlds: WorldCounts
    start_scripts: int
    start_steps: int
    start_mix: Mix
    start_training: SftConfig
    tools: str
    store: str | None
    conditions: dict[str, dict[str, Any]]
    patience: Patience
    served: list[str] | None
    slack: int
    turns: int
    rl: dict[str, Any]
    flops: float
    sft: SftConfig
    sft_scripts: int
    evaluation: EvaluationConfig
    pace: Pace
    branches: dict[str, Branch]
    cluster: Cluster | None = None
    dry: bool = False

    def check(self) -> None:
        """Raises ConfigError on values that cannot work together."""
        super().check()
        one_of("syntax", self.syntax, SYNTAXES)
        one_of("tools", self.tools, TOOLS)
        if (self.store is None) == (self.tools in ("record", "replay")):
            raise ConfigError(f"tools={self.tools} store={self.store}: record and replay need a file, others take none.")
        for key in ("bases", "start_scripts", "start_steps", "max_new_tokens", "turns", "sft_scripts"):
            within(key, getattr(self, key), 1)
        within("slack", self.slack, 0)
        within("flops", self.flops, 0, above=True)
        for split, numbers in SPLITS.items():
            within(f"worlds.{split}", getattr(self.worlds, split), 1, len(numbers))
        for server in self.conditions:
            one_of("conditions", server, ("all", *SERVERS))
        for server in self.served or []:
            one_of("served", server, SERVERS)
        for server in SERVERS:
            try:
                conditions_of(self.conditions, server)
            except ValueError as error:
                raise ConfigError(str(error)) from error
        for key in ("questions", "samples", "curve_questions", "points"):
            within(f"evaluation.{key}", getattr(self.evaluation, key), 1)
        for name, branch in self.branches.items():
            one_of(f"branches.{name}.method", branch.method, METHODS)
            one_of(f"branches.{name}.study", branch.study, ("main", "ablation", "both", "named"))
            within(f"branches.{name}.budget", branch.budget, 0, above=True)
            within(f"branches.{name}.price", branch.price, 0)
            self.arm_config(name)
        for arm in self.arms or []:
            one_of("arms", arm, self.branches)
        for arm in self.chosen():
            method = self.branches[arm].method
            if self.model_path is not None and method == "sft":
                raise ConfigError(f"arms={arm}: scripts are in the language of the tiny models; not with a model_path.")
            if method in ("pace", "clients") and self.tools != "servers":
                raise ConfigError(f"arms={arm} tools={self.tools}: it measures servers; set tools=servers.")

    def chosen(self) -> list[str]:
        """The arms of the run: those named, else all of the study."""
        return self.arms or [name for name, branch in self.branches.items() if branch.study in (self.study, "both")]

    def env_options(self, price: float = 0.0) -> dict[str, Any]:
        """Keyword arguments of the environment."""
        return {"syntax": self.syntax, "slack": self.slack, "limit": self.turns, "price": price}

    def arm_config(self, name: str) -> SftConfig | AlgoConfig:
        """An arm's method in full. ConfigError for a key that the method does not have."""
        branch, typed = self.branches[name], self.algo if name in self.chosen() else {}
        lr = typed["lr"] if typed.get("lr") is not None else branch.lr
        rate = {} if lr is None else {"lr": learning_rate(lr, self.lora)}
        if branch.method == "sft":
            return build(SftConfig, {**vars(self.sft), **rate, **branch.changes}, f"branches.{name}.changes")
        fixed = {"max_turns": self.turns, "max_new_tokens": self.max_new_tokens}
        return load_algo(branch.algo, self.rl, fixed, rate, branch.changes, typed)
