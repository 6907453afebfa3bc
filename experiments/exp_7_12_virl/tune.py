"""Learning rates by validation: `python -m experiments.exp_7_12_virl.tune [arm ...]`.

Three tries for every method, on tuning seed 0 and validation routes. What chooses is the share of whole routes walked rightly
under the training rule, in the cities trained in and in others: the unseen rule chooses nothing. Arms that differ from
another in budget, reward, tries or start take its rate. The rates in conf/experiment/7-12/base.yaml are then set to the
ones that the README's table marks.
"""

import sys
from pathlib import Path

from common.tuning import Tuning, main
from experiments.exp_7_12_virl.run import NUMBER, run_cell
from experiments.exp_7_12_virl.settings import Settings

RATES = dict.fromkeys(("sft", "ppo", "grpo"), (1e-4, 3e-4, 1e-3))
SAME_AS = {"sft_long": "sft", "ppo_outcome": "ppo", "grpo_outcome": "grpo"}
HEADINGS = ("new routes", "other cities")


def splits(arm: str) -> tuple[str, str]:
    """Both under the training rule."""
    return "id", "city"


TUNING = Tuning(NUMBER, Settings, run_cell, Path(__file__).parent, RATES, ("base", "start"), splits, HEADINGS)

if __name__ == "__main__":
    main(TUNING, sys.argv[1:])
