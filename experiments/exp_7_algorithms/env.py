"""Arithmetic chains as a Gymnasium environment: one prompt, one answer, exact grading of the final number.

    env = gymnasium.make("ArithmeticChains-v0")
    prompt, info = env.reset(options={"start": 37, "steps": [["+", 25], ["*", 1]]})
    _, reward, terminated, truncated, info = env.step("37+25=62; 62*1=62. Answer: 62")

The reward is 1 for the right final number and 0 for anything else. The written steps are read too, but only for info:
an answer may be right although its steps are not, and then the report counts it as lucky.
"""

from __future__ import annotations

import re
import string
from typing import Any, ClassVar, NamedTuple

import gymnasium
from gymnasium import spaces

from common.seeding import python_random
from experiments.exp_7_algorithms import chains

ENV_ID = "ArithmeticChains-v0"
# One space for all environments: making one costs more than grading an answer.
_TEXT = spaces.Text(min_length=0, max_length=10_000, charset=string.printable)
_STEP = re.compile(r"([0-9]{1,2})([-+*])([0-9]{1,2})=([0-9]{1,2})")
_NUMBER = re.compile(r"[0-9]{1,2}")


class Grade(NamedTuple):
    """``kind``: right, no_answer, no_steps, wrong_end (the steps are right), or their first fault: misread, arithmetic."""

    success: bool
    kind: str
    reason: str


def grade(text: str, chain: chains.Chain) -> Grade:
    """Judges an answer by its final number alone; `kind` and `reason` say what went wrong first.

    The final number is what stands behind the one ". Answer: " of the text: one or two digits, and nothing after them.
    """
    head, *tails = text.split(chains.ANSWER)
    if len(tails) != 1:
        return Grade(False, "no_answer", "no final answer" if not tails else "more than one final answer")
    if not _NUMBER.fullmatch(tails[0]):
        return Grade(False, "no_answer", "the final answer is not one number of at most two digits")
    fault = step_fault(head, chain) if head else ("no_steps", "no step is written down")
    if int(tails[0]) == chain.results[-1]:
        return Grade(True, fault[0] if fault else "right", f"right, but {fault[1]}" if fault else "right")
    return Grade(False, *(fault or ("wrong_end", "the steps are right, the final answer is another number")))


def step_fault(text: str, chain: chains.Chain) -> tuple[str, str] | None:
    """(kind, reason) of the first step that is not the chain's or is computed wrongly; None if all steps are right."""
    written = text.split(chains.NEXT)
    number = chain.start
    for place, (op, operand) in enumerate(chain.steps, start=1):
        step = _STEP.fullmatch(written[place - 1]) if place <= len(written) else None
        if step is None or (int(step[1]), step[2], int(step[3])) != (number, op, operand):
            return "misread", f"step {place} is not the one that was asked for"
        number = chains.apply(number, op, operand)
        if int(step[4]) != number:
            return "arithmetic", f"the result of step {place} is wrong"
    return ("misread", "there are more steps than were asked for") if len(written) > len(chain.steps) else None


class ArithmeticChains(gymnasium.Env):
    """One episode is one chain and one answer to it.

    reset(options=): `start` and `steps` (a list of operator and operand) name the chain, `hint` true puts its worked
    solution into the prompt. Without `start` a chain is drawn from the stream that `seed` started.
    info after a step: success, reason, class (see Grade.kind), lucky (right number behind wrong steps).
    """

    metadata: ClassVar = {"render_modes": []}

    def __init__(self) -> None:
        self.observation_space = _TEXT
        self.action_space = _TEXT
        self._chain: chains.Chain | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The prompt, and info with start, steps and success False."""
        super().reset(seed=seed)
        options = options or {}
        if "start" in options:
            chain = chains.Chain(options["start"], tuple((op, operand) for op, operand in options["steps"]))
        else:
            stream = python_random("environment", int(self.np_random.integers(2**31)))
            chain = chains.random_chain(stream, stream.choice(chains.ID_LENGTHS))
        self._chain = chain
        info = {"start": chain.start, "steps": [list(step) for step in chain.steps], "success": False, "reason": ""}
        return chains.prompt(chain, bool(options.get("hint", False))), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Grades the answer and ends the episode.

        TypeError unless the action is a string; gymnasium.error.ResetNeeded when no episode is running.
        """
        if not isinstance(action, str):
            raise TypeError(f"the answer must be text; got {type(action).__name__}")
        if self._chain is None:
            raise gymnasium.error.ResetNeeded("call reset before step: no episode is running")
        found = grade(action, self._chain)
        self._chain = None
        info = {
            "success": found.success,
            "reason": found.reason,
            "class": found.kind,
            "lucky": found.success and found.kind != "right",
        }
        return "", float(found.success), True, False, info


if ENV_ID not in gymnasium.registry:
    gymnasium.register(id=ENV_ID, entry_point="experiments.exp_7_algorithms.env:ArithmeticChains")
