"""VirlNavigation-v0: walks, feedback, tries, rewards and switches, seeding, ownership, errors, speed, the fleet, the audit."""

import copy
import json
import time
import warnings
from collections import Counter

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from experiments.exp_7_12_virl import audit, grading, prompts, routes
from experiments.exp_7_12_virl.env import ENV_ID, VirlNavigation, course
from experiments.exp_7_12_virl.fleet import Fleet
from experiments.exp_7_12_virl.prompts import Rule
from experiments.exp_7_12_virl.routes import Instruction, RailConfig, Route, Sight, Stop

CAFE = Sight("Cafe Opal", 2, True)
ROUTE = Route(
    "grid-0",
    (0, 1, 2),
    90.0,
    (
        Instruction("turn", 0, 0),
        Instruction("go", sight=CAFE),
        Instruction("turn", 3, 1),
        Instruction("reach", sight=Sight("Bank Fern", 7, False)),
    ),
    (
        Stop(0, 0, 90.0, Sight(None, -1, False), 0, "turn"),
        Stop(0, 0, 0.0, Sight(None, -1, False), 1, "forward"),
        Stop(0, 90, 0.0, CAFE, 2, "turn"),
        Stop(0, 90, 135.0, Sight("Cafe Opal", 7, True), 3, "forward"),
        Stop(60, 30, 135.0, Sight("Bank Fern", 7, False), 3, "stop"),
    ),
)
ABSOLUTE = ["turn_direction(north)", "forward()", "turn_direction(southeast)", "forward()", "stop()"]
RELATIVE = ["turn_direction(left)", "forward()", "turn_direction(right)", "forward()", "stop()"]


def reply(stop, action, **changes):
    told = {"current observation": prompts.sight_text(ROUTE.stops[stop].sight), "current instruction": "x", "action": action}
    return json.dumps(told | changes)


def at(stop, env, **options):
    """The environment with the first stops answered rightly."""
    env.reset(options={"route": ROUTE, **options})
    for k in range(stop):
        env.step(reply(k, ABSOLUTE[k]))
    return env


def test_env_checker_passes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(ENV_ID).unwrapped)


def test_the_prompt_states_route_and_rule():
    text, info = VirlNavigation().reset(options={"route": ROUTE, "rule": "relative"})
    assert (
        "1. First, turn left to face north.\n"
        "2. Move forward until you reach next intersection where Cafe Opal is on your right." in text
    )
    assert (
        "3. Turn right to face southeast.\n4. Move forward until you reach destination where Bank Fern is on your left front."
        in text
    )
    assert "where x is one of [left, right, slightly left, slightly right]" in text
    assert text.endswith("\nO_1: No landmarks nearby\nA_1: ")
    assert (info["stops"], info["rule"], info["success"]) == (5, "relative", False)


@pytest.mark.parametrize(
    ("rule", "verbs", "actions"),
    [
        ("absolute", prompts.VERBS, ABSOLUTE),
        ("relative", prompts.VERBS, RELATIVE),
        ("degrees", prompts.VERBS, ["turn_direction(0)", "forward()", "turn_direction(135)", "forward()", "stop()"]),
        (
            "clock",
            prompts.VERBS,
            ["turn_direction(9 o'clock)", "forward()", "turn_direction(3 o'clock)", "forward()", "stop()"],
        ),
        ("relative", ("walk", "face", "halt"), ["face(left)", "walk()", "face(right)", "walk()", "halt()"]),
    ],
)
def test_right_answers_walk_the_route_under_every_rule(rule, verbs, actions):
    env = VirlNavigation()
    env.reset(options={"route": ROUTE, "rule": rule, "verbs": verbs})
    assert list(env.course.actions) == actions
    for k, action in enumerate(actions):
        observation, reward, terminated, truncated, info = env.step(reply(k, action))
        assert (reward, truncated, info["solved"], info["recognised"]) == (1.0, False, True, True)
        assert terminated == info["success"] == (k == 4)
    assert observation == ""
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("x")


def test_a_wrong_action_is_asked_again_and_two_end_the_route():
    env = at(2, VirlNavigation())
    observation, reward, terminated, _, info = env.step(reply(2, "turn_direction(east)"))
    assert (reward, terminated, info["class"], info["trial"], info["due"]) == (-1.0, False, "wrong_action", 1, "turn")
    assert observation == (
        "\nThat action is wrong here. Try another one.\nO_3: Cafe Opal is on your right; You observe an intersection\nA_3: "
    )
    assert env.step(reply(2, "turn_direction(southeast)"))[1:3] == (1.0, False)
    env.step(reply(3, "stop()"))
    observation, reward, terminated, truncated, info = env.step(reply(3, "turn_direction(left)"))
    assert (observation, reward, terminated, truncated) == ("", -1.0, True, False)
    assert (info["success"], info["class"], info["trial"]) == (False, "illegal_action", 2)


