"""Exact calculations with or without a Python interpreter, as a Gymnasium environment of several turns.

    env = Calculations(interpreter, EnvConfig())
    prompt, _ = env.reset(options=options_of(problem))
    reply, reward, terminated, truncated, info = env.step("<code>print(23*47%97)</code>")  # <interpreter>14</interpreter>
    _, reward, terminated, truncated, info = env.step("<answer>14</answer>")  # reward 1.0

The written rule. A turn is free text without any of the tags, then exactly one block, then nothing: `<code>...</code>`, which
is run, or `<answer>...</answer>`, which ends the episode. An answer is a whole number in plain digits, compared as a number.
Everything else ends the episode as wrong: no block, two blocks, text behind a block, a tag in the text (an `<interpreter>`
that the policy writes itself, say), code where no interpreter is, code in the last turn that is allowed.

The reward is 1 for a right answer and -1 for anything else (Feng et al. 2025, ReTool, section 2). With ``shaped`` a wrong
one earns min(-0.6, -1 + 0.1 * calls): the addition of verl's published recipe, which pays for calls.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import gymnasium
from gymnasium import spaces

from common.seeding import python_random
from common.verifiers.mathematics import grade_math
from experiments.exp_7_15_retool import problems
from experiments.exp_7_15_retool.interpreter import Reply

ENV_ID = "Calculations-v0"
CODE, END_CODE = "<code>", "</code>"
ANSWER, END_ANSWER = "<answer>", "</answer>"
INTERPRETER, END_INTERPRETER = "<interpreter>", "</interpreter>"
TAGS = (CODE, END_CODE, ANSWER, END_ANSWER, INTERPRETER, END_INTERPRETER)
MAX_CODE = 4000  # characters
RIGHT, WRONG, NOT_A_NUMBER = "right", "another answer", "the answer is not a whole number"
RUNNING, FAILED = "ran", "error"
NO_BLOCK, TWO_BLOCKS, BEHIND, STRAY = "no block", "more than one block", "text behind the block", "a tag in the text"
NO_TOOL, LAST_TURN, TOO_LONG = "code, but there is no interpreter", "code in the last turn", "code too long"
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_TEXT = spaces.Text(min_length=0, max_length=100_000, charset=string.printable)
_TAG = re.compile("|".join(map(re.escape, TAGS)))


class Turn(NamedTuple):
    """A turn taken apart. ``kind``: code, answer or malformed; ``text``: what stands in the block, or the fault."""

    kind: str
    text: str
    before: str = ""


def read_turn(turn: str) -> Turn:
    """A turn by the module's rule; never raises on any text."""
    tags = list(_TAG.finditer(turn))
    names = [tag[0] for tag in tags]
    opened = [name for name in names if name in (CODE, ANSWER)]
    if not opened or len(names) < 2:
        return Turn("malformed", STRAY if names and not opened else NO_BLOCK)
    if len(opened) > 1:
        return Turn("malformed", TWO_BLOCKS)
    if names not in ([CODE, END_CODE], [ANSWER, END_ANSWER]):
        return Turn("malformed", STRAY)
    if turn[tags[1].end() :].strip():
        return Turn("malformed", BEHIND)
    inside = turn[tags[0].end() : tags[1].start()]
    return Turn("code" if names[0] == CODE else "answer", inside, turn[: tags[0].start()])


@dataclass(frozen=True)
class EnvConfig:
    """``tool``: code is run. ``max_turns``: a code block in the last one ends the episode. ``shaped``: wrong answers earn
    something for their calls."""

    tool: bool = True
    max_turns: int = 4
    shaped: bool = False


