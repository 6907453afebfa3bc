"""Experiment 7-1's game: every reward, every hidden rule, seeding (G04), observations (G05), endings (G01, G07)."""

import copy
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from experiments.exp_7_01_q_learning import tables, world
from experiments.exp_7_01_q_learning.env import ENV_ID, TreasureHunt
from experiments.exp_7_01_q_learning.world import ACTIONS, World, apply_action, legal_actions

WIN = [
    "go east", "take red key", "take magic crystal", "go west", "take rusty sword", "go north", "go north",
    "try crafting", "attack with silver sword", "go east", "take dragon's treasure",
]  # fmt: skip
GUARDED = World(room="guard_room", locked=False)
SILVER = ("red key", "silver sword")


def hold(*items, **changes):
    """A world in which the player holds these items."""
    here = World(**changes)
    floors = tuple(tuple(item for item in floor if item not in items) for floor in here.floors)
    return here._replace(inventory=items, floors=floors)


# What one move costs or pays in deterministic mode, the step's -0.5 not included.
REWARDS = [
    (World(), "go north", 1.0),  # legal move
    (World(), "go west", -1.0),  # illegal move
    (GUARDED, "go south", -1.0),  # the guard blocks
    (World(room="hallway"), "go north", -0.5),  # locked, no key
    (hold("red key", room="hallway"), "go north", 5.0),  # unlock and move
    (World(room="storage"), "take red key", 5.0),
    (World(), "take rusty sword", 3.0),
    (hold("rusty sword")._replace(inventory=(), floors=(("silver sword",), (), (), (), ())), "take silver sword", 3.0),
    (World(room="storage"), "take magic crystal", 2.0),
    (World(room="treasure_room", locked=False, guard=False), "take dragon's treasure", 200.0),  # 100 and the victory
    (hold(*SILVER, room="guard_room", locked=False), "attack with silver sword", 20.0),
    (hold("rusty sword", room="guard_room", locked=False), "attack with rusty sword", -2.0),
    (World(), "attack with rusty sword", -1.0),  # nothing to attack
    (GUARDED, "attack with silver sword", -1.0),  # no such weapon
    (GUARDED, "attack with red key", -1.0),
    (hold("rusty sword", "magic crystal"), "try crafting", 10.0),
    (hold("rusty sword", "red key"), "try crafting", -0.5),
    (World(), "try crafting", -0.5),
    (hold("red key"), "use red key", 0.0),
    (hold("magic crystal"), "use magic crystal", -0.5),
    (World(), "use red key", -0.5),  # item not present
    (World(), "take red key", -0.5),  # item not present
    (hold("red key"), "drop red key", 0.0),
    (World(), "drop red key", 0.0),
    (World(), "look around", 0.0),
    (World(), "check inventory", 0.0),
    (World(), "dance", -1.0),  # unknown action
]


@pytest.mark.parametrize("here, action, pay", REWARDS, ids=[f"{i}-{case[1]}" for i, case in enumerate(REWARDS)])
def test_every_row_of_the_reward_table(here, action, pay):
    env = TreasureHunt()
    env.reset(seed=0)
    env.world = here
    _, reward, terminated, truncated, info = env.step(action)
    assert reward == -0.5 + pay
    assert sum(info["parts"].values()) == reward
    assert (terminated, truncated) == (action == "take dragon's treasure", False)


def test_the_key_opens_by_itself_and_is_kept():
    here = hold("red key", room="hallway")
    there = apply_action(here, "go north").world
    assert (there.room, there.locked, there.inventory) == ("guard_room", False, ("red key",))
    assert apply_action(World(room="hallway"), "go north").world == World(room="hallway")
    assert apply_action(here, "use red key").world == here
    # Once open, the door stays open without the key.
    assert apply_action(World(room="hallway", locked=False), "go north").pay == 1.0


def test_only_the_silver_sword_beats_the_guard():
    rusty = hold("rusty sword", room="guard_room", locked=False)
    silver = hold(*SILVER, room="guard_room", locked=False)
    assert apply_action(rusty, "attack with rusty sword").world.guard
    assert not apply_action(silver, "attack with silver sword").world.guard


@pytest.mark.parametrize("way", ["south", "east", "north", "west"])
def test_the_living_guard_blocks_every_exit(way):
    assert apply_action(GUARDED, f"go {way}")[:2] == (GUARDED, -1.0)
    if way in world.EXITS["guard_room"]:
        assert apply_action(GUARDED._replace(guard=False), f"go {way}").world.room == world.EXITS["guard_room"][way]


def test_crafting_consumes_both_ingredients_and_nothing_else():
    crafted = apply_action(hold("rusty sword", "red key", "magic crystal"), "try crafting").world
    assert crafted.inventory == ("red key", "silver sword")


