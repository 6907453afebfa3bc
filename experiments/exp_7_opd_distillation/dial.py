"""The second task, where a slip can be mended: a dial of 40 places is turned to a list of numbers, button by button.

    at 17 to 22   -> f         (five places on, as the button f does at 17)
    at 22 to 25   -> c         (a slip: at 22 the button c goes four places on)
    past, at 26 to 25 -> z     (the environment shows the true place, so the way back is there to be taken)
    at 22 to 25   -> ...

Nine buttons turn the dial on by 1 to 9 places, at each place in another order: what a button does has to be known by
heart. Whoever went past the stop gets back to the last one by the button z, and by nothing else in time. The stops lie
1 to 9 places further on each, so a player who never slips never needs z: a teacher's own games hardly show it. The horizon
is the number of stops; a game may take half as many turns again.
"""

from __future__ import annotations

import random
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

PAST, AT, TO = "past, ", "at ", " to "
ON, BACK = "abcdefghi", "z"
BUTTONS = ON + BACK
_TEXT = spaces.Text(min_length=0, max_length=100, charset=string.printable)


class Tour(NamedTuple):
    """``start`` and the stops to be reached in order."""

    start: int
    stops: tuple[int, ...]


def way(place: int, stop: int) -> int:
    """Places from here on to the stop, 0..39."""
    return (stop - place) % PLACES


def is_past(place: int, stop: int) -> bool:
    """Whether the stop lies behind: farther on than one turn can go."""
    return way(place, stop) > FARTHEST


@cache
def ways(place: int) -> dict[str, int]:
    """What each button but the last does at a place; the same in every run."""
    return dict(zip(ON, python_random("buttons", place).sample(range(1, FARTHEST + 1), FARTHEST), strict=True))


def turned(place: int, last: int, button: str) -> int:
    """Where a button leads, `last` being the last stop that was reached."""
    return last if button == BACK else (place + ways(place)[button]) % PLACES


def best_button(place: int, stop: int) -> str:
    """The button that goes to the stop, or back where the stop lies behind."""
    if is_past(place, stop):
        return BACK
    return next(button for button, own in ways(place).items() if own == way(place, stop))


def turn_limit(stops: int) -> int:
    """Turns that a game of so many stops may take."""
    return stops + stops // 2


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
    return f"{PAST if is_past(place, stop) else ''}{AT}{place}{TO}{stop}"


def task(tour: Tour) -> dict:
    """Options for the environment's reset."""
    return {"start": tour.start, "stops": list(tour.stops)}


def tour_of(options: dict) -> Tour:
    """The tour of a task."""
    return Tour(options["start"], tuple(options["stops"]))


class SafeDial(gymnasium.Env):
    """One episode is one tour; the reward is 1 in the turn that reaches the last stop, else 0.

    reset(options=): `start` and `stops` name the tour; without them one is drawn from the stream that `seed` started. An
    answer that is not one of the ten buttons moves nothing, costs its turn and is counted (class invalid).
    info after a step: success, reason, class (best, slip, invalid), off (the turn began past the stop), progress (share of
    stops reached).
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
        off, last = is_past(self._place, stop), self._tour.stops[self._reached - 1] if self._reached else self._tour.start
        kind, reason = "invalid", f"{action[:20]!r} is not a button"
        if action in (*ON, BACK):
            kind = "best" if action == best_button(self._place, stop) else "slip"
            self._place = turned(self._place, last, action)
            reason = "stop reached" if self._place == stop else "not at the stop"
        self._turns += 1
        self._reached += self._place == stop
        success = self._reached == len(stops)
        truncated = not success and self._turns == turn_limit(len(stops))
        info = {
            "success": success,
            "reason": f"{self._reached} of {len(stops)} stops after {self._turns} turns: {reason}",
            "class": kind,
            "off": off,
            "progress": self._reached / len(stops),
        }
        shown = "" if success else observation(self._place, stops[self._reached])
        if success or truncated:
            self._tour = None
        return shown, float(success), success, truncated, info


if ENV_ID not in gymnasium.registry:
    gymnasium.register(id=ENV_ID, entry_point="experiments.exp_7_opd_distillation.dial:SafeDial")
