"""What is measured of a policy: success, what its traces do, how much of the teacher it recovered, what it imitates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.episodes import Episode
from common.evaluation import evaluate_tasks, rollout_row
from common.runlog import RunLog
from common.seeding import generator
from common.verifiers.thinking import split_thinking
from experiments.exp_7_09_cot_distillation import problems, traces
from experiments.exp_7_09_cot_distillation.env import StatedSums
from experiments.exp_7_09_cot_distillation.selection import Candidate
from experiments.exp_7_09_cot_distillation.settings import Settings

ROLLOUTS = 20  # kept of each split, spread over its items
GAP = 0.02  # a teacher this little above the start leaves no share to recover


def splits_of(settings: Settings, seed: int) -> dict[str, tuple[problems.Problem, ...]]:
    """Split -> problems, the same for all seeds of a kind: seeds below 100 tune and see validation items, the others test."""
    wanted, count = ("validation" if seed < 100 else "test"), settings.evaluation.items
    return {
        "id": problems.items(wanted, 0, problems.ID_LENGTHS, count),
        "ood": problems.items(wanted, 0, problems.OOD_LENGTHS, count),
    }


def play(
    settings: Settings,
    model: Any,
    tokenizer: Any,
    tasks: list[dict],
    samples: int,
    seed: int,
    stream: str,
    temperature: float | None = None,
) -> list[Episode]:
    """Episodes of tasks, task-major; every arm of a seed gets the same random numbers. `temperature`: if not the usual."""
    return evaluate_tasks(
        model,
        tokenizer,
        StatedSums,
        tasks,
        samples=samples,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.evaluation.temperature if temperature is None else temperature,
        generator=generator(seed, "evaluation", stream),
    ).episodes


def measure(
    settings: Settings, model: Any, tokenizer: Any, log: RunLog, seed: int, before: dict, teacher: dict
) -> dict[str, float]:
    """Final records of both splits with one mean per problem, and rollouts to read; success by split.

    before, teacher: success by split of the arm's start and of its teacher, for the recovered share.
    """
    success = {}
    samples = settings.evaluation.samples
    for split, some in splits_of(settings, seed).items():
        episodes = play(settings, model, tokenizer, [p.task for p in some], samples, seed, split)
        for metric, values in per_episode(episodes).items():
            means = [sum(values[i : i + samples]) / samples for i in range(0, len(values), samples)]
            items = means if metric in ("success", "length") else None
            value = sum(values) / len(values)
            log.record(split=split, metric=metric, value=value, n=len(values), step=100, final=True, items=items)
            if metric == "success":
                success[split] = value
        texts = [episode.texts[0] for episode in episodes]
        record_ratios(log, split, texts)
        certain = play(settings, model, tokenizer, [p.task for p in some], 1, seed, split, temperature=0.0)
        right = [float(episode.success) for episode in certain]
        value = sum(right) / len(right)
        log.record(split=split, metric="greedy", value=value, n=len(right), step=100, final=True, items=right)
        log.record(split=split, metric="recovered", **recovered(success[split], before[split], teacher[split]))
        shown = episodes[:: max(1, len(episodes) // ROLLOUTS)]
        log.rollouts([{"split": split, **rollout_row(e, tokenizer)} for e in shown])
    return success


def per_episode(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """Metric -> one value per episode."""
    found = [read(episode.texts[0]) for episode in episodes]
    return {
        "success": [float(episode.success) for episode in episodes],
        "not_stated": [float(episode.infos[0]["kind"] == "not_stated") for episode in episodes],
        "length": [float(sum(episode.mask)) for episode in episodes],
        **behaviours([episode.texts[0] for episode in episodes], found),
    }


def read(text: str) -> traces.Trace:
    """What the thinking of a completion does."""
    return traces.read_trace(split_thinking(text, opened=False).thought or "")


def behaviours(texts: Sequence[str], found: Sequence[traces.Trace]) -> dict[str, list[float]]:
    """Metric -> per completion, whether it verifies, turns back, judges itself, judges itself without looking, calls a tool."""
    return {
        "verification": [float(trace.verifications > 0) for trace in found],
        "backtracking": [float(trace.backtrackings > 0) for trace in found],
        "reflection": [float(trace.reflections > 0) for trace in found],
        "empty_reflection": [float(trace.empty > 0) for trace in found],
        "tool": [float(traces.CALL in text) for text in texts],
    }


def record_ratios(log: RunLog, split: str, texts: Sequence[str]) -> None:
    """Shares over all steps of all completions: wrong ones, checked ones, and who was withdrawn."""
    found = [read(text) for text in texts]
    steps, slips = sum(len(trace.steps) for trace in found), sum(trace.slips for trace in found)
    caught, gone = sum(trace.caught for trace in found), sum(trace.backtrackings for trace in found)
    checked = sum(trace.verifications for trace in found)
    ratios = {
        "slip": (slips, steps),
        "checked": (checked, steps),
        "caught": (caught, slips),
        "false_alarm": (gone - caught, steps - slips),
    }
    for metric, (part, whole) in ratios.items():
        value, reason = (part / whole, None) if whole else (None, "no such step")
        log.record(split=split, metric=metric, value=value, n=whole, step=100, final=True, reason=reason)


def recovered(after: float, before: float, teacher: float) -> dict[str, Any]:
    """The share of the teacher's lead that was recovered, as the fields of a record."""
    fields: dict[str, Any] = {"n": 1, "step": 100, "final": True}
    if teacher - before < GAP:
        return fields | {"value": None, "reason": "no lead of the teacher"}
    return fields | {"value": (after - before) / (teacher - before)}


def record_data(log: RunLog, kept: Sequence[Candidate], texts: Sequence[str], counts: dict[str, int]) -> None:
    """What an arm learns from: counts of each filtering step, and what the kept texts do (split `data`)."""
    for name, value in counts.items():
        log.record(split="data", metric=f"filter/{name}", value=value, n=counts["sampled"], step=100, final=True)
    if texts:
        for metric, values in behaviours(texts, [read(text) for text in texts]).items():
            log.record(split="data", metric=metric, value=sum(values) / len(values), n=len(values), step=100, final=True)
        record_ratios(log, "data", texts)


def record_imitation(
    settings: Settings,
    model: Any,
    tokenizer: Any,
    log: RunLog,
    seed: int,
    train: Sequence[problems.Problem],
    wrong: Sequence[Candidate],
) -> None:
    """Shares of the answers to problems that the teacher got wrong: the teacher's very number, and the right one.

    wrong: the teacher's wrong candidates; one pair of problem and wrong number counts once.
    """
    pairs = sorted({(c.group, number) for c in wrong if (number := traces.stated(c.text)) is not None})
    groups = sorted({group for group, _ in pairs})
    if not pairs:
        for metric in ("imitated", "imitated_right"):
            log.record(
                split="train", metric=metric, value=None, n=0, step=100, final=True, reason="the teacher was never wrong"
            )
        return
    samples = settings.evaluation.imitation_samples
    episodes = play(settings, model, tokenizer, [train[group].task for group in groups], samples, seed, "imitation")
    said = {group: [e.infos[0]["answer"] for e in episodes[i * samples : (i + 1) * samples]] for i, group in enumerate(groups)}
    imitated = sum(said[group].count(number) for group, number in pairs) / (samples * len(pairs))
    right = sum(episode.success for episode in episodes) / len(episodes)
    log.record(split="train", metric="imitated", value=imitated, n=len(pairs), step=100, final=True)
    log.record(split="train", metric="imitated_right", value=right, n=len(episodes), step=100, final=True)
