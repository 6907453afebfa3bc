"""Learning rates by validation: `python -m experiments.exp_7_algorithms.tune [arm ...]`.

The same number of tries for every arm that trains, on tuning seed 0 and validation chains; arms that differ from another
in one key (KL, the window of dynamic sampling) take its rate. Finished tries are found again. Writes tuning.jsonl and the
README's table; the rates in conf/experiment/7-algorithms/base.yaml are then set by hand to the ones it marks.
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
from experiments.exp_7_algorithms.run import NUMBER, run_cell
from experiments.exp_7_algorithms.settings import Settings

HERE = Path(__file__).parent
FILE, README = HERE / "tuning.jsonl", HERE / "README.md"
BLOCK = ("<!-- tuning:begin -->", "<!-- tuning:end -->")
SEED = 0
STEP_RATES = (1e-4, 3e-4, 1e-3)
RATES = {
    **dict.fromkeys(("sft", "dft", "iw_sft", "eksft", "rft", "star"), STEP_RATES),
    **dict.fromkeys(("dpo", "step_dpo", "kto", "online_dpo"), (3e-5, 1e-4, 3e-4)),
    **dict.fromkeys(("reinforce", "reinforce_baseline", "reinforce_pp", "rloo", "ppo"), STEP_RATES),
    **dict.fromkeys(("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rlhf"), STEP_RATES),
    **dict.fromkeys(("opd_sampled", "opd_full", "opsd"), STEP_RATES),
}
CHOSEN_BY = {"rlhf": "proxy"}  # who has no verifier cannot choose by it
CLOSE = 0.005  # success rates this near to the best count as equal; the policy nearer to the start is taken


def one_try(arm: str, lr: float | None, changes: list[str]) -> Record:
    """Runs (or finds) one cell; its numbers on validation chains."""
    typed = ["first_seed=0", "seeds=1", f"arms=[{arm}]", *([] if lr is None else [f"branches.{arm}.lr={lr:g}"]), *changes]
    settings = compose(NUMBER, Settings, typed)
    run_cell(settings, arm, SEED)
    folder = cell_folder(run_folder(settings), Cell(arm, SEED))
    final = {(r["split"], r["metric"]): r["value"] for r in read_jsonl(folder / "records.jsonl") if r["final"]}
    row: Record = {"arm": arm, "lr": lr, "seed": SEED}
    for name, place in {
        "id": ("id", "success"), "ood": ("ood", "success"), "kl": ("id", "kl_start"), "proxy": ("id", "proxy"),
    }.items():  # fmt: skip
        row[name] = None if place not in final else round(final[place], 4)
    return row | {"cpu_s": round(read_json(folder / "cost.json")["cpu_s"], 1)}


def best(rows: list[Record]) -> Record:
    """The try to take: the highest mean of both splits; among those within CLOSE of it, the one nearest to the start."""
    by = CHOSEN_BY.get(rows[0]["arm"])
    if by:
        return max(rows, key=lambda row: row[by])
    top = max(row["id"] + row["ood"] for row in rows)
    return min((row for row in rows if row["id"] + row["ood"] >= top - 2 * CLOSE), key=lambda row: row["kl"])


def table(rows: list[Record]) -> str:
    """The README's table of tries."""
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        for row in own:
            rate = "" if row["lr"] is None else f"{row['lr']:g}"
            taken = "taken" if row["lr"] is not None and row is best(own) else ""
            numbers = (f"{100 * x:.1f} %" for x in (row["id"], row["ood"], (row["id"] + row["ood"]) / 2))
            proxy = "" if row["proxy"] is None else f"{row['proxy']:.2f}"
            lines.append((arm, rate, *numbers, f"{row['kl']:.2f}", proxy, f"{row['cpu_s']:.0f}", taken))
    header = ("arm", "rate", "trained lengths", "longer", "mean of both", "KL to the start", "proxy", "CPU s", "")
    return Table(header, lines).markdown


def write(rows: list[Record]) -> None:
    """tuning.jsonl and the README's table, in the order of the arms."""
    order = ["start", *RATES]
    rows = sorted(rows, key=lambda row: (order.index(row["arm"]), row["lr"] or 0))
    write_text(FILE, "".join(json_line(row) for row in rows))
    write_text(README, replaced(README, BLOCK, table(rows)))


def main(words: list[str]) -> None:
    """Tries every rate of the arms named (none: all) and writes what came out after each."""
    torch.set_num_threads(1)
    named = [word for word in words if "=" not in word]
    changes = [word for word in words if "=" in word]
    for word in named:
        one_of("arm", word, ["start", *RATES])
    rows = {(row["arm"], row["lr"]): row for row in read_json_lines(FILE)}
    for arm, rates in {"start": (None,), **RATES}.items():
        for lr in rates if not named or arm in named else ():
            row = one_try(arm, lr, changes)
            print(strict_json(row), flush=True)
            rows[arm, lr] = row
            write(list(rows.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
