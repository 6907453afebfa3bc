"""Figures and tables of the report, from records alone: learning curves, success by length, speed against GRPO."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.claims import load_claims
from common.learning_curves import speed_table
from common.records import Point, Record, ordered, sample_at
from common.report.figures import curve
from common.report.tables import Table
from common.report.text import NOT_AVAILABLE, interval
from common.statistics import Sample, estimate
from experiments.exp_7_opd_distillation.data import TASKS

CLAIMS = load_claims(Path(__file__).with_name("claims.yaml"))
LABELS = CLAIMS.labels
NAMES = {"chain": "chains, where an early slip is fatal", "dial": "the dial, where a slip can be mended"}


def figures(records: list[Record], folder: Path) -> list[str]:
    """For each task: success by steps, by FLOPs, and by the length of the episode."""
    names = []
    for task, what in NAMES.items():
        arms = [arm for arm in ordered(records, "arm") if arm.startswith(task)]
        trained = [arm for arm in arms if not arm.endswith(("start", "few"))]
        if not arms:
            continue
        share = {"labels": LABELS, "y_label": "success"}
        if trained:
            for x, name, label in (("step", "steps", "optimizer steps"), ("flops", "flops", "FLOPs")):
                title = f"Success on new tasks of trained lengths: {what}, by {label}"
                path = folder / f"{task}-{name}.svg"
                names.append(curve(records, "id", "success", trained, path, x=x, title=title, x_label=label, **share))
        title = f"Success by length of the task: {what}; lengths from {min(TASKS[task].LONGER)} on were not trained"
        rows, path = by_length(records, task), folder / f"{task}-lengths.svg"
        names.append(curve(rows, "length", "success", arms, path, title=title, x_label="steps or stops of the task", **share))
    return names


def by_length(records: Sequence[Record], task: str) -> list[Record]:
    """Final success with the task's length in place of the step."""
    lengths = {f"k{k}": k for k in (*TASKS[task].TRAINED, *TASKS[task].LONGER)}
    return [
        {**row, "split": "length", "step": lengths[row["split"]], "final": False}
        for row in records
        if row["final"] and row["metric"] == "success" and row["split"] in lengths and row["arm"].startswith(task)
    ]


def sections(records: list[Record]) -> dict[str, str]:
    """Heading -> Markdown: what each arm needs to reach GRPO's success, success by length, what goes wrong."""
    found = {}
    for task, what in NAMES.items():
        arms = [arm for arm in ordered(records, "arm") if arm.startswith(task)]
        if arms:
            found[f"How soon GRPO's final success is reached: {what}"] = speed_table(
                records, arms, f"{task}_grpo", {"steps": "step", "FLOPs": "flops"}, LABELS
            ).markdown
            found[f"Success by length: {what}"] = lengths_table(records, task, arms).markdown
            found[f"What goes wrong: {what}"] = faults(records, task, arms).markdown
    return found


def cell(records: Sequence[Record], arm: str, metric: str, split: str) -> str:
    """A mean with its interval, or that there is none."""
    sample: Sample = sample_at(records, Point(arm, metric, split))
    unit = CLAIMS.metric(metric).unit
    found = estimate(sample, rate=unit == "rate")
    return interval(found, unit) if found else NOT_AVAILABLE


def lengths_table(records: Sequence[Record], task: str, arms: Sequence[str]) -> Table:
    """Final success at each length."""
    lengths = (*TASKS[task].TRAINED, *TASKS[task].LONGER)
    rows = [(LABELS.get(arm, arm), *(cell(records, arm, "success", f"k{k}") for k in lengths)) for arm in arms]
    return Table(("arm", *(f"{k}" for k in lengths)), rows)


FAULTS = {
    "chain": ("fault/misread", "fault/arithmetic", "fault/malformed", "fault/short", "fault/long", "length"),
    "dial": ("slip", "lost", "off", "length"),
}


def faults(records: Sequence[Record], task: str, arms: Sequence[str]) -> Table:
    """First faults of chains, slips and lost turns of the dial, on the longer tasks."""
    rows = [(LABELS.get(arm, arm), *(cell(records, arm, metric, "ood") for metric in FAULTS[task])) for arm in arms]
    return Table(("arm", *(CLAIMS.metric(metric).title for metric in FAULTS[task])), rows)
