"""Experiment 7-12: from a base model to the records of every arm.

    python -m experiments.exp_7_12_virl.run scale=laptop seeds=3

A cell is an arm under a seed. Seed s uses base s mod `bases` and training routes of its own; arms of one seed share base,
start and training routes, and all of them the test routes.
"""

from functools import partial
from pathlib import Path

from common.checkpoints import load_model, save_model
from common.config import cli, number_keys, run_folder, seed_list
from common.files import read_json_lines
from common.jobs import Cell, Job, cell_folder, complete_cell
from common.records import read_jsonl
from common.runlog import RunLog
from common.stages import fingerprint
from common.study import run_study
from experiments.exp_7_12_virl import branches
from experiments.exp_7_12_virl.evaluate import Evaluator
from experiments.exp_7_12_virl.figures import figures, sections
from experiments.exp_7_12_virl.settings import Settings

__all__ = ["figures", "main", "sections"]
NUMBER = "7-12"
TITLE = "V-IRL navigation (text): does RL generalise where SFT memorises?"
CLAIMS = Path(__file__).with_name("claims.yaml")
CODE = [
    *branches.SFT_CODE,
    *(branches.HERE + name for name in ("branches", "evaluate", "run")),
    *(
        f"common.{name}"
        for name in ("advantages", "algo", "compute", "decoding", "evaluation", "grpo", "loop", "policy", "ppo", "rollout")
    ),
    "common.verifiers.answers",
]


def build_stages(settings: Settings, arm: str, seed: int) -> dict:
    """Job: what an arm starts from, before the cells that share it."""
    return {"stages": [str(folder) for folder in branches.start_of(settings, arm, seed)[1]]}


def run_cell(settings: Settings, arm: str, seed: int) -> dict:
    """Job: one arm under one seed, from its start to its final records and saved model."""
    start, stages = branches.start_of(settings, arm, seed)
    folder = cell_folder(run_folder(settings), Cell(arm, seed))
    key = fingerprint([settings.branches[arm], number_keys(settings, "branches"), seed], CODE, [start])
    complete_cell(folder, key, partial(train_and_evaluate, settings, arm, seed, start, folder))
    final = [row for row in read_jsonl(folder / "records.jsonl") if row["final"] and row["metric"] == "step_accuracy"]
    rates = {row["split"]: row["value"] for row in final}
    headline = (
        f"right at {rates['id']:.1%} of stops, {rates['rule']:.1%} under the other rule, {rates['city']:.1%} in other cities"
    )
    return {"stages": [str(path) for path in stages], "headline": headline}


def train_and_evaluate(settings: Settings, arm: str, seed: int, start: Path, folder: Path) -> None:
    """The cell itself: train the branch, measure it, keep its model."""
    labels = {"experiment": NUMBER, "scale": settings.scale, "variant": settings.variant, "arm": arm, "seed": seed}
    with RunLog(folder, labels, tracker=settings.tracker) as log:
        reference, tokenizer = load_model(start / "model", settings.device, settings.dtype)
        evaluator = Evaluator(settings, settings.branches[arm], reference, tokenizer, log, seed)
        model, meter = branches.train_branch(settings, arm, start, seed, folder, log, evaluator)
        save_model(model, tokenizer, folder / "model")
        steps = max((row["step"] for row in read_json_lines(folder / "metrics.jsonl")), default=0)
        for name, used in (("step_used", steps), ("flops_used", meter.flops)):
            log.record(split="train", metric=name, value=float(used), n=1, step=100, final=True)
        evaluator.final(model)
        log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)


def plan(settings: Settings, seeds: list[int], arms: list[str]) -> list[Job]:
    """The jobs, seeds in groups of one per base: what is shared, then the cells."""
    where, jobs, known = "experiments.exp_7_12_virl.run:", list[Job](), set()
    for begin in range(0, len(seeds), settings.bases):
        group = seeds[begin : begin + settings.bases]
        for arm in arms:
            for seed in group:
                if (shared := (seed, settings.branches[arm].start)) not in known:
                    known.add(shared)
                    arguments = {"settings": settings, "arm": arm, "seed": seed}
                    jobs.append(Job(f"start of {Cell(arm, seed).name}", where + "build_stages", arguments))
        for seed in group:
            for arm in arms:
                jobs.append(Job(Cell(arm, seed).name, where + "run_cell", {"settings": settings, "arm": arm, "seed": seed}))
    return jobs


def main(settings: Settings) -> int:
    """Runs the chosen cells on the worker processes, gathers them and writes the report; 1 if a cell failed."""
    seeds, arms = seed_list(settings), settings.chosen()
    cells = [Cell(arm, seed) for seed in seeds for arm in arms]
    return run_study(settings, plan(settings, seeds, arms), cells, claims=CLAIMS, figures=figures, sections=sections)


if __name__ == "__main__":
    cli(NUMBER, Settings, main)
