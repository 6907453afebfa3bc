"""What every experiment's scale=cluster ends with: the plans of its cells printed, or their tasks written and submitted."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.algo import AlgoConfig
from common.backends import verl, verl_plan


class Planned(NamedTuple):
    """One cell: its job, algorithm, estimate and verl's keys. ``export`` writes what the job reads."""

    job: verl.Job
    algo: AlgoConfig
    estimate: verl_plan.Plan
    keys: dict[str, Any]
    export: Callable[[], None]


def carry_out(cluster: verl_plan.Cluster, cells: Sequence[Planned], dry: bool) -> int:
    """Checks the keys of all cells where verl is installed, prints each plan and, unless dry, submits it; 1 if one failed."""
    if verl.verl_config_folder() is None:
        print("note: verl is not installed here, so its schema has not checked the keys\n")
    else:
        schema = verl.compose()
        for cell in cells:
            verl.check_keys(cell.keys, schema)
    failed = 0
    for cell in cells:
        submit = verl_plan.submission(cluster, cell.keys, verl.environment(cell.job, on_cpu=False))
        print(verl_plan.describe(cluster, cell.algo, cell.job, cell.estimate, submit), end="\n\n", flush=True)
        if not dry:
            cell.export()
            failed += subprocess.run(submit, cwd=Path(verl.ROOT), check=False).returncode != 0
    return 1 if failed else 0
