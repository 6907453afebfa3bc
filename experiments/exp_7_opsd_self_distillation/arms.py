"""Each arm as a call of the library's loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import common.arm
from common.arm import stay
from common.compute import Meter
from common.distill import train_distill
from common.grpo import train_grpo
from common.pretrained import encoder_of
from common.rejection import row_batches
from common.sft import train_sft
from experiments.exp_7_opsd_self_distillation import data, stages, tasks
from experiments.exp_7_opsd_self_distillation.evaluate import Evaluator


@dataclass
class Arm(common.arm.Arm):
    """With the tasks it trains on and what the self-teacher reads."""

    evaluator: Evaluator

    @property
    def items(self) -> tuple[tasks.Task, ...]:
        return stages.training_items(self.settings, self.branch.kind, self.seed)

    def task_at(self, step: int, count: int) -> list[dict]:
        """The tasks of a step."""
        return data.training_tasks(self.items, self.seed, step, count)

    def shown(self, options: dict) -> str:
        """What the self-teacher reads in place of the question."""
        return tasks.prompt(tasks.task_of(options), self.branch.shown)

    def where(self) -> dict[str, Any]:
        """Budget, files, and the evaluations on the way (asked after every step)."""
        return self.loop(self.settings.branch_flops, lambda step, used: self.evaluator.on_the_way(self.model, step, used))


def train(arm: Arm) -> Meter:
    """Trains the arm's model in place; returns the compute it used, whatever the method."""
    meter: Meter = METHODS[arm.branch.method](arm)
    return meter


def supervise(arm: Arm) -> Meter:
    """SFT on the very solutions that the self-teacher is shown."""
    encode = encoder_of(arm.tokenizer)
    rows = [encode.row(tasks.prompt(task), tasks.solution(task)) for task in arm.items]
    batches = row_batches(rows, arm.tokenizer.pad_token_id, arm.config.batch_size, arm.seed, "sft")
    return train_sft(arm.model, batches, arm.config, **arm.where())


def reinforce(arm: Arm) -> Meter:
    """A policy gradient on the verifier's verdict (RLVR)."""
    return train_grpo(arm.model, arm.tokenizer, tasks.PrivilegedTasks, arm.task_at, arm.config, seed=arm.seed, **arm.where())


def distil(arm: Arm) -> Meter:
    """The base with more in its context teaches the base that sees the question."""
    return train_distill(
        arm.model, None, arm.tokenizer, tasks.PrivilegedTasks, arm.task_at, arm.config,
        seed=arm.seed, privileged=arm.shown, **arm.where(),
    )  # fmt: skip


METHODS: dict[str, Callable[[Arm], Meter]] = {
    "none": stay,
    "sft": supervise,
    "policy_gradient": reinforce,
    "self_distill": distil,
}
