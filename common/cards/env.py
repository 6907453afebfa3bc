"""GeneralPoints, language variant: reach the target with four cards; text in, JSON text out, feedback between trials.

    env = gymnasium.make("GeneralPoints-v0", verify_iter=5)
    prompt, info = env.reset(seed=0)  # or options={"cards": ["4", "3", "2", "K"], "face_values": [11, 12, 13]}
    feedback, reward, terminated, truncated, info = env.step(answer_text)

Source: Chu et al. 2025, section 4.1 and appendix. Departures, each the default and each undone by a switch of
grading.DEFECTS or an argument: exact fractions; one penalty instead of a sum; the feedback does
not draw on the solver; a stated right-hand side must be the target; one graded answer instead of five (verify_iter).
"""

from __future__ import annotations

import string
from collections.abc import Collection
from typing import Any

import gymnasium
from gymnasium import spaces

from common.cards import grading, hands, prompts

ENV_ID = "GeneralPoints-v0"
# One space for all environments: making one costs more than playing a hand.
_TEXT = spaces.Text(min_length=0, max_length=20_000, charset=string.printable)


class GeneralPoints(gymnasium.Env):
    """One episode is one deal with up to `verify_iter` graded answers.

    The episode ends (terminated) with a right answer or with the last graded one: the number of trials is part of the
    task, so a spent last trial is a true end and not a cut. Only a right answer sets info["success"].
    info after a step: success, reason, class, parts (kind -> points), recognised, cards_correct, rule10, trace, run_on,
    trial (1-based); info after a reset: cards, values, face_values, target, success False.
    """

    def __init__(
        self,
        verify_iter: int = 1,
        trace: bool = True,
        reward: str = "ladder",
        switches: Collection[str] = (),
        face_values: Collection[int] = hands.TRAINING_RULE,
    ) -> None:
        """verify_iter: graded answers per episode, 1..10. trace: the prompt asks for the step trace.

        reward: `ladder` (points) or `outcome` (1 right, else 0). switches: names of grading.SWITCHES to turn on.
        face_values: the rule of deals that the options of reset do not set. Bad values raise ValueError.
        """
        if type(verify_iter) is not int or not 1 <= verify_iter <= 10:
            raise ValueError(f"verify_iter must be an integer 1..10; got {verify_iter}")
        if reward not in ("ladder", "outcome"):
            raise ValueError(f"reward must be ladder or outcome; got {reward}")
        unknown = set(switches) - set(grading.SWITCHES)
        if unknown:
            raise ValueError(f"unknown switches {sorted(unknown)}; allowed: {', '.join(grading.SWITCHES)}")
        self.verify_iter = verify_iter
        self.trace = trace
        self.reward = reward
        self.switches = frozenset(switches)
        self.face_values = tuple(face_values)
        self.observation_space = _TEXT
        self.action_space = _TEXT
        self._deal: grading.Deal | None = None
        self._trial = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Deals a task: options may give `cards` (in order), `face_values` and `target`.

        Without cards four ranks are drawn with replacement until they are solvable under the rule, from the stream that
        `seed` started: the k-th episode of a seed is the same deal whatever was answered before.
        """
        super().reset(seed=seed)
        options = options or {}
        rule = tuple(options.get("face_values", self.face_values))
        target = options.get("target", hands.TARGET)
        cards = options.get("cards")
        if cards is None:
            cards = self._draw(rule, target)
        self._deal = grading.deal(cards, rule, target)
        self._trial = 0
        info = {
            "cards": list(self._deal.cards),
            "values": list(self._deal.values),
            "face_values": list(self._deal.rule),
            "target": target,
            "success": False,
            "reason": "",
        }
        return self._prompt(self._deal), info

    def _prompt(self, deal: grading.Deal) -> str:
        return prompts.prompt(deal.cards, deal.target, deal.rule, self.trace)

    def _draw(self, rule: tuple[int, ...], target: int) -> tuple[str, ...]:
        while True:
            ranks = [int(rank) for rank in self.np_random.integers(1, 14, size=4)]
            if hands.solvable(ranks, rule, target):
                return hands.cards_of(ranks)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Grades an answer; the observation is the feedback turn, or "" at the end of the episode.

        TypeError unless the action is a string; gymnasium.error.ResetNeeded after the end of an episode.
        """
        if not isinstance(action, str):
            raise TypeError(f"the answer must be text; got {type(action).__name__}")
        if self._deal is None:
            raise gymnasium.error.ResetNeeded("call reset before step: no episode is running")
        if self._trial >= self.verify_iter:
            return self._over_the_limit()
        self._trial += 1
        result = grading.grade(action, self._deal, self.switches)
        info = {
            "success": result.success,
            "reason": result.reason,
            "class": result.kind,
            "parts": result.parts,
            "recognised": result.recognised,
            "cards_correct": result.cards_correct,
            "rule10": result.rule10,
            "trace": result.trace,
            "run_on": result.run_on,
            "trial": self._trial,
        }
        spent = self._trial >= self.verify_iter and "ungraded_last_call" not in self.switches
        terminated = result.success or spent
        observation = "" if terminated else self._feedback(result)
        if terminated:
            self._deal = None
        return observation, self._reward(result), terminated, False, info

    def _feedback(self, result: grading.Grade) -> str:
        assert self._deal is not None
        failure = "no_solution" if result.kind == "partial" else result.kind
        hint = None
        if "leaking_feedback" in self.switches and failure == "no_solution":
            hint = grading.longest_right_prefix(result.formula, self._deal)
        return self._again(self._deal, failure, hint)

    def _again(self, deal: grading.Deal, failure: str, hint: str | None) -> str:
        return prompts.feedback(deal.cards, failure, hint)

    def _reward(self, result: grading.Grade) -> float:
        if self.reward == "outcome":
            return float(result.success)
        return sum(result.parts.values())

    def _over_the_limit(self) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The published program's extra call: not graded, -1, and the episode is cut, never a success."""
        self._deal = None
        points = grading.POINTS["step_limit"]
        info = {
            "success": False,
            "reason": "no trial left",
            "class": "step_limit",
            "parts": {"step_limit": points},
            "recognised": False,
            "cards_correct": False,
            "rule10": False,
            "trace": "absent",
            "run_on": 0,
            "trial": self._trial + 1,
        }
        return "", points if self.reward == "ladder" else 0.0, False, True, info


if ENV_ID not in gymnasium.registry:
    gymnasium.register(id=ENV_ID, entry_point="common.cards.env:GeneralPoints")
