"""Experiment 7-9: a teacher's chains of thought, filtered by a verifier, passed on to a smaller student.

    python -m experiments.exp_7_09_cot_distillation.run scale=laptop seeds=3

A cell is an arm under a seed. Seed s has a student and training problems of its own; all seeds share the teachers and the
evaluation problems.
"""

from functools import partial
from pathlib import Path

from common.checkpoints import load_model, save_model
from common.config import cli, number_keys, run_folder, seed_list
from common.files import read_json
from common.jobs import Cell, Job, cell_folder, complete_cell
from common.records import read_jsonl
from common.runlog import RunLog
from common.stages import fingerprint
from common.study import run_study
from experiments.exp_7_09_cot_distillation import arms, stages
from experiments.exp_7_09_cot_distillation.evaluate import measure, record_imitation
from experiments.exp_7_09_cot_distillation.figures import figures, sections
from experiments.exp_7_09_cot_distillation.settings import Settings

__all__ = ["NUMBER", "TITLE", "Settings", "figures", "sections"]
NUMBER = "7-9"
TITLE = "Chain-of-thought distillation and rejection sampling"
CLAIMS = Path(__file__).with_name("claims.yaml")
CODE = [
    *stages.SAMPLE_CODE,
    *(stages.HERE + name for name in ("arms", "evaluate", "run", "stages")),
    *(f"common.{name}" for name in ("advantages", "algo", "arm", "compute", "grpo", "loop", "policy")),
]
TEACHER = "text"  # whose lead is recovered by arms without a teacher of their own


def inputs_of(settings: Settings, arm: str, seed: int) -> tuple[Path, dict[str, Path], dict[str, Path], list[Path]]:
    """The start of an arm, the answers it uses by teacher, what start and teacher can do, and all stages behind these."""
    branch = settings.branches[arm]
    lead = branch.select.teachers[0]
    measured = stages.teacher(settings, branch.model, seed) if branch.method == "teacher" else None
    start = measured or stages.student(settings, branch.model, seed)
    teacher, own = stages.teacher(settings, lead, seed), stages.student(settings, "student", seed)
    # The wrong answers of the text teacher are what any arm may have imitated.
    needed = dict.fromkeys([TEACHER, *(branch.select.teachers if branch.method == "distill" else ())])
    answers = {name: stages.answers(settings, name, seed) for name in needed}
    behind = own if measured else start
    could = {"start": stages.before(settings, behind, seed), "teacher": stages.before(settings, teacher, seed)}
    sources = [stages.teacher(settings, name, seed) for name in answers]
    return start, answers, could, [*dict.fromkeys([start, behind, teacher, *sources, *answers.values(), *could.values()])]


def build_stages(settings: Settings, arm: str, seed: int) -> dict:
    """Job: what an arm starts from, before the cells that share it."""
    return {"stages": [str(folder) for folder in inputs_of(settings, arm, seed)[3]]}


def run_cell(settings: Settings, arm: str, seed: int) -> dict:
    """Job: one arm under one seed, from its start to its final records and saved model."""
    start, answers, could, built = inputs_of(settings, arm, seed)
    folder = cell_folder(run_folder(settings), Cell(arm, seed))
    inputs = [start, *answers.values(), *could.values()]
    key = fingerprint([settings.branches[arm], number_keys(settings, "branches"), seed], CODE, inputs)
    complete_cell(folder, key, partial(train_and_measure, settings, arm, seed, start, answers, could, folder))
    final = [row for row in read_jsonl(folder / "records.jsonl") if row["final"] and row["metric"] == "success"]
    success = {row["split"]: row["value"] for row in final}
    headline = f"success {success['id']:.1%} on problems of trained lengths, {success['ood']:.1%} on longer ones"
    return {"stages": [str(path) for path in built], "headline": headline}


def train_and_measure(
    settings: Settings, arm: str, seed: int, start: Path, answers: dict[str, Path], could: dict[str, Path], folder: Path
) -> None:
    """The cell itself: train the arm, keep its model, measure it."""
    labels = {"experiment": NUMBER, "scale": settings.scale, "variant": settings.variant, "arm": arm, "seed": seed}
    with RunLog(folder, labels, tracker=settings.tracker) as log:
        model, tokenizer = load_model(start / "model", settings.device, settings.dtype)
        branch = settings.branches[arm]
        own = {name: answers[name] for name in branch.select.teachers if name in answers}
        meter = arms.train(arms.Arm(arm, settings, model, tokenizer, seed, folder, log, own))
        if branch.method not in ("none", "teacher"):
            save_model(model, tokenizer, folder / "model")
        before, teacher = (read_json(could[name] / "success.json") for name in ("start", "teacher"))
        measure(settings, model.eval(), tokenizer, log, seed, before, teacher)
        wrong = [c for c in stages.candidates(settings, answers[TEACHER], seed, branch.select.candidates) if not c.success]
        record_imitation(settings, model, tokenizer, log, seed, stages.train_problems(settings, seed), wrong)
        log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)


def plan(settings: Settings, seeds: list[int], names: list[str]) -> list[Job]:
    """The jobs: stages, then the cells. The teacher that others wait for comes first, one that goes on from it last."""
    where = "experiments.exp_7_09_cot_distillation.run:"
    kinds = {}  # one arm for each set of stages
    for name in names:
        branch = settings.branches[name]
        kinds.setdefault((branch.model, branch.method == "teacher", branch.select.teachers), name)

    def given(cell: Cell) -> dict:
        return {"settings": settings, "arm": cell.arm, "seed": cell.seed}

    def rank(name: str) -> int:
        branch = settings.branches[name]
        return 1 if branch.method != "teacher" else 2 if settings.teachers[branch.model].base else 0

    order = sorted(kinds.values(), key=rank)
    shared = [Cell(name, seed) for seed in seeds for name in order]
    cells = [Cell(arm, seed) for seed in seeds for arm in names]
    jobs = [Job(f"start of {cell.name}", where + "build_stages", given(cell)) for cell in shared]
    return [*jobs, *(Job(cell.name, where + "run_cell", given(cell)) for cell in cells)]


def main(settings: Settings) -> int:
    """Runs the chosen cells on the worker processes, gathers them and writes the report; 1 if a cell failed."""
    seeds, names = seed_list(settings), settings.chosen()
    cells = [Cell(arm, seed) for seed in seeds for arm in names]
    return run_study(settings, plan(settings, seeds, names), cells, claims=CLAIMS, figures=figures, sections=sections)


if __name__ == "__main__":
    cli(NUMBER, Settings, main)
