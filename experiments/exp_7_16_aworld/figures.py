"""The figures and tables of the report, from records alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.claims import load_claims
from common.records import Point, Record, ordered, sample_at
from common.report.figures import bars, curve
from common.report.tables import Table
from common.report.text import NOT_AVAILABLE, interval
from common.statistics import estimate

CLAIMS = load_claims(Path(__file__).with_name("claims.yaml"))
LABELS = CLAIMS.labels
AXIS = "compute of the arm's own training, percent"
ANSWERS = ("success", "level_1", "level_2", "level_3", "calls_per_solved", "extra_calls", "unanswered")
CALLS = ("calls", "tool_success", "obeyed", "within_budget", "wasted", "malformed", "refused", "failed", "recovered")
HELD = ("episodes", "lost_calls", "restarts", "leaked_processes", "leaked_descriptors")


def figures(records: list[Record], folder: Path) -> list[str]:
    """Answers and calls at the end and along the way."""
    arms = [arm for arm in ordered(records, "arm") if any(r["arm"] == arm and r["metric"] == "success" for r in records)]
    trained = [arm for arm in arms if any(row["arm"] == arm and not row["final"] for row in records)]
    names = []
    for metric, what in (
        ("success", "right answers"), ("tool_success", "calls that a tool answered"),
        ("obeyed", "calls that respect the constraints"), ("wasted", "calls that the plan does without"),
    ):  # fmt: skip
        if arms:
            path = folder / f"{metric}.svg"
            names.append(bars(records, "questions", metric, arms, path, title=what, labels=LABELS, x_label=what))
        if trained:
            path, title = folder / f"{metric}-curve.svg", f"{what}, along training"
            share = {"labels": LABELS, "x_label": AXIS, "y_label": what}
            names.append(curve(records, "questions", metric, trained, path, title=title, **share))
    return names


def sections(records: list[Record]) -> dict[str, str]:
    """Heading -> Markdown."""
    arms = [arm for arm in ordered(records, "arm") if any(r["arm"] == arm and r["metric"] == "success" for r in records)]
    if not arms:
        return {}
    return {
        "Answers": table(records, arms, ANSWERS, "questions"),
        "Calls": table(records, arms, CALLS, "questions"),
        "What the servers bore, and what was left": table(records, arms, HELD, "train"),
    }


def table(records: list[Record], arms: list[str], metrics: Sequence[str], split: str) -> str:
    """One line per arm, one column per metric: mean and interval."""

    def cell(arm: str, metric: str) -> str:
        unit = CLAIMS.metric(metric).unit
        value = estimate(sample_at(records, Point(arm, metric, split)), rate=unit == "rate")
        return interval(value, unit) if value else NOT_AVAILABLE

    names = [metric.replace("_", " ") for metric in metrics]
    return Table(("arm", *names), [(LABELS.get(arm, arm), *(cell(arm, metric) for metric in metrics)) for arm in arms]).markdown
