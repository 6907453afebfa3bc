"""What the arms share, each built once: base, start, teacher, and the reward model of RLHF."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoModelForSequenceClassification

from common.checkpoints import load_model, save_model
from common.compute import Budget, Meter
from common.episodes import Episode, run_episodes
from common.files import read_json, write_json
from common.models import DecoderConfig, build_decoder, parameter_count
from common.pairs import Pair, pairs_from_episodes
from common.reward_model import build_reward_model, pair_accuracy, train_reward_model
from common.seeding import base_seed, generator
from common.sft import SftBatch
from common.stages import stage
from common.supervised import SFT_MODULES, stage_log, supervised
from common.tokenizers import PhraseEncoder, number_tokens
from experiments.exp_7_algorithms import chains, data
from experiments.exp_7_algorithms.env import ArithmeticChains
from experiments.exp_7_algorithms.settings import Settings

HERE = "experiments.exp_7_algorithms."
SFT_CODE = [HERE + "chains", HERE + "data", *SFT_MODULES]
REWARD_CODE = [*SFT_CODE, HERE + "env", "common.reward_model", "common.pairs", "common.rollout", "common.decoding"]
UNSEEN = 100  # chains on which the reward model is judged


def train_chains(settings: Settings, seed: int) -> tuple[chains.Chain, ...]:
    """The training chains of a seed."""
    return chains.items("train", seed, chains.ID_LENGTHS, settings.train_items)


def shared(settings: Settings, seed: int) -> dict[str, Any]:
    """What all supervised stages of the experiment have in common."""
    places = {"experiment": settings.experiment, "runs_dir": settings.runs_dir, "threads": settings.threads}
    return {**places, "seed": seed, "modules": SFT_CODE}


def base_stage(settings: Settings, seed: int, shape: DecoderConfig, steps: int, name: str = "base") -> Path:
    """A decoder of this shape, pre-trained on the generic corpus."""

    def model() -> tuple[Any, Any]:
        tokenizer = data.build_tokenizer()
        return build_decoder(shape, tokenizer, seed, number_tokens(tokenizer, data.PREFIXES, data.NUMBERS)), tokenizer

    def batches(tokenizer: Any) -> Callable[[int], SftBatch]:
        corpus = data.Corpus(PhraseEncoder(tokenizer), settings.corpus, seed)
        return lambda step: corpus.batch(step, settings.pretraining.batch_size)

    return supervised(
        name, **shared(settings, seed), config=settings.pretraining, steps=steps, model=model, batches=batches,
        key=[shape, settings.corpus],
    )  # fmt: skip


def start_stage(settings: Settings, base: Path, seed: int, steps: int, direct: float, name: str = "start") -> Path:
    """The base after a short SFT on the seed's training chains; a share `direct` is answered without steps."""

    def batches(tokenizer: Any) -> Callable[[int], SftBatch]:
        demos = data.Demonstrations(PhraseEncoder(tokenizer), train_chains(settings, seed), settings.start_hinted, direct)
        return demos.batches(seed, name, settings.start.batch_size)

    return supervised(
        name, **shared(settings, seed), config=settings.start, steps=steps, model=lambda: load_model(base / "model"),
        batches=batches, key=[settings.start_hinted, direct, settings.train_items], inputs=[base],
    )  # fmt: skip


def start_of(settings: Settings, seed: int) -> tuple[Path, list[Path]]:
    """The folder that every arm of a seed starts from, and the stages that led to it."""
    base = base_stage(settings, base_seed(seed, settings.bases), settings.model, settings.pretraining_steps)
    start = start_stage(settings, base, seed, settings.start_steps, settings.start_direct)
    return start, [base, start]


def teacher_of(settings: Settings, seed: int) -> tuple[Path, list[Path]]:
    """The teacher of all seeds of the same hundred: larger, and started on worked answers alone, to chains of its own."""
    first, config = seed // 100 * 100, settings.teacher
    base = base_stage(settings, first, config.model, config.pretraining_steps, "teacher-base")
    teacher = start_stage(settings, base, first + 99, config.start_steps, 0.0, "teacher")
    return teacher, [base, teacher]


def sample_answers(settings: Settings, model: Any, tokenizer: Any, tasks: list[dict], each: int, *stream: Any) -> list[Episode]:
    """`each` answers of the model to every task."""
    return run_episodes(
        model,
        tokenizer,
        ArithmeticChains,
        tasks,
        group_size=each,
        max_new_tokens=settings.max_new_tokens,
        generator=generator(*stream),
    )


def reward_stage(settings: Settings, start: Path, seed: int) -> Path:
    """Folder with the reward model under ``model``, and in ``reward.json`` its accuracy and what it took.

    Pairs are the start's answers to training chains, ordered by the verifier. The accuracy is that on pairs of unseen
    chains of the corpus' role, so that neither validation nor test items are touched.
    """
    config = settings.reward_model

    def build(folder: Path) -> None:
        policy, tokenizer = load_model(start / "model")
        pad_id = tokenizer.pad_token_id

        def compare(some: tuple[chains.Chain, ...], stream: str) -> tuple[list[Pair], int]:
            tasks = [data.task(chain) for chain in some]
            episodes = sample_answers(settings, policy, tokenizer, tasks, config.candidates, seed, stream)
            pairs = pairs_from_episodes(episodes, "all", per_prompt=config.per_prompt, seed=seed)
            return pairs, sum(episode.tokens_forward for episode in episodes)

        pairs, sampled = compare(train_chains(settings, seed)[: config.prompts], "reward pairs")
        unseen, _ = compare(chains.items("corpus", seed, chains.ID_LENGTHS, UNSEEN), "unseen pairs")
        model, meter = build_reward_model(policy), Meter(parameter_count(policy))
        if len(pairs) >= config.training.batch_size:  # else nothing to learn from: every score stays 0
            with stage_log(settings.experiment, folder, "reward", seed) as log:
                meter = train_reward_model(
                    model, pairs, config.training, pad_id=pad_id, seed=seed,
                    budget=Budget(steps=config.steps), log=log, folder=folder,
                )  # fmt: skip
        save_model(model, tokenizer, folder / "model")
        sets = {"train": pairs, "unseen": unseen}
        judged = {name: {"n": len(some), "value": pair_accuracy(model, some, pad_id)} for name, some in sets.items() if some}
        cost = {"tokens_forward": sampled, "tokens_trained": meter.tokens_trained}
        write_json(folder / "reward.json", {"accuracy": judged, **cost})

    root, key = Path(settings.runs_dir) / "stages", [config, settings.train_items, settings.max_new_tokens, seed]
    return stage("reward", build, config=key, modules=REWARD_CODE, inputs=[start], root=root)


def load_reward_model(folder: Path) -> Any:
    """The reward model of a stage, ready to score."""
    return AutoModelForSequenceClassification.from_pretrained(folder / "model").requires_grad_(False).eval()


def reward_facts(folder: Path, parameters: int) -> tuple[Meter, dict[str, dict]]:
    """What the reward model took, the start's samples and its training as tokens of the policy; its accuracy on pairs."""
    found, meter = read_json(folder / "reward.json"), Meter(parameters)
    meter.add_forward(found["tokens_forward"])
    meter.add_train(found["tokens_trained"])
    return meter, found["accuracy"]


def teacher_model(folder: Path) -> tuple[Any, int]:
    """The teacher, frozen, and its size."""
    model, _ = load_model(folder / "model")
    return model.requires_grad_(False).eval(), parameter_count(model)
