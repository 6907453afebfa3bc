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
ACTION_COUNT = len(rules.ACTIONS)
STEP, VICTORY, TIMEOUT = rules.STEP_REWARD, rules.VICTORY_REWARD, rules.TIMEOUT_REWARD
FUMBLE_P, FUMBLE = rules.FUMBLE_PROBABILITY, rules.FUMBLE_REWARD
EPISODE_SEEDS = np.int64(10_001)  # the companion program draws a seed in 0..10000 for every episode
ATTACK, CRAFT = 1, 2  # indices into tables.CHANCES
NEVER_SEEN = -2
PICKUPS = 4  # the first entries of world.REPEATABLE


# One arm: learner and game. Units: alpha and epsilon in [0, 1], decay per episode, rewards in points.
RULES = np.dtype(
    [
        ("algorithm", "i8"),  # index into ALGORITHMS
        ("alpha", "f8"),
        ("gamma", "f8"),
        ("epsilon", "f8"),
        ("epsilon_decay", "f8"),
        ("epsilon_min", "f8"),
        ("initial_value", "f8"),
        ("planning_steps", "i8"),
        ("max_moves", "i8"),
        ("sees_clock", "?"),
        ("bootstrap_timeout", "?"),
        ("pays_once", "?"),
        ("stochastic", "?"),
        ("reseed_fault", "?"),  # global random numbers restarted in every episode from one of 10,001 seeds
        ("limit_fault", "?"),  # the last move is not carried out: it costs 10 points and ends the game
    ]
)
EPISODE = np.dtype(
    [
        ("won", "?"),
        ("total", "f8"),  # the return
        ("moves", "i8"),
        ("repeats", "i8"),  # pick-ups beyond the first of each item
        ("paying", "i8"),  # steps with a reward above zero
        ("seed", "i8"),  # the seed drawn for the episode
    ]
)
WINDOW = np.dtype(
    [
        ("states", "i8"),  # visited so far
        ("won", "f8"),  # this and the rest: means over the greedy games
        ("total", "f8"),
        ("moves", "f8"),
        ("repeats", "f8"),
    ]
)
MEMORY = np.dtype([("reward", "f8"), ("next", "i8")])  # Dyna-Q's last reward and next key; -1 the game ended


class Run(NamedTuple):
    """What happened. `value_WR` is the highest value in any visited state of a room (-inf: never visited)."""

    episode_E: np.ndarray  # EPISODE
    window_W: np.ndarray  # WINDOW
    value_WR: np.ndarray
    path_WT: np.ndarray  # actions of a greedy game after each window, -1 after its end
    q_NKA: np.ndarray


@njit(inline="always")
def _key(tables, settings, state, move):
    key = tables.state_S[state].key
    return key * (settings.max_moves + 1) + move if settings.sees_clock else key


@njit(cache=True)
def _choose(tables, settings, q_NKA, state, key, epsilon, mt):
    """The slot to play: epsilon-greedy, first maximum, a row of untouched values at random."""
    count = tables.state_S[state].count
    if epsilon > 0.0 and mersenne.uniform(mt) < epsilon:
        return mersenne.below(mt, count)
    untouched = True
    best, choice = -np.inf, 0
    for slot in range(count):
        value = 0.0
        for n in range(q_NKA.shape[0]):
            value += q_NKA[n, key, tables.move_SL[state, slot].action]
        if value != settings.initial_value * q_NKA.shape[0]:
            untouched = False
        if value > best:
            best, choice = value, slot
    return mersenne.below(mt, count) if untouched else choice


