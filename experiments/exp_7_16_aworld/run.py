"""AWorld, learning to use tools in a sandbox: from start models to the records of every arm.

    python -m experiments.exp_7_16_aworld.run scale=laptop seeds=3

A cell is an arm under a seed. Seed s uses start model s mod `bases`; arms of a seed share it, and all of them the test
questions. Each cell starts its own servers and stops them.
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
from common.supervised import SFT_MODULES
from experiments.exp_7_16_aworld import arms, cluster, stages
from experiments.exp_7_16_aworld.env import Envs
from experiments.exp_7_16_aworld.evaluate import Evaluator, held, leak_records
from experiments.exp_7_16_aworld.figures import figures, sections
from experiments.exp_7_16_aworld.hub import Bridge
from experiments.exp_7_16_aworld.settings import Settings

__all__ = ["NUMBER", "TITLE", "Settings", "figures", "sections"]
NUMBER = "7-16"
TITLE = "AWorld: learning to use tools in a sandbox"
CLAIMS = Path(__file__).with_name("claims.yaml")
COMMON = ("advantages", "algo", "arm", "compute", "decoding", "evaluation", "grpo", "loop", "lora", "policy", "rollout")
OWN = ("arms", "clients", "evaluate", "run", "scripts", "serve", "stages", "supervisor")
CODE = [*stages.CODE, *(stages.HERE + name for name in OWN), *SFT_MODULES, *(f"common.{name}" for name in COMMON)]
MEASURED = ("none", "sft", "grpo")  # methods whose arms answer the test questions


def build_start(settings: Settings, seed: int) -> dict:
    """Job: a start model, before the cells that share it."""
    return {"stages": [str(stages.start_of(settings, seed))]}


def run_cell(settings: Settings, arm: str, seed: int) -> dict:
    """Job: one arm under one seed, from its start to its final records and saved model."""
    start, worlds = stages.start_of(settings, seed), stages.worlds_of(settings)
    folder = cell_folder(run_folder(settings), Cell(arm, seed))
    key = fingerprint([settings.branches[arm], number_keys(settings, "branches"), seed], CODE, [start, worlds])
    complete_cell(folder, key, partial(train_and_evaluate, settings, arm, seed, start, worlds, folder))
    final = {row["metric"]: row["value"] for row in read_jsonl(folder / "records.jsonl") if row["final"]}
    headline = ", ".join(f"{name} {final[name]:.3g}" for name in HEADLINE if final.get(name) is not None)
    return {"stages": [str(start), str(worlds)], "headline": headline}


HEADLINE = ("success", "tool_success", "obeyed", "speed_up", "rollout_share", "other_tools")


def train_and_evaluate(settings: Settings, arm: str, seed: int, start: Path, worlds: Path, folder: Path) -> None:
    """The cell itself: train the arm, measure it, keep its model, and look at what its servers left."""
    branch = settings.branches[arm]
    labels = {"experiment": NUMBER, "scale": settings.scale, "variant": settings.variant, "arm": arm, "seed": seed}
    with RunLog(folder, labels, tracker=settings.tracker) as log:
        reference, tokenizer = load_model(start / "model", settings.device, settings.dtype)
        model, _ = load_model(start / "model", settings.device, settings.dtype)
        model = add_adapter(model, settings.lora, "rl", seed) if branch.method in ("sft", "grpo", "pace") else model
        before = held()
        with Bridge(stages.hub_of(settings, worlds, folder, {} if branch.steady else settings.conditions)) as bridge:
            envs = Envs(bridge, worlds, **settings.env_options())
            evaluator = Evaluator(settings, envs, reference, tokenizer, log, seed)
            work = arms.Arm(arm, settings, model, tokenizer, seed, folder, log, worlds, envs, evaluator)
            meter = arms.train(work)
            if branch.method in MEASURED:
                save_model(model, tokenizer, folder / "model")
                evaluator.final(model)
        if branch.method in MEASURED:
            leak_records(evaluator, before, arms.episodes_played(work))
        log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)


def plan(settings: Settings, seeds: list[int], names: list[str]) -> list[Job]:
    """The jobs: the start models, one per base, then the cells that begin with them."""
    where, jobs = "experiments.exp_7_16_aworld.run:", list[Job]()
    for seed in dict.fromkeys(base_seed(seed, settings.bases) for seed in seeds):
        jobs.append(Job(f"start of seed {seed}", where + "build_start", {"settings": settings, "seed": seed}))
    for cell in (Cell(arm, seed) for seed in seeds for arm in names):
        jobs.append(Job(cell.name, where + "run_cell", {"settings": settings, "arm": cell.arm, "seed": cell.seed}))
    return jobs


def main(settings: Settings) -> int:
    """Runs the chosen cells on the worker processes, gathers them and writes the report; 1 if a cell failed."""
    if settings.scale == "cluster":
        return cluster.main(settings)
    seeds, names = seed_list(settings), settings.chosen()
    cells = [Cell(arm, seed) for seed in seeds for arm in names]
    return run_study(settings, plan(settings, seeds, names), cells, claims=CLAIMS, figures=figures, sections=sections)


if __name__ == "__main__":
    cli(NUMBER, Settings, main)
