"""What each arm starts from, learns and is measured on; students made by SFT are stages, on-policy ones train in the cell."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.checkpoints import load_model
from common.compute import TRAIN_FLOPS, Budget, Meter
from common.distill import train_distill
from common.files import read_json
from common.models import parameter_count
from common.runlog import RunLog
from common.seeding import python_random
from experiments.exp_7_08_prompt_distillation import stages
from experiments.exp_7_08_prompt_distillation.ask import Mode, Reply, regraded
from experiments.exp_7_08_prompt_distillation.env import PromptedLabels
from experiments.exp_7_08_prompt_distillation.evaluate import Evaluator, agreement, judge, time_pair
from experiments.exp_7_08_prompt_distillation.settings import Settings
from experiments.exp_7_08_prompt_distillation.source import Item


@dataclass(frozen=True)
class Inputs:
    """``model``: the stage whose model is asked or trained further. ``teacher``: the stage of the teacher's answers, and
    ``changed`` that under the changed rules, where the arm is measured there."""

    base: Path
    model: Path
    teacher: Path
    changed: Path | None

    @property
    def folders(self) -> list[Path]:
        """All stages, each once."""
        return list(dict.fromkeys(path for path in (self.base, self.teacher, self.changed, self.model) if path))


def inputs_of(settings: Settings, arm: str, seed: int) -> Inputs:
    """The stages behind an arm; those that are missing are built."""
    branch = settings.branches[arm]
    base = stages.base_stage(settings, seed, "base")
    teacher = stages.teacher_stage(settings, seed)
    changed = stages.teacher_stage(settings, seed, changed=True) if branch.on_changed and not settings.real else None
    if branch.method == "sft":
        model = stages.student_stage(settings, arm, seed)
    else:
        model = stages.base_stage(settings, seed, branch.model)
    return Inputs(base, model, teacher, changed)


def distil(
    settings: Settings, arm: str, seed: int, model: Any, tokenizer: Any, inputs: Inputs, folder: Path, log: RunLog
) -> Meter:
    """On-policy distillation: the student answers the bare text, the base that sees the long prompt judges each token.

    With ``thought`` the teacher also sees what it wrote when it labelled the text. The budget is what the SFT arm takes with
    its labelling, the labelling itself paid from it where thoughts are used.
    """
    branch, config = settings.branches[arm], settings.distill_config(arm)
    source, replies = stages.source_of(settings, seed), stages.answers(inputs.teacher, "train")
    teacher, _ = load_model(inputs.base / "model", settings.device, settings.dtype)
    encode, items, size = source.encoder(tokenizer), source.items("train", settings.inputs), parameter_count(model)
    tasks = [
        {"prompt": source.prompt(item, False, False), "gold": item.gold, "index": index}
        for index, (item, reply) in enumerate(zip(items, replies, strict=True))
        if reply.label is not None
    ]

    def context(task: dict) -> list[int]:
        """What the teacher reads before the student's label: the long prompt, and its thinking up to the label."""
        item, reply = items[task["index"]], replies[task["index"]]
        if not branch.thought:
            return encode(item, True, False)
        text = reply.text[: len(reply.text) - len(reply.label or "")]
        return [*encode(item, True, True), *tokenizer(text, add_special_tokens=False)["input_ids"]]

    if not tasks:
        print(f"{arm}: the teacher gave no label to any of {len(items)} texts under seed {seed}; not trained")
        return Meter(size)
    labelled, flops, _ = stages.labelling(inputs.teacher, settings.inputs)
    spent = Meter(size)
    whole = TRAIN_FLOPS * size * branch.budget * settings.student_tokens + flops
    if branch.thought:
        spent.add_forward(labelled, parameter_count(teacher))
    meter = train_distill(
        model,
        teacher.requires_grad_(False),
        tokenizer,
        PromptedLabels,
        lambda step, count: python_random(seed, "tasks", step).choices(tasks, k=count),
        config,
        seed=seed,
        budget=Budget(flops=max(0.0, whole - spent.flops)),
        log=log,
        folder=folder,
        privileged=context,
    )
    meter.add_forward(spent.tokens_forward, parameter_count(teacher))
    return meter


