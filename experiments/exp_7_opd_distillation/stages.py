"""What the arms share, each built once: a student per seed and task, the teachers, and the teacher's answers for SFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.checkpoints import load_model
from common.episodes import Episode, run_episodes
from common.files import read_json, write_json
from common.models import build_decoder, parameter_count
from common.pretrained import encoder_of, tuned
from common.rejection import Row
from common.seeding import generator
from common.sft import SftBatch
from common.stages import stage
from common.supervised import SFT_MODULES, supervised
from experiments.exp_7_opd_distillation import data
from experiments.exp_7_opd_distillation.data import TASKS
from experiments.exp_7_opd_distillation.settings import Settings, TaskConfig

HERE = "experiments.exp_7_opd_distillation."
TEXT_CODE = [*(HERE + name for name in ("chains", "dial", "data")), "common.pretrained"]
SAMPLE_CODE = [*TEXT_CODE, *(f"common.{name}" for name in ("episodes", "rollout", "decoding", "fused", "seeding"))]
ENVS = {"chain": TASKS["chain"].DistilledChains, "dial": TASKS["dial"].SafeDial}
TEACHER_SEED = 99  # of each hundred: no cell has it


def training_items(settings: Settings, task: str, seed: int) -> tuple[Any, ...]:
    """The training items of a seed, trained lengths in turn."""
    config: TaskConfig = getattr(settings, task)
    return TASKS[task].items("train", seed, TASKS[task].TRAINED, config.train_items)


def pretrained(settings: Settings, task: str, who: str, seed: int) -> Path:
    """`who`: student, teacher, or narrow (the teacher's shape on games that need no mending). Trained on the corpus.

    With model_path a pre-trained student and teacher in the place of tiny ones.
    """
    config: TaskConfig = getattr(settings, task)
    steps = {"student": config.student_steps, "teacher": config.teacher_steps, "narrow": config.narrow_steps}[who]
    shape = config.student if who == "student" else config.teacher
    corpus = {"student": settings.student_corpus, "teacher": settings.corpus, "narrow": settings.narrow_corpus}[who]

    def model() -> tuple[Any, Any]:
        tokenizer = data.build_tokenizer(task)
        return build_decoder(shape, tokenizer, seed, data.written_numbers(tokenizer, task)), tokenizer

    def batches(tokenizer: Any) -> Callable[[int], SftBatch]:
        made = data.Corpus(task, encoder_of(tokenizer), corpus, seed)
        return lambda step: made.batch(step, settings.pretraining.batch_size)

    shared: dict[str, Any] = {
        "experiment": settings.experiment, "runs_dir": settings.runs_dir, "seed": seed, "config": settings.pretraining,
        "steps": steps, "batches": batches, "modules": [*SFT_MODULES, *TEXT_CODE],
    }  # fmt: skip
    if settings.model_path is not None:
        source = settings.model_path if who == "student" else str(settings.teacher_path)
        machine = {"lora": settings.lora, "device": settings.device, "dtype": settings.dtype}
        return tuned(f"{task}-{who}", source, **shared, **machine, key=corpus)
    return supervised(f"{task}-{who}", **shared, threads=settings.threads, model=model, key=[shape, corpus])


def teacher_of(settings: Settings, task: str, who: str, seed: int) -> Path:
    """The teacher of all seeds of the same hundred."""
    return pretrained(settings, task, "narrow" if who == "narrow" else "teacher", seed // 100 * 100 + TEACHER_SEED)


def play(
    settings: Settings, task: str, model: Any, tokenizer: Any, tasks: list[dict], each: int, *stream: Any
) -> list[Episode]:
    """`each` episodes of the model on every task, as long as the longest of them may take."""
    config: TaskConfig = getattr(settings, task)
    longest = max(len(options.get("moves", options.get("stops"))) for options in tasks)
    return run_episodes(
        model, tokenizer, ENVS[task], tasks, group_size=each, max_turns=TASKS[task].turn_limit(longest),
        max_new_tokens=config.max_new_tokens, temperature=settings.evaluation.temperature, generator=generator(*stream),
    )  # fmt: skip


def teacher_answers(settings: Settings, task: str, seed: int, few: bool) -> Path:
    """Folder with answers.json: rows of the teacher's episodes on the seed's training prompts, unfiltered; tokens it took."""
    config: TaskConfig = getattr(settings, task)
    items, each = training_items(settings, task, seed), config.samples
    if few:
        items, each = items[: config.few_items], config.few_samples
    teacher_folder = teacher_of(settings, task, "wide", seed)

    def build(folder: Path) -> None:
        teacher, tokenizer = load_model(teacher_folder / "model", settings.device, settings.dtype)
        tasks = [TASKS[task].task(item) for item in items]
        episodes = play(settings, task, teacher, tokenizer, tasks, each, seed, "teacher answers")
        write_json(
            folder / "answers.json",
            {
                "rows": [[episode.ids, episode.mask] for episode in episodes],
                "tokens_forward": sum(episode.tokens_forward for episode in episodes),
                "teacher_parameters": parameter_count(teacher),
                "success": sum(episode.success for episode in episodes) / len(episodes),
            },
        )

    key = [config, few, seed, settings.evaluation.temperature, settings.threads]
    root = Path(settings.runs_dir) / "stages"
    name = f"{task}-answers{'-few' if few else ''}"
    return stage(name, build, config=key, modules=SAMPLE_CODE, inputs=[teacher_folder], root=root)


def load_answers(folder: Path) -> tuple[list[Row], int, int]:
    """The rows of `teacher_answers`, the tokens that sampling them took and the teacher's size."""
    found = read_json(folder / "answers.json")
    rows = [(ids, mask) for ids, mask in found["rows"]]
    return rows, found["tokens_forward"], found["teacher_parameters"]
