"""Experiment 7-8: a long prompt is folded into weights, from pre-trained models to the records of every arm.

    python -m experiments.exp_7_08_prompt_distillation.run scale=laptop seeds=5

A cell is an arm under a seed. Seed s uses base s mod `bases`, and a rule table and texts of its own; the arms of a seed share
both, the teacher's answers, and the texts they are judged on.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from common.checkpoints import load_model, save_model
from common.compute import Meter
from common.config import cli, number_keys, run_folder, seed_list
from common.jobs import Cell, Job, cell_folder, complete_cell
from common.models import parameter_count
from common.records import read_jsonl
from common.runlog import RunLog
from common.seeding import base_seed
from common.stages import fingerprint
from common.study import run_study
from experiments.exp_7_08_prompt_distillation import arms, stages
from experiments.exp_7_08_prompt_distillation.figures import figures, sections
from experiments.exp_7_08_prompt_distillation.settings import Settings

__all__ = ["NUMBER", "TITLE", "Settings", "figures", "sections"]
NUMBER = "7-8"
TITLE = "Prompt distillation: a long rule prompt folded into weights"
CLAIMS = Path(__file__).with_name("claims.yaml")
CODE = [
    *stages.ASK_CODE,
    *stages.STUDENT_CODE,
    *(stages.HERE + name for name in ("arms", "evaluate", "run", "settings")),
    *(f"common.{name}" for name in ("compute", "distill", "episodes", "loop", "policy", "target_losses")),
]


def build_stages(settings: Settings, arm: str, seed: int) -> dict:
    """Job: what an arm starts from, before the cells that share it."""
    return {"stages": [str(folder) for folder in arms.inputs_of(settings, arm, seed).folders]}


def run_cell(settings: Settings, arm: str, seed: int) -> dict:
    """Job: one arm under one seed, from what it starts from to its final records and saved model."""
    inputs = arms.inputs_of(settings, arm, seed)
    folder = cell_folder(run_folder(settings), Cell(arm, seed))
    key = fingerprint([settings.branches[arm], number_keys(settings, "branches"), seed], CODE, inputs.folders)
    complete_cell(folder, key, partial(train_and_evaluate, settings, arm, seed, inputs, folder))
    final = {(r["split"], r["metric"]): r["value"] for r in read_jsonl(folder / "records.jsonl") if r["final"]}
    known = {what: final.get(("test", what)) for what in ("success", "fidelity")}
    shown = [f"{name} {value:.1%}" for name, value in known.items() if value is not None]
    return {"stages": [str(path) for path in inputs.folders], "headline": " and ".join(shown)}


def train_and_evaluate(settings: Settings, arm: str, seed: int, inputs: arms.Inputs, folder: Path) -> None:
    """The cell itself: train the arm where it is not a stage already, measure it, keep its model."""
    labels = {"experiment": NUMBER, "scale": settings.scale, "variant": settings.variant, "arm": arm, "seed": seed}
    with RunLog(folder, labels, tracker=settings.tracker) as log:
        model, tokenizer = load_model(inputs.model / "model", settings.device, settings.dtype)
        meter = Meter(parameter_count(model))
        if settings.branches[arm].method == "distill":
            meter = arms.distil(settings, arm, seed, model, tokenizer, inputs, folder, log)
        if settings.branches[arm].method != "none":
            save_model(model, tokenizer, folder / "model")
        arms.measure(settings, arm, seed, model, tokenizer, inputs, log)
        arms.write_cost(settings, arm, inputs, meter, log)


def plan(settings: Settings, seeds: list[int], names: list[str]) -> list[Job]:
    """The jobs: pre-trained models first, then of each seed the teacher's answers, then its cells."""
    where = "experiments.exp_7_08_prompt_distillation.run:"
    jobs: list[Job] = []

    def add(name: str, function: str, arm: str, seed: int) -> None:
        jobs.append(Job(name, where + function, {"settings": settings, "arm": arm, "seed": seed}))

    for seed in dict.fromkeys(base_seed(seed, settings.bases) for seed in seeds):
        for which in dict.fromkeys(settings.branches[arm].model for arm in names):
            arm = next(arm for arm in names if settings.branches[arm].model == which)
            add(f"{which} for {Cell(arm, seed).name}", "build_stages", arm, seed)
    for seed in seeds:
        add(f"teacher of seed {seed}", "build_stages", names[0], seed)
    for seed in seeds:
        for arm in names:
            add(Cell(arm, seed).name, "run_cell", arm, seed)
    return jobs


def main(settings: Settings) -> int:
    """Runs the chosen cells on the worker processes, gathers them and writes the report; 1 if a cell failed."""
    seeds, names = seed_list(settings), settings.chosen()
    cells = [Cell(arm, seed) for seed in seeds for arm in names]
    return run_study(settings, plan(settings, seeds, names), cells, claims=CLAIMS, figures=figures, sections=sections)


if __name__ == "__main__":
    cli(NUMBER, Settings, main)
