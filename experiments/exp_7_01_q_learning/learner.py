"""Tabular learners of the treasure hunt: Q-learning and its relatives, compiled.

One call of `train` plays all episodes of one seed. The base is the companion program's learner: a table over what the
player sees, epsilon-greedy, ties to the first action offered, a row that was never changed played at random, and the
timeout treated as an end (no bootstrap). Departures from the textbook forms: none for SARSA (Rummery and Niranjan
1994), double Q-learning (van Hasselt 2010) and Dyna-Q (Sutton 1990), but all share the rules just named.

Shapes: S states, L action slots, K keys (times moves made, if the learner sees the clock), A actions, E episodes,
W windows (evaluations during training), G evaluation games.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from experiments.exp_7_01_q_learning import mersenne
from experiments.exp_7_01_q_learning import world as rules
from experiments.exp_7_01_q_learning.tables import WON

ALGORITHMS = ("q", "sarsa", "double_q", "dyna_q")
Q, SARSA, DOUBLE_Q, DYNA_Q = range(4)
ROOM_COUNT = len(rules.ROOMS)
ACTION_COUNT = len(rules.ACTIONS)
STEP, VICTORY, TIMEOUT = rules.STEP_REWARD, rules.VICTORY_REWARD, rules.TIMEOUT_REWARD
FUMBLE_P, FUMBLE = rules.FUMBLE_PROBABILITY, rules.FUMBLE_REWARD
EPISODE_SEEDS = 10_001  # the companion program draws a seed in 0..10000 for every episode
ATTACK, CRAFT = 1, 2  # indices into tables.CHANCES
NEVER_SEEN = -2


class Rules(NamedTuple):
    """One arm: learner and game. Units: alpha and epsilon in [0, 1], decay per episode, rewards in points."""

    algorithm: int
    alpha: float
    gamma: float
    epsilon: float
    epsilon_decay: float
    epsilon_min: float
    initial_value: float
    planning_steps: int
    max_moves: int
    sees_clock: bool
    bootstrap_timeout: bool
    pays_once: bool
    stochastic: bool
    reseed_fault: bool  # global random numbers restarted in every episode from one of 10,001 seeds
    limit_fault: bool  # the last move is not carried out: it costs 10 points and ends the game


class Run(NamedTuple):
    """What happened. `room_value_WR` is the highest value in any visited state of a room (-inf: never visited)."""

    won_E: np.ndarray
    return_E: np.ndarray
    moves_E: np.ndarray
    repeats_E: np.ndarray  # pick-ups beyond the first of each item
    paying_E: np.ndarray  # steps with a reward above zero
    seed_E: np.ndarray  # the seed drawn for the episode
    states_W: np.ndarray
    room_value_WR: np.ndarray
    greedy_won_W: np.ndarray
    greedy_return_W: np.ndarray
    greedy_moves_W: np.ndarray
    greedy_repeats_W: np.ndarray
    path_WT: np.ndarray  # actions of the first greedy game, -1 after its end
    q_NKA: np.ndarray


class Model(NamedTuple):
    """What Dyna-Q remembers of each state and action: the last reward and next key (-1: the game ended)."""

    pairs_M2: np.ndarray  # the pairs seen, in order of first sight
    count_1: np.ndarray
    reward_KA: np.ndarray
    next_KA: np.ndarray


@njit(cache=True)
def _key(tables, settings, state, move):
    key = tables.key_S[state]
    return key * (settings.max_moves + 1) + move if settings.sees_clock else key


@njit(cache=True)
def _choose(tables, settings, q_NKA, state, key, epsilon, mt):
    """The slot to play: epsilon-greedy, first maximum, a row of untouched values at random."""
    count = tables.count_S[state]
    if epsilon > 0.0 and mersenne.uniform(mt) < epsilon:
        return mersenne.below(mt, count)
    untouched = True
    best, choice = -np.inf, 0
    for slot in range(count):
        value = 0.0
        for n in range(q_NKA.shape[0]):
            value += q_NKA[n, key, tables.action_SL[state, slot]]
        if value != settings.initial_value * q_NKA.shape[0]:
            untouched = False
        if value > best:
            best, choice = value, slot
    return mersenne.below(mt, count) if untouched else choice


@njit(cache=True)
def _pay(tables, settings, state, slot, paid, noise_4):
    """(pay, acts): the action's pay, and whether its effect happens."""
    pay = tables.pay_SL[state, slot]
    acts = True
    if settings.stochastic:
        chance = tables.chance_SL[state, slot]
        spread = tables.spread_SL[state, slot]
        if chance == ATTACK:
            if noise_4[2] < 0.1:
                pay = 30.0
            elif noise_4[2] >= 0.95:
                pay, acts = -0.5, False
        elif chance == CRAFT:
            if noise_4[2] < 0.9:
                pay = 10.0 + (-1.0 + 3.0 * noise_4[3])
            else:
                pay, acts = -0.2, False
        elif spread > 0.0:
            pay = pay + (-spread + 2.0 * spread * noise_4[3])
    bit = tables.repeat_SL[state, slot]
    if settings.pays_once and bit >= 0 and (paid >> bit) & 1:
        pay = 0.0
    return pay, acts


