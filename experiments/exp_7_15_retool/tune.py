"""Learning rates by validation: `python -m experiments.exp_7_15_retool.tune [arm ...]`.

Three tries for every arm that trains by a method or from a start of its own, on tuning seed 0 and validation problems. The
other arms differ from one of these in a single key and take its rate. The rates in conf/experiment/7-15/base.yaml are then set
by hand to the ones that the README's table marks.
"""

import sys
from pathlib import Path

from common.tuning import Tuning, main
from experiments.exp_7_15_retool.run import NUMBER, run_cell
from experiments.exp_7_15_retool.settings import Settings

ARMS = ("text_rl", "tool_rl", "tool_ppo", "tool_no_sft", "tool_sft", "tool_unmasked")
RATES = dict.fromkeys(ARMS, (2e-4, 5e-4, 1e-3))
STARTS = ("text_base", "text_start", "tool_start")


def splits(arm: str) -> tuple[str, str]:
    """Where an arm's success on trained and on longer problems stands."""
    return "id", "long"


TUNING = Tuning(NUMBER, Settings, run_cell, Path(__file__).parent, RATES, STARTS, splits)

if __name__ == "__main__":
    main(TUNING, sys.argv[1:])
