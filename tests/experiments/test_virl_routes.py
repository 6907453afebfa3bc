"""Cities, routes and splits of 7-12: geometry by hand, disjoint uses, instructions that can be followed, maps from files."""

import importlib.util
import json
import math

import numpy as np
import pytest

from common.config import ConfigError, compose
from common.seeding import python_random
from experiments.exp_7_12_virl import audit, cities, osm, prompts, published, routes
from experiments.exp_7_12_virl.cities import Place, bearing, city, wrapped
from experiments.exp_7_12_virl.env import VirlNavigation
from experiments.exp_7_12_virl.routes import RailConfig, Sight
from experiments.exp_7_12_virl.settings import Settings

NAMES = ("grid-0", "grid-7", "radial-0", "radial-3", "organic-0", "organic-5")


def test_bearings():
    assert [bearing((0, 0), to) for to in ((0, 1), (1, 0), (0, -1), (-1, 0), (1, 1))] == [0, 90, 180, 270, 45]
    assert [wrapped(d) for d in (0, 190, -190, 360, 179)] == [0, -170, 170, 0, 179]


@pytest.mark.parametrize(
    ("before", "after", "way", "unwrapped"),
    [
        (0, 90, "right", "right"),
        (90, 0, "left", "left"),
        (10, 40, "slightly right", "slightly right"),
        (40, 10, "slightly left", "slightly left"),
        (350, 10, "slightly right", "left"),  # the published program calls this left
        (10, 300, "left", "right"),
        (0, 270, "left", "right"),
    ],
)
def test_the_way_of_a_turn_with_and_without_wrapping(before, after, way, unwrapped):
    assert routes.RELATIVE[routes.way_of(before, after)] == way
    assert routes.RELATIVE[routes.way_of(before, after, wrap=False)] == unwrapped


def test_directions_and_relations():
    assert [routes.ABSOLUTE[routes.direction_of(d)] for d in (0, 22, 23, 90, 337, 338, 359)] == [
        "north", "north", "northeast", "east", "northwest", "north", "north",
    ]  # fmt: skip
    place = Place("x", 10.0, 0.0)  # to the east
    seen = [routes.RELATIONS[routes.relation_of(0, 0, heading, place)] for heading in (90, 0, 270, 180, 45)]
    assert seen == ["in front of you", "on your right", "behind you", "on your left", "on your right front"]


@pytest.mark.parametrize("name", NAMES)
def test_a_city_is_connected_named_and_a_function_of_its_name(name):
    town = city(name)
    cities.city.cache_clear()
    again = city(name)
    assert (town.points, town.neighbours, town.places) == (again.points, again.neighbours, again.places)
    seen, edge = set(), {0}
    while edge:
        seen |= edge
        edge = {b for a in edge for b in town.neighbours[a]} - seen
    assert len(seen) == len(town.points) > 40
    assert all(a in town.neighbours[b] for a in seen for b in town.neighbours[a])
    assert min(map(len, town.neighbours)) >= 2
    names = [place.name for place in town.places if place]
    assert len(names) == len(set(names)) > 0.6 * len(town.points)
    assert all(math.dist(p, (q.x, q.y)) < 27 for p, q in zip(town.points, town.places, strict=True) if q)


def test_the_three_characters_differ():
    def right_angles(name):
        town = city(name)
        turns = [
            abs(wrapped(town.bearing(n, a) - town.bearing(n, b)))
            for n, others in enumerate(town.neighbours) for a in others for b in others if a < b
        ]  # fmt: skip
        return np.mean([abs(turn - 90) < 8 or turn > 172 for turn in turns])

    shares = [right_angles(f"{kind}-0") for kind in ("grid", "radial", "organic")]
    assert shares[0] > 0.9 and shares[1] < 0.75 and shares[2] < 0.3


