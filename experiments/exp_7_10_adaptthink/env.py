"""Chains of graded difficulty as a Gymnasium environment: one prompt that ends inside the thinking, one answer.

    env = gymnasium.make("GradedChains-v0")
    prompt, info = env.reset(options={"start": 7, "steps": [["+", 3], ["-", 2]]})
    _, reward, terminated, truncated, info = env.step("7+3=10-2=8</think>So the answer is 8.")

The written rule: exactly one `</think>` and no `<think>` (common.verifiers.thinking, the prompt opened the thinking); behind
it one number and nothing else but one of the lead-ins in front ("So the answer is ", "Answer: ") and one full stop behind.
The number is compared as an integer. The thought is free and never graded: it may be empty, which is NoThinking.
"""

from __future__ import annotations

import re
import string
from typing import Any, ClassVar, NamedTuple

import gymnasium
from gymnasium import spaces

from common.seeding import python_random
from common.verifiers.thinking import split_thinking
from experiments.exp_7_10_adaptthink import chains

ENV_ID = "GradedChains-v0"
# One space for all environments: making one costs more than grading an answer.
_TEXT = spaces.Text(min_length=0, max_length=10_000, charset=string.printable)
_LEAD = "|".join(re.escape("".join(before)) for before, _ in chains.ANSWERS.values() if before)
_ANSWER = re.compile(rf"(?:{_LEAD})?(0|[1-9][0-9]?)\.?")
NOT_ONE_NUMBER = "the answer is not one number"
WRONG = "another number"
RIGHT = "right"


class Grade(NamedTuple):
    """``reason``: right, another number, not one number, or the fault of the thinking. ``skipped``: NoThinking."""

    success: bool
    reason: str
    skipped: bool


def grade(text: str, chain: chains.Chain) -> Grade:
    """Judges a completion by the module's rule; never raises on any text."""
    parts = split_thinking(text, opened=True)
    if parts.fault:
        return Grade(False, parts.fault, parts.skipped)
    stated = _ANSWER.fullmatch(parts.answer)
    if stated is None:
        return Grade(False, NOT_ONE_NUMBER, parts.skipped)
    right = int(stated[1]) == chain.results[-1]
    return Grade(right, RIGHT if right else WRONG, parts.skipped)


def chain_of(options: dict[str, Any]) -> chains.Chain:
    """The chain of a task."""
    return chains.Chain(options["start"], tuple((op, operand) for op, operand in options["steps"]))


def task(chain: chains.Chain) -> dict[str, Any]:
    """Options for the environment's reset."""
    return {"start": chain.start, "steps": [list(step) for step in chain.steps], "level": len(chain.steps)}


class GradedChains(gymnasium.Env):
    """One episode is one chain and one answer to it.

    reset(options=): `start` and `steps` (a list of operator and operand) name the chain. Without `start` a chain is drawn
    from the stream that `seed` started. info after a step: success, reason, skipped (the completion does not think).
    """

    metadata: ClassVar = {"render_modes": []}

    def __init__(self) -> None:
        self.observation_space = _TEXT
        self.action_space = _TEXT
        self._chain: chains.Chain | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The prompt, and info with start, steps, level and success False."""
        super().reset(seed=seed)
        if options and "start" in options:
            chain = chain_of(options)
        else:
            stream = python_random("environment", int(self.np_random.integers(2**31)))
            chain = chains.random_chain(stream, stream.choice(chains.LEVELS))
        self._chain = chain
        return chains.prompt(chain), {**task(chain), "success": False, "reason": ""}

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
        return "", float(found.success), True, False, found._asdict()


if ENV_ID not in gymnasium.registry:
    gymnasium.register(id=ENV_ID, entry_point="experiments.exp_7_10_adaptthink.env:GradedChains")