def measure(settings: Settings, arm: str, seed: int, model: Any, tokenizer: Any, inputs: Inputs, log: RunLog) -> None:
    """Every record of an arm: the test and its parts, training texts, changed rules, time."""
    branch, evaluator = settings.branches[arm], Evaluator(log, settings.evaluation)
    mode, count, role = Mode(branch.prompted, branch.think), settings.evaluation.items, stages.test_role(seed)
    source, teacher = stages.source_of(settings, seed), stages.answers(inputs.teacher, "test")
    items = source.items(role, count)
    given = None if not is_teacher(settings, arm) else teacher  # the very answers the others are compared with

    def replies(split: str, some: Any, under: Any) -> list[Reply]:
        return judge(model, tokenizer, under, mode, some, settings.sampling, seed, split)

    own = given or replies("test", items, source)
    evaluator.split("test", items, own, teacher)
    evaluator.parts(items, own, teacher, seed)
    evaluator.keep_rollouts("test", source, mode, items, own)
    if given and settings.teacher == "local":
        evaluator.record("test", "self_agreement", agreement(replies("again", items, source), teacher))
    if branch.method != "none":
        learnt = stages.source_of(settings, seed, branch.changed)
        seen = learnt.items("train", min(count, branch.inputs or settings.inputs))
        labels = stages.answers(inputs.changed if branch.changed and inputs.changed else inputs.teacher, "train")[: len(seen)]
        evaluator.split("trained", seen, replies("trained", seen, learnt), labels)
        shared = {key(item) for item in items} & {key(item) for item in source.items("train", branch.inputs or settings.inputs)}
        log.record(split="test", metric="overlap", value=len(shared), n=len(items), step=100, final=True)
    if inputs.changed is not None:
        after = stages.source_of(settings, seed, changed=True)
        new, told = after.items(role, count), stages.answers(inputs.changed, "test")
        own = told if given else own if not branch.prompted else replies("changed", new, after)
        own = [regraded(reply, item, after) for reply, item in zip(own, new, strict=True)]
        evaluator.split("changed", new, own, told)
        pairs = [(float(a.success), old.gold != now.gold) for a, old, now in zip(own, items, new, strict=True)]
        evaluator.record("affected", "success", [value for value, flag in pairs if flag])
        evaluator.record("unaffected", "success", [value for value, flag in pairs if not flag])
    if branch.timed and settings.teacher == "local":  # a server's seconds say nothing about the model
        record_times(settings, model, tokenizer, mode, inputs, seed, evaluator)


def key(item: Item) -> tuple[str, ...]:
    """What makes two texts the same: their words, in any order."""
    return tuple(sorted(item.text.split()))


def is_teacher(settings: Settings, arm: str) -> bool:
    """Whether the arm is the teacher itself: its base, untrained, with the long prompt and thinking."""
    branch = settings.branches[arm]
    return branch.method == "none" and branch.model == "base" and branch.prompted and branch.think


def record_times(
    settings: Settings, model: Any, tokenizer: Any, mode: Mode, inputs: Inputs, seed: int, evaluator: Evaluator
) -> None:
    """Seconds per answer of the arm and of the teacher, measured in turns, and their ratio."""
    source = stages.source_of(settings, seed)
    teacher, names = load_model(inputs.base / "model", settings.device, settings.dtype)
    items = source.items(stages.test_role(seed), settings.evaluation.timed_batch)
    sides = {"teacher": (teacher, names, source, Mode(True, True)), "own": (model, tokenizer, source, mode)}
    found = time_pair(sides, items, settings.sampling, settings.evaluation)
    for name, value in found.items():
        evaluator.record("test", f"time/{name}", [value])
    for how in ("one", "batch"):
        evaluator.record("test", f"time/speedup_{how}", [found[f"teacher_{how}"] / found[f"own_{how}"]])


def write_cost(settings: Settings, arm: str, inputs: Inputs, meter: Meter, log: RunLog) -> None:
    """Tokens and FLOPs of the arm: its student's training, and the teacher's labelling where it learnt from it."""
    branch, costs = settings.branches[arm], {"tokens_trained": meter.tokens_trained, "tokens_forward": meter.tokens_forward}
    flops = meter.flops
    if branch.method == "sft":
        cost = read_json(inputs.model / "cost.json")
        flops, costs["tokens_trained"] = cost["flops"], cost["tokens_trained"]
        if branch.labels == "teacher":
            folder = inputs.changed if branch.changed and inputs.changed else inputs.teacher
            tokens, more, missing = stages.labelling(folder, branch.inputs or settings.inputs)
            flops, costs["tokens_forward"] = flops + more, tokens
            log.record(
                split="train", metric="unlabelled", value=missing, n=branch.inputs or settings.inputs, step=100, final=True
            )
    log.cost(flops=flops, **costs)
