"""What is measured of a policy, greedily, on layouts that no training has: success, how it is done, and films of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.files import read_json_lines
from common.runlog import RunLog
from common.seeding import generator
from experiments.exp_7_13_simplevla import films, tasks
from experiments.exp_7_13_simplevla.episodes import Played, play
from experiments.exp_7_13_simplevla.physics import SHAPES
from experiments.exp_7_13_simplevla.policy import VlaPolicy
from experiments.exp_7_13_simplevla.settings import Settings

CENTIMETRES = 100
ROLLOUTS = 6  # to read, of each split
NEW_SHAPES = [name for name in SHAPES if name != "cube"]


class Evaluator:
    """Plays the evaluation layouts of a cell and writes its records; every arm and seed sees the same layouts."""

    def __init__(self, settings: Settings, arm: str, log: RunLog, seed: int) -> None:
        self.settings, self.log, self.seed = settings, log, seed
        self.decisions = settings.decisions(arm)
        self.split = "validation" if seed < 100 else "test"

    def layouts(self, view: str, count: int) -> tasks.Layouts:
        """`count` layouts of each task of a view: seen, space (spread wider), object, goal (pairs never trained)."""
        wanted = tasks.UNSEEN if view == "goal" else tasks.SEEN
        spread = tasks.WIDE if view == "space" else tasks.SPREAD
        return tasks.draw(self.split, np.repeat(wanted, count), "evaluation", view, spread=spread)

    def run(self, policy: VlaPolicy, layouts: tasks.Layouts, shape: str = "cube", tracks: bool = False) -> Played:
        """Greedy episodes; the stream is asked for, not used."""
        stream = generator(self.seed, "evaluation")
        return play(
            policy, layouts, decisions=self.decisions, temperature=0, stream=stream, shape=shape, tracks=tracks
        )  # fmt: skip

    def curve(self, policy: VlaPolicy, percent: int) -> None:
        """A point of the learning curve; steps are percent of the arm's compute."""
        played = self.run(policy, self.layouts("seen", self.settings.evaluation.curve_layouts))
        self.log.record(split="seen", metric="success", value=played.solved.mean(), n=len(played.solved), step=percent)
        self.put_way("seen", [played], percent, final=False)

    def final(self, policy: VlaPolicy, film: bool) -> None:
        """The numbers of the report; `film`: the solved episode of trained tasks with the lowest carry is kept as a film."""
        each = self.settings.evaluation.layouts
        seen = self.layouts("seen", each)
        played = self.run(policy, seen, tracks=True)
        self.put_all("seen", [played])
        for task in tasks.SEEN:
            solved = played.solved[seen.task == task]
            self.put("seen", f"task/{films.task_name(task)}", solved.mean(), len(solved))
        if film and played.solved.any():
            films.record(self.log, "film", seen, played.tracks, played.steps, films.lowest(played.solved, played.height))
        self.log.rollouts(films.rollouts("seen", seen, played, ROLLOUTS))
        self.put_all("space", [self.run(policy, self.layouts("space", max(1, each // 2)))])
        goal = self.layouts("goal", each)
        self.put_all("goal", [self.run(policy, goal)])
        layouts = self.layouts("object", max(1, each // 4))
        shapes = [self.run(policy, layouts, shape) for shape in NEW_SHAPES]
        self.put_all("object", shapes)
        for shape, one in zip(NEW_SHAPES, shapes, strict=True):
            self.put(shape, "success", one.solved.mean(), len(one.solved))

    def put_all(self, split: str, parts: list[Played]) -> None:
        """Final records of a split."""
        solved = np.concatenate([part.solved for part in parts]).astype(float)
        self.put(split, "success", solved.mean(), len(solved), list(solved))
        progress = np.concatenate([np.where(part.solved, 1, part.progress[:, -1]) for part in parts])
        self.put(split, "progress", progress.mean(), len(progress))
        self.put_way(split, parts, 100, final=True)

    def put_way(self, split: str, parts: list[Played], step: int, final: bool) -> None:
        """How it was solved: share without a lift, rise of the block, control steps; null where nothing was solved."""
        solved = np.concatenate([part.solved for part in parts])
        ways = {
            "pushcut": np.concatenate([part.pushed for part in parts]).astype(float),
            "height": np.concatenate([part.height for part in parts]) * CENTIMETRES,
            "control_steps": np.concatenate([part.steps for part in parts]).astype(float),
        }
        for metric, values in ways.items():
            value = values[solved].mean() if solved.any() else None
            reason = None if solved.any() else "nothing was solved"
            self.log.record(split=split, metric=metric, value=value, n=int(solved.sum()), step=step, final=final, reason=reason)

    def put(self, split: str, metric: str, value: float | None, n: int, items: list[float] | None = None, **more: Any) -> None:
        """One final record."""
        self.log.record(split=split, metric=metric, value=value, n=n, step=100, final=True, items=items, **more)

    def training_records(self) -> None:
        """How training went: steps, mean success of the samples over them, dead groups early and late."""
        rows = [row for row in read_json_lines(self.log.path("metrics")) if row.get("success/mean") is not None]
        self.put("train", "training_steps", float(len(rows)), 1)
        success = [row["success/mean"] for row in rows]
        self.put("train", "success_area", float(np.mean(success)), len(success))
        dead, quarter = [row["reward/zero_std_frac"] for row in rows], max(1, len(rows) // 4)
        self.put("train", "dead_early", float(np.mean(dead[:quarter])), quarter)
        self.put("train", "dead_late", float(np.mean(dead[-quarter:])), quarter)
