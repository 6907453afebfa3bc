"""The scripted demonstrator: above the block, down, grasp, lift, over the pad, down, open. And play, which knows no task.

It reads true positions, one decision per control step, and speaks in metres; `tokens.encode` makes tokens of it.
"""

from __future__ import annotations

import numpy as np

from experiments.exp_7_13_simplevla.physics import LOW
from experiments.exp_7_13_simplevla.tokens import REACH_STEP

LIFT = 0.12  # height at which a block is carried
NEAR = 0.01  # metres of slack sideways
GRASP = 0.025  # a closed gripper this near to a block's middle holds it
OPEN, CLOSED = 0.0, 1.0


def towards(gap_N3: np.ndarray) -> np.ndarray:
    """The longest allowed step along a gap, axis by axis."""
    return gap_N3.clip(-REACH_STEP, REACH_STEP)


def demonstrate(hand_N3: np.ndarray, closed_N: np.ndarray, block_N3: np.ndarray, pad_N2: np.ndarray, steps: int) -> np.ndarray:
    """The next `steps` actions, (N, L, 4), from where the gripper, whether it is closed, the block and the pad are.

    Between decisions the gripper is taken to be where it was sent, and a grasped block to come along.
    """
    hand, closed, block = hand_N3.copy(), closed_N.astype(bool).copy(), block_N3.copy()
    actions = np.zeros((len(hand), steps, 4))
    for step in range(steps):
        gap = block - hand
        aside = np.abs(gap[:, :2]).max(1) > NEAR
        held = closed & (np.abs(gap).max(1) < GRASP)
        off = np.abs(block[:, :2] - pad_N2).max(1) > NEAR
        fetch = ~held & off
        above, low = hand[:, 2] > 0.7 * LIFT, hand[:, 2] <= LOW + NEAR
        goal, grip = hand.copy(), (held & (off | ~low)).astype(float)
        goal[:, :2] += np.where((fetch & aside & above)[:, None], gap[:, :2], 0)
        goal[:, :2] += np.where((held & off & above)[:, None], pad_N2 - block[:, :2], 0)
        goal[:, 2] = np.where((fetch & aside) | (held & off), LIFT, np.where(fetch | held, LOW, hand[:, 2]))
        grip = np.where(fetch & ~aside & low, CLOSED, grip)
        move = towards(goal - hand)
        actions[:, step, :3], actions[:, step, 3] = move, grip
        block = np.where((held & (grip > 0))[:, None], block + move, block)
        hand, closed = hand + move, grip > 0
    return actions


def approach(hand_N3: np.ndarray, goal_N2: np.ndarray, steps: int) -> np.ndarray:
    """Play: over a place and down to the table with the gripper open, (N, L, 4); nothing is grasped."""
    hand, actions = hand_N3.copy(), np.zeros((len(hand_N3), steps, 4))
    for step in range(steps):
        gap = goal_N2 - hand[:, :2]
        aside = np.abs(gap).max(1) > NEAR
        move = np.zeros_like(hand)
        move[:, :2] = np.where((aside & (hand[:, 2] > 0.7 * LIFT))[:, None], gap, 0)
        move[:, 2] = np.where(aside, LIFT, LOW) - hand[:, 2]
        actions[:, step, :3] = towards(move)
        hand = hand + actions[:, step, :3]
    return actions
