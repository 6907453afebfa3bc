"""Attacks the success test before it is used: `python -m experiments.exp_7_13_simplevla.audit`.

States that look solved must not count (held above the pad, passing over it, stacked, beside it, the wrong block, the wrong
pad), states that are solved must, in whatever way they came about. Then whole episodes: nothing is solved at the start, by
standing still or by waving about; the demonstrator solves every task with every shape and always lifts; a policy that only
pushes can solve and is found out as such. Last, no start of one split is a start of another.
Prints what was tried, lists each hole, and exits 1 if there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

from common.seeding import rng
from experiments.exp_7_13_simplevla import tasks
from experiments.exp_7_13_simplevla.lessons import perform
from experiments.exp_7_13_simplevla.physics import SHAPES, physics, rest_height
from experiments.exp_7_13_simplevla.tokens import BINS, WIDTHS, encode
from experiments.exp_7_13_simplevla.world import FLAT, LIFTED, RADIUS, STILL, World, lies_there

EVERY = list(range(len(tasks.TASKS)))
DRAWN = 2000  # layouts of each split
SIDE = 0.03  # metres that the pusher goes beyond the block


def placed(layouts: tasks.Layouts, which: np.ndarray, offset: np.ndarray, shape: str = "cube") -> np.ndarray:
    """States (N, 1, S) with block `which` at its pad's middle plus offset (3,) above the table, standing still."""
    scene, rows = physics(shape), np.arange(len(layouts.task))
    states = scene.start(layouts.block_xy)
    for row, block in zip(rows, which, strict=True):
        at = 6 + 7 * block
        states[row, at : at + 3] = np.append(layouts.goal_xy[row], rest_height(shape)) + offset
    return states[:, None]


def counted(layouts: tasks.Layouts, states: np.ndarray, shape: str = "cube") -> np.ndarray:
    return lies_there(physics(shape), states, layouts)[:, 0]


