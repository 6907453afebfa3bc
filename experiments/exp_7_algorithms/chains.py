"""The task: a chain of arithmetic steps on whole numbers 0..99, its text, its worked answer, and who may see which chain.

    Start with 37, then +25, then -13, then *2. Write down each step, then the answer.
    37+25=62; 62-13=49; 49*2=98. Answer: 98

Every chain belongs to one role (corpus, train, validation, test) by a hash of what it says, so the roles share no chain
whatever is drawn. Steps are shared by all: knowing 37+25 is what a chain tests.
"""

from __future__ import annotations

import random
from functools import cache
from typing import NamedTuple

from common.seeding import python_random, stream_seed

LARGEST = 99
OPERATORS = "+-*"
ROLES = {"corpus": range(5), "train": range(5, 8), "validation": range(8, 9), "test": range(9, 10)}
BUCKETS = 10
ID_LENGTHS = (2, 3, 4)  # steps of the chains that post-training sees
OOD_LENGTHS = (5, 6)  # longer than any of these
CORPUS_LENGTHS = (1, 2, 3, 4, 5, 6)

START = "Start with "
THEN = {op: f", then {op}" for op in OPERATORS}
HINT = ". A worked solution: "
ASK = ". Write down each step, then the answer.\n"
NEXT = "; "
ANSWER = ". Answer: "
PHRASES = [START, *THEN.values(), HINT, ASK, NEXT, ANSWER, *OPERATORS]


class Chain(NamedTuple):
    """``start`` and the steps (operator, operand) on it; every result is a whole number 0..99."""

    start: int
    steps: tuple[tuple[str, int], ...]

    @property
    def results(self) -> list[int]:
        """The number after each step."""
        numbers = [self.start]
        for op, operand in self.steps:
            numbers.append(apply(numbers[-1], op, operand))
        return numbers[1:]


def apply(number: int, op: str, operand: int) -> int:
    """The result of one step; KeyError for an unknown operator."""
    return {"+": number + operand, "-": number - operand, "*": number * operand}[op]


def operands(number: int, op: str) -> range:
    """What may stand behind the operator so that the result stays in 0..99 and the step changes something."""
    if op == "*":
        return range(2, min(9, LARGEST // number) + 1) if number else range(0)
    return range(1, (LARGEST - number if op == "+" else number) + 1)


def random_chain(stream: random.Random, length: int) -> Chain:
    """A chain of `length` steps: at each one an operator that has an operand, then one of its operands."""
    start = number = stream.randint(1, LARGEST)
    steps = []
    for _ in range(length):
        op = stream.choice([op for op in OPERATORS if operands(number, op)])
        operand = stream.choice(operands(number, op))
        steps.append((op, operand))
        number = apply(number, op, operand)
    return Chain(start, tuple(steps))


def role(chain: Chain) -> str:
    """Who may see the chain."""
    bucket = stream_seed("chain", chain.start, *(part for step in chain.steps for part in step)) % BUCKETS
    return next(name for name, buckets in ROLES.items() if bucket in buckets)


def draw(stream: random.Random, length: int, wanted: str) -> Chain:
    """A random chain of that role."""
    while True:
        chain = random_chain(stream, length)
        if role(chain) == wanted:
            return chain


@cache
def items(wanted: str, seed: int, lengths: tuple[int, ...], count: int) -> tuple[Chain, ...]:
    """`count` different chains of a role, lengths in turn; the shorter list is the beginning of the longer one."""
    stream, found = python_random(seed, "items", wanted, *lengths), dict[Chain, None]()
    while len(found) < count:
        found[draw(stream, lengths[len(found) % len(lengths)], wanted)] = None
    return tuple(found)


def prompt(chain: Chain, hint: bool = False) -> str:
    """The task's text; `hint` puts the worked solution into it."""
    steps = "".join(f"{THEN[op]}{operand}" for op, operand in chain.steps)
    return f"{START}{chain.start}{steps}{HINT + trace(chain) if hint else ''}{ASK}"


def trace(chain: Chain) -> str:
    """The written steps: 37+25=62; 62-13=49."""
    before = [chain.start, *chain.results]
    return NEXT.join(
        f"{number}{op}{operand}={result}"
        for number, (op, operand), result in zip(before, chain.steps, chain.results, strict=False)
    )


def answer(chain: Chain, direct: bool = False) -> str:
    """The worked answer: the steps, then the last result. `direct` leaves the steps out."""
    return f"{'' if direct else trace(chain)}{ANSWER}{chain.results[-1]}"
