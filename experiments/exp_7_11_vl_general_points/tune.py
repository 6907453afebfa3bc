"""Learning rates by validation: `python -m experiments.exp_7_11_vl_general_points.tune [arm ...]`.

Three tries for every arm that trains in the main study, on tuning seed 0 and validation hands. What chooses is success
where nothing but the hands is new, and under the unseen rule: the unseen look chooses nothing. The frozen arm and the one
without the penalty take GRPO's rate. The rates in conf/experiment/7-11-vl/base.yaml are then set to the ones that the
README's table marks.
"""

import sys
from pathlib import Path

from common.tuning import Tuning, main
from experiments.exp_7_11_vl_general_points.run import NUMBER, run_cell
from experiments.exp_7_11_vl_general_points.settings import Settings

RATES = dict.fromkeys(("sft", "ppo", "grpo"), (1e-4, 3e-4, 1e-3))
HEADINGS = ("new hands", "unseen rule")


def splits(arm: str) -> tuple[str, str]:
    """Both on black cards."""
    return "id", "rule"


TUNING = Tuning(NUMBER, Settings, run_cell, Path(__file__).parent, RATES, ("start",), splits, HEADINGS)

if __name__ == "__main__":
    main(TUNING, sys.argv[1:])
