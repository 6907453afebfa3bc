"""Tables of a report: plain rows of text made from records, provenance and claims; no number is typed by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.claims import Claims, Discrepancy, Finding, Row
from common.records import NOT_FINISHED, Point, Record, ordered, rows_at, sample_of
from common.report.text import NOT_AVAILABLE, basis, cell, interval, number, plural
from common.statistics import MIN_SEEDS, difference, estimate

Provenance = Mapping[str, Any]
# A gap between two results is only called real when these settings agree.
COMPARABLE = ("device", "dtype", "engine", "batch_size", "eval_batch_size")


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join("| " + " | ".join(cell(text) for text in line) + " |" for line in lines)


def cells_of(provenance: Provenance, arm: str) -> tuple[int, int]:
    """How many cells of an arm ended well and how many were meant to run."""
    done = sum(cell["arm"] == arm for cell in provenance.get("cells", []))
    return done, done + sum(cell["arm"] == arm for cell in provenance.get("failed", []))


def measured(records: Sequence[Record], point: Point, claims: Claims, provenance: Provenance) -> str:
    """One number of ours with interval and n; failed and undefined cells are counted, never dropped in silence."""
    rows = rows_at(records, point)
    unit = claims.metric(point.metric).unit
    sample = sample_of(rows)
    total, have = max(len(rows), cells_of(provenance, point.arm)[1]), len(sample.values)
    waiting = sum(c["arm"] == point.arm and c["error"] == NOT_FINISHED for c in provenance.get("failed", []))
    failed = total - len(rows) - waiting
    undefined = [row for row in rows if row["value"] is None]
    notes = [f"{count} {word}" for count, word in ((failed, "failed"), (waiting, NOT_FINISHED)) if count]
    if undefined:
        reasons = ", ".join(sorted({row.get("reason", "no reason given") for row in undefined}))
        notes.append(f"{len(undefined)} undefined: {reasons}")
    found = estimate(sample, rate=unit == "rate")
    if found is None:
        return f"{NOT_AVAILABLE} (0 of {plural(total, 'seed')}; {'; '.join(notes)})" if notes else "not run"
    if not notes:
        return f"{interval(found, unit)}, {basis(found)}{trials(rows) if not found.items else ''}"
    if failed and unit == "rate":
        notes.append(f"{number(found.mean * have / (have + failed), unit)} with failures as 0")
    items = f", {plural(found.items, 'item')}" if found.items else ""
    return f"{interval(found, unit)} over {have} of {plural(total, 'seed')} ({'; '.join(notes)}){items}"


def trials(rows: Sequence[Record]) -> str:
    """How many trials stand behind each seed's number, where a seed has more than one."""
    counts = [row["n"] for row in rows]
    if max(counts) <= 1:
        return ""
    return f", n {min(counts):,}" + (f" to {max(counts):,}" if max(counts) > min(counts) else "")


def finding_text(finding: Finding, claims: Claims) -> str:
    """The estimate behind a verdict, or why there is none."""
    if finding.interval is None:
        return finding.reason
    unit = claims.metric(finding.claim.test.metric).unit
    pairing = ", paired" if finding.interval.paired else ""
    compared = len(finding.claim.test.points) == 2
    text = f"{interval(finding.interval, unit, difference=compared)}, {basis(finding.interval)}{pairing}"
    return f"{text} ({finding.reason})" if finding.reason else text


def requirement(finding: Finding, claims: Claims) -> str:
    """What the claim asks of the numbers, in words, e.g. success (ood): GRPO minus start > 0."""
    test = finding.claim.test
    unit = claims.metric(test.metric).unit
    first, *rest = test.points
    words = f"{claims.metric(first.metric).title} ({first.split}): {_place(first, claims)}"
    if rest:
        changed = [name for name in ("metric", "split") if getattr(rest[0], name) != getattr(first, name)]
        extra = f" ({', '.join(getattr(rest[0], name) for name in changed)})" if changed else ""
        words += f" minus {_place(rest[0], claims)}{extra}"
    low, high = ("0" if end == 0 else number(end, unit, bool(rest)) if math.isfinite(end) else "" for end in test.bounds)
    if test.kind == "within":
        if test.low is None:
            return f"{words} at most {high}"
        return f"{words} at least {low}" if test.high is None else f"{words} from {low} to {high}"
    return f"{words} {'>' if test.direction == 'greater' else '<'} {low if test.direction == 'greater' else high}"


def _place(point: Point, claims: Claims) -> str:
    label = claims.label(point.arm)
    return label if point.step is None else f"{label} at step {point.step:,}"


def claims_table(findings: Sequence[Finding], claims: Claims) -> Table:
    """Every claim with its test and verdict; the result table names the claims by their numbers here."""
    header = ("no.", "claim", "book", "source", "test", "ours (95 % interval)", "verdict")
    rows = []
    for place, finding in enumerate(findings, 1):
        claim, ours = finding.claim, finding_text(finding, claims)
        rows.append((str(place), claim.sentence, claim.book, claim.source, requirement(finding, claims), ours, finding.verdict))
    return Table(header, rows)


def main_table(
    claims: Claims,
    records: Sequence[Record],
    provenance: Provenance,
    findings: Sequence[Finding],
    study: str,
    base: tuple[Sequence[Record], Provenance] | None = None,
) -> Table:
    """The result table: the rows named in claims.yaml, then each final metric of the records that no row names."""
    verdicts = {finding.claim.id: f"{finding.verdict} (claim {place})" for place, finding in enumerate(findings, 1)}
    rows = [row for row in claims.table if row.study == study] or _all_rows(records)
    header = ["variant", "metric", "ours (95 % interval, n)", "book", "source", "verdict"]
    if base is not None:
        header[3:3] = ["base", "this minus base"]
    lines = []
    for row in rows:
        metric = f"{claims.metric(row.metric).title}, {row.split}"
        metric += "" if row.step is None else f", step {row.step:,}"
        line = [claims.label(row.variant), metric, measured(records, row.point, claims, provenance)]
        if base is not None:
            line += [
                measured(base[0], row.point, claims, base[1]),
                against_base(row.point, claims, records, provenance, base),
            ]
        lines.append([*line, row.book, row.source, verdicts.get(row.claim or "", "")])
    return Table(header, lines)