@njit(cache=True)
def _step(tables, settings, state, slot, move, paid, noise_4):
    """One move. Returns (next state or WON, reward, game over, events already paid as bits, repeated pick-up)."""
    last = move + 1 >= settings.max_moves
    if last and settings.limit_fault:
        return state, TIMEOUT, True, paid, 0
    effect = tables.move_SL[state, slot]
    reward, pay, there = STEP, effect.pay, effect.next
    if settings.stochastic:
        reward = STEP + (-0.1 + 0.2 * noise_4[0])
        if noise_4[1] < FUMBLE_P:
            return state, reward + (TIMEOUT if last else FUMBLE), last, paid, 0
        if effect.chance == ATTACK:
            if noise_4[2] < 0.1:
                pay = 30.0
            elif noise_4[2] >= 0.95:
                pay, there = -0.5, state
        elif effect.chance == CRAFT:
            if noise_4[2] < 0.9:
                pay = 10.0 + (-1.0 + 3.0 * noise_4[3])
            else:
                pay, there = -0.2, state
        elif effect.spread > 0.0:
            pay = pay + (-effect.spread + 2.0 * effect.spread * noise_4[3])
    repeated = 0
    if effect.repeat >= 0:
        if (paid >> effect.repeat) & 1:
            repeated = 1 if effect.repeat < PICKUPS else 0
            if settings.pays_once:
                pay = 0.0
        paid |= 1 << effect.repeat
    reward += pay
    if there == WON:
        return there, reward + VICTORY, True, paid, repeated
    if last:
        reward += TIMEOUT
    return there, reward, last, paid, repeated


@njit(cache=True)
def _best(tables, settings, q_KA, by_KA, key):
    """Value in `q_KA` of the action that is best by `by_KA` (the same table but in double Q-learning)."""
    base = key // (settings.max_moves + 1) if settings.sees_clock else key
    best, value = -np.inf, 0.0
    for action in range(ACTION_COUNT):
        if tables.legal_KA[base, action] and by_KA[key, action] > best:
            best, value = by_KA[key, action], q_KA[key, action]
    return value


@njit(cache=True)
def _plan(tables, settings, q_KA, memory_KA, pairs_M2, mt, key, action, reward, next_key):
    """Dyna-Q: keep the last outcome of a state and action, then learn again from remembered ones, drawn evenly.

    `pairs_M2` lists the pairs of key and action seen so far; its first row holds their number.
    """
    if memory_KA[key, action].next == NEVER_SEEN:
        pairs_M2[0, 0] += 1
        pairs_M2[pairs_M2[0, 0], 0] = key
        pairs_M2[pairs_M2[0, 0], 1] = action
    memory_KA[key, action].reward = reward
    memory_KA[key, action].next = next_key
    for _ in range(settings.planning_steps):
        pair = 1 + mersenne.below(mt, pairs_M2[0, 0])
        key, action = pairs_M2[pair, 0], pairs_M2[pair, 1]
        target = memory_KA[key, action].reward
        next_key = memory_KA[key, action].next
        if next_key >= 0:
            target += settings.gamma * _best(tables, settings, q_KA, q_KA, next_key)
        q_KA[key, action] += settings.alpha * (target - q_KA[key, action])


@njit(cache=True)
def _play(tables, settings, q_NKA, memory_KA, pairs_M2, seen_K, epsilon, noise_T4, mt):
    """One training episode. Returns (won, return, moves, repeated pick-ups, paying steps)."""
    # np.int64 keeps the compiler from building everything twice, once more for the constant 0.
    state, paid, first = np.int64(0), np.int64(0), np.int64(0)
    total, repeats, paying = 0.0, 0, 0
    key = _key(tables, settings, state, first)
    slot = _choose(tables, settings, q_NKA, state, key, epsilon, mt)
    for move in range(settings.max_moves):
        action = tables.move_SL[state, slot].action
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
                target += settings.gamma * q_NKA[0, next_key, tables.move_SL[there, next_slot].action]
            else:
                target += settings.gamma * _best(tables, settings, q_NKA[q_NKA.shape[0] - 1 - learnt], q_NKA[learnt], next_key)
        q_NKA[learnt, key, action] += settings.alpha * (target - q_NKA[learnt, key, action])
        if settings.algorithm == DYNA_Q:
            _plan(tables, settings, q_NKA[0], memory_KA, pairs_M2, mt, key, action, reward, next_key)
        if over:
            return there == WON, total, move + 1, repeats, paying
        if settings.algorithm != SARSA:
            next_slot = _choose(tables, settings, q_NKA, there, next_key, epsilon, mt)
        state, key, slot = there, next_key, next_slot
    return False, total, settings.max_moves, repeats, paying


