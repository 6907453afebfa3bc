"""Learning rates by validation: `python -m experiments.exp_7_08_prompt_distillation.tune [arm ...]`.

Three rates for every arm that trains, on tuning seed 0 and validation texts. Arms that learn the teacher's labels are chosen
by fidelity, which can be had without gold labels, the controls by accuracy. Finished tries are found again. Writes
tuning.jsonl and the README's table; the rates in conf/experiment/7-8/base.yaml are then set by hand to the ones it marks. A
row with a `note` is an earlier try that was made in another way.
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
from experiments.exp_7_08_prompt_distillation.run import NUMBER, run_cell
from experiments.exp_7_08_prompt_distillation.settings import Settings

HERE = Path(__file__).parent
FILE, README = HERE / "tuning.jsonl", HERE / "README.md"
BLOCK = ("<!-- tuning:begin -->", "<!-- tuning:end -->")
SEED = 0
STUDENTS = ("distilled", "gold", "traces", "inputs_250", "inputs_1000", "small", "small_gold", "update", "update_anew")
RATES = dict.fromkeys((*STUDENTS, "on_policy", "on_policy_thought"), (1e-3, 3e-3, 1e-2))
UNTRAINED = ("before", "prompted", "teacher", "small_before", "small_prompted", "small_thinking")
SHOWN = {
    "success": ("test", "success"), "fidelity": ("test", "fidelity"), "trained": ("trained", "fidelity"),
    "changed": ("changed", "fidelity"),
}  # fmt: skip


def one_try(arm: str, lr: float | None, changes: list[str]) -> Record:
    """Runs (or finds) one cell; its numbers on validation texts."""
    typed = ["first_seed=0", "seeds=1", f"arms=[{arm}]", *([] if lr is None else [f"branches.{arm}.lr={lr:g}"]), *changes]
    settings = compose(NUMBER, Settings, typed)
    run_cell(settings, arm, SEED)
    folder = cell_folder(run_folder(settings), Cell(arm, SEED))
    final = {(r["split"], r["metric"]): r["value"] for r in read_jsonl(folder / "records.jsonl") if r["final"]}
    row: Record = {"arm": arm, "lr": lr, "seed": SEED}
    row |= {name: None if place not in final else round(final[place], 4) for name, place in SHOWN.items()}
    return row | {"cpu_s": round(read_json(folder / "cost.json")["cpu_s"], 1)}


def criterion(row: Record) -> float:
    """What an arm's rate is chosen by."""
    if row["arm"] in ("gold", "small_gold"):
        return float(row["success"])
    return float(row["changed" if row["arm"] in ("update", "update_anew") else "fidelity"])


def best(rows: list[Record]) -> Record:
    """The try to take: the highest, of equals the lowest rate."""
    return max(rows, key=lambda row: (criterion(row), -row["lr"]))


def table(rows: list[Record]) -> str:
    """The README's table of tries."""
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        for row in own:
            rate = "" if row["lr"] is None else f"{row['lr']:g}"
            numbers = ("" if row[name] is None else f"{100 * row[name]:.1f} %" for name in SHOWN)
            taken = "taken" if row["lr"] is not None and row is best(own) else row.get("note", "")
            lines.append((arm, rate, *numbers, f"{row['cpu_s']:.0f}", taken))
    header = ("arm", "rate", "accuracy", "fidelity", "fidelity, own texts", "fidelity, changed rules", "CPU s", "")
    return Table(header, lines).markdown


def write(rows: list[Record]) -> None:
    """tuning.jsonl and the README's table, in the order of the arms."""
    order = [*UNTRAINED, *RATES]
    rows = sorted(rows, key=lambda row: (order.index(row["arm"]), row["lr"] or 0))
    write_text(FILE, "".join(json_line(row) for row in rows))
    write_text(README, replaced(README, BLOCK, table(rows)))


def main(words: list[str]) -> None:
    """Tries every rate of the arms named (none: all) and writes what came out after each."""
    torch.set_num_threads(1)
    named, changes = [word for word in words if "=" not in word], [word for word in words if "=" in word]
    for word in named:
        one_of("arm", word, [*UNTRAINED, *RATES])
    for arm, rates in {**dict.fromkeys(UNTRAINED, (None,)), **RATES}.items():
        for lr in rates if not named or arm in named else ():
            row = one_try(arm, lr, changes)
            print(strict_json(row), flush=True)
            others = [known for known in read_json_lines(FILE) if (known["arm"], known["lr"]) != (arm, lr)]
            write([*others, row])


if __name__ == "__main__":
    main(sys.argv[1:])
