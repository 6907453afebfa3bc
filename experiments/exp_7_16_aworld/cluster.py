"""7-16 on a cluster: Qwen3-4B through verl on Ray, with the same servers behind the agent loop.

    make exp-7-16 SCALE=cluster DRY=1      # the submission, the batches, memory, tokens and hours; nothing starts
    make exp-7-16 SCALE=cluster            # writes worlds and tasks and submits a job per arm and seed

Each of verl's processes that plays episodes starts its own servers when the first call comes, and stops them when it ends.
The folder of worlds must lie where all nodes see it.
"""

from __future__ import annotations

import atexit
import functools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium

from common.algo import AlgoConfig
from common.backends import verl, verl_plan
from common.backends.verl_submit import Planned, carry_out
from common.backends.verl_worker import task_row, write_agent, write_tasks
from common.config import run_folder, seed_list
from common.jobs import Cell, cell_folder
from common.schema import ConfigError
from experiments.exp_7_16_aworld import data, stages
from experiments.exp_7_16_aworld.env import AWorldEnv
from experiments.exp_7_16_aworld.hub import Bridge, ServerHub
from experiments.exp_7_16_aworld.settings import Settings

NUMBER = "7-16"
ENV_ID = "AWorld-v0"
ENV = f"{__name__}:{ENV_ID}"


@functools.cache
def shared_bridge(worlds: str, conditions: str) -> Bridge:
    """The servers of this process over these worlds, started when they are first called."""
    bridge = Bridge(ServerHub(Path(worlds), json.loads(conditions)))
    atexit.register(bridge.close)
    return bridge


def make_env(worlds: str, conditions: str = "{}", **options: Any) -> AWorldEnv:
    """The environment on the servers of this process."""
    return AWorldEnv(shared_bridge(worlds, conditions), Path(worlds), **options)


gymnasium.register(ENV_ID, entry_point=make_env)


def algorithm(settings: Settings, arm: str) -> AlgoConfig:
    """An arm's algorithm; ConfigError for an arm that does not train by RL."""
    method, config = settings.branches[arm].method, settings.arm_config(arm)
    if method != "grpo" or not isinstance(config, AlgoConfig):
        raise ConfigError(f"arms={arm}: scale=cluster trains by RL alone, and it has method={method}; allowed is grpo.")
    return config


def export(settings: Settings, arm: str, algo: AlgoConfig, job: verl.Job) -> None:
    """Writes the worlds, the tasks of all steps in order, the evaluation tasks, and the agent's file."""
    worlds = stages.worlds_of(settings).resolve()
    arguments = {"worlds": str(worlds), "conditions": json.dumps(settings.conditions)}
    arguments |= settings.env_options(settings.branches[arm].price)
    drawn = [
        task
        for step in range(job.steps)
        for task in data.training_tasks(settings.worlds.train, job.seed, step, algo.prompts_per_step)
    ]
    split = "validation" if job.seed < 100 else "test"
    asked = data.tasks(split, settings.evaluation.curve_questions, getattr(settings.worlds, split))
    for file, name, tasks in ((job.train_file, "train", drawn), (job.test_file, split, asked)):
        write_tasks(file, [task_row(f"{NUMBER}-{name}", name, i, task, ENV, arguments) for i, task in enumerate(tasks)])
    write_agent(job.folder / "agent.yaml", algo, job.folder / "episodes")


def plan(settings: Settings, arm: str, seed: int) -> Planned:
    """One cell's job, algorithm, estimate and verl's keys. ConfigError for whatever cannot work."""
    cluster = settings.cluster
    if cluster is None or settings.model_path is None:
        raise ConfigError("scale=cluster needs cluster and model_path; conf/experiment/7-16/cluster.yaml sets both.")
    algo = algorithm(settings, arm)
    job = verl.Job(
        NUMBER, f"{arm}-seed{seed}", settings.model_path, cell_folder(run_folder(settings), Cell(arm, seed)) / "verl", steps=1,
        seed=seed, prompt_tokens=cluster.prompt_tokens, feedback_tokens=cluster.feedback_tokens,
        save_every=cluster.save_every, test_every=cluster.test_every,
    )  # fmt: skip
    lengths = (cluster.prompt_tokens, job.response_tokens(algo))
    estimate = verl_plan.make_plan(cluster, algo, lengths, settings.branches[arm].budget * settings.flops)
    job = replace(job, steps=estimate.steps)
    keys = verl.algorithm_keys(algo, job) | verl.job_keys(job, algo) | verl_plan.gpu_keys(cluster, algo)
    return Planned(job, algo, estimate, keys, partial(export, settings, arm, algo, job))


def main(settings: Settings) -> int:
    """Plans all cells, then prints the plans (dry) or exports and submits them; 1 if a submission failed."""
    cells = [plan(settings, arm, seed) for seed in seed_list(settings) for arm in settings.chosen()]
    assert settings.cluster is not None  # plan() has refused
    return carry_out(settings.cluster, cells, settings.dry)
