"""Figures and tables of the report, from records alone: success and style along training, speed against RL, style."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.claims import load_claims
from common.learning_curves import speed_table
from common.records import Point, Record, ordered, sample_at
from common.report.figures import bars, curve
from common.report.tables import Table
from common.report.text import NOT_AVAILABLE, interval
from common.statistics import estimate

CLAIMS = load_claims(Path(__file__).with_name("claims.yaml"))
LABELS = CLAIMS.labels
NAMES = {
    "steps": "worked steps, whose way can be explained",
    "codes": "codes, which need a table",
    "search": "numbers that no rule explains",
}
RIVAL = {"steps": "rlvr", "codes": "codes_rlvr", "search": "search_rlvr"}


def arms_of(records: Sequence[Record], kind: str) -> list[str]:
    """The arms that were measured on a kind of task."""
    return ordered([row for row in records if row["split"] == kind], "arm")


def figures(records: list[Record], folder: Path) -> list[str]:
    """Success of each kind by sampled tokens, and the habit of checking in worked steps."""
    names = []
    for kind, what in NAMES.items():
        arms = arms_of(records, kind)
        trained = [arm for arm in arms if any(row["arm"] == arm and not row["final"] for row in records)]
        share = {"labels": LABELS, "x_label": "tokens sampled", "x": "sampled"}
        sampling = [arm for arm in trained if not arm.startswith("sft")]  # SFT samples nothing
        if sampling:
            title = f"Success on new tasks, by tokens sampled: {what}"
            path = folder / f"{kind}-tokens.svg"
            names.append(curve(records, kind, "success", sampling, path, title=title, y_label="success", **share))
            if kind == "steps":
                title = "Share of answers that check a result, by tokens sampled"
                path = folder / "steps-checks.svg"
                names.append(
                    curve(records, kind, "checks", sampling, path, title=title, y_label="answers with a check", **share)
                )
        if arms:
            title = f"Success on new tasks at the end: {what}"
            names.append(bars(records, kind, "success", arms, folder / f"{kind}-final.svg", title=title, labels=LABELS))
    return names


def sections(records: list[Record]) -> dict[str, str]:
    """Heading -> Markdown: what each arm needs to reach RLVR's success, style, what the teacher knows."""
    found = {}
    for kind, what in NAMES.items():
        arms = arms_of(records, kind)
        axes = {"steps": "step", "sampled tokens": "sampled", "FLOPs": "flops"}
        if arms and kind == "steps":
            table = speed_table(records, arms, RIVAL[kind], axes, LABELS, split=kind)
            found[f"How soon RLVR's final success is reached: {what}"] = table.markdown
        if arms:
            found[f"Success and style: {what}"] = style_table(records, kind, arms).markdown
    return found


STYLE = ("success", "checks", "mended", "entropy", "length")


def cell(records: Sequence[Record], arm: str, metric: str, split: str) -> str:
    """A mean with its interval, or that there is none."""
    unit = CLAIMS.metric(metric).unit
    found = estimate(sample_at(records, Point(arm, metric, split)), rate=unit == "rate")
    return interval(found, unit) if found else NOT_AVAILABLE


def style_table(records: Sequence[Record], kind: str, arms: Sequence[str]) -> Table:
    """Each arm on new tasks, longer ones and its training tasks: success, and how its answers look."""
    splits = [split for split in (kind, f"{kind}-long", f"{kind}-train") if any(row["split"] == split for row in records)]
    metrics = STYLE if kind == "steps" else ("success", "entropy")
    header = ("arm", "split", *(CLAIMS.metric(metric).title for metric in metrics))
    rows = [(LABELS.get(arm, arm), split, *(cell(records, arm, m, split) for m in metrics)) for arm in arms for split in splits]
    return Table(header, rows)
