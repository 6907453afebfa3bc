"""What arms share, each built once: students and teachers, the teachers' answers, and both before anything is learnt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.checkpoints import load_model
from common.compute import Meter
from common.files import read_json, read_json_lines, write_json
from common.models import build_decoder, parameter_count
from common.sft import SftBatch
from common.stages import input_key, stage
from common.supervised import SFT_MODULES, supervised
from common.teacher import Ask, LocalTeacher, collect
from common.tokenizers import PhraseEncoder, number_tokens
from experiments.exp_7_09_cot_distillation import data, problems
from experiments.exp_7_09_cot_distillation.evaluate import play, splits_of
from experiments.exp_7_09_cot_distillation.selection import Candidate, Selection, judged
from experiments.exp_7_09_cot_distillation.settings import ModelConfig, Settings

HERE = "experiments.exp_7_09_cot_distillation."
TEXT_CODE = [*SFT_MODULES, *(HERE + name for name in ("problems", "traces", "data")), "common.verifiers.thinking"]
SAMPLE_CODE = [
    *TEXT_CODE,
    HERE + "env",
    HERE + "selection",
    "common.teacher",
    "common.rollout",
    "common.decoding",
    "common.evaluation",
]
ANSWERS = "answers.jsonl"


def train_problems(settings: Settings, seed: int) -> tuple[problems.Problem, ...]:
    """The training problems of a seed."""
    return problems.items("train", seed, problems.ID_LENGTHS, settings.train_items)


def pretrained(settings: Settings, name: str, config: ModelConfig, seed: int) -> Path:
    """A decoder of this shape, pre-trained on its documents from nothing or from the teacher it is based on."""
    base = None if config.base is None else teacher(settings, config.base, seed)

    def model() -> tuple[Any, Any]:
        if base is not None:
            return load_model(base / "model")
        tokenizer = data.build_tokenizer()
        return build_decoder(config.model, tokenizer, seed, number_tokens(tokenizer, data.PREFIXES, data.NUMBERS)), tokenizer

    def batches(tokenizer: Any) -> Callable[[int], SftBatch]:
        corpus = data.Corpus(PhraseEncoder(tokenizer), config.corpus, seed)
        return lambda step: corpus.batch(step, settings.pretraining.batch_size)

    return supervised(
        name,
        experiment=settings.experiment,
        runs_dir=settings.runs_dir,
        threads=settings.threads,
        seed=seed,
        config=settings.pretraining,
        steps=config.pretraining_steps,
        model=model,
        batches=batches,
        key=config,
        modules=TEXT_CODE,
        inputs=[] if base is None else [base],
    )


def student(settings: Settings, name: str, seed: int) -> Path:
    """The start of a seed's arms. The plain student is pre-trained anew for each seed, any other one once per hundred."""
    return pretrained(settings, name, settings.students[name], seed if name == "student" else seed // 100 * 100)


def teacher(settings: Settings, name: str, seed: int) -> Path:
    """The teacher of all seeds of the same hundred."""
    return pretrained(settings, f"teacher-{name}", settings.teachers[name], seed // 100 * 100 + 99)


def answers(settings: Settings, name: str, seed: int) -> Path:
    """Folder with a teacher's answers to the training problems of a seed, and with what the teacher's size is."""
    source = teacher(settings, name, seed)

    def build(folder: Path) -> None:
        model, tokenizer = load_model(source / "model")
        asker = LocalTeacher(
            model.eval(),
            tokenizer,
            settings.max_new_tokens,
            seed,
            settings.teacher_temperature,
            label=f"{name} {input_key(source)}",
        )
        asks = [
            Ask(f"{i}/{k}", problem.prompt)
            for i, problem in enumerate(train_problems(settings, seed))
            for k in range(settings.answers_per_item)
        ]
        collect(asker, asks, folder / ANSWERS)
        write_json(folder / "teacher.json", {"parameters": parameter_count(model)})

    key = [settings.train_items, settings.answers_per_item, settings.max_new_tokens, settings.teacher_temperature, seed]
    root = Path(settings.runs_dir) / "stages"
    return stage(f"answers-{name}", build, config=key, modules=SAMPLE_CODE, inputs=[source], root=root)


def candidates(settings: Settings, folder: Path, seed: int, each: int) -> list[Candidate]:
    """The first `each` answers to every training problem, judged; without those that the token limit cut."""
    rows = [row for row in read_json_lines(folder / ANSWERS)[1:] if int(row["key"].split("/")[1]) < each and row["finished"]]
    return judged(train_problems(settings, seed), rows)


def sampled(folders: dict[str, Path], selection: Selection, meter: Meter) -> None:
    """Counts what sampling the selection's candidates took: a problem's prompt once, and all that was written."""
    each = selection.candidates // len(selection.teachers)
    for folder in folders.values():
        rows = [row for row in read_json_lines(folder / ANSWERS)[1:] if int(row["key"].split("/")[1]) < each]
        prompts = sum(row["tokens_in"] for row in rows if row["key"].endswith("/0"))
        meter.add_forward(prompts + sum(row["tokens_out"] for row in rows), read_json(folder / "teacher.json")["parameters"])


def before(settings: Settings, source: Path, seed: int) -> Path:
    """Folder with ``success.json``: a model's success on both splits before anything is learnt, as its arms are measured."""

    def build(folder: Path) -> None:
        model, tokenizer = load_model(source / "model")
        found = {}
        for split, some in splits_of(settings, seed).items():
            episodes = play(settings, model.eval(), tokenizer, [p.task for p in some], settings.evaluation.samples, seed, split)
            found[split] = sum(episode.success for episode in episodes) / len(episodes)
        write_json(folder / "success.json", found)

    key = [settings.evaluation, settings.max_new_tokens, seed >= 100, seed]
    modules = [*SAMPLE_CODE, HERE + "evaluate"]
    return stage("before", build, config=key, modules=modules, inputs=[source], root=Path(settings.runs_dir) / "stages")
