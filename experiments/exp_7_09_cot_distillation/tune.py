"""Learning rates by validation: `python -m experiments.exp_7_09_cot_distillation.tune [arm ...]`.

Three tries for every arm that trains in a way of its own, on tuning seed 0 and validation problems. The rates in
conf/experiment/7-9/base.yaml are then set to the ones that the README's table marks.
"""

import sys
from pathlib import Path

from common.tuning import Tuning, main
from experiments.exp_7_09_cot_distillation.run import NUMBER, run_cell
from experiments.exp_7_09_cot_distillation.settings import Settings

SFT_RATES = (3e-4, 1e-3, 3e-3)
OWN_RATES = (1e-4, 3e-4, 1e-3)
TAUGHT = ("verified", "unfiltered", "capped", "concise", "tool", "mixed", "answers")
RATES = {
    **dict.fromkeys(TAUGHT, SFT_RATES),
    **dict.fromkeys(("grpo", "star", "self_rft"), OWN_RATES),
    "verified_large": SFT_RATES,
}
SAME_AS = {"k4": "capped", "k16": "capped", "uncapped": "capped"}  # they differ in how many traces there are
STARTS = ("start", "start_large", "teacher", "teacher_tool")
TUNING = Tuning(NUMBER, Settings, run_cell, Path(__file__).parent, RATES, STARTS, lambda arm: ("id", "ood"))

if __name__ == "__main__":
    main(TUNING, sys.argv[1:])
