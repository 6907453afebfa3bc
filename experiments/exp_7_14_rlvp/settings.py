"""The configuration of RLVP as types; values and their meaning stand in conf/experiment/7-14/."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from common.config import AlgoConfig, Common, load_algo
from common.credits import CreditConfig
from common.lora import LoraSettings, learning_rate
from common.models import DecoderConfig
from common.schema import ConfigError, build, one_of, within
from common.sft import SftConfig
from experiments.exp_7_14_rlvp.data import DOMAINS, SPLITS
from experiments.exp_7_14_rlvp.env import ToolEnv
from experiments.exp_7_14_rlvp.scripts import Mix

METHODS = ("none", "sft", "policy_gradient")
VIEWS = ("ruled", "guarded")


@dataclass(frozen=True)
class Start:
    """A start model: its domain, the worlds (reset options) of its scripts in turn, how many scripts, how many steps."""

    domain: str
    choices: tuple[dict[str, Any], ...] = ({},)
    scripts: int = 6000
    steps: int = 400
    mix: Mix = field(default_factory=Mix)


@dataclass(frozen=True)
class WorldConfig:
    """Where arms act: reset options, the start model, FLOPs of an arm, tasks of a step, items of the evaluation."""

    start: str
    options: dict[str, Any] = field(default_factory=dict)
    flops: float = 1e12
    prompts_per_step: int = 16
    items: int = 60


@dataclass(frozen=True)
class Branch:
    """What an arm does after the start. ``study``: named runs only where `arms` names it.

    ``credits``: keys of CreditConfig; ``changes``: of the method's configuration.
    ``scripts``: perfect or failing, for SFT. ``views``: how it is measured beside hidden rules: ruled (they stand in the
    prompt), guarded (a guardrail blocks what would break one).
    ``own_credits``: false trains by the preset's own advantages (DAPO). ``guests``: perfect or failing puts one scripted
    episode of the training task into each group. ``judged``: a learned judge finds the violations that are paid for.
    """

    method: str
    world: str
    study: str = "main"
    algo: str = "dr_grpo"
    lr: float | None = None
    credits: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    own_credits: bool = True
    guests: str = "none"
    judged: bool = False
    scripts: str = "perfect"
    views: tuple[str, ...] = ()
    budget: float = 1.0


@dataclass(frozen=True)
class EvaluationConfig:
    """``samples`` episodes of each task at the end (the k of pass^k); ``curve_items`` tasks once at each of ``points``."""

    samples: int = 8
    temperature: float = 0.7
    curve_items: int = 60
    points: int = 4


@dataclass(kw_only=True)
class Settings(Common):
    """All keys of the experiment."""

    model: DecoderConfig
    model_path: str | None
    lora: LoraSettings
    max_new_tokens: int | None
    bases: int
    starts: dict[str, Start]
    start_training: SftConfig
    start_ruled: float
    obeying: Mix
    worlds: dict[str, WorldConfig]
    rl: dict[str, Any]
    sft: SftConfig
    sft_scripts: int
    judge: SftConfig
    judge_episodes: int
    judge_steps: int
    evaluation: EvaluationConfig
    branches: dict[str, Branch]

    def check(self) -> None:
        """Raises ConfigError on values that cannot work together."""
        super().check()
        within("bases", self.bases, 1)
        if (self.model_path is None) != (self.max_new_tokens is None):
            raise ConfigError(
                f"model_path={self.model_path} with max_new_tokens={self.max_new_tokens}: a pre-trained model "
                "needs a limit of its own, and the tiny models have that of their calls; set both or neither."
            )
        within("start_ruled", self.start_ruled, 0, 1)
        within("sft_scripts", self.sft_scripts, 1, len(SPLITS["train"]))
        for key in ("judge_episodes", "judge_steps"):
            within(key, getattr(self, key), 1)
        for name, start in self.starts.items():
            one_of(f"starts.{name}.domain", start.domain, DOMAINS)
            within(f"starts.{name}.scripts", start.scripts, 1, len(SPLITS["start"]))
            within(f"starts.{name}.steps", start.steps, 1)
            if not start.choices:
                raise ConfigError(f"starts.{name}.choices=[]: needs the reset options of at least one world.")
            for options in start.choices:
                DOMAINS[start.domain].make_env().reset(options={"task": 0, **options})  # refuses unknown ones
        for name, world in self.worlds.items():
            one_of(f"worlds.{name}.start", world.start, self.starts)
            within(f"worlds.{name}.flops", world.flops, 0, above=True)
            for key in ("prompts_per_step", "items"):
                within(f"worlds.{name}.{key}", getattr(world, key), 1)
            self.turn_limit(name)
        for key in ("samples", "curve_items", "points"):
            within(f"evaluation.{key}", getattr(self.evaluation, key), 1)
        for name, branch in self.branches.items():
            one_of(f"branches.{name}.method", branch.method, METHODS)
            one_of(f"branches.{name}.world", branch.world, self.worlds)
            one_of(f"branches.{name}.study", branch.study, ("main", "ablation", "both", "named"))
            one_of(f"branches.{name}.scripts", branch.scripts, ("perfect", "failing"))
            within(f"branches.{name}.budget", branch.budget, 0, above=True)
            one_of(f"branches.{name}.guests", branch.guests, ("none", "perfect", "failing"))
            for view in branch.views:
                one_of(f"branches.{name}.views", view, VIEWS)
            self.arm_config(name)
            self.credit_config(name)
        for arm in self.arms or []:
            one_of("arms", arm, self.branches)
        for arm in self.chosen():
            branch = self.branches[arm]
            if self.model_path is None and not DOMAINS[self.domain(branch.world)].phrases:
                raise ConfigError(f"arms={arm}: its world is free text, which takes a pre-trained model: set model_path.")
            if self.model_path is not None and (branch.method == "sft" or branch.guests != "none"):
                raise ConfigError(f"arms={arm}: scripts are in the language of the tiny models; not with a model_path.")

    def chosen(self) -> list[str]:
        """The arms of the run: those named, else all of the study."""
        return self.arms or [name for name, branch in self.branches.items() if branch.study in (self.study, "both")]

    def domain(self, world: str) -> str:
        """The domain of a world."""
        return self.starts[self.worlds[world].start].domain

    def make_env(self, world: str) -> Callable[[], ToolEnv]:
        """What makes the environment of a world: a tiny model writes the compact language, a pre-trained one JSON."""
        return partial(DOMAINS[self.domain(world)].make_env, "compact" if self.model_path is None else "json")

    def answer_limit(self, world: str) -> int:
        """Most tokens of a turn."""
        return self.max_new_tokens or DOMAINS[self.domain(world)].max_new_tokens

    def turn_limit(self, world: str) -> int:
        """Most turns of an episode; ConfigError where the world does not take its options."""
        env = DOMAINS[self.domain(world)].make_env()
        env.reset(options={"task": 0, **self.worlds[world].options})
        return int(env.world.limit)

    def arm_config(self, name: str) -> SftConfig | AlgoConfig:
        """An arm's method in full. ConfigError for a key that the method does not have."""
        branch, typed = self.branches[name], self.algo if name in self.chosen() else {}
        lr = typed["lr"] if typed.get("lr") is not None else branch.lr
        rate = {} if lr is None else {"lr": learning_rate(lr, self.lora)}
        if branch.method != "policy_gradient":
            return build(SftConfig, {**vars(self.sft), **rate, **branch.changes}, f"branches.{name}.changes")
        world = self.worlds[branch.world]
        fixed = {"prompts_per_step": world.prompts_per_step, "max_turns": self.turn_limit(branch.world)}
        fixed["max_new_tokens"] = self.answer_limit(branch.world)
        return load_algo(branch.algo, self.rl, fixed, rate, branch.changes, typed)

    def credit_config(self, name: str) -> CreditConfig | None:
        """How an arm pays outcome and path; None for one that trains by its preset's advantages, or not by RL."""
        branch = self.branches[name]
        config = build(CreditConfig, branch.credits, f"branches.{name}.credits")
        rules = DOMAINS[self.domain(branch.world)].make_env().rules
        for rule in config.drop_rules:
            one_of(f"branches.{name}.credits.drop_rules", rule, rules)
        return config if branch.method == "policy_gradient" and branch.own_credits else None