@njit(cache=True)
def _step(tables, settings, state, slot, move, paid, noise_4):
    """One move. Returns (next state or WON, reward, game over, events already paid as bits, repeated pick-up)."""
    last = move + 1 >= settings.max_moves
    if last and settings.limit_fault:
        return state, TIMEOUT, True, paid, 0
    reward = STEP
    if settings.stochastic:
        reward = STEP + (-0.1 + 0.2 * noise_4[0])
        if noise_4[1] < FUMBLE_P:
            return state, reward + (TIMEOUT if last else FUMBLE), last, paid, 0
    pay, acts = _pay(tables, settings, state, slot, paid, noise_4)
    reward += pay
    there = tables.next_SL[state, slot] if acts else state
    bit = tables.repeat_SL[state, slot]
    repeated = 0
    if bit >= 0:
        repeated = 1 if bit < 4 and (paid >> bit) & 1 else 0
        paid |= 1 << bit
    if there == WON:
        return there, reward + VICTORY, True, paid, repeated
    if last:
        reward += TIMEOUT
    return there, reward, last, paid, repeated


@njit(cache=True)
def _best(tables, settings, q_KA, by_KA, key):
    """Value in `q_KA` of the action that is best by `by_KA` (the same table but in double Q-learning)."""
    legal = tables.legal_KA[key // (settings.max_moves + 1) if settings.sees_clock else key]
    best, value = -np.inf, 0.0
    for action in range(ACTION_COUNT):
        if legal[action] and by_KA[key, action] > best:
            best, value = by_KA[key, action], q_KA[key, action]
    return value


@njit(cache=True)
def _plan(tables, settings, q_KA, model, mt):
    """Dyna-Q: repeat remembered steps, drawn evenly among the pairs of state and action seen so far."""
    for _ in range(settings.planning_steps):
        pair = mersenne.below(mt, model.count_1[0])
        key, action = model.pairs_M2[pair, 0], model.pairs_M2[pair, 1]
        target = model.reward_KA[key, action]
        next_key = model.next_KA[key, action]
        if next_key >= 0:
            target += settings.gamma * _best(tables, settings, q_KA, q_KA, next_key)
        q_KA[key, action] += settings.alpha * (target - q_KA[key, action])


@njit(cache=True)
def _remember(model, key, action, reward, next_key):
    if model.next_KA[key, action] == NEVER_SEEN:
        model.pairs_M2[model.count_1[0], 0] = key
        model.pairs_M2[model.count_1[0], 1] = action
        model.count_1[0] += 1
    model.reward_KA[key, action] = reward
    model.next_KA[key, action] = next_key


@njit(cache=True)
def _play(tables, settings, q_NKA, model, seen_K, epsilon, noise_T4, mt):
    """One training episode. Returns (won, return, moves, repeated pick-ups, paying steps)."""
    state, paid = 0, 0
    total, repeats, paying = 0.0, 0, 0
    key = _key(tables, settings, state, 0)
    slot = _choose(tables, settings, q_NKA, state, key, epsilon, mt)
    for move in range(settings.max_moves):
        action = tables.action_SL[state, slot]
        there, reward, over, paid, repeated = _step(tables, settings, state, slot, move, paid, noise_T4[move])
        seen_K[key] = True
        total += reward
        repeats += repeated
        paying += reward > 0.0
        next_key, next_slot = -1, 0
        if there != WON and (not over or settings.bootstrap_timeout):
            next_key = _key(tables, settings, there, move + 1)
        if not over:
            seen_K[next_key] = True
        if settings.algorithm == SARSA and next_key >= 0:
            next_slot = _choose(tables, settings, q_NKA, there, next_key, epsilon, mt)
        learnt = 0
        if settings.algorithm == DOUBLE_Q and mersenne.uniform(mt) < 0.5:
            learnt = 1
        target = reward
        if next_key >= 0:
            if settings.algorithm == SARSA:
                target += settings.gamma * q_NKA[0, next_key, tables.action_SL[there, next_slot]]
            else:
                target += settings.gamma * _best(tables, settings, q_NKA[q_NKA.shape[0] - 1 - learnt], q_NKA[learnt], next_key)
        q_NKA[learnt, key, action] += settings.alpha * (target - q_NKA[learnt, key, action])
        if settings.algorithm == DYNA_Q:
            _remember(model, key, action, reward, next_key)
            _plan(tables, settings, q_NKA[0], model, mt)
        if over:
            return there == WON, total, move + 1, repeats, paying
        if settings.algorithm != SARSA:
            next_slot = _choose(tables, settings, q_NKA, there, next_key, epsilon, mt)
        state, key, slot = there, next_key, next_slot
    return False, total, settings.max_moves, repeats, paying


@njit(cache=True)
def _greedy(tables, settings, q_NKA, noise_T4, path_T, mt):
    """One game without exploration or learning. Returns (won, return, moves, repeated pick-ups); fills `path_T`."""
    state, paid, total, repeats = 0, 0, 0.0, 0
    for move in range(settings.max_moves):
        path_T[move] = -1
    for move in range(settings.max_moves):
        slot = _choose(tables, settings, q_NKA, state, _key(tables, settings, state, move), 0.0, mt)
        path_T[move] = tables.action_SL[state, slot]
        state, reward, over, paid, repeated = _step(tables, settings, state, slot, move, paid, noise_T4[move])
        total += reward
        repeats += repeated
        if over:
            return state == WON, total, move + 1, repeats
    return False, total, settings.max_moves, repeats


@njit(cache=True)
def _evaluate(tables, settings, q_NKA, noise_GT4, run, w, mt):
    """Plays the greedy games of window `w` and stores their means; the path kept is the first game's."""
    games = noise_GT4.shape[0]
    for game in range(games - 1, -1, -1):
        won, total, moves, repeats = _greedy(tables, settings, q_NKA, noise_GT4[game], run.path_WT[w], mt)
        run.greedy_won_W[w] += won / games
        run.greedy_return_W[w] += total / games
        run.greedy_moves_W[w] += moves / games
        run.greedy_repeats_W[w] += repeats / games


@njit(cache=True)
def _room_values(tables, settings, q_NKA, seen_K, value_R):
    """Fills the highest value of any visited state of each room (the mean of the tables in double Q-learning)."""
    for key in range(seen_K.shape[0]):
        if not seen_K[key]:
            continue
        base = key // (settings.max_moves + 1) if settings.sees_clock else key
        room = tables.room_K[base]
        for action in range(ACTION_COUNT):
            if tables.legal_KA[base, action]:
                value = 0.0
                for n in range(q_NKA.shape[0]):
                    value += q_NKA[n, key, action] / q_NKA.shape[0]
                value_R[room] = max(value_R[room], value)


@njit(cache=True)
def _train(tables, settings, seed, window, noise_ET4, noise_GT4, run, model, seen_K, mt, greedy_mt):
    mersenne.reseed(mt, seed)
    epsilon = settings.epsilon
    for episode in range(len(run.won_E)):
        run.seed_E[episode] = mersenne.below(mt, EPISODE_SEEDS)
        if settings.reseed_fault:
            mersenne.reseed(mt, run.seed_E[episode])
        noise_T4 = noise_ET4[episode if settings.stochastic else 0]
        won, total, moves, repeats, paying = _play(tables, settings, run.q_NKA, model, seen_K, epsilon, noise_T4, mt)
        run.won_E[episode] = won
        run.return_E[episode] = total
        run.moves_E[episode] = moves
        run.repeats_E[episode] = repeats
        run.paying_E[episode] = paying
        epsilon = max(settings.epsilon_min, epsilon * settings.epsilon_decay)
        if (episode + 1) % window == 0:
            w = (episode + 1) // window - 1
            for key in range(len(seen_K)):
                run.states_W[w] += seen_K[key]
            _room_values(tables, settings, run.q_NKA, seen_K, run.room_value_WR[w])
            mersenne.reseed(greedy_mt, seed + 1)
            _evaluate(tables, settings, run.q_NKA, noise_GT4, run, w, greedy_mt)


def train(tables, settings, seed, episodes, window, noise_ET4, noise_GT4):
    """All episodes of one seed, with greedy games after every `window` episodes. Returns a `Run`.

    `tables` is a `Tables` and `settings` a `Rules`; `noise_ET4` [E or 1, moves, 4] holds the game's random numbers in
    stochastic mode (not read otherwise), `noise_GT4` those of the evaluation games. The learner's own random numbers
    are those of `random.Random(seed)`; evaluation uses another stream, so that it never changes the training.
    """
    keys = len(tables.legal_KA) * (settings.max_moves + 1 if settings.sees_clock else 1)
    windows = episodes // window
    run = Run(
        won_E=np.zeros(episodes, np.bool_), return_E=np.zeros(episodes), moves_E=np.zeros(episodes, np.int64),
        repeats_E=np.zeros(episodes, np.int64), paying_E=np.zeros(episodes, np.int64),
        seed_E=np.zeros(episodes, np.int64), states_W=np.zeros(windows, np.int64),
        room_value_WR=np.full((windows, ROOM_COUNT), -np.inf), greedy_won_W=np.zeros(windows),
        greedy_return_W=np.zeros(windows), greedy_moves_W=np.zeros(windows), greedy_repeats_W=np.zeros(windows),
        path_WT=np.full((windows, settings.max_moves), -1, np.int64),
        q_NKA=np.full((2 if settings.algorithm == DOUBLE_Q else 1, keys, ACTION_COUNT), settings.initial_value),
    )  # fmt: skip
    modelled = keys if settings.algorithm == DYNA_Q else 1
    model = Model(
        pairs_M2=np.zeros((modelled * ACTION_COUNT, 2), np.int64),
        count_1=np.zeros(1, np.int64),
        reward_KA=np.zeros((modelled, ACTION_COUNT)),
        next_KA=np.full((modelled, ACTION_COUNT), NEVER_SEEN, np.int64),
    )
    seen_K = np.zeros(keys, np.bool_)
    mt, greedy_mt = mersenne.new_state(), mersenne.new_state()
    _train(tables, settings, seed, window, noise_ET4, noise_GT4, run, model, seen_K, mt, greedy_mt)
    return run
