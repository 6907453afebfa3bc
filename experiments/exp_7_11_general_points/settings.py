"""The configuration of 7-11 as types; values and their meaning stand in conf/experiment/7-11/."""

from dataclasses import dataclass, field
from typing import Any

from common.backends import trl, trl_sft
from common.backends.verl_plan import Cluster
from common.cards.corpus import CorpusConfig
from common.config import Common, load_algo
from common.lora import LoraSettings
from common.models import DecoderConfig
from common.schema import ConfigError, build, one_of, within
from common.sft import SftConfig


@dataclass(frozen=True)
class Branch:
    """What an arm does after the common start. ``budget``: multiple of ``branch_flops``."""

    method: str
    study: str = "main"
    start: str = "start"
    demonstrations: str = "one"
    lr: float | None = None
    algo: str = "grpo"
    changes: dict[str, Any] = field(default_factory=dict)
    budget: float = 1.0
    iterations: int = 1
    leak: bool = False
    prior: str = "medium"


@dataclass(frozen=True)
class EvaluationConfig:
    """``orders``: card orders per hand at the end (``retry_orders`` where an episode has several answers).

    ``curve_orders`` and ``curve_hands`` (shared out among the answers of an episode) along the way.
    """

    orders: int = 5
    retry_orders: int = 2
    curve_orders: int = 1
    curve_hands: int = 200
    points: int = 4
    temperature: float = 1.0


@dataclass(kw_only=True)
class Settings(Common):
    """All keys of the experiment."""

    backend: str
    model_path: str | None
    model: DecoderConfig
    lora: LoraSettings
    bases: int
    splits: int
    corpus: CorpusConfig
    priors: dict[str, dict[str, float]]
    pretraining: SftConfig
    pretraining_steps: int
    start: SftConfig
    start_steps: int
    overfit_steps: int
    sft: SftConfig
    rft_samples: int
    rft_keep: int
    trace: bool
    reward: str
    max_new_tokens: int
    branch_flops: float
    train_hands: int | None
    evaluation: EvaluationConfig
    branches: dict[str, Branch]
    cluster: Cluster | None = None
    dry: bool = False

    def check(self) -> None:
        """Raises ConfigError on values that cannot work together."""
        super().check()
        for key in ("bases", "splits", "pretraining_steps", "start_steps", "rft_samples", "rft_keep", "max_new_tokens"):
            within(key, getattr(self, key), 1)
        within("branch_flops", self.branch_flops, 0, above=True)
        one_of("reward", self.reward, ("ladder", "outcome"))
        one_of("backend", self.backend, ("native", "trl"))
        if self.backend == "trl" and self.scale == "cluster":
            raise ConfigError("backend=trl: scale=cluster trains through verl; allowed there is backend=native.")
        if self.model.hidden % self.model.heads or self.model.hidden // self.model.heads % 2:
            raise ConfigError(f"model.hidden={self.model.hidden}: must be an even multiple of model.heads={self.model.heads}.")
        for prior in self.priors:
            shares = self.prior_corpus(prior)
            total = shares.full + shares.make4 + shares.reading + shares.make3 + shares.facts + shares.retry
            if abs(total - 1) > 1e-6:
                raise ConfigError(
                    f"corpus with prior {prior}: the shares of the rows are {total:g} together; they must sum to 1."
                )
        for name, branch in self.branches.items():
            one_of(f"branches.{name}.method", branch.method, ("none", "sft", "rft", "rl"))
            one_of(f"branches.{name}.study", branch.study, ("main", "ablation", "both"))
            one_of(f"branches.{name}.start", branch.start, ("base", "start", "overfit"))
            one_of(f"branches.{name}.demonstrations", branch.demonstrations, ("one", "diverse"))
            one_of(f"branches.{name}.prior", branch.prior, self.priors)
            within(f"branches.{name}.iterations", branch.iterations, 1, 10)
            if branch.method == "rl":
                own = {"max_new_tokens": self.max_new_tokens, "max_turns": branch.iterations, **branch.changes}
                algo = load_algo(branch.algo, own, self.algo if name in self.chosen() else {})
                if self.backend == "trl" and name in self.chosen():
                    trl.check_algorithm(algo)
            elif self.backend == "trl" and branch.method in ("sft", "rft") and name in self.chosen():
                trl_sft.check_config(self.sft)
        for arm in self.arms or []:
            one_of("arms", arm, self.branches)
        if self.scale == "gpu" and self.model_path is None:
            raise ConfigError("model_path=null: scale=gpu needs a local model folder or a hub name, model_path=<folder>.")
        if self.model_path is not None and any(self.branches[arm].prior != "medium" for arm in self.chosen()):
            raise ConfigError(f"model_path={self.model_path}: arms with a prior of their own need a base pre-trained here.")

    def prior_corpus(self, prior: str) -> CorpusConfig:
        """The pre-training corpus with a prior's changes; ConfigError where a key of it is unknown."""
        return build(CorpusConfig, {**vars(self.corpus), **self.priors[prior]}, f"priors.{prior}")

    def chosen(self) -> list[str]:
        """The arms of the run: those named, else all of the study."""
        return self.arms or [name for name, branch in self.branches.items() if branch.study in (self.study, "both")]
