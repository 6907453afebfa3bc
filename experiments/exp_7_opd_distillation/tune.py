"""Learning rates by validation: `python -m experiments.exp_7_opd_distillation.tune [arm ...]`.

Four tries for every arm that trains on chains and three on the dial, on tuning seed 0 and validation items. Arms that
differ from another in their prompts or their teacher alone take its rate. The rates in conf/experiment/7-opd/base.yaml are
then set to the ones that the README's table marks.
"""

import sys
from pathlib import Path

from common.tuning import Tuning, main
from experiments.exp_7_opd_distillation.run import NUMBER, run_cell
from experiments.exp_7_opd_distillation.settings import Settings

RATES = {
    "chain_sft": (3e-4, 1e-3, 3e-3, 1e-2),
    **dict.fromkeys(("chain_grpo", "chain_grpo_steps"), (1e-4, 3e-4, 1e-3, 3e-3)),
    **dict.fromkeys(("chain_opd_sampled", "chain_opd", "chain_opd_masked"), (3e-4, 1e-3, 3e-3, 1e-2)),
    "dial_sft": (1e-3, 3e-3, 1e-2),
    "dial_grpo": (3e-4, 1e-3, 3e-3),
    **dict.fromkeys(("dial_opd_sampled", "dial_opd", "dial_opd_unmasked"), (1e-3, 2e-3, 4e-3)),
}
SAME_AS = {"chain_sft_few": "chain_sft", "chain_opd_few": "chain_opd", "dial_opd_narrow": "dial_opd"}
TUNING = Tuning(
    NUMBER, Settings, run_cell, Path(__file__).parent, RATES, ("chain_start", "dial_start"), lambda arm: ("id", "ood")
)

if __name__ == "__main__":
    main(TUNING, sys.argv[1:])
