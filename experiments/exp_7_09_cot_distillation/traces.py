"""Chains of thought: how they are written, and what a written one does.

Four styles, the same work:

    plain   <think>37 (1)+11=48. 48 (2)-9=39. </think>Final answer: 39
    text    <think>37 (1)+11=47. Let me check: 47-11=36, which does not fit. Wait, again: 37 (1)+11=48. Let me check:
            48-11=37, as it should be. 48 (2)-9=39. </think>Final answer: 39
    tool    <think>calc(37 (1)+11)=48; calc(48 (2)-9)=39; </think>Final answer: 39
    answer  Final answer: 39

What a trace does, by definition (`read_trace`):

- a *step* is an equation outside a check. It is *wrong* where its arithmetic is.
- a *verification* is an equation behind "Let me check: " that undoes the step before it: it begins with that step's
  result, has the opposite operator and the same operand. Whether its own arithmetic holds does not matter.
- a *reflection* is a phrase that judges the trace's own work: that it is as it should be, that it does not fit, that it
  looks right, or "Wait". Words count here, not deeds: a judgement without a verification before it is *empty*.
- a *backtracking* is a step behind "Wait, again: " that repeats the left side of the step before it, which is thereby
  *withdrawn*. Going on with another left side is none.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import NamedTuple

from common.verifiers.thinking import END_THINK, THINK, split_thinking
from experiments.exp_7_09_cot_distillation.problems import INVERSE, LARGEST, MARKS, Problem, apply

NEXT = ". "
CHECK = "Let me check: "
HOLDS = ", as it should be. "
FAILS = ", which does not fit. "
AGAIN = "Wait, again: "
LOOKS = "Let me look over it once more. That looks right. "
CALL, CALLED, NEXT_CALL = "calc(", ")", "; "
ANSWER = "Final answer: "
PHRASES = [THINK, END_THINK, NEXT, CHECK, HOLDS, FAILS, AGAIN, LOOKS, CALL, CALLED, NEXT_CALL, ANSWER, *INVERSE]
Step = tuple[int, str, int]  # the number so far, operator, operand; its place is written as a mark
STYLES = ("plain", "text", "tool", "answer")
ATTEMPTS = 3  # at one step; the last one stays whatever its check says


@dataclass(frozen=True)
class Habits:
    """How the documents are written that a teacher is pre-trained on.

    ``slip``: share of the attempts with a wrong result. ``check``: share of the attempts that are checked; what is not
    checked stays. ``look``: share of the traces that end with an empty reflection.
    """

    slip: float = 0.12
    check: float = 0.85
    look: float = 0.3


def slipped(stream: random.Random, step: Step) -> int:
    """A wrong result near the right one, off by 1, 2 or 10, that a check can take back within 0..49."""
    number, result = step[0], apply(*step)
    off = [off for far in (1, 2, 10) for off in (-far, far) if 0 <= result + off <= LARGEST and 0 <= number + off <= LARGEST]
    return result + stream.choice(off)


def equation(number: int, op: str, operand: int, result: int, mark: str = "") -> str:
    """37 (1)+11=48."""
    return f"{number}{mark}{op}{operand}={result}"


def write(problem: Problem, style: str, habits: Habits | None = None, stream: random.Random | None = None) -> str:
    """A completion in one of the styles. With `habits` the work of text and tool slips now and then, and the answer with
    it; without them all of it is right, and each step of a text is checked."""
    if style == "answer":
        return f"{ANSWER}{problem.results[-1]}"
    while (text := worked(problem, style, habits, stream)) is None:
        pass
    return text


def worked(problem: Problem, style: str, habits: Habits | None, stream: random.Random | None) -> str | None:
    """The thinking and the answer behind it; None where an unnoticed slip led out of 0..49, which nobody can write."""
    number, parts = problem.start, list[str]()
    for mark, (op, operand) in zip(MARKS, problem.steps, strict=False):
        step = (number, op, operand)
        if not 0 <= apply(*step) <= LARGEST:
            return None
        if style == "text":
            number, text = attempts(step, mark, habits, stream)
        else:
            number = attempt(step, habits, stream)
            left = equation(*step, number, mark)
            text = f"{left}{NEXT}" if style == "plain" else f"{CALL}{left.split('=')[0]}{CALLED}={number}{NEXT_CALL}"
        parts.append(text)
    if style == "text" and habits and stream and stream.random() < habits.look:
        parts.append(LOOKS)
    return f"{THINK}{''.join(parts)}{END_THINK}{ANSWER}{number}"


def checked(step: Step, result: int) -> str:
    """The check of a step that was given that result: it is undone."""
    _, op, operand = step
    return f"{CHECK}{equation(result, INVERSE[op], operand, apply(result, INVERSE[op], operand))}"


def attempt(step: Step, habits: Habits | None, stream: random.Random | None) -> int:
    """The result that is written for a step."""
    result = apply(*step)
    return slipped(stream, step) if habits and stream and stream.random() < habits.slip else result


def attempts(step: Step, mark: str, habits: Habits | None, stream: random.Random | None) -> tuple[int, str]:
    """A step of a text with its checks, and the result that stays."""
    text = ""
    for left in reversed(range(ATTEMPTS)):
        result = attempt(step, habits, stream)
        text += f"{equation(*step, result, mark)}{NEXT}"
        if habits and stream and stream.random() >= habits.check:
            break
        text += checked(step, result)
        if result == apply(*step):
            return result, text + HOLDS
        text += f"{FAILS}{AGAIN if left else ''}"
    return result, text


# Reading --------------------------------------------------------------------------------------------------------------

_PIECE = re.compile(
    "|".join([r"(?:calc\()?(?P<left>\d{1,2})(?: \(\d\))?(?P<op>[-+])(?P<right>\d{1,2})\)?=(?P<result>\d{1,2})"]
             + [re.escape(phrase) for phrase in (CHECK, HOLDS, FAILS, AGAIN, LOOKS)])
)  # fmt: skip
_ANSWER = re.compile(r"Final answer: (0|[1-9][0-9]?)")


class Equation(NamedTuple):
    left: int
    op: str
    right: int
    result: int

    @property
    def holds(self) -> bool:
        """Whether the arithmetic is right."""
        return apply(self.left, self.op, self.right) == self.result


@dataclass
class Trace:
    """What a trace does; see the module's definitions. ``steps`` with `withdrawn` of the same length."""

    steps: list[Equation] = field(default_factory=list)
    withdrawn: list[bool] = field(default_factory=list)
    checks: list[Equation] = field(default_factory=list)
    verifications: int = 0
    reflections: int = 0
    empty: int = 0

    @property
    def backtrackings(self) -> int:
        """Steps that were withdrawn."""
        return sum(self.withdrawn)

    @property
    def slips(self) -> int:
        """Steps that are wrong."""
        return sum(not step.holds for step in self.steps)

    @property
    def caught(self) -> int:
        """Wrong steps that were withdrawn."""
        return sum(gone and not step.holds for step, gone in zip(self.steps, self.withdrawn, strict=True))