class Calculations(gymnasium.Env):
    """One episode is one problem: code blocks and the interpreter's replies, until an answer.

    reset(options=): a problem of problems.options_of, or `question` and `answer` of a problem from a file, which is graded by
    common.verifiers.mathematics; without either a problem is drawn from the stream that `seed` started. info after a step:
    success, reason, calls, failed (of this turn's code), kind of the turn, before (length of the text in front of the block).
    """

    metadata: ClassVar = {"render_modes": []}

    def __init__(self, interpreter: Callable[[str], Reply] | None = None, config: EnvConfig | None = None) -> None:
        self.observation_space = self.action_space = _TEXT
        self.config = config or EnvConfig(tool=interpreter is not None)
        if self.config.tool and interpreter is None:
            raise ValueError("an environment with tool=True needs an interpreter")
        self._interpreter = interpreter
        self._task: dict[str, Any] | None = None
        self._turns = self._calls = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The problem's text, and info with the problem and success False."""
        super().reset(seed=seed)
        if options and ("kind" in options or "question" in options):
            task = dict(options)
        else:
            stream = python_random("environment", int(self.np_random.integers(2**31)))
            kind, length = stream.choice(problems.KINDS), stream.choice(problems.LENGTHS)
            task = problems.options_of(problems.random_problem(stream, kind, length))
        self._task, self._turns, self._calls = task, 0, 0
        text = task["question"] if "question" in task else problems.prompt(problems.problem_of(task))
        return text, {**task, "success": False, "reason": ""}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Runs a code block, or judges an answer and ends the episode.

        TypeError unless the action is a string; gymnasium.error.ResetNeeded when no episode is running.
        """
        if not isinstance(action, str):
            raise TypeError(f"a turn must be text; got {type(action).__name__}")
        if self._task is None:
            raise gymnasium.error.ResetNeeded("call reset before step: no episode is running")
        turn = read_turn(action)
        self._turns += 1
        if turn.kind == "code":
            fault = self._refused(turn.text)
            if not fault:
                return self._run(turn)
            return self._end(turn, False, fault)
        if turn.kind == "malformed":
            return self._end(turn, False, turn.text)
        success, reason = judge(turn.text, self._task)
        return self._end(turn, success, reason)

    def _refused(self, code: str) -> str:
        """Why a code block is not run, or ""."""
        if not self.config.tool:
            return NO_TOOL
        if self._turns >= self.config.max_turns:
            return LAST_TURN
        return TOO_LONG if len(code) > MAX_CODE else ""

    def _run(self, turn: Turn) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert self._interpreter is not None  # the constructor saw to it
        reply = self._interpreter(turn.text)
        self._calls += 1
        info = self._info(turn, False, FAILED if reply.failed else RUNNING) | {"failed": reply.failed, "reply": reply.text}
        return f"{INTERPRETER}{reply.text}{END_INTERPRETER}", 0.0, False, False, info

    def _end(self, turn: Turn, success: bool, reason: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        reward = 1.0 if success else -1.0
        if self.config.shaped and not success:
            reward = min(-0.6, -1.0 + 0.1 * self._calls)
        info = self._info(turn, success, reason)
        self._task = None
        # The limit of turns ends an episode by the rule of the task, not from outside: no value may be added to its -1.
        return "", reward, True, False, info

    def _info(self, turn: Turn, success: bool, reason: str) -> dict[str, Any]:
        return {
            "success": success, "reason": reason, "calls": self._calls, "turn": turn.kind, "before": len(turn.before.strip()),
            "failed": False, "code": turn.text if turn.kind == "code" else "", "reply": "",
        }  # fmt: skip


def judge(text: str, task: dict[str, Any]) -> tuple[bool, str]:
    """Whether the text of an answer block is right, and the reason."""
    if "question" in task:
        found = grade_math(gold=task["answer"], text=text)
        return found.success, found.reason
    if not _NUMBER.fullmatch(text):
        return False, NOT_A_NUMBER
    right = int(text) == problems.problem_of(task).answer
    return right, RIGHT if right else WRONG


if ENV_ID not in gymnasium.registry:
    gymnasium.register(id=ENV_ID, entry_point="experiments.exp_7_15_retool.env:Calculations")
