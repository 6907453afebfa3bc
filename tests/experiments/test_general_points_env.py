"""GeneralPoints-v0: episodes, feedback, limits, seeding, ownership of what it returns, errors, speed, the audit."""

import copy
import json
import time
import warnings

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from common.cards import grading, hands, prompts
from common.cards.env import ENV_ID, GeneralPoints
from experiments.exp_7_11_general_points import audit

CARDS = ("4", "3", "2", "K")
TASK = grading.deal(CARDS, (10, 10, 10))
SOURCE = frozenset(grading.DEFECTS)


def reply(formula, task=TASK, **changes):
    return json.dumps({"cards": list(task.cards), "number": list(task.values), "formula": formula} | changes)


def gold(task=TASK, trace=True, place=0):
    return prompts.answer(task.cards, task.values, hands.solve(task.values)[place].steps, task.target, trace)


def test_env_checker_passes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(ENV_ID, verify_iter=3).unwrapped)


def test_one_turn_episode():
    env = GeneralPoints()
    observation, info = env.reset(options={"cards": list(CARDS), "face_values": [11, 12, 13]})
    assert observation == prompts.prompt(CARDS, 24, (11, 12, 13), True)
    assert info["values"] == [4, 3, 2, 13] and info["success"] is False
    task = grading.deal(CARDS, (11, 12, 13))
    observation, reward, terminated, truncated, info = env.step(gold(task))
    assert (observation, reward, terminated, truncated) == ("", 5.0, True, False)
    assert info["success"] and info["reason"] == "correct" and info["parts"] == {"correct": 5.0}
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(gold(task))


def test_feedback_turns_and_the_last_trial():
    env = GeneralPoints(verify_iter=3)
    env.reset(options={"cards": CARDS})
    observation, reward, terminated, truncated, info = env.step(reply("4*3-2+10"))
    assert (reward, terminated, truncated, info["class"], info["trial"]) == (-1.0, False, False, "no_solution", 1)
    assert observation == prompts.feedback(CARDS, "no_solution")
    assert observation.startswith("You failed this trial because ") and "begins a solution" not in observation
    assert observation.endswith('Cards: ["4", "3", "2", "K"]')
    assert env.step("nothing")[:3] == (prompts.feedback(CARDS, "no_answer"), -3.0, False)
    observation, reward, terminated, truncated, info = env.step(reply("4*3"))
    assert (observation, reward, terminated, truncated, info["success"]) == ("", -2.0, True, False, False)


def test_leaking_feedback_names_the_right_prefix_only_for_legal_formulas_of_the_right_numbers():
    env = GeneralPoints(verify_iter=5, switches=["leaking_feedback"])
    env.reset(options={"cards": CARDS})
    assert env.step(reply("((4*3)+2)-10=24"))[0] == prompts.feedback(CARDS, "no_solution", "((4*3)+2)")
    assert env.step(reply("4*3"))[0] == prompts.feedback(CARDS, "number")


GOAL, WRONG, NOTHING = gold(), reply("4*3-2+10"), "no answer"


@pytest.mark.parametrize("reward", ["ladder", "outcome"])
@pytest.mark.parametrize("switches", [(), ("ungraded_last_call",), tuple(SOURCE)])
@pytest.mark.parametrize(
    "script", [(GOAL,), (WRONG, GOAL), (WRONG, WRONG), (NOTHING, NOTHING), (WRONG, WRONG, GOAL), (NOTHING,) * 3]
)
def test_g07_only_a_graded_right_answer_is_a_success(script, switches, reward):
    env = GeneralPoints(verify_iter=2, switches=switches, reward=reward)
    env.reset(options={"cards": CARDS})
    for place, text in enumerate(script):
        _, points, terminated, truncated, info = env.step(text)
        graded = place < 2
        assert info["success"] == (graded and text == GOAL)
        assert (points > 0) == info["success"]
        if not graded:
            assert (info["class"], truncated, terminated) == ("step_limit", True, False)
            assert points == (-1.0 if reward == "ladder" else 0.0)
        if terminated or truncated:
            break
        if place == 1:
            assert "ungraded_last_call" in switches


def test_outcome_reward_is_one_or_zero():
    env = GeneralPoints(reward="outcome")
    for text, expected in ((GOAL, 1.0), (WRONG, 0.0), (NOTHING, 0.0)):
        env.reset(options={"cards": CARDS})
        assert env.step(text)[1] == expected


