"""From nothing to a trained arm: a base that reads and plays a little, a short SFT start, and the arms."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.cards import hands
from common.cards.corpus import NUMBERS, PREFIXES, WorkedAnswers
from common.checkpoints import load_model, save_model
from common.compute import Budget, Meter
from common.config import load_algo
from common.grpo import train_grpo
from common.models import build_decoder
from common.ppo import train_ppo
from common.runlog import RunLog
from common.sft import SeenBatch, train_sft
from common.stages import stage
from common.supervised import SFT_MODULES, finish_stage, stage_log, supervised
from common.tokenizers import PhraseEncoder, number_tokens
from common.vision import IMAGE, add_eyes, freeze_encoder, meter_for
from experiments.exp_7_11_vl_general_points import data
from experiments.exp_7_11_vl_general_points.evaluate import Evaluator
from experiments.exp_7_11_vl_general_points.settings import Branch, Settings

HERE = "experiments.exp_7_11_vl_general_points."
CARDS = [f"common.cards.{name}" for name in ("corpus", "hands", "prompts")]
SFT_CODE = [HERE + "data", HERE + "drawing", *CARDS, "common.vision", *SFT_MODULES]


def base_stage(settings: Settings, base_seed: int) -> Path:
    """Folder with the base under ``model``: pre-trained on text and pictures, or the given model as it is."""
    root = Path(settings.runs_dir) / "stages"
    if settings.model_path is not None:
        return stage("base", _copy(settings), config=[settings.model_path, settings.dtype], modules=SFT_CODE, root=root)

    def model() -> tuple[Any, Any]:
        tokenizer = data.build_tokenizer()
        decoder = build_decoder(settings.model, tokenizer, base_seed, number_tokens(tokenizer, PREFIXES, NUMBERS))
        return add_eyes(decoder, settings.vision, tokenizer.convert_tokens_to_ids(IMAGE), base_seed), tokenizer

    def batches(tokenizer: Any) -> Callable[[int], SeenBatch]:
        encoder = PhraseEncoder(tokenizer)
        written = data.WrittenCorpus(encoder, settings.corpus, base_seed, settings.vision.tokens)
        corpus = data.PretrainingCorpus(encoder, settings.vision.tokens, written, settings.pictures, base_seed)
        return lambda step: corpus.batch(step, settings.pretraining.batch_size)

    return supervised(
        "base", experiment=settings.experiment, runs_dir=settings.runs_dir, threads=settings.threads, seed=base_seed,
        config=settings.pretraining, steps=settings.pretraining_steps, model=model, batches=batches,
        key=[settings.model, settings.vision, settings.corpus, settings.pictures], modules=SFT_CODE,
    )  # fmt: skip


def _copy(settings: Settings):
    return lambda folder: save_model(*load_model(str(settings.model_path), dtype=settings.dtype), folder / "model")


def start_stage(settings: Settings, base: Path, split_seed: int) -> Path:
    """Folder with ``model``: the base after some SFT steps on diverse answers to pictures of the split's training hands."""

    def build(folder: Path) -> None:
        model, tokenizer = load_model(base / "model", settings.device, settings.dtype)
        answers = WorkedAnswers(train_hands(settings, split_seed), "diverse")
        count = settings.start.batch_size
        batch_at = data.demonstration_batches(model, tokenizer, answers, settings.trace, split_seed, count)
        with stage_log(settings.experiment, folder, "start", split_seed) as log:
            train_sft(model, batch_at, settings.start, budget=Budget(steps=settings.start_steps), log=log, folder=folder)
        finish_stage(model, tokenizer, folder)

    config = [settings.start, settings.trace, settings.train_hands, settings.start_steps, split_seed, settings.dtype]
    return stage("start", build, config=config, modules=SFT_CODE, inputs=[base], root=Path(settings.runs_dir) / "stages")


def train_hands(settings: Settings, split_seed: int) -> data.Hands:
    """The training hands of a split, or the first ``train_hands`` of them."""
    return hands.splits(split_seed).train[: settings.train_hands]


def train_branch(
    settings: Settings,
    branch: Branch,
    start: Path,
    split_seed: int,
    seed: int,
    folder: Path,
    log: RunLog,
    evaluator: Evaluator,
) -> tuple[Any, Meter]:
    """The trained model of an arm and the compute it used, images included, which ends at the budget whatever the method."""
    model, tokenizer = load_model(start / "model", settings.device, settings.dtype)
    if branch.frozen:
        freeze_encoder(model)
    evaluator.curve(model, 0)
    if branch.method == "none":
        return model, meter_for(model)
    whole = branch.budget * settings.branch_flops
    shared: dict[str, Any] = {
        "budget": Budget(flops=whole),
        "log": log,
        "folder": folder,
        "evaluate": lambda step, flops: evaluator.curve(model, round(100 * flops / whole)),
        "evaluate_every_flops": whole / settings.evaluation.points,
    }
    train = train_hands(settings, split_seed)
    if branch.method == "sft":
        config = replace(settings.sft, lr=settings.algo.get("lr") or branch.lr or settings.sft.lr)
        answers = WorkedAnswers(train, branch.demonstrations)
        batch_at = data.demonstration_batches(model, tokenizer, answers, settings.trace, seed, config.batch_size)
        return model, train_sft(model, batch_at, config, **shared)
    lr = {} if branch.lr is None else {"lr": branch.lr}
    algo = load_algo(branch.algo, {"max_new_tokens": settings.max_new_tokens, **lr, **branch.changes}, settings.algo)
    loop = train_ppo if algo.name == "ppo" else train_grpo
    make_env = evaluator.env_maker(penalty=branch.penalty)
    return model, loop(
        model,
        tokenizer,
        make_env,
        lambda step, count: data.training_tasks(train, seed, step, count),
        algo,
        seed=seed,
        **shared,
    )