def looks() -> Iterator[tuple[str, bool, np.ndarray]]:
    """(what, must it count, counted per layout) of constructed states."""
    layouts = tasks.draw("train", EVERY * 4, "audit")
    for shape in SHAPES:
        inside, beside = [0.9 * RADIUS, 0, 0], [0, -1.1 * RADIUS, 0]
        yield f"{shape} on the pad", True, counted(layouts, placed(layouts, layouts.target, [0, 0, 0], shape), shape)
        yield f"{shape} near the pad's edge", True, counted(layouts, placed(layouts, layouts.target, inside, shape), shape)
        yield f"{shape} beside the pad", False, counted(layouts, placed(layouts, layouts.target, beside, shape), shape)
        above = placed(layouts, layouts.target, [0, 0, 2 * FLAT], shape)
        yield f"{shape} held above the pad", False, counted(layouts, above, shape)
        stacked = placed(layouts, 1 - layouts.target, [0, 0, 0], shape)
        yield f"the other {shape} on the pad", False, counted(layouts, stacked, shape)
        for row, block in enumerate(layouts.target):
            stacked[row, 0, 6 + 7 * block : 9 + 7 * block] = [*layouts.goal_xy[row], 3 * rest_height(shape)]
        yield f"{shape} on top of the other one", False, counted(layouts, stacked, shape)
    passing = placed(layouts, layouts.target, [0, 0, 0])
    speeds = 1 + physics("cube").nq + 5 + 6 * layouts.target
    passing[np.arange(len(speeds)), 0, speeds] = 2 * STILL
    yield "passing over the pad", False, counted(layouts, passing)
    other = layouts._replace(task=layouts.task // len(tasks.PADS) * len(tasks.PADS) + (layouts.task + 1) % len(tasks.PADS))
    yield "on another pad", False, counted(layouts, placed(other, layouts.target, np.zeros(3)))


def episodes() -> Iterator[tuple[str, bool, np.ndarray]]:
    """(what, must it count, counted per layout) of whole episodes."""
    layouts = tasks.draw("train", EVERY * 2, "audit", "episodes")
    for spread in (tasks.SPREAD, tasks.WIDE):
        drawn = tasks.draw("test", EVERY * 20, "audit", spread=spread)
        yield "the start", False, lies_there(physics("cube"), World(drawn).states[:, None], drawn)[:, 0]
    still = np.full((len(layouts.task), 16, len(WIDTHS)), BINS // 2)
    still[..., 3] = 0
    yield "standing still", False, World(layouts).act(np.arange(len(layouts.task)), still).solved
    for shape in SHAPES:
        shown = perform(layouts, 24, shape)
        yield f"the demonstrator, {shape}", True, shown.solved
        yield f"the demonstrator without a lift, {shape}", False, shown.solved & (shown.world.height < LIFTED)


def push(layouts: tasks.Layouts, limit: int = 30) -> World:
    """A pusher for tasks left and right: beside the block, down, closed, and along the table to the pad."""
    world, rows = World(layouts), np.arange(len(layouts.task))
    direction = np.sign(layouts.goal_xy[:, :1] - world.meant()[:, :1]) * [1.0, 0.0]
    for _ in range(limit):
        hand, block, way = world.see().places[rows, 0], world.meant()[rows], direction[rows]
        behind = block[:, :2] - (0.02 + SIDE) * way
        low, aside = hand[:, 2] < 0.04, np.abs(hand[:, :2] - behind).max(1) > 0.012
        final = layouts.goal_xy[rows] - 0.03 * way
        goal = np.concatenate([np.where(low[:, None], final, behind), np.where(low | ~aside, 0.02, 0.12)[:, None]], 1)
        goal[:, 1] = np.where(low, block[:, 1], goal[:, 1])
        step = np.where(low, 0.02, 0.06)[:, None]
        action = np.concatenate([(goal - hand).clip(-step, step), np.ones((len(rows), 1))], 1)
        outcome = world.act(rows, encode(action[:, None]))
        rows = rows[~outcome.solved]
        if not len(rows):
            break
    return world


def pushed() -> Iterator[str]:
    """A scripted pusher must solve some layouts, and none of those may count as lifted."""
    wanted = [task for task in tasks.SEEN if task % len(tasks.PADS) < 2]
    layouts = tasks.draw("train", wanted * 16, "audit", "push")
    meant = layouts.block_xy[np.arange(len(layouts.task)), layouts.target]
    layouts = layouts.take(np.flatnonzero(meant[:, 0] * layouts.goal_xy[:, 0] > 0))  # the other block is not in the way
    world = push(layouts)
    solved = lies_there(world.scene, world.states[:, None], layouts)[:, 0]
    print(f"a pusher: solves {solved.sum()} of {len(solved)}, {(world.height[solved] < LIFTED).sum()} without a lift")
    if solved.mean() < 0.2:
        yield f"a pusher solves only {solved.mean():.0%}: pushing may be impossible, and its absence would mean nothing"
    if (world.height[solved] >= LIFTED).any():
        yield "a pusher's success counts as lifted"


def splits() -> Iterator[str]:
    """No start is in two splits, and drawing keeps to its split."""
    for spread in (tasks.SPREAD, tasks.WIDE):
        for number, split in enumerate(tasks.SPLITS):
            task = rng("audit", split).integers(len(tasks.TASKS), size=DRAWN)
            drawn = tasks.draw(split, task, "audit", "splits", spread=spread)
            if (tasks.grid_split(drawn.block_xy, drawn.pad_xy) != number).any():
                yield f"{split} holds layouts of another split"
    print(f"splits: {2 * DRAWN} layouts of each of {', '.join(tasks.SPLITS)} keep apart")


def holes() -> Iterator[str]:
    """Everything that is not as it should be."""
    for what, wanted, found in [*looks(), *episodes()]:
        print(f"{what}: {int(found.sum())} of {len(found)} count, {'all' if wanted else 'none'} should")
        if not (found.all() if wanted else not found.any()):
            yield f"{what}: {int(found.sum())} of {len(found)} count"
    yield from pushed()
    yield from splits()


def main() -> int:
    """1 if there is a hole."""
    found = list(holes())
    for hole in found:
        print(f"HOLE: {hole}")
    print("no hole found" if not found else f"{len(found)} holes")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
