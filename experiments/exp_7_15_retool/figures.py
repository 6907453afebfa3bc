"""Figures and tables of the report, from records alone: curves, what calls do, kinds, phases of training, speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.claims import load_claims
from common.learning_curves import crossing, curve_of, final_of, read_off
from common.records import Point, Record, ordered, sample_at
from common.report.figures import bars, curve
from common.report.tables import Table
from common.report.text import NOT_AVAILABLE, interval, number
from common.statistics import estimate
from experiments.exp_7_15_retool.problems import KINDS

CLAIMS = load_claims(Path(__file__).with_name("claims.yaml"))
LABELS = CLAIMS.labels
AXIS = "compute of the arm's own training, percent"
KIND_NAMES = {
    "small": "small sums", "medium": "larger sums", "large": "chain modulo 97", "tower": "power of a power",
    "equation": "equation", "long": "longer chains",
}  # fmt: skip
CURVES = {
    "success": "Success along training",
    "calls": "Calls of the interpreter per answer along training",
    "uses_tool": "Share of answers with a call along training",
    "length": "Tokens the policy writes per answer along training",
    "first_call": "Share of the answer in front of the first call along training",
    "code_ok": "Share of code that runs along training",
}
CALLING = ("calls", "uses_tool", "code_ok", "first_call", "retried", "mended", "length", "tokens_read")
PHASES = ((0, 30), (30, 70), (70, 100))
SPEED_RIVAL = "text_rl"


def trained(records: Sequence[Record]) -> list[str]:
    """The arms that have a learning curve."""
    return ordered([row for row in records if not row["final"]], "arm")


def figures(records: list[Record], folder: Path) -> list[str]:
    """A curve of each measure, and success at the end on trained and on longer problems."""
    names, arms = [], trained(records)
    for metric, title in CURVES.items():
        some = [arm for arm in arms if metric == "success" or not arm.startswith("text")]
        if some:
            shown = {
                "labels": LABELS,
                "unit": CLAIMS.metric(metric).unit,
                "x_label": AXIS,
                "y_label": CLAIMS.metric(metric).title,
            }
            names.append(curve(records, "id", metric, some, folder / f"{metric}.svg", title=title, **shown))
    for split, what in (("id", "problems as in training"), ("long", "longer chains than in training")):
        some = ordered([row for row in records if row["split"] == split and row["final"]], "arm")
        if some:
            title = f"Success at the end: {what}"
            names.append(bars(records, split, "success", some, folder / f"final-{split}.svg", title=title, labels=LABELS))
    return names


def sections(records: list[Record]) -> dict[str, str]:
    """Heading -> Markdown."""
    return {
        "Success by kind of problem": by_kind(records, "success").markdown,
        "Calls per answer by kind of problem": by_kind(records, "calls").markdown,
        "What calls do": calling(records).markdown,
        "How soon text RL's final success is reached": speed(records).markdown,
        "Phases of training": phases(records).markdown,
        "Steps of an arm at equal compute": steps(records).markdown,
        "Isolation": isolation(records),
    }


def shown(records: Sequence[Record], arm: str, metric: str, split: str) -> str:
    """A mean with its interval, or that there is none."""
    unit = CLAIMS.metric(metric).unit
    found = estimate(sample_at(records, Point(arm, metric, split)), rate=unit == "rate")
    return interval(found, unit) if found else NOT_AVAILABLE


def by_kind(records: Sequence[Record], metric: str) -> Table:
    """An arm per row, a kind per column."""
    known = {row["split"] for row in records}
    splits = [split for split in (*KINDS, "long") if split in known]
    arms = [arm for arm in ordered(records, "arm") if metric == "success" or not arm.startswith("text")]
    rows = [(LABELS.get(arm, arm), *(shown(records, arm, metric, split) for split in splits)) for arm in arms]
    return Table(("arm", *(KIND_NAMES[split] for split in splits)), rows)


def calling(records: Sequence[Record]) -> Table:
    """Calls, share of code that runs, repair after an error, place of the first call, lengths."""
    arms = [arm for arm in ordered(records, "arm") if not arm.startswith("text")]
    rows = [(LABELS.get(arm, arm), *(shown(records, arm, metric, "id") for metric in CALLING)) for arm in arms]
    return Table(("arm", *(CLAIMS.metric(metric).title for metric in CALLING)), rows)


def speed(records: Sequence[Record]) -> Table:
    """Per arm: under how many seeds its curve reaches text RL's final success, and after how much of its compute (mean)."""
    targets = final_of(records, SPEED_RIVAL, "id", "success")
    rows = []
    for arm in trained(records):
        curves = {seed: curve_of(records, arm, seed, "id", "success") for seed in targets}
        curves = {seed: points for seed, points in curves.items() if points}
        places = [crossing(points, targets[seed]) for seed, points in curves.items()]
        reached = [place for place in places if place is not None]
        share = number(sum(reached) / len(reached) / 100, "rate") if reached else NOT_AVAILABLE
        if curves:
            rows.append((LABELS.get(arm, arm), f"{len(reached)} of {len(curves)}", share))
    return Table(("arm", "seeds that reach it", "after this share of its compute"), rows)


def phases(records: Sequence[Record]) -> Table:
    """Change of success, calls, length and place of the first call in each third of an arm's compute, mean over seeds."""
    metrics = ("success", "calls", "length", "first_call")
    rows = []
    for arm in [arm for arm in trained(records) if not arm.startswith("text")]:
        seeds = ordered([row for row in records if row["arm"] == arm], "seed")
        for begin, end in PHASES:
            cells = []
            for metric in metrics:
                curves = [points for seed in seeds if (points := curve_of(records, arm, seed, "id", metric))]
                changes = [read_off(points, end) - read_off(points, begin) for points in curves]
                unit = CLAIMS.metric(metric).unit
                cells.append(number(sum(changes) / len(changes), unit, difference=True) if changes else NOT_AVAILABLE)
            rows.append((LABELS.get(arm, arm), f"{begin} to {end} %", *cells))
    return Table(("arm", "part of its compute", *(CLAIMS.metric(metric).title for metric in metrics)), rows)


def steps(records: Sequence[Record]) -> Table:
    """How many steps each arm takes for its compute, and how many tokens a step has."""
    rows = [
        (LABELS.get(arm, arm), shown(records, arm, "step_used", "train"), shown(records, arm, "tokens_per_step", "train"))
        for arm in trained(records)
    ]
    return Table(("arm", *(CLAIMS.metric(metric).title for metric in ("step_used", "tokens_per_step"))), rows)


def isolation(records: Sequence[Record]) -> str:
    """What the cells' sandboxes could do."""
    values = [row["value"] for row in records if row["metric"] == "isolated" and row["value"] is not None]
    weak = sum(value == 0 for value in values)
    if not values:
        return "No arm ran code."
    if not weak:
        return (
            "In every cell that ran code the sandbox isolated the programs (namespaces, seccomp, no network, no files of ours)."
        )
    return (
        f"**Not isolated** in {weak} of {len(values)} cells that ran code: interpreter.allow_weak=true, resource limits alone."
    )
