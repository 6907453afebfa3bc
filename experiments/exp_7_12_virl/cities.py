"""Cities as street graphs with named places: generated ones of three characters, or a real one from OpenStreetMap.

    city("grid-0")  city("radial-3")  city("organic-1")          # generated, need nothing
    city("helsinki-south")  city("osm:/path/to/extract.osm.pbf") # real, see osm.py

A city is a function of its name alone. Lengths in metres, x to the east, y to the north; bearings in degrees clockwise
from north.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.spatial import Delaunay

from common.schema import ConfigError
from common.seeding import rng

KINDS = ("grid", "radial", "organic")
HALVES = ("helsinki-south", "helsinki-north")
# A generated place has a trade and a proper name; both are words that a sign can show.
TRADES = (
    "Bakery", "Bank", "Bookshop", "Brewery", "Cafe", "Cinema", "Clinic", "Florist", "Gallery", "Garage", "Grocery", "Hotel",
    "Laundry", "Library", "Market", "Museum", "Pharmacy", "Pizzeria", "School", "Studio", "Tailor", "Tavern", "Theatre",
    "Winery",
)  # fmt: skip
PROPER = (
    "Alder", "Anchor", "Aurora", "Bramble", "Canary", "Cedar", "Comet", "Coral", "Delta", "Ember", "Falcon", "Fern",
    "Garnet", "Harbour", "Heron", "Indigo", "Ivory", "Jasmine", "Juniper", "Kestrel", "Lantern", "Linden", "Lotus", "Magnet",
    "Maple", "Meadow", "Mirage", "Nectar", "Nova", "Oasis", "Opal", "Orchid", "Pebble", "Pine", "Quartz", "Raven",
    "Saffron", "Sable", "Sparrow", "Summit", "Thistle", "Topaz", "Tulip", "Umber", "Violet", "Walnut", "Willow", "Zephyr",
)  # fmt: skip
LANDMARK_SHARE = 0.85  # of the nodes of a generated city
NEAR = 60.0  # a place further from a node than this is not seen from there


@dataclass(frozen=True)
class Place:
    """A named place: what a sign says, and where it stands."""

    name: str
    x: float
    y: float


@dataclass(frozen=True, eq=False)
class City:
    """A street graph. ``neighbours[n]``: nodes that a street leads to from n; ``places[n]``: the place seen at n, if any."""

    name: str
    points: tuple[tuple[float, float], ...]
    neighbours: tuple[tuple[int, ...], ...]
    places: tuple[Place | None, ...]
    credit: str = ""

    def is_intersection(self, node: int) -> bool:
        """Three or more streets meet."""
        return len(self.neighbours[node]) >= 3

    def bearing(self, a: int, b: int) -> float:
        """Direction from node a to node b, 0 <= degrees < 360."""
        return bearing(self.points[a], self.points[b])

    def length(self, a: int, b: int) -> float:
        """Distance between two nodes in metres."""
        return math.dist(self.points[a], self.points[b])


def bearing(a: Sequence[float], b: Sequence[float]) -> float:
    """Compass bearing from point a to point b, 0 <= degrees < 360."""
    return math.degrees(math.atan2(b[0] - a[0], b[1] - a[1])) % 360.0


def wrapped(degrees: float) -> float:
    """The same difference of bearings, -180 <= degrees < 180."""
    return (degrees + 180.0) % 360.0 - 180.0


@cache
def city(name: str) -> City:
    """The city of that name; ConfigError where no city can have it, or where what a real one needs is missing."""
    if name.startswith("osm:") or name in HALVES:
        from experiments.exp_7_12_virl import osm

        return osm.half(name) if name in HALVES else osm.load(name.removeprefix("osm:"))
    if name.startswith("published:"):
        from experiments.exp_7_12_virl import published

        return published.town(name)
    kind, _, number = name.partition("-")
    if kind not in KINDS or not number.isdigit():
        raise ConfigError(
            f"city={name}: allowed are {', '.join(f'{kind}-<number>' for kind in KINDS)}, {', '.join(HALVES)}, osm:<file>."
        )
    stream = rng("city", kind, int(number))
    points, edges = {"grid": grid, "radial": radial, "organic": organic}[kind](stream)
    kept, streets = renumbered(range(len(points)), set(thinned(len(points), edges, stream)))
    return assemble(name, points[kept], streets, named_places(points[kept], stream))


def assemble(
    name: str, points: np.ndarray, edges: Sequence[tuple[int, int]], places: Sequence[Place | None], credit: str = ""
) -> City:
    """A city from node positions (N, 2), streets as pairs of nodes and the place of each node."""
    neighbours: list[list[int]] = [[] for _ in points]
    for a, b in sorted(edges):
        neighbours[a].append(b)
        neighbours[b].append(a)
    where = tuple((round(float(x), 2), round(float(y), 2)) for x, y in points)
    return City(name, where, tuple(map(tuple, neighbours)), tuple(places), credit)


def renumbered(nodes: Iterable[int], edges: set[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
    """The largest connected part of these nodes without dead ends, and its streets in terms of places in that list."""
    neighbours: dict[int, set[int]] = {n: set() for n in nodes}
    for a, b in edges:
        if a in neighbours and b in neighbours:
            neighbours[a].add(b)
            neighbours[b].add(a)
    while thin := [n for n, others in neighbours.items() if len(others) < 2]:
        for n in thin:
            for other in neighbours.pop(n):
                neighbours[other].discard(n)
    best, left = set[int](), set(neighbours)
    while left:
        part, edge = set[int](), {min(left)}
        while edge:
            part |= edge
            edge = {other for n in edge for other in neighbours[n]} - part
        left -= part
        best = max(best, part, key=len)
    kept = sorted(best)
    place = {n: i for i, n in enumerate(kept)}
    return kept, sorted((place[a], place[b]) for a in kept for b in neighbours[a] if a < b)


def grid(stream: np.random.Generator) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Blocks of one width and another depth, turned as a whole, with slightly irregular corners."""
    columns, rows = (int(n) for n in stream.integers(8, 11, size=2))
    width, depth = stream.uniform(60, 85), stream.uniform(90, 140)
    x, y = np.meshgrid(np.arange(columns) * width, np.arange(rows) * depth)
    points = np.stack([x.ravel(), y.ravel()], axis=1) + stream.uniform(-4, 4, size=(rows * columns, 2))
    angle = stream.uniform(-0.6, 0.6)
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    edges = [(n, n + 1) for n in range(rows * columns) if (n + 1) % columns]
    edges += [(n, n + columns) for n in range((rows - 1) * columns)]
    return points @ turn.T, edges


