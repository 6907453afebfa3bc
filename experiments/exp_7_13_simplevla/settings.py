"""The configuration as types; values and their meaning stand in conf/experiment/7-13/."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from common.config import AlgoConfig, Common, load_algo
from common.schema import ConfigError, one_of, within
from experiments.exp_7_13_simplevla.lessons import Lesson
from experiments.exp_7_13_simplevla.policy import PATCH, VlaConfig
from experiments.exp_7_13_simplevla.train import REWARDS

METHODS = ("none", "rl")
VIEWS = ("state", "image")


@dataclass(frozen=True)
class Shape:
    """Size of the policy; `pixels` on a side of the picture, where it sees one."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    feedforward: int = 128
    pixels: int = 48


@dataclass(frozen=True)
class Start:
    """A policy before RL: control steps per chunk, what it sees, and demonstrations of each trained task."""

    chunk: int = 4
    view: str = "state"
    demos: int = 1


@dataclass(frozen=True)
class Branch:
    """What an arm does after its start. `control_steps` None: those of the experiment; `budget`: times its FLOPs."""

    method: str
    start: str = "one"
    study: str = "main"
    algo: str = "grpo"
    reward: str = "outcome"
    lr: float | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    control_steps: int | None = None
    budget: float = 1.0


@dataclass(frozen=True)
class EvaluationConfig:
    """Layouts of each task at the end, and of each task at the points of the learning curve."""

    layouts: int = 16
    curve_layouts: int = 6
    points: int = 4


@dataclass(kw_only=True)
class Settings(Common):
    """All keys of the experiment."""

    policy: Shape
    bases: int
    play_frames: int
    play: Lesson
    demonstrations: Lesson
    demonstration_steps: int
    control_steps: int
    flops: float
    starts: dict[str, Start]
    rl: dict[str, Any]
    evaluation: EvaluationConfig
    branches: dict[str, Branch]

    def check(self) -> None:
        """Raises ConfigError on values that cannot work together."""
        super().check()
        for key in ("bases", "play_frames", "demonstration_steps", "control_steps"):
            within(key, getattr(self, key), 1)
        within("flops", self.flops, 0, above=True)
        for key in ("layouts", "curve_layouts", "points"):
            within(f"evaluation.{key}", getattr(self.evaluation, key), 1)
        if self.policy.hidden % (2 * self.policy.heads):
            raise ConfigError(
                f"policy.hidden={self.policy.hidden}: must be an even multiple of policy.heads={self.policy.heads}."
            )
        if self.policy.pixels % PATCH:
            raise ConfigError(f"policy.pixels={self.policy.pixels}: must be a multiple of {PATCH}, the side of a patch.")
        for name, start in self.starts.items():
            within(f"starts.{name}.chunk", start.chunk, 1)
            within(f"starts.{name}.demos", start.demos, 1)
            one_of(f"starts.{name}.view", start.view, VIEWS)
        for name, branch in self.branches.items():
            one_of(f"branches.{name}.method", branch.method, METHODS)
            one_of(f"branches.{name}.start", branch.start, self.starts)
            one_of(f"branches.{name}.study", branch.study, ("main", "ablation", "both"))
            one_of(f"branches.{name}.reward", branch.reward, REWARDS)
            within(f"branches.{name}.budget", branch.budget, 0, above=True)
            self.decisions(name)
            if branch.method == "rl":
                self.arm_config(name)
        for arm in self.arms or []:
            one_of("arms", arm, self.branches)

    def chosen(self) -> list[str]:
        """The arms of the run: those named, else all of the study."""
        return self.arms or [name for name, branch in self.branches.items() if branch.study in (self.study, "both")]

    def decisions(self, arm: str) -> int:
        """Chunks of an episode."""
        branch = self.branches[arm]
        steps, chunk = branch.control_steps or self.control_steps, self.starts[branch.start].chunk
        if steps < 1 or steps % chunk:
            raise ConfigError(f"branches.{arm}.control_steps={steps}: must be a multiple of the chunk of its start, {chunk}.")
        return steps // chunk

    def policy_config(self, start: str) -> VlaConfig:
        """Shape of the policy of a start."""
        return VlaConfig(**vars(self.policy), chunk=self.starts[start].chunk, view=self.starts[start].view)

    def arm_config(self, name: str) -> AlgoConfig:
        """An RL arm's algorithm in full; ConfigError for a key that it does not have or that means nothing here."""
        branch, typed = self.branches[name], self.algo if name in self.chosen() else {}
        rate = {} if branch.lr is None else {"lr": branch.lr}
        algo = load_algo(branch.algo, self.rl, rate, branch.changes, typed)
        unused = {"kl_coef": 0.0, "overlong_buffer": 0, "mask_truncated": False, "refill_with": "prompts"}
        for key, only in unused.items():
            if getattr(algo, key) != only:
                raise ConfigError(
                    f"branches.{name}: {key}={getattr(algo, key)} is not part of this experiment; leave it at {only}."
                )
        if algo.advantage == "reward_to_go":
            raise ConfigError(
                f"branches.{name}: advantage=reward_to_go is not part of this experiment; take a group's, or gae."
            )
        return algo
