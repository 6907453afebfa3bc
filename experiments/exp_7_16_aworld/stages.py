"""What the arms share: the folder of all worlds, and the start models, each built once; and a cell's hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.checkpoints import load_model, save_model
from common.models import build_decoder
from common.rejection import row_batches
from common.seeding import base_seed
from common.sft import SftBatch
from common.stages import stage
from common.supervised import SFT_MODULES, supervised
from experiments.exp_7_16_aworld import data
from experiments.exp_7_16_aworld.hub import Hub, LocalHub, RecordingHub, ReplayHub, ServerHub, Store
from experiments.exp_7_16_aworld.settings import Settings
from experiments.exp_7_16_aworld.world import make_world, world_folder, write_world

HERE = "experiments.exp_7_16_aworld."
FILES = [HERE + name for name in ("world", "servers.office", "servers.media", "servers.desk")]
TOOL_CODE = [HERE + f"servers.{name}" for name in ("web", "library", "office", "media", "code", "desk")]
CODE = [HERE + name for name in ("tool", "desk", "questions", "scorer", "protocol", "env", "hub", "data", "world")] + TOOL_CODE


def worlds_of(settings: Settings) -> Path:
    """A folder with the files of every world that the configuration uses."""
    numbers = [number for split in data.SPLITS for number in data.worlds(split, getattr(settings.worlds, split))]

    def build(folder: Path) -> None:
        for number in numbers:
            write_world(make_world(number), world_folder(folder, number))

    return stage("worlds", build, config=numbers, modules=FILES, root=Path(settings.runs_dir) / "stages")


def start_of(settings: Settings, seed: int) -> Path:
    """A start model: a decoder that learnt the tools' language from scripts of mixed quality, and nothing else."""
    if settings.model_path is not None:
        return pretrained(settings)
    first, worlds = base_seed(seed, settings.bases), worlds_of(settings)

    def model() -> tuple[Any, Any]:
        tokenizer = data.build_tokenizer()
        return build_decoder(settings.model, tokenizer, first), tokenizer

    def batches(tokenizer: Any) -> Callable[[int], SftBatch]:
        rows = data.scripted_rows(
            tokenizer, worlds, "start", settings.worlds.start, settings.start_mix, settings.start_scripts, first,
            settings.env_options(), settings.conditions,
        )  # fmt: skip
        return row_batches(rows, tokenizer.pad_token_id, settings.start_training.batch_size, first, "start")

    return supervised(
        "start-aworld", experiment=settings.experiment, runs_dir=settings.runs_dir, threads=settings.threads, seed=first,
        config=settings.start_training, steps=settings.start_steps, model=model, batches=batches, inputs=[worlds],
        key=[settings.model, settings.start_mix, settings.start_scripts, settings.conditions, settings.env_options()],
        modules=[*CODE, HERE + "scripts", *SFT_MODULES],
    )  # fmt: skip


def pretrained(settings: Settings) -> Path:
    """The model of model_path as a stage, in place of every start model."""

    def build(folder: Path) -> None:
        save_model(*load_model(str(settings.model_path), dtype=settings.dtype), folder / "model")

    key = [settings.model_path, settings.dtype]
    return stage("pretrained", build, config=key, modules=["common.checkpoints"], root=Path(settings.runs_dir) / "stages")


def hub_of(settings: Settings, worlds: Path, folder: Path, conditions: dict[str, dict[str, Any]]) -> Hub:
    """Where a cell's calls go; what servers say on stderr goes to servers.log in its folder."""
    if settings.tools == "local":
        return LocalHub(worlds, conditions)
    if settings.tools == "replay":
        return ReplayHub(Store(Path(str(settings.store))))
    servers = ServerHub(worlds, conditions, settings.patience, folder / "servers.log")
    return RecordingHub(servers, Store(Path(str(settings.store)))) if settings.tools == "record" else servers
