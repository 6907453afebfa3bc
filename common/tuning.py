"""Learning rates by validation: the same number of tries for every arm, all of them kept in a file and in the README.

An experiment's tune.py names its rates and where a try's success stands, and calls `main`. Finished tries are found again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Tuning:
    """``rates``: arm -> the rates to try. ``starts``: arms that are measured without a rate.

    ``splits``: arm -> its splits of trained and of longer tasks, whose mean success chooses the rate; ``headings``: what the
    table calls the two. ``folder``: where tuning.jsonl and the README with the two lines of BLOCK lie.
    """

    number: str
    schema: type[Common]
    run_cell: Callable[[Any, str, int], Any]
    folder: Path
    rates: Mapping[str, Sequence[float]]
    starts: Sequence[str]
    splits: Callable[[str], tuple[str, str]]
    headings: tuple[str, str] = LENGTHS

    @property
    def file(self) -> Path:
        return self.folder / "tuning.jsonl"

    @property
    def tries(self) -> dict[str, Sequence[float | None]]:
        """Arm -> what is tried, in the table's order."""
        return {**dict.fromkeys(self.starts, (None,)), **self.rates}


def one_try(tuning: Tuning, arm: str, lr: float | None, changes: Sequence[str]) -> Record:
    """Runs (or finds) one cell on the tuning seed; its numbers on validation tasks."""
    rate = [] if lr is None else [f"branches.{arm}.lr={lr:g}"]
    settings = compose(tuning.number, tuning.schema, [f"first_seed={SEED}", "seeds=1", f"arms=[{arm}]", *rate, *changes])
    tuning.run_cell(settings, arm, SEED)
    folder = cell_folder(run_folder(settings), Cell(arm, SEED))
    final = {(r["split"], r["metric"]): r["value"] for r in read_jsonl(folder / "records.jsonl") if r["final"]}
    row: Record = {"arm": arm, "lr": lr, "seed": SEED}
    for name, split in zip(("id", "ood"), tuning.splits(arm), strict=True):
        row[name] = round(final[split, "success"], 4)
    steps = final.get(("train", "step_used"))
    cpu_s = round(read_json(folder / "cost.json")["cpu_s"], 1)
    return row | {"steps": None if steps is None else int(steps), "cpu_s": cpu_s}


def best(rows: Sequence[Record]) -> Record:
    """The try to take: the highest mean of both splits, the lower rate where two are equal."""
    return max(rows, key=lambda row: (row["id"] + row["ood"], -row["lr"]))


def table(rows: Sequence[Record], headings: tuple[str, str] = LENGTHS) -> str:
    """The README's table of tries."""
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        for row in own:
            rate = "" if row["lr"] is None else f"{row['lr']:g}"
            taken = "taken" if row["lr"] is not None and row is best(own) else ""
            numbers = (f"{100 * x:.1f} %" for x in (row["id"], row["ood"], (row["id"] + row["ood"]) / 2))
            steps = "" if row["steps"] is None else f"{row['steps']}"
            lines.append((arm, rate, *numbers, steps, f"{row['cpu_s']:.0f}", taken))
    return Table(("arm", "rate", *headings, "mean of both", "steps", "CPU s", ""), lines).markdown


def write(tuning: Tuning, rows: Sequence[Record]) -> None:
    """tuning.jsonl and the README's table, in the order of the arms."""
    order = list(tuning.tries)
    rows = sorted(rows, key=lambda row: (order.index(row["arm"]), row["lr"] or 0))
    write_text(tuning.file, "".join(json_line(row) for row in rows))
    readme = tuning.folder / "README.md"
    write_text(readme, replaced(readme, BLOCK, table(rows, tuning.headings)))


def main(tuning: Tuning, words: Sequence[str]) -> None:
    """Tries every rate of the arms named (none: all) and writes what came out after each; `key=value` words change keys."""
    torch.set_num_threads(1)
    named = [word for word in words if "=" not in word]
    changes = [word for word in words if "=" in word]
    for word in named:
        one_of("arm", word, tuning.tries)
    rows = {(row["arm"], row["lr"]): row for row in read_json_lines(tuning.file)}
    for arm, rates in tuning.tries.items():
        for lr in rates if not named or arm in named else ():
            row = one_try(tuning, arm, lr, changes)
            print(strict_json(row), flush=True)
            rows[arm, lr] = row
            write(tuning, list(rows.values()))
