"""Learning rates by validation: `python -m experiments.exp_7_08_prompt_distillation.tune [arm ...]`.

Three rates for every arm that trains, on tuning seed 0 and validation texts. Arms that learn the teacher's labels are chosen
by fidelity, which can be had without gold labels, the controls by accuracy. Finished tries are found again. Writes
tuning.jsonl and the README's table; the rates in conf/experiment/7-8/base.yaml are then set by hand to the ones it marks. A
row with a `note` is an earlier try that was made in another way.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from common.records import Record
from common.tuning import Column, Tuning, main
from experiments.exp_7_08_prompt_distillation.run import NUMBER, run_cell
from experiments.exp_7_08_prompt_distillation.settings import Settings

STUDENTS = ("distilled", "gold", "traces", "inputs_250", "inputs_1000", "small", "small_gold", "update", "update_anew")
RATES = dict.fromkeys((*STUDENTS, "on_policy", "on_policy_thought"), (1e-3, 3e-3, 1e-2))
UNTRAINED = ("before", "prompted", "teacher", "small_before", "small_prompted", "small_thinking")
COLUMNS = {
    "success": Column("accuracy", ("test", "success")),
    "fidelity": Column("fidelity", ("test", "fidelity")),
    "trained": Column("fidelity, own texts", ("trained", "fidelity")),
    "changed": Column("fidelity, changed rules", ("changed", "fidelity")),
}
CHOSEN_BY = {**dict.fromkeys(("gold", "small_gold"), "success"), **dict.fromkeys(("update", "update_anew"), "changed")}


def best(rows: Sequence[Record]) -> Record:
    """The try to take: the highest, of equals the lowest rate."""
    return max(rows, key=lambda row: (row[CHOSEN_BY.get(row["arm"], "fidelity")], -row["lr"]))


TUNING = Tuning(NUMBER, Settings, run_cell, Path(__file__).parent, RATES, UNTRAINED, columns=COLUMNS, choose=best)

if __name__ == "__main__":
    main(TUNING, sys.argv[1:])
