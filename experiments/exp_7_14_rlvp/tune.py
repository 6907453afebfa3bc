"""Rates and weights by validation: `python -m experiments.exp_7_14_rlvp.tune [arm ...]`.

The same number of tries for each arm named below, on tuning seed 0 and validation tasks; arms that change one key of another
take its values (`TAKES`), and those of the ablation the values of the arm that they differ from. Finished tries are found
again. Writes tuning.jsonl and the README's table; the values in conf/experiment/7-14/base.yaml are then set by hand to the
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
from experiments.exp_7_14_rlvp.run import NUMBER, run_cell
from experiments.exp_7_14_rlvp.settings import Settings

HERE = Path(__file__).parent
FILE, README = HERE / "tuning.jsonl", HERE / "README.md"
BLOCK = ("<!-- tuning:begin -->", "<!-- tuning:end -->")
SEED = 0
RATES = (5e-4, 1e-3, 2e-3)
PAID = {  # (rate, weight of a penalty, of a credit)
    "rlvp": ((5e-4, 0.25, 0.25), (1e-3, 0.25, 0.25), (1e-3, 0.1, 0.1)),
    "chain_rlvp": ((5e-4, 0.25, 0.25), (1e-3, 0.1, 0.1), (1e-3, 0.1, 0.03)),
}
ARMS = ("rlvp", "outcome", "sft_perfect", "chain_rlvp", "chain_outcome")
TAKES = {
    **dict.fromkeys(("rlvp_bare", "penalties", "rlvp_held_out", "rlvp_failing", "desk_rlvp"), "rlvp"),
    "desk_outcome": "outcome", "sft_failing": "sft_perfect",
    **dict.fromkeys(("chain_progress", "wide_outcome", "wide_progress", "deep_outcome", "deep_progress"), "chain_outcome"),
}  # fmt: skip
METRICS = ("success", "violations", "perfect", "unused_credits", "calls")


def tries(arm: str) -> list[tuple[str, list[str]]]:
    """(note, changes) of each try."""
    if arm not in PAID:
        return [(f"lr {rate:g}", [f"branches.{arm}.lr={rate:g}"]) for rate in RATES]
    return [
        (f"lr {rate:g}, penalty {penalty:g}, credit {credit:g}",
         [f"branches.{arm}.{key}={value:g}" for key, value in
          (("lr", rate), ("credits.penalty", penalty), ("credits.credit", credit))])
        for rate, penalty, credit in PAID[arm]
    ]  # fmt: skip


def one_try(arm: str, note: str, changes: list[str]) -> Record:
    """Runs (or finds) one cell; its numbers on validation tasks."""
    settings = compose(NUMBER, Settings, [f"first_seed={SEED}", "seeds=1", f"arms=[{arm}]", *changes])
    run_cell(settings, arm, SEED)
    folder = cell_folder(run_folder(settings), Cell(arm, SEED))
    rows = [row for row in read_jsonl(folder / "records.jsonl") if row["final"]]
    final = {row["metric"]: row["value"] for row in rows if row["split"] == "hidden"}
    area = next((row["value"] for row in rows if row["metric"] == "success_area"), None)
    row: Record = {"arm": arm, "note": note, "seed": SEED, **{name: round(final[name], 4) for name in METRICS}}
    return row | {"area": area and round(area, 4), "cpu_s": round(read_json(folder / "cost.json")["cpu_s"], 1)}


def best(rows: list[Record]) -> Record:
    """The try to take: by perfect episodes, where nothing but the outcome is paid for by success."""
    key = "perfect" if rows[0]["arm"] in (*PAID, "sft_perfect") else "success"
    return max(rows, key=lambda row: row[key])


def table(rows: list[Record]) -> str:
    """The README's table of tries."""
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        for row in own:
            shares = [f"{100 * row[name]:.1f} %" for name in ("success", "perfect")]
            area = "" if row["area"] is None else f"{100 * row['area']:.1f} %"
            rest = [f"{row['violations']:.2f}", f"{row['unused_credits']:.2f}", f"{row['calls']:.1f}", area]
            taken = "taken" if len(own) > 1 and row is best(own) else ""
            lines.append((arm, row["note"], *shares, *rest, f"{row['cpu_s']:.0f}", taken))
    header = ("arm", "try", "success", "perfect", "violations", "unused credits", "calls", "success over training", "CPU s", "")
    return Table(header, lines).markdown


def write(rows: list[Record]) -> None:
    """tuning.jsonl and the README's table, in the order of the arms."""
    order = list(dict.fromkeys((arm, note) for arm in ARMS for note, _ in tries(arm)))
    rows = sorted(rows, key=lambda row: order.index((row["arm"], row["note"])))
    write_text(FILE, "".join(json_line(row) for row in rows))
    write_text(README, replaced(README, BLOCK, table(rows)))


def main(words: list[str]) -> None:
    """Tries everything for the arms named (none: all) and writes what came out after each."""
    torch.set_num_threads(1)
    named, more = [word for word in words if "=" not in word], [word for word in words if "=" in word]
    for word in named:
        one_of("arm", word, ARMS)
    rows = {(row["arm"], row["note"]): row for row in read_json_lines(FILE)}
    for arm in named or ARMS:
        for note, changes in tries(arm):
            row = one_try(arm, note, [*changes, *more])
            print(strict_json(row), flush=True)
            rows[arm, note] = row
            write(list(rows.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
