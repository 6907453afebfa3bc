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


class Tables(NamedTuple):
    """What each offered action does in each state, as numpy arrays (see the module docstring for the shapes)."""

    count_S: np.ndarray  # int16, actions offered
    action_SL: np.ndarray  # int16, index into ACTIONS
    next_SL: np.ndarray  # int32, next state or WON
    pay_SL: np.ndarray  # float64, before the cost of the step and the victory
    spread_SL: np.ndarray  # float64, half-width of the stochastic mode's noise
    chance_SL: np.ndarray  # int8, index into CHANCES
    repeat_SL: np.ndarray  # int8, index into REPEATABLE or -1
    key_S: np.ndarray  # int32, what the learner sees
    room_K: np.ndarray  # int8, index into ROOMS
    legal_KA: np.ndarray  # bool


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
    shape = (len(states), max(map(len, offered)))
    tables = Tables(
        count_S=np.array([len(actions) for actions in offered], dtype=np.int16),
        action_SL=np.full(shape, -1, dtype=np.int16),
        next_SL=np.full(shape, WON, dtype=np.int32),
        pay_SL=np.zeros(shape),
        spread_SL=np.zeros(shape),
        chance_SL=np.zeros(shape, dtype=np.int8),
        repeat_SL=np.full(shape, -1, dtype=np.int8),
        key_S=np.array([keys[key(state)] for state in states], dtype=np.int32),
        room_K=np.zeros(len(keys), dtype=np.int8),
        legal_KA=np.zeros((len(keys), len(ACTIONS)), dtype=bool),
    )
    for index, (state, actions) in enumerate(zip(states, offered, strict=True)):
        tables.room_K[tables.key_S[index]] = ROOMS.index(state.room)
        for slot, action in enumerate(actions):
            outcome = rules.apply_action(state, action)
            tables.action_SL[index, slot] = ACTIONS.index(action)
            tables.next_SL[index, slot] = number.get(outcome.world, WON)
            tables.pay_SL[index, slot] = outcome.pay
            tables.spread_SL[index, slot] = outcome.spread
            tables.chance_SL[index, slot] = CHANCES.index(outcome.chance)
            if outcome.repeatable is not None:
                tables.repeat_SL[index, slot] = REPEATABLE.index(outcome.repeatable)
            tables.legal_KA[tables.key_S[index], ACTIONS.index(action)] = True
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
    offered_SL = tables.action_SL >= 0
    wins_SL = offered_SL & (tables.next_SL == WON)
    step_SL = rules.STEP_REWARD + tables.pay_SL + np.where(wins_SL, rules.VICTORY_REWARD, 0.0)
    horizon = exact_moves or max_moves
    forbidden = -np.inf
    # value_S of a state with no move left: the timeout was paid by the move before.
    value_S = np.zeros(len(tables.key_S))
    choices = []
    for left in range(1, horizon + 1):
        after_SL = value_S[tables.next_SL] * discount
        if left == 1:
            after_SL = np.full(step_SL.shape, forbidden if exact_moves else rules.TIMEOUT_REWARD)
        final_SL = np.where(wins_SL, forbidden if exact_moves and left > 1 else 0.0, after_SL)
        total_SL = np.where(offered_SL, step_SL + final_SL, -np.inf)
        choices.append(total_SL.argmax(axis=1))
        value_S = total_SL.max(axis=1)
    state, actions = 0, []
    for left in range(horizon, 0, -1):
        slot = choices[left - 1][state]
        actions.append(ACTIONS[tables.action_SL[state, slot]])
        state = tables.next_SL[state, slot]
        if state == WON:
            break
    return float(value_S[0]), actions
