"""The figures and the tables of the report, from records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from common.claims import load_claims
from common.records import Point, Record, ordered, sample_at
from common.report.figures import bars
from common.report.text import NOT_AVAILABLE, number
from common.statistics import estimate

CLAIMS = load_claims(Path(__file__).with_name("claims.yaml"))
LABELS = CLAIMS.labels
FILTER = {
    "filter/sampled": "sampled", "filter/cut": "removed as cut off",
    "filter/wrong": "removed as wrong", "filter/repeated": "removed as repeated",
    "filter/over_cap": "removed over the cap", "filter/kept": "kept", "filter/kept_wrong": "wrong among the kept",
    "filter/solved": "problems with a kept one", "backtracking": "kept traces that turn back",
}  # fmt: skip
DEEDS = {
    "greedy": "right, decoded greedily", "length": "tokens", "verification": "verifies", "backtracking": "turns back",
    "reflection": "judges itself", "empty_reflection": "judges itself without looking", "tool": "writes a tool call",
    "not_stated": "states no answer",
}  # fmt: skip
STEPS = {
    "slip": "steps that are wrong", "checked": "steps that are checked", "caught": "wrong steps that are withdrawn",
    "false_alarm": "right steps that are withdrawn",
}  # fmt: skip


def figures(records: list[Record], folder: Path) -> list[str]:
    """Success, the recovered share, what traces do, what is imitated."""
    arms = ordered(records, "arm")
    trained = [arm for arm in arms if arm not in ("start", "start_large", "teacher", "teacher_tool")]
    pictures = (
        ("id", "success", arms, "Success on new problems of trained lengths"),
        ("ood", "success", arms, "Success on problems longer than any trained"),
        ("id", "recovered", trained, "Share of the teacher's lead that was recovered, trained lengths"),
        ("id", "length", arms, "Tokens of a completion, trained lengths"),
        ("id", "verification", arms, "Completions that verify a step, trained lengths"),
        ("id", "caught", arms, "Wrong steps that are withdrawn, trained lengths"),
        ("train", "imitated", arms, "Training problems that the teacher got wrong: answers with the teacher's wrong number"),
    )
    names = []
    for split, metric, some, title in pictures:
        unit = CLAIMS.metric(metric).unit
        path = folder / f"{metric}-{split}.svg"
        names.append(bars(records, split, metric, some, path, title=title, labels=LABELS, unit=unit))
    return names


def table(records: Sequence[Record], split: str, columns: Mapping[str, str]) -> str:
    """One row per arm that has any of the metrics, means over seeds."""
    lines = [f"| arm | {' | '.join(columns.values())} |", "| --- |" + " --- |" * len(columns)]
    for arm in ordered(records, "arm"):
        cells = []
        for metric in columns:
            found = estimate(sample_at(records, Point(arm, metric, split)))
            cells.append(number(found.mean, CLAIMS.metric(metric).unit) if found else NOT_AVAILABLE)
        if set(cells) != {NOT_AVAILABLE}:
            lines.append(f"| {LABELS.get(arm, arm)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def sections(records: list[Record]) -> dict[str, str]:
    """Heading -> Markdown."""
    return {
        "What each filtering step removed, and what was learnt from": table(records, "data", FILTER),
        "What completions do, trained lengths": table(records, "id", DEEDS),
        "What becomes of single steps, trained lengths": table(records, "id", STEPS),
        "What becomes of single steps, longer problems": table(records, "ood", STEPS),
    }
