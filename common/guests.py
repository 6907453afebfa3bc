"""Guests: episodes that the policy did not write, such as scripts of an expert, in the groups of its own samples.

RLVP's program puts one compliant scripted episode into each group (`mix_scripted`): the group's mean then knows what the
task is worth, and the gradient pulls towards what was done there. A guest is trained on as if the policy had written it:
its log-probabilities are the present policy's, so its ratio begins at 1, and no importance weight corrects for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from common.compute import Meter
from common.episodes import Episode, token_logprobs
from common.loop import to_batch

Guests = Callable[[list[dict]], list[Episode]]  # one episode for each task, in the tasks' order, with log-probabilities 0.0


def invite(
    guests: Guests, model: Any, tokenizer: Any, tasks: list[dict], numbers: Sequence[int], temperature: float, meter: Meter
) -> list[Episode]:
    """The guests of some tasks, in the groups `numbers`, with the policy's log-probabilities; their forward is counted."""
    episodes = guests(tasks)
    batch = to_batch(episodes, tokenizer, model)
    with torch.no_grad():
        logp_BT, _ = token_logprobs(model, batch.ids_BT, batch.attention_BT, temperature, mask_BT=batch.mask_BT)
    for episode, number, logps in zip(episodes, numbers, logp_BT.tolist(), strict=True):
        episode.group, episode.logps = number, logps[: len(episode.ids)]
    meter.add_forward(int(batch.attention_BT.sum()))
    return episodes
