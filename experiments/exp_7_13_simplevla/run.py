"""SimpleVLA-RL on a table-top: from play to the records of every arm.

    python -m experiments.exp_7_13_simplevla.run scale=laptop seeds=3

A cell is an arm under a seed. Seed s begins with the play of base s mod `bases`, and its arms share the demonstrations.
"""

from functools import partial
from pathlib import Path

import numpy as np

from common.compute import Budget
from common.config import cli, number_keys, run_folder, seed_list
from common.jobs import Cell, Job, cell_folder, complete_cell
from common.records import read_jsonl
from common.runlog import RunLog
from common.stages import fingerprint
from common.study import run_study
from experiments.exp_7_13_simplevla import films, lessons, stages, tasks
from experiments.exp_7_13_simplevla.evaluate import Evaluator
from experiments.exp_7_13_simplevla.figures import figures, sections
from experiments.exp_7_13_simplevla.settings import Settings
from experiments.exp_7_13_simplevla.train import train_rl

__all__ = ["NUMBER", "TITLE", "Settings", "figures", "sections"]
NUMBER = "7-13"
TITLE = "SimpleVLA-RL: reinforcement learning of a robot policy"
HERE = "experiments.exp_7_13_simplevla."
CLAIMS = Path(__file__).with_name("claims.yaml")
CODE = [*stages.LEARNT, *(HERE + name for name in ("evaluate", "films", "run", "train"))]
CODE += [f"common.{name}" for name in ("advantages", "algo", "compute", "loop", "losses", "policy")]


def build_start(settings: Settings, start: str, seed: int) -> dict:
    """Job: a start and the play before it, ahead of the cells that share them."""
    return {"stages": [str(stages.play_of(settings, start, seed)), str(stages.start_of(settings, start, seed))]}


def run_cell(settings: Settings, arm: str, seed: int) -> dict:
    """Job: one arm under one seed, from its start to its final records and saved policy."""
    branch = settings.branches[arm]
    start = stages.start_of(settings, branch.start, seed)
    folder = cell_folder(run_folder(settings), Cell(arm, seed))
    # The film of a run's first seed is a record too, so what seed is first belongs to the key.
    apart = [number_keys(settings, "branches", "starts"), seed == settings.first_seed]
    key = fingerprint([branch, settings.starts[branch.start], apart, seed], CODE, [start])
    complete_cell(folder, key, partial(train_and_evaluate, settings, arm, seed, start, folder))
    final = [row for row in read_jsonl(folder / "records.jsonl") if row["final"] and row["split"] == "seen"]
    found = {row["metric"]: row["value"] for row in final}
    pushed = "" if found["pushcut"] is None else f", {found['pushcut']:.1%} of it without a lift"
    return {"stages": [str(start)], "headline": f"success {found['success']:.1%}{pushed}"}


def train_and_evaluate(settings: Settings, arm: str, seed: int, start: Path, folder: Path) -> None:
    """The cell itself: train the arm, measure it, keep its policy."""
    branch, points = settings.branches[arm], settings.evaluation.points
    labels = {"experiment": NUMBER, "scale": settings.scale, "variant": settings.variant, "arm": arm, "seed": seed}
    filmed = seed == settings.first_seed
    with RunLog(folder, labels, tracker=settings.tracker) as log:
        policy = stages.load_policy(start, settings.device)
        evaluator = Evaluator(settings, arm, log, seed)
        if branch.method == "rl":
            flops = branch.budget * settings.flops

            def evaluate(step: int, used: int) -> None:
                evaluator.curve(policy, 100 * min(points, int(points * used / flops)) // points)

            evaluator.curve(policy, 0)
            meter = train_rl(
                policy, settings.arm_config(arm), branch.reward, decisions=settings.decisions(arm), seed=seed,
                budget=Budget(flops=flops), log=log, folder=folder, evaluate=evaluate, evaluate_every_flops=flops / points,
            )  # fmt: skip
            evaluator.training_records()
            log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)
        elif filmed:
            layouts = tasks.draw("train", np.repeat(tasks.SEEN, 1), seed, "demonstrations")
            films.record_demonstration(log, layouts, lessons.perform(layouts, settings.demonstration_steps))
        policy.save_pretrained(folder / "model")
        evaluator.final(policy, film=filmed)


def plan(settings: Settings, seeds: list[int], names: list[str]) -> list[Job]:
    """The jobs: the starts, one per seed, then the cells that begin with them."""
    kinds = dict.fromkeys(settings.branches[arm].start for arm in names)
    given = [{"settings": settings, "start": start, "seed": seed} for start in kinds for seed in seeds]
    jobs = [Job(f"start {g['start']} of seed {g['seed']}", HERE + "run:build_start", g) for g in given]
    cells = [{"settings": settings, "arm": arm, "seed": seed} for seed in seeds for arm in names]
    return jobs + [Job(Cell(c["arm"], c["seed"]).name, HERE + "run:run_cell", c) for c in cells]


def main(settings: Settings) -> int:
    """Runs the chosen cells on the worker processes, gathers them and writes the report; 1 if a cell failed."""
    seeds, names = seed_list(settings), settings.chosen()
    cells = [Cell(arm, seed) for seed in seeds for arm in names]
    return run_study(settings, plan(settings, seeds, names), cells, claims=CLAIMS, figures=figures, sections=sections)


if __name__ == "__main__":
    cli(NUMBER, Settings, main)
