"""The second task, where a slip can be mended: a dial of 40 places is turned to a list of numbers, one turn at a time.

    at 17 to 22   -> +5
    at 22 to 25   -> +4        (a slip: one place too far)
    at 26 to 25   -> -1        (the environment shows the true place, so the way back is there to be taken)
    at 25 to 32   -> +7

The stops of a task lie 1 to 9 places further on each, so whoever never slips never turns back: a teacher's own games
hardly show how. The horizon is the number of stops; there are two turns to spare and one more for every eight stops.
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

ENV_ID = "SafeDial-v0"
PLACES = 40
FARTHEST = 9  # places that one turn moves at most
ROLES = {"corpus": range(5), "train": range(5, 8), "validation": range(8, 9), "test": range(9, 10)}
BUCKETS = 10
TRAINED = (4, 8)  # stops of the games that post-training sees
LONGER = (12, 16)

AT, TO = "at ", " to "
MOVES = tuple(f"{sign}{size}" for sign in "+-" for size in range(1, FARTHEST + 1))
_MOVE = re.compile(r"[+-][1-9]")
_TEXT = spaces.Text(min_length=0, max_length=100, charset=string.printable)


class Tour(NamedTuple):
    """``start`` and the stops to be reached in order."""

    start: int
    stops: tuple[int, ...]


def offset(place: int, stop: int) -> int:
    """Signed way from place to stop, -20..19 places."""
    return (stop - place + PLACES // 2) % PLACES - PLACES // 2


def best_move(place: int, stop: int) -> str:
    """The turn that goes to the stop, or as far towards it as one turn can."""
    return f"{max(-FARTHEST, min(FARTHEST, offset(place, stop))):+d}"


def turn_limit(stops: int) -> int:
    """Turns that a game of so many stops may take."""
    return stops + 2 + stops // 8


def random_tour(stream: random.Random, length: int) -> Tour:
    """A tour that goes on by 1 to 9 places from stop to stop."""
    start = place = stream.randrange(PLACES)
    stops = []
    for _ in range(length):
        place = (place + stream.randint(1, FARTHEST)) % PLACES
        stops.append(place)
    return Tour(start, tuple(stops))


def role(tour: Tour) -> str:
    """Who may see the tour, by its start and first four stops: a longer game of another role never begins with it."""
    bucket = stream_seed("tour", tour.start, *tour.stops[:4]) % BUCKETS
    return next(name for name, buckets in ROLES.items() if bucket in buckets)


@cache
def items(wanted: str, seed: int, lengths: tuple[int, ...], count: int) -> tuple[Tour, ...]:
    """`count` different tours of a role, lengths in turn; the shorter list is the beginning of the longer one."""
    stream, found = python_random(seed, "tours", wanted, *lengths), dict[Tour, None]()
    while len(found) < count:
        tour = random_tour(stream, lengths[len(found) % len(lengths)])
        if role(tour) == wanted:
            found[tour] = None
    return tuple(found)


def observation(place: int, stop: int) -> str:
    """What the environment shows."""
    return f"{AT}{place}{TO}{stop}"


def task(tour: Tour) -> dict:
    """Options for the environment's reset."""
    return {"start": tour.start, "stops": list(tour.stops)}


def tour_of(options: dict) -> Tour:
    """The tour of a task."""
    return Tour(options["start"], tuple(options["stops"]))


class SafeDial(gymnasium.Env):
    """One episode is one tour; the reward is 1 in the turn that reaches the last stop, else 0.

    reset(options=): `start` and `stops` name the tour; without them one is drawn from the stream that `seed` started. An
    answer that is not one of the eighteen turns moves nothing, costs its turn and is counted (class invalid).
    info after a step: success, reason, class (best, slip, invalid), off (the turn began past the stop, or farther from it
    than a turn can go), progress (share of stops reached).
    """

    metadata: ClassVar = {"render_modes": []}

    def __init__(self) -> None:
        self.observation_space = _TEXT
        self.action_space = _TEXT
        self._tour: Tour | None = None
        self._place, self._reached, self._turns = 0, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The first observation, and info with success False."""
        super().reset(seed=seed)
        if options and "start" in options:
            self._tour = tour_of(options)
        else:
            stream = python_random("dial environment", int(self.np_random.integers(2**31)))
            self._tour = random_tour(stream, stream.choice(TRAINED))
        self._place, self._reached, self._turns = self._tour.start, 0, 0
        return observation(self._place, self._tour.stops[0]), {"success": False, "reason": ""}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Turns the dial.

        TypeError unless the action is a string; gymnasium.error.ResetNeeded when no episode is running.
        """
        if not isinstance(action, str):
            raise TypeError(f"the answer must be text; got {type(action).__name__}")
        if self._tour is None:
            raise gymnasium.error.ResetNeeded("call reset before step: no episode is running")
        stops, stop = self._tour.stops, self._tour.stops[self._reached]
        way = offset(self._place, stop)
        kind, reason = "invalid", f"{action[:20]!r} is not a turn"
        if _MOVE.fullmatch(action):
            kind = "best" if action == best_move(self._place, stop) else "slip"
            self._place = (self._place + int(action)) % PLACES
            reason = "stop reached" if self._place == stop else "not at the stop"
        self._turns += 1
        self._reached += self._place == stop
        success = self._reached == len(stops)
        truncated = not success and self._turns == turn_limit(len(stops))
        info = {
            "success": success,
            "reason": f"{self._reached} of {len(stops)} stops after {self._turns} turns: {reason}",
            "class": kind,
            "off": not 1 <= way <= FARTHEST,
            "progress": self._reached / len(stops),
        }
        shown = "" if success else observation(self._place, stops[self._reached])
        if success or truncated:
            self._tour = None
        return shown, float(success), success, truncated, info


if ENV_ID not in gymnasium.registry:
    gymnasium.register(id=ENV_ID, entry_point="experiments.exp_7_opd_distillation.dial:SafeDial")
