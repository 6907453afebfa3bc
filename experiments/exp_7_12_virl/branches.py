"""From nothing to a trained arm: base, start, over-trained start, and the branches that leave the start at equal compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common.checkpoints import load_model
from common.compute import Budget, Meter
from common.grpo import train_grpo
from common.models import build_decoder, parameter_count
from common.ppo import train_ppo
from common.runlog import RunLog
from common.seeding import base_seed
from common.sft import SftBatch, SftConfig, train_sft
from common.supervised import SFT_MODULES, supervised
from common.tokenizers import PhraseEncoder
from experiments.exp_7_12_virl import data, routes
from experiments.exp_7_12_virl.cities import KINDS
from experiments.exp_7_12_virl.env import VirlNavigation
from experiments.exp_7_12_virl.evaluate import Evaluator
from experiments.exp_7_12_virl.settings import Branch, Settings

HERE = "experiments.exp_7_12_virl."
OWN = ("cities", "osm", "published", "routes", "prompts", "grading", "env", "views", "data")
SFT_CODE = [*(HERE + name for name in OWN), *SFT_MODULES]


def train_routes(settings: Settings, seed: int) -> list[routes.Route]:
    """The training routes of a seed."""
    return routes.items(settings.cities.train, "train", seed, settings.train_routes, settings.rail)


def base_stage(settings: Settings, seed: int) -> Path:
    """A decoder pre-trained on walks under many action spaces, the tested pairing withheld."""

    def model() -> tuple[Any, Any]:
        tokenizer = data.build_tokenizer(settings.all_cities)
        return build_decoder(settings.model, tokenizer, seed), tokenizer

    def batches(tokenizer: Any) -> Callable[[int], SftBatch]:
        names = routes.all_names(tuple(n for n in settings.all_cities if n.split("-")[0] not in KINDS))
        corpus = data.Corpus(PhraseEncoder(tokenizer), settings.corpus, settings.rail, seed, names)
        return lambda step: corpus.batch(step, settings.pretraining.batch_size)

    return stage_of(settings, "base", seed, settings.pretraining, settings.pretraining_steps, model, batches, [])


def sft_stage(settings: Settings, before: Path, seed: int, name: str, steps: int) -> Path:
    """The model of a stage after some SFT steps on the seed's training routes."""

    def batches(tokenizer: Any) -> Callable[[int], SftBatch]:
        return data.Demonstrations(PhraseEncoder(tokenizer), train_routes(settings, seed)).batches(
            seed, name, settings.start.batch_size
        )

    return stage_of(settings, name, seed, settings.start, steps, lambda: load_model(before / "model"), batches, [before])


def stage_of(
    settings: Settings, name: str, seed: int, config: SftConfig, steps: int, model: Any, batches: Any, inputs: list[Path]
) -> Path:
    key = [settings.model, settings.corpus, settings.rail, settings.cities, settings.train_routes]
    return supervised(
        name, experiment=settings.experiment, runs_dir=settings.runs_dir, threads=settings.threads, seed=seed,
        config=config, steps=steps, model=model, batches=batches, key=key, modules=SFT_CODE, inputs=inputs,
    )  # fmt: skip


def start_of(settings: Settings, arm: str, seed: int) -> tuple[Path, list[Path]]:
    """The folder an arm starts from, and all stages that led to it."""
    base = base_stage(settings, base_seed(seed, settings.bases))
    if settings.branches[arm].start == "base":
        return base, [base]
    start = sft_stage(settings, base, seed, "start", settings.start_steps)
    if settings.branches[arm].start == "start":
        return start, [base, start]
    overfit = sft_stage(settings, start, seed, "overfit", settings.overfit_steps)
    return overfit, [base, start, overfit]


def train_branch(
    settings: Settings, arm: str, start: Path, seed: int, folder: Path, log: RunLog, evaluator: Evaluator
) -> tuple[Any, Meter]:
    """The trained model of an arm and the compute it used, which ends at the budget whatever the method."""
    branch = settings.branches[arm]
    model, tokenizer = load_model(start / "model", settings.device, settings.dtype)
    if branch.method == "none":
        return model, Meter(parameter_count(model))
    whole, points = branch.budget * settings.branch_flops, settings.evaluation.points
    where: dict[str, Any] = {
        "budget": Budget(flops=whole),
        "log": log,
        "folder": folder,
        "evaluate": lambda step, flops: evaluator.curve(model, 100 * min(points, int(points * flops / whole)) // points),
        "evaluate_every_flops": whole / points,
    }
    evaluator.curve(model, 0)
    if branch.method == "sft":
        config = settings.sft if branch.lr is None else SftConfig(**{**vars(settings.sft), "lr": branch.lr})
        demos = data.Demonstrations(PhraseEncoder(tokenizer), train_routes(settings, seed))
        return model, train_sft(model, demos.batches(seed, "sft", config.batch_size), config, **where)
    algo = settings.algo_config(arm)

    def task_at(step: int, count: int) -> list[dict]:
        return data.training_tasks(settings.cities.train, settings.train_routes, seed, step, count)

    loop = train_ppo if algo.name == "ppo" else train_grpo
    return model, loop(model, tokenizer, training_env(settings, branch), task_at, algo, seed=seed, **where)


def training_env(settings: Settings, branch: Branch) -> Callable[[], VirlNavigation]:
    """What makes the environments that an arm trains in."""
    switches = (*settings.switches, *branch.switches)
    return partial(VirlNavigation, tries=branch.tries, reward=branch.reward, switches=switches, rail=settings.rail)
