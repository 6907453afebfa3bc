"""ReTool: RL with a real Python interpreter in the loop, beside RL on text alone and beside SFT.

    python -m experiments.exp_7_15_retool.run scale=laptop seeds=3

A cell is an arm under a seed. Seed s uses base s mod `bases`, and the starts that SFT made of it; each seed has training
problems of its own, and all arms the same test problems.
"""

from functools import partial
from pathlib import Path

from common.checkpoints import load_model, save_model
from common.config import cli, number_keys, run_folder, seed_list
from common.files import read_json_lines
from common.jobs import Cell, Job, cell_folder, complete_cell
from common.lora import add_adapter
from common.records import read_jsonl
from common.runlog import RunLog
from common.seeding import base_seed
from common.stages import fingerprint
from common.study import run_study
from experiments.exp_7_15_retool import arms, stages
from experiments.exp_7_15_retool.evaluate import Evaluator
from experiments.exp_7_15_retool.figures import figures, sections
from experiments.exp_7_15_retool.interpreter import Interpreter
from experiments.exp_7_15_retool.settings import Settings

__all__ = ["NUMBER", "TITLE", "Settings", "figures", "sections"]
NUMBER = "7-15"
TITLE = "ReTool: reinforcement learning with an interpreter in the loop"
CLAIMS = Path(__file__).with_name("claims.yaml")
WHERE = "experiments.exp_7_15_retool.run:"
CODE = [
    *stages.TEXT_CODE,
    *(stages.HERE + name for name in ("arms", "env", "evaluate", "files", "interpreter", "run", "stages")),
    *(
        f"common.{name}"
        for name in (
            "advantages", "algo", "arm", "compute", "decoding", "episodes", "evaluation", "fused", "grpo", "lora", "loop",
            "losses", "policy", "ppo", "rollout", "seeding", "sft", "sandbox.data", "sandbox.pool", "sandbox.program",
        )
    ),
]  # fmt: skip


def build_start(settings: Settings, arm: str, seed: int) -> dict:
    """Job: what an arm starts from, before the cells that share it."""
    built = stages.start_stage(settings, seed, settings.branches[arm].start)[1]
    return {"stages": [str(folder) for folder in built]}


def run_cell(settings: Settings, arm: str, seed: int) -> dict:
    """Job: one arm under one seed, from its start to its final records and saved model."""
    start, built = stages.start_stage(settings, seed, settings.branches[arm].start)
    folder = cell_folder(run_folder(settings), Cell(arm, seed))
    key = fingerprint([settings.branches[arm], number_keys(settings, "branches"), seed], CODE, [start])
    complete_cell(folder, key, partial(train_and_evaluate, settings, arm, seed, start, folder))
    rows = read_jsonl(folder / "records.jsonl")
    found = {(row["split"], row["metric"]): row["value"] for row in rows if row["final"]}
    shown = ", ".join(f"{split} {found[split, 'success']:.1%}" for split in ("id", "long") if (split, "success") in found)
    return {"stages": [str(path) for path in built], "headline": f"success {shown}, calls {found['id', 'calls']:.2f}"}


def train_and_evaluate(settings: Settings, arm: str, seed: int, start: Path, folder: Path) -> None:
    """The cell itself: train the arm, measure it, keep its model. The interpreter lives as long as the cell."""
    branch = settings.branches[arm]
    labels = {"experiment": NUMBER, "scale": settings.scale, "variant": settings.variant, "arm": arm, "seed": seed}
    interpreter = Interpreter(settings.interpreter) if branch.tool else None
    try:
        with RunLog(folder, labels, tracker=settings.tracker) as log:
            model, tokenizer = load_model(start / "model", settings.device, settings.dtype)
            if branch.method != "none":
                model = add_adapter(model, settings.lora, "sft" if branch.method == "sft" else "rl", seed)
            evaluator = Evaluator(settings, branch, tokenizer, log, seed, interpreter)
            if branch.method != "none":
                evaluator.curve(model, 0)
            meter = arms.train(arms.Arm(arm, settings, model, tokenizer, seed, folder, log, interpreter, evaluator))
            save_model(model, tokenizer, folder / "model")
            evaluator.final(model)
            used = max((row["step"] for row in read_json_lines(folder / "metrics.jsonl")), default=0)
            tokens = meter.tokens_forward + meter.tokens_trained
            for name, value in (("step_used", used), ("tokens_per_step", tokens / max(1, used))):
                log.record(split="train", metric=name, value=float(value), n=1, step=100, final=True)
            log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)
    finally:
        if interpreter is not None:
            interpreter.close()


def plan(settings: Settings, seeds: list[int], names: list[str]) -> list[Job]:
    """The jobs: the starts of each base, then the cells; a stage that a cell finds missing it builds or waits for."""
    first: dict[tuple[int, str], Cell] = {}
    for seed in seeds:
        for arm in names:
            first.setdefault((base_seed(seed, settings.bases), settings.branches[arm].start), Cell(arm, seed))
    shared = [first[key] for key in sorted(first, key=lambda key: key[1] != "base")]
    cells = [Cell(arm, seed) for seed in seeds for arm in names]

    def given(cell: Cell) -> dict:
        return {"settings": settings, "arm": cell.arm, "seed": cell.seed}

    return [Job(f"start of {cell.name}", WHERE + "build_start", given(cell)) for cell in shared] + [
        Job(cell.name, WHERE + "run_cell", given(cell)) for cell in cells
    ]


def main(settings: Settings) -> int:
    """Runs the chosen cells on the worker processes, gathers them and writes the report; 1 if a cell failed."""
    seeds, names = seed_list(settings), settings.chosen()
    cells = [Cell(arm, seed) for seed in seeds for arm in names]
    return run_study(settings, plan(settings, seeds, names), cells, claims=CLAIMS, figures=figures, sections=sections)


if __name__ == "__main__":
    cli(NUMBER, Settings, main)
