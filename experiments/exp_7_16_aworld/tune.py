"""Rates by validation: `python -m experiments.exp_7_16_aworld.tune [arm ...]`.

The same number of tries for each arm that trains, on tuning seed 0 and validation worlds. The rates in
conf/experiment/7-16/base.yaml are then set by hand to the ones marked; the arms of the ablation take GRPO's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from common.records import Record
from common.tuning import Column, Tuning, main
from experiments.exp_7_16_aworld.run import NUMBER, run_cell
from experiments.exp_7_16_aworld.settings import Settings

RATES = (1e-3, 2e-3)
COLUMNS = {
    "success": Column("right answers", ("questions", "success")),
    "level_3": Column("of four calls or more", ("questions", "level_3")),
    "tool_success": Column("calls answered", ("questions", "tool_success")),
    "obeyed": Column("constraints kept", ("questions", "obeyed")),
    "extra_calls": Column("extra calls", ("questions", "extra_calls"), "{:.2f}".format),
}


def most_right(rows: Sequence[Record]) -> Record:
    """The try with the most right answers, the lower rate where two are equal."""
    return max(rows, key=lambda row: (row["success"], -row["lr"]))


TUNING = Tuning(
    NUMBER, Settings, run_cell, Path(__file__).parent, rates={"grpo": RATES, "sft": RATES}, starts=("start",),
    columns=COLUMNS, choose=most_right,
)  # fmt: skip

if __name__ == "__main__":
    main(TUNING, sys.argv[1:])
