"""Tasks and layouts: which block goes on which pad, in words, and where everything stands at the start.

Places lie on a grid of a millimetre, and a layout's grid numbers decide its split, so that no start of training is one of
validation or test. A layout is a function of (split, seed parts): nothing is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from common.seeding import rng
from experiments.exp_7_13_simplevla.physics import BLOCKS

COLOURS = ("red", "green", "blue", "yellow")
PADS = ("left", "right", "near", "far")
PAD_XY = np.array([[-0.16, 0.0], [0.16, 0.0], [0.0, -0.16], [0.0, 0.16]])
SLOT_XY = np.array([[-0.06, 0.0], [0.06, 0.0]])
WORDS = ("[pad]", "put", "go", "to", "the", "on", "block", "pad", "gripper", *COLOURS, *PADS)
WORD = {word: index for index, word in enumerate(WORDS)}
LENGTH = 8  # words of the longest instruction
TASKS = [(colour, pad) for colour in range(len(COLOURS)) for pad in range(len(PADS))]
UNSEEN = [task for task, (colour, pad) in enumerate(TASKS) if colour == pad]  # four pairs that training never shows
SEEN = [task for task in range(len(TASKS)) if task not in UNSEEN]
SPLITS = ("train", "validation", "test")
SPREAD = (0.03, 0.02)  # metres by which blocks and pads leave their middle places
WIDE = (0.05, 0.04)
CLEAR = (0.05, 0.06)  # metres: least distance of a block from any pad, and from the other block, at the start
MILLIMETRE = 1000


class Layouts(NamedTuple):
    """Starts of N episodes: task (N,), colour of each block (N, BLOCKS), which of them is meant (N,), places in metres."""

    task: np.ndarray
    colour: np.ndarray
    target: np.ndarray
    block_xy: np.ndarray
    pad_xy: np.ndarray

    def take(self, rows: np.ndarray | Sequence[int]) -> Layouts:
        """Some of them, or some several times."""
        return Layouts(*(values[rows] for values in self))

    @property
    def goal_xy(self) -> np.ndarray:
        """Middle of the pad that is meant, (N, 2)."""
        return self.pad_xy[np.arange(len(self.task)), self.task % len(PADS)]


def instruction(task: int) -> str:
    """The task in words."""
    colour, pad = TASKS[task]
    return f"put the {COLOURS[colour]} block on the {PADS[pad]} pad"


def encode(text: str) -> list[int]:
    """Word numbers, filled up to LENGTH. KeyError for a word that no instruction has."""
    words = [WORD[word] for word in text.split()]
    return words + [0] * (LENGTH - len(words))


def instruction_words(task_N: Iterable[int]) -> np.ndarray:
    """Word numbers of tasks, (N, LENGTH)."""
    return np.array([encode(instruction(int(task))) for task in task_N])


def grid_split(block_xy: np.ndarray, pad_xy: np.ndarray) -> np.ndarray:
    """Split number of each layout by its places in millimetres: eight tenths are training, one each the others, (N,)."""
    total = np.rint(np.concatenate([block_xy, pad_xy], 1) * MILLIMETRE).astype(int).sum((1, 2)) % 10
    return np.where(total < 8, 0, total - 7)


def crowded(block_xy: np.ndarray, pad_xy: np.ndarray) -> np.ndarray:
    """Bool (N,): a block stands on or near a pad, or the blocks touch."""
    to_pads = np.linalg.norm(block_xy[:, :, None] - pad_xy[:, None], axis=-1).min((1, 2))
    between = np.linalg.norm(block_xy[:, 0] - block_xy[:, 1], axis=-1)
    return (to_pads < CLEAR[0]) | (between < CLEAR[1])


def draw(split: str, task_N: Sequence[int] | np.ndarray, *parts: int | str, spread: tuple[float, float] = SPREAD) -> Layouts:
    """A layout of `split` for each task, by the random stream of (split, parts)."""
    stream, count = rng("layout", split, *parts), len(task_N)
    task = np.asarray(task_N)
    target = stream.integers(BLOCKS, size=count)
    colour = np.empty((count, BLOCKS), int)
    meant = task // len(PADS)
    colour[np.arange(count), target] = meant
    colour[np.arange(count), 1 - target] = (meant + stream.integers(1, len(COLOURS), size=count)) % len(COLOURS)
    block_xy, pad_xy = np.empty((count, *SLOT_XY.shape)), np.empty((count, *PAD_XY.shape))
    open_rows = np.arange(count)
    while len(open_rows):  # places of another split, and crowded ones, are drawn again
        block_xy[open_rows] = SLOT_XY + scatter(stream, (len(open_rows), *SLOT_XY.shape), spread[0])
        pad_xy[open_rows] = PAD_XY + scatter(stream, (len(open_rows), *PAD_XY.shape), spread[1])
        places = block_xy[open_rows], pad_xy[open_rows]
        open_rows = open_rows[(grid_split(*places) != SPLITS.index(split)) | crowded(*places)]
    return Layouts(task, colour, target, block_xy, pad_xy)


def scatter(stream: np.random.Generator, shape: tuple[int, ...], width: float) -> np.ndarray:
    """Uniform whole millimetres from -width to width, in metres."""
    limit = round(width * MILLIMETRE)
    return stream.integers(-limit, limit + 1, size=shape) / MILLIMETRE