def deals(seed, episodes, policy, env=None):
    env = env or GeneralPoints(verify_iter=4)
    found = []
    for episode in range(episodes):
        _, info = env.reset(seed=seed if episode == 0 else None)
        found.append(tuple(info["cards"]))
        for text in policy:
            _, _, terminated, truncated, _ = env.step(text)
            if terminated or truncated:
                break
    return found


def test_g04_the_kth_deal_of_a_seed_does_not_depend_on_the_answers():
    first = deals(7, 20, ["x"] * 4)
    assert first == deals(7, 20, []) == deals(7, 20, [GOAL, "y"])
    assert len(set(first)) > 15
    assert first != deals(8, 20, [])
    assert all(hands.solve(grading.deal(cards, (10, 10, 10)).values) for cards in first)


def test_g04_g08_vector_environments_hold_their_own_deals():
    vector = gymnasium.vector.SyncVectorEnv([GeneralPoints] * 4)
    observations, _ = vector.reset(seed=7)
    single = []
    for seed in range(7, 11):
        observation, _ = GeneralPoints().reset(seed=seed)
        single.append(observation)
    assert list(observations) == single and len(set(single)) == 4


def test_g05_what_was_returned_stays_as_it_was():
    env = GeneralPoints(verify_iter=10)
    observation, info = env.reset(seed=1)
    kept, copies = [(observation, info)], [copy.deepcopy((observation, info))]
    info["cards"].append("A")
    info["cards"].pop()
    for place in range(9):
        observation, reward, _, _, info = env.step(["x", WRONG, reply("4*3")][place % 3])
        kept.append((observation, info))
        copies.append(copy.deepcopy((observation, info)))
        assert reward == sum(info["parts"].values())
    assert kept == copies
    before = env.step("x")[4]
    before["parts"]["no_answer"] = 99.0
    env.reset(seed=1)
    assert env.step("x")[1] == -3.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"verify_iter": 0}, "verify_iter must be an integer 1..10; got 0"),
        ({"verify_iter": 11}, "verify_iter"),
        ({"reward": "dense"}, "ladder or outcome; got dense"),
        ({"switches": ["leaky"]}, "unknown switches"),
    ],
)
def test_bad_arguments_name_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        GeneralPoints(**arguments)


@pytest.mark.parametrize(
    "options", [{"cards": ["4", "3", "2"]}, {"cards": ["4", "3", "2", "11"]}, {"face_values": [10, 10]}, {"target": 0}]
)
def test_bad_deals_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        GeneralPoints().reset(options={"cards": CARDS} | options)


def test_an_answer_that_is_no_text_is_an_error_of_the_caller():
    env = GeneralPoints()
    env.reset(seed=0)
    with pytest.raises(TypeError, match="must be text; got NoneType"):
        env.step(None)


def test_a_step_is_fast():
    env = GeneralPoints()
    best = 1.0
    for _ in range(10):
        started = time.process_time()
        for _ in range(50):
            env.reset(options={"cards": CARDS})
            env.step(GOAL)
        best = min(best, (time.process_time() - started) / 50)
    assert best < 300e-6  # about 40 microseconds on a free core; the bound allows for a busy machine


def test_audit_finds_planted_holes_and_none_in_the_grader(tmp_path, capsys):
    rule = hands.TRAINING_RULE
    some = list(audit.problems(rule))[::100]
    cases = [case for problem in some for case in audit.gold(problem)]
    cases += [case for k, problem in enumerate(some) for case in audit.mutations(problem, some[k - 1])]
    tried, holes = audit.audit(iter(cases))
    assert holes == [] and tried.total() == len(cases) > 800
    planted = [cases[0]._replace(must_score=False), cases[0]._replace(text="24"), cases[0]]
    tried, holes = audit.audit(iter(planted))
    assert len(holes) == 2
    assert audit.report(tried, holes, tmp_path / "marker", 0.1) == 1
    assert audit.report(tried, [], tmp_path / "marker", 0.1) == 0
    (tmp_path / "marker").touch()
    assert audit.report(tried, [], tmp_path / "marker", 0.1) == 1
    assert "2 holes" in capsys.readouterr().out
