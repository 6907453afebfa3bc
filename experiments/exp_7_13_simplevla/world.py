"""Many table-tops at once: what is seen, what a chunk of actions does, and whether the block lies where it should.

Shape suffixes: _N episodes, _L control steps of a chunk, _O objects, _A tokens of a control step.

Solved is a control step after which the block that is meant lies on its pad: its middle within RADIUS of the pad's, no
higher than FLAT above its place on the table, and slower than STILL. Whether it is still held is not asked. An episode
ends when it is solved or its control steps are used up.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from experiments.exp_7_13_simplevla.physics import BLOCKS, Physics, physics, rest_height
from experiments.exp_7_13_simplevla.tasks import PADS, WORD, Layouts, instruction_words
from experiments.exp_7_13_simplevla.tokens import decode

RADIUS, FLAT, STILL = 0.035, 0.01, 0.1  # metres, metres, metres per second
LIFTED = 0.02  # metres above its place on the table from which on a block counts as lifted; a tipped cube rises 0.008
OBJECTS = 1 + BLOCKS + len(PADS)
FIRST_BLOCK = 1
PAD_WORDS = [WORD[name] for name in PADS]
COLOUR_WORD = WORD["red"]


class Seen(NamedTuple):
    """What a policy is shown: words (N, LENGTH), names (N, O) and places (N, O, 3) of gripper, blocks, pads; opening (N,)."""

    words: np.ndarray
    names: np.ndarray
    places: np.ndarray
    opening: np.ndarray

    def take(self, rows: np.ndarray) -> Seen:
        return Seen(*(values[rows] for values in self))


class Outcome(NamedTuple):
    """What a chunk did: solved within it (N,), the control steps taken (N,), states after each of its steps (N, L, S)."""

    solved: np.ndarray
    steps: np.ndarray
    states: np.ndarray


def lies_there(scene: Physics, states: np.ndarray, layouts: Layouts) -> np.ndarray:
    """The success test on states (N, L, S): bool (N, L)."""
    at = scene.read(states)
    rows = np.arange(len(layouts.task))
    block, speed = at.blocks[rows, :, layouts.target], at.speed[rows, :, layouts.target]
    near = np.linalg.norm(block[..., :2] - layouts.goal_xy[:, None], axis=-1) <= RADIUS
    return near & (block[..., 2] <= rest_height(scene.shape) + FLAT) & (speed <= STILL)


class World:
    """N episodes in lockstep. `height` is how far each meant block has risen, `gap` how far it is from its pad."""

    def __init__(self, layouts: Layouts, shape: str = "cube") -> None:
        self.layouts, self.scene = layouts, physics(shape)
        self.states = self.scene.start(layouts.block_xy)
        count = len(layouts.task)
        self.words = instruction_words(layouts.task)
        self.closed, self.height, self.grasped = np.zeros(count, bool), np.zeros(count), np.zeros(count, bool)
        self.gap = self.first_gap = np.linalg.norm(self.meant()[:, :2] - layouts.goal_xy, axis=-1)

    def meant(self) -> np.ndarray:
        """Places of the blocks that are meant, (N, 3)."""
        return self.scene.read(self.states).blocks[np.arange(len(self.states)), self.layouts.target]

    def see(self) -> Seen:
        """The observation of every episode."""
        at, layouts = self.scene.read(self.states), self.layouts
        count = len(self.states)
        pads = np.concatenate([layouts.pad_xy, np.zeros((count, len(PADS), 1))], -1)
        places = np.concatenate([at.hand[:, None], at.blocks, pads], 1)
        names = np.empty((count, OBJECTS), int)
        names[:, 0], names[:, FIRST_BLOCK : FIRST_BLOCK + BLOCKS] = WORD["gripper"], COLOUR_WORD + layouts.colour
        names[:, FIRST_BLOCK + BLOCKS :] = PAD_WORDS
        return Seen(self.words, names, places, at.opening)

    def act(self, rows: np.ndarray, tokens_NLA: np.ndarray) -> Outcome:
        """Carries out a chunk in the episodes `rows`; each stops at the control step that solves it."""
        states = self.scene.advance(self.states[rows], decode(tokens_NLA))
        layouts, index = self.layouts.take(rows), np.arange(len(rows))
        solved = lies_there(self.scene, states, layouts)
        steps = np.where(solved.any(1), solved.argmax(1) + 1, states.shape[1])
        at = self.scene.read(states)
        block = at.blocks[index, :, layouts.target]
        taken = np.arange(states.shape[1]) < steps[:, None]
        rise = np.where(taken, block[..., 2] - rest_height(self.scene.shape), 0).max(1)
        close = taken & (np.linalg.norm(block - at.hand, axis=-1) < 0.025) & (tokens_NLA[..., 3] > 0)
        self.height[rows] = np.maximum(self.height[rows], rise)
        self.grasped[rows] |= close.any(1)
        self.states[rows] = states[index, steps - 1]
        self.closed[rows] = tokens_NLA[index, steps - 1, 3] > 0
        self.gap = self.gap.copy()
        self.gap[rows] = np.linalg.norm(self.meant()[rows, :2] - layouts.goal_xy, axis=-1)
        return Outcome(solved.any(1), steps, states)

    def progress(self) -> np.ndarray:
        """Share of the way done, (N,), 0 to 1: a half for holding the block once, a half for bringing it nearer to the pad."""
        nearer = (1 - self.gap / self.first_gap).clip(0, 1)
        return 0.5 * self.grasped + 0.5 * nearer
