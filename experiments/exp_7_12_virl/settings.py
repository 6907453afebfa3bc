"""The configuration of 7-12 as types; values and their meaning stand in conf/experiment/7-12/."""

from dataclasses import dataclass, field
from typing import Any

from common.config import AlgoConfig, Common, load_algo
from common.models import DecoderConfig
from common.schema import ConfigError, one_of, within
from common.sft import SftConfig
from experiments.exp_7_12_virl.data import CORPUS_CITIES, CorpusConfig, known_cities
from experiments.exp_7_12_virl.env import MOST_TRIES
from experiments.exp_7_12_virl.grading import DEFECTS
from experiments.exp_7_12_virl.routes import RailConfig


@dataclass(frozen=True)
class Cities:
    """Which cities serve what: training (and new routes in distribution), validation and test of other cities."""

    train: tuple[str, ...]
    validation: tuple[str, ...]
    test: tuple[str, ...]


@dataclass(frozen=True)
class Branch:
    """What an arm does after the common start. ``budget``: multiple of ``branch_flops``.

    ``method``: none, sft or rl. ``start``: base, start or overfit. ``reward``: process or outcome. ``tries``: graded answers
    per stop, in training and in the test. ``switches``: defects of the published program, in training alone.
    """

    method: str
    study: str = "main"
    start: str = "start"
    lr: float | None = None
    algo: str = "ppo"
    changes: dict[str, Any] = field(default_factory=dict)
    budget: float = 1.0
    reward: str = "process"
    tries: int = 2
    switches: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvaluationConfig:
    """``routes`` of a split at the end (``known_routes`` under each known rule), ``curve_routes`` at each of ``points``."""

    routes: int = 100
    known_routes: int = 40
    curve_routes: int = 40
    points: int = 4
    temperature: float = 1.0


@dataclass(kw_only=True)
class Settings(Common):
    """All keys of the experiment."""

    model: DecoderConfig
    bases: int
    cities: Cities
    rail: RailConfig
    corpus: CorpusConfig
    pretraining: SftConfig
    pretraining_steps: int
    start: SftConfig
    start_steps: int
    overfit_steps: int
    sft: SftConfig
    train_routes: int
    switches: list[str]
    max_new_tokens: int
    branch_flops: float
    evaluation: EvaluationConfig
    branches: dict[str, Branch]

    def check(self) -> None:
        """Raises ConfigError on values that cannot work together."""
        super().check()
        for key in ("bases", "pretraining_steps", "start_steps", "overfit_steps", "train_routes"):
            within(key, getattr(self, key), 1)
        within("max_new_tokens", self.max_new_tokens, 1)
        within("branch_flops", self.branch_flops, 0, above=True)
        within("rail.points", self.rail.points, 0, 8)
        within("rail.drop", self.rail.drop, 0, 1)
        for key in ("renamed", "wrong", "straight_on", "renamed_places"):
            within(f"corpus.{key}", getattr(self.corpus, key), 0, 1)
        for key in ("routes", "known_routes", "curve_routes", "points"):
            within(f"evaluation.{key}", getattr(self.evaluation, key), 1)
        for where, named in (
            ("switches", self.switches),
            *((f"branches.{n}.switches", b.switches) for n, b in self.branches.items()),
        ):
            for switch in named:
                one_of(where, switch, DEFECTS)
        if self.model.hidden % self.model.heads or self.model.hidden // self.model.heads % 2:
            raise ConfigError(f"model.hidden={self.model.hidden}: must be an even multiple of model.heads={self.model.heads}.")
        self._check_cities()
        for name, branch in self.branches.items():
            one_of(f"branches.{name}.method", branch.method, ("none", "sft", "rl"))
            one_of(f"branches.{name}.study", branch.study, ("main", "ablation", "both"))
            one_of(f"branches.{name}.start", branch.start, ("base", "start", "overfit"))
            one_of(f"branches.{name}.reward", branch.reward, ("process", "outcome"))
            within(f"branches.{name}.tries", branch.tries, 1, MOST_TRIES)
            within(f"branches.{name}.budget", branch.budget, 0, above=True)
            if branch.method == "rl":
                self.algo_config(name)
        for arm in self.arms or []:
            one_of("arms", arm, self.branches)

    def _check_cities(self) -> None:
        groups = {"train": self.cities.train, "validation": self.cities.validation, "test": self.cities.test}
        for key, names in groups.items():
            if not names:
                raise ConfigError(f"cities.{key}=[]: needs at least one city.")
        everything = [*CORPUS_CITIES, *(name for names in groups.values() for name in names)]
        if twice := sorted({name for name in everything if everything.count(name) > 1}):
            raise ConfigError(
                f"cities: {', '.join(twice)} would serve two purposes; every city may serve one (corpus included)."
            )
        known_cities(list(groups.values()))

    @property
    def all_cities(self) -> tuple[str, ...]:
        """All cities that routes lead through after pre-training."""
        return (*self.cities.train, *self.cities.validation, *self.cities.test)

    def chosen(self) -> list[str]:
        """The arms of the run: those named, else all of the study."""
        return self.arms or [name for name, branch in self.branches.items() if branch.study in (self.study, "both")]

    def algo_config(self, name: str) -> AlgoConfig:
        """The algorithm of an arm: preset, the arm's changes, the command line's."""
        branch = self.branches[name]
        lr = {} if branch.lr is None else {"lr": branch.lr}
        own = {"max_new_tokens": self.max_new_tokens, "max_turns": MAX_TURNS, **lr, **branch.changes}
        return load_algo(branch.algo, own, self.algo if name in self.chosen() else {})


MAX_TURNS = 80  # more than a route has answers; the environment ends an episode
