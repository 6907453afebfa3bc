"""From nothing to a trained arm: base, start, over-trained start, and the branches that leave the start at equal compute."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common import smollm2
from common.backends import trl, trl_sft
from common.cards import hands
from common.cards.corpus import NUMBERS, PREFIXES, Corpus
from common.checkpoints import load_model, save_model
from common.compute import Budget, Meter
from common.config import load_algo
from common.episodes import Episode
from common.grpo import train_grpo
from common.lora import add_adapter, learning_rate
from common.models import build_decoder, parameter_count
from common.ppo import train_ppo
from common.rejection import RejectionConfig, Samples, row_batches, verified_samples
from common.runlog import RunLog
from common.seeding import generator
from common.sft import SftBatch, pad_rows, train_sft
from common.stages import stage
from common.supervised import SFT_MODULES, finish_stage, stage_log, supervised
from common.tokenizers import PhraseEncoder, number_tokens
from experiments.exp_7_11_general_points import data
from experiments.exp_7_11_general_points.evaluate import Evaluator
from experiments.exp_7_11_general_points.settings import Branch, Settings

HERE = "experiments.exp_7_11_general_points."
CARDS = [f"common.cards.{name}" for name in ("corpus", "hands", "prompts")]
SFT_CODE = [HERE + "data", *CARDS, "common.lora", *SFT_MODULES]


def base_stage(settings: Settings, base_seed: int, prior: str) -> Path:
    """Folder with the base under ``model``: pre-trained on the generic corpus, or the given model as it is."""
    corpus = settings.prior_corpus(prior)

    def model() -> tuple[Any, Any]:
        tokenizer = data.build_tokenizer()
        numbers = number_tokens(tokenizer, PREFIXES, NUMBERS)
        return build_decoder(settings.model, tokenizer, base_seed, numbers), tokenizer

    def batches(tokenizer: Any) -> Callable[[int], SftBatch]:
        texts = Corpus(PhraseEncoder(tokenizer), corpus, base_seed)
        return lambda step: texts.batch(step, settings.pretraining.batch_size)

    def copy(folder: Path) -> None:
        save_model(*load_model(smollm2.resolve(str(settings.model_path)), dtype=settings.dtype), folder / "model")

    root = Path(settings.runs_dir) / "stages"
    if settings.model_path is not None:
        return stage("base", copy, config=[settings.model_path, settings.dtype], modules=["common.checkpoints"], root=root)
    return supervised(
        "base", experiment=settings.experiment, runs_dir=settings.runs_dir, threads=settings.threads, seed=base_seed,
        config=settings.pretraining, steps=settings.pretraining_steps, model=model, batches=batches,
        key=[settings.model, corpus], modules=SFT_CODE,
    )  # fmt: skip


def sft_stage(settings: Settings, base: Path, split_seed: int, name: str, kind: str, steps: int) -> Path:
    """Folder with ``model``: the base after some SFT steps on the split's training hands (an adapter is merged in)."""

    def build(folder: Path) -> None:
        model, tokenizer = load_model(base / "model", settings.device, settings.dtype)
        model = add_adapter(model, settings.lora, "sft", split_seed)
        config = replace(settings.start, lr=learning_rate(settings.start.lr, settings.lora))
        batch_at = demonstration_batches(settings, tokenizer, split_seed, kind, split_seed, config.batch_size)
        with stage_log(settings.experiment, folder, name, split_seed) as log:
            train_sft(model, batch_at, config, budget=Budget(steps=steps), log=log, folder=folder)
        finish_stage(model.merge_and_unload() if settings.lora.enabled else model, tokenizer, folder)

    config = [
        settings.start,
        settings.lora,
        settings.trace,
        settings.train_hands,
        kind,
        steps,
        split_seed,
        settings.dtype,
    ]
    root = Path(settings.runs_dir) / "stages"
    return stage(name, build, config=config, modules=SFT_CODE, inputs=[base], root=root)


def train_hands(settings: Settings, split_seed: int) -> tuple[tuple[int, ...], ...]:
    """The training hands of a split, or the first ``train_hands`` of them."""
    return hands.splits(split_seed).train[: settings.train_hands]


