"""What the arms share, each built once: base, think-only start, and the start's scores in both modes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.checkpoints import load_model, save_model
from common.models import build_decoder
from common.modes import end_think_id
from common.presample import presampled, read_rates
from common.seeding import base_seed
from common.sft import SftBatch
from common.stages import stage
from common.supervised import SFT_MODULES, supervised
from common.tokenizers import PhraseEncoder, number_tokens
from experiments.exp_7_10_adaptthink import data
from experiments.exp_7_10_adaptthink.families import Family, family_of
from experiments.exp_7_10_adaptthink.settings import Settings

HERE = "experiments.exp_7_10_adaptthink."
SFT_CODE = [HERE + "chains", HERE + "data", *SFT_MODULES]
JUDGES = [HERE + name for name in ("chains", "data", "env", "families", "problems")] + [
    "common.verifiers.thinking", "common.verifiers.mathematics"
]  # fmt: skip


def base_stage(settings: Settings, seed: int) -> Path:
    """The tiny decoder, pre-trained on thinking and on NoThinking documents."""
    text = settings.pretraining_growth, settings.pretraining_direct, settings.pretraining_slips

    def model() -> tuple[Any, Any]:
        tokenizer = data.build_tokenizer()
        numbers = number_tokens(tokenizer, data.PREFIXES, data.NUMBERS)
        return build_decoder(settings.model, tokenizer, seed, numbers), tokenizer

    def batches(tokenizer: Any) -> Callable[[int], SftBatch]:
        corpus = data.Corpus(PhraseEncoder(tokenizer), seed, settings.pretraining_steps, *text)
        return lambda step: corpus.batch(step, settings.pretraining.batch_size)

    return supervised(
        "base", **places(settings), seed=seed, config=settings.pretraining, steps=settings.pretraining_steps, model=model,
        batches=batches, key=[settings.model, *text],
    )  # fmt: skip


def places(settings: Settings) -> dict[str, Any]:
    """What all supervised stages have in common."""
    where = {"experiment": settings.experiment, "runs_dir": settings.runs_dir, "threads": settings.threads}
    return {**where, "modules": SFT_CODE}


def start_stage(settings: Settings, seed: int, tokens: int, skips: float) -> tuple[Path, list[Path]]:
    """The reasoning model whose direct answers have `tokens` tokens and that skips thinking so often, and the stages behind."""
    if settings.model_path is not None:
        copied = pretrained_stage(settings)
        return copied, [copied]
    base = base_stage(settings, base_seed(seed, settings.bases))

    text = tokens, settings.pretraining_direct, skips, settings.pretraining_slips

    def batches(tokenizer: Any) -> Callable[[int], SftBatch]:
        made = data.ThinkOnly(PhraseEncoder(tokenizer), base_seed(seed, settings.bases), *text)
        return lambda step: made.batch(step, settings.start.batch_size)

    start = supervised(
        "start", **places(settings), seed=base_seed(seed, settings.bases), config=settings.start, steps=settings.start_steps,
        model=lambda: load_model(base / "model"), batches=batches, key=list(text), inputs=[base],
    )  # fmt: skip
    return start, [base, start]


def pretrained_stage(settings: Settings) -> Path:
    """The model of model_path as a stage; ConfigError if its template does not let the first token decide the mode."""

    def build(folder: Path) -> None:
        model, tokenizer = load_model(Path(str(settings.model_path)), dtype=settings.dtype)
        if settings.chat_template is not None:
            tokenizer.chat_template = settings.chat_template
        end_think_id(tokenizer)
        save_model(model, tokenizer, folder / "model")

    key = [settings.model_path, settings.chat_template, settings.dtype]
    return stage(
        "pretrained", build, config=key, modules=["common.checkpoints", "common.modes"], root=Path(settings.runs_dir) / "stages"
    )


def rates_stage(settings: Settings, start: Path, seed: int, mode: str) -> Path:
    """How often the start solves each training task in that mode."""
    family = family_of(settings)
    return presampled(
        f"rates-{mode}", start, family.make_env, family.pool(seed), settings.reference_samples, seed=seed, modules=JUDGES,
        runs_dir=settings.runs_dir, threads=settings.threads, device=settings.device, dtype=settings.dtype, mode=mode,
        max_new_tokens=settings.max_new_tokens, temperature=settings.temperature, batch_size=settings.sample_batch,
    )  # fmt: skip


def inputs_of(settings: Settings, arm: str, seed: int) -> tuple[Path, dict[str, Path], list[Path]]:
    """The start of an arm, the rates its method needs by mode, and all stages behind these."""
    branch = settings.branches[arm]
    skips = settings.start_skips if branch.skips is None else branch.skips
    start, built = start_stage(settings, seed, branch.answer_tokens, skips)
    both = ("think", "nothink")
    modes = {"adaptthink": both[:1], "router": both, "routed": both}.get(branch.method, ())
    rates = {mode: rates_stage(settings, start, seed, mode) for mode in modes}
    return start, rates, [*built, *rates.values()]


def rates_by_task(folder: Path) -> tuple[Callable[[dict], float], int]:
    """The score of a training task in the mode of the stage, and what sampling it cost in tokens."""
    found = read_rates(folder)
    return (lambda task: found["rates"][task["index"]]), found["tokens_forward"]


__all__ = ["Family", "inputs_of", "rates_by_task", "start_stage"]
