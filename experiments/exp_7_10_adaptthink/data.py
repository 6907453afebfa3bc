"""Texts of the experiment as token ids: tokenizer, pre-training corpus, the start's demonstrations, training tasks.

Batch and item are functions of (configuration, seed, index). All rows of a batch have one level, so nothing is padded far.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from common.seeding import python_random
from common.sft import SftBatch, pad_rows
from common.tokenizers import CHAT_TEMPLATE, PhraseEncoder, build_phrase_tokenizer
from common.verifiers.thinking import END_THINK, THINK
from experiments.exp_7_10_adaptthink import chains
from experiments.exp_7_10_adaptthink.env import task

NUMBERS = range(chains.LARGEST + 1)
PREFIXES = ("", "=")
# A reasoning model's template: the prompt ends inside the thinking, so that the next token decides the mode.
TEMPLATE = CHAT_TEMPLATE + "{% if add_generation_prompt %}" + THINK + "{% endif %}"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per phrase, sign and number 0..31 (bare, or behind an equals sign)."""
    tokenizer = build_phrase_tokenizer([*chains.PHRASES, *(f"{before}{number}" for before in PREFIXES for number in NUMBERS)])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def row(
    encode: PhraseEncoder, chain: chains.Chain, tokens: int, think: bool, forced: bool = False, results: list[int] | None = None
):
    """(ids, mask) of a prompt and its completion; `forced` gives the first token of the completion, and does not teach it."""
    ids, mask = encode.row(chains.prompt(chain) + THINK, chains.answer(chain, tokens, think, results))
    if forced:
        mask[mask.index(1)] = 0
    return ids, mask


class Corpus:
    """Pre-training text: all answer forms, levels from 1 up to one that grows, `direct` of a level's documents no thinking.

    The highest level grows from 1 to the last one over the first `growth` of the steps: longer chains are learned on top
    of shorter ones. Nobody shows the working of 7+3, so easy levels are answered directly more often than hard ones.
    A share `slips` of the written steps is wrong.
    """

    def __init__(
        self, encode: PhraseEncoder, seed: int, steps: int, growth: float, direct: Sequence[float], slips: float
    ) -> None:
        self.encode, self.seed, self.direct, self.grown_at = encode, seed, direct, max(1, round(growth * steps))
        self.slips = slips

    def batch(self, step: int, rows: int) -> SftBatch:
        """The batch of a step: ids, attention and target mask."""
        stream = python_random(self.seed, "corpus", step)
        highest = min(len(chains.CORPUS_LEVELS), 1 + step * len(chains.CORPUS_LEVELS) // self.grown_at)
        place = stream.randrange(highest)
        made = [self.row(stream, chains.CORPUS_LEVELS[place], self.direct[place]) for _ in range(rows)]
        return pad_rows(made, self.encode.pad)

    def row(self, stream: random.Random, level: int, direct: float):
        """One document."""
        chain, tokens = chains.draw(stream, level, "corpus"), stream.choice(list(chains.ANSWERS))
        if stream.random() < direct:
            return row(self.encode, chain, tokens, think=False)
        return row(self.encode, chain, tokens, think=True, results=chains.careless(stream, chain, self.slips))


class ThinkOnly:
    """What makes the reasoning model: it opens nearly every answer with thinking, and still answers directly when made to.

    A share `direct` of a level's rows shows NoThinking completions whose `</think>` is given, not taught; of the others a
    share `skips` skips thinking on its own. The thoughts have the corpus' `slips`.
    """

    def __init__(
        self, encode: PhraseEncoder, seed: int, tokens: int, direct: Sequence[float], skips: float, slips: float
    ) -> None:
        self.encode, self.seed, self.tokens, self.direct, self.skips = encode, seed, tokens, direct, skips
        self.slips = slips

    def batch(self, step: int, rows: int) -> SftBatch:
        """The batch of a step: ids, attention and target mask."""
        stream = python_random(self.seed, "think only", step)
        made = []
        for _ in range(rows):
            place = stream.randrange(len(chains.LEVELS))
            given = stream.random() < self.direct[place]
            think = not given and stream.random() >= self.skips
            chain = chains.draw(stream, chains.LEVELS[place], "train")
            results = chains.careless(stream, chain, self.slips) if think else None
            made.append(row(self.encode, chain, self.tokens, think, forced=given, results=results))
        return pad_rows(made, self.encode.pad)


def training_tasks(pool: list[dict], seed: int, step: int, count: int) -> list[dict]:
    """The tasks of a step, as many of each level, without repeats within one; a longer list begins with the shorter."""
    stream, by_level = python_random(seed, "tasks", step), dict[int, list[dict]]()
    for item in pool:
        by_level.setdefault(item["level"], []).append(item)
    order = [stream.sample(items, len(items)) for _, items in sorted(by_level.items())]
    return [(items := order[i % len(order)])[i // len(order) % len(items)] for i in range(count)]


def pool(seed: int, count: int) -> list[dict]:
    """The training tasks of a seed: `count` of each level (fewer of level 1, which has not as many), with their index."""
    found = [task(chain) for level in chains.LEVELS for chain in chains.items("train", seed, level, count)]
    return [{**item, "index": index} for index, item in enumerate(found)]


__all__ = ["END_THINK", "NUMBERS", "PREFIXES", "Corpus", "ThinkOnly", "build_tokenizer", "pool", "row", "training_tasks"]
