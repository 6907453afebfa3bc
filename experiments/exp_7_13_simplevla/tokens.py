"""Actions as tokens, as in OpenVLA: each number of a control step is one of a few bins.

A control step has four tokens: dx, dy and dz in BINS steps of one centimetre, and the gripper's wish, open or closed.
"""

from __future__ import annotations

import numpy as np

BINS, GRIPPER = 13, 2
WIDTHS = (BINS, BINS, BINS, GRIPPER)
STEP = 0.01  # metres between bins
REACH_STEP = STEP * (BINS // 2)


def encode(action_NLA: np.ndarray) -> np.ndarray:
    """Tokens (N, L, 4) of actions in metres, each number by its nearest bin."""
    bins = np.rint(action_NLA[..., :3] / STEP).clip(-(BINS // 2), BINS // 2) + BINS // 2
    return np.concatenate([bins, action_NLA[..., 3:] > 0.5], -1).astype(np.int64)


def decode(token_NLA: np.ndarray) -> np.ndarray:
    """Actions (N, L, 4) in metres."""
    return np.concatenate([(token_NLA[..., :3] - BINS // 2) * STEP, token_NLA[..., 3:]], -1).astype(float)
