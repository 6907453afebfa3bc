"""Learning rates by validation: `python -m experiments.exp_7_09_cot_distillation.tune [arm ...] [key=value ...]`.

The same number of tries for every arm that trains, on tuning seed 0 and validation problems. Finished tries are found
again. Writes tuning.jsonl and the README's table; the rates in conf/experiment/7-9/base.yaml are then set by hand to the
ones it marks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from common.config import compose, run_folder
from common.files import json_line, read_json, read_json_lines, strict_json, write_text
from common.jobs import Cell, cell_folder
from common.records import Record, read_jsonl
from common.report.index import replaced
from common.report.tables import Table
from common.schema import one_of
from experiments.exp_7_09_cot_distillation.run import NUMBER, run_cell
from experiments.exp_7_09_cot_distillation.settings import Settings

HERE = Path(__file__).parent
FILE, README = HERE / "tuning.jsonl", HERE / "README.md"
BLOCK = ("<!-- tuning:begin -->", "<!-- tuning:end -->")
SEED = 0
TAUGHT = ("answers", "unfiltered", "verified", "capped", "k4", "k16", "concise", "tool", "mixed", "self_rft", "star")
RATES: dict[str, tuple[float | None, ...]] = {
    **dict.fromkeys(("start", "teacher", "teacher_tool"), (None,)),
    **dict.fromkeys(TAUGHT, (3e-4, 1e-3, 3e-3)),
    "grpo": (1e-4, 3e-4, 1e-3),
    "start_large": (None,),
    "verified_large": (3e-4, 1e-3, 3e-3),
}


def one_try(arm: str, lr: float | None, changes: list[str]) -> Record:
    """Runs (or finds) one cell; its numbers on validation problems."""
    typed = [f"first_seed={SEED}", "seeds=1", f"arms=[{arm}]", *([] if lr is None else [f"branches.{arm}.lr={lr:g}"]), *changes]
    settings = compose(NUMBER, Settings, typed)
    run_cell(settings, arm, SEED)
    folder = cell_folder(run_folder(settings), Cell(arm, SEED))
    final = {(row["split"], row["metric"]): row["value"] for row in read_jsonl(folder / "records.jsonl") if row["final"]}
    numbers = {"id": ("id", "success"), "ood": ("ood", "success"), "length": ("id", "length"), "caught": ("id", "caught")}
    found = {name: None if final.get(place) is None else round(final[place], 4) for name, place in numbers.items()}
    return {"arm": arm, "lr": lr, "seed": SEED, **found, "cpu_s": round(read_json(folder / "cost.json")["cpu_s"], 1)}


def best(rows: list[Record]) -> Record:
    """The try to take: the highest mean of both splits."""
    return max(rows, key=lambda row: row["id"] + row["ood"])


def table(rows: list[Record]) -> str:
    """The README's table of tries."""
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        for row in own:
            numbers = (f"{100 * x:.1f} %" for x in (row["id"], row["ood"], (row["id"] + row["ood"]) / 2))
            caught = "" if row["caught"] is None else f"{100 * row['caught']:.0f} %"
            rate, taken = ("", "") if row["lr"] is None else (f"{row['lr']:g}", "taken" if row is best(own) else "")
            lines.append((arm, rate, *numbers, f"{row['length']:.0f}", caught, f"{row['cpu_s']:.0f}", taken))
    header = ("arm", "rate", "trained lengths", "longer", "mean of both", "tokens", "wrong steps withdrawn", "CPU s", "")
    return Table(header, lines).markdown


def write(rows: list[Record]) -> None:
    """tuning.jsonl and the README's table, in the order of the arms."""
    order = list(RATES)
    rows = sorted(rows, key=lambda row: (order.index(row["arm"]), row["lr"] or 0))
    write_text(FILE, "".join(json_line(row) for row in rows))
    write_text(README, replaced(README, BLOCK, table(rows)))


def main(words: list[str]) -> None:
    """Tries every rate of the arms named (none: all) and writes what came out after each."""
    torch.set_num_threads(1)
    named, changes = [word for word in words if "=" not in word], [word for word in words if "=" in word]
    for word in named:
        one_of("arm", word, RATES)
    rows = {(row["arm"], row["lr"]): row for row in read_json_lines(FILE)}
    for arm, rates in RATES.items():
        for lr in rates if not named or arm in named else ():
            rows[arm, lr] = one_try(arm, lr, changes)
            print(strict_json(rows[arm, lr]), flush=True)
            write(list(rows.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
