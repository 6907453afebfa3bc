"""The task: a chain of small additions and subtractions, its prompt, its written thinking, and who may see which chain.

    Compute 7+3-2+4.                                      (the prompt; the chat template ends it with <think>)
    7+3=10-2=8+4=12</think>So the answer is 12.           (Thinking)
    </think>So the answer is 12.                          (NoThinking)

The number of steps is the level. Every chain belongs to one role (corpus, train, validation, test) by a hash of what it
says, so the roles share no chain whatever is drawn. Single steps are shared by all: knowing 7+3 is what a chain tests.
"""

from __future__ import annotations

import random
from functools import cache
from typing import NamedTuple

from common.seeding import python_random, stream_seed
from common.verifiers.thinking import END_THINK, THINK

LARGEST = 31
OPERANDS = (1, 2, 3, 4, 5, 6)
ROLES = {"corpus": range(5), "train": range(5, 7), "validation": range(7, 8), "test": range(8, 10)}
BUCKETS = 10
LEVELS = (1, 2, 3, 4, 5, 6)  # what post-training sees
OOD_LEVEL = 7  # pre-trained on, never seen by the think-only start or by reinforcement learning
CORPUS_LEVELS = (*LEVELS, OOD_LEVEL)

ASK, STOP = "Compute ", "."
# Tokens of a NoThinking completion, </think> and <eos> included -> pieces before and behind the number.
ANSWERS = {3: ([], []), 5: (["Answer: "], ["."]), 8: (["So ", "the ", "answer ", "is "], ["."])}
PHRASES = [*"+-", ASK, STOP, "Answer: ", *ANSWERS[8][0], THINK, END_THINK]


class Chain(NamedTuple):
    """``start`` and the steps (operator, operand) on it; every result is a whole number 0..31."""

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
    return {"+": number + operand, "-": number - operand}[op]


def random_chain(stream: random.Random, level: int) -> Chain:
    """A chain of `level` steps, each one drawn from those that stay in range."""
    start = number = stream.randint(0, LARGEST)
    steps = []
    for _ in range(level):
        op, operand = stream.choice(
            [(op, operand) for op in "+-" for operand in OPERANDS if 0 <= apply(number, op, operand) <= LARGEST]
        )
        steps.append((op, operand))
        number = apply(number, op, operand)
    return Chain(start, tuple(steps))


def role(chain: Chain) -> str:
    """Who may see the chain."""
    bucket = stream_seed("chain", chain.start, *(part for step in chain.steps for part in step)) % BUCKETS
    return next(name for name, buckets in ROLES.items() if bucket in buckets)


def draw(stream: random.Random, level: int, wanted: str) -> Chain:
    """A random chain of that role."""
    while True:
        chain = random_chain(stream, level)
        if role(chain) == wanted:
            return chain


@cache
def single_steps(wanted: str) -> tuple[Chain, ...]:
    """All chains of one step that a role has: few enough to count."""
    chains = (Chain(start, ((op, operand),)) for start in range(LARGEST + 1) for op in "+-" for operand in OPERANDS)
    return tuple(chain for chain in chains if 0 <= chain.results[0] <= LARGEST and role(chain) == wanted)


@cache
def items(wanted: str, seed: int, level: int, count: int) -> tuple[Chain, ...]:
    """`count` different chains of a role and level, fewer only where the role has fewer (level 1)."""
    stream, found = python_random(seed, "items", wanted, level), dict[Chain, None]()
    count = min(count, len(single_steps(wanted))) if level == 1 else count
    while len(found) < count:
        found[draw(stream, level, wanted)] = None
    return tuple(found)


def prompt(chain: Chain) -> str:
    """The task's text, as the user writes it."""
    return f"{ASK}{chain.start}{''.join(f'{op}{operand}' for op, operand in chain.steps)}{STOP}"


def careless(stream: random.Random, chain: Chain, slips: float) -> list[int]:
    """The numbers that a careless hand writes: a share `slips` of the steps ends one too high, the next goes on from there.

    The right ones where a slip would leave the range.
    """
    numbers = [chain.start]
    for op, operand in chain.steps:
        numbers.append(apply(numbers[-1], op, operand) + (stream.random() < slips))
    return numbers[1:] if max(numbers) <= LARGEST else chain.results


def thought(chain: Chain, results: list[int]) -> str:
    """The written steps: 7+3=10-2=8."""
    steps = zip(chain.steps, results, strict=True)
    return f"{chain.start}{''.join(f'{op}{operand}={result}' for (op, operand), result in steps)}"


def answer(chain: Chain, tokens: int, think: bool, results: list[int] | None = None) -> str:
    """The completion behind <think>; `tokens`: a key of ANSWERS, the length of the NoThinking completion.

    ``results``: what is written in place of the right numbers.
    """
    (before, behind), written = ANSWERS[tokens], results or chain.results
    return f"{thought(chain, written) if think else ''}{END_THINK}{''.join(before)}{written[-1]}{''.join(behind)}"


def worked_length(chain: Chain, tokens: int) -> int:
    """Tokens of the right completion with thinking: what a NoThinking one of `tokens` is short against."""
    return 1 + 3 * len(chain.steps) + tokens
