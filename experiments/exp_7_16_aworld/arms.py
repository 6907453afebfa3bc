"""What each arm does between the start and its budget: scripts, a policy gradient over the servers, or measurements."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common.arm
from common.algo import AlgoConfig
from common.arm import stay
from common.compute import Budget, Meter
from common.episodes import run_episodes
from common.files import read_json_lines
from common.grpo import train_grpo
from common.rejection import row_batches
from common.seeding import generator
from common.sft import train_sft
from experiments.exp_7_16_aworld import data
from experiments.exp_7_16_aworld.clients import listed_and_called
from experiments.exp_7_16_aworld.env import Envs
from experiments.exp_7_16_aworld.evaluate import Evaluator
from experiments.exp_7_16_aworld.hub import Bridge, ServerHub
from experiments.exp_7_16_aworld.scripts import PERFECT
from experiments.exp_7_16_aworld.servers import SERVERS


@dataclass
class Arm(common.arm.Arm):
    """With the worlds and the environments it acts in."""

    worlds: Path
    envs: Envs
    evaluator: Evaluator

    def where(self) -> dict[str, Any]:
        """Budget, files and the points of the learning curve, in percent of the budget."""
        flops = self.branch.budget * self.settings.flops
        return self.curve(flops, self.evaluator.curve, self.settings.evaluation.points)

    def task_at(self, step: int, count: int) -> list[dict[str, Any]]:
        """The training tasks of a step."""
        return data.training_tasks(self.settings.worlds.train, self.seed, step, count)


def episodes_played(arm: Arm) -> int:
    """Episodes of the cell: all of a policy gradient's steps, and the last evaluation."""
    evaluation, algo = arm.settings.evaluation, arm.config
    played = evaluation.questions * evaluation.samples
    if not isinstance(algo, AlgoConfig) or arm.branch.method != "grpo":
        return played
    steps = sum("success/mean" in row for row in read_json_lines(arm.folder / "metrics.jsonl"))
    return played + steps * algo.prompts_per_step * algo.group_size


def train(arm: Arm) -> Meter:
    """Trains the arm's model in place, or measures; returns the compute it used."""
    method = arm.branch.method
    if method == "pace":
        measure_pace(arm)
    elif method == "clients":
        names = arm.settings.served or tuple(SERVERS)
        right, total = asyncio.run(listed_and_called(arm.worlds, data.worlds("test", 1)[0], names))
        arm.evaluator.put("train", "other_tools", right / total, total)
    elif method != "none":
        arm.evaluator.curve(arm.model, 0)
        meter = supervise(arm) if method == "sft" else reinforce(arm)
        arm.evaluator.training_records(arm.folder)
        return meter
    return stay(arm)


def supervise(arm: Arm) -> Meter:
    """SFT on perfect scripts about the training worlds."""
    settings, config = arm.settings, arm.config
    rows = data.scripted_rows(
        arm.tokenizer, arm.worlds, "train", settings.worlds.train, PERFECT, settings.sft_scripts, arm.seed,
        settings.env_options(), settings.conditions,
    )  # fmt: skip
    batches = row_batches(rows, arm.tokenizer.pad_token_id, config.batch_size, arm.seed, "sft")
    return train_sft(arm.model, batches, config, **arm.where())


def reinforce(arm: Arm) -> Meter:
    """A policy gradient on the marked answers; the calls of all episodes in flight run side by side."""
    envs = Envs(arm.envs.bridge, arm.worlds, **arm.settings.env_options(arm.branch.price))
    return train_grpo(arm.model, arm.tokenizer, envs, arm.task_at, arm.config, seed=arm.seed, **arm.where())


def measure_pace(arm: Arm) -> None:
    """Times rollouts at the latency of `pace`, many at once and one at a time, and their share of GRPO's steps."""
    settings, pace = arm.settings, arm.settings.pace
    slow = {"all": {**settings.conditions.get("all", {}), "latency_s": pace.latency_s}}
    algo = arm.config
    hub = ServerHub(arm.worlds, slow, settings.patience, arm.folder / "servers.log")
    with Bridge(hub) as bridge:
        bridge.wait(hub.supervisor.start(settings.served or ()))
        envs = Envs(bridge, arm.worlds, **settings.env_options())
        timed(arm, envs, pace.together, pace.alone + 1)  # compiles kernels and loads the servers' libraries, untimed
        alone = [timed(arm, envs, 1, step) for step in range(pace.alone)]
        together = timed(arm, envs, pace.together, pace.alone)
        budget = Budget(steps=pace.steps)
        train_grpo(
            arm.model, arm.tokenizer, envs, arm.task_at, algo, seed=arm.seed, budget=budget, log=arm.log, folder=arm.folder
        )
    rows = read_json_lines(arm.folder / "metrics.jsonl")
    rollout, update = (sum(row[f"time/{name}"] for row in rows) for name in ("rollout", "update"))
    per_episode = sum(alone) / pace.alone
    episodes = pace.steps * algo.prompts_per_step * algo.group_size
    arm.evaluator.put("train", "speed_up", per_episode * pace.together / together, pace.together)
    arm.evaluator.put("train", "rollout_share", per_episode * episodes / (per_episode * episodes + update), pace.alone)
    arm.evaluator.put("train", "rollout_share_many", rollout / (rollout + update), episodes)


def timed(arm: Arm, envs: Envs, count: int, step: int) -> float:
    """Wall seconds of `count` episodes at once, each of its own question."""
    settings, start = arm.settings, time.perf_counter()
    run_episodes(
        arm.model, arm.tokenizer, envs, arm.task_at(step, count), max_turns=settings.turns,
        max_new_tokens=settings.max_new_tokens, temperature=1.0, generator=generator(arm.seed, "pace", step),
    )  # fmt: skip
    return time.perf_counter() - start
