"""Learning rates by validation: `python -m experiments.exp_7_opsd_self_distillation.tune [arm ...]`.

Three tries for every arm that trains, on tuning seed 0 and validation tasks. The arm of the plain base takes the rate of the
other one; arms on numbers that no rule explains take those of the codes, because nothing there could choose one. The rates
in conf/experiment/7-opsd/base.yaml are then set to the ones that the README's table marks.
"""

import sys
from pathlib import Path

from common.tuning import Tuning, main
from experiments.exp_7_opsd_self_distillation.run import NUMBER, run_cell
from experiments.exp_7_opsd_self_distillation.settings import Settings

ARMS = ("rlvr", "sft_solutions", "opsd_answer", "opsd_solution", "opsd_moving", "codes_rlvr", "codes_opsd")
RATES = dict.fromkeys(ARMS, (1e-4, 3e-4, 1e-3))
SAME_AS = {"opsd_plain": "opsd_solution", "search_rlvr": "codes_rlvr", "search_opsd": "codes_opsd"}


def splits(arm: str) -> tuple[str, str]:
    """Where an arm's success on trained and on longer tasks stands."""
    kind = "codes" if arm.startswith("codes") else "steps"
    return kind, f"{kind}-long"


TUNING = Tuning(NUMBER, Settings, run_cell, Path(__file__).parent, RATES, ("base", "codes_base"), splits)

if __name__ == "__main__":
    main(TUNING, sys.argv[1:])
