"""Read what runs wrote: strict JSON lines, and the sample (seed -> value, items) behind one number of a table.

A record: {"experiment", "scale", "variant", "arm", "seed", "split", "metric", "value", "n", "step", "final"[, "items"]
[, "reason"]}; `value` is null, with a reason, where the metric is undefined.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.statistics import Sample

Record = dict[str, Any]

NOT_FINISHED = "not finished"  # what provenance.json says of a cell that neither ended nor failed


@dataclass(frozen=True)
class Point:
    """Which number: a metric of an arm on a split, at the final evaluation or at `step`."""

    arm: str
    metric: str
    split: str
    step: int | None = None


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def parse(text: str) -> Any:
    """Strict JSON: NaN and Infinity are refused with ValueError."""
    return json.loads(text, parse_constant=_refuse)


def read_json(path: Path) -> Any:
    """One strict JSON document; ValueError names the file."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_jsonl(path: Path) -> list[Record]:
    """Strict JSON lines (split at newline only: model text may hold other line separators); [] if there is no file."""
    rows: list[Record] = []
    if not path.is_file():
        return rows
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                rows.append(parse(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return rows


def is_time(row: Record) -> bool:
    """Whether a record holds measured time (metric time/...), which no two runs agree on to the byte."""
    return str(row["metric"]).startswith("time/")


def read_records(folder: Path) -> list[Record]:
    """All records of a result folder: the reproducible ones of records.jsonl, then those of times.jsonl, if any."""
    return read_jsonl(folder / "records.jsonl") + read_jsonl(folder / "times.jsonl")


def rows_at(records: Iterable[Record], point: Point) -> list[Record]:
    """The records of one point, at most one per seed: the final ones, or those of `point.step`."""
    rows: dict[int, Record] = {}
    for row in records:
        if (row["arm"], row["metric"], row["split"]) == (point.arm, point.metric, point.split) and (
            row["step"] == point.step if point.step is not None else row["final"]
        ):
            rows[row["seed"]] = row
    return [rows[seed] for seed in sorted(rows)]


def sample_of(rows: Iterable[Record]) -> Sample:
    """The defined values of such records, with their items where a record carries them."""
    known = [row for row in rows if row["value"] is not None]
    return Sample(
        {row["seed"]: float(row["value"]) for row in known},
        {row["seed"]: row["items"] for row in known if row.get("items")},
    )


def sample_at(records: Iterable[Record], point: Point) -> Sample:
    """The sample behind one number of a table."""
    return sample_of(rows_at(records, point))


def ordered(records: Iterable[Record], key: str) -> list[Any]:
    """The distinct values of a key in order of first appearance."""
    return list(dict.fromkeys(row[key] for row in records))