@pytest.mark.parametrize("name", NAMES[::2])
def test_routes_can_be_followed_and_stops_follow_the_instruction(name):
    stream = python_random(1, name)
    for _ in range(40):
        route = routes.draw(name, "test", stream, RailConfig())
        town = city(name)
        assert audit.unambiguous(route)
        assert all(b in town.neighbours[a] for a, b in zip(route.nodes, route.nodes[1:], strict=False))
        assert len(set(route.nodes)) == len(route.nodes) and len(route.stops) <= routes.MOST_STOPS
        kinds = [one.kind for one in route.instructions]
        assert kinds == ["turn", "go"] * (len(kinds) // 2 - 1) + ["turn", "reach"] and len(kinds) in (4, 6)
        for stop in route.stops:
            assert {"turn": "turn", "forward": "go", "stop": "reach"}[stop.action] in (kinds[stop.instruction], "go")
        for before, after in zip(route.stops, route.stops[1:], strict=False):
            if before.action == "turn":
                told = route.instructions[before.instruction]
                assert told.direction == routes.direction_of(after.heading)
                assert told.way == routes.way_of(before.heading, after.heading)
        end = route.stops[-1]
        assert (end.action, route.instructions[-1].sight) == ("stop", end.sight)


def test_an_instruction_that_fits_twice_is_refused():
    target, other = Sight("Cafe Opal", 2, True), Sight("Cafe Opal", 3, True)
    assert routes.followable(target, [other], last=False)
    assert not routes.followable(target, [other, target], last=False)
    plain = Sight(None, -1, True)
    assert routes.followable(plain, [plain], last=False)  # the leg's own beginning is behind the agent
    assert not routes.followable(plain, [plain, plain], last=False)
    assert not routes.followable(plain, [], last=True)


def test_stops_keep_their_distance():
    stream, config = python_random(3), RailConfig(points=5, drop=0.5)
    shares = [routes.between(60.0, stream, config) for _ in range(200)]
    gaps = [b - a for one in shares for a, b in zip([0.0, *one], [*one, 1.0], strict=True)]
    assert min(gaps) * 60 > 8.0
    assert 1.7 < np.mean([len(one) for one in shares]) < 3.3
    assert routes.between(500.0, stream, RailConfig(points=3, drop=0.0)) == [0.25, 0.5, 0.75]


def test_the_published_rail_hides_the_crossings_that_are_passed():
    hidden = routes.items(("grid-0",), "corpus", 0, 60, RailConfig(passing=False))
    shown = routes.items(("grid-0",), "corpus", 0, 60, RailConfig())
    assert not any(stop.sight.crossing for route in hidden for stop in route.stops if stop.action == "forward")
    assert sum(stop.sight.crossing for route in shown for stop in route.stops if stop.action == "forward") > 100


def test_roles_and_cities_share_nothing():
    settings = compose("7-12", Settings, ["scale=laptop"])
    tried, holes = audit.audit_splits(settings, count=120)
    assert holes == [] and tried["split: ends of routes"] == 6 and tried["split: cities"] == 6
    rooms = [routes.items(settings.cities.train, "train", seed, 50, settings.rail) for seed in (0, 0, 1)]
    assert rooms[0] == rooms[1] != rooms[2]
    assert routes.items(settings.cities.train, "train", 0, 10, settings.rail) == rooms[0][:10]
    assert routes.role("grid-0", 3, 9) == routes.role("grid-0", 9, 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("cities.test=[grid-0]", "grid-0 would serve two purposes"),
        ("cities.test=[grid-900]", "grid-900 would serve two purposes"),
        ("cities.test=[town-1]", "city=town-1: allowed are grid-<number>"),
        ("cities.test=[osm:/no/such.pbf]", "osm"),
        ("switches=[x]", "unwrapped_bearing"),
        ("branches.ppo.tries=0", "branches.ppo.tries=0"),
        ("branches.grpo_published_reward.switches=[x]", "branches.grpo_published_reward.switches"),
        ("model.hidden=65", "model.hidden=65"),
        ("rail.drop=2", "rail.drop=2"),
    ],
)
def test_settings_refuse_what_cannot_work(change, words):
    with pytest.raises(ConfigError) as error:
        compose("7-12", Settings, ["scale=smoke", change])
    assert words in str(error.value)


def test_too_few_routes_are_an_error(monkeypatch):
    only = routes.draw("radial-0", "validation", python_random(0), RailConfig())
    monkeypatch.setattr(routes, "draw", lambda *_: only)
    with pytest.raises(ValueError, match="only 1 different validation routes were found, 3 are wanted"):
        routes.items(("radial-0",), "validation", 9, 3, RailConfig())


# A cross of two streets with a bend and a dead end: 1-2-3-4 from west to east, 5-3-6 from north to south, 7 the bend.
WHERE = {
    1: (24.0, 60.0), 2: (24.001, 60.0), 3: (24.002, 60.0), 4: (24.004, 60.0), 5: (24.002, 60.002), 6: (24.002, 59.998),
    8: (24.004, 60.002), 9: (24.004, 59.998), 10: (24.0, 60.002), 11: (24.0, 59.998), 12: (24.006, 60.0), 13: (24.002, 60.003),
}  # fmt: skip
WAYS = [[10, 5, 8], [1, 2, 3, 4], [11, 6, 9], [10, 1, 11], [5, 3, 6], [8, 4, 9], [4, 12], [5, 13]]
PLACES = [("Cafe A", 24.0021, 60.0001), ("Cafe B", 24.0022, 60.0002), ("Far", 24.003, 60.001)]


