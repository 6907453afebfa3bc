"""AdaptThink: a tiny reasoning model learns when to think, from a pre-trained base to the records of every arm.

    python -m experiments.exp_7_10_adaptthink.run scale=laptop seeds=3

A cell is an arm under a seed. Seed s uses base s mod `bases`; the arms of a seed share base, start, training tasks and the
start's presampled scores, and all of them the test tasks.
"""

from functools import partial
from pathlib import Path

from common.checkpoints import load_model, save_model
from common.config import cli, number_keys, run_folder, seed_list
from common.jobs import Cell, Job, cell_folder, complete_cell
from common.lora import add_adapter
from common.records import read_jsonl
from common.runlog import RunLog
from common.seeding import base_seed
from common.stages import fingerprint
from common.study import run_study
from experiments.exp_7_10_adaptthink import arms, stages
from experiments.exp_7_10_adaptthink.evaluate import Evaluator
from experiments.exp_7_10_adaptthink.families import family_of
from experiments.exp_7_10_adaptthink.figures import figures, sections
from experiments.exp_7_10_adaptthink.settings import Settings

__all__ = ["NUMBER", "TITLE", "Settings", "figures", "sections"]
NUMBER = "7-10"
TITLE = "AdaptThink: learning when to think"
CLAIMS = Path(__file__).with_name("claims.yaml")
WHERE = "experiments.exp_7_10_adaptthink.run:"
CODE = [
    *stages.SFT_CODE,
    *stages.JUDGES,
    *(stages.HERE + name for name in ("arms", "evaluate", "run", "stages")),
    *(
        f"common.{name}"
        for name in ("adaptthink", "advantages", "algo", "arm", "compute", "grpo", "lora", "loop", "modes", "pairs")
    ),
    *(f"common.{name}" for name in ("policy", "preference", "presample", "rollout")),
]


def build_stages(settings: Settings, arm: str, seed: int) -> dict:
    """Job: what an arm starts from, before the cells that share it."""
    return {"stages": [str(folder) for folder in stages.inputs_of(settings, arm, seed)[2]]}


def run_cell(settings: Settings, arm: str, seed: int) -> dict:
    """Job: one arm under one seed, from its start to its final records and saved model."""
    start, rates, built = stages.inputs_of(settings, arm, seed)
    folder = cell_folder(run_folder(settings), Cell(arm, seed))
    key = fingerprint([settings.branches[arm], number_keys(settings, "branches"), seed], CODE, [start, *rates.values()])
    complete_cell(folder, key, partial(train_and_evaluate, settings, arm, seed, start, rates, folder))
    found = {
        row["metric"]: row["value"] for row in read_jsonl(folder / "records.jsonl") if row["final"] and row["split"] == "id"
    }
    headline = f"success {found['success']:.1%}, {found['length']:.1f} tokens, P(NoThinking) {found['nothink_p']:.1%}"
    return {"stages": [str(path) for path in built], "headline": headline}


def train_and_evaluate(settings: Settings, arm: str, seed: int, start: Path, rates: dict[str, Path], folder: Path) -> None:
    """The cell itself: train the arm, measure it, keep its model."""
    branch, family = settings.branches[arm], family_of(settings)
    labels = {"experiment": NUMBER, "scale": settings.scale, "variant": settings.variant, "arm": arm, "seed": seed}
    with RunLog(folder, labels, tracker=settings.tracker) as log:
        model, tokenizer = load_model(start / "model", settings.device, settings.dtype)
        if arms.trains(branch.method):
            model = add_adapter(model, settings.lora, "rl", seed)
        evaluator = Evaluator(settings, family, branch, tokenizer, log, seed)
        if arms.trains(branch.method):
            evaluator.curve(model, 0)
        meter = arms.train(arms.Arm(arm, settings, model, tokenizer, seed, folder, log, family, evaluator, rates))
        save_model(model, tokenizer, folder / "model")
        evaluator.final(model)
        log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)


def plan(settings: Settings, seeds: list[int], names: list[str]) -> list[Job]:
    """The jobs: bases first, then the stages that arms share, then the cells."""
    first: dict[tuple, Cell] = {}
    for seed in seeds:
        for arm in names:
            branch = settings.branches[arm]
            first.setdefault((0, base_seed(seed, settings.bases)), Cell(arm, seed))
            first.setdefault((1, seed, branch.answer_tokens, branch.skips, branch.method), Cell(arm, seed))
    shared = dict.fromkeys(first[key] for key in sorted(first, key=lambda key: key[0]))
    cells = [Cell(arm, seed) for seed in seeds for arm in names]

    def given(cell: Cell) -> dict:
        return {"settings": settings, "arm": cell.arm, "seed": cell.seed}

    return [Job(f"start of {cell.name}", WHERE + "build_stages", given(cell)) for cell in shared] + [
        Job(cell.name, WHERE + "run_cell", given(cell)) for cell in cells
    ]


def main(settings: Settings) -> int:
    """Runs the chosen cells on the worker processes, gathers them and writes the report; 1 if a cell failed."""
    seeds, names = seed_list(settings), settings.chosen()
    cells = [Cell(arm, seed) for seed in seeds for arm in names]
    return run_study(settings, plan(settings, seeds, names), cells, claims=CLAIMS, figures=figures, sections=sections)


if __name__ == "__main__":
    cli(NUMBER, Settings, main)
