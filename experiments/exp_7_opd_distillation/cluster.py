"""7-opd on a cluster: distillation and GRPO on the outcome through verl on Ray, with the tasks of the other scales.

    make exp-7-opd SCALE=cluster DRY=1      # the submission, the batches, memory, tokens and hours; nothing starts
    make exp-7-opd SCALE=cluster            # writes the tasks and submits a job per arm and seed

Student and teacher must know the language of the task, the dial's teacher its buttons too: take the models that scale=gpu
leaves in runs/stages (their names begin with chain-student and chain-teacher). verl distils by the log-ratio of the token
written or by forward KL (common.backends.verl_distill); arms with reverse KL or a mask inside the answer are refused.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from common.algo import AlgoConfig
from common.backends import verl, verl_plan
from common.backends.verl_distill import Teacher, distill_keys
from common.backends.verl_submit import Planned, carry_out
from common.backends.verl_worker import task_row, write_agent, write_tasks
from common.compute import FORWARD_FLOPS
from common.config import run_folder, seed_list
from common.distill import DistillConfig
from common.jobs import Cell, cell_folder
from common.schema import ConfigError
from experiments.exp_7_opd_distillation import chains, data, dial, stages
from experiments.exp_7_opd_distillation.data import TASKS
from experiments.exp_7_opd_distillation.settings import Settings

NUMBER = "7-opd"
ENVS = {"chain": f"{chains.__name__}:{chains.ENV_ID}", "dial": f"{dial.__name__}:{dial.ENV_ID}"}


def configuration(settings: Settings, arm: str) -> AlgoConfig | DistillConfig:
    """An arm's method; ConfigError for one that verl does not run."""
    branch, config = settings.branches[arm], settings.arm_config(arm)
    if branch.credit != "all" or not isinstance(config, AlgoConfig | DistillConfig):
        raise ConfigError(
            f"arms: scale=cluster runs distillation and GRPO on whole answers, and {arm} has method={branch.method} "
            f"credit={branch.credit}; allowed are method=distill or policy_gradient with credit=all."
        )
    return config


def export(settings: Settings, arm: str, algo: AlgoConfig, job: verl.Job) -> None:
    """Writes the tasks of all steps in order, the evaluation tasks of trained and longer lengths, and the agent's file."""
    branch = settings.branches[arm]
    module, env = TASKS[branch.task], ENVS[branch.task]
    items = stages.training_items(settings, branch.task, job.seed)
    items = items[: settings.task_config(arm).few_items] if branch.few else items
    tasks = [
        task
        for step in range(job.steps)
        for task in data.training_tasks(branch.task, items, job.seed, step, algo.prompts_per_step)
    ]
    write_tasks(job.train_file, [task_row(f"{NUMBER}-train", "train", i, task, env, {}) for i, task in enumerate(tasks)])
    role = "validation" if job.seed < 100 else "test"
    rows: list[dict[str, Any]] = []
    for split, lengths in (("id", module.TRAINED), ("ood", module.LONGER)):
        for item in module.items(role, 0, lengths, settings.evaluation.curve_items):
            rows.append(task_row(f"{NUMBER}-{split}", split, len(rows), module.task(item), env, {}))
    write_tasks(job.test_file, rows)
    write_agent(job.folder / "agent.yaml", algo, job.folder / "episodes")


def plan(settings: Settings, arm: str, seed: int) -> Planned:
    """One cell's job, algorithm, estimate and verl's keys. ConfigError for whatever cannot work."""
    cluster, teacher = settings.cluster, settings.judge
    if cluster is None or teacher is None or settings.model_path is None:
        raise ConfigError("scale=cluster needs cluster, judge and model_path; conf/experiment/7-opd/cluster.yaml sets them.")
    config = configuration(settings, arm)
    algo = config.algo if isinstance(config, DistillConfig) else config
    job = verl.Job(
        NUMBER, f"{arm}-seed{seed}", settings.model_path, cell_folder(run_folder(settings), Cell(arm, seed)) / "verl", steps=1,
        seed=seed, prompt_tokens=cluster.prompt_tokens, feedback_tokens=cluster.feedback_tokens,
        save_every=cluster.save_every, test_every=cluster.test_every,
    )  # fmt: skip
    lengths, budget = (cluster.prompt_tokens, job.response_tokens(algo)), settings.task_config(arm).branch_flops
    estimate = verl_plan.make_plan(cluster, algo, lengths, budget)
    if isinstance(config, DistillConfig):
        estimate = with_teacher(cluster, teacher, algo, estimate, sum(lengths), budget)
        keys = distill_keys(config, job, teacher)
    else:
        keys = verl.algorithm_keys(algo, job)
    job = replace(job, steps=estimate.steps)
    keys |= verl.job_keys(job, algo) | verl_plan.gpu_keys(cluster, algo)
    return Planned(job, algo, estimate, keys, partial(export, settings, arm, algo, job))


def with_teacher(
    cluster: verl_plan.Cluster, teacher: Teacher, algo: AlgoConfig, estimate: verl_plan.Plan, row: int, budget: float
) -> verl_plan.Plan:
    """The estimate with the teacher's pass over every row, on cards of its own, as part of the budget."""
    if "teacher" not in cluster.models:
        raise ConfigError(f"cluster.models={sorted(cluster.models)}: needs the teacher's shape under the name teacher.")
    tokens = algo.prompts_per_step * algo.group_size * row
    scoring = FORWARD_FLOPS * cluster.models["teacher"].parameters * tokens
    flops = estimate.flops + scoring
    steps = math.floor(budget / flops)
    if steps < 1:
        raise ConfigError(f"branch_flops={budget:g}: one step takes {flops:.3g} FLOPs with the teacher's; give at least that.")
    peak = teacher.nodes * teacher.gpus_per_node * cluster.peak_tflops * 1e12
    seconds = estimate.seconds | {"the teacher's scoring": scoring / (peak * cluster.train_use)}
    return replace(estimate, steps=steps, flops=flops, tokens=estimate.tokens | {"judged": tokens}, seconds=seconds)


def main(settings: Settings) -> int:
    """Plans all cells, then prints the plans (dry) or exports and submits them; 1 if a submission failed."""
    cells = [plan(settings, arm, seed) for seed in seed_list(settings) for arm in settings.chosen()]
    assert settings.cluster is not None  # plan() has refused
    return carry_out(settings.cluster, cells, settings.dry)
