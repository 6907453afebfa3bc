"""7-11 on a cluster: the RL arms through verl on Ray, with the environment, tasks and algorithm of the other scales.

    make exp-7-11 SCALE=cluster DRY=1      # the submission, the batches, memory, tokens and hours; nothing starts
    make exp-7-11 SCALE=cluster            # writes the tasks and submits a job per arm and seed

The training tasks of a step are those that the native loops draw under the same seed.
"""

from functools import partial
from typing import Any

from common.algo import AlgoConfig, load_algo
from common.backends import verl, verl_plan
from common.backends.verl_submit import Planned, carry_out
from common.backends.verl_worker import task_row, write_agent, write_tasks
from common.cards import env
from common.config import run_folder, seed_list
from common.jobs import Cell, cell_folder
from common.schema import ConfigError
from experiments.exp_7_11_general_points import branches, data
from experiments.exp_7_11_general_points.evaluate import split_hands
from experiments.exp_7_11_general_points.settings import Branch, Settings

NUMBER = "7-11"
ENV = f"{env.__name__}:{env.ENV_ID}"


def algorithm(settings: Settings, branch: Branch) -> AlgoConfig:
    """The algorithm of an arm; ConfigError for an arm that does not train by RL."""
    if branch.method != "rl":
        raise ConfigError(f"arms: scale=cluster trains by RL alone, and an arm has method={branch.method}; allowed is rl.")
    own = {"max_new_tokens": settings.max_new_tokens, "max_turns": branch.iterations}
    own |= {} if branch.lr is None else {"lr": branch.lr}
    return load_algo(branch.algo, {**own, **branch.changes}, settings.algo)


def env_kwargs(settings: Settings, branch: Branch) -> dict[str, Any]:
    """Arguments of the environment as the arm trains in it."""
    switches = ["leaking_feedback"] if branch.leak else []
    return {"verify_iter": branch.iterations, "trace": settings.trace, "reward": settings.reward, "switches": switches}


def export(settings: Settings, branch: Branch, algo: AlgoConfig, job: verl.Job, split_seed: int) -> None:
    """Writes the tasks of all steps in order, the evaluation tasks of both rules, and the agent loop's file."""
    arguments = env_kwargs(settings, branch)
    train = branches.train_hands(settings, split_seed)
    count = algo.prompts_per_step
    rounds = range(algo.refill_rounds + 1)
    tasks = [
        task
        for part in rounds
        for step in range(job.steps)
        for task in data.training_tasks(train, job.seed, step, count * len(rounds))[part * count : (part + 1) * count]
    ]
    rows = [task_row(f"{NUMBER}-train", "train", i, task, ENV, arguments) for i, task in enumerate(tasks)]
    write_tasks(job.train_file, rows)
    chosen = split_hands(settings, split_seed, job.seed)
    limit = max(1, settings.evaluation.curve_hands // branch.iterations)
    rows = []
    for split in ("id", "ood"):
        all_hands, rule = chosen[split]
        some = all_hands[:: max(1, len(all_hands) // limit)][:limit]
        for task in data.evaluation_tasks(some, rule, job.seed, settings.evaluation.curve_orders):
            rows.append(task_row(f"{NUMBER}-{split}", split, len(rows), task, ENV, arguments))
    write_tasks(job.test_file, rows)
    write_agent(job.folder / "agent.yaml", algo, job.folder / "episodes")


def plan(settings: Settings, arm: str, seed: int) -> tuple[verl.Job, AlgoConfig, verl_plan.Plan, dict[str, Any]]:
    """One cell's job, algorithm, estimate and verl's keys. ConfigError for whatever cannot work."""
    branch, cluster = settings.branches[arm], settings.cluster
    if cluster is None or settings.model_path is None:
        raise ConfigError("scale=cluster needs cluster and model_path; conf/experiment/7-11/cluster.yaml sets both.")
    algo = algorithm(settings, branch)
    folder = cell_folder(run_folder(settings), Cell(arm, seed)) / "verl"
    shared = {"name": NUMBER, "arm": f"{arm}-seed{seed}", "model": settings.model_path, "folder": folder, "seed": seed}
    lengths = {"prompt_tokens": cluster.prompt_tokens, "feedback_tokens": cluster.feedback_tokens}
    job = verl.Job(**shared, **lengths, steps=1)
    response = job.response_tokens(algo)
    budget = branch.budget * settings.branch_flops
    estimate = verl_plan.make_plan(cluster, algo, (cluster.prompt_tokens, response), budget)
    every = {"save_every": cluster.save_every, "test_every": cluster.test_every}
    job = verl.Job(**shared, **lengths, **every, steps=estimate.steps)
    keys = verl.algorithm_keys(algo, job) | verl.job_keys(job, algo) | verl_plan.gpu_keys(cluster, algo)
    return job, algo, estimate, keys


def main(settings: Settings) -> int:
    """Plans all cells, then prints the plans (dry) or exports and submits them; 1 if a submission failed."""
    cells = []
    for seed in seed_list(settings):
        hundred = seed // 100 * 100
        split_seed = hundred + (seed - hundred) // settings.bases % settings.splits
        for arm in settings.chosen():
            job, algo, estimate, keys = plan(settings, arm, seed)
            write = partial(export, settings, settings.branches[arm], algo, job, split_seed)
            cells.append(Planned(job, algo, estimate, keys, write))
    assert settings.cluster is not None  # plan() has refused
    return carry_out(settings.cluster, cells, settings.dry)
