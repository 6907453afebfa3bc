"""Three kinds of task on whole numbers 0..19, what a teacher may be shown of each, and the environment that grades them.

    steps   Compute 7+5-3                                     7+5=11 wait=12-3=9
    codes   Decode 7 b f                                      7 b-3=4 f+5=9
    search  Find 12 3                                         =7

`steps` is reasoning: a result may be put right behind " wait". `codes` needs a table of six letters that stands in no
question: a world has one table. `search` has a number for each pair that no rule explains; it can only be looked up or
found by trying. What a teacher is shown (`Shown`) stands in front of the question's end: the known answer, the worked
solution without slips, or the table.
"""

from __future__ import annotations

import random
import re
import string
from functools import cache, lru_cache
from typing import Any, ClassVar, NamedTuple

import gymnasium
from gymnasium import spaces

from common.seeding import python_random, stream_seed

ENV_ID = "PrivilegedTasks-v0"
KINDS = ("steps", "codes", "search")
SHOWN = ("nothing", "answer", "solution", "table")
SIZE = 20  # numbers are 0..19
DIGITS = [sign * digit for sign in (1, -1) for digit in range(1, 6)]
LETTERS = "abcdef"
TRAINED = {"steps": (2, 3, 4, 5), "codes": (2, 3), "search": (1,)}  # steps of a task that post-training sees
LONGER = {"steps": (7, 8), "codes": (4, 5), "search": (1,)}
ROLES = {"corpus": range(4), "train": range(4, 6), "validation": range(6, 8), "test": range(8, 10)}
BUCKETS = 10

ASK = {"steps": "Compute ", "codes": "Decode ", "search": "Find "}
ANSWER, SOLUTION, TABLE, END, WAIT = ", known answer ", ", known solution ", "Table", "\n", " wait"
_PIECE = re.compile(r"(?P<move>(?: [a-f])?[+-][1-5])(?P<results>=[0-9]{1,2}(?: wait=[0-9]{1,2})*)")
_TEXT = spaces.Text(min_length=0, max_length=10_000, charset=string.printable)


class Task(NamedTuple):
    """``start``, then signed digits (steps), letters' places (codes), or the second number (search); ``world`` fixes
    the table and the numbers to be found."""

    kind: str
    world: int
    start: int
    moves: tuple[int, ...]


class Grade(NamedTuple):
    """``kind``: right, malformed, or the first fault: misread, arithmetic, short, long. ``waits``: results put again."""

    success: bool
    kind: str
    reason: str
    waits: int


@lru_cache(maxsize=4096)
def table(world: int) -> tuple[int, ...]:
    """The signed digit of each letter."""
    return tuple(python_random("table", world).sample(DIGITS, len(LETTERS)))


def found_number(world: int, first: int, second: int) -> int:
    """The number of a pair, by a hash."""
    return stream_seed("search", world, first, second) % SIZE


def values(task: Task) -> list[int]:
    """The signed digits that a task's moves stand for."""
    return [table(task.world)[move] for move in task.moves] if task.kind == "codes" else list(task.moves)


def results(task: Task) -> list[int]:
    """The number after each step; of a search, the number to be found."""
    if task.kind == "search":
        return [found_number(task.world, task.start, task.moves[0])]
    numbers = [task.start]
    for value in values(task):
        numbers.append(numbers[-1] + value)
    return numbers[1:]


def random_task(stream: random.Random, kind: str, world: int, length: int) -> Task:
    """A task of `length` steps whose results stay in 0..19."""
    while True:
        start = stream.randrange(SIZE)
        if kind == "search":
            return Task(kind, world, start, (stream.randrange(SIZE),))
        choices = range(len(LETTERS)) if kind == "codes" else DIGITS
        task = Task(kind, world, start, tuple(stream.choice(choices) for _ in range(length)))
        if all(0 <= number < SIZE for number in results(task)):
            return task


def role(task: Task) -> str:
    """Who may see the question; it does not depend on the world."""
    bucket = stream_seed("privileged", task.kind, task.start, *task.moves) % BUCKETS
    return next(name for name, buckets in ROLES.items() if bucket in buckets)


def draw(stream: random.Random, kind: str, world: int, length: int, wanted: str) -> Task:
    """A random task of that role."""
    while True:
        task = random_task(stream, kind, world, length)
        if role(task) == wanted:
            return task


@cache
def items(wanted: str, seed: int, kind: str, world: int, lengths: tuple[int, ...], count: int) -> tuple[Task, ...]:
    """`count` different tasks of a role, lengths in turn; the shorter list is the beginning of the longer one.

    ValueError where a world has no so many of a length (of a search there are some 80 for validation and test).
    """
    stream, found = python_random(seed, "items", wanted, kind, *lengths), dict[Task, None]()
    for _ in range(50 * count + 1000):
        if len(found) == count:
            return tuple(found)
        found[draw(stream, kind, world, lengths[len(found) % len(lengths)], wanted)] = None
    raise ValueError(f"world {world} has no {count} different tasks of kind {kind} and lengths {lengths} for {wanted}")


