"""What each arm does between the start and its budget: a call of a loop of the library.

Every arm pays for all it processes, the start's presampled scores included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import common.arm
from common.adaptthink import train_adaptthink
from common.arm import stay
from common.compute import Meter
from common.episodes import Episode
from common.grpo import train_grpo
from common.models import parameter_count
from common.modes import end_think_id, first_logprobs, prompts_of
from common.pairs import Pair
from common.preference import train_dpo
from experiments.exp_7_10_adaptthink.evaluate import Evaluator
from experiments.exp_7_10_adaptthink.families import Family
from experiments.exp_7_10_adaptthink.stages import rates_by_task


@dataclass
class Arm(common.arm.Arm):
    """With the family of its tasks and the start's scores."""

    family: Family
    evaluator: Evaluator
    rates: dict[str, Path]  # mode -> stage with the start's scores

    def task_at(self) -> Callable[[int, int], list[dict]]:
        """(step, n) -> the tasks of a step."""
        levels = self.branch.levels
        pool = [task for task in self.family.pool(self.seed) if not levels or task["level"] in levels]
        return lambda step, count: self.family.batch(pool, self.seed, step, count)

    def where(self, spent: Meter) -> dict[str, Any]:
        """Budget, files and the points of the learning curve: percent of what is left once `spent` is paid."""
        left = self.branch.budget * self.settings.branch_flops - spent.flops
        return {"seed": self.seed, **self.curve(left, self.evaluator.curve, self.settings.evaluation.points)}


def trains(method: str) -> bool:
    """Whether the method changes the model."""
    return method not in ("none", "routed")


def train(arm: Arm) -> Meter:
    """Trains the arm's model in place; returns the compute it used, whatever the method."""
    meter: Meter = METHODS[arm.branch.method](arm)
    return meter


def adapt(arm: Arm) -> Meter:
    """AdaptThink in any of its forms."""
    reference, tokens = rates_by_task(arm.rates["think"])
    spent = Meter(parameter_count(arm.model))
    spent.add_forward(tokens)
    meter = train_adaptthink(
        arm.model, arm.tokenizer, arm.family.make_env, arm.task_at(), reference, arm.config,
        stratum=lambda task: str(task["level"]), **arm.where(spent),
    )  # fmt: skip
    meter.add_forward(tokens)
    return meter


@dataclass
class ShortAnswers:
    """Stands in make_env's place: a right answer earns 1 - coefficient * its length / limit, a wrong one 0.

    A choice of ours for the family of length rewards; the verifier's score stays in the episode's success.
    """

    make_env: Callable[[], Any]
    coefficient: float
    limit: int

    def __call__(self) -> Any:
        return self.make_env()

    def rescore(self, episodes: Sequence[Episode]) -> None:
        """Replaces the rewards of sampled episodes of one turn, in place."""
        for episode in episodes:
            share = sum(episode.mask) / self.limit
            episode.reward = float(episode.success) * (1 - self.coefficient * share)
            episode.turn_rewards = [episode.reward]


def shorten(arm: Arm) -> Meter:
    """GRPO on the score with a length penalty."""
    make_env = ShortAnswers(arm.family.make_env, arm.settings.length_penalty, arm.settings.max_new_tokens)
    spent = Meter(parameter_count(arm.model))
    return train_grpo(arm.model, arm.tokenizer, make_env, arm.task_at(), arm.config, **arm.where(spent))


def easy_levels(arm: Arm) -> tuple[dict[Any, bool], Meter]:
    """A classifier that knows a task's level: does NoThinking suffice there? And what the start's scores cost.

    It does where it costs the start less than router_delta on the training tasks, mean score with thinking less without.
    """
    (think, cost), (nothink, more) = (rates_by_task(arm.rates[mode]) for mode in ("think", "nothink"))
    gaps: dict[Any, list[float]] = defaultdict(list)
    for task in arm.family.pool(arm.seed):
        gaps[task["level"]].append(think(task) - nothink(task))
    for level, found in gaps.items():
        arm.log.record(split=f"gap/{level}", metric="gap", value=sum(found) / len(found), n=len(found), step=0, final=True)
    spent = Meter(parameter_count(arm.model))
    spent.add_forward(cost + more)
    return {level: sum(found) / len(found) < arm.branch.router_delta for level, found in gaps.items()}, spent


def route(arm: Arm) -> Meter:
    """The start itself behind a router: NoThinking on easy levels, thinking on all others, those never scored among them."""
    easy, spent = easy_levels(arm)
    arm.evaluator.mode_of = lambda task: "nothink" if easy.get(task["level"]) else "think"
    return spent


def teach_router(arm: Arm) -> Meter:
    """DPO on the first token alone: NoThinking over thinking on easy levels, thinking over NoThinking on the others."""
    easy, spent = easy_levels(arm)
    pairs = mode_pairs(arm, arm.family.pool(arm.seed), easy)
    meter = train_dpo(arm.model, arm.tokenizer, pairs, arm.config, **arm.where(spent))
    meter.add_forward(spent.tokens_forward)
    return meter


def mode_pairs(arm: Arm, pool: list[dict], suffices: dict[Any, bool]) -> list[Pair]:
    """One pair per task: </think> against the likeliest other first token, in the order that the classifier wants."""
    end = end_think_id(arm.tokenizer)
    prompts = prompts_of(arm.tokenizer, arm.family.make_env, pool)
    logp_PV = first_logprobs(arm.model, prompts)
    logp_PV[:, end] = -torch.inf
    pairs = []
    for task, prompt, thought in zip(pool, prompts, logp_PV.argmax(-1).tolist(), strict=True):
        mask = [0] * len(prompt) + [1]
        skip, think = ([*prompt, end], mask), ([*prompt, thought], mask)
        pairs.append(Pair(skip, think) if suffices[task["level"]] else Pair(think, skip))
    return pairs


METHODS: dict[str, Callable[[Arm], Meter]] = {
    "none": stay,
    "adaptthink": adapt,
    "grpo": shorten,
    "router": teach_router,
    "routed": route,
}
