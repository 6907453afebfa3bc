"""Sums as a Gymnasium environment: one prompt, one completion, exact grading of the answer that it states.

    env = gymnasium.make("StatedSums-v0")
    prompt, info = env.reset(options={"start": 37, "steps": [["+", 11], ["-", 9]]})
    _, reward, terminated, truncated, info = env.step("<think>37 (1)+11=48. 48 (2)-9=39. </think>Final answer: 39")

The verifier's written rule:
1. The completion is thinking and answer, or an answer alone (common.verifiers.thinking; the prompt opens no thinking).
2. The last line of the answer is `Final answer: ` and one whole number of at most two digits without leading zeros, and
   nothing else but white space at its ends. It is compared as a number. Lines before it do not matter.
3. `Final answer:` stands once in the answer: several guesses are worth no more than none.
4. There is no fall-back: a right number that stands anywhere else, in the thinking or as the last number of the text,
   is no answer.

The thinking is read too, but only for info: a right answer may stand behind wrong work.
"""

from __future__ import annotations

import string
from typing import Any, ClassVar, NamedTuple

import gymnasium
from gymnasium import spaces

from common.seeding import python_random
from common.verifiers.thinking import split_thinking
from experiments.exp_7_09_cot_distillation import problems, traces

ENV_ID = "StatedSums-v0"
# One space for all environments: making one costs more than grading an answer.
_TEXT = spaces.Text(min_length=0, max_length=10_000, charset=string.printable)
KINDS = ("right", "wrong", "not_stated")


class Grade(NamedTuple):
    """``kind``: right, wrong (another number), or not_stated, with the reason. ``answer``: the number stated, or None."""

    success: bool
    kind: str
    reason: str
    answer: int | None


def grade(text: str, problem: problems.Problem) -> Grade:
    """Judges a completion by the answer it states, under the module's rule; never raises on any text."""
    answer, right = traces.stated(text), problem.results[-1]
    if answer is None:
        return Grade(False, "not_stated", split_thinking(text, opened=False).fault or "not one final answer", None)
    if answer != right:
        return Grade(False, "wrong", f"{answer} is stated, {right} is right", answer)
    return Grade(True, "right", "right", answer)


class StatedSums(gymnasium.Env):
    """One episode is one problem and one completion.

    reset(options=): `start` and `steps` (a list of operator and operand) name the problem; without them one is drawn from
    the stream that `seed` started. info after a step: success, reason, kind and answer (see Grade).
    """

    metadata: ClassVar = {"render_modes": []}

    def __init__(self) -> None:
        self.observation_space = _TEXT
        self.action_space = _TEXT
        self._problem: problems.Problem | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The prompt, and info with start, steps and success False."""
        super().reset(seed=seed)
        if options and "start" in options:
            self._problem = problems.of_task(options)
        else:
            stream = python_random("environment", int(self.np_random.integers(2**31)))
            self._problem = problems.random_problem(stream, stream.choice(problems.ID_LENGTHS))
        return self._problem.prompt, {**self._problem.task, "success": False, "reason": ""}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Grades the completion and ends the episode.

        TypeError unless the action is a string; gymnasium.error.ResetNeeded when no episode is running.
        """
        if not isinstance(action, str):
            raise TypeError(f"the completion must be text; got {type(action).__name__}")
        if self._problem is None:
            raise gymnasium.error.ResetNeeded("call reset before step: no episode is running")
        found = grade(action, self._problem)
        self._problem = None
        return "", float(found.success), True, False, found._asdict()


if ENV_ID not in gymnasium.registry:
    gymnasium.register(id=ENV_ID, entry_point="experiments.exp_7_09_cot_distillation.env:StatedSums")