def test_offered_actions_and_their_order():
    assert legal_actions(World()) == ["go north", "go east", "take rusty sword", "look around", "check inventory"]
    armed = hold("silver sword", "red key", room="guard_room", locked=False)
    assert legal_actions(armed) == [
        "go south", "go east", "use silver sword", "drop silver sword", "use red key", "drop red key",
        "attack with silver sword", "look around", "check inventory", "try crafting",
    ]  # fmt: skip
    assert len(ACTIONS) == 24 == len(set(ACTIONS))


def test_dropped_items_lie_where_they_were_dropped():
    here = apply_action(hold("red key", room="hallway"), "drop red key").world
    assert here.inventory == () and here.floor == ("red key",)
    assert "take red key" in legal_actions(here)


@pytest.mark.parametrize("options", [{}, {"stochastic": True}, {"pays_once": True}, {"render_mode": "ansi"}])
def test_gymnasiums_checker_has_no_complaint(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(ENV_ID, **options).unwrapped)


def test_masks_are_the_offered_actions_in_every_state():
    env = TreasureHunt()
    env.reset(seed=0)
    for state in tables.reachable_states()[::7]:
        env.world = state
        mask = env.action_masks()
        assert mask.dtype == bool and [ACTIONS[i] for i in np.flatnonzero(mask)] == sorted(
            legal_actions(state), key=ACTIONS.index
        )
        assert env.describe("x") in env.observation_space


def test_numbers_and_names_are_the_same_actions():
    by_name, by_number = TreasureHunt(), TreasureHunt()
    by_name.reset(seed=0)
    by_number.reset(seed=0)
    for action in WIN:
        a, b = by_name.step(f" {action.upper()} "), by_number.step(ACTIONS.index(action))
        assert a[:4] == b[:4]
    with pytest.raises(RuntimeError, match="reset"):
        by_name.step("look around")


def test_g01_g07_endings():
    """The goal alone is success: ends by the limit are not, whatever was earned; a last-move win is terminated only."""
    env = TreasureHunt()
    for first in (0, 39):
        env.reset(seed=0)
        for _ in range(first):
            env.step("look around")
        flags = [env.step(action)[2:4] for action in WIN]
        assert flags == [(False, False)] * 10 + [(True, False)]
        assert env.moves == first + 11
    # One move too late, with a high return, after the best of farming, and with nothing but losses.
    farming = ["take rusty sword", "drop rusty sword"] * 25
    for actions, earned in (
        (["look around"] * 40 + WIN, True), (farming, True), (["look around"] * 50, False), (["dance"] * 50, False),
    ):  # fmt: skip
        env.reset(seed=0)
        total = 0.0
        for number, action in enumerate(actions[:50], start=1):
            _, reward, terminated, truncated, info = env.step(action)
            total += reward
            assert (terminated, truncated) == (False, number == 50)
            assert not info["success"] and info["reason"] == ("out of moves" if number == 50 else "playing")
        assert info["parts"]["timeout"] == -10.0 and reward <= -8.0
        assert (total > 0) == earned


def test_g05_observations_masks_and_infos_do_not_change_later():
    env = TreasureHunt(stochastic=True)
    observation, info = env.reset(seed=3)
    kept, copies = [(observation, info)], [copy.deepcopy((observation, info))]
    mask = env.action_masks()
    mask[:] = False
    assert env.action_masks().any()
    info["actions"].clear()
    copies[0][1]["actions"].clear()
    for move in range(20):
        observation, _, _, _, info = env.step(int(np.flatnonzero(env.action_masks())[move % 4]))
        kept.append((observation, info))
        copies.append(copy.deepcopy((observation, info)))
    for (text, info), (old_text, old_info) in zip(kept, copies, strict=True):
        assert text == old_text and (info["action_mask"] == old_info["action_mask"]).all()
        assert {k: v for k, v in info.items() if k != "action_mask"} == {
            k: v for k, v in old_info.items() if k != "action_mask"
        }


def rewards_of(env, actions):
    return [env.step(action)[1] for action in actions]


