"""Rates by validation: `python -m experiments.exp_7_16_aworld.tune [arm ...]`.

The same number of tries for each arm that trains, on tuning seed 0 and validation worlds. The rates in
conf/experiment/7-16/base.yaml are then set by hand to the ones marked; the arms of the ablation take GRPO's.
"""

from __future__ import annotations

import sys
from pathlib import Path

from common.tuning import Tuning, main
from experiments.exp_7_16_aworld.run import NUMBER, run_cell
from experiments.exp_7_16_aworld.settings import Settings

RATES = (5e-4, 1e-3, 2e-3)
TUNING = Tuning(
    NUMBER, Settings, run_cell, Path(__file__).parent, rates={"grpo": RATES, "sft": RATES}, starts=("start",),
    splits=lambda arm: ("questions", "hard"), headings=("right answers", "of four calls or more"),
)  # fmt: skip

if __name__ == "__main__":
    main(TUNING, sys.argv[1:])
