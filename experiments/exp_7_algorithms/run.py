"""All algorithms of the chapter on one small verifiable task, from a pre-trained base to the records of every arm.

    python -m experiments.exp_7_algorithms.run scale=laptop seeds=3

A cell is an arm under a seed. Seed s uses base s mod `bases` and training chains of its own; the arms of a seed share
base, start, training chains and reward model, and all of them the test chains.
"""

from functools import partial
from pathlib import Path

from common.checkpoints import load_model, save_model
from common.config import cli, number_keys, run_folder, seed_list
from common.jobs import Cell, Job, cell_folder, complete_cell
from common.records import read_jsonl
from common.runlog import RunLog
from common.stages import fingerprint
from common.study import run_study
from experiments.exp_7_algorithms import arms, stages
from experiments.exp_7_algorithms.evaluate import Evaluator
from experiments.exp_7_algorithms.figures import figures, pages, sections
from experiments.exp_7_algorithms.settings import Settings

__all__ = ["NUMBER", "TITLE", "Settings", "figures", "pages", "sections"]
NUMBER = "7-algorithms"
TITLE = "All algorithms on one small task at equal compute"
CLAIMS = Path(__file__).with_name("claims.yaml")
CODE = [
    *stages.REWARD_CODE,
    *(stages.HERE + name for name in ("arms", "evaluate", "run", "stages")),
    *(
        f"common.{name}"
        for name in (
            "advantages", "algo", "arm", "compute", "distill", "evaluation", "grpo", "loop", "policy", "ppo", "preference",
            "target_losses", "trl_adapter",
        )
    ),
]  # fmt: skip
NEEDS_REWARD = ("rlhf", "best_of")


def inputs_of(settings: Settings, arm: str, seed: int) -> tuple[Path, dict[str, Path], list[Path]]:
    """The start of an arm, the further stages its method needs by name, and all stages behind these."""
    start, built = stages.start_of(settings, seed)
    method, extra = settings.branches[arm].method, {}
    if method in NEEDS_REWARD:
        extra["reward"] = stages.reward_stage(settings, start, seed)
    if method == "distill":
        extra["teacher"], more = stages.teacher_of(settings, seed)
        built = [*built, *more]
    return start, extra, [*built, *extra.values()]


def build_stages(settings: Settings, arm: str, seed: int) -> dict:
    """Job: what an arm starts from, before the cells that share it."""
    return {"stages": [str(folder) for folder in inputs_of(settings, arm, seed)[2]]}


def run_cell(settings: Settings, arm: str, seed: int) -> dict:
    """Job: one arm under one seed, from its start to its final records and saved model."""
    start, extra, built = inputs_of(settings, arm, seed)
    folder = cell_folder(run_folder(settings), Cell(arm, seed))
    key = fingerprint([settings.branches[arm], number_keys(settings, "branches"), seed], CODE, [start, *extra.values()])
    complete_cell(folder, key, partial(train_and_evaluate, settings, arm, seed, start, extra, folder))
    final = [row for row in read_jsonl(folder / "records.jsonl") if row["final"] and row["metric"] == "success"]
    success = {row["split"]: row["value"] for row in final}
    headline = f"success {success['id']:.1%} on chains of trained lengths, {success['ood']:.1%} on longer ones"
    return {"stages": [str(path) for path in built], "headline": headline}


def train_and_evaluate(settings: Settings, arm: str, seed: int, start: Path, extra: dict[str, Path], folder: Path) -> None:
    """The cell itself: train the arm, measure it, keep its model."""
    branch = settings.branches[arm]
    labels = {"experiment": NUMBER, "scale": settings.scale, "variant": settings.variant, "arm": arm, "seed": seed}
    with RunLog(folder, labels, tracker=settings.tracker) as log:
        reference, tokenizer = load_model(start / "model", settings.device, settings.dtype)
        model, _ = load_model(start / "model", settings.device, settings.dtype)
        scorer = stages.load_reward_model(extra["reward"]) if "reward" in extra else None
        evaluator = Evaluator(settings, reference, tokenizer, log, seed, scorer)
        if branch.method not in ("none", "best_of"):
            evaluator.curve(model, 0)
        meter = arms.train(arms.Arm(arm, settings, model, tokenizer, seed, folder, log, evaluator, extra))
        if branch.method == "best_of":
            meter.add_forward(evaluator.best_of(model, settings.arm_config(arm).samples))
        else:
            save_model(model, tokenizer, folder / "model")
            evaluator.final(model)
        log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)


def plan(settings: Settings, seeds: list[int], names: list[str]) -> list[Job]:
    """The jobs, seeds in groups of one per base: what is shared, then the cells. The one teacher is built beside the rest."""
    where = "experiments.exp_7_algorithms.run:"
    learned = [arm for arm in names if settings.branches[arm].method in NEEDS_REWARD][:1]
    distilled = [arm for arm in names if settings.branches[arm].method == "distill"][:1]
    jobs = []

    def given(cell: Cell) -> dict:
        return {"settings": settings, "arm": cell.arm, "seed": cell.seed}

    for begin in range(0, len(seeds), settings.bases):
        group = seeds[begin : begin + settings.bases]
        shared = [Cell(names[0], seed) for seed in group]
        shared += [Cell(arm, group[0]) for arm in distilled if begin == 0]
        shared += [Cell(arm, seed) for arm in learned for seed in group]
        cells = [Cell(arm, seed) for seed in group for arm in names]
        jobs += [Job(f"start of {cell.name}", where + "build_stages", given(cell)) for cell in dict.fromkeys(shared)]
        jobs += [Job(cell.name, where + "run_cell", given(cell)) for cell in cells]
    return jobs


def main(settings: Settings) -> int:
    """Runs the chosen cells on the worker processes, gathers them and writes the report; 1 if a cell failed."""
    seeds, names = seed_list(settings), settings.chosen()
    cells = [Cell(arm, seed) for seed in seeds for arm in names]
    return run_study(settings, plan(settings, seeds, names), cells, claims=CLAIMS, figures=figures, sections=sections)


if __name__ == "__main__":
    cli(NUMBER, Settings, main)
