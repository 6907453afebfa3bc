"""Experiment 7-1: from an empty table to the records of every arm.

    python -m experiments.exp_7_01_q_learning.run scale=laptop

A cell is an arm under a seed: all training episodes, with greedy games after each window. It takes a fraction of a
second, so a cell that was cut short is simply run again.
"""

import time
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from gymnasium.utils.seeding import np_random

from common.config import cli, run_folder, seed_list
from common.jobs import Cell, Job, cell_folder, complete_cell
from common.runlog import RunLog
from common.stages import fingerprint
from common.study import run_study
from experiments.exp_7_01_q_learning.env import TreasureHunt
from experiments.exp_7_01_q_learning.figures import figures, sections
from experiments.exp_7_01_q_learning.learner import Run, train
from experiments.exp_7_01_q_learning.settings import KEYS, Learner, Settings
from experiments.exp_7_01_q_learning.tables import Tables, build_tables
from experiments.exp_7_01_q_learning.world import ACTIONS

__all__ = ["NUMBER", "TITLE", "figures", "main", "run_cell", "sections"]

NUMBER = "7-1"
TITLE = "Q-learning in the treasure hunt: how fast, and what does it learn?"
HERE = "experiments.exp_7_01_q_learning."
CLAIMS = Path(__file__).with_name("claims.yaml")
CODE = [HERE + name for name in ("learner", "mersenne", "run", "tables", "world")]
SHORTEST = 11
GAMES_TO_READ = 2  # seeds per arm whose learnt game is kept as text


def play(learner: Learner, seed: int, episodes: int, windows: int, games: int) -> tuple[Run, Tables]:
    """All episodes of one seed; the game's chance is that of the environment reset with the same seed."""
    tables = build_tables(KEYS[learner.key])
    shape = (episodes if learner.stochastic else 1, learner.max_moves, 4)
    noise_ET4 = np_random(seed)[0].random(shape) if learner.stochastic else np.zeros(shape)
    noise_GT4 = np.random.default_rng([seed, 1]).random((games, learner.max_moves, 4))
    return train(tables, learner.rules(), seed, episodes, windows, noise_ET4, noise_GT4), tables


@lru_cache
def code_key() -> str:
    """Key of the code that the cells depend on, worked out once per process."""
    return fingerprint("code", CODE)


def run_cell(settings: Settings, arm: str, seed: int) -> None:
    """Job: one arm under one seed, from an empty table to its final records."""
    folder = cell_folder(run_folder(settings), Cell(arm, seed))
    keys = ("episodes", "windows", "games", "marks", "detailed", "variant")
    parts = [settings.learner_of(arm), {key: getattr(settings, key) for key in keys}, arm, seed, code_key()]
    complete_cell(folder, fingerprint(parts, []), partial(train_and_record, settings, arm, seed, folder))


def train_and_record(settings: Settings, arm: str, seed: int, folder: Path) -> None:
    """The cell itself: train, then write what happened."""
    learner = settings.learner_of(arm)
    labels = {"experiment": NUMBER, "scale": settings.scale, "variant": settings.variant, "arm": arm, "seed": seed}
    with RunLog(folder, labels, tracker=settings.tracker) as log:
        play(learner, seed, 1, 1, 1)  # loads what was compiled, so that the clock below times learning alone
        start = time.process_time()
        run, _ = play(learner, seed, settings.episodes, settings.windows, settings.games)
        log.cost(train_cpu_s=round(time.process_time() - start, 3))
        record_curves(settings, arm, run, log)
        record_ends(settings, run, log, arm in settings.detailed, learner.reseed_fault)
        if seed - settings.first_seed < GAMES_TO_READ:
            log.rollouts([rollout(learner, run, seed)])