def radial(stream: np.random.Generator) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Rings around a square, crossed by avenues; every second avenue begins at the second ring."""
    spokes, rings = int(stream.integers(6, 9)) * 2, int(stream.integers(5, 7))
    first, step, angle = stream.uniform(90, 120), stream.uniform(80, 110), stream.uniform(0, 1)
    points, number, edges = [(0.0, 0.0)], {}, []
    for ring in range(rings):
        here = [spoke for spoke in range(spokes) if ring >= 2 or spoke % 2 == 0]
        for spoke in here:
            bend = angle + 2 * math.pi * spoke / spokes + stream.normal(0, 0.03)
            radius = first + step * ring + stream.uniform(-8, 8)
            number[ring, spoke] = len(points)
            points.append((radius * math.sin(bend), radius * math.cos(bend)))
            inner = number.get((ring - 1, spoke), 0 if ring == 0 else None)
            if inner is not None:
                edges.append((inner, number[ring, spoke]))
        edges += [(number[ring, a], number[ring, b]) for a, b in zip(here, [*here[1:], here[0]], strict=True)]
    return np.array(points), edges


def organic(stream: np.random.Generator) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Corners scattered at a distance of at least 62 m, joined where no third corner lies in between (Gabriel graph)."""
    points: list[np.ndarray] = []
    while len(points) < 80:
        candidate = stream.uniform(0, 800, size=2)
        if all(math.dist(candidate, other) > 62 for other in points):
            points.append(candidate)
    xy = np.array(points)
    pairs = {tuple(sorted((int(t[i]), int(t[j])))) for t in Delaunay(xy).simplices for i, j in ((0, 1), (1, 2), (0, 2))}
    edges = []
    for a, b in sorted(pairs):
        middle, radius = (xy[a] + xy[b]) / 2, math.dist(xy[a], xy[b]) / 2
        inside = np.hypot(*(xy - middle).T) < radius - 1e-9
        if not inside.any() and radius < 80:
            edges.append((a, b))
    return xy, edges


def thinned(
    nodes: int, edges: Sequence[tuple[int, int]], stream: np.random.Generator, share: float = 0.1
) -> list[tuple[int, int]]:
    """The streets less a tenth of them, as long as no node is left with fewer than two."""
    degree = np.bincount(np.array(edges).ravel(), minlength=nodes)
    kept = list(edges)
    for index in stream.permutation(len(edges))[: round(share * len(edges))]:
        a, b = edges[index]
        if degree[a] > 2 and degree[b] > 2:
            kept.remove((a, b))
            degree[[a, b]] -= 1
    return kept


def named_places(points: np.ndarray, stream: np.random.Generator) -> list[Place | None]:
    """A place beside most nodes, 14 to 26 m away, no name twice in a city."""
    order = stream.permutation(len(TRADES) * len(PROPER))
    places: list[Place | None] = []
    for (x, y), index in zip(points, order, strict=False):
        angle, distance = stream.uniform(0, 2 * math.pi), stream.uniform(14, 26)
        name = f"{TRADES[index // len(PROPER)]} {PROPER[index % len(PROPER)]}"
        place = Place(name, round(float(x + distance * math.sin(angle)), 2), round(float(y + distance * math.cos(angle)), 2))
        places.append(place if stream.random() < LANDMARK_SHARE else None)
    return places