def test_g04_seeding():
    """Sub-environments differ, reset() goes on in the stream, and episode k never depends on earlier lengths."""
    looks = ["look around"] * 5
    single = {}
    for seed in (7, 8, 9):
        env = TreasureHunt(stochastic=True)
        env.reset(seed=seed)
        single[seed] = rewards_of(env, looks)
    assert single[7] != single[8] != single[9]
    vector = gymnasium.make_vec(ENV_ID, num_envs=3, vectorization_mode="sync", vector_kwargs=None, stochastic=True)
    vector.reset(seed=7)
    steps = [vector.step(np.full(3, ACTIONS.index("look around")))[1] for _ in looks]
    assert np.array_equal(np.array(steps).T, np.array([single[seed] for seed in (7, 8, 9)]))

    def third_episode(lengths):
        env = TreasureHunt(stochastic=True)
        env.reset(seed=11)
        for length in lengths:
            rewards_of(env, ["look around"] * length)
            env.reset()
        return rewards_of(env, looks)

    assert third_episode([0, 0]) == third_episode([50, 3]) != third_episode([0])
    again = TreasureHunt(stochastic=True)
    again.reset(seed=11)
    first = rewards_of(again, looks)
    again.reset(seed=11)
    assert rewards_of(again, looks) == first


def test_options_at_reset_and_unknown_ones():
    env = TreasureHunt()
    env.reset(seed=0, options={"max_moves": 2, "pays_once": True, "seed": 5})
    assert [env.step("take rusty sword")[3], env.step("drop rusty sword")[3]] == [False, True]
    with pytest.raises(ValueError, match=r"pays_twice.*allowed: stochastic, pays_once, max_moves"):
        env.reset(options={"pays_twice": True})


def test_stochastic_mode_by_value():
    env = TreasureHunt(stochastic=True)
    silver, ready = hold(*SILVER, room="guard_room", locked=False), hold("rusty sword", "magic crystal")

    def step(here, action, *noise):
        env.reset(seed=0)
        env.set_noise(np.array([noise] * 50))
        env.world = here
        reward = env.step(action)[1]
        return reward, env.world

    assert step(World(), "look around", 0.25, 0.5, 0, 0)[0] == -0.5 + (-0.1 + 0.2 * 0.25)
    assert step(World(), "take rusty sword", 0.5, 0.029, 0, 0) == (-0.7, World())  # a fumble
    assert step(World(), "take rusty sword", 0.5, 0.03, 0, 0.75)[0] == -0.5 + 3.25
    assert step(silver, "attack with silver sword", 0.5, 0.5, 0.09, 0)[0] == 29.5  # critical
    assert step(silver, "attack with silver sword", 0.5, 0.5, 0.94, 0)[0] == 19.5
    assert step(silver, "attack with silver sword", 0.5, 0.5, 0.95, 0) == (-1.0, silver)  # glances off
    assert step(ready, "try crafting", 0.5, 0.5, 0.89, 0.5)[0] == -0.5 + 10.5
    assert step(ready, "try crafting", 0.5, 0.5, 0.9, 0.5) == (-0.7, ready)  # fizzles, nothing consumed


def test_shortest_victory_and_best_returns_by_exact_search():
    assert tables.shortest_win() == WIN
    assert tables.best_play(exact_moves=10)[0] == -np.inf
    assert tables.best_play(exact_moves=11)[0] == 243.5
    assert tables.best_play(exact_moves=12)[0] == 243.0 + 0.5 - 0.5
    best, actions = tables.best_play()
    env = TreasureHunt()
    env.reset(seed=0)
    outcomes = [env.step(action) for action in actions]
    assert best == 319.5 == sum(outcome[1] for outcome in outcomes)
    assert outcomes[-1][2] and len(actions) == 49
    assert actions.count("take red key") == 20  # the best player farms


def test_every_state_agrees_with_its_tables():
    built = tables.build_tables(world.seen_key)
    states = tables.reachable_states()
    assert (len(states), len(built.legal_KA)) == (726, 148)
    for index in range(0, len(states), 5):
        offered = legal_actions(states[index])
        assert built.state_S["count"][index] == len(offered)
        for slot, action in enumerate(offered):
            move, outcome = built.move_SL[index, slot], apply_action(states[index], action)
            assert ACTIONS[move["action"]] == action and move["pay"] == outcome.pay
            assert outcome.world.won if move["next"] == tables.WON else states[move["next"]] == outcome.world


def test_farming_pays_and_does_not_when_each_event_pays_once():
    loop = ["drop red key", "take red key"] * 5
    for pays_once, earned in ((False, 4.0), (True, -1.0)):
        env = TreasureHunt(pays_once=pays_once)
        env.reset(seed=0)
        rewards_of(env, ["go east", "take red key"])
        assert sum(rewards_of(env, loop)) == 5 * earned
        # Walking to and fro pays as well.
        env.reset(seed=0)
        assert rewards_of(env, ["go east", "go west"] * 2) == ([0.5] * 4 if not pays_once else [0.5, 0.5, -0.5, -0.5])
        # The 11-move victory earns the same under both rules.
        env.reset(seed=0)
        assert sum(rewards_of(env, WIN)) == 243.5
