"""Learning rates by validation: `python -m experiments.exp_7_10_adaptthink.tune [arm ...]`.

The same number of tries for every arm that trains with a method of its own, on tuning seed 0 and validation chains; arms
that change one key of another (delta, the length of an answer) take its rate. Finished tries are found again. Writes
tuning.jsonl and the README's table; the rates in conf/experiment/7-10/base.yaml are then set by hand to the ones it marks.
Rows with a note are tries of earlier forms of the task and stay as they are.
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
from experiments.exp_7_10_adaptthink.run import NUMBER, run_cell
from experiments.exp_7_10_adaptthink.settings import Settings

HERE = Path(__file__).parent
FILE, README = HERE / "tuning.jsonl", HERE / "README.md"
BLOCK = ("<!-- tuning:begin -->", "<!-- tuning:end -->")
SEED = 0
STEP_RATES = (1.5e-4, 3e-4, 6e-4)
RATES = {
    **dict.fromkeys(("adaptthink", "token", "uncorrected", "no_forcing", "grpo_length"), STEP_RATES),
    "router": (3e-5, 1e-4, 3e-4),
}
WORTH = 0.2  # of saving all tokens, in success; fixed before the first try


def one_try(arm: str, lr: float | None, changes: list[str]) -> Record:
    """Runs (or finds) one cell; its numbers on validation chains."""
    typed = [f"first_seed={SEED}", "seeds=1", f"arms=[{arm}]", *changes]
    settings = compose(NUMBER, Settings, typed if lr is None else [*typed, f"branches.{arm}.lr={lr:g}"])
    run_cell(settings, arm, SEED)
    folder = cell_folder(run_folder(settings), Cell(arm, SEED))
    final = {(r["split"], r["metric"]): r["value"] for r in read_jsonl(folder / "records.jsonl") if r["final"]}
    row: Record = {"arm": arm, "lr": lr, "seed": SEED, "note": ""}
    for name, place in {
        "success": ("id", "success"), "saving": ("id", "saving"), "easy": ("level1", "nothink_p"),
        "hard": ("level6", "nothink_p"),
    }.items():  # fmt: skip
        row[name] = round(final[place], 4)
    return row | {"cpu_s": round(read_json(folder / "cost.json")["cpu_s"], 1)}


def worth(row: Record) -> float:
    """What a try is chosen by."""
    return float(row["success"] + WORTH * row["saving"])


def table(rows: list[Record]) -> str:
    """The README's table of tries."""
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        equal = [row for row in own if row["lr"] is not None and not row["note"]]
        for row in own:
            rate = "" if row["lr"] is None else f"{row['lr']:g}"
            taken = "taken" if equal and row is max(equal, key=worth) else ""
            numbers = [f"{100 * row[name]:.1f} %" for name in ("success", "saving", "easy", "hard")]
            lines.append((arm, rate, *numbers, f"{worth(row):.3f}", f"{row['cpu_s']:.0f}", taken or row["note"]))
    header = ("arm", "rate", "success", "saving", "P(NoThinking), 1 step", "6 steps", "success + 0.2 saving", "CPU s", "note")
    return Table(header, lines).markdown


def write(rows: list[Record]) -> None:
    """tuning.jsonl and the README's table, in the order of the arms."""
    order = ["start", *RATES]
    rows = sorted(rows, key=lambda row: (order.index(row["arm"]), row["note"], row["lr"] or 0))
    write_text(FILE, "".join(json_line(row) for row in rows))
    write_text(README, replaced(README, BLOCK, table(rows)))


def main(words: list[str]) -> None:
    """Tries every rate of the arms named (none: all) and writes what came out after each."""
    torch.set_num_threads(1)
    named = [word for word in words if "=" not in word]
    changes = [word for word in words if "=" in word]
    for word in named:
        one_of("arm", word, ["start", *RATES])
    rows = {(row["arm"], row["lr"], row["note"]): row for row in read_json_lines(FILE)}
    for arm, rates in {"start": (None,), **RATES}.items():
        for lr in rates if not named or arm in named else ():
            row = one_try(arm, lr, changes)
            print(strict_json(row), flush=True)
            rows[arm, lr, ""] = row
            write(list(rows.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
