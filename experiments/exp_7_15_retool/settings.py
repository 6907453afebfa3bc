"""The configuration of the experiment as types; values and their meaning stand in conf/experiment/7-15/."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from common.config import AlgoConfig, Common, load_algo
from common.lora import LoraSettings, learning_rate
from common.models import DecoderConfig
from common.schema import ConfigError, build, one_of, within
from common.sft import SftConfig
from experiments.exp_7_15_retool.data import CorpusConfig, DemonstrationConfig
from experiments.exp_7_15_retool.env import EnvConfig
from experiments.exp_7_15_retool.interpreter import InterpreterConfig

METHODS = ("none", "sft", "rl")
STARTS = ("base", "text", "tool")
REPLY_EXTRA = 8  # tokens of a reply beside its characters: tags, and what a template puts around a turn


@dataclass(frozen=True)
class Branch:
    """What an arm does. ``start``: the base, or the base after SFT on demonstrations of the text or the tool protocol.

    ``tool``: it may run code. ``algo``: preset of conf/algo for method rl, ``changes`` its keys (or those of the SFT).
    ``unmasked``: the interpreter's tokens are trained on too. ``shaped``: wrong answers earn something for their calls.
    """

    method: str
    start: str = "tool"
    tool: bool = True
    study: str = "main"
    algo: str = "grpo"
    lr: float | None = None
    unmasked: bool = False
    shaped: bool = False
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ProblemFiles:
    """Problems from files in place of the generated ones (scale=gpu): see files.py. ``protocol``, ``text``: what stands in
    front of a question with and without the interpreter."""

    train: str
    test: dict[str, str]
    protocol: str = ""
    text: str = ""
    count: int = 1000


@dataclass(frozen=True)
class EvaluationConfig:
    """``items`` problems of a kind and ``samples`` answers to each at the end; ``curve_items`` of a kind, one answer each, at
    each of ``points``."""

    items: int = 16
    samples: int = 2
    curve_items: int = 12
    points: int = 10
    temperature: float = 1.0


@dataclass(kw_only=True)
class Settings(Common):
    """All keys of the experiment."""

    model: DecoderConfig
    model_path: str | None
    lora: LoraSettings
    problems: ProblemFiles | None
    bases: int
    corpus: CorpusConfig
    pretraining: SftConfig
    pretraining_steps: int
    demonstrations: DemonstrationConfig
    start: SftConfig
    start_steps: int
    train_items: int
    interpreter: InterpreterConfig
    max_turns: int
    max_new_tokens: int
    episodes_per_step: int
    sample_batch: int
    branch_flops: float
    rl: dict[str, Any]
    sft: SftConfig
    evaluation: EvaluationConfig
    branches: dict[str, Branch]

    def check(self) -> None:
        """Raises ConfigError on values that cannot work together."""
        super().check()
        counts = ("bases", "pretraining_steps", "start_steps", "train_items", "max_new_tokens", "episodes_per_step")
        for key in (*counts, "sample_batch"):
            within(key, getattr(self, key), 1)
        within("max_turns", self.max_turns, 2)
        within("branch_flops", self.branch_flops, 0, above=True)
        for key in ("items", "samples", "curve_items", "points"):
            within(f"evaluation.{key}", getattr(self.evaluation, key), 1)
        within("evaluation.temperature", self.evaluation.temperature, 0)
        if self.model.hidden % self.model.heads or self.model.hidden // self.model.heads % 2:
            raise ConfigError(f"model.hidden={self.model.hidden}: must be an even multiple of model.heads={self.model.heads}.")
        if (self.problems is None) != (self.model_path is None):
            raise ConfigError(
                f"model_path={self.model_path} with problems={'null' if self.problems is None else 'set'}: a pre-trained model "
                "needs problems of its own, and the generated ones need the tiny model; set both or neither."
            )
        self._check_room()
        for name, branch in self.branches.items():
            one_of(f"branches.{name}.method", branch.method, METHODS)
            one_of(f"branches.{name}.start", branch.start, STARTS)
            one_of(f"branches.{name}.study", branch.study, ("main", "ablation", "both"))
            if not branch.tool and (branch.unmasked or branch.shaped):
                raise ConfigError(f"branches.{name}.tool=false: unmasked and shaped speak of calls, and there are none.")
            if branch.method != "rl" and (branch.unmasked or branch.shaped):
                raise ConfigError(f"branches.{name}.method={branch.method}: unmasked and shaped need method=rl.")
            if branch.unmasked and branch.algo == "ppo":
                raise ConfigError(f"branches.{name}.unmasked=true: needs rewards per episode, which algo=ppo does not have.")
            self.arm_config(name)
        for arm in self.arms or []:
            one_of("arms", arm, self.branches)
        for arm in self.chosen():
            if self.problems is not None and self.branches[arm].method == "sft":
                raise ConfigError(f"arms: {arm} needs demonstrations, and problems from files have none; choose other arms.")

    def _check_room(self) -> None:
        """A row that outgrew the context would end an episode without a verdict, at a reward better than a wrong answer's."""
        if self.model_path is not None:
            return
        prompt = 32
        longest = prompt + self.max_turns * (self.max_new_tokens + self.interpreter.reply_chars + REPLY_EXTRA)
        if longest > self.model.max_length:
            raise ConfigError(
                f"model.max_length={self.model.max_length}: max_turns={self.max_turns} turns of max_new_tokens="
                f"{self.max_new_tokens} with replies of {self.interpreter.reply_chars} characters may take {longest} tokens."
            )

    def chosen(self) -> list[str]:
        """The arms of the run: those named, else all of the study."""
        return self.arms or [name for name, branch in self.branches.items() if branch.study in (self.study, "both")]

    def env_config(self, branch: Branch, training: bool) -> EnvConfig:
        """The environment of a branch; measured without shaping."""
        return EnvConfig(branch.tool, self.max_turns if branch.tool else 1, branch.shaped and training)

    def arm_config(self, name: str) -> SftConfig | AlgoConfig | None:
        """An arm's method in full; ConfigError for a key that the method does not have."""
        branch, where = self.branches[name], f"branches.{name}.changes"
        typed = {key: value for key, value in self.algo.items() if value is not None and name in self.chosen()}
        rate = typed.pop("lr", branch.lr)
        lr = {} if rate is None else {"lr": learning_rate(rate, self.lora)}
        if branch.method == "none":
            if branch.changes:
                raise ConfigError(f"{where}: method=none has no keys to change.")
            return None
        if branch.method == "sft":
            return build(SftConfig, {**vars(self.sft), **branch.changes, **lr}, where)
        turns = {"max_turns": self.max_turns if branch.tool else 1}
        own = {"max_new_tokens": self.max_new_tokens, "temperature": self.evaluation.temperature or 1.0}
        layers = [{**own, **turns}, {} if branch.algo == "ppo" else self.rl, branch.changes, lr, typed]
        algo = load_algo(branch.algo, *layers)
        if "prompts_per_step" in {*branch.changes, *typed}:
            return algo
        return replace(algo, prompts_per_step=max(1, self.episodes_per_step // algo.group_size))
