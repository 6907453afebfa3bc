"""Learning rates by validation: `python -m experiments.exp_7_13_simplevla.tune [arm ...]`.

The same tries for every trained arm of the main study, on tuning seed 0 and validation layouts; arms of the ablation take the
rate of the arm that they differ from. What chooses is success on trained tasks, in layouts spread as in training and wider.
The rates in conf/experiment/7-13/base.yaml are then set to the ones that the README's table marks.
"""

import sys
from pathlib import Path

from common.tuning import Tuning, main
from experiments.exp_7_13_simplevla.run import NUMBER, run_cell
from experiments.exp_7_13_simplevla.settings import Settings

RATES = dict.fromkeys(("full", "plain", "process", "ppo"), (3e-4, 1e-3))
HEADINGS = ("trained tasks", "wider spread")


def splits(arm: str) -> tuple[str, str]:
    """Both on trained tasks."""
    return "seen", "space"


TUNING = Tuning(NUMBER, Settings, run_cell, Path(__file__).parent, RATES, ("sft",), splits, HEADINGS)

if __name__ == "__main__":
    main(TUNING, sys.argv[1:])
