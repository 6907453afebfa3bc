"""Texts of the comparison as token ids: tokenizer, pre-training corpus, demonstrations, tasks.

The corpus holds arithmetic facts and chains of 1 to 6 steps in the task's layout, some with the worked solution in the
prompt, some answered without steps. Batch and item are functions of (configuration, seed, index).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from common.rejection import Row, row_batches
from common.seeding import python_random
from common.sft import SftBatch, pad_rows
from common.tokenizers import PhraseEncoder, build_phrase_tokenizer
from experiments.exp_7_algorithms import chains

NUMBERS = range(chains.LARGEST + 1)
PREFIXES = ("", "=")  # a number stands bare, or behind an equals sign


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per phrase, operator and number 0..99 (bare, or behind an equals sign)."""
    return build_phrase_tokenizer([*chains.PHRASES, *(f"{before}{number}" for before in PREFIXES for number in NUMBERS)])


@dataclass(frozen=True)
class CorpusConfig:
    """Shares of the rows of a pre-training batch: ``facts``, the rest chains.

    ``hinted`` of the chains show a solution; ``direct`` of the others are answered without steps.
    Rows hold as many single steps or chains as fit into ``row_tokens`` (a chain that alone is longer, too).
    """

    facts: float = 0.5
    hinted: float = 0.25
    direct: float = 0.5
    row_tokens: int = 56


class Corpus:
    """The pre-training text as batches of rows."""

    def __init__(self, encode: PhraseEncoder, config: CorpusConfig, seed: int) -> None:
        self.encode, self.config, self.seed = encode, config, seed

    def batch(self, step: int, rows: int) -> SftBatch:
        """The batch of a step: ids, attention and target mask."""
        stream = python_random(self.seed, "corpus", step)
        facts = round(rows * self.config.facts)
        made = [self.facts(stream) for _ in range(facts)] + [self.chains(stream) for _ in range(rows - facts)]
        return pad_rows(made, self.encode.pad)

    def chains(self, stream: random.Random) -> Row:
        """Chains in the task's layout until the next one does not fit; hinted ones have trained lengths."""
        ids, mask = list[int](), list[int]()
        while True:
            hinted = stream.random() < self.config.hinted
            chain = chains.draw(stream, stream.choice(chains.ID_LENGTHS if hinted else chains.CORPUS_LENGTHS), "corpus")
            direct = not hinted and stream.random() < self.config.direct
            own, targets = self.encode.row(chains.prompt(chain, hinted), chains.answer(chain, direct))
            if ids and len(ids) + len(own) > self.config.row_tokens:
                return ids, mask
            ids, mask = ids + own, mask + targets

    def facts(self, stream: random.Random) -> Row:
        """Single steps `37+25=62; `; only the results are targets."""
        ids, mask = [self.encode.bos], [0]
        while len(ids) + 5 <= self.config.row_tokens:
            ids += self.encode(f"{chains.trace(chains.random_chain(stream, 1))}{chains.NEXT}")
            mask += [0, 0, 0, 1, 0]
        return ids, mask


def task(chain: chains.Chain, hint: bool = False) -> dict:
    """Options for the environment's reset."""
    return {"start": chain.start, "steps": [list(step) for step in chain.steps], "hint": hint}


def chain_of(options: dict) -> chains.Chain:
    """The chain of a task."""
    return chains.Chain(options["start"], tuple((op, operand) for op, operand in options["steps"]))


def training_tasks(train: Sequence[chains.Chain], seed: int, step: int, count: int) -> list[dict]:
    """The tasks of a step, drawn without repeats until all were used; a longer list begins with the shorter one."""
    order = python_random(seed, "tasks", step).sample(range(len(train)), len(train))
    return [task(train[order[i % len(train)]]) for i in range(count)]


class Demonstrations:
    """Answers to the training chains, worked but for a share ``direct``; ``hinted`` of the chains once more, the prompt
    showing the solution."""

    def __init__(self, encode: PhraseEncoder, train: Sequence[chains.Chain], hinted: float = 0.0, direct: float = 0.0) -> None:
        without, shown = round(direct * len(train)), round(hinted * len(train))
        self.rows = [encode.row(chains.prompt(chain), chains.answer(chain, i < without)) for i, chain in enumerate(train)]
        self.rows += [encode.row(chains.prompt(chain, True), chains.answer(chain)) for chain in train[:shown]]
        self.pad = encode.pad

    def batches(self, seed: int, name: str, count: int):
        """step -> batch of `count` demonstrations."""
        return row_batches(self.rows, self.pad, count, seed, name)
