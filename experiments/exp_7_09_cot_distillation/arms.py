"""What each arm does between the common start and its budget: one short function per method, no loop of its own.

Every arm trains for branch_flops. What its teachers' answers cost comes on top, counted at the teachers' size; an arm
without a teacher gets as much more as the reference selection's answers cost, and pays its own sampling from that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common.arm
from common.arm import stay
from common.compute import Meter
from common.episodes import Episode
from common.grpo import train_grpo
from common.models import parameter_count
from common.rejection import row_batches, train_rejection
from common.sft import train_sft
from common.tokenizers import PhraseEncoder
from experiments.exp_7_09_cot_distillation import data, selection, stages, traces
from experiments.exp_7_09_cot_distillation.env import StatedSums
from experiments.exp_7_09_cot_distillation.evaluate import record_data


@dataclass
class Arm(common.arm.Arm):
    """With the problems it trains on and its teachers' answers."""

    answers: dict[str, Path]  # teacher -> the stage with its answers

    def task_at(self, step: int, count: int) -> list[dict]:
        """The tasks of a step."""
        return data.training_tasks(stages.train_problems(self.settings, self.seed), self.seed, step, count)

    def where(self, more: float = 0.0) -> dict[str, Any]:
        """The budget, and where files and numbers go."""
        flops = self.branch.budget * self.settings.branch_flops + more
        return self.loop(flops)

    def teachers_price(self) -> Meter:
        """What the answers cost that the arm's selection takes."""
        meter = Meter(parameter_count(self.model))
        stages.sampled({name: self.answers[name] for name in self.branch.select.teachers}, self.branch.select, meter)
        return meter


def train(arm: Arm) -> Meter:
    """Trains the arm's model in place; returns the compute it used, whatever the method."""
    meter: Meter = METHODS[arm.branch.method](arm)
    return meter


def distil(arm: Arm) -> Meter:
    """SFT on the teachers' answers as the arm selects them."""
    select, train_problems = arm.branch.select, stages.train_problems(arm.settings, arm.seed)
    spent = arm.teachers_price()
    each = select.candidates // len(select.teachers)
    found = [stages.candidates(arm.settings, arm.answers[name], arm.seed, each) for name in select.teachers]
    whole = [candidate for some in found for candidate in some]
    kept, counts = selection.select(whole, select)
    counts |= {"sampled": select.candidates * len(train_problems), "cut": select.candidates * len(train_problems) - len(whole)}
    texts = [selection.learnt(c.text, train_problems[c.group], select.learn) for c in kept]
    record_data(arm.log, kept, texts, counts)
    if not kept:  # nothing to learn: the arm stays at its start, and its numbers say so
        return spent
    rows = selection.rows_of(kept, train_problems, select.learn, PhraseEncoder(arm.tokenizer))
    config = arm.settings.sft_config(arm.name)
    batch_at = row_batches(rows, arm.tokenizer.pad_token_id, config.batch_size, arm.seed, "distil")
    meter = train_sft(arm.model, batch_at, config, **arm.where())
    meter.add_forward(spent.tokens_forward)
    meter.flops_of_others += spent.flops_of_others
    return meter


def reject(arm: Arm) -> Meter:
    """Rejection sampling from the student itself: RFT, or STaR where there are rounds."""
    config, sft = arm.settings.rejection_config(arm.name), arm.settings.sft_config(arm.name)
    return train_rejection(
        arm.model,
        arm.tokenizer,
        StatedSums,
        arm.task_at,
        config,
        sft,
        steps_of,
        seed=arm.seed,
        **arm.where(arm.teachers_price().flops),
    )


def steps_of(episode: Episode) -> tuple[traces.Equation, ...]:
    """Two answers are the same where their steps are."""
    return traces.equations(episode.texts[0])


def reinforce(arm: Arm) -> Meter:
    """GRPO on the verifier's reward."""
    return train_grpo(
        arm.model,
        arm.tokenizer,
        StatedSums,
        arm.task_at,
        arm.settings.grpo_config(arm.name),
        seed=arm.seed,
        **arm.where(arm.teachers_price().flops),
    )


METHODS: dict[str, Callable[[Arm], Meter]] = {
    "none": stay,
    "teacher": stay,
    "distill": distil,
    "rejection": reject,
    "grpo": reinforce,
}
