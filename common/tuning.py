"""Learning rates by validation: the same number of tries for every arm, all of them kept in a file and in the README.

An experiment's tune.py names its rates, where the numbers of a try stand and which try to take, and calls `main`. Finished
tries are found again; a row with a `note` is a try made in another way, which is kept and never taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.config import Common, compose, run_folder
from common.files import json_line, read_json, read_json_lines, strict_json, write_text
from common.jobs import Cell, cell_folder
from common.records import Record, read_jsonl
from common.report.index import replaced
from common.report.tables import Table
from common.schema import one_of

BLOCK = ("<!-- tuning:begin -->", "<!-- tuning:end -->")
SEED = 0
LENGTHS = ("trained lengths", "longer")


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


class Column(NamedTuple):
    """A number of a try: what the table calls it, where its final record stands (split, metric), how it is written."""

    heading: str
    place: tuple[str, str]
    form: Callable[[float], str] = percent


def best(rows: Sequence[Record]) -> Record:
    """The try to take: the highest mean of both splits, the lower rate where two are equal."""
    return max(rows, key=lambda row: (row["id"] + row["ood"], -row["lr"]))


@dataclass(frozen=True)
class Tuning:
    """``rates``: arm -> the rates to try. ``starts``: arms that are measured without a rate.

    ``splits``: arm -> its splits of trained and of longer tasks, whose success becomes `id` and `ood`; ``headings``: what the
    table calls the two. ``columns``: further numbers, name -> Column. ``choose``: the try to take of an arm's. ``folder``:
    where tuning.jsonl and the README with the two lines of BLOCK lie.
    """

    number: str
    schema: type[Common]
    run_cell: Callable[[Any, str, int], Any]
    folder: Path
    rates: Mapping[str, Sequence[float]]
    starts: Sequence[str]
    splits: Callable[[str], tuple[str, str]] | None = None
    headings: tuple[str, str] = LENGTHS
    columns: Mapping[str, Column] = field(default_factory=dict)
    choose: Callable[[Sequence[Record]], Record] = best

    @property
    def file(self) -> Path:
        return self.folder / "tuning.jsonl"

    @property
    def tries(self) -> dict[str, Sequence[float | None]]:
        """Arm -> what is tried, in the table's order."""
        return {**dict.fromkeys(self.starts, (None,)), **self.rates}


def one_try(tuning: Tuning, arm: str, lr: float | None, changes: Sequence[str]) -> Record:
    """Runs (or finds) one cell on the tuning seed; its numbers on validation tasks, None where there is no such record."""
    rate = [] if lr is None else [f"branches.{arm}.lr={lr:g}"]
    settings = compose(tuning.number, tuning.schema, [f"first_seed={SEED}", "seeds=1", f"arms=[{arm}]", *rate, *changes])
    tuning.run_cell(settings, arm, SEED)
    folder = cell_folder(run_folder(settings), Cell(arm, SEED))
    final = {(r["split"], r["metric"]): r["value"] for r in read_jsonl(folder / "records.jsonl") if r["final"]}
    row: Record = {"arm": arm, "lr": lr, "seed": SEED}
    if tuning.splits is not None:
        places = {name: (split, "success") for name, split in zip(("id", "ood"), tuning.splits(arm), strict=True)}
        row |= {name: round(final[place], 4) for name, place in places.items()}
    for name, column in tuning.columns.items():
        row[name] = None if column.place not in final else round(final[column.place], 4)
    if ("train", "step_used") in final:
        row["steps"] = int(final["train", "step_used"])
    return row | {"cpu_s": round(read_json(folder / "cost.json")["cpu_s"], 1)}


def table(
    rows: Sequence[Record],
    headings: tuple[str, str] = LENGTHS,
    columns: Mapping[str, Column] = {},
    choose: Callable[[Sequence[Record]], Record] = best,
) -> str:
    """The README's table of tries: success on both splits where the rows have it, the columns, steps where counted."""
    both, counted = any("id" in row for row in rows), any(row.get("steps") is not None for row in rows)
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        tried = [row for row in own if row["lr"] is not None and not row.get("note")]
        for row in own:
            line = [arm, "" if row["lr"] is None else f"{row['lr']:g}"]
            if both:
                line += [percent(x) for x in (row["id"], row["ood"], (row["id"] + row["ood"]) / 2)]
            line += ["" if row[name] is None else column.form(row[name]) for name, column in columns.items()]
            if counted:
                line.append("" if row.get("steps") is None else f"{row['steps']}")
            taken = "taken" if tried and row is choose(tried) else row.get("note", "")
            lines.append([*line, f"{row['cpu_s']:.0f}", taken])
    names = [*(both * [*headings, "mean of both"]), *(column.heading for column in columns.values()), *(counted * ["steps"])]
    return Table(("arm", "rate", *names, "CPU s", ""), lines).markdown


def tuning_table(tuning: Tuning, rows: Sequence[Record]) -> str:
    """The table of an experiment's tries."""
    return table(rows, tuning.headings, tuning.columns, tuning.choose)


def write(tuning: Tuning, rows: Sequence[Record]) -> None:
    """tuning.jsonl and the README's table, in the order of the arms."""
    order = list(tuning.tries)
    rows = sorted(rows, key=lambda row: (order.index(row["arm"]), row.get("note", ""), row["lr"] or 0))
    write_text(tuning.file, "".join(json_line(row) for row in rows))
    readme = tuning.folder / "README.md"
    write_text(readme, replaced(readme, BLOCK, tuning_table(tuning, rows)))


def main(tuning: Tuning, words: Sequence[str]) -> None:
    """Tries every rate of the arms named (none: all) and writes what came out after each; `key=value` words change keys."""
    torch.set_num_threads(1)
    named = [word for word in words if "=" not in word]
    changes = [word for word in words if "=" in word]
    for word in named:
        one_of("arm", word, tuning.tries)
    rows = {(row["arm"], row["lr"], row.get("note", "")): row for row in read_json_lines(tuning.file)}
    for arm, rates in tuning.tries.items():
        for lr in rates if not named or arm in named else ():
            row = one_try(tuning, arm, lr, changes)
            print(strict_json(row), flush=True)
            rows[arm, lr, ""] = row
            write(tuning, list(rows.values()))
