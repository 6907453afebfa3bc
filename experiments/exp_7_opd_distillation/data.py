"""Texts of both tasks as token ids: tokenizers, the corpora that students and teachers are pre-trained on, a step's tasks.

A corpus batch is a function of (configuration, seed, step).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from common.pretrained import Encoder
from common.rejection import Row
from common.seeding import python_random
from common.sft import SftBatch, pad_rows
from common.tokenizers import build_phrase_tokenizer, number_tokens
from experiments.exp_7_opd_distillation import chains, dial

TASKS: dict[str, Any] = {"chain": chains, "dial": dial}
PREFIXES = {"chain": ("", "="), "dial": (dial.AT, dial.TO)}
NUMBERS = {"chain": chains.LARGEST + 1, "dial": dial.PLACES}
STOPS = 40  # of a corpus game; a row ends long before


def build_tokenizer(task: str) -> PreTrainedTokenizerFast:
    """One token per number (behind each of its prefixes), and per signed digit and phrase or per button of the task."""
    numbers = [f"{prefix}{number}" for prefix in PREFIXES[task] for number in range(NUMBERS[task])]
    return build_phrase_tokenizer(
        [*((chains.ASK, chains.END, *chains.MOVES) if task == "chain" else (dial.PAST, *dial.BUTTONS)), *numbers]
    )


def written_numbers(tokenizer: PreTrainedTokenizerFast, task: str) -> dict[int, int]:
    """Token id -> integer for every token that writes a number, signed digits too."""
    signed = {tokenizer.get_vocab()[move]: int(move) for move in chains.MOVES} if task == "chain" else {}
    return number_tokens(tokenizer, PREFIXES[task], range(NUMBERS[task])) | signed


@dataclass(frozen=True)
class CorpusConfig:
    """Rows hold ``row_tokens``. A share ``noise`` of the turns of a dial game is random, and no target."""

    row_tokens: int = 64
    noise: float = 0.3


class Corpus:
    """The pre-training text of a task as batches of rows."""

    def __init__(self, task: str, encode: Encoder, config: CorpusConfig, seed: int) -> None:
        self.task, self.encode, self.config, self.seed = task, encode, config, seed

    def batch(self, step: int, rows: int) -> SftBatch:
        """The batch of a step: ids, attention and target mask."""
        stream = python_random(self.seed, "corpus", self.task, step)
        make = self.chains if self.task == "chain" else self.game
        return pad_rows([make(stream) for _ in range(rows)], self.encode.pad)

    def chains(self, stream: random.Random) -> Row:
        """Worked chains until the next one does not fit."""
        ids, mask = list[int](), list[int]()
        while True:
            chain = chains.draw(stream, stream.choice(chains.CORPUS_LENGTHS), "corpus")
            own, targets = self.encode.row(chains.prompt(chain), chains.answer(chain))
            if ids and len(ids) + len(own) > self.config.row_tokens:
                return ids, mask
            ids, mask = ids + own, mask + targets

    def game(self, stream: random.Random) -> Row:
        """A game whose random turns have to be mended, the best turns as targets."""
        tour = self.tour(stream)
        place, last, reached = tour.start, tour.start, 0
        longest = len(self.encode.reply(dial.observation(39, 20))) + 2  # tokens of a turn past the stop and of its answer
        ids, mask = list[int](), list[int]()
        while not ids or len(ids) + longest <= self.config.row_tokens:
            stop = tour.stops[reached]
            random_turn = stream.random() < self.config.noise
            button = stream.choice(dial.BUTTONS) if random_turn else dial.best_button(place, stop)
            observation = dial.observation(place, stop)
            shown = self.encode.reply(observation) if ids else self.encode.start(observation)
            ids += [*shown, *self.encode(button), self.encode.eos]
            mask += [0] * len(shown) + [int(not random_turn), 1]
            place = dial.turned(place, last, button)
            if place == stop:
                last, reached = stop, reached + 1
        return ids, mask

    def tour(self, stream: random.Random) -> dial.Tour:
        """A long tour of the corpus' role."""
        while True:
            tour = dial.random_tour(stream, STOPS)
            if dial.role(tour) == "corpus":
                return tour


def training_tasks(task: str, items: Sequence[Any], seed: int, step: int, count: int) -> list[dict]:
    """The tasks of a step, drawn without repeats until all were used; a longer list begins with the shorter one."""
    order = python_random(seed, "tasks", task, step).sample(range(len(items)), len(items))
    return [TASKS[task].task(items[order[i % len(items)]]) for i in range(count)]
