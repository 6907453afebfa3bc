"""Learning rates by validation: `python -m experiments.exp_7_opd_distillation.tune [arm ...]`.

Three tries for every arm that trains, on tuning seed 0 and validation items. Arms that differ from another in their prompts
or their teacher take its rate. Finished tries are found again. Writes tuning.jsonl and the README's table; the rates in
conf/experiment/7-opd/base.yaml are then set by hand to the ones it marks.
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
from experiments.exp_7_opd_distillation.run import NUMBER, run_cell
from experiments.exp_7_opd_distillation.settings import Settings

HERE = Path(__file__).parent
FILE, README = HERE / "tuning.jsonl", HERE / "README.md"
BLOCK = ("<!-- tuning:begin -->", "<!-- tuning:end -->")
SEED = 0
RATES = {
    "chain_sft": (1e-3, 3e-3, 1e-2),
    **dict.fromkeys(("chain_grpo", "chain_grpo_steps"), (3e-4, 1e-3, 3e-3)),
    **dict.fromkeys(("chain_opd_sampled", "chain_opd", "chain_opd_masked"), (1e-3, 3e-3, 1e-2)),
    "dial_sft": (1e-3, 3e-3, 1e-2),
    "dial_grpo": (3e-4, 1e-3, 3e-3),
    **dict.fromkeys(("dial_opd_sampled", "dial_opd"), (1e-3, 3e-3, 1e-2)),
}


def one_try(arm: str, lr: float | None, changes: list[str]) -> Record:
    """Runs (or finds) one cell; its numbers on validation items."""
    typed = ["first_seed=0", "seeds=1", f"arms=[{arm}]", *([] if lr is None else [f"branches.{arm}.lr={lr:g}"]), *changes]
    settings = compose(NUMBER, Settings, typed)
    run_cell(settings, arm, SEED)
    folder = cell_folder(run_folder(settings), Cell(arm, SEED))
    rows = read_jsonl(folder / "records.jsonl")
    final = {(r["split"], r["metric"]): r["value"] for r in rows if r["final"]}
    row: Record = {"arm": arm, "lr": lr, "seed": SEED}
    for name in ("id", "ood"):
        row[name] = round(final[name, "success"], 4)
    row["steps"] = int(final["train", "step_used"])
    return row | {"cpu_s": round(read_json(folder / "cost.json")["cpu_s"], 1)}


def best(rows: list[Record]) -> Record:
    """The try to take: the highest mean of both splits; the lower rate where two are equal."""
    return max(rows, key=lambda row: (row["id"] + row["ood"], -row["lr"]))


def table(rows: list[Record]) -> str:
    """The README's table of tries."""
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        for row in own:
            rate = "" if row["lr"] is None else f"{row['lr']:g}"
            taken = "taken" if row["lr"] is not None and row is best(own) else ""
            numbers = (f"{100 * x:.1f} %" for x in (row["id"], row["ood"], (row["id"] + row["ood"]) / 2))
            lines.append((arm, rate, *numbers, f"{row['steps']}", f"{row['cpu_s']:.0f}", taken))
    return Table(("arm", "rate", "trained lengths", "longer", "mean of both", "steps", "CPU s", ""), lines).markdown


def write(rows: list[Record]) -> None:
    """tuning.jsonl and the README's table, in the order of the arms."""
    order = ["chain_start", "dial_start", *RATES]
    rows = sorted(rows, key=lambda row: (order.index(row["arm"]), row["lr"] or 0))
    write_text(FILE, "".join(json_line(row) for row in rows))
    write_text(README, replaced(README, BLOCK, table(rows)))


def main(words: list[str]) -> None:
    """Tries every rate of the arms named (none: all) and writes what came out after each."""
    torch.set_num_threads(1)
    named = [word for word in words if "=" not in word]
    changes = [word for word in words if "=" in word]
    for word in named:
        one_of("arm", word, ["chain_start", "dial_start", *RATES])
    rows = {(row["arm"], row["lr"]): row for row in read_json_lines(FILE)}
    for arm, rates in {"chain_start": (None,), "dial_start": (None,), **RATES}.items():
        for lr in rates if not named or arm in named else ():
            row = one_try(arm, lr, changes)
            print(strict_json(row), flush=True)
            rows[arm, lr] = row
            write(list(rows.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
