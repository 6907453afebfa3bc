"""Episodes of a policy in many worlds at once, and the tensors that training reads.

Shape suffixes: _B episodes, _K decisions of an episode, _L control steps of a chunk, _A tokens of a control step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.exp_7_13_simplevla.physics import SHAPES
from experiments.exp_7_13_simplevla.policy import ACTION, Inputs, VlaPolicy, choose
from experiments.exp_7_13_simplevla.render import from_above
from experiments.exp_7_13_simplevla.tasks import Layouts
from experiments.exp_7_13_simplevla.world import LIFTED, Seen, World

FORWARD = 1024  # decisions per forward pass


class Played(NamedTuple):
    """B episodes. Decision k of episode b took place where acted_BK; the tokens of control steps that were not carried
    out, because the block lay there already, are off the mask: they changed nothing."""

    inputs: Inputs  # (B, K, ...)
    tokens: Tensor  # (B, K, L, A)
    logps: Tensor  # (B, K, L, A)
    mask: Tensor  # bool (B, K, L, A)
    acted: Tensor  # bool (B, K)
    solved: np.ndarray
    height: np.ndarray  # greatest rise of the block that is meant, metres
    progress: np.ndarray  # (B, K): share of the way done after each decision
    steps: np.ndarray  # control steps taken
    tracks: np.ndarray | None  # (B, control steps, S) states, where asked for

    @property
    def pushed(self) -> np.ndarray:
        """Solved, and the block never left the table."""
        return self.solved & (self.height < LIFTED)


def to_inputs(seen: Seen, policy: VlaPolicy, world: World, rows: np.ndarray) -> Inputs:
    """Observations as tensors on the policy's device."""
    device = policy.device
    image = None
    if policy.config.view == "image":
        half = SHAPES[world.scene.shape][1][0]
        drawn = from_above(seen.places, seen.opening, world.layouts.colour[rows], policy.config.pixels, half)
        image = torch.from_numpy(drawn).permute(0, 3, 1, 2).contiguous().to(device)
    floats = (torch.from_numpy(x).float().to(device) for x in (seen.places, seen.opening))
    words, names = (torch.from_numpy(x).to(device) for x in (seen.words, seen.names))
    return Inputs(words, names, *floats, image)


def play(
    policy: VlaPolicy,
    layouts: Layouts,
    *,
    decisions: int,
    temperature: float,
    stream: torch.Generator,
    shape: str = "cube",
    tracks: bool = False,
) -> Played:
    """One episode from each layout, of at most `decisions` chunks."""
    world, count, chunk = World(layouts, shape), len(layouts.task), policy.config.chunk
    rows, kept, track = np.arange(count), None, []
    solved, steps, progress = np.zeros(count, bool), np.zeros(count, int), np.zeros((count, decisions))
    tokens = torch.zeros(count, decisions, chunk, ACTION, dtype=torch.long)
    logps, mask = torch.zeros(tokens.shape), torch.zeros(tokens.shape, dtype=torch.bool)
    for k in range(decisions):
        inputs = to_inputs(world.see().take(rows), policy, world, rows)
        parts = [choose(policy, inputs.take(part), temperature, stream) for part in torch.arange(len(rows)).split(FORWARD)]
        chosen, logp = (torch.cat(values).cpu() for values in zip(*parts, strict=True))
        outcome = world.act(rows, chosen.numpy())
        kept = kept or [None if x is None else x.new_zeros(count, decisions, *x.shape[1:]) for x in inputs]
        for whole, part in zip(kept, inputs, strict=True):
            if whole is not None:
                whole[rows, k] = part
        taken = torch.from_numpy(np.arange(chunk) < outcome.steps[:, None])
        tokens[rows, k], logps[rows, k], mask[rows, k] = chosen, logp, taken[..., None].expand(-1, -1, ACTION)
        steps[rows] += outcome.steps
        progress[:, k] = world.progress()
        if tracks:
            track.append(follow(world, rows, outcome.states, outcome.steps))
        solved[rows] = outcome.solved
        rows = rows[~outcome.solved]
        if not len(rows):
            progress[:, k:] = progress[:, k : k + 1]
            break
    states = np.concatenate(track, 1) if tracks else None
    return Played(
        Inputs(*kept), tokens, logps, mask, mask[:, :, 0, 0], solved, world.height, progress, steps, states
    )  # fmt: skip


def follow(world: World, rows: np.ndarray, states: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """States of all episodes through a chunk, (B, L, S): those that have ended stand still."""
    whole = np.repeat(world.states[:, None], states.shape[1], 1)
    index = np.minimum(np.arange(states.shape[1]), steps[:, None] - 1)
    whole[rows] = np.take_along_axis(states, index[..., None], 1)
    return whole
