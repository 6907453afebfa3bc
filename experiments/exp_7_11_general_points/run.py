"""Experiment 7-11: from a base model to the records of every arm.

    python -m experiments.exp_7_11_general_points.run scale=laptop seeds=5

A cell is an arm under a seed. Seed s uses base s mod `bases` and hand split (s div bases) mod `splits`, so that the
report's intervals cover other bases and other splits; arms of one seed share both, and the tasks they are tested on.
"""

from functools import partial
from pathlib import Path

from common import smollm2
from common.checkpoints import load_model, save_model
from common.config import cli, number_keys, run_folder, seed_list
from common.jobs import Cell, Job, cell_folder, complete_cell
from common.records import read_jsonl
from common.runlog import RunLog
from common.stages import fingerprint
from common.study import run_study
from experiments.exp_7_11_general_points import branches, cluster
from experiments.exp_7_11_general_points.evaluate import Evaluator
from experiments.exp_7_11_general_points.figures import figures, sections
from experiments.exp_7_11_general_points.pages import pages
from experiments.exp_7_11_general_points.settings import Settings

__all__ = ["figures", "main", "pages", "sections"]
NUMBER = "7-11"
TITLE = "GeneralPoints (text): does RL generalise where SFT memorises?"
CLAIMS = Path(__file__).with_name("claims.yaml")
CODE = [
    *branches.SFT_CODE,
    *(branches.HERE + name for name in ("branches", "evaluate", "run")),
    *(f"common.cards.{name}" for name in ("env", "grading")),
    *(
        f"common.{name}"
        for name in ("advantages", "decoding", "episodes", "evaluation", "grpo", "loop", "losses", "policy", "ppo", "rollout")
    ),
    "common.rejection",
    *(f"common.verifiers.{name}" for name in ("answers", "expressions")),
]
BACKEND_CODE = {"native": [], "trl": [f"common.{name}" for name in ("backends.trl", "backends.trl_sft", "trl_adapter")]}


def origin(settings: Settings, seed: int) -> tuple[int, int]:
    """(base seed, split seed) of a seed; report seeds and tuning seeds share neither."""
    hundred = seed // 100 * 100
    place = seed - hundred
    return hundred + place % settings.bases, hundred + place // settings.bases % settings.splits


def start_of(settings: Settings, arm: str, seed: int) -> tuple[Path, list[Path]]:
    """The folder an arm starts from, and all stages that led to it."""
    branch = settings.branches[arm]
    base_seed, split_seed = origin(settings, seed)
    base = branches.base_stage(settings, base_seed, branch.prior)
    if branch.start == "base":
        return base, [base]
    start = branches.sft_stage(settings, base, split_seed, "start", "diverse", settings.start_steps)
    if branch.start == "start":
        return start, [base, start]
    overfit = branches.sft_stage(settings, start, split_seed, "overfit", "one", settings.overfit_steps)
    return overfit, [base, start, overfit]


def build_stage(settings: Settings, arm: str, seed: int) -> dict:
    """Job: what an arm starts from, before the cells that share it."""
    return {"stages": [str(folder) for folder in start_of(settings, arm, seed)[1]]}


def run_cell(settings: Settings, arm: str, seed: int) -> dict:
    """Job: one arm under one seed, from its start to its final records and saved model."""
    start, stages = start_of(settings, arm, seed)
    folder = cell_folder(run_folder(settings), Cell(arm, seed))
    code = [*CODE, *BACKEND_CODE[settings.backend]]
    key = fingerprint([settings.branches[arm], number_keys(settings, "branches", "cluster"), seed], code, [start])
    complete_cell(folder, key, partial(train_and_evaluate, settings, arm, seed, start, folder))
    final = [row for row in read_jsonl(folder / "records.jsonl") if row["final"] and row["metric"] == "success"]
    success = {row["split"]: row["value"] for row in final}
    headline = f"success {success['id']:.1%} in distribution, {success['ood']:.1%} out of it"
    return {"stages": [str(path) for path in stages], "headline": headline}


def train_and_evaluate(settings: Settings, arm: str, seed: int, start: Path, folder: Path) -> None:
    """The cell itself: train the branch, measure it, keep its model."""
    branch, split_seed = settings.branches[arm], origin(settings, seed)[1]
    labels = {"experiment": NUMBER, "scale": settings.scale, "variant": settings.variant, "arm": arm, "seed": seed}
    with RunLog(folder, labels, tracker=settings.tracker) as log:
        reference, tokenizer = load_model(start / "model", settings.device, settings.dtype)
        evaluator = Evaluator(settings, tokenizer, log, split_seed, seed, branch.iterations, branch.leak)
        model, meter = branches.train_branch(settings, branch, start, split_seed, seed, folder, log, evaluator)
        save_model(model, tokenizer, folder / "model")
        evaluator.final(model, reference)
        log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)


def plan(settings: Settings, seeds: list[int], arms: list[str]) -> list[Job]:
    """The jobs, first results first: seeds in groups of one per base; of each group what is shared, then the cells."""
    where = "experiments.exp_7_11_general_points.run:"
    jobs, known = [], set()
    for group in (seeds[i : i + settings.bases] for i in range(0, len(seeds), settings.bases)):
        for arm in arms:
            for seed in group:
                branch = settings.branches[arm]
                shared = (origin(settings, seed), branch.prior, branch.start)
                if shared not in known:
                    known.add(shared)
                    arguments = {"settings": settings, "arm": arm, "seed": seed}
                    jobs.append(Job(f"start of {Cell(arm, seed).name}", where + "build_stage", arguments))
        for seed in group:
            arguments = [{"settings": settings, "arm": arm, "seed": seed} for arm in arms]
            jobs += [Job(Cell(a["arm"], seed).name, where + "run_cell", a) for a in arguments]
    return jobs


def main(settings: Settings) -> int:
    """Runs the chosen cells on the worker processes, gathers them and writes the report; 1 if a cell failed."""
    if settings.scale == "cluster":
        return cluster.main(settings)
    if settings.model_path is not None:
        smollm2.resolve(settings.model_path)  # says what to do where that model has not been made yet
    seeds, arms = seed_list(settings), settings.chosen()
    cells = [Cell(arm, seed) for seed in seeds for arm in arms]
    return run_study(settings, plan(settings, seeds, arms), cells, claims=CLAIMS, figures=figures, sections=sections)


if __name__ == "__main__":
    cli(NUMBER, Settings, main)
