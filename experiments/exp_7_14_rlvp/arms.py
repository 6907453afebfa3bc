"""What each arm does between the start and its budget: supervised rows, or a policy gradient with credit along the path."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common.arm
from common.arm import stay
from common.compute import Meter
from common.credits import make_credit
from common.grpo import train_grpo
from common.guests import Guests
from common.judge import Judged
from common.models import parameter_count
from common.rejection import row_batches
from common.sft import train_sft
from common.tokenizers import PhraseEncoder
from experiments.exp_7_14_rlvp import data
from experiments.exp_7_14_rlvp.evaluate import Evaluator
from experiments.exp_7_14_rlvp.scripts import FAILING, PERFECT
from experiments.exp_7_14_rlvp.settings import WorldConfig
from experiments.exp_7_14_rlvp.stages import load_judge

MIXES = {"perfect": PERFECT, "failing": FAILING}


@dataclass
class Arm(common.arm.Arm):
    """With the world it acts in."""

    evaluator: Evaluator
    judge: Path | None = None

    @property
    def world(self) -> WorldConfig:
        return self.settings.worlds[self.branch.world]

    def where(self) -> dict[str, Any]:
        """Budget, files and the points of the learning curve, in percent of the budget."""
        flops = self.branch.budget * self.world.flops
        return self.curve(flops, self.evaluator.curve, self.settings.evaluation.points)


def train(arm: Arm) -> Meter:
    """Trains the arm's model in place; returns the compute it used."""
    if arm.branch.method == "none":
        return stay(arm)
    arm.evaluator.curve(arm.model, 0)
    return supervise(arm) if arm.branch.method == "sft" else reinforce(arm)


def supervise(arm: Arm) -> Meter:
    """SFT on scripts of training tasks: perfect ones, or ones that obey every rule and fail the task."""
    settings, config = arm.settings, arm.settings.arm_config(arm.name)
    encode, mix = PhraseEncoder(arm.tokenizer), MIXES[arm.branch.scripts]
    domain = settings.domain(arm.branch.world)
    rows = data.demonstration_rows(domain, encode, arm.world.options, mix, settings.sft_scripts, arm.seed)
    batches = row_batches(rows, encode.pad, config.batch_size, arm.seed, "sft")
    return train_sft(arm.model, batches, config, **arm.where())


def reinforce(arm: Arm) -> Meter:
    """A policy gradient on outcome and path."""
    settings, credits = arm.settings, arm.settings.credit_config(arm.name)

    def task_at(step: int, count: int) -> list[dict]:
        return data.training_tasks(arm.world.options, arm.seed, step, count)

    make_env = settings.make_env(arm.branch.world)
    if arm.judge is not None:
        judge = load_judge(arm.judge, arm.model)
        make_env = Judged(make_env, judge, arm.tokenizer.pad_token_id, parameter_count(arm.model))
    meter = train_grpo(
        arm.model, arm.tokenizer, make_env, task_at, settings.arm_config(arm.name), seed=arm.seed,
        credit=None if credits is None else make_credit(credits), guests=guests_of(arm), **arm.where(),
    )  # fmt: skip
    arm.evaluator.training_records(arm.folder)
    return meter


def guests_of(arm: Arm) -> Guests | None:
    """Scripted episodes of the tasks of a step, for an arm that has them in its groups."""
    if arm.branch.guests == "none":
        return None
    encode, mix = PhraseEncoder(arm.tokenizer), MIXES[arm.branch.guests]
    env = arm.settings.make_env(arm.branch.world)()
    return lambda tasks: [data.scripted_episode(env, task, mix, encode, arm.seed, "guest") for task in tasks]
