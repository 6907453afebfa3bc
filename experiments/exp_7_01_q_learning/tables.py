"""The whole game as integer tables, so that the learner needs no Python objects, and exact searches over them.

Built once by walking every state that legal actions can reach (item orders told apart, because the order of items is
the order in which actions are offered). Shapes: S states, L action slots (offered actions in order), K keys, A actions.
"""

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from experiments.exp_7_01_q_learning import world as rules
from experiments.exp_7_01_q_learning.world import ACTIONS, REPEATABLE, ROOMS, World

WON = -1  # the entry of next_SL for the winning move
CHANCES = ("", "attack", "craft")


STATE = np.dtype([("count", "i8"), ("key", "i8")])  # actions offered; what the learner sees
MOVE = np.dtype(
    [
        ("action", "i8"),  # index into ACTIONS
        ("next", "i8"),  # next state or WON
        ("pay", "f8"),  # before the cost of the step and the victory
        ("spread", "f8"),  # half-width of the stochastic mode's noise
        ("chance", "i8"),  # index into CHANCES
        ("repeat", "i8"),  # index into REPEATABLE or -1
    ]
)


class Tables(NamedTuple):
    """What each offered action does in each state; arrays of records (see above and the module docstring)."""

    state_S: np.ndarray  # STATE
    move_SL: np.ndarray  # MOVE; slots from `count` on are unused
    legal_KA: np.ndarray  # bool
    room_K: np.ndarray  # int64, index into ROOMS


@lru_cache
def reachable_states() -> tuple[World, ...]:
    """All states that legal actions can reach before the victory, in breadth-first order; the start is first."""
    order = {World(): 0}
    queue = deque(order)
    while queue:
        here = queue.popleft()
        for action in rules.legal_actions(here):
            there = rules.apply_action(here, action).world
            if not there.won and there not in order:
                order[there] = len(order)
                queue.append(there)
    return tuple(order)


def keys_of(key: Callable[[World], tuple]) -> list[tuple]:
    """The distinct keys of all reachable states, in order of first sight."""
    return list(dict.fromkeys(key(state) for state in reachable_states()))


@lru_cache
def build_tables(key: Callable[[World], tuple]) -> Tables:
    """Tables for a learner that sees `key(world)`: `world.seen_key` or `world.full_key`."""
    states = reachable_states()
    number = {state: index for index, state in enumerate(states)}
    keys = {value: index for index, value in enumerate(keys_of(key))}
    offered = [rules.legal_actions(state) for state in states]
    tables = Tables(
        state_S=np.zeros(len(states), STATE),
        move_SL=np.zeros((len(states), max(map(len, offered))), MOVE),
        legal_KA=np.zeros((len(keys), len(ACTIONS)), dtype=np.bool_),
        room_K=np.zeros(len(keys), dtype=np.int64),
    )
    for index, (state, actions) in enumerate(zip(states, offered, strict=True)):
        tables.state_S[index] = (len(actions), keys[key(state)])
        tables.room_K[keys[key(state)]] = ROOMS.index(state.room)
        for slot, action in enumerate(actions):
            outcome = rules.apply_action(state, action)
            repeat = REPEATABLE.index(outcome.repeatable) if outcome.repeatable else -1
            chance, there = CHANCES.index(outcome.chance), number.get(outcome.world, WON)
            tables.move_SL[index, slot] = (
                ACTIONS.index(action), there, outcome.pay, outcome.spread, chance, repeat
            )  # fmt: skip
            tables.legal_KA[keys[key(state)], ACTIONS.index(action)] = True
    return tables


def shortest_win() -> list[str]:
    """A shortest winning list of actions, by breadth-first search over every state."""
    parents: dict[World, tuple[World, str] | None] = {World(): None}
    queue = deque(parents)
    while queue:
        here = queue.popleft()
        for action in rules.legal_actions(here):
            there = rules.apply_action(here, action).world
            if there in parents:
                continue
            parents[there] = (here, action)
            if there.won:
                return _trace(parents, there)
            queue.append(there)
    raise AssertionError("the treasure cannot be reached")


def _trace(parents: dict[World, tuple[World, str] | None], state: World) -> list[str]:
    path = []
    while (parent := parents[state]) is not None:
        state, action = parent
        path.append(action)
    return path[::-1]


def best_play(max_moves: int = rules.MAX_MOVES, discount: float = 1.0, exact_moves: int | None = None):
    """The best (discounted) return of the deterministic game and one list of actions that earns it.

    Exact: dynamic programming over (state, moves left). With `exact_moves` only games that are won on exactly that
    move count, which gives the best return of, say, an 11-move victory.

    Returns:
        (return, actions)
    """
    tables = build_tables(rules.full_key)
    move_SL = tables.move_SL
    offered_SL = np.arange(move_SL.shape[1]) < tables.state_S["count"][:, None]
    wins_SL = offered_SL & (move_SL["next"] == WON)
    step_SL = rules.STEP_REWARD + move_SL["pay"] + np.where(wins_SL, rules.VICTORY_REWARD, 0.0)
    horizon = exact_moves or max_moves
    forbidden = -np.inf
    # value_S of a state with no move left: the timeout was paid by the move before.
    value_S = np.zeros(len(move_SL))
    choices = []
    for left in range(1, horizon + 1):
        after_SL = value_S[move_SL["next"]] * discount
        if left == 1:
            after_SL = np.full(step_SL.shape, forbidden if exact_moves else rules.TIMEOUT_REWARD)
        final_SL = np.where(wins_SL, forbidden if exact_moves and left > 1 else 0.0, after_SL)
        total_SL = np.where(offered_SL, step_SL + final_SL, -np.inf)
        choices.append(total_SL.argmax(axis=1))
        value_S = total_SL.max(axis=1)
    state, actions = 0, []
    for left in range(horizon, 0, -1):
        slot = choices[left - 1][state]
        actions.append(ACTIONS[move_SL["action"][state, slot]])
        state = move_SL["next"][state, slot]
        if state == WON:
            break
    return float(value_S[0]), actions
