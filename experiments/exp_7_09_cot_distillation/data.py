"""Texts as token ids: the tokenizer, the documents that models are pre-trained on, rows to train on, tasks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerFast

from common.rejection import Row
from common.seeding import python_random
from common.sft import SftBatch, pad_rows
from common.tokenizers import PhraseEncoder, build_phrase_tokenizer
from experiments.exp_7_09_cot_distillation import problems, traces

NUMBERS = range(problems.LARGEST + 1)
PREFIXES = ("", "=")  # a number has one token, and another one behind an equals sign


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per phrase, operator and number 0..49 (bare, or behind an equals sign)."""
    numbers = [f"{before}{number}" for before in PREFIXES for number in NUMBERS]
    return build_phrase_tokenizer([problems.ASK, problems.ASKED, *problems.MARKS, *traces.PHRASES, *numbers])


@dataclass(frozen=True)
class CorpusConfig:
    """The documents of a pre-training batch: a share ``facts`` of the rows holds single steps, the rest solved problems.

    Of the rows of single steps a share ``checked`` checks each step, half of which are wrong: what a check is can be known
    without the habit of checking. Of the solved problems a share ``direct`` states the answer alone, a share ``texts`` is
    worked in style text and the others in ``style``; ``habits`` are those of the styles text and tool. Rows hold as many
    documents as fit into ``row_tokens``, but at least one.
    """

    style: str = "plain"
    facts: float = 0.5
    checked: float = 0.0
    direct: float = 0.0
    texts: float = 0.0
    habits: traces.Habits = field(default_factory=traces.Habits)
    row_tokens: int = 64


class Corpus:
    """Pre-training documents as batches of rows."""

    def __init__(self, encode: PhraseEncoder, config: CorpusConfig, seed: int) -> None:
        self.encode, self.config, self.seed = encode, config, seed

    def batch(self, step: int, rows: int) -> SftBatch:
        """The batch of a step: ids, attention and target mask."""
        stream = python_random(self.seed, "corpus", step)
        facts = round(rows * self.config.facts)
        made = [self.facts(stream) for _ in range(facts)] + [self.solved(stream) for _ in range(rows - facts)]
        return pad_rows(made, self.encode.pad)

    def solved(self, stream: random.Random) -> Row:
        """Solved problems until the next one does not fit."""
        ids, mask = list[int](), list[int]()
        while True:
            problem = problems.draw(stream, stream.choice(problems.CORPUS_LENGTHS), "corpus")
            draw, direct, texts = stream.random(), self.config.direct, self.config.texts
            style = "answer" if draw < direct else "text" if draw < direct + texts else self.config.style
            habits = self.config.habits if style in ("text", "tool") else None
            own, targets = self.encode.row(problem.prompt, traces.write(problem, style, habits, stream))
            if ids and len(ids) + len(own) > self.config.row_tokens:
                return ids, mask
            ids, mask = ids + own, mask + targets

    def facts(self, stream: random.Random) -> Row:
        """Single steps `37 (3)+11=48. `, of which only the results are targets.

        In a checked row half of the steps are wrong; check and verdict are targets, a wrong result is none.
        """
        ids, mask = [self.encode.bos], [0]
        check = stream.random() < self.config.checked
        while len(ids) + (12 if check else 6) <= self.config.row_tokens:
            number, ((op, operand),) = problems.random_problem(stream, 1)
            step = (number, op, operand)
            right = not check or stream.random() < 0.5
            result = problems.apply(*step) if right else traces.slipped(stream, step)
            ids += self.encode(f"{traces.equation(*step, result, stream.choice(problems.MARKS))}{traces.NEXT}")
            mask += [0, 0, 0, 0, int(right), 0]
            if check:
                ids += self.encode(f"{traces.checked(step, result)}{traces.HOLDS if right else traces.FAILS}")
                mask += [0, 0, 0, 0, 1, 1]
        return ids, mask


def training_tasks(train: Sequence[problems.Problem], seed: int, step: int, count: int) -> list[dict]:
    """The tasks of a step, drawn without repeats until all were used; a longer list begins with the shorter one."""
    order = python_random(seed, "tasks", step).sample(range(len(train)), len(train))
    return [train[order[i % len(train)]].task for i in range(count)]
