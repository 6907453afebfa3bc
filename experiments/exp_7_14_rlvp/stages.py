"""What the arms share: the start models, each built once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from common.checkpoints import load_model, save_model
from common.episodes import run_episodes
from common.files import write_json
from common.judge import quality, train_judge
from common.models import build_decoder
from common.rejection import row_batches
from common.reward_model import build_reward_model
from common.seeding import base_seed, generator
from common.sft import SftBatch
from common.stages import stage
from common.supervised import SFT_MODULES, supervised
from common.tokenizers import PhraseEncoder
from experiments.exp_7_14_rlvp import data
from experiments.exp_7_14_rlvp.settings import Settings

HERE = "experiments.exp_7_14_rlvp."
OWN = {"fileops": ("fileops",), "csops": ("csops",), "theorems": ("logic", "theorem"), "terminal": ("terminal",)}
JUDGE, QUALITY = "judge.safetensors", "quality.json"


def code_of(domain: str) -> list[str]:
    """The modules that a domain's texts and verdicts depend on."""
    return [HERE + name for name in ("calls", "env", *OWN[domain], "scripts", "data")]


def start_of(settings: Settings, name: str, seed: int) -> Path:
    """A start model: a decoder that learnt its domain's texts from scripts of mixed quality, and nothing else."""
    if settings.model_path is not None:
        return pretrained(settings)
    start, first = settings.starts[name], base_seed(seed, settings.bases)

    def model() -> tuple[Any, Any]:
        tokenizer = data.build_tokenizer(start.domain)
        return build_decoder(settings.model, tokenizer, first), tokenizer

    def batches(tokenizer: Any) -> Callable[[int], SftBatch]:
        encode = PhraseEncoder(tokenizer)
        rows = data.start_rows(
            start.domain, encode, start.choices, start.mix, settings.start_ruled, settings.obeying, start.scripts, first
        )
        return row_batches(rows, encode.pad, settings.start_training.batch_size, first, "start", name)

    return supervised(
        f"start-{name}", experiment=settings.experiment, runs_dir=settings.runs_dir, threads=settings.threads, seed=first,
        config=settings.start_training, steps=start.steps, model=model, batches=batches,
        key=[settings.model, start, settings.start_ruled, settings.obeying], modules=[*code_of(start.domain), *SFT_MODULES],
    )  # fmt: skip


def judge_of(settings: Settings, world: str, seed: int) -> Path:
    """A judge of turns, taught by what the rules say of the start's own episodes on tasks of its scripts."""
    start, first = start_of(settings, settings.worlds[world].start, seed), base_seed(seed, settings.bases)

    def build(folder: Path) -> None:
        model, tokenizer = load_model(start / "model")
        count = settings.judge_episodes
        episodes = run_episodes(
            model, tokenizer, settings.make_env(world), data.tasks("start", settings.worlds[world].options, 2 * count),
            max_turns=settings.turn_limit(world), max_new_tokens=settings.answer_limit(world), temperature=1.0,
            generator=generator(first, "judge"),
        )  # fmt: skip
        judge = build_reward_model(model)
        pad = tokenizer.pad_token_id
        train_judge(judge, episodes[:count], settings.judge, steps=settings.judge_steps, pad_id=pad, seed=first)
        write_json(folder / QUALITY, quality(judge, episodes[count:], pad)._asdict())
        save_file(judge.state_dict(), folder / JUDGE)

    key = [
        settings.worlds[world].options,
        settings.judge,
        settings.judge_episodes,
        settings.judge_steps,
        first,
        settings.threads,
    ]
    modules = [
        *code_of(settings.domain(world)),
        HERE + "stages",
        *(f"common.{name}" for name in ("episodes", "judge", "reward_model", "rollout")),
    ]
    return stage(f"judge-{world}", build, config=key, modules=modules, inputs=[start], root=Path(settings.runs_dir) / "stages")


def load_judge(folder: Path, policy: Any) -> Any:
    """The judge of a stage; `policy` gives its shape."""
    judge = build_reward_model(policy)
    judge.load_state_dict(load_file(folder / JUDGE))
    return judge


def pretrained(settings: Settings) -> Path:
    """The model of model_path as a stage, in place of every start model."""

    def build(folder: Path) -> None:
        save_model(*load_model(str(settings.model_path), dtype=settings.dtype), folder / "model")

    key = [settings.model_path, settings.dtype]
    return stage("pretrained", build, config=key, modules=["common.checkpoints"], root=Path(settings.runs_dir) / "stages")
