"""The problems: a chain of additions and subtractions on whole numbers 0..49, and who may see which of them.

    Compute 37 (1)+11 (2)-9 from left to right.

Steps are numbered, in the problem and in the work on it, so that even a tiny model finds its place after a long detour.

Every problem belongs to one role (corpus, train, validation, test) by a hash of what it says, so the roles share none
whatever is drawn. Single steps are shared by all: knowing 37+11 is what a problem tests.
"""

from __future__ import annotations

import random
from functools import cache
from typing import NamedTuple

from common.seeding import python_random, stream_seed

LARGEST = 49
OPERANDS = 12  # the largest number that is added or taken away
INVERSE = {"+": "-", "-": "+"}
ROLES = {"corpus": range(5), "train": range(5, 8), "validation": range(8, 9), "test": range(9, 10)}
BUCKETS = 10
ID_LENGTHS = (2, 3, 4)  # steps of the problems that post-training sees
OOD_LENGTHS = (5, 6)  # longer than any of these
CORPUS_LENGTHS = (1, 2, 3, 4, 5, 6)

ASK = "Compute "
ASKED = " from left to right.\n"
MARKS = [f" ({place})" for place in range(1, max(CORPUS_LENGTHS) + 1)]  # in front of each step


class Problem(NamedTuple):
    """``start`` and the steps (operator, operand) on it; every result is a whole number 0..49."""

    start: int
    steps: tuple[tuple[str, int], ...]

    @property
    def results(self) -> list[int]:
        """The number after each step."""
        numbers = [self.start]
        for op, operand in self.steps:
            numbers.append(apply(numbers[-1], op, operand))
        return numbers[1:]

    @property
    def prompt(self) -> str:
        """The problem's text."""
        steps = (f"{mark}{op}{operand}" for mark, (op, operand) in zip(MARKS, self.steps, strict=False))
        return f"{ASK}{self.start}{''.join(steps)}{ASKED}"

    @property
    def task(self) -> dict:
        """Options for the environment's reset."""
        return {"start": self.start, "steps": [list(step) for step in self.steps]}


def of_task(options: dict) -> Problem:
    """The problem of a task."""
    return Problem(options["start"], tuple((op, operand) for op, operand in options["steps"]))


def apply(number: int, op: str, operand: int) -> int:
    """The result of one step; KeyError for an unknown operator."""
    return {"+": number + operand, "-": number - operand}[op]


def random_problem(stream: random.Random, length: int) -> Problem:
    """A problem of `length` steps: at each one an operator that has an operand, then one of its operands."""
    start = number = stream.randint(1, LARGEST)
    steps = []
    for _ in range(length):
        op = stream.choice([op for op, room in (("+", LARGEST - number), ("-", number)) if room])
        operand = stream.randint(1, min(OPERANDS, LARGEST - number if op == "+" else number))
        steps.append((op, operand))
        number = apply(number, op, operand)
    return Problem(start, tuple(steps))


def role(problem: Problem) -> str:
    """Who may see the problem."""
    bucket = stream_seed("problem", problem.start, *(part for step in problem.steps for part in step)) % BUCKETS
    return next(name for name, buckets in ROLES.items() if bucket in buckets)


def draw(stream: random.Random, length: int, wanted: str) -> Problem:
    """A random problem of that role."""
    while True:
        problem = random_problem(stream, length)
        if role(problem) == wanted:
            return problem


@cache
def items(wanted: str, seed: int, lengths: tuple[int, ...], count: int) -> tuple[Problem, ...]:
    """`count` different problems of a role, lengths in turn; the shorter list is the beginning of the longer one."""
    stream, found = python_random(seed, "items", wanted, *lengths), dict[Problem, None]()
    while len(found) < count:
        found[draw(stream, lengths[len(found) % len(lengths)], wanted)] = None
    return tuple(found)
