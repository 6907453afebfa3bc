"""Experiment 7-11-vl: from nothing to the records of every arm.

    python -m experiments.exp_7_11_vl_general_points.run scale=laptop seeds=3

A cell is an arm under a seed. Seed s uses base s mod `bases` and hand split (s div bases) mod `splits`; arms of one seed
share both, and the pictures they are tested on.
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
from experiments.exp_7_11_vl_general_points import branches
from experiments.exp_7_11_vl_general_points.evaluate import Evaluator
from experiments.exp_7_11_vl_general_points.figures import figures, sections
from experiments.exp_7_11_vl_general_points.settings import Settings

__all__ = ["figures", "main", "sections"]
NUMBER = "7-11-vl"
TITLE = "GeneralPoints (images): does RL learn to see where SFT forgets?"
CLAIMS = Path(__file__).with_name("claims.yaml")
LIBRARY = ("advantages", "decoding", "evaluation", "grpo", "loop", "policy", "ppo", "rollout")
CODE = [
    *branches.SFT_CODE,
    *(branches.HERE + name for name in ("branches", "env", "evaluate", "run")),
    *(f"common.cards.{name}" for name in ("env", "grading")),
    *(f"common.{name}" for name in LIBRARY),
    *(f"common.verifiers.{name}" for name in ("answers", "expressions")),
]


def origin(settings: Settings, seed: int) -> tuple[int, int]:
    """(base seed, split seed) of a seed; report seeds and tuning seeds share neither."""
    hundred = seed // 100 * 100
    place = seed - hundred
    return hundred + place % settings.bases, hundred + place // settings.bases % settings.splits


def start_of(settings: Settings, seed: int) -> list[Path]:
    """The stages that lead to a seed's start, which is the last of them."""
    base_seed, split_seed = origin(settings, seed)
    base = branches.base_stage(settings, base_seed)
    return [base, branches.start_stage(settings, base, split_seed)]


def build_stage(settings: Settings, seed: int) -> dict:
    """Job: what the cells of a seed start from."""
    return {"stages": [str(folder) for folder in start_of(settings, seed)]}


def run_cell(settings: Settings, arm: str, seed: int) -> dict:
    """Job: one arm under one seed, from its start to its final records and saved model."""
    stages = start_of(settings, seed)
    folder = cell_folder(run_folder(settings), Cell(arm, seed))
    key = fingerprint([settings.branches[arm], number_keys(settings, "branches"), seed], CODE, stages[-1:])
    complete_cell(folder, key, partial(train_and_evaluate, settings, arm, seed, stages[-1], folder))
    final = [row for row in read_jsonl(folder / "records.jsonl") if row["final"]]
    value = {(row["split"], row["metric"]): row["value"] for row in final}
    shown = ", ".join(f"{split} {value[split, 'success']:.1%}" for split in ("id", "rule", "visual"))
    read = f"cards read {value['id', 'recognition']:.1%} black, {value['visual', 'recognition']:.1%} red"
    return {"stages": [str(path) for path in stages], "headline": f"success {shown}; {read}"}


def train_and_evaluate(settings: Settings, arm: str, seed: int, start: Path, folder: Path) -> None:
    """The cell itself: train the branch, measure it, keep its model."""
    branch, split_seed = settings.branches[arm], origin(settings, seed)[1]
    labels = {"experiment": NUMBER, "scale": settings.scale, "variant": settings.variant, "arm": arm, "seed": seed}
    with RunLog(folder, labels, tracker=settings.tracker) as log:
        reference, tokenizer = load_model(start / "model", settings.device, settings.dtype)
        evaluator = Evaluator(settings, tokenizer, log, split_seed, seed)
        model, meter = branches.train_branch(settings, branch, start, split_seed, seed, folder, log, evaluator)
        save_model(model, tokenizer, folder / "model")
        steps = max((row["step"] for row in read_json_lines(folder / "metrics.jsonl")), default=0)
        for name, used in (("step_used", steps), ("flops_used", meter.flops)):
            log.record(split="train", metric=name, value=float(used), n=1, step=100, final=True)
        evaluator.final(model, reference)
        log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)


def plan(settings: Settings, seeds: list[int], arms: list[str]) -> list[Job]:
    """The jobs, first results first: seeds in groups of one per base; of each group what is shared, then the cells."""
    where = "experiments.exp_7_11_vl_general_points.run:"
    jobs, known = [], set()
    for group in (seeds[i : i + settings.bases] for i in range(0, len(seeds), settings.bases)):
        for seed in group:
            if origin(settings, seed) not in known:
                known.add(origin(settings, seed))
                jobs.append(Job(f"start of seed {seed}", where + "build_stage", {"settings": settings, "seed": seed}))
        for seed in group:
            for arm in arms:
                arguments = {"settings": settings, "arm": arm, "seed": seed}
                jobs.append(Job(Cell(arm, seed).name, where + "run_cell", arguments))
    return jobs


def main(settings: Settings) -> int:
    """Runs the chosen cells on the worker processes, gathers them and writes the report; 1 if a cell failed."""
    seeds, arms = seed_list(settings), settings.chosen()
    cells = [Cell(arm, seed) for seed in seeds for arm in arms]
    return run_study(settings, plan(settings, seeds, arms), cells, claims=CLAIMS, figures=figures, sections=sections)


if __name__ == "__main__":
    cli(NUMBER, Settings, main)