@njit(cache=True)
def _evaluate(tables, settings, q_NKA, noise_GT4, window, path_T, mt):
    """Games without exploration or learning: stores their means in `window` and the first game's actions in `path_T`."""
    games = noise_GT4.shape[0]
    for game in range(games):
        state, paid = np.int64(0), np.int64(0)
        for move in range(settings.max_moves):
            slot = _choose(tables, settings, q_NKA, state, _key(tables, settings, state, move), 0.0, mt)
            if game == 0:
                path_T[move] = tables.move_SL[state, slot].action
            state, reward, over, paid, repeated = _step(tables, settings, state, slot, move, paid, noise_GT4[game, move])
            window.total += reward
            window.repeats += repeated
            window.moves += 1.0
            if over:
                break
        if state == WON:
            window.won += 1.0
    window.total /= games
    window.repeats /= games
    window.moves /= games
    window.won /= games


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
def _train(tables, settings, seed, noise_ET4, noise_GT4, run, memory_KA, pairs_M2, seen_K, mt, greedy_mt):
    mersenne.reseed(mt, seed)
    epsilon = settings.epsilon
    window = len(run.episode_E) // len(run.window_W)
    for number in range(len(run.episode_E)):
        episode = run.episode_E[number]
        episode.seed = mersenne.below(mt, EPISODE_SEEDS)
        if settings.reseed_fault:
            mersenne.reseed(mt, episode.seed)
        noise_T4 = noise_ET4[number if settings.stochastic else 0]
        won, total, moves, repeats, paying = _play(
            tables, settings, run.q_NKA, memory_KA, pairs_M2, seen_K, epsilon, noise_T4, mt
        )
        episode.won, episode.total, episode.moves = won, total, moves
        episode.repeats, episode.paying = repeats, paying
        epsilon = max(settings.epsilon_min, epsilon * settings.epsilon_decay)
        if (number + 1) % window == 0:
            w = (number + 1) // window - 1
            for key in range(len(seen_K)):
                run.window_W[w].states += seen_K[key]
            _room_values(tables, settings, run.q_NKA, seen_K, run.value_WR[w])
            mersenne.reseed(greedy_mt, seed + 1)
            _evaluate(tables, settings, run.q_NKA, noise_GT4, run.window_W[w], run.path_WT[w], greedy_mt)


def train(tables, settings, seed, episodes, windows, noise_ET4, noise_GT4):
    """All episodes of one seed, with greedy games after each of `windows` equal windows. Returns a `Run`.

    `tables` is a `Tables` and `settings` a record of RULES; `noise_ET4` [E or 1, moves, 4] holds the game's random numbers in
    stochastic mode (not read otherwise), `noise_GT4` those of the evaluation games. The learner's own random numbers
    are those of `random.Random(seed)`; evaluation uses another stream, so that it never changes the training.
    """
    if episodes % windows:
        raise ValueError(f"episodes={episodes} must be a multiple of windows={windows}")
    keys = len(tables.legal_KA) * (settings.max_moves + 1 if settings.sees_clock else 1)
    run = Run(
        episode_E=np.zeros(episodes, EPISODE),
        window_W=np.zeros(windows, WINDOW),
        value_WR=np.full((windows, len(rules.ROOMS)), -np.inf),
        path_WT=np.full((windows, settings.max_moves), -1, np.int64),
        q_NKA=np.full((2 if settings.algorithm == DOUBLE_Q else 1, keys, ACTION_COUNT), settings.initial_value),
    )
    remembered = keys if settings.algorithm == DYNA_Q else 1
    memory_KA = np.zeros((remembered, ACTION_COUNT), MEMORY)
    memory_KA["next"] = NEVER_SEEN
    pairs_M2 = np.zeros((remembered * ACTION_COUNT + 1, 2), np.int64)
    seen_K = np.zeros(keys, np.bool_)
    mt, greedy_mt = mersenne.new_state(), mersenne.new_state()
    _train(tables, settings, seed, noise_ET4, noise_GT4, run, memory_KA, pairs_M2, seen_K, mt, greedy_mt)
    return run
