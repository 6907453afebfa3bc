"""Rejection sampling on a teacher's answers: verify, drop repeats, cap, and write the survivors in the style to be learnt.

Every step counts what it removed. The verifier is the environment's: the stated answer alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from common.rejection import Row, keep_candidates
from common.schema import one_of, within
from common.tokenizers import PhraseEncoder
from experiments.exp_7_09_cot_distillation import traces
from experiments.exp_7_09_cot_distillation.env import grade
from experiments.exp_7_09_cot_distillation.problems import Problem

LEARNT = ("trace", "plain", "answer")


class Candidate(NamedTuple):
    """A teacher's completion to the problem with number `group`."""

    group: int
    text: str
    success: bool


@dataclass(frozen=True)
class Selection:
    """``candidates`` answers to each problem, shared evenly among the ``teachers``, and what is done with them.

    ``verify``: only right ones stay. ``distinct``: of those with the same steps the first. ``cap``: at most so many of a
    problem (None: all). ``learn``: the whole trace, its steps without checks and detours (plain), or the answer alone.
    """

    teachers: tuple[str, ...] = ("text",)
    candidates: int = 8
    verify: bool = True
    distinct: bool = True
    cap: int | None = 4
    learn: str = "trace"

    def __post_init__(self) -> None:
        one_of("select.learn", self.learn, LEARNT)
        within("select.candidates", self.candidates, len(self.teachers))
        if self.cap is not None:
            within("select.cap", self.cap, 1)


def judged(problems: Sequence[Problem], rows: Sequence[dict[str, Any]]) -> list[Candidate]:
    """The candidates of collected answers, whose keys are `number of the problem/number of the sample`."""
    numbers = [int(row["key"].split("/")[0]) for row in rows]
    return [Candidate(i, row["text"], grade(row["text"], problems[i]).success) for i, row in zip(numbers, rows, strict=True)]


def select(candidates: Sequence[Candidate], selection: Selection) -> tuple[list[Candidate], dict[str, int]]:
    """The candidates to learn from, and how many each step removed: wrong, repeated, over_cap; they and kept add up to
    sampled. ``solved``: problems with a kept candidate; ``kept_wrong``: wrong ones among the kept."""
    number = count()

    def key(candidate: Any) -> Hashable:
        return (traces.equations(candidate.text), "calc(" in candidate.text) if selection.distinct else next(number)

    kept, counts = keep_candidates(
        candidates, key, selection.cap or len(candidates), lambda candidate: candidate.success or not selection.verify
    )  # type: ignore[arg-type, var-annotated]
    return kept, counts | {"kept_wrong": sum(not candidate.success for candidate in kept)}


def learnt(text: str, problem: Problem, learn: str) -> str:
    """What the student is to write for a kept completion."""
    if learn == "answer":
        return f"{traces.ANSWER}{traces.stated(text)}"
    return traces.without_checks(text) if learn == "plain" else text


def rows_of(kept: Sequence[Candidate], problems: Sequence[Problem], learn: str, encode: PhraseEncoder) -> list[Row]:
    """(ids, mask) of each kept candidate behind its problem's prompt."""
    return [encode.row(problems[c.group].prompt, learnt(c.text, problems[c.group], learn)) for c in kept]
