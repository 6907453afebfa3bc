"""The configuration of 7-1 as types; values and their meaning stand in conf/experiment/7-1/."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from common.config import Common
from common.schema import ConfigError, build, one_of, within
from experiments.exp_7_01_q_learning import world
from experiments.exp_7_01_q_learning.learner import ALGORITHMS, RULES

KEYS = {"seen": world.seen_key, "full": world.full_key}


@dataclass(frozen=True)
class Learner:
    """One learner and the game it plays; the keys of `learner.RULES`, and `key`: what the learner sees."""

    algorithm: str
    key: str
    sees_clock: bool
    alpha: float
    gamma: float
    epsilon: float
    epsilon_decay: float
    epsilon_min: float
    initial_value: float
    planning_steps: int
    bootstrap_timeout: bool
    max_moves: int
    pays_once: bool
    stochastic: bool
    reseed_fault: bool
    limit_fault: bool

    def check(self, name: str) -> None:
        """Raises ConfigError naming the key, with `name` as its prefix."""
        one_of(f"{name}.algorithm", self.algorithm, ALGORITHMS)
        one_of(f"{name}.key", self.key, KEYS)
        for key in ("alpha", "gamma", "epsilon", "epsilon_decay", "epsilon_min"):
            within(f"{name}.{key}", getattr(self, key), 0.0, 1.0)
        within(f"{name}.planning_steps", self.planning_steps, 0, 1000)
        within(f"{name}.max_moves", self.max_moves, 1, 1000)

    def rules(self) -> np.record:
        """The same for compiled code."""
        values = asdict(self) | {"algorithm": ALGORITHMS.index(self.algorithm)}
        record: np.record = np.rec.array([tuple(values[name] for name in RULES.names or ())], RULES)[0]
        return record


@dataclass(frozen=True)
class Arm:
    """`changes`: what the arm changes in the learner; `studies`: where it is run."""

    studies: list[str] = field(default_factory=lambda: ["main"])
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Settings(Common):
    """All keys of the experiment."""

    episodes: int
    windows: int
    games: int
    marks: list[int]
    detailed: list[str]
    learner: Learner
    learners: dict[str, Arm]

    def chosen(self) -> list[str]:
        """The arms to run: those named in `arms`, else all arms of the study."""
        return self.arms or [name for name, arm in self.learners.items() if self.study in arm.studies]

    def learner_of(self, arm: str) -> Learner:
        """The learner of an arm: the base with the arm's changes."""
        learner: Learner = build(Learner, asdict(self.learner) | self.learners[arm].changes, f"learners.{arm}.changes")
        return learner

    def check(self) -> None:
        """Raises ConfigError naming key, value and what is allowed."""
        super().check()
        for key in ("episodes", "windows", "games"):
            within(key, getattr(self, key), 1)
        if self.episodes % self.windows:
            raise ConfigError(f"episodes={self.episodes}: must be a multiple of windows={self.windows}.")
        within("first_seed", self.first_seed, 0, 2**31)
        self.learner.check("learner")
        for name, arm in self.learners.items():
            for study in arm.studies:
                one_of(f"learners.{name}.studies", study, ("main", "ablation"))
            self.learner_of(name).check(f"learners.{name}.changes")
        for key in ("arms", "detailed"):
            for name in getattr(self, key) or []:
                one_of(key, name, self.learners)
