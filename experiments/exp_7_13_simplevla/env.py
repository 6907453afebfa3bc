"""The table-top as a Gymnasium environment: one episode, chunks of action tokens in, objects, picture and instruction out.

    env = gymnasium.make("TableTop-v0", chunk=4)
    seen, info = env.reset(seed=0)  # or options={"task": 3, "split": "test"}
    seen, reward, terminated, truncated, info = env.step(tokens)  # (chunk, 4) whole numbers
    picture = env.render()  # from above and from the side

Training and evaluation play many worlds in lockstep (`episodes.play`); this is one of them, behind the usual interface.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from common.schema import one_of, within
from experiments.exp_7_13_simplevla import tasks
from experiments.exp_7_13_simplevla.physics import PERIOD, SHAPES
from experiments.exp_7_13_simplevla.render import from_above, from_the_side
from experiments.exp_7_13_simplevla.tokens import WIDTHS
from experiments.exp_7_13_simplevla.world import OBJECTS, World

ENV_ID = "TableTop-v0"
FAR = 10.0  # metres: no place is farther
PIXELS = 48


class TableTop(gymnasium.Env):
    """One layout. Solving ends an episode (terminated, reward 1), so does the last control step (truncated, reward 0).

    info: instruction, success, reason, parts (progress), height (greatest rise of the block, metres), control_steps.
    """

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": round(1 / PERIOD)}

    def __init__(self, chunk: int = 4, control_steps: int = 16, shape: str = "cube", render_mode: str | None = None) -> None:
        """chunk: control steps per action. Raises ConfigError for values that cannot work."""
        one_of("shape", shape, SHAPES)
        within("chunk", chunk, 1)
        within("control_steps", control_steps, chunk)
        self.chunk, self.control_steps, self.shape, self.render_mode = chunk, control_steps, shape, render_mode
        self.action_space = spaces.MultiDiscrete(np.tile(WIDTHS, (chunk, 1)))
        self.observation_space = spaces.Dict(
            {
                "words": spaces.MultiDiscrete([len(tasks.WORDS)] * tasks.LENGTH),
                "names": spaces.MultiDiscrete([len(tasks.WORDS)] * OBJECTS),
                "places": spaces.Box(-FAR, FAR, (OBJECTS, 3), np.float64),
                "opening": spaces.Box(-FAR, FAR, (1,), np.float64),
                "image": spaces.Box(0, 255, (PIXELS, PIXELS, 3), np.uint8),
            }
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        """options: task (0 to 15; by chance among the trained ones) and split (train, validation, test)."""
        super().reset(seed=seed)
        wanted = {"task": None, "split": "train", **(options or {})}
        for key in wanted:
            one_of("options", key, ("task", "split"))
        one_of("split", wanted["split"], tasks.SPLITS)
        task = self.np_random.choice(tasks.SEEN) if wanted["task"] is None else wanted["task"]
        within("task", int(task), 0, len(tasks.TASKS) - 1)
        draw = int(self.np_random.integers(2**62))
        self.world = World(tasks.draw(wanted["split"], [int(task)], "env", draw), self.shape)
        self.taken, self.over = 0, False
        return self._see(), self._info(False, "reset")

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        """Carries out a chunk; ValueError after the end or for tokens out of range."""
        tokens = np.asarray(action)
        if self.over:
            raise ValueError("The episode is over; call reset().")
        if tokens.shape != (self.chunk, len(WIDTHS)) or (tokens < 0).any() or (tokens >= WIDTHS).any():
            raise ValueError(f"An action is ({self.chunk}, {len(WIDTHS)}) whole numbers below {WIDTHS}; got {tokens.tolist()}.")
        outcome = self.world.act(np.array([0]), tokens[None].astype(int))
        solved = bool(outcome.solved[0])
        self.taken += int(outcome.steps[0])
        truncated = not solved and self.taken + self.chunk > self.control_steps
        self.over = solved or truncated
        reason = "solved" if solved else "out of time" if truncated else "going on"
        return self._see(), float(solved), solved, truncated, self._info(solved, reason)

    def render(self) -> np.ndarray | None:
        """Both views side by side, where render_mode is rgb_array."""
        if self.render_mode is None:
            return None
        seen, colour = self.world.see(), self.world.layouts.colour
        views = [draw(seen.places, seen.opening, colour, 4 * PIXELS)[0] for draw in (from_above, from_the_side)]
        return np.concatenate(views, 1)

    def _see(self) -> dict[str, np.ndarray]:
        seen = self.world.see()
        image = from_above(seen.places, seen.opening, self.world.layouts.colour, PIXELS, SHAPES[self.shape][1][0])[0]
        places = seen.places[0].clip(-FAR, FAR)
        return {
            "words": seen.words[0].copy(),
            "names": seen.names[0],
            "places": places,
            "opening": seen.opening[:1],
            "image": image,
        }

    def _info(self, solved: bool, reason: str) -> dict[str, Any]:
        return {
            "instruction": tasks.instruction(int(self.world.layouts.task[0])), "success": solved, "reason": reason,
            "parts": {"progress": float(self.world.progress()[0])}, "height": float(self.world.height[0]),
            "control_steps": self.taken,
        }  # fmt: skip


gymnasium.register(ENV_ID, TableTop)
