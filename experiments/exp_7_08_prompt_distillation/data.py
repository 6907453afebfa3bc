"""Texts of prompt distillation as token ids: tokenizer, pre-training corpus, the rule table and the texts of a seed.

Every pre-training row has a random table of its own and several questions about it. Batch, table and text are functions
of (configuration, seed, index).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from common.models import DecoderConfig, build_decoder
from common.rejection import Row
from common.seeding import python_random
from common.sft import SftBatch, pad_rows
from common.tokenizers import build_phrase_tokenizer
from experiments.exp_7_08_prompt_distillation import rules
from experiments.exp_7_08_prompt_distillation.rules import Table, Text


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per phrase, label, word and rule."""
    return build_phrase_tokenizer([*rules.PHRASES, *(f" {word}" for word in rules.words()), *rules.all_rules()])


@torch.no_grad()
def build_model(shape: DecoderConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A decoder with random weights, but that a frequent word's rules start as the sum of the word's and the label's embedding.

    New tokens usually start from their pieces; here it saves the model from learning thousands of tokens one by one. Rules of
    rare words start at random: the model has to learn these tokens from the few texts that hold them, and that is where it
    will err.
    """
    model, ids = build_decoder(shape, tokenizer, seed), tokenizer.get_vocab()
    for embedding in {model.get_input_embeddings(), model.get_output_embeddings()}:
        weight_VD = embedding.weight
        for word, kind in rules.kinds().items():
            if word in rules.tail():
                continue
            for label in rules.LABELS:
                value = rules.HEADS[kind] if kind == rules.NAME else label
                weight_VD[ids[rules.rule(word, label)]] = (weight_VD[ids[f" {word}"]] + weight_VD[ids[value]]) / 2**0.5
    return model


@dataclass(frozen=True)
class CorpusConfig:
    """Pre-training rows: a table of ``smallest`` to all words, then ``questions`` questions about it.

    ``direct``: share of the questions whose answer is the label alone. The largest size grows over the first ``curriculum``
    of the steps. ``tokens``: of a step, as many rows as fit.
    """

    smallest: int = 24
    questions: int = 6
    direct: float = 0.25
    curriculum: float = 0.5
    tokens: int = 3000


class Corpus:
    """The pre-training text of `steps` steps as batches of rows."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, config: CorpusConfig, seed: int, steps: int) -> None:
        self.ids = tokenizer.get_vocab()
        self.bos, self.eos, self.pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
        self.config, self.seed, self.rising = config, seed, max(1.0, config.curriculum * steps)

    def batch(self, step: int) -> SftBatch:
        """The batch of a step: tables of one size, as many rows as its tokens hold."""
        stream, smallest = python_random(self.seed, "corpus", step), self.config.smallest
        largest = smallest + round((rules.VOCABULARY - smallest) * min(1.0, step / self.rising))
        size, rows = stream.randint(smallest, largest), list[Row]()
        while not rows or sum(len(ids) for ids, _ in rows) < self.config.tokens:
            rows.append(self.row(stream, size))
        return pad_rows(rows, self.pad)

    def encode(self, pieces: list[str]) -> list[int]:
        return [self.ids[piece] for piece in pieces]

    def row(self, stream: random.Random, size: int) -> Row:
        """A table and questions about it that share no word; the answers are the targets."""
        table, used = rules.random_table(stream, size), set[str]()
        ids = [self.bos, *self.encode(rules.table_pieces(table))]
        mask = [0] * len(ids)
        for _ in range(max(1, min(self.config.questions, size // (2 * rules.LENGTH)))):
            text = corpus_text(stream, table, used)
            used |= set(text.words)
            think = stream.random() >= self.config.direct
            asked = self.encode(rules.question_pieces(text, think, prompted=True))
            answered = [*self.encode(rules.answer_pieces(table, text, think)), self.eos]
            ids, mask = ids + asked + answered, mask + [0] * len(asked) + [1] * len(answered)
        return ids, mask


def corpus_text(stream: random.Random, table: Table, used: set[str]) -> Text:
    """A text of the corpus' role without the words already used in the row."""
    while True:
        text = rules.random_text(stream, table, used)
        if rules.role(text) == "corpus":
            return text


@cache
def world(seed: int) -> Table:
    """The fixed table of a seed: every word has a rule."""
    return rules.random_table(python_random(seed, "world"), rules.VOCABULARY)


@cache
def changed_world(seed: int, share: float) -> Table:
    """The seed's table with another label for a share of the words that have one."""
    table, stream = world(seed), python_random(seed, "changed")
    labelled = [word for word, label in table.rules.items() if label]
    new = dict(table.rules)
    for word in stream.sample(labelled, round(share * len(labelled))):
        new[word] = stream.choice([label for label in rules.LABELS if label != new[word]])
    return Table(new, table.default)


@cache
def texts(seed: int, wanted: str, count: int) -> tuple[Text, ...]:
    """`count` different texts of a role under the seed's table; the shorter list is the beginning of the longer one."""
    stream, found = python_random(seed, "texts", wanted), dict[Text, None]()
    while len(found) < count:
        text = rules.random_text(stream, world(seed))
        if rules.role(text) == wanted:
            found[text] = None
    return tuple(found)
