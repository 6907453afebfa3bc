"""What the arms share, each built once: pre-trained models, the teacher's answers, students made by SFT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.checkpoints import load_model, save_model
from common.compute import FORWARD_FLOPS, TRAIN_FLOPS, Budget
from common.files import read_json, write_json
from common.lora import add_adapter, learning_rate
from common.models import parameter_count
from common.rejection import Row, row_batches
from common.seeding import base_seed
from common.sft import SftBatch, train_sft
from common.stages import stage
from common.supervised import SFT_MODULES, finish_stage, stage_log, supervised
from experiments.exp_7_08_prompt_distillation import data
from experiments.exp_7_08_prompt_distillation.ask import Mode, Reply, ask, ask_server
from experiments.exp_7_08_prompt_distillation.settings import Branch, Settings
from experiments.exp_7_08_prompt_distillation.source import FileSource, Item, RuleSource, Source

HERE = "experiments.exp_7_08_prompt_distillation."
TEXT_CODE = [HERE + "rules", HERE + "data", *SFT_MODULES]
ASK_CODE = [
    *(HERE + name for name in ("rules", "data", "source", "ask", "env")),
    *(
        f"common.{name}"
        for name in ("rollout", "decoding", "fused", "teacher", "teacher_server", "tokenizers", "verifiers.thinking")
    ),
]
STUDENT_CODE = [*TEXT_CODE, HERE + "source", HERE + "stages", "common.lora"]


def source_of(settings: Settings, seed: int, changed: bool = False) -> Source:
    """Texts, gold labels and prompts of a seed."""
    if settings.sentences is None:
        return RuleSource(seed, settings.changed_share if changed else 0.0)
    paths = [Path(path).expanduser() for path in (settings.sentences, settings.prompt_file) if path]
    return FileSource(*paths)


def root_of(settings: Settings) -> Path:
    return Path(settings.runs_dir) / "stages"


def base_stage(settings: Settings, seed: int, which: str) -> Path:
    """Folder with the model under ``model``: pre-trained on random tables, or the given one as it is.

    which: base (the teacher's weights) or small.
    """
    own = settings.teacher == "local" and which == "base"
    path = settings.model_path if own else settings.small_path  # a server keeps the teacher's weights to itself

    def copy(folder: Path) -> None:
        save_model(*load_model(str(path), dtype=settings.dtype), folder / "model")

    if settings.real:
        key = [path, settings.dtype]
        return stage(which, copy, config=key, modules=["common.checkpoints"], root=root_of(settings))
    shape = settings.model if which == "base" else settings.small
    first, steps = base_seed(seed, settings.bases), settings.pretraining_steps if which == "base" else settings.small_steps

    def model() -> tuple[Any, Any]:
        tokenizer = data.build_tokenizer()
        return data.build_model(shape, tokenizer, first), tokenizer

    def batches(tokenizer: Any) -> Callable[[int], SftBatch]:
        return data.Corpus(tokenizer, settings.corpus, first, steps).batch

    return supervised(
        which, experiment=settings.experiment, runs_dir=settings.runs_dir, threads=settings.threads, seed=first,
        config=settings.pretraining, steps=steps, model=model, batches=batches, key=[shape, settings.corpus], modules=TEXT_CODE,
    )  # fmt: skip


def teacher_stage(settings: Settings, seed: int, changed: bool = False) -> Path:
    """Folder with the teacher's answers under the long prompt, thinking: ``train.json`` and ``test.json``, and their cost.

    Seeds below 100 have validation texts in the place of the test's.
    """
    base, source = base_stage(settings, seed, "base"), source_of(settings, seed, changed)
    wanted = {"train": labelled_inputs(settings, changed), test_role(seed): settings.evaluation.items}
    mode = Mode(prompted=True, think=True)

    def build(folder: Path) -> None:
        model = tokenizer = None
        if settings.teacher == "local":
            model, tokenizer = load_model(base / "model", settings.device, settings.dtype)
        for role, count in wanted.items():
            items = source.items(role, count)
            if tokenizer is None:
                replies = ask_server(settings.server, source, items, folder / f"{role}.jsonl")
            else:
                replies = ask(model, tokenizer, source, items, mode, settings.sampling, seed, role)
            write_json(folder / ("train.json" if role == "train" else "test.json"), [reply.row for reply in replies])
        size, tokens = 0 if model is None else parameter_count(model), sum(reply.tokens for reply in answers(folder, "train"))
        cost = {"parameters": size, "tokens_forward": tokens, "flops": FORWARD_FLOPS * size * tokens}
        write_json(folder / "cost.json", cost)

    key = [wanted, settings.sampling, settings.device, settings.dtype, settings.threads, settings.teacher, seed]
    key += [changed and settings.changed_share, settings.sentences, settings.prompt_file]
    key += [settings.server] if settings.teacher == "server" else []
    name = "teacher-changed" if changed else "teacher"
    return stage(name, build, config=key, modules=ASK_CODE, inputs=[base], root=root_of(settings))


def labelled_inputs(settings: Settings, changed: bool) -> int:
    """How many training texts the teacher labels: those of the arm that learns from most of them."""
    learnt = [branch.inputs or settings.inputs for branch in settings.branches.values() if branch.changed == changed]
    return min(settings.inputs, max(learnt, default=1))


def test_role(seed: int) -> str:
    """The role of the texts a seed is judged on."""
    return "validation" if seed < 100 else "test"


def answers(folder: Path, which: str) -> list[Reply]:
    """The teacher's answers to the train or the test texts."""
    return [Reply.of(row) for row in read_json(folder / f"{which}.json")]


def labelling(folder: Path, inputs: int) -> tuple[int, int, int]:
    """(tokens, their FLOPs, answers without a label) of the teacher's first `inputs` training answers; a server's are free."""
    replies = answers(folder, "train")[:inputs]
    tokens = sum(reply.tokens for reply in replies)
    flops = FORWARD_FLOPS * read_json(folder / "cost.json")["parameters"] * tokens
    return tokens, flops, sum(reply.label is None for reply in replies)


def student_rows(
    source: Source, tokenizer: Any, items: Sequence[Item], replies: Sequence[Reply], labels: str, thought: bool
) -> list[Row]:
    """(ids, mask) rows: the text alone, and behind it the label (or the teacher's whole answer) with the end token.

    An input that the teacher gave no label is left out, whatever the labels, so that arms have the same inputs.
    """
    encode, rows = source.encoder(tokenizer), []
    for one, reply in zip(items, replies, strict=True):
        if reply.label is None:
            continue
        label = one.gold if labels == "gold" else reply.label
        text = reply.text if thought else label
        if text is None:
            raise ValueError(f"{one.text!r} has no gold label; arms with labels=gold need a file with labels")
        head = encode(one, False, thought)
        tail = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        rows.append((head + tail, [0] * len(head) + [1] * len(tail)))
    return rows


def student_stage(settings: Settings, name: str, seed: int) -> Path:
    """Folder with the student of an SFT arm under ``model``; its cost, without labelling, in ``cost.json``."""
    branch = settings.branches[name]
    start = student_stage(settings, branch.after, seed) if branch.after else base_stage(settings, seed, branch.model)
    teacher, config = teacher_stage(settings, seed, branch.changed), settings.sft_config(name)
    source, inputs = source_of(settings, seed, branch.changed), branch.inputs or settings.inputs

    def build(folder: Path) -> None:
        model, tokenizer = load_model(start / "model", settings.device, settings.dtype)
        budget = student_budget(settings, branch, parameter_count(model))
        items, replies = source.items("train", inputs), answers(teacher, "train")[:inputs]
        rows = student_rows(source, tokenizer, items, replies[: len(items)], branch.labels, branch.thought)
        if not rows:  # nothing to learn from: the student stays at its start, and its numbers say so
            print(f"{name}: the teacher gave no label to any of {len(items)} texts (see {teacher}/train.json); not trained")
            write_json(folder / "cost.json", {"flops": 0, "tokens_trained": 0})
            save_model(model, tokenizer, folder / "model")
            return
        model = add_adapter(model, settings.lora, "sft", seed)
        batch_at = row_batches(rows, tokenizer.pad_token_id, config.batch_size, seed, "student")
        rates = replace(config, lr=learning_rate(config.lr, settings.lora))
        with stage_log(settings.experiment, folder, name, seed) as log:
            train_sft(model, batch_at, rates, budget=budget, log=log, folder=folder)
        finish_stage(model.merge_and_unload() if settings.lora.enabled else model, tokenizer, folder)

    key = [branch_key(branch), config, inputs, settings.lora, settings.student_tokens, settings.device, settings.dtype]
    key += [seed, settings.threads, settings.sentences, settings.prompt_file]
    return stage(name, build, config=key, modules=STUDENT_CODE, inputs=[start, teacher], root=root_of(settings))


def branch_key(branch: Branch) -> list[Any]:
    """What of an arm its student depends on, beside its rate."""
    return [branch.model, branch.labels, branch.thought, branch.changed, branch.budget]


def student_budget(settings: Settings, branch: Branch, parameters: int) -> Budget:
    """FLOPs of a student's training: the same trained tokens for every student."""
    return Budget(flops=TRAIN_FLOPS * parameters * branch.budget * settings.student_tokens)
