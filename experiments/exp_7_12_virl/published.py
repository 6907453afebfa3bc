"""The published V-IRL routes as routes of this environment, from a file of one's own.

The routes of Chu et al. 2025 (dataset tianzhechu/SFTvsRL_Data, `VIRL_routes/*/route_infos.json`) hold names and coordinates
of Google Places beside street-view pictures, whose terms do not let them be passed on. So none is part of this repository;
give the path of a copy:

    routes, left_out = published.load("route_infos.json", RailConfig())
    prompt, info = env.reset(options={"route": routes[0]})

A file is `[list of routes, their number]`. Of a route are read: start_place.relocated_geocode, init_heading (0 or missing:
drawn), route_results.geocode_list (every crossing with a turn, then the destination, latitude and longitude),
route_results.landmark_list (the place at each of these crossings, or null) and dest_place. Headings are computed from the
coordinates. The pictures are not read: views are drawn as for any city.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from common.schema import ConfigError
from common.seeding import python_random
from experiments.exp_7_12_virl import routes
from experiments.exp_7_12_virl.cities import City, Place, assemble, wrapped
from experiments.exp_7_12_virl.osm import plain_name
from experiments.exp_7_12_virl.routes import RailConfig, Route

METRE = 111_195.0  # of a degree of latitude
SIDE_STREET = 40.0  # metres: every crossing of a route gets two of them, because the file names no other streets


@cache
def read(path: str) -> list[dict[str, Any]]:
    """The routes of a file; ConfigError where it is missing or not of the published form."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"routes={path}: not a readable JSON file ({error}).") from None
    if not (isinstance(data, list) and len(data) == 2 and isinstance(data[0], list) and data[1] == len(data[0])):
        raise ConfigError(f"routes={path}: must be [list of routes, their number], as route_infos.json is.")
    return data[0]


def load(path: str | Path, config: RailConfig, seed: int = 0) -> tuple[list[Route], int]:
    """(routes, number of routes left out because their instruction cannot be followed or they are too long)."""
    rail = replace(config, straight=0.0)  # every crossing that is listed has a turn
    found = []
    for index, one in enumerate(read(str(path))):
        name, stream = f"published:{path}#{index}", python_random(seed, "published", index)
        count = len(part(one, "route_results", "geocode_list")) + 1
        heading = float(one.get("init_heading") or stream.randrange(1, 360)) % 360.0
        found.append(routes.lay(name, tuple(range(count)), heading, stream, rail))
    kept = [route for route in found if route is not None]
    return kept, len(found) - len(kept)


@cache
def town(name: str) -> City:
    """The streets of one route, named published:<file>#<index>: its nodes in order, then the ends of the side streets."""
    path, _, index = name.removeprefix("published:").rpartition("#")
    if not path or not index.isdigit() or int(index) >= len(read(path)):
        raise ConfigError(f"city={name}: must be published:<file>#<index> with an index below the number of routes.")
    one = read(path)[int(index)]
    start = part(one, "start_place", "relocated_geocode")
    where = [start, *part(one, "route_results", "geocode_list")]
    east = math.cos(math.radians(start[0]))

    def flat(geocode: Any) -> tuple[float, float]:
        return (geocode[1] - start[1]) * METRE * east, (geocode[0] - start[0]) * METRE

    points = [flat(geocode) for geocode in where]
    seen = [None, *part(one, "route_results", "landmark_list"), one.get("dest_place")]
    if len(seen) != len(points):
        raise ConfigError(
            f"city={name}: {len(seen) - 2} landmarks for {len(points) - 2} crossings; one (or null) belongs to each."
        )
    places = [Place(plain_name(p["name"]) or "Place", *flat(p["geocode"])) if p else None for p in seen]
    edges = [(n, n + 1) for n in range(len(points) - 1)]
    for n in range(1, len(points) - 1):
        (ax, ay), (bx, by), (cx, cy) = points[n - 1 : n + 2]
        into, out = math.atan2(bx - ax, by - ay), math.atan2(cx - bx, cy - by)
        middle = into + math.radians(wrapped(math.degrees(out - into))) / 2
        for side in (middle + math.pi / 2, middle - math.pi / 2):
            edges.append((n, len(points)))
            points.append((bx + SIDE_STREET * math.sin(side), by + SIDE_STREET * math.cos(side)))
    return assemble(name, np.array(points), edges, [*places, *[None] * (len(points) - len(places))])


def part(one: dict[str, Any], key: str, inner: str) -> list:
    """one[key][inner]; ConfigError naming what is missing."""
    try:
        return list(one[key][inner])
    except (KeyError, TypeError):
        raise ConfigError(f"a route of the file has no {key}.{inner}.") from None
