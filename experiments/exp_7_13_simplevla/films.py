"""Episodes to look at: as numbers in a record, as a GIF of two views, and as text.

A film's numbers are a list: colours of the two blocks, which of them is meant, the task, places of the pads, then for the start
and each control step the gripper (x, y, z, opening) and the blocks (x, y, z each). Metres, to a tenth of a millimetre.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from common.runlog import RunLog
from experiments.exp_7_13_simplevla import tasks
from experiments.exp_7_13_simplevla.episodes import Played
from experiments.exp_7_13_simplevla.lessons import Performance
from experiments.exp_7_13_simplevla.physics import BLOCKS, PERIOD, physics, rest_height
from experiments.exp_7_13_simplevla.render import from_above, from_the_side
from experiments.exp_7_13_simplevla.tokens import BINS

HEAD = BLOCKS + 2 + 2 * len(tasks.PADS)
FRAME = 4 + 3 * BLOCKS
PIXELS = 144
PAUSE = 6  # frames for which the last one stands


def task_name(task: int) -> str:
    """red-left and the like."""
    colour, pad = tasks.TASKS[task]
    return f"{tasks.COLOURS[colour]}-{tasks.PADS[pad]}"


def lowest(solved: np.ndarray, height: np.ndarray) -> int:
    """The solved episode whose block rose least."""
    return int(np.where(solved, height, np.inf).argmin())


def frames_of(states: np.ndarray) -> np.ndarray:
    """Gripper, opening and blocks of states (L, S) of cubes, (L, FRAME)."""
    at = physics("cube").read(states)
    return np.concatenate([at.hand, at.opening[:, None], at.blocks.reshape(len(states), -1)], 1)


def record(log: RunLog, split: str, layouts: tasks.Layouts, states: np.ndarray, steps: np.ndarray, row: int) -> None:
    """Keeps episode `row` of (N, L, S) states as a film; the record's value is the block's greatest rise in centimetres."""
    start = physics("cube").start(layouts.block_xy[row : row + 1])
    frames = frames_of(np.concatenate([start, states[row, : steps[row]]]))
    head = [*layouts.colour[row], layouts.target[row], layouts.task[row], *layouts.pad_xy[row].ravel()]
    items = [round(float(value), 4) for value in [*head, *frames.ravel()]]
    rise = frames[:, 4 + 3 * layouts.target[row] + 2].max() - rest_height("cube")
    log.record(split=split, metric="film", value=round(100 * float(rise), 2), n=1, step=100, final=True, items=items)


def write_gif(items: list[float], path: Path) -> None:
    """Draws a film: from above, and from the side; a second of it lasts two."""
    from PIL import Image  # comes with matplotlib

    head, frames = np.array(items[:HEAD]), np.array(items[HEAD:]).reshape(-1, FRAME)
    count = len(frames)
    pads = np.concatenate([head[BLOCKS + 2 :].reshape(-1, 2), np.zeros((len(tasks.PADS), 1))], 1)
    places = np.concatenate([frames[:, None, :3], frames[:, 4:].reshape(count, BLOCKS, 3), np.repeat(pads[None], count, 0)], 1)
    colour = np.repeat(head[None, :BLOCKS].astype(int), count, 0)
    views = [draw(places, frames[:, 3], colour, PIXELS) for draw in (from_above, from_the_side)]
    pictures = [Image.fromarray(picture) for picture in np.concatenate(views, 2)]
    pictures += [pictures[-1]] * PAUSE
    first, *rest = [picture.quantize(64, dither=Image.Dither.NONE) for picture in pictures]
    first.save(path, save_all=True, append_images=rest, duration=round(2000 * PERIOD), loop=0, optimize=False)


def record_demonstration(log: RunLog, layouts: tasks.Layouts, shown: Performance) -> None:
    """The first demonstration, as a film."""
    record(log, "demonstration", layouts, shown.states, shown.steps, 0)


def words(tokens_LA: np.ndarray) -> str:
    """A chunk in centimetres: (dx dy dz grip) for each control step."""
    return "; ".join(
        f"{x - BINS // 2:+d} {y - BINS // 2:+d} {z - BINS // 2:+d} {'close' if grip else 'open'}" for x, y, z, grip in tokens_LA
    )


def rollouts(split: str, layouts: tasks.Layouts, played: Played, count: int) -> list[dict[str, Any]]:
    """Some episodes in words, spread over the tasks: every chunk as the policy wrote it, and where things are after it."""
    found, scene = [], physics("cube")
    chunk = played.tokens.shape[2]
    for row in range(0, len(layouts.task), max(1, len(layouts.task) // count)):
        meant, goal, segments = layouts.target[row], layouts.goal_xy[row], []
        for k in range(int(played.acted[row].sum())):
            last = min((k + 1) * chunk, int(played.steps[row])) - 1
            at = scene.read(played.tracks[row, last])
            away = 100 * float(np.linalg.norm(at.blocks[meant, :2] - goal))
            rise = 100 * float(at.blocks[meant, 2] - rest_height("cube"))
            said = f"gripper {np.round(100 * at.hand, 1).tolist()} cm; block {away:.1f} cm from its pad, {rise:.1f} cm up"
            taken = played.tokens[row, k][played.mask[row, k, :, 0]].numpy()
            segments += [{"text": words(taken), "mask": 1}, {"text": said, "mask": 0}]
        solved, confidence = bool(played.solved[row]), float(played.logps[row][played.mask[row]].mean())
        way = "without a lift" if played.pushed[row] else "lifted"
        found.append(
            {
                "split": split, "prompt": tasks.instruction(int(layouts.task[row])), "segments": segments,
                "reward": float(solved), "parts": {"progress": round(float(played.progress[row, -1]), 3)},
                "reason": f"solved in {played.steps[row]} control steps, {way}" if solved else "not solved in time",
                "success": solved, "surprise": -confidence if solved else confidence,
            }
        )  # fmt: skip
    return found[:count]