def record_curves(settings: Settings, arm: str, run: Run, log: RunLog) -> None:
    """The training win rate after every window; state count, farming and values too, for the detailed arms in full."""
    window = settings.episodes // settings.windows
    detailed = arm in settings.detailed
    for w in range(settings.windows):
        step, last = (w + 1) * window, w + 1 == settings.windows
        episodes = run.episode_E[w * window : step]
        won, total = float(episodes["won"].mean()), float(episodes["total"].mean())
        log.metrics(step, {"success/mean": won, "reward/mean": total}, (w + 1) / settings.windows)
        put = partial(log.record, split="train", step=step, final=last)
        put(metric="success", value=won, n=window)
        if last or detailed:
            put(metric="states", value=int(run.window_W["states"][w]), n=1)
        if detailed and (last or step in settings.marks):
            put(metric="repeated_pickups", value=float(episodes["repeats"].mean()), n=window)
            put(metric="paying_steps", value=float((episodes["paying"] / episodes["moves"]).mean()), n=window)
            values = [value if np.isfinite(value) else 0.0 for value in run.value_WR[w]]
            # The five rooms' values ride along as items; the value itself is that of the best room.
            put(metric="room_values", value=max(values), n=5, items=values)
    if detailed:
        path = [float(action) for action in run.path_WT[-1] if action >= 0]
        log.record(split="greedy", metric="path_actions", value=len(path), n=1, step=settings.episodes, final=True, items=path)


def rise_episode(won_E: np.ndarray, window: int) -> int:
    """The first episode that ends `window` episodes of which half were won; the number of episodes if none does."""
    wins_E = np.cumsum(won_E)
    recent_E = wins_E[window - 1 :] - np.concatenate([[0], wins_E[:-window]])
    risen = np.flatnonzero(2 * recent_E >= window)
    return int(risen[0]) + window if len(risen) else len(won_E)


def record_ends(settings: Settings, run: Run, log: RunLog, detailed: bool, faulty: bool) -> None:
    """What the whole training came to, and the greedy games at its end."""
    episodes, games = run.episode_E, run.window_W[-1]
    step = settings.episodes
    risen = rise_episode(episodes["won"], settings.episodes // settings.windows)
    ends: dict[tuple[str, str], tuple[float | None, int]] = {
        ("train", "rise_episode"): (risen, 1),
        ("greedy", "success"): (float(games["won"]), settings.games),
        ("greedy", "return"): (float(games["total"]), settings.games),
        ("greedy", "path_length"): (float(games["moves"]), settings.games),
        ("greedy", "repeated_pickups"): (float(games["repeats"]), settings.games),
        ("greedy", "shortest_found"): (float(games["won"] == 1.0 and games["moves"] == SHORTEST), settings.games),
    }
    if detailed:
        won = np.flatnonzero(episodes["won"])
        ends["train", "first_win"] = (int(won[0]) + 1 if len(won) else None, 1)
    if detailed or faulty:
        ends["train", "episode_seeds"] = (len(np.unique(episodes["seed"])), step)
    for (split, metric), (value, n) in ends.items():
        reason = "never won" if value is None else None
        log.record(split=split, metric=metric, value=value, n=n, step=step, final=True, reason=reason)


def rollout(learner: Learner, run: Run, seed: int) -> dict:
    """The first greedy game after training, replayed in the environment so that it can be read."""
    env = TreasureHunt(learner.stochastic, learner.pays_once, learner.max_moves)
    prompt, info = env.reset(seed=seed)
    if learner.stochastic:
        env.set_noise(np.random.default_rng([seed, 1]).random((1, learner.max_moves, 4))[0])
    segments: list[dict] = []
    parts: dict[str, float] = {}
    total = 0.0
    for number in run.path_WT[-1]:
        if number < 0 or env.over:
            break
        text, reward, _, _, info = env.step(int(number))
        total += reward
        for name, value in info["parts"].items():
            parts[name] = parts.get(name, 0.0) + value
        segments += [
            {"text": ACTIONS[number], "mask": 1},
            {"text": f"{text.splitlines()[0]} ({reward:+.1f})", "mask": 0},
        ]
    return {
        "success": info["success"], "reward": total, "parts": parts, "reason": info["reason"], "prompt": prompt,
        "segments": segments, "surprise": 0.0,
    }  # fmt: skip


def main(settings: Settings) -> int:
    """Runs the chosen cells on the worker processes, gathers them and writes the report; 1 if a cell failed."""
    cells = [Cell(arm, seed) for arm in settings.chosen() for seed in seed_list(settings)]
    target = HERE + "run:run_cell"
    jobs = [Job(c.name, target, {"settings": settings, "arm": c.arm, "seed": c.seed}) for c in cells]
    print("compiling the learner (kept for the next run)", flush=True)
    play(settings.learner_of("base"), 0, 1, 1, 1)  # once here, or every worker would do it
    return run_study(settings, jobs, cells, claims=CLAIMS, figures=figures, sections=sections)


if __name__ == "__main__":
    cli(NUMBER, Settings, main)
