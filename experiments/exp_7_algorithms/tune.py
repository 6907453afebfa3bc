"""Learning rates by validation: `python -m experiments.exp_7_algorithms.tune [arm ...]`.

The same number of tries for every arm that trains, on tuning seed 0 and validation chains; arms that differ from another
in one key (KL, the window of dynamic sampling) take its rate. Finished tries are found again. Writes tuning.jsonl and the
README's table; the rates in conf/experiment/7-algorithms/base.yaml are then set by hand to the ones it marks.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from common.records import Record
from common.tuning import Column, Tuning, main
from experiments.exp_7_algorithms.run import NUMBER, run_cell
from experiments.exp_7_algorithms.settings import Settings

STEP_RATES = (1e-4, 3e-4, 1e-3)
RATES = {
    **dict.fromkeys(("sft", "dft", "iw_sft", "eksft", "rft", "star"), STEP_RATES),
    **dict.fromkeys(("dpo", "step_dpo", "kto", "online_dpo"), (3e-5, 1e-4, 3e-4)),
    **dict.fromkeys(("reinforce", "reinforce_baseline", "reinforce_pp", "rloo", "ppo"), STEP_RATES),
    **dict.fromkeys(("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rlhf"), STEP_RATES),
    **dict.fromkeys(("opd_sampled", "opd_full", "opsd"), STEP_RATES),
}
CHOSEN_BY = {"rlhf": "proxy"}  # who has no verifier cannot choose by it
CLOSE = 0.005  # success rates this near to the best count as equal; the policy nearer to the start is taken
COLUMNS = {
    "kl": Column("KL to the start", ("id", "kl_start"), "{:.2f}".format),
    "proxy": Column("proxy", ("id", "proxy"), "{:.2f}".format),
}


def best(rows: Sequence[Record]) -> Record:
    """The try to take: the highest mean of both splits; among those within CLOSE of it, the one nearest to the start."""
    by = CHOSEN_BY.get(rows[0]["arm"])
    if by:
        return max(rows, key=lambda row: row[by])
    top = max(row["id"] + row["ood"] for row in rows)
    return min((row for row in rows if row["id"] + row["ood"] >= top - 2 * CLOSE), key=lambda row: row["kl"])


TUNING = Tuning(
    NUMBER,
    Settings,
    run_cell,
    Path(__file__).parent,
    RATES,
    ("start",),
    lambda arm: ("id", "ood"),
    columns=COLUMNS,
    choose=best,
)

if __name__ == "__main__":
    main(TUNING, sys.argv[1:])
