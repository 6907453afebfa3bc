"""What the arms share: a base per seed and style, pre-trained so that it can use what a teacher is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.episodes import Episode, run_episodes
from common.models import build_decoder
from common.pretrained import encoder_of, tuned
from common.seeding import base_seed, generator
from common.sft import SftBatch
from common.supervised import SFT_MODULES, supervised
from experiments.exp_7_opsd_self_distillation import data, tasks
from experiments.exp_7_opsd_self_distillation.settings import Settings

HERE = "experiments.exp_7_opsd_self_distillation."
TEXT_CODE = [HERE + "tasks", HERE + "data", "common.pretrained"]


def base_of(settings: Settings, style: str, seed: int) -> Path:
    """The base of a seed, trained on the corpus in that style; with model_path a pre-trained model learns it."""
    corpus, seed = replace(settings.corpus, style=style), base_seed(seed, settings.bases)

    def model() -> tuple[Any, Any]:
        tokenizer = data.build_tokenizer()
        return build_decoder(settings.model, tokenizer, seed, data.written_numbers(tokenizer)), tokenizer

    def batches(tokenizer: Any) -> Callable[[int], SftBatch]:
        made = data.Corpus(encoder_of(tokenizer), corpus, seed)
        return lambda step: made.batch(step, settings.pretraining.batch_size)

    shared: dict[str, Any] = {
        "experiment": settings.experiment, "runs_dir": settings.runs_dir, "seed": seed, "config": settings.pretraining,
        "steps": settings.pretraining_steps, "batches": batches, "modules": [*SFT_MODULES, *TEXT_CODE],
    }  # fmt: skip
    if settings.model_path is not None:
        machine = {"lora": settings.lora, "device": settings.device, "dtype": settings.dtype}
        return tuned(f"base-{style}", settings.model_path, **shared, **machine, key=corpus)
    return supervised(f"base-{style}", **shared, threads=settings.threads, model=model, key=[settings.model, corpus])


def training_items(settings: Settings, kind: str, seed: int) -> tuple[tasks.Task, ...]:
    """The training tasks of a seed; its number is its world."""
    return tasks.items("train", seed, kind, seed, tasks.TRAINED[kind], settings.train_items)


def play(settings: Settings, model: Any, tokenizer: Any, some: list[dict], each: int, *stream: Any) -> list[Episode]:
    """`each` answers of the model to every task, task-major."""
    return run_episodes(
        model, tokenizer, tasks.PrivilegedTasks, some, group_size=each, max_new_tokens=settings.max_new_tokens,
        temperature=settings.evaluation.temperature, generator=generator(*stream),
    )  # fmt: skip
