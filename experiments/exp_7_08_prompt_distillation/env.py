"""A text to label as a Gymnasium environment: one prompt, one answer, graded by exact match with the gold label.

    env = gymnasium.make("PromptedLabels-v0")
    prompt, info = env.reset(options={"prompt": "Text: keso buna tavo. Label only.\n", "gold": "el"})
    _, reward, terminated, truncated, info = env.step("el")

The written rule: thinking, if any, is told apart by common.verifiers.thinking; what stands behind it, less white space at
its ends, must be exactly one label of the list. Anything more (a second label, a full stop, an explanation) is no answer.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import gymnasium
from gymnasium import spaces

from common.seeding import python_random
from common.verifiers.thinking import split_thinking
from experiments.exp_7_08_prompt_distillation import rules

ENV_ID = "PromptedLabels-v0"
SMALLEST_TABLE = 16  # words of the table of an episode that names no prompt
_TEXT = spaces.Text(min_length=0, max_length=100_000, charset=string.printable)


class Grade(NamedTuple):
    """``kind``: right, wrong (another label), no_label (not one label), thinking (its form is broken).

    ``label``: the label that was given, None where there is none.
    """

    success: bool
    kind: str
    label: str | None
    reason: str


def grade(text: str, gold: str | None, labels: Sequence[str] = rules.LABELS, opened: bool = False) -> Grade:
    """Judges an answer by the module's rule. ``gold`` None: nobody knows the label, and nothing is right.

    ``opened``: the prompt ends inside the thinking.
    """
    found = split_thinking(text, opened)
    if found.fault:
        return Grade(False, "thinking", None, found.fault)
    label = found.answer.strip()
    if label not in labels:
        return Grade(False, "no_label", None, "the answer is not exactly one label of the list")
    if label == gold:
        return Grade(True, "right", label, "right")
    return Grade(False, "wrong", label, "no gold label is known" if gold is None else f"the label is {gold}")


class PromptedLabels(gymnasium.Env):
    """One episode is one text and one answer to it.

    reset(options=): ``prompt`` and ``gold``, and where they differ from the rule tables' ``labels`` and ``opened`` (the
    prompt ends inside the thinking). Without ``prompt`` a table and a text are drawn from the stream that `seed` started.
    info after a step: success, reason, class (see Grade.kind), label.
    """

    metadata: ClassVar = {"render_modes": []}

    def __init__(self) -> None:
        self.observation_space = _TEXT
        self.action_space = _TEXT
        self._task: dict[str, Any] | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The prompt, and info with success False."""
        super().reset(seed=seed)
        task = dict(options or {})
        if "prompt" not in task:
            stream = python_random("environment", int(self.np_random.integers(2**31)))
            table = rules.random_table(stream, SMALLEST_TABLE)
            text = rules.random_text(stream, table)
            task |= {"prompt": rules.prompt(text, table, think=True), "gold": rules.decide(table, text)[0]}
        self._task = task
        return task["prompt"], {"success": False, "reason": ""}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Grades the answer and ends the episode.

        TypeError unless the action is a string; gymnasium.error.ResetNeeded when no episode is running.
        """
        if not isinstance(action, str):
            raise TypeError(f"the answer must be text; got {type(action).__name__}")
        if self._task is None:
            raise gymnasium.error.ResetNeeded("call reset before step: no episode is running")
        task, self._task = self._task, None
        found = grade(action, task["gold"], task.get("labels", rules.LABELS), task.get("opened", False))
        info = {"success": found.success, "reason": found.reason, "class": found.kind, "label": found.label}
        return "", float(found.success), True, False, info


if ENV_ID not in gymnasium.registry:
    gymnasium.register(id=ENV_ID, entry_point="experiments.exp_7_08_prompt_distillation.env:PromptedLabels")
