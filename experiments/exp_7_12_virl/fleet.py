"""Many routes stepped together: texts in, texts out, without the ceremony of one Gymnasium environment per route.

    fleet = Fleet(courses, tries=2)
    observations = fleet.reset()
    observations, rewards, ended, success = fleet.step(answers)      # a route that has ended begins anew

It grades as the environment does (a test compares the two answer for answer) at more than 100,000 steps a second.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from experiments.exp_7_12_virl import grading, prompts
from experiments.exp_7_12_virl.env import Course


class Fleet:
    """Routes side by side, each with its own position and tries; process reward, wrong actions are asked again."""

    def __init__(self, courses: Sequence[Course], tries: int = 2, switches: Collection[str] = ()) -> None:
        self.courses, self.tries, self.switches = list(courses), tries, frozenset(switches)
        self.again = {kind: text for kind, text in prompts.FEEDBACK.items() if kind != "led_on"}
        self.reset()

    def reset(self) -> list[str]:
        """Every route at its start; the first observations."""
        self.stops = [0] * len(self.courses)
        self.trials = [0] * len(self.courses)
        return [one.opening + one.shown[0] for one in self.courses]

    def step(self, answers: Sequence[str]) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
        """One answer per route. Returns the next observations (the opening of a route that begins anew), the rewards,
        which routes ended and which of them with success, each (B,)."""
        count = len(self.courses)
        observations, rewards = [""] * count, [0.0] * count
        ended, success = [False] * count, [False] * count
        parse, penalty, switches, replaces = grading.parse, grading.penalty, self.switches, "penalty_replaces" in self.switches
        for i, (here, text) in enumerate(zip(self.courses, answers, strict=True)):
            k, reply = self.stops[i], parse(text)
            right = reply.action == here.actions[k] and not reply.reason
            lost = penalty(reply, here.sights[k], right, switches)
            rewards[i] = (grading.RIGHT if right else 0.0 if replaces and lost else grading.WRONG) + lost
            if right:
                self.stops[i], self.trials[i] = k + 1, 0
                if k + 1 < here.stops:
                    observations[i] = here.shown[k + 1]
                    continue
                success[i] = True
            else:
                self.trials[i] += 1
                if self.trials[i] < self.tries:
                    kind = "no_answer" if reply.reason else "wrong_action" if reply.action in here.legal else "illegal_action"
                    observations[i] = self.again[kind] + here.shown[k]
                    continue
            ended[i] = True
            self.stops[i] = self.trials[i] = 0
            observations[i] = here.opening + here.shown[0]
        return observations, np.array(rewards), np.array(ended), np.array(success)
