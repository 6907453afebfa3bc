"""RLVP, reward the outcome and penalise the path: from start models to the records of every arm.

    python -m experiments.exp_7_14_rlvp.run scale=laptop seeds=3

A cell is an arm under a seed. Seed s uses start model s mod `bases`; arms of a world and a seed share it, and all of them
the test tasks.
"""

from functools import partial
from pathlib import Path

from common.checkpoints import load_model, save_model
from common.config import cli, number_keys, run_folder, seed_list
from common.files import read_json
from common.jobs import Cell, Job, cell_folder, complete_cell
from common.lora import add_adapter
from common.records import read_jsonl
from common.runlog import RunLog
from common.seeding import base_seed
from common.stages import fingerprint
from common.study import run_study
from common.supervised import SFT_MODULES
from experiments.exp_7_14_rlvp import arms, stages
from experiments.exp_7_14_rlvp.evaluate import Evaluator
from experiments.exp_7_14_rlvp.figures import figures, sections
from experiments.exp_7_14_rlvp.settings import Settings

__all__ = ["NUMBER", "TITLE", "Settings", "figures", "sections"]
NUMBER = "7-14"
TITLE = "RLVP: reward the outcome, penalise the path"
CLAIMS = Path(__file__).with_name("claims.yaml")
COMMON = (
    "advantages", "algo", "arm", "compute", "credits", "decoding", "evaluation", "grpo", "guests", "judge", "loop", "lora",
    "policy", "rollout",
)  # fmt: skip
CODE = [*(stages.HERE + name for name in ("arms", "evaluate", "run", "stages")), *SFT_MODULES]
CODE += [f"common.{name}" for name in COMMON]


def build_start(settings: Settings, name: str, seed: int) -> dict:
    """Job: a start model, before the cells that share it."""
    return {"stages": [str(stages.start_of(settings, name, seed))]}


def run_cell(settings: Settings, arm: str, seed: int) -> dict:
    """Job: one arm under one seed, from its start to its final records and saved model."""
    branch = settings.branches[arm]
    start = stages.start_of(settings, settings.worlds[branch.world].start, seed)
    folder = cell_folder(run_folder(settings), Cell(arm, seed))
    apart = number_keys(settings, "branches", "worlds", "starts")
    judge = stages.judge_of(settings, branch.world, seed) if branch.judged else None
    built = [start] if judge is None else [start, judge]
    key = fingerprint(
        [branch, settings.worlds[branch.world], apart, seed], [*stages.code_of(settings.domain(branch.world)), *CODE], built
    )
    complete_cell(folder, key, partial(train_and_evaluate, settings, arm, seed, start, judge, folder))
    final = [row for row in read_jsonl(folder / "records.jsonl") if row["final"] and row["split"] == "hidden"]
    found = {row["metric"]: row["value"] for row in final}
    headline = f"success {found['success']:.1%}, {found['violations']:.2f} violations in {found['calls']:.1f} calls"
    return {"stages": [str(path) for path in built], "headline": headline}


def train_and_evaluate(settings: Settings, arm: str, seed: int, start: Path, judge: Path | None, folder: Path) -> None:
    """The cell itself: train the arm, measure it, keep its model."""
    branch = settings.branches[arm]
    labels = {"experiment": NUMBER, "scale": settings.scale, "variant": settings.variant, "arm": arm, "seed": seed}
    with RunLog(folder, labels, tracker=settings.tracker) as log:
        reference, tokenizer = load_model(start / "model", settings.device, settings.dtype)
        model, _ = load_model(start / "model", settings.device, settings.dtype)
        model = model if branch.method == "none" else add_adapter(model, settings.lora, "rl", seed)
        evaluator = Evaluator(settings, branch.world, reference, tokenizer, log, seed)
        meter = arms.train(arms.Arm(arm, settings, model, tokenizer, seed, folder, log, evaluator, judge))
        save_model(model, tokenizer, folder / "model")
        if judge is not None:
            for name, value in read_json(judge / stages.QUALITY).items():
                reason = {} if value is not None else {"reason": "the judge names nothing, or there is nothing to name"}
                evaluator.put("train", f"judge_{name}", value, settings.judge_episodes, **reason)
        evaluator.final(model, ["hidden", *branch.views])
        log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)


def plan(settings: Settings, seeds: list[int], names: list[str]) -> list[Job]:
    """The jobs: for each kind of start model, the models, one per base, then the cells that begin with them."""
    where, jobs = "experiments.exp_7_14_rlvp.run:", list[Job]()
    kind = {arm: settings.worlds[settings.branches[arm].world].start for arm in names}
    for name in dict.fromkeys(kind.values()):
        for seed in dict.fromkeys(base_seed(seed, settings.bases) for seed in seeds):
            given = {"settings": settings, "name": name, "seed": seed}
            jobs.append(Job(f"start {name} of seed {seed}", where + "build_start", given))
        for cell in (Cell(arm, seed) for seed in seeds for arm in names if kind[arm] == name):
            jobs.append(Job(cell.name, where + "run_cell", {"settings": settings, "arm": cell.arm, "seed": cell.seed}))
    return jobs


def main(settings: Settings) -> int:
    """Runs the chosen cells on the worker processes, gathers them and writes the report; 1 if a cell failed."""
    seeds, names = seed_list(settings), settings.chosen()
    cells = [Cell(arm, seed) for seed in seeds for arm in names]
    return run_study(settings, plan(settings, seeds, names), cells, claims=CLAIMS, figures=figures, sections=sections)


if __name__ == "__main__":
    cli(NUMBER, Settings, main)
