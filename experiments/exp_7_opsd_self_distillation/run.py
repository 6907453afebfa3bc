"""On-policy self-distillation beside RL on three kinds of task, from pre-trained bases to the report.

    python -m experiments.exp_7_opsd_self_distillation.run scale=laptop seeds=3

A cell is an arm under a seed. Each seed has training tasks and a world of its own; seed s uses base s mod `bases`.
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
from common.stages import fingerprint
from common.study import run_study
from experiments.exp_7_opsd_self_distillation import arms, stages
from experiments.exp_7_opsd_self_distillation.evaluate import Evaluator
from experiments.exp_7_opsd_self_distillation.figures import figures, sections
from experiments.exp_7_opsd_self_distillation.settings import Settings

__all__ = ["NUMBER", "TITLE", "Settings", "figures", "sections"]
NUMBER = "7-opsd"
TITLE = "On-policy self-distillation"
CLAIMS = Path(__file__).with_name("claims.yaml")
CODE = [
    *stages.TEXT_CODE,
    *(stages.HERE + name for name in ("arms", "evaluate", "run", "stages")),
    *(
        f"common.{name}"
        for name in (
            "advantages", "algo", "arm", "compute", "decoding", "distill", "episodes", "evaluation", "fused", "grpo", "lora",
            "loop", "policy", "rollout", "seeding", "sft", "target_losses",
        )
    ),
]  # fmt: skip


def build_base(settings: Settings, style: str, seed: int) -> dict:
    """Job: a base, before the cells that share it."""
    return {"stages": [str(stages.base_of(settings, style, seed))]}


def run_cell(settings: Settings, arm: str, seed: int) -> dict:
    """Job: one arm under one seed, from its base to its final records and saved model."""
    base = stages.base_of(settings, settings.branches[arm].style, seed)
    folder = cell_folder(run_folder(settings), Cell(arm, seed))
    key = fingerprint([settings.branches[arm], number_keys(settings, "branches"), seed], CODE, [base])
    complete_cell(folder, key, partial(train_and_evaluate, settings, arm, seed, base, folder))
    final = [row for row in read_jsonl(folder / "records.jsonl") if row["final"] and row["metric"] == "success"]
    shown = ", ".join(f"{row['split']} {row['value']:.1%}" for row in final)
    return {"stages": [str(base)], "headline": f"success {shown}"}


def train_and_evaluate(settings: Settings, arm: str, seed: int, base: Path, folder: Path) -> None:
    """The cell itself: train the arm, measure it, keep its model."""
    branch = settings.branches[arm]
    labels = {"experiment": NUMBER, "scale": settings.scale, "variant": settings.variant, "arm": arm, "seed": seed}
    with RunLog(folder, labels, tracker=settings.tracker) as log:
        model, tokenizer = load_model(base / "model", settings.device, settings.dtype)
        if branch.method != "none":
            model = add_adapter(model, settings.lora, "sft" if branch.method == "sft" else "rl", seed)
        evaluator = Evaluator(settings, branch.kind, tokenizer, log, seed)
        if branch.method != "none":
            evaluator.on_the_way(model, 0, 0)
        meter = arms.train(arms.Arm(arm, settings, model, tokenizer, seed, folder, log, evaluator))
        save_model(model, tokenizer, folder / "model")
        rows = read_json_lines(folder / "metrics.jsonl")
        steps = max((row["step"] for row in rows), default=0)
        sampled = sum(row.get("len/completion_mean", 0.0) for row in rows) * settings.episodes_per_step
        for name, used in (("step_used", steps), ("flops_used", meter.flops), ("sampled_used", sampled)):
            log.record(split="train", metric=name, value=float(used), n=1, step=steps, final=True)
        evaluator.final(model, steps)
        if branch.method == "none":
            for name in settings.corpus.shares:
                kind, shown = name.split("/")
                if kind == branch.kind and shown != "nothing":
                    evaluator.teacher(model, shown, steps)
        log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)


def plan(settings: Settings, seeds: list[int], names: list[str]) -> list[Job]:
    """Seed by seed: the bases, then the cells; a base that a cell finds missing it builds or waits for."""
    where = "experiments.exp_7_opsd_self_distillation.run:"
    styles = list(dict.fromkeys(settings.branches[arm].style for arm in names))
    jobs = [
        Job(f"base {style} of seed{seed}", where + "build_base", {"settings": settings, "style": style, "seed": seed})
        for seed in seeds[: settings.bases]
        for style in styles
    ]
    cells = [Cell(arm, seed) for seed in seeds for arm in names]
    return jobs + [
        Job(cell.name, where + "run_cell", {"settings": settings, "arm": cell.arm, "seed": cell.seed}) for cell in cells
    ]


def main(settings: Settings) -> int:
    """Runs the chosen cells on the worker processes, gathers them and writes the report; 1 if a cell failed."""
    seeds, names = seed_list(settings), settings.chosen()
    cells = [Cell(arm, seed) for seed in seeds for arm in names]
    return run_study(settings, plan(settings, seeds, names), cells, claims=CLAIMS, figures=figures, sections=sections)


if __name__ == "__main__":
    cli(NUMBER, Settings, main)