def test_a_map_becomes_a_graph_of_crossings():
    town = osm.build("x", PLACES, WAYS, WHERE)
    assert len(town.points) == 9  # nodes 2 (in line), 12 and 13 (dead ends) are left out
    assert sorted(map(len, town.neighbours)) == [2, 2, 2, 2, 3, 3, 3, 3, 4]
    middle = next(n for n, others in enumerate(town.neighbours) if len(others) == 4)
    assert town.places[middle].name == "Cafe A" and sum(place is not None for place in town.places) == 1
    east = [n for n in town.neighbours[middle] if abs(town.bearing(middle, n) - 90) < 1]
    assert town.length(middle, east[0]) == pytest.approx(0.002 * 111_195 * math.cos(math.radians(60)), rel=0.01)
    assert "OpenStreetMap" in town.credit and "Open Database License" in town.credit


def test_names_from_a_map_are_plain():
    assert [osm.plain_name(t) for t in ("Café Ängeln", 'Ämpäri "2"', "東京", "ab", "x" * 41)] == [
        "Cafe Angeln",
        "Ampari 2",
        "",
        "",
        "",
    ]


def test_what_a_real_map_needs_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(osm, "FOLDER", tmp_path)
    with pytest.raises(ConfigError, match="make helsinki"):
        osm.half("helsinki-south")
    if importlib.util.find_spec("osmium") is None:
        with pytest.raises(ConfigError, match="needs the package osmium"):
            osm.load(tmp_path / "x.osm.pbf")


@pytest.mark.skipif(importlib.util.find_spec("osmium") is None, reason="the extra [maps] is not installed")
def test_a_map_file_is_read(tmp_path):
    import osmium

    path = tmp_path / "x.osm.pbf"
    with osmium.SimpleWriter(str(path)) as writer:
        for number, where in WHERE.items():
            writer.add_node(osmium.osm.mutable.Node(id=number, location=where))
        for number, (name, *where) in enumerate(PLACES, start=100):
            writer.add_node(osmium.osm.mutable.Node(id=number, location=where, tags={"name": name, "amenity": "cafe"}))
        for number, nodes in enumerate(WAYS):
            writer.add_way(osmium.osm.mutable.Way(id=number, nodes=nodes, tags={"highway": "residential"}))
    town = city(f"osm:{path}")
    assert len(town.points) == 9 and routes.all_names((f"osm:{path}",)) == ("Cafe A",)


def published_file(folder, **changes):
    route = {
        "start_place": {"relocated_geocode": [40.75, -73.99]},
        "dest_place": {"name": "Café de la Paix", "geocode": [40.7522, -73.9880]},
        "init_heading": 90,
        "milestone_info": "not read",
        "route_results": {
            "geocode_list": [[40.751, -73.99], [40.752, -73.988]],
            "landmark_list": [{"name": "Plaza Hotel", "geocode": [40.751, -73.9897]}],
        },
    } | changes
    path = folder / "route_infos.json"
    path.write_text(json.dumps([[route, route], 2]))
    return path


def test_published_routes_are_walked(tmp_path):
    found, left_out = published.load(published_file(tmp_path), RailConfig(points=1, drop=0.0))
    assert (len(found), left_out) == (2, 0)
    route = found[0]
    assert [prompts.instruction_text(k, one) for k, one in enumerate(route.instructions)] == [
        "1. First, turn left to face north.",
        "2. Move forward until you reach next intersection where Plaza Hotel is on your right.",
        "3. Turn right to face northeast.",
        "4. Move forward until you reach destination where Cafe de la Paix is on your left front.",
    ]
    assert [stop.action for stop in route.stops] == ["turn", "forward", "forward", "turn", "forward", "forward", "stop"]
    env = VirlNavigation()
    env.reset(options={"route": route})
    for stop in route.stops:
        *_, info = env.step(prompts.gold(route, stop, prompts.Rule()))
    assert info["success"]
    assert city(route.city).is_intersection(1) and not city(route.city).is_intersection(0)


def test_files_of_another_form_are_refused(tmp_path):
    for text, words in (("[]", "list of routes"), ("{", "not a readable JSON"), ("[[{}], 1]", "route_results.geocode_list")):
        path = tmp_path / f"{len(words)}.json"
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            published.load(path, RailConfig())
    path = published_file(tmp_path, route_results={"geocode_list": [[40.751, -73.99]], "landmark_list": [None, None]})
    with pytest.raises(ConfigError, match="2 landmarks for 0 crossings"):
        published.load(path, RailConfig())
    with pytest.raises(ConfigError, match="published:<file>#<index>"):
        published.town(f"published:{path}#9")
