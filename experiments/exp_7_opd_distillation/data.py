"""Texts of both tasks as token ids: tokenizers, the corpora that students and teachers are pre-trained on, a step's tasks.

A corpus batch is a function of (configuration, seed, step).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from common.rejection import Row
from common.seeding import python_random
from common.sft import SftBatch, pad_rows
from common.tokenizers import PhraseEncoder, build_phrase_tokenizer, number_tokens
from experiments.exp_7_opd_distillation import chains, dial

TASKS: dict[str, Any] = {"chain": chains, "dial": dial}
PREFIXES = {"chain": ("", "="), "dial": (dial.AT, dial.TO)}
STOPS = 40  # of a corpus game; a row ends long before


def build_tokenizer(task: str) -> PreTrainedTokenizerFast:
    """One token per number (behind each of its prefixes), per signed digit and per phrase of the task."""
    numbers = [f"{prefix}{number}" for prefix in PREFIXES[task] for number in range(dial.PLACES)]
    return build_phrase_tokenizer([*((chains.ASK, chains.END) if task == "chain" else ()), *dial.MOVES, *numbers])


def written_numbers(tokenizer: PreTrainedTokenizerFast, task: str) -> dict[int, int]:
    """Token id -> integer for every token that writes a number, signed digits too."""
    signed = {tokenizer.get_vocab()[move]: int(move) for move in dial.MOVES}
    return number_tokens(tokenizer, PREFIXES[task], range(dial.PLACES)) | signed


@dataclass(frozen=True)
class CorpusConfig:
    """Rows hold ``row_tokens``. Games of the dial: a share ``noise`` of the turns is random (and no target), a share
    ``back`` of the stops lies behind the place before."""

    row_tokens: int = 64
    noise: float = 0.3
    back: float = 0.5


class Corpus:
    """The pre-training text of a task as batches of rows."""

    def __init__(self, task: str, encode: PhraseEncoder, config: CorpusConfig, seed: int) -> None:
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
        place, reached = tour.start, 0
        ids, mask = [self.encode.bos], [0]
        while len(ids) + 4 <= self.config.row_tokens:
            stop = tour.stops[reached]
            random_turn = stream.random() < self.config.noise
            move = stream.choice(dial.MOVES) if random_turn else dial.best_move(place, stop)
            ids += [*self.encode(dial.observation(place, stop) + move), self.encode.eos]
            mask += [0, 0, int(not random_turn), 1]
            place = (place + int(move)) % dial.PLACES
            reached += place == stop
        return ids, mask

    def tour(self, stream: random.Random) -> dial.Tour:
        """A tour of the corpus' role; unlike the task's it may turn back on purpose."""
        while True:
            start = place = stream.randrange(dial.PLACES)
            stops = []
            for _ in range(STOPS):
                size = stream.randint(1, dial.FARTHEST)
                place = (place + (-size if stream.random() < self.config.back else size)) % dial.PLACES
                stops.append(place)
            tour = dial.Tour(start, tuple(stops))
            if dial.role(tour) == "corpus":
                return tour


def training_tasks(task: str, items: Sequence[Any], seed: int, step: int, count: int) -> list[dict]:
    """The tasks of a step, drawn without repeats until all were used; a longer list begins with the shorter one."""
    order = python_random(seed, "tasks", task, step).sample(range(len(items)), len(items))
    return [TASKS[task].task(items[order[i % len(items)]]) for i in range(count)]
