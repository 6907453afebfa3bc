"""On-policy distillation beside SFT and RL on two tasks, from pre-trained students and teachers to the report.

    python -m experiments.exp_7_opd_distillation.run scale=laptop seeds=3

A cell is an arm under a seed. Each seed has a student and training prompts of its own; a task's teacher serves all seeds.
"""

from functools import partial
from pathlib import Path

from common.checkpoints import load_model, save_model
from common.config import cli, number_keys, run_folder, seed_list
from common.jobs import Cell, Job, cell_folder, complete_cell
from common.lora import add_adapter
from common.pretrained import is_tiny
from common.records import read_jsonl
from common.runlog import RunLog
from common.stages import fingerprint
from common.study import run_study
from experiments.exp_7_opd_distillation import arms, cluster, stages
from experiments.exp_7_opd_distillation.evaluate import Evaluator
from experiments.exp_7_opd_distillation.figures import figures, sections
from experiments.exp_7_opd_distillation.settings import Settings

__all__ = ["NUMBER", "TITLE", "Settings", "figures", "sections"]
NUMBER = "7-opd"
TITLE = "On-policy distillation"
CLAIMS = Path(__file__).with_name("claims.yaml")
CODE = [
    *stages.SAMPLE_CODE,
    *(stages.HERE + name for name in ("arms", "evaluate", "run", "stages")),
    *(
        f"common.{name}"
        for name in (
            "advantages", "algo", "arm", "compute", "distill", "evaluation", "grpo", "lora", "loop", "policy", "sft",
            "target_losses",
        )
    ),
]  # fmt: skip


def inputs_of(settings: Settings, arm: str, seed: int) -> dict[str, Path]:
    """The stages of an arm by name: its start, and what its method learns from."""
    branch = settings.branches[arm]
    found = {"start": stages.pretrained(settings, branch.task, "student", seed)}
    if branch.method == "sft":
        found["answers"] = stages.teacher_answers(settings, branch.task, seed, branch.few)
    if branch.method in ("distill", "none"):
        found["teacher"] = stages.teacher_of(settings, branch.task, branch.teacher, seed)
    if branch.method == "none" and settings.task_config(arm).narrow_steps:
        found["narrow"] = stages.teacher_of(settings, branch.task, "narrow", seed)
    return found


def build_stages(settings: Settings, arm: str, seed: int) -> dict:
    """Job: what an arm starts from, before the cells that share it."""
    return {"stages": [str(folder) for folder in inputs_of(settings, arm, seed).values()]}


def run_cell(settings: Settings, arm: str, seed: int) -> dict:
    """Job: one arm under one seed, from its start to its final records and saved model."""
    built = inputs_of(settings, arm, seed)
    folder = cell_folder(run_folder(settings), Cell(arm, seed))
    key = fingerprint([settings.branches[arm], number_keys(settings, "branches"), seed], CODE, list(built.values()))
    complete_cell(folder, key, partial(train_and_evaluate, settings, arm, seed, built, folder))
    final = [row for row in read_jsonl(folder / "records.jsonl") if row["final"] and row["metric"] == "success"]
    success = {row["split"]: row["value"] for row in final}
    headline = f"success {success['id']:.1%} on trained lengths, {success['ood']:.1%} on longer ones"
    return {"stages": [str(path) for path in built.values()], "headline": headline}


def train_and_evaluate(settings: Settings, arm: str, seed: int, built: dict[str, Path], folder: Path) -> None:
    """The cell itself: train the arm, measure it, keep its model."""
    branch = settings.branches[arm]
    labels = {"experiment": NUMBER, "scale": settings.scale, "variant": settings.variant, "arm": arm, "seed": seed}
    with RunLog(folder, labels, tracker=settings.tracker) as log:
        model, tokenizer = load_model(built["start"] / "model", settings.device, settings.dtype)
        if branch.method != "none":
            model = add_adapter(model, settings.lora, "sft" if branch.method == "sft" else "rl", seed)
        evaluator = Evaluator(settings, arm, tokenizer, log, seed)
        if branch.method != "none":
            evaluator.on_the_way(model, 0, 0)
        trained = arms.Arm(arm, settings, model, tokenizer, seed, folder, log, evaluator, built)
        meter = arms.train(trained)
        save_model(model, tokenizer, folder / "model")
        steps = max((row["step"] for row in read_jsonl(folder / "metrics.jsonl")), default=0)
        for name, used in (("step_used", steps), ("flops_used", meter.flops)):
            log.record(split="train", metric=name, value=float(used), n=1, step=steps, final=True)
        evaluator.final(model, steps)
        if branch.method != "none":
            evaluator.by_compute(read_jsonl(folder / "records.jsonl"), settings.task_config(arm).branch_flops)
        if branch.few:
            evaluator.reuse(model, trained.task_at(0, settings.task_config(arm).few_items), steps)
        if branch.method == "none" and is_tiny(tokenizer):  # a right token is known where a token is a phrase
            for name in ("teacher", "narrow"):
                if name in built:
                    evaluator.trust(model, load_model(built[name] / "model")[0], name, steps)
        log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)


def plan(settings: Settings, seeds: list[int], names: list[str]) -> list[Job]:
    """Teachers and first students, then the cells, seed by seed; a stage that a cell finds missing it builds itself."""
    where = "experiments.exp_7_opd_distillation.run:"

    def given(cell: Cell) -> dict:
        return {"settings": settings, "arm": cell.arm, "seed": cell.seed}

    tasks = {settings.branches[arm].task: arm for arm in reversed(names)}
    shared = [Cell(arm, seed) for seed in seeds for arm in tasks.values()]
    jobs = [Job(f"start of {cell.name}", where + "build_stages", given(cell)) for cell in shared]
    return jobs + [Job(f"{arm}-seed{s}", where + "run_cell", given(Cell(arm, s))) for s in seeds for arm in names]


def main(settings: Settings) -> int:
    """Runs the chosen cells on the worker processes, gathers them and writes the report; 1 if a cell failed."""
    if settings.scale == "cluster":
        return cluster.main(settings)
    seeds, names = seed_list(settings), settings.chosen()
    cells = [Cell(arm, seed) for seed in seeds for arm in names]
    return run_study(settings, plan(settings, seeds, names), cells, claims=CLAIMS, figures=figures, sections=sections)


if __name__ == "__main__":
    cli(NUMBER, Settings, main)
