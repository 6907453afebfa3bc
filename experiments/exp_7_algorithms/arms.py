"""What each arm does between the common start and its budget: one short function per family, no loop of its own.

Every arm pays for all it processes: sampling answers for rejection sampling or for pairs, the reward model's pairs, its
training and its scores, the teacher's passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common.arm
from common.arm import stay
from common.compute import Meter
from common.distill import train_distill
from common.episodes import Episode
from common.grpo import train_grpo
from common.models import parameter_count
from common.pairs import answers_from_episodes, pairs_from_episodes, step_pairs
from common.ppo import train_ppo
from common.preference import train_dpo, train_kto, train_online_dpo
from common.rejection import train_rejection
from common.reward_model import LearnedReward
from common.sft import train_sft
from common.tokenizers import PhraseEncoder
from experiments.exp_7_algorithms import chains, data, stages
from experiments.exp_7_algorithms.env import ArithmeticChains
from experiments.exp_7_algorithms.evaluate import Evaluator


@dataclass
class Arm(common.arm.Arm):
    """With the chains it trains on and the stages that its method needs."""

    evaluator: Evaluator
    inputs: dict[str, Path]  # "teacher", "reward": the stages that the method needs

    @property
    def train_chains(self) -> tuple[chains.Chain, ...]:
        return stages.train_chains(self.settings, self.seed)

    def task_at(self, step: int, count: int) -> list[dict]:
        """The tasks of a step."""
        return data.training_tasks(self.train_chains, self.seed, step, count)

    def where(self, spent: Meter | None = None) -> dict[str, Any]:
        """Budget, files and the points of the learning curve: percent of what is left once `spent` is paid."""
        left = self.branch.budget * self.settings.branch_flops - (spent.flops if spent else 0)
        return self.curve(left, self.evaluator.curve, self.settings.evaluation.points)


def train(arm: Arm) -> Meter:
    """Trains the arm's model in place; returns the compute it used, whatever the method."""
    meter: Meter = METHODS[arm.branch.method](arm)
    return meter


def supervise(arm: Arm) -> Meter:
    """SFT and its variants on the worked answers to the training chains."""
    config = arm.config
    demos = data.Demonstrations(PhraseEncoder(arm.tokenizer), arm.train_chains)
    return train_sft(arm.model, demos.batches(arm.seed, "sft", config.batch_size), config, **arm.where())


def reject(arm: Arm) -> Meter:
    """Rejection-sampling fine-tuning; as STaR, tasks that stay unsolved are tried again with the solution in the prompt."""
    where = arm.where()
    del where["evaluate_every_flops"]  # a round is the unit here
    hint = (lambda task: {**task, "hint": True}) if arm.branch.method == "star" else None
    sft = arm.settings.sft_config(arm.name)
    return train_rejection(
        arm.model, arm.tokenizer, ArithmeticChains, arm.task_at, arm.config, sft, text_of, seed=arm.seed, hint=hint, **where
    )


def text_of(episode: Episode) -> str:
    """Two answers are the same where their texts are."""
    return episode.texts[0]


def prefer(arm: Arm) -> Meter:
    """DPO on whole answers or on single steps, and KTO: the start's own answers, judged by the verifier."""
    part, method, config = arm.settings.preference, arm.branch.method, arm.config
    episodes = stages.sample_answers(
        arm.settings, arm.model, arm.tokenizer, arm.task_at(0, part.prompts), part.candidates, arm.seed, "preference"
    )
    spent = Meter(parameter_count(arm.model))
    spent.add_forward(sum(episode.tokens_forward for episode in episodes))
    examples: list[Any]
    if method == "kto":
        examples = answers_from_episodes(episodes)
    elif method == "dpo":
        examples = pairs_from_episodes(episodes, "right_wrong", per_prompt=part.per_prompt, seed=arm.seed)
    else:
        ends = frozenset(arm.tokenizer.convert_tokens_to_ids([chains.NEXT, chains.ANSWER]))
        examples = step_pairs(episodes, per_prompt=part.steps_per_prompt, separators=ends)
    if len(examples) < config.prompts_per_step:  # the arm stays at its start, and its numbers say so
        print(f"{arm.name}: {len(examples)} examples under seed {arm.seed}, {config.prompts_per_step} are a step; not trained")
        return spent
    loop = train_kto if method == "kto" else train_dpo
    meter = loop(arm.model, arm.tokenizer, examples, config, seed=arm.seed, **arm.where(spent))
    meter.add_forward(spent.tokens_forward)
    return meter


def prefer_online(arm: Arm) -> Meter:
    """Online DPO: pairs of fresh answers at every step."""
    return train_online_dpo(arm.model, arm.tokenizer, ArithmeticChains, arm.task_at, arm.config, seed=arm.seed, **arm.where())


def reinforce(arm: Arm) -> Meter:
    """Any policy gradient on the verifier's reward."""
    algo = arm.config
    loop = train_ppo if algo.name == "ppo" else train_grpo
    meter = loop(arm.model, arm.tokenizer, ArithmeticChains, arm.task_at, algo, seed=arm.seed, **arm.where())
    arm.evaluator.group_records(arm.folder)
    return meter


def reinforce_learned(arm: Arm) -> Meter:
    """A policy gradient on the learned reward (RLHF)."""
    size = parameter_count(arm.model)
    spent, accuracy = stages.reward_facts(arm.inputs["reward"], size)
    for split, found in accuracy.items():
        arm.log.record(split=split, metric="pair_accuracy", **found, step=100, final=True)
    reward = LearnedReward(ArithmeticChains, arm.evaluator.scorer, arm.tokenizer.pad_token_id, size)
    algo = arm.config
    loop = train_ppo if algo.name == "ppo" else train_grpo
    meter = loop(arm.model, arm.tokenizer, reward, arm.task_at, algo, seed=arm.seed, **arm.where(spent))
    meter.add_forward(spent.tokens_forward)
    meter.add_train(spent.tokens_trained)
    return meter


def distil(arm: Arm) -> Meter:
    """On-policy distillation from the larger teacher, or from the start itself with the solution in its prompt."""
    if arm.branch.method == "distill":
        teacher, _ = stages.teacher_model(arm.inputs["teacher"])
        privileged = None
    else:
        teacher, privileged = None, solution_prompt
    return train_distill(
        arm.model, teacher, arm.tokenizer, ArithmeticChains, arm.task_at, arm.config,
        seed=arm.seed, privileged=privileged, **arm.where(),
    )  # fmt: skip


def solution_prompt(task: dict) -> str:
    """What the self-teacher reads: the task with its worked solution."""
    return chains.prompt(data.chain_of(task), hint=True)


METHODS: dict[str, Callable[[Arm], Meter]] = {
    "none": stay,
    "best_of": stay,
    "sft": supervise,
    "rejection": reject,
    "star": reject,
    "dpo": prefer,
    "step_dpo": prefer,
    "kto": prefer,
    "online_dpo": prefer_online,
    "policy_gradient": reinforce,
    "rlhf": reinforce_learned,
    "distill": distil,
    "self_distill": distil,
}
