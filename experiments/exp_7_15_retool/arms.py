"""What each arm does between its start and its budget: a call of a loop of the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import common.arm
from common.compute import Meter
from common.episodes import Episode, collate, token_logprobs
from common.grpo import train_grpo
from common.models import parameter_count
from common.policy import network
from common.ppo import train_ppo
from common.sft import train_sft
from common.tokenizers import PhraseEncoder
from experiments.exp_7_15_retool import data, files
from experiments.exp_7_15_retool.env import Calculations
from experiments.exp_7_15_retool.evaluate import Evaluator
from experiments.exp_7_15_retool.interpreter import Interpreter


@dataclass
class Arm(common.arm.Arm):
    """With the interpreter that runs its programs."""

    interpreter: Interpreter | None
    evaluator: Evaluator

    def make_env(self) -> Calculations:
        """The environment that the arm trains in."""
        return Calculations(self.interpreter, self.settings.env_config(self.branch, training=True))

    def task_at(self) -> Callable[[int, int], list[dict]]:
        """(step, n) -> the tasks of a step."""
        if self.settings.problems is None:
            pool = data.training_pool(self.seed, self.settings.train_items)
        else:
            pool = files.training_pool(self.settings.problems, self.branch.tool, self.settings.train_items)
        return lambda step, count: data.training_tasks(pool, self.seed, step, count)

    def where(self) -> dict[str, Any]:
        """Budget, files and the points of the learning curve."""
        return self.curve(self.settings.branch_flops, self.evaluator.curve, self.settings.evaluation.points)


def train(arm: Arm) -> Meter:
    """Trains the arm's model in place; returns the compute it used, whatever the method."""
    if arm.branch.method == "none":
        return Meter(parameter_count(arm.model))
    return supervise(arm) if arm.branch.method == "sft" else reinforce(arm)


def supervise(arm: Arm) -> Meter:
    """More SFT on fresh demonstrations of the arm's protocol: what the same compute buys without RL."""
    encode = PhraseEncoder(arm.tokenizer)
    made = data.Demonstrations(encode, arm.settings.demonstrations, 1000 + arm.seed, arm.branch.tool)
    return train_sft(arm.model, lambda step: made.batch(step, arm.config.batch_size), arm.config, **arm.where())


def reinforce(arm: Arm) -> Meter:
    """GRPO or PPO on the environment's reward; with the interpreter's tokens masked, or not."""
    loop = train_ppo if arm.config.name == "ppo" else train_grpo
    make_env: Callable[[], Any] = arm.make_env
    if arm.branch.unmasked:
        make_env = Unmasked(arm.make_env, arm.model, arm.tokenizer, arm.config.temperature)
    return loop(arm.model, arm.tokenizer, make_env, arm.task_at(), arm.config, seed=arm.seed, **arm.where())


@dataclass
class Unmasked:
    """Stands in make_env's place: the interpreter's tokens count as the policy's own, with its own log-probability of them.

    The pass that computes these counts as a forward pass of the whole episode. Rewards stay as they are.
    """

    make_env: Callable[[], Any]
    model: Any
    tokenizer: Any
    temperature: float

    def __call__(self) -> Any:
        return self.make_env()

    def rescore(self, episodes: Sequence[Episode]) -> None:
        """Unmasks everything behind the prompt, in place."""
        batch = collate(episodes, self.tokenizer.pad_token_id)
        device = network(self.model).device
        ids_BT, attention_BT = batch.ids_BT.to(device), batch.attention_BT.to(device)
        with torch.no_grad():
            logp_BT, _ = token_logprobs(self.model, ids_BT, attention_BT, self.temperature)
        for episode, logps in zip(episodes, logp_BT.cpu().tolist(), strict=True):
            for place in range(episode.prompt_length, len(episode.ids)):
                if not episode.mask[place]:
                    episode.mask[place], episode.logps[place] = 1, logps[place]
            episode.tokens_forward += len(episode.ids)
