"""The configuration of 7-11-vl as types; values and their meaning stand in conf/experiment/7-11-vl/."""

from dataclasses import dataclass, field
from typing import Any

from common.cards.corpus import CorpusConfig
from common.config import Common, load_algo
from common.models import DecoderConfig
from common.schema import ConfigError, one_of, within
from common.sft import SftConfig
from common.vision import VisionConfig
from experiments.exp_7_11_vl_general_points.data import PictureConfig
from experiments.exp_7_11_vl_general_points.drawing import INKS, SIDE


@dataclass(frozen=True)
class Branch:
    """What an arm does after the common start. ``budget``: multiple of ``branch_flops``.

    ``frozen``: the vision encoder is not trained. ``penalty``: an answer whose card list is wrong gets -1.5 at once, as in
    the published program; off, only the formula counts.
    """

    method: str
    study: str = "main"
    demonstrations: str = "one"
    lr: float | None = None
    algo: str = "grpo"
    changes: dict[str, Any] = field(default_factory=dict)
    budget: float = 1.0
    frozen: bool = False
    penalty: bool = True


@dataclass(frozen=True)
class EvaluationConfig:
    """``orders``: card orders (and pictures) per hand at the end, of at most ``hands`` hands per split (None: of all).

    ``curve_hands``: hands per split along the way.
    """

    orders: int = 2
    hands: int | None = None
    curve_hands: int = 100
    points: int = 4
    temperature: float = 1.0


@dataclass(kw_only=True)
class Settings(Common):
    """All keys of the experiment."""

    model_path: str | None
    model: DecoderConfig
    vision: VisionConfig
    bases: int
    splits: int
    corpus: CorpusConfig
    pictures: PictureConfig
    pretraining: SftConfig
    pretraining_steps: int
    start: SftConfig
    start_steps: int
    sft: SftConfig
    trace: bool
    reward: str
    max_new_tokens: int
    branch_flops: float
    train_hands: int | None
    evaluation: EvaluationConfig
    branches: dict[str, Branch]

    def check(self) -> None:
        """Raises ConfigError on values that cannot work together."""
        super().check()
        for key in ("bases", "splits", "pretraining_steps", "start_steps", "max_new_tokens"):
            within(key, getattr(self, key), 1)
        within("branch_flops", self.branch_flops, 0, above=True)
        one_of("reward", self.reward, ("ladder", "outcome"))
        if self.vision.image_size != SIDE and self.model_path is None:
            raise ConfigError(f"vision.image_size={self.vision.image_size}: the pictures have {SIDE} pixels a side.")
        if self.vision.image_size % self.vision.patch_size or self.vision.hidden % self.vision.heads:
            raise ConfigError(
                f"vision.patch_size={self.vision.patch_size} must divide image_size={self.vision.image_size}, "
                f"and heads={self.vision.heads} hidden={self.vision.hidden}."
            )
        if self.model.hidden % self.model.heads or self.model.hidden // self.model.heads % 2:
            raise ConfigError(f"model.hidden={self.model.hidden}: must be an even multiple of model.heads={self.model.heads}.")
        shares = self.corpus
        total = shares.full + shares.make4 + shares.reading + shares.make3 + shares.facts + shares.retry
        if abs(total - 1) > 1e-6:
            raise ConfigError(f"corpus: the shares of the rows are {total:g} together; they must sum to 1.")
        within("pictures.full", self.pictures.full, 0, 1 - self.pictures.reading)
        within("pictures.reading", self.pictures.reading, 0, 1)
        within("pictures.black", self.pictures.black, 0, 1)
        for ink in self.pictures.inks:
            one_of("pictures.inks", ink, [name for name in INKS if name != "red"])  # red is the shifted look
        for name, branch in self.branches.items():
            self._check_branch(name, branch)
        for arm in self.arms or []:
            one_of("arms", arm, self.branches)
        if self.scale == "gpu" and self.model_path is None:
            raise ConfigError("model_path=null: scale=gpu needs a local model folder or a hub name, model_path=<folder>.")

    def _check_branch(self, name: str, branch: Branch) -> None:
        one_of(f"branches.{name}.method", branch.method, ("none", "sft", "rl"))
        one_of(f"branches.{name}.study", branch.study, ("main", "ablation", "both"))
        one_of(f"branches.{name}.demonstrations", branch.demonstrations, ("one", "diverse"))
        if branch.method == "rl":
            own = {"max_new_tokens": self.max_new_tokens, **branch.changes}
            load_algo(branch.algo, own, self.algo if name in self.chosen() else {})

    def chosen(self) -> list[str]:
        """The arms of the run: those named, else all of the study."""
        return self.arms or [name for name, branch in self.branches.items() if branch.study in (self.study, "both")]
