"""What the arms share, each built once: the base, and the starts that SFT on demonstrations makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.checkpoints import load_model, save_model
from common.models import build_decoder
from common.seeding import base_seed
from common.sft import SftBatch
from common.stages import stage
from common.supervised import SFT_MODULES, supervised
from common.tokenizers import PhraseEncoder
from experiments.exp_7_15_retool import data
from experiments.exp_7_15_retool.settings import Settings

HERE = "experiments.exp_7_15_retool."
TEXT_CODE = [HERE + name for name in ("problems", "programs", "data")]


def places(settings: Settings) -> dict[str, Any]:
    """What all supervised stages have in common."""
    where = {"experiment": settings.experiment, "runs_dir": settings.runs_dir, "threads": settings.threads}
    return {**where, "modules": [*SFT_MODULES, *TEXT_CODE]}


def base_stage(settings: Settings, seed: int) -> Path:
    """The tiny decoder, pre-trained on worked answers, notebooks and a few answers in the tool protocol."""
    seed = base_seed(seed, settings.bases)

    def model() -> tuple[Any, Any]:
        tokenizer = data.build_tokenizer()
        return build_decoder(settings.model, tokenizer, seed, data.written_numbers(tokenizer)), tokenizer

    def batches(tokenizer: Any) -> Callable[[int], SftBatch]:
        made = data.Corpus(PhraseEncoder(tokenizer), settings.corpus, seed)
        return lambda step: made.batch(step, settings.pretraining.batch_size)

    return supervised(
        "base", **places(settings), seed=seed, config=settings.pretraining, steps=settings.pretraining_steps, model=model,
        batches=batches, key=[settings.model, settings.corpus],
    )  # fmt: skip


def start_stage(settings: Settings, seed: int, start: str) -> tuple[Path, list[Path]]:
    """The model that an arm starts from, and the stages behind it. Both SFT starts see as many demonstrations."""
    if settings.model_path is not None:
        copied = pretrained_stage(settings)
        return copied, [copied]
    base, seed = base_stage(settings, seed), base_seed(seed, settings.bases)
    if start == "base":
        return base, [base]

    def batches(tokenizer: Any) -> Callable[[int], SftBatch]:
        made = data.Demonstrations(PhraseEncoder(tokenizer), settings.demonstrations, seed, start == "tool")
        return lambda step: made.batch(step, settings.start.batch_size)

    built = supervised(
        f"start-{start}", **places(settings), seed=seed, config=settings.start, steps=settings.start_steps,
        model=lambda: load_model(base / "model"), batches=batches, key=[start, settings.demonstrations], inputs=[base],
    )  # fmt: skip
    return built, [base, built]


def pretrained_stage(settings: Settings) -> Path:
    """The model of model_path as a stage."""

    def build(folder: Path) -> None:
        model, tokenizer = load_model(Path(str(settings.model_path)), dtype=settings.dtype)
        save_model(model, tokenizer, folder / "model")

    key = [settings.model_path, settings.dtype]
    return stage("pretrained", build, config=key, modules=["common.checkpoints"], root=Path(settings.runs_dir) / "stages")