def read_trace(thought: str) -> Trace:
    """What the thought does, whatever else it holds; never raises on any text."""
    trace, before, verified = Trace(), "", False
    for piece in _PIECE.finditer(thought):
        text = piece[0]
        if piece["op"] is None:
            if text in (HOLDS, FAILS, AGAIN, LOOKS):
                trace.reflections += 1
                verdict = text in (HOLDS, FAILS)
                trace.empty += (verdict and not verified) or text == LOOKS
                verified &= not verdict
            before = text
            continue
        found = Equation(int(piece["left"]), piece["op"], int(piece["right"]), int(piece["result"]))
        last = trace.steps[-1] if trace.steps else None
        if before == CHECK:
            trace.checks.append(found)
            verified = last is not None and found[:3] == (last.result, INVERSE[last.op], last.right)
            trace.verifications += verified
        else:
            if before == AGAIN and last is not None and found[:3] == last[:3]:
                trace.withdrawn[-1] = True
            trace.steps.append(found)
            trace.withdrawn.append(False)
            verified = False
        before = ""
    return trace


def stated(text: str) -> int | None:
    """The answer that a completion states, or None. See the rule in env.py."""
    answer = split_thinking(text, opened=False).answer
    found = _ANSWER.fullmatch(answer.strip().split("\n")[-1].strip())
    return int(found[1]) if found and answer.count(ANSWER.strip()) == 1 else None


def equations(text: str) -> tuple[Equation, ...]:
    """The steps of a completion in order: two solutions that share them are the same (RFT, Yuan et al. 2023)."""
    return tuple(read_trace(split_thinking(text, opened=False).thought or "").steps)


def without_checks(text: str) -> str:
    """The completion in plain style: the steps that were not withdrawn, then the stated answer."""
    parts = split_thinking(text, opened=False)
    trace = read_trace(parts.thought or "")
    kept = [step for step, gone in zip(trace.steps, trace.withdrawn, strict=True) if not gone]
    marks = chain(MARKS, repeat(MARKS[-1]))
    plain = [f"{equation(*step, mark)}{NEXT}" for step, mark in zip(kept, marks, strict=False)]
    return f"{THINK}{''.join(plain)}{END_THINK}{ANSWER}{stated(text)}"