def test_lead_on_shows_every_stop_and_a_failed_stop_is_no_success():
    env = at(0, VirlNavigation(tries=1, on_failure="lead_on"))
    observation, _, terminated, _, info = env.step(reply(0, "stop()"))
    assert observation.startswith("\nThat action is wrong here, and no try is left. You are led to the next stop.\nO_2: ")
    for k in range(1, 5):
        _, _, terminated, _, info = env.step(reply(k, ABSOLUTE[k]))
    assert terminated and info["solved"] and not info["success"]


NOWHERE, NO_CROSSING = {"current observation": "Hotel Ivory is behind you; You observe an intersection"}, {
    "current observation": "Cafe Opal is on your right"
}  # fmt: skip


@pytest.mark.parametrize(
    ("switches", "right", "wrong"),
    [
        # (all as it is, wrong landmark, crossing not stated), with the right and with a wrong action
        ((), (1.0, -0.5, 1.0), (-1.0, -2.5, -1.0)),
        (("penalty_replaces",), (1.0, -0.5, 1.0), (-1.0, -1.5, -1.0)),
        (("intersection_only",), (1.0, 1.0, 1.0), (-1.0, -1.0, -2.5)),
        (("intersection_only", "penalty_replaces"), (1.0, 1.0, 1.0), (-1.0, -1.0, -1.5)),
    ],
)
def test_the_landmark_penalty_of_the_chapter_and_of_the_program(switches, right, wrong):
    for action, expected in (("turn_direction(southeast)", right), ("forward()", wrong)):
        for changes, points in zip(({}, NOWHERE, NO_CROSSING), expected, strict=True):
            env = at(2, VirlNavigation(switches=switches))
            _, reward, _, _, info = env.step(reply(2, action, **changes))
            assert reward == points == sum(info["parts"].values())
            assert info["recognised"] == (changes != NOWHERE)
            assert info["sighted"] == (changes == {})


@pytest.mark.parametrize("reward", ["process", "outcome"])
@pytest.mark.parametrize("switches", [(), ("ungraded_last_call",)])
def test_g07_only_a_route_without_a_failed_stop_is_a_success(reward, switches):
    env = at(4, VirlNavigation(reward=reward, switches=switches))
    for trial in (1, 2):
        _, points, terminated, truncated, info = env.step(reply(4, "forward()"))
        assert points == (-1.0 if reward == "process" else 0.0) and not info["success"]
        assert (terminated, truncated) == (trial == 2 and not switches, False)
    if switches:
        _, points, terminated, truncated, info = env.step(reply(4, "stop()"))
        assert (terminated, truncated, info["class"], info["success"]) == (False, True, "step_limit", False)
        assert points == (-1.0 if reward == "process" else 0.0)
    assert at(4, VirlNavigation(reward=reward)).step(reply(4, "stop()"))[1] == 1.0


def test_a_wrong_action_carried_out_ends_the_route():
    env = at(1, VirlNavigation(tries=4, switches=["wrong_action_executed"]))
    assert env.step(reply(1, "stop()"))[1:4] == (-1.0, True, False)


def found_routes(seed, episodes, policy):
    env, seen = VirlNavigation(), []
    for episode in range(episodes):
        _, info = env.reset(seed=seed if episode == 0 else None)
        seen.append((info["city"], *info["route"]))
        for text in policy:
            if env.step(text)[2]:
                break
    return seen


def test_g04_the_kth_route_of_a_seed_does_not_depend_on_the_answers():
    first = found_routes(7, 12, ["x"] * 2)
    assert first == found_routes(7, 12, []) == found_routes(7, 12, [reply(0, ABSOLUTE[0])])
    assert len(set(first)) > 8 and first != found_routes(8, 12, [])


def test_g08_vector_environments_hold_their_own_routes():
    vector = gymnasium.vector.SyncVectorEnv([VirlNavigation] * 3)
    observations, _ = vector.reset(seed=7)
    assert list(observations) == [VirlNavigation().reset(seed=seed)[0] for seed in (7, 8, 9)] and len(set(observations)) == 3


