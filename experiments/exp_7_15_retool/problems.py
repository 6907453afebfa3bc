"""The task: exact calculations of five kinds, their texts, their worked answers, and who may see which problem.

    Start with 23, plus 7, minus 5. What is the result?                             (small: sums up to 31)
    Start with 23, plus 17, minus 16. What is the result?                           (medium: sums up to 99)
    Start with 23, times 47, plus 16. What is left modulo 97?                       (large: chain with products)
    Raise 23 to the power of 47 to the power of 61. What is left modulo 83?         (tower)
    Which number times 23 leaves 16 modulo 97?                                      (equation)

A chain is worked in the head step by step, with a modulus each result reduced at once: `23*47=14+16=30<answer>30</answer>`.
Small sums are soon known by heart, the larger ones in part, nine thousand products modulo 97 are not. Towers and equations have
no such way. Every answer is one of the numbers 0 to 99.
Every problem belongs to one role (corpus, train, validation, test) by a hash of what it says, so the roles share none.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any, NamedTuple

from common.seeding import python_random, stream_seed

# Primes, or 0 for plain numbers. Of 83 - 1 the only prime factors are 2 and 41, so that towers have many different answers.
MODULI = {"small": 0, "medium": 0, "large": 97, "tower": 83, "equation": 97}
SUMS = {"small": (6, 31), "medium": (25, 99)}  # largest operand and result of chains without products
KINDS = tuple(MODULI)
CHAINS = ("small", "medium", "large")
OPERATIONS = {"*": ", times ", "+": ", plus ", "-": ", minus "}
WEIGHTS = {"*": 2, "+": 1, "-": 1}
LENGTHS = range(3, 6)  # operations of a chain that an arm is trained on
LONGER = range(6, 8)  # the corpus of the base alone has such
START, RESULT, MODULO, END = "Start with ", ". What is the result?", ". What is left modulo ", "?"
RAISE, POWER = "Raise ", " to the power of "
WHICH, LEAVES, BY = "Which number times ", " leaves ", " modulo "
PROMPT_PHRASES = [START, RESULT, MODULO, END, RAISE, POWER, WHICH, LEAVES, BY, *OPERATIONS.values()]
ROLES = {"corpus": range(4), "train": range(4, 7), "validation": range(7, 8), "test": range(8, 10)}
BUCKETS = 10


class Problem(NamedTuple):
    """``numbers``: of a chain its start and operands, of a tower base and both exponents, of an equation factor and rest."""

    kind: str
    numbers: tuple[int, ...]
    operations: tuple[str, ...] = ()

    @property
    def modulus(self) -> int:
        """0 where the result is the plain number."""
        return MODULI[self.kind]

    @property
    def steps(self) -> list[int]:
        """A chain's results, each modulo its modulus."""
        value, found = self.numbers[0], []
        for operation, number in zip(self.operations, self.numbers[1:], strict=True):
            value = apply(value, operation, number)
            value = value % self.modulus if self.modulus else value
            found.append(value)
        return found

    @property
    def answer(self) -> int:
        """The one right number, 0 to 99."""
        if self.kind == "tower":
            base, power, height = self.numbers
            return pow(base, power**height, self.modulus)
        if self.kind == "equation":
            factor, rest = self.numbers
            return pow(factor, -1, self.modulus) * rest % self.modulus
        return self.steps[-1]


def apply(value: int, operation: str, number: int) -> int:
    """The result of one operation; KeyError for an unknown one."""
    return {"*": value * number, "+": value + number, "-": value - number}[operation]


def random_problem(stream: random.Random, kind: str, length: int) -> Problem:
    """A problem of the kind; `length`: operations of a chain, of no meaning to the others."""
    modulus = MODULI[kind]
    if kind == "tower":
        return Problem(kind, (stream.randint(2, modulus - 1), stream.randint(11, 99), stream.randint(11, 99)))
    if kind == "equation":
        return Problem(kind, (stream.randint(2, modulus - 1), stream.randint(1, modulus - 1)))
    if kind in SUMS:
        return random_sum(stream, kind, length)
    operations = stream.choices(list(WEIGHTS), list(WEIGHTS.values()), k=length)
    return Problem(kind, tuple(stream.randint(2, modulus - 1) for _ in range(length + 1)), tuple(operations))


def random_sum(stream: random.Random, kind: str, length: int) -> Problem:
    """A chain of sums and differences whose results stay in the kind's range."""
    operand, largest = SUMS[kind]
    numbers, operations = [value := stream.randint(0, largest)], list[str]()
    while len(operations) < length:
        operation, number = stream.choice("+-"), stream.randint(1, operand)
        if 0 <= apply(value, operation, number) <= largest:
            value = apply(value, operation, number)
            numbers.append(number)
            operations.append(operation)
    return Problem(kind, tuple(numbers), tuple(operations))


def role(problem: Problem) -> str:
    """Who may see the problem."""
    bucket = stream_seed("problem", problem.kind, *problem.numbers, *problem.operations) % BUCKETS
    return next(name for name, buckets in ROLES.items() if bucket in buckets)


def draw(stream: random.Random, kind: str, length: int, wanted: str) -> Problem:
    """A random problem of that role."""
    while True:
        problem = random_problem(stream, kind, length)
        if role(problem) == wanted:
            return problem


@cache
def items(wanted: str, seed: int, kind: str, lengths: range, count: int) -> tuple[Problem, ...]:
    """`count` different problems of a role and kind, chains of each length in turn."""
    stream, found = python_random(seed, "items", wanted, kind, lengths.start), dict[Problem, None]()
    while len(found) < count:
        found[draw(stream, kind, lengths[len(found) % len(lengths)], wanted)] = None
    return tuple(found)


def prompt(problem: Problem) -> str:
    """The problem's text, as the user writes it."""
    first, *others = problem.numbers
    if problem.kind == "tower":
        return f"{RAISE}{first}{POWER}{others[0]}{POWER}{others[1]}{MODULO}{problem.modulus}{END}"
    if problem.kind == "equation":
        return f"{WHICH}{first}{LEAVES}{others[0]}{BY}{problem.modulus}{END}"
    steps = "".join(f"{OPERATIONS[op]}{number}" for op, number in zip(problem.operations, others, strict=True))
    return f"{START}{first}{steps}{f'{MODULO}{problem.modulus}{END}' if problem.modulus else RESULT}"


def working(problem: Problem) -> str:
    """A chain worked in the head: 23*47=14+16=30. Empty for what has no such way."""
    if problem.kind not in CHAINS:
        return ""
    steps = zip(problem.operations, problem.numbers[1:], problem.steps, strict=True)
    return f"{problem.numbers[0]}{''.join(f'{op}{number}={result}' for op, number, result in steps)}"


def options_of(problem: Problem) -> dict[str, Any]:
    """The problem as options for the environment's reset."""
    return {"kind": problem.kind, "numbers": list(problem.numbers), "operations": list(problem.operations)}


def problem_of(options: dict[str, Any]) -> Problem:
    """The problem of such options."""
    return Problem(options["kind"], tuple(options["numbers"]), tuple(options["operations"]))