def _all_rows(records: Sequence[Record]) -> list[Row]:
    final = [row for row in records if row["final"]]
    return [
        Row(arm, metric, split)
        for arm in ordered(final, "arm")
        for split, metric in dict.fromkeys((r["split"], r["metric"]) for r in final if r["arm"] == arm)
    ]


def against_base(
    point: Point,
    claims: Claims,
    records: Sequence[Record],
    provenance: Provenance,
    base: tuple[Sequence[Record], Provenance],
) -> str:
    """A variant's gap to the base; not called real when the settings differ or the interval holds 0."""
    ours, theirs = provenance.get("configuration", {}), base[1].get("configuration", {})
    differing = [
        f"{key} {ours[key]} against {theirs[key]}"
        for key in COMPARABLE
        if key in ours and key in theirs and ours[key] != theirs[key]
    ]
    unit = claims.metric(point.metric).unit
    gap = difference(sample_of(rows_at(records, point)), sample_of(rows_at(base[0], point)), rate=unit == "rate")
    if gap is None:
        return NOT_AVAILABLE
    text = interval(gap, unit, difference=True)
    if differing:
        return f"{text}, not comparable: {', '.join(differing)}"
    if gap.seeds < MIN_SEEDS:
        return f"{text}, too few seeds"
    return f"{text}, {'within noise' if gap.low <= 0 <= gap.high else 'beyond noise'}"


def discrepancy_table(
    claims: Claims, records: Sequence[Record], provenance: Provenance, findings: Sequence[Finding], study: str
) -> Table | None:
    """Book, source and ours side by side, with the verdict that decides between them where a claim does."""
    by_id = {finding.claim.id: finding for finding in findings}

    def ours(item: Discrepancy) -> str:
        parts = []
        for point in item.ours:
            metric = claims.metric(point.metric).title
            parts.append(f"{_place(point, claims)}, {metric}, {point.split}: {measured(records, point, claims, provenance)}")
        if item.claim in by_id:
            finding = by_id[item.claim or ""]
            parts.append(f"{finding.claim.sentence}: {finding_text(finding, claims)}, {finding.verdict}")
        return "; ".join(parts + ([item.note] if item.note else []))

    rows = [
        (item.id.replace("-", " "), item.book, item.source, ours(item)) for item in claims.discrepancies if item.study == study
    ]
    return Table(("point", "book", "source", "ours"), rows) if rows else None


COSTS = (
    ("wall s", "wall_s", 1.0, 1),
    ("CPU s", "cpu_s", 1.0, 1),
    ("peak MB", "peak_memory_mb", 1.0, 0),
    ("tokens forward (million)", "tokens_forward", 1e6, 2),
    ("tokens trained (million)", "tokens_trained", 1e6, 2),
    ("TFLOP", "flops", 1e12, 2),
)


def compute_table(provenance: Provenance, claims: Claims) -> Table:
    """Mean cost of one cell per arm, then each shared stage and the whole run."""
    cells, stages = provenance.get("cells", []), provenance.get("stages", [])
    lines: list[tuple[str, str, Sequence[Mapping[str, Any]]]] = []
    for arm in ordered([*cells, *provenance.get("failed", [])], "arm"):
        done, total = cells_of(provenance, arm)
        lines.append((claims.label(arm), f"{done} of {total}", [cell for cell in cells if cell["arm"] == arm]))
    lines += [(f"shared stage {stage.get('name', '')}", "", [stage]) for stage in stages]
    if lines and "totals" in provenance:
        lines.append(("everything, summed", "", [provenance["totals"]]))
    used = [column for column in COSTS if any(cost.get(column[1]) for cost in [*cells, *stages])]
    rows = []
    for name, count, costs in lines:
        row = [name, count]
        for _, key, scale, decimals in used:
            known = [cost[key] for cost in costs if key in cost]
            row.append(f"{sum(known) / len(known) / scale:,.{decimals}f}" if known else "")
        rows.append(row)
    return Table(("per cell of", "cells done", *(column[0] for column in used)), rows)


def failures(provenance: Provenance) -> list[str]:
    """One sentence per failed cell, and a warning where an arm lost more than half of its cells."""
    failed = provenance.get("failed", [])
    lines = [f"{item['arm']}, seed {item['seed']}: {item['error']}" for item in failed]
    for arm in ordered(failed, "arm"):
        done, total = cells_of(provenance, arm)
        if not done:
            lines.append(f"Warning: no cell of {arm} finished.")
        elif done * 2 < total:
            lines.append(f"Warning: {arm} lost {total - done} of {total} cells; its mean speaks of the survivors only.")
    return lines


def overlap_notes(records: Sequence[Record]) -> list[str]:
    """What the records say about test items that occur in training."""
    worst: dict[str, float] = {}
    for row in records:
        if row["metric"] == "overlap" and row["value"] is not None:
            worst[row["split"]] = max(row["value"], worst.get(row["split"], 0))
    return [
        f"Items of {split} that also occur in training: {number(value, 'count')}"
        + (". Warning: results on this split are contaminated." if value else ".")
        for split, value in worst.items()
    ]