def test_g05_what_was_returned_stays_as_it_was():
    env = at(0, VirlNavigation(tries=8))
    kept = [env.step(text) for text in ("x", reply(0, "stop()"), reply(0, ABSOLUTE[0]), "y")]
    copies = copy.deepcopy(kept)
    kept[0][4]["parts"]["action"] = 99.0
    assert env.step("x")[1] == -2.5
    assert kept[1:] == copies[1:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tries": 0}, "tries must be an integer 1..8; got 0"),
        ({"rule": "metric"}, "rule must be one of absolute"),
        ({"reward": "dense"}, "process, outcome; got dense"),
        ({"on_failure": "stop"}, "end, lead_on"),
        ({"switches": ["x"]}, "unknown switches"),
    ],
)
def test_bad_arguments_name_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        VirlNavigation(**arguments)


def test_bad_calls():
    with pytest.raises(ValueError, match="rule=metric"):
        VirlNavigation().reset(options={"route": ROUTE, "rule": "metric"})
    with pytest.raises(TypeError, match="must be text; got NoneType"):
        at(0, VirlNavigation()).step(None)


def test_options_name_a_route_of_a_role():
    options = {"cities": ["grid-0", "radial-0"], "role": "train", "seed": 5, "index": 4}
    env = VirlNavigation()
    _, info = env.reset(options=options)
    wanted = routes.items(("grid-0", "radial-0"), "train", 5, 5, RailConfig())[4]
    assert (info["city"], tuple(info["route"])) == (wanted.city, wanted.nodes)
    assert info["stops"] == len(wanted.stops)


def test_the_fleet_answers_as_the_environment_does_and_is_fast():
    rule = Rule("absolute")
    found = routes.items(("grid-0", "organic-0"), "corpus", 3, 60, RailConfig())
    for switches in ((), ("intersection_only", "penalty_replaces")):
        fleet = Fleet([course(route, rule) for route in found], switches=switches)
        envs = [VirlNavigation(switches=switches) for _ in found]
        single = [env.reset(options={"route": route})[0] for env, route in zip(envs, found, strict=True)]
        assert fleet.reset() == single
        for turn in range(24):
            texts = []
            for i, (route, k) in enumerate(zip(found, fleet.stops, strict=True)):
                gold = prompts.gold(route, route.stops[k], rule)
                bad = (gold.replace("forward()", "stop()"), gold.replace("; You observe an intersection", ""), "x", gold)
                texts.append(bad[(i + turn) % 4] if (i * 7 + turn) % 5 == 0 else gold)
            observations, rewards, ended, success = fleet.step(texts)
            for i, env in enumerate(envs):
                observation, reward, terminated, _, info = env.step(texts[i])
                assert (reward, terminated, info["success"]) == (rewards[i], ended[i], success[i])
                assert observations[i] == (env.reset(options={"route": found[i]})[0] if terminated else observation)
    texts, best = [prompts.gold(route, route.stops[0], rule) for route in found] * 5, 0.0
    fleet = Fleet([course(route, rule) for route in found] * 5)
    for _ in range(20):
        fleet.reset()
        started = time.process_time()
        for _ in range(3):
            fleet.step(texts)
        best = max(best, 3 * len(texts) / (time.process_time() - started))
    assert best > 60_000  # 240,000 to 400,000 steps a second on a free core


def test_the_parser_of_stated_observations():
    assert prompts.place_of("Cafe Opal is on your right; You observe an intersection") == ("Cafe Opal", 2, True)
    assert prompts.place_of("No landmarks nearby") == (None, -1, False)
    assert prompts.place_of("Cafe Opal is near") is None
    assert grading.parse("{").reason and grading.parse('{"action": "stop()"}').reason


def test_audit_finds_planted_holes_and_none_in_the_grader(monkeypatch, capsys):
    tried, holes = audit.audit(6)
    assert holes == [] and tried.total() > 1000
    assert audit.report(tried, [], 0.1) == 0 and audit.report(tried, ["x"], 0.1) == 1
    monkeypatch.setattr(grading, "LANDMARK", 0.0)
    assert audit.audit(1)[1]
    assert "HOLE x" in capsys.readouterr().out


def test_every_switch_does_something():
    seen = Counter()
    for switch in grading.DEFECTS:
        plain, switched = VirlNavigation(), VirlNavigation(switches=[switch])
        seen[switch] = plain.rail != switched.rail or plain.switches != switched.switches
    assert all(seen.values()) and len(seen) == 6
