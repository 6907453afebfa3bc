"""Pre-trained models in the place of tiny ones: texts for any tokenizer, and a supervised stage with an adapter.

An experiment whose tiny models read a corpus of its own gives the same corpus to a pre-trained model: a few steps of
SFT teach it the task's language, and its adapter is merged before anything goes on from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerBase

from common.checkpoints import load_model
from common.compute import Budget
from common.lora import LoraSettings, add_adapter, learning_rate
from common.sft import SftBatch, SftConfig, train_sft
from common.stages import stage
from common.supervised import finish_stage, stage_log
from common.tokenizers import PhraseEncoder, encode_feedback, encode_prompt


class TinyEncoder(PhraseEncoder):
    """The texts of a phrase tokenizer: a first prompt begins with <bos>, a later reply stands behind the answer's end."""

    def start(self, text: str) -> list[int]:
        """A first prompt."""
        return [self.bos, *self(text)]

    def reply(self, text: str) -> list[int]:
        """What the environment says behind a finished answer."""
        return self(text)


class ChatEncoder:
    """Texts as any tokenizer's chat template writes them, in the form of TinyEncoder. An answer is encoded by itself."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.eos = tokenizer, tokenizer.eos_token_id
        self.pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.start: Callable[[str], list[int]] = functools.cache(functools.partial(encode_prompt, tokenizer))
        self.reply: Callable[[str], list[int]] = functools.cache(functools.partial(encode_feedback, tokenizer, finished=True))

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def row(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """(ids, mask) of a prompt and the answer to it with its end token, which are the targets (mask 1)."""
        head, tail = self.start(prompt), [*self(answer), self.eos]
        return head + tail, [0] * len(head) + [1] * len(tail)


Encoder = TinyEncoder | ChatEncoder


def is_tiny(tokenizer: Any) -> bool:
    """Whether it is a phrase tokenizer, one token a phrase."""
    return isinstance(tokenizer.backend_tokenizer.model, WordLevel)


def encoder_of(tokenizer: Any) -> Encoder:
    """The encoder of a tokenizer's texts."""
    return TinyEncoder(tokenizer) if is_tiny(tokenizer) else ChatEncoder(tokenizer)


def tuned(
    name: str,
    source: str,
    *,
    experiment: str,
    runs_dir: str | Path,
    seed: int,
    config: SftConfig,
    steps: int,
    lora: LoraSettings,
    device: str,
    dtype: str,
    batches: Callable[[Any], Callable[[int], SftBatch]],
    key: Any,
    modules: Sequence[str],
) -> Path:
    """The stage's folder, with the model of `source` (a folder or hub name) after some steps of SFT under ``model``.

    ``config.lr`` is that of full fine-tuning; an adapter is merged. batches, key, modules: see common.supervised.
    """

    def build(folder: Path) -> None:
        model, tokenizer = load_model(Path(source) if Path(source).is_dir() else source, device, dtype)
        model = add_adapter(model, lora, "sft", seed)
        own = replace(config, lr=learning_rate(config.lr, lora))
        with stage_log(experiment, folder, name, seed) as log:
            train_sft(model, batches(tokenizer), own, budget=Budget(steps=steps), log=log, folder=folder)
        finish_stage(model.merge_and_unload() if lora.enabled else model, tokenizer, folder)

    parts = [source, config, steps, lora, seed, dtype, key]
    root = Path(runs_dir) / "stages"
    return stage(name, build, config=parts, modules=[*modules, "common.pretrained", "common.lora"], root=root)
