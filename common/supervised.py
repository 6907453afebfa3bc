"""A supervised stage: a model that some steps of SFT made, cached by its configuration, code and inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.checkpoints import save_model
from common.compute import Budget
from common.runlog import RunLog
from common.sft import SeenBatch, SftBatch, SftConfig, train_sft
from common.stages import stage

SFT_MODULES = [
    *("common.tokenizers", "common.seeding", "common.supervised"),
    *(f"common.{name}" for name in ("sft", "muon", "models", "losses", "target_losses", "episodes", "fused", "rejection")),
]  # what the weights of a supervised stage depend on, besides the experiment's own modules


def stage_log(experiment: str, folder: Path, name: str, seed: int) -> RunLog:
    """The log of a shared stage, in its own folder; scales and variants that share the stage share the log."""
    return RunLog(folder, {"experiment": experiment, "scale": "shared", "variant": None, "arm": name, "seed": seed})


def finish_stage(model: Any, tokenizer: Any, folder: Path) -> None:
    """Keeps the model of a stage under ``model`` and drops the training states that led to it."""
    save_model(model, tokenizer, folder / "model")
    for state in folder.glob("state*.pt"):
        state.unlink()


def supervised(
    name: str,
    *,
    experiment: str,
    runs_dir: str | Path,
    threads: int,
    seed: int,
    config: SftConfig,
    steps: int,
    model: Callable[[], tuple[Any, Any]],
    batches: Callable[[Any], Callable[[int], SftBatch | SeenBatch]],
    key: Any,
    modules: Sequence[str],
    inputs: Sequence[Path] = (),
) -> Path:
    """The stage's folder, with the trained model under ``model``; built once.

    Args:
        model: () -> (model, tokenizer) to begin with; called in a build only, as `batches` is.
        batches: tokenizer -> (step -> the batch of that step).
        key: whatever else the numbers depend on: the model's shape, the corpus' configuration.
        modules: the experiment's modules that make model and data, and SFT_MODULES.
        inputs: stages that this one goes on from.
    """

    def build(folder: Path) -> None:
        trained, tokenizer = model()
        with stage_log(experiment, folder, name, seed) as log:
            train_sft(trained, batches(tokenizer), config, budget=Budget(steps=steps), log=log, folder=folder)
        finish_stage(trained, tokenizer, folder)

    return stage(
        name, build, config=[config, steps, seed, key, threads], modules=modules, inputs=inputs, root=Path(runs_dir) / "stages"
    )
