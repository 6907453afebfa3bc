"""Each arm as a call of the library's loops, with its share of the branch's compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common.arm
from common.arm import stay
from common.checkpoints import load_model
from common.compute import Meter
from common.distill import train_distill
from common.episodes import Episode
from common.grpo import train_grpo
from common.models import parameter_count
from common.pretrained import encoder_of
from common.rejection import row_batches
from common.sft import train_sft
from experiments.exp_7_opd_distillation import chains, data, stages
from experiments.exp_7_opd_distillation.evaluate import Evaluator


@dataclass
class Arm(common.arm.Arm):
    """With the tasks it trains on; ``inputs``: "teacher", "answers", the stages that its method needs."""

    evaluator: Evaluator
    inputs: dict[str, Path]

    def task_at(self, step: int, count: int) -> list[dict]:
        """The tasks of a step."""
        items = stages.training_items(self.settings, self.branch.task, self.seed)
        few = self.settings.task_config(self.name).few_items if self.branch.few else len(items)
        return data.training_tasks(self.branch.task, items[:few], self.seed, step, count)

    def where(self, spent: int = 0) -> dict[str, Any]:
        """Budget less the FLOPs already `spent`, files, and the evaluations on the way (asked after every step)."""
        flops = self.settings.task_config(self.name).branch_flops

        def evaluate(step: int, used: int) -> None:
            self.evaluator.on_the_way(self.model, step, spent + used)

        return self.loop(flops - spent, evaluate)

    def until_fault(self) -> Callable[[Episode], list[int]]:
        """episode -> 1 on the tokens up to and with the first that a check of the steps refuses."""
        encode = encoder_of(self.tokenizer)

        def mask(episode: Episode) -> list[int]:
            gold = [*encode(chains.answer(chains.chain_of(episode.task))), encode.eos]
            written = episode.ids[episode.prompt_length :]
            same = [own == right for own, right in zip(written, gold, strict=False)]
            first = same.index(False) if False in same else len(gold)
            return [0] * episode.prompt_length + [int(place <= first) for place in range(len(written))]

        return mask


class StepCredit:
    """An environment with the step information that masked distillation has: the control for it.

    Half of the reward is for the end, half for the share of steps before the first failed check; tokens behind that check
    carry no gradient.
    """

    def __init__(self, make_env: Callable[[], Any], mask: Callable[[Episode], list[int]]) -> None:
        self.make_env, self.mask = make_env, mask

    def __call__(self) -> Any:
        return self.make_env()

    def rescore(self, episodes: list[Episode]) -> None:
        """Sets reward and mask of finished episodes; success stays the verifier's."""
        for episode in episodes:
            episode.reward = (episode.infos[-1]["progress"] + episode.success) / 2
            episode.mask = [own & wanted for own, wanted in zip(episode.mask, self.mask(episode), strict=True)]


def train(arm: Arm) -> Meter:
    """Trains the arm's model in place; returns the compute it used, whatever the method."""
    meter: Meter = METHODS[arm.branch.method](arm)
    return meter


def supervise(arm: Arm) -> Meter:
    """SFT on the teacher's answers, whose sampling is part of the arm's compute."""
    rows, tokens, size = stages.load_answers(arm.inputs["answers"])
    spent = Meter(parameter_count(arm.model))
    spent.add_forward(tokens, size)
    batches = row_batches(rows, arm.tokenizer.pad_token_id, arm.config.batch_size, arm.seed, "sft")
    meter = train_sft(arm.model, batches, arm.config, **arm.where(spent.flops))
    meter.add_forward(tokens, size)
    return meter


def reinforce(arm: Arm) -> Meter:
    """A policy gradient on the verifier's verdict, with the step information where the arm says so."""
    make_env: Callable[[], Any] = stages.ENVS[arm.branch.task]
    if arm.branch.credit == "until_fault":
        make_env = StepCredit(make_env, arm.until_fault())
    return train_grpo(arm.model, arm.tokenizer, make_env, arm.task_at, arm.config, seed=arm.seed, **arm.where())


def distil(arm: Arm) -> Meter:
    """On-policy distillation, on the student's own tokens unless the arm's environment_tokens say otherwise."""
    teacher, _ = load_model(arm.inputs["teacher"] / "model", arm.settings.device, arm.settings.dtype)
    learn_from = arm.until_fault() if arm.branch.credit == "until_fault" else None
    return train_distill(
        arm.model, teacher, arm.tokenizer, stages.ENVS[arm.branch.task], arm.task_at, arm.config,
        seed=arm.seed, learn_from=learn_from, **arm.where(),
    )  # fmt: skip


METHODS: dict[str, Callable[[Arm], Meter]] = {
    "none": stay,
    "sft": supervise,
    "policy_gradient": reinforce,
    "distill": distil,
}