def demonstration_batches(
    settings: Settings, tokenizer: Any, split_seed: int, kind: str, seed: int, count: int
) -> Callable[[int], SftBatch]:
    """step -> batch of worked answers."""
    encode = data.demonstration_encoder(tokenizer)
    demos = data.Demonstrations(train_hands(settings, split_seed), encode, kind, settings.trace, tokenizer.eos_token)
    return lambda step: pad_rows(demos.rows(seed, step, count), tokenizer.pad_token_id)


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
    """The trained model of an arm and the compute it used, which ends at the budget whatever the method."""
    model, tokenizer = load_model(start / "model", settings.device, settings.dtype)
    if branch.method == "none":
        return model, Meter(parameter_count(model))
    model = add_adapter(model, settings.lora, "rl" if branch.method == "rl" else "sft", seed)
    whole = branch.budget * settings.branch_flops
    budget = Budget(flops=whole)
    points: dict[str, Any] = {
        "evaluate": lambda step, flops: evaluator.curve(model, round(100 * flops / whole)),
        "evaluate_every_flops": whole / settings.evaluation.points,
    }
    if branch.method == "rl":
        meter = _train_rl(settings, branch, model, tokenizer, split_seed, seed, budget, folder, log, evaluator, points)
        return model, meter
    config = replace(settings.sft, lr=learning_rate(settings.algo.get("lr") or branch.lr or settings.sft.lr, settings.lora))
    train = partial(trl_sft.train_sft, tokenizer=tokenizer) if settings.backend == "trl" else train_sft
    if branch.method == "sft":
        batch_at = demonstration_batches(settings, tokenizer, split_seed, branch.demonstrations, seed, config.batch_size)
        return model, train(model, batch_at, config, budget=budget, log=log, folder=folder, **points)
    spent = Meter(parameter_count(model))
    samples = own_answers(settings, model, tokenizer, split_seed, seed, folder, evaluator)
    spent.add_forward(samples.tokens_forward)
    if not samples.rows:  # nothing to learn from: the arm stays at its start, and its numbers say so
        print(f"RFT: none of the start's answers under seed {seed} is right; lengthen the start (start_steps) to train it")
        return model, spent
    batch_at = row_batches(samples.rows, tokenizer.pad_token_id, config.batch_size, seed, "rft")
    points["evaluate"] = lambda step, flops: evaluator.curve(model, round(100 * (spent.flops + flops) / whole))
    left = Budget(flops=max(0.0, whole - spent.flops))
    meter = train(model, batch_at, config, budget=left, log=log, folder=folder, **points)
    meter.add_forward(spent.tokens_forward)
    return model, meter


def _train_rl(settings, branch, model, tokenizer, split_seed, seed, budget, folder, log, evaluator, points) -> Meter:
    lr = {} if branch.lr is None else {"lr": learning_rate(branch.lr, settings.lora)}
    own = {"max_new_tokens": settings.max_new_tokens, "max_turns": branch.iterations, **lr, **branch.changes}
    algo = load_algo(branch.algo, own, settings.algo)
    train = train_hands(settings, split_seed)
    grpo = trl.train_grpo if settings.backend == "trl" else train_grpo
    loop = train_ppo if algo.name == "ppo" else grpo
    return loop(
        model,
        tokenizer,
        evaluator.make_env,
        lambda step, count: data.training_tasks(train, seed, step, count),
        algo,
        seed=seed,
        budget=budget,
        log=log,
        folder=folder,
        **points,
    )


def own_answers(
    settings: Settings, model: Any, tokenizer: Any, split_seed: int, seed: int, folder: Path, evaluator: Evaluator
) -> Samples:
    """RFT's data: the start's own right answers on training hands, distinct per hand and capped, and what sampling cost.

    ``rft_samples`` answers per hand; of each hand at most ``rft_keep`` with different formulas, the first ones sampled.
    """
    train = train_hands(settings, split_seed)
    return verified_samples(
        model,
        tokenizer,
        evaluator.make_env,
        data.evaluation_tasks(train, hands.TRAINING_RULE, seed, 1),
        RejectionConfig(candidates=settings.rft_samples, cap=settings.rft_keep, max_new_tokens=settings.max_new_tokens),
        _formula,
        stream=generator(seed, "rft"),
        file=folder / "samples.json",
    )


def _formula(episode: Episode) -> str:
    return episode.texts[0].rsplit('"formula"', 1)[-1]
