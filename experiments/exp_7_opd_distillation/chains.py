"""The first task, where an early slip is fatal: a chain of additions in one answer, every result written down.

    Compute 7+5-3+4
    7+5=12-3=9+4=13

An answer counts if every step of it is right, so nothing makes up for a slip. A chain belongs to one role (corpus,
train, validation, test) by a hash of what it says, so the roles share no chain whatever is drawn.
"""

from __future__ import annotations

import random
import re
import string
from functools import cache
from typing import Any, ClassVar, NamedTuple

import gymnasium
from gymnasium import spaces

from common.seeding import python_random, stream_seed

ENV_ID = "DistilledChains-v0"
LARGEST = 19
DIGITS = range(1, 6)
MOVES = tuple(f"{sign}{digit}" for sign in "+-" for digit in DIGITS)
ROLES = {"corpus": range(5), "train": range(5, 8), "validation": range(8, 9), "test": range(9, 10)}
BUCKETS = 10
TRAINED = (2, 4, 6, 8)  # steps of the chains that post-training sees
LONGER = (10, 12)
CORPUS_LENGTHS = range(1, 13)

ASK = "Compute "
END = "\n"
_NUMBER = r"(?:0|[1-9][0-9]?)"  # one way to write each: no leading zero
_ANSWER = re.compile(rf"{_NUMBER}(?:[+-][1-5]={_NUMBER})+")
_STEP = re.compile(rf"([+-][1-5])=({_NUMBER})")
_TEXT = spaces.Text(min_length=0, max_length=10_000, charset=string.printable)


class Chain(NamedTuple):
    """``start`` and the signed digits added to it in turn; every result is a whole number 0..19."""

    start: int
    moves: tuple[int, ...]

    @property
    def results(self) -> list[int]:
        """The number after each step."""
        numbers = [self.start]
        for move in self.moves:
            numbers.append(numbers[-1] + move)
        return numbers[1:]


class Grade(NamedTuple):
    """``success``: every step is right. ``kind``: right, malformed, or the first fault: misread (another step than asked),
    arithmetic, short, long. ``right_steps``: steps before the first fault.
    """

    success: bool
    kind: str
    reason: str
    right_steps: int


def turn_limit(steps: int) -> int:
    """Turns of an episode: an answer is written in one."""
    return 1


def random_chain(stream: random.Random, length: int) -> Chain:
    """A chain of `length` steps that stays in 0..19."""
    start = number = stream.randint(0, LARGEST)
    moves = []
    for _ in range(length):
        move = stream.choice([sign * digit for digit in DIGITS for sign in (1, -1) if 0 <= number + sign * digit <= LARGEST])
        moves.append(move)
        number += move
    return Chain(start, tuple(moves))


def role(chain: Chain) -> str:
    """Who may see the chain."""
    bucket = stream_seed("distilled chain", chain.start, *chain.moves) % BUCKETS
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
    stream, found = python_random(seed, "chains", wanted, *lengths), dict[Chain, None]()
    while len(found) < count:
        found[draw(stream, lengths[len(found) % len(lengths)], wanted)] = None
    return tuple(found)


def prompt(chain: Chain) -> str:
    """The task's text."""
    return f"{ASK}{chain.start}{''.join(f'{move:+d}' for move in chain.moves)}{END}"


def answer(chain: Chain) -> str:
    """The worked answer."""
    steps = zip(chain.moves, chain.results, strict=True)
    return f"{chain.start}{''.join(f'{move:+d}={result}' for move, result in steps)}"


def grade(text: str, chain: Chain) -> Grade:
    """Judges an answer: a number, then steps of a signed digit and a result, and nothing else; all other text is malformed."""
    if not _ANSWER.fullmatch(text):
        return Grade(False, "malformed", "the answer is not a number followed by steps", 0)
    kind, reason, right = first_fault(text, chain)
    return Grade(kind == "right", kind, reason, right)


def first_fault(text: str, chain: Chain) -> tuple[str, str, int]:
    """(kind, reason, steps before it) of the first wrong part of a well-formed answer."""
    written = _STEP.findall(text)
    if not text.startswith((f"{chain.start}+", f"{chain.start}-")):
        return "misread", "it starts from another number", 0
    for place, (move, result) in enumerate(zip(chain.moves, chain.results, strict=True)):
        if place == len(written):
            return "short", f"it stops after {place} of {len(chain.moves)} steps", place
        if int(written[place][0]) != move:
            return "misread", f"step {place + 1} is not the one that was asked for", place
        if int(written[place][1]) != result:
            return "arithmetic", f"the result of step {place + 1} is wrong", place
    if len(written) > len(chain.moves):
        return "long", "there are more steps than were asked for", len(chain.moves)
    return "right", "right", len(chain.moves)


def task(chain: Chain) -> dict:
    """Options for the environment's reset."""
    return {"start": chain.start, "moves": list(chain.moves)}


def chain_of(options: dict) -> Chain:
    """The chain of a task."""
    return Chain(options["start"], tuple(options["moves"]))


class DistilledChains(gymnasium.Env):
    """One episode is one chain and one answer to it; the reward is 1 if every step is right, else 0.

    reset(options=): `start` and `moves` name the chain; without them one is drawn from the stream that `seed` started.
    info after the step: success, reason, class (see Grade.kind), progress (share of steps before the first fault).
    """

    metadata: ClassVar = {"render_modes": []}

    def __init__(self) -> None:
        self.observation_space = _TEXT
        self.action_space = _TEXT
        self._chain: Chain | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The prompt, and info with success False."""
        super().reset(seed=seed)
        if options and "start" in options:
            self._chain = chain_of(options)
        else:
            stream = python_random("chain environment", int(self.np_random.integers(2**31)))
            self._chain = random_chain(stream, stream.choice(TRAINED))
        return prompt(self._chain), {"success": False, "reason": ""}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Grades the answer and ends the episode.

        TypeError unless the action is a string; gymnasium.error.ResetNeeded when no episode is running.
        """
        if not isinstance(action, str):
            raise TypeError(f"the answer must be text; got {type(action).__name__}")
        if self._chain is None:
            raise gymnasium.error.ResetNeeded("call reset before step: no episode is running")
        found, steps = grade(action, self._chain), len(self._chain.moves)
        self._chain = None
        info = {"success": found.success, "reason": found.reason, "class": found.kind, "progress": found.right_steps / steps}
        return "", float(found.success), True, False, info


if ENV_ID not in gymnasium.registry:
    gymnasium.register(id=ENV_ID, entry_point="experiments.exp_7_opd_distillation.chains:DistilledChains")