def written(task: Task) -> list[str]:
    """The steps of the worked answer without their results: a digit, of a code behind its letter."""
    letters = [f" {LETTERS[move]}" if task.kind == "codes" else "" for move in task.moves]
    return [f"{letter}{value:+d}" for letter, value in zip(letters, values(task), strict=True)]


def prompt(task: Task, shown: str = "nothing") -> str:
    """The question, with what a teacher is shown."""
    name = {"steps": "{:+d}".format, "codes": lambda move: f" {LETTERS[move]}", "search": " {}".format}[task.kind]
    moves = "".join(name(move) for move in task.moves)
    before, hint = "", ""
    if shown == "table":
        pairs = zip(LETTERS, table(task.world), strict=True)
        before = TABLE + "".join(f" {letter}{value:+d}" for letter, value in pairs) + END
    elif shown != "nothing":
        hint = f"{ANSWER}{results(task)[-1]}" if shown == "answer" else f"{SOLUTION}{solution(task)}"
    return f"{before}{ASK[task.kind]}{task.start}{moves}{hint}{END}"


def solution(task: Task) -> str:
    """The worked answer without slips."""
    if task.kind == "search":
        return f"={results(task)[0]}"
    steps = zip(written(task), results(task), strict=True)
    return f"{task.start}{''.join(f'{move}={result}' for move, result in steps)}"


def grade(text: str, task: Task) -> Grade:
    """Judges an answer by the last result of each step; anything that is not steps (or one number) is malformed.

    Numbers of steps and codes count by their value, so that 07 is 7; the one number of a search by its text.
    """
    waits = text.count(WAIT)
    if task.kind == "search":
        if not re.fullmatch(r"=[0-9]{1,2}", text):
            return Grade(False, "malformed", "the answer is not one number", waits)
        right = text == solution(task)
        return Grade(right, "right" if right else "arithmetic", "right" if right else "another number", waits)
    pieces = list(_PIECE.finditer(text))
    head = re.match(r"[0-9]{1,2}", text)
    if head is None or head[0] + "".join(piece[0] for piece in pieces) != text or not pieces:
        return Grade(False, "malformed", "the answer is not a number followed by steps", waits)
    if int(head[0]) != task.start:
        return Grade(False, "misread", "it starts from another number", waits)
    for place, (move, result) in enumerate(zip(written(task), results(task), strict=True), start=1):
        if place > len(pieces):
            return Grade(False, "short", f"it stops after {place - 1} of {len(task.moves)} steps", waits)
        if pieces[place - 1]["move"] != move:
            return Grade(False, "misread", f"step {place} is not the one that was asked for", waits)
        if int(pieces[place - 1]["results"].rsplit("=", 1)[1]) != result:
            return Grade(False, "arithmetic", f"the result of step {place} is wrong", waits)
    if len(pieces) > len(task.moves):
        return Grade(False, "long", "there are more steps than were asked for", waits)
    return Grade(True, "right", "right", waits)


def options_of(task: Task) -> dict:
    """Options for the environment's reset."""
    return {"kind": task.kind, "world": task.world, "start": task.start, "moves": list(task.moves)}


def task_of(options: dict) -> Task:
    """The task of such options."""
    return Task(options["kind"], options["world"], options["start"], tuple(options["moves"]))


class PrivilegedTasks(gymnasium.Env):
    """One episode is one question and one answer; the reward is 1 for a right answer, else 0. Nothing is ever shown.

    reset(options=): `kind`, `world`, `start` and `moves` name the task; without them one of kind steps is drawn from the
    stream that `seed` started. info after the step: success, reason, class (see Grade.kind), waits.
    """

    metadata: ClassVar = {"render_modes": []}

    def __init__(self) -> None:
        self.observation_space = _TEXT
        self.action_space = _TEXT
        self._task: Task | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The question, and info with success False."""
        super().reset(seed=seed)
        if options and "start" in options:
            self._task = task_of(options)
        else:
            stream = python_random("privileged environment", int(self.np_random.integers(2**31)))
            self._task = random_task(stream, "steps", 0, stream.choice(TRAINED["steps"]))
        return prompt(self._task), {"success": False, "reason": ""}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Grades the answer and ends the episode.

        TypeError unless the action is a string; gymnasium.error.ResetNeeded when no episode is running.
        """
        if not isinstance(action, str):
            raise TypeError(f"the answer must be text; got {type(action).__name__}")
        if self._task is None:
            raise gymnasium.error.ResetNeeded("call reset before step: no episode is running")
        found = grade(action, self._task)
        self._task = None
        info = {"success": found.success, "reason": found.reason, "class": found.kind, "waits": found.waits}
        return "", float(found.success), True, False, info


if ENV_ID not in gymnasium.registry:
    gymnasium.register(id=ENV_ID, entry_point="experiments.exp_7_opsd_self_distillation.tasks:PrivilegedTasks")
