"""Routes on a rail: where the agent stands, what it sees there, what it is told and which action is right.

A route leads over 2 or 3 legs from node to node of a city. A leg ends where the instruction says so: at the crossing
where the next turn is due, or at the destination; straight on, it may pass further crossings with places of their own.
Along a street there are up to `points` further stops, each left out with probability `drop` and kept only at more than
8 m from the next stop.

By construction an instruction can be followed: what it names is seen at its crossing and at none before it on that leg.
Every route belongs to one role (corpus, train, validation, test) by a hash of its two ends, so that no two roles of a
city share a route, its reverse, or another way between the same ends.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from common.seeding import python_random, stream_seed
from experiments.exp_7_12_virl.cities import City, Place, bearing, city, wrapped

ABSOLUTE = ("north", "northeast", "east", "southeast", "south", "southwest", "west", "northwest")
RELATIVE = ("left", "right", "slightly left", "slightly right")
RELATIONS = (
    "in front of you", "on your right front", "on your right", "on your right behind", "behind you",
    "on your left behind", "on your left", "on your left front",
)  # fmt: skip
ROLES = {"corpus": range(3), "train": range(3, 7), "validation": range(7, 8), "test": range(8, 10)}
BUCKETS = 10
STRAIGHT = 20.0  # degrees: a smaller change of direction is no turn
SHARPEST = 150.0  # a larger one would lead back
LEGS = (2, 3)
MOST_PASSED = 3  # crossings of a leg that are passed straight on
MOST_STOPS = 40
CLOSEST = 8.0  # metres between stops
MOST_REPEATS = 500  # known routes drawn in a row before cities count as exhausted


class Sight(NamedTuple):
    """What is seen: the place and where it stands relative to the heading (index of RELATIONS), and whether streets cross."""

    place: str | None
    relation: int
    crossing: bool


class Instruction(NamedTuple):
    """``kind``: turn (direction and way are set), or go or reach, until `sight` is seen at a crossing or at the end."""

    kind: str
    direction: int = -1  # index of ABSOLUTE
    way: int = -1  # index of RELATIVE
    sight: Sight | None = None


class Stop(NamedTuple):
    """A decision: position, heading in degrees, what is seen, the instruction that applies, the right action.

    ``action``: forward, turn or stop; a turn is towards the direction and the way of its instruction.
    """

    x: float
    y: float
    heading: float
    sight: Sight
    instruction: int
    action: str


@dataclass(frozen=True)
class Route:
    """``city``: its name; ``nodes``: the nodes it leads over; ``heading``: of the agent at the start, in degrees."""

    city: str
    nodes: tuple[int, ...]
    heading: float
    instructions: tuple[Instruction, ...]
    stops: tuple[Stop, ...]


@dataclass(frozen=True)
class RailConfig:
    """``points`` stops along a street, left out with probability ``drop``.

    ``wrap``: a difference of bearings lies within half a turn; without it 350 -> 10 degrees is called left, as in the
    published program. ``passing``: crossings that are passed are seen as such, with their places; without it the rail
    shows crossings and places only where an action is due, as the published one does. ``straight``: a smaller change of
    direction, in degrees, is no turn and has no instruction of its own.
    """

    points: int = 5
    drop: float = 0.5
    wrap: bool = True
    passing: bool = True
    straight: float = STRAIGHT


def direction_of(degrees: float) -> int:
    """Index of ABSOLUTE nearest to a bearing."""
    return round(degrees / 45.0) % 8


def way_of(before: float, after: float, wrap: bool = True) -> int:
    """Index of RELATIVE for a change of heading: beyond 45 degrees left or right, else slightly so."""
    change = wrapped(after - before) if wrap else after - before
    return (1 if change > 0 else 0) + (0 if abs(change) > 45.0 else 2)


def relation_of(x: float, y: float, heading: float, place: Place) -> int:
    """Index of RELATIONS: the sector of 45 degrees, seen along the heading, in which a place stands."""
    return round(wrapped(bearing((x, y), (place.x, place.y)) - heading) / 45.0) % 8


def role(name: str, start: int, end: int) -> str:
    """Who may see routes between these two nodes of a city."""
    bucket = stream_seed("route", name, min(start, end), max(start, end)) % BUCKETS
    return next(role for role, buckets in ROLES.items() if bucket in buckets)


def walk(town: City, stream: random.Random, straight_on: float) -> list[int] | None:
    """Nodes of a random way over 2 or 3 legs without going back; None if it ends before it should.

    A crossing is passed with probability ``straight_on`` where a street goes on ahead.
    """
    legs, passed = stream.choice(LEGS), 0
    nodes = [stream.randrange(len(town.points))]
    nodes.append(stream.choice(town.neighbours[nodes[0]]))
    while True:
        before = town.bearing(nodes[-2], nodes[-1])
        ahead, sideways = list[int](), list[int]()
        for other in town.neighbours[nodes[-1]]:
            change = abs(wrapped(town.bearing(nodes[-1], other) - before))
            if other not in nodes:
                (ahead if change < STRAIGHT else sideways if change <= SHARPEST else []).append(other)
        straight = bool(ahead) and passed < MOST_PASSED and stream.random() < straight_on
        if not straight:
            legs, passed = legs - 1, 0
            if legs == 0:
                return nodes
        if not straight and (not sideways or not town.is_intersection(nodes[-1])):
            return None
        passed += straight
        nodes.append(stream.choice(ahead if straight else sideways))


def draw(name: str, wanted: str, stream: random.Random, config: RailConfig, straight_on: float = 0.5) -> Route:
    """A random route of that role in the city, with a random heading at its start; ``straight_on``: see `walk`."""
    town = city(name)
    while True:
        nodes = walk(town, stream, straight_on)
        if nodes is None or role(name, nodes[0], nodes[-1]) != wanted:
            continue
        first = town.bearing(nodes[0], nodes[1])
        heading = (first + stream.choice((-1, 1)) * stream.uniform(STRAIGHT, 175.0)) % 360.0
        route = lay(name, tuple(nodes), round(heading, 1), stream, config)
        if route is not None:
            return route


def lay(name: str, nodes: tuple[int, ...], heading: float, stream: random.Random, config: RailConfig) -> Route | None:
    """The rail over these nodes; None where an instruction could not be followed or the route is too long."""
    town = city(name)
    bearings = [town.bearing(a, b) for a, b in pairwise(nodes)]
    instructions, stops, seen = [], list[Stop](), list[Sight]()

    def see(node: int, facing: float, due: bool) -> Sight:
        place = town.places[node]
        if place is None or not (due or config.passing):
            return Sight(None, -1, town.is_intersection(node) and (due or config.passing))
        return Sight(place.name, relation_of(*town.points[node], facing, place), town.is_intersection(node))

    def stop(where: tuple[float, float], facing: float, sight: Sight, action: str) -> None:
        stops.append(Stop(round(where[0], 1), round(where[1], 1), facing, sight, len(instructions) - 1, action))

    def turn(node: int, before: float, after: float) -> None:
        instructions.append(Instruction("turn", direction_of(after), way_of(before, after, config.wrap)))
        stop(town.points[node], before, see(node, before, True), "turn")

    turn(nodes[0], heading, bearings[0])
    for step, (a, b) in enumerate(pairwise(nodes)):
        facing, last = bearings[step], step + 2 == len(nodes)
        change = 0.0 if last else wrapped(bearings[step + 1] - facing)
        due = last or abs(change) >= config.straight
        if stops[-1].action == "turn":  # a new leg: what it leads to is filled in when it is reached
            instructions.append(Instruction("go"))
            goal, seen = len(instructions) - 1, []
        sight = see(a, facing, False)
        seen.append(sight)
        stop(town.points[a], facing, sight, "forward")
        for share in between(town.length(a, b), stream, config):
            (ax, ay), (bx, by) = town.points[a], town.points[b]
            stop((ax + share * (bx - ax), ay + share * (by - ay)), facing, Sight(None, -1, False), "forward")
        if not due:
            continue
        target = see(b, facing, True)
        if not followable(target, seen, last):
            return None
        instructions[goal] = Instruction("reach" if last else "go", sight=target)
        if last:
            stop(town.points[b], facing, target, "stop")
        else:
            turn(b, facing, bearings[step + 1])
    return Route(name, nodes, heading, tuple(instructions), tuple(stops)) if len(stops) <= MOST_STOPS else None


def followable(target: Sight, seen: list[Sight], last: bool) -> bool:
    """Nothing before the end of a leg looks like its end; the sight at the leg's own beginning is behind the agent.

    Without a place to look for, "the next intersection" must be the next one, and a destination cannot be told at all.
    """
    if target.place is None:
        return not last and not any(sight.crossing for sight in seen[1:])
    return all((sight.place, sight.relation) != (target.place, target.relation) for sight in seen)


def between(length: float, stream: random.Random, config: RailConfig) -> list[float]:
    """Where along a street of that length the agent stops, as shares of it."""
    kept, before = list[float](), 0.0
    for k in range(1, config.points + 1):
        share = k / (config.points + 1)
        far = (share - before) * length > CLOSEST and (1 - share) * length > CLOSEST
        if stream.random() >= config.drop and far:
            kept.append(share)
            before = share
    return kept


class Stock(NamedTuple):
    """Routes found so far, the ways they lead, and the stream that finds more."""

    found: list[Route]
    known: set[tuple[str, tuple[int, ...]]]
    stream: random.Random


@cache
def _stock(names: tuple[str, ...], wanted: str, seed: int, config: RailConfig) -> Stock:
    return Stock([], set(), python_random(seed, "routes", wanted, *names))


def items(names: tuple[str, ...], wanted: str, seed: int, count: int, config: RailConfig) -> list[Route]:
    """`count` routes of a role with different nodes, cities in turn; the shorter list is the beginning of the longer one.

    ValueError where the cities hold fewer.
    """
    stock, repeats = _stock(names, wanted, seed, config), 0
    while len(stock.found) < count:
        route = draw(names[len(stock.found) % len(names)], wanted, stock.stream, config)
        if (route.city, route.nodes) not in stock.known:
            stock.known.add((route.city, route.nodes))
            stock.found.append(route)
            repeats = 0
        elif (repeats := repeats + 1) > MOST_REPEATS:
            held = len(stock.found)
            raise ValueError(f"{', '.join(names)}: only {held} different {wanted} routes were found, {count} are wanted")
    return stock.found[:count]


@cache
def all_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the places of some cities, sorted."""
    return tuple(sorted({place.name for name in names for place in city(name).places if place is not None}))
