"""Learning rates by validation: `python -m experiments.exp_7_10_adaptthink.tune [arm ...]`.

The same number of tries for every arm that trains with a method of its own, on tuning seed 0 and validation chains; arms
that change one key of another (delta, the length of an answer, the level) take its rate. The rates in
conf/experiment/7-10/base.yaml are then set to the ones that the README's table marks. Rows with a note are tries of earlier
forms of the task or of the budget and stay as they are.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from common.records import Record
from common.tuning import Column, Tuning, main
from experiments.exp_7_10_adaptthink.run import NUMBER, run_cell
from experiments.exp_7_10_adaptthink.settings import Settings

RATES = {
    **dict.fromkeys(("adaptthink", "token", "uncorrected", "no_forcing", "grpo_length"), (1.5e-4, 3e-4, 6e-4)),
    "router": (3e-5, 1e-4, 3e-4),
}
COLUMNS = {
    "success": Column("success", ("id", "success")),
    "saving": Column("saving", ("id", "saving")),
    "easy": Column("P(NoThinking), 1 step", ("level1", "nothink_p")),
    "hard": Column("6 steps", ("level6", "nothink_p")),
}
WORTH = 0.2  # of saving all tokens, in success; fixed before the first try


def best(rows: Sequence[Record]) -> Record:
    """The try to take: the highest success + WORTH * saving, of equals the lowest rate."""
    return max(rows, key=lambda row: (row["success"] + WORTH * row["saving"], -row["lr"]))


TUNING = Tuning(NUMBER, Settings, run_cell, Path(__file__).parent, RATES, ("start",), columns=COLUMNS, choose=best)

if __name__ == "__main__":
    main(TUNING, sys.argv[1:])
