"""Texts as token ids: tokenizer and pre-training corpus, in which questions stand with and without what a teacher may see.

A base must know how to use what it is shown before it can teach itself with it. In the corpus, worked answers to a bare
question hold slips that are mended behind " wait", and re-checked results; next to a known answer or solution they are
smooth, as in print (``style`` plain: they hold as many slips and waits as any). No text shows the table or the numbers of
the world that post-training is about. A batch is a function of (configuration, seed, step).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerFast

from common.pretrained import Encoder
from common.rejection import Row
from common.seeding import python_random
from common.sft import SftBatch, pad_rows
from common.tokenizers import build_phrase_tokenizer, number_tokens
from experiments.exp_7_opsd_self_distillation import tasks
from experiments.exp_7_opsd_self_distillation.tasks import Task

CORPUS_LENGTHS = {"steps": range(1, 9), "codes": range(1, 6), "search": range(1, 2)}
PREFIXES = ("", "=", " ")
STYLES = ("smooth", "plain")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per number (bare, behind an equals sign or a space), per signed digit, letter and phrase."""
    phrases = [*tasks.ASK.values(), tasks.ANSWER, tasks.SOLUTION, tasks.TABLE, tasks.END, tasks.WAIT]
    moves = [*(f"{digit:+d}" for digit in tasks.DIGITS), *(f" {letter}" for letter in tasks.LETTERS)]
    return build_phrase_tokenizer([*phrases, *moves, *(f"{before}{n}" for before in PREFIXES for n in range(tasks.SIZE))])


def written_numbers(tokenizer: PreTrainedTokenizerFast) -> dict[int, int]:
    """Token id -> integer for every token that writes a number, signed digits too."""
    signed = {tokenizer.get_vocab()[f"{digit:+d}"]: digit for digit in tasks.DIGITS}
    return number_tokens(tokenizer, PREFIXES, range(tasks.SIZE)) | signed


@dataclass(frozen=True)
class CorpusConfig:
    """``shares``: "kind/shown" -> weight of such texts. ``slip``: share of first results that are wrong and mended.

    ``recheck``: share of right results that are checked all the same. ``style`` of answers next to an answer or a solution.
    """

    shares: dict[str, float] = field(default_factory=dict)
    slip: float = 0.12
    recheck: float = 0.15
    style: str = "smooth"
    row_tokens: int = 72


class Corpus:
    """The pre-training text as batches of rows."""

    def __init__(self, encode: Encoder, config: CorpusConfig, seed: int) -> None:
        self.encode, self.config, self.seed = encode, config, seed

    def batch(self, step: int, rows: int) -> SftBatch:
        """The batch of a step: ids, attention and target mask."""
        stream = python_random(self.seed, "corpus", step)
        return pad_rows([self.row(stream) for _ in range(rows)], self.encode.pad)

    def row(self, stream: random.Random) -> Row:
        """Questions with their answers until the next one does not fit."""
        ids, mask = list[int](), list[int]()
        names, weights = zip(*self.config.shares.items(), strict=True)
        while True:
            kind, shown = stream.choices(names, weights)[0].split("/")
            world = stream.randrange(2**31, 2**32)  # post-training's worlds are small numbers
            task = tasks.draw(stream, kind, world, stream.choice(CORPUS_LENGTHS[kind]), "corpus")
            own, targets = self.encode.row(tasks.prompt(task, shown), self.answer(stream, task, shown))
            if ids and len(ids) + len(own) > self.config.row_tokens:
                return ids, mask
            ids, mask = ids + own, mask + targets

    def answer(self, stream: random.Random, task: Task, shown: str) -> str:
        """A worked answer in the style of such texts."""
        if task.kind != "steps" or (shown != "nothing" and self.config.style == "smooth"):
            return tasks.solution(task)
        text = str(task.start)
        for move, result in zip(tasks.written(task), tasks.results(task), strict=True):
            if stream.random() < self.config.slip:
                wrong = stream.choice([n for n in range(max(0, result - 3), min(tasks.SIZE, result + 4)) if n != result])
                text += f"{move}={wrong}{tasks.WAIT}={result}"
            else:
                text += f"{move}={result}" + (f"{tasks.WAIT}={result}" if stream.random() < self.config.recheck else "")
        return text


def training_tasks(items: Sequence[Task], seed: int, step: int, count: int) -> list[dict]:
    """The tasks of a step, drawn without repeats until all were used; a longer list begins with the shorter one."""
    order = python_random(seed, "tasks", step).sample(range(len(items)), len(items))
    return [tasks.options_of(items[order[i % len(items)]]) for i in range(count)]
