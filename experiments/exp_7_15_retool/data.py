"""Texts as token ids: tokenizer, pre-training corpus, demonstrations of the two protocols, the tasks of a step.

The corpus holds three kinds of document:
- worked answers to the problem texts (`text`), in the head, step by step;
- notebooks (`notebook`): the problem as a comment, a program, the interpreter's reply; a share `slip` of the programs has a
  fault, and behind an error a share `repair` of the notebooks goes on with a right program;
- answers in the tool protocol (`protocol`), as sloppy as the notebooks: the few that any large corpus holds. Where an error
  is not repaired, or a reply is no answer, they end with a guess.
Targets are what a person wrote; problems and replies are read, not predicted. A batch is a function of (configuration, seed,
step). Demonstrations are clean: right programs, right answers, no error and no repair among them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerFast

from common.rejection import Row
from common.schema import ConfigError, within
from common.seeding import python_random
from common.sft import SftBatch, pad_rows
from common.tokenizers import PhraseEncoder, build_phrase_tokenizer, number_tokens
from experiments.exp_7_15_retool import problems, programs
from experiments.exp_7_15_retool.env import (
    ANSWER,
    CODE,
    END_ANSWER,
    END_CODE,
    END_INTERPRETER,
    INTERPRETER,
    TAGS,
)
from experiments.exp_7_15_retool.problems import CHAINS, KINDS, Problem
from experiments.exp_7_15_retool.programs import Written

NUMBERS = range(100)
PREFIXES = ("", "=")
COMMENT = "# "
DOCUMENTS = ("text", "notebook", "protocol")
STYLES = ("early", "late", "none")
CORPUS_LENGTHS = range(1, problems.LONGER.stop)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per phrase, piece of a program, error and number 0..99 (bare, or behind an equals sign)."""
    numbers = [f"{before}{number}" for before in PREFIXES for number in NUMBERS]
    return build_phrase_tokenizer(
        [*TAGS, COMMENT, *problems.PROMPT_PHRASES, *programs.CODE_PHRASES, *programs.ERRORS, programs.NOTHING, *numbers]
    )


def written_numbers(tokenizer: PreTrainedTokenizerFast) -> dict[int, int]:
    """Token id -> integer for every token that writes a number."""
    return number_tokens(tokenizer, PREFIXES, NUMBERS)


def code_block(code: str) -> str:
    """A program as the policy writes it."""
    return f"{CODE}{code}{END_CODE}"


def answer_block(answer: int) -> str:
    """An answer as the policy writes it."""
    return f"{ANSWER}{answer}{END_ANSWER}"


def reply_block(reply: str) -> str:
    """The interpreter's reply as the policy reads it."""
    return f"{INTERPRETER}{reply}{END_INTERPRETER}"


def worked(problem: Problem) -> list[tuple[str, bool]]:
    """A worked answer in the head."""
    return [(f"{problems.working(problem)}{answer_block(problem.answer)}", True)]


def with_tool(problem: Problem, written: Sequence[Written], before: str, answer: str | None) -> list[tuple[str, bool]]:
    """Programs with their replies, and an answer where one is given."""
    turns, text = list[tuple[str, bool]](), before
    for program in written:
        turns += [(f"{text}{code_block(program.code)}", True), (reply_block(program.reply), False)]
        text = ""
    return turns if answer is None else [*turns, (f"{ANSWER}{answer}{END_ANSWER}", True)]


def row(encode: PhraseEncoder, prompt: str, turns: Sequence[tuple[str, bool]]) -> Row:
    """(ids, mask) of a prompt and its turns as run_episodes joins them; the author's turns end with <eos> and are targets."""
    ids = [encode.bos, *encode(prompt)]
    mask = [0] * len(ids)
    for text, own in turns:
        piece = [*encode(text), encode.eos] if own else encode(text)
        ids, mask = ids + piece, mask + [int(own)] * len(piece)
    return ids, mask


@dataclass(frozen=True)
class CorpusConfig:
    """``documents``: share of each kind. ``text_kinds``: weight of each kind of problem in answers worked in the head.

    ``slip``: programs with a fault; ``repair``: errors that are followed by a repair.

    ``late``: answers in the tool protocol that work in the head first. ``row_tokens``: filled with as many documents as fit.
    """

    documents: dict[str, float] = field(default_factory=dict)
    text_kinds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 1.0))
    slip: float = 0.5
    repair: float = 0.5
    late: float = 0.5
    row_tokens: int = 112

    def __post_init__(self) -> None:
        for key in ("slip", "repair", "late"):
            within(f"corpus.{key}", getattr(self, key), 0, 1)
        within("corpus.row_tokens", self.row_tokens, 64)
        if set(self.documents) - set(DOCUMENTS) or min(self.documents.values(), default=0) < 0:
            raise ConfigError(f"corpus.documents={self.documents}: shares of {', '.join(DOCUMENTS)}, not negative.")
        if set(self.text_kinds) - set(KINDS) or sum(self.text_kinds.values()) <= 0 or min(self.text_kinds.values()) < 0:
            raise ConfigError(f"corpus.text_kinds={self.text_kinds}: weights of {', '.join(KINDS)}, not negative, not all 0.")


class Corpus:
    """The pre-training text as batches of rows."""

    def __init__(self, encode: PhraseEncoder, config: CorpusConfig, seed: int) -> None:
        self.encode, self.config, self.seed = encode, config, seed

    def batch(self, step: int, rows: int) -> SftBatch:
        """The batch of a step: ids, attention and target mask."""
        stream = python_random(self.seed, "corpus", step)
        return pad_rows([self.row(stream) for _ in range(rows)], self.encode.pad)

    def row(self, stream: random.Random) -> Row:
        """Documents until the next one does not fit."""
        ids, mask = list[int](), list[int]()
        names, weights = zip(*self.config.documents.items(), strict=True)
        while True:
            name = stream.choices(names, weights)[0]
            kinds = self.config.text_kinds if name == "text" else dict.fromkeys(KINDS, 1.0)
            kind = stream.choices(list(kinds), list(kinds.values()))[0]
            problem = problems.draw(stream, kind, stream.choice(CORPUS_LENGTHS), "corpus")
            own, targets = self.document(stream, name, problem)
            if len(own) > self.config.row_tokens:
                continue  # a long chain worked, programmed and repaired
            if len(ids) + len(own) > self.config.row_tokens:
                return ids, mask
            ids, mask = ids + own, mask + targets

    def document(self, stream: random.Random, name: str, problem: Problem) -> Row:
        """One document."""
        if name == "text":
            return row(self.encode, problems.prompt(problem), worked(problem))
        written = self.session(stream, problem)
        if name == "notebook":
            return row(self.encode, COMMENT + problems.prompt(problem), with_tool(problem, written, "", None))
        late = stream.random() < self.config.late
        last = written[-1].reply
        answer = last if last.isdigit() else str(stream.choice(NUMBERS))
        turns = with_tool(problem, written, problems.working(problem) if late else "", answer)
        return row(self.encode, problems.prompt(problem), turns)

    def session(self, stream: random.Random, problem: Problem) -> list[Written]:
        """A program, and where it ended in an error sometimes its repair."""
        first = programs.draw(problem, stream, self.config.slip)
        failed = first.fault and first.fault not in programs.SILENT
        if failed and stream.random() < self.config.repair:
            return [first, programs.draw(problem, stream, 0.0)]
        return [first]


@dataclass(frozen=True)
class DemonstrationConfig:
    """Shares of what the demonstrations of the tool protocol do with a chain: ``early`` writes the program at once, ``late``
    works in the head and then writes one, ``none`` works in the head alone. Towers and equations are always early."""

    early: float = 0.4
    late: float = 0.35
    none: float = 0.25

    def __post_init__(self) -> None:
        for name in STYLES:
            within(f"demonstrations.{name}", getattr(self, name), 0, 1)
        if abs(self.early + self.late + self.none - 1) > 1e-6:
            raise ConfigError(f"demonstrations: early={self.early}, late={self.late}, none={self.none} must add up to 1.")


class Demonstrations:
    """Right answers to training problems in a protocol: with the interpreter, or worked in the head (``tool`` false)."""

    def __init__(self, encode: PhraseEncoder, config: DemonstrationConfig, seed: int, tool: bool) -> None:
        self.encode, self.config, self.seed, self.tool = encode, config, seed, tool

    def batch(self, step: int, rows: int) -> SftBatch:
        """The batch of a step: ids, attention and target mask."""
        stream = python_random(self.seed, "demonstrations", step)
        return pad_rows([self.row(stream) for _ in range(rows)], self.encode.pad)

    def row(self, stream: random.Random) -> Row:
        """One demonstration."""
        problem = problems.draw(stream, stream.choice(KINDS), stream.choice(problems.LENGTHS), "train")
        turns = worked(problem)
        if self.tool:
            style = "early"
            if problem.kind in CHAINS:
                style = stream.choices(STYLES, [self.config.early, self.config.late, self.config.none])[0]
            if style != "none":
                before = problems.working(problem) if style == "late" else ""
                turns = with_tool(problem, [programs.draw(problem, stream, 0.0)], before, str(problem.answer))
        return row(self.encode, problems.prompt(problem), turns)


def training_pool(seed: int, count: int) -> list[dict]:
    """The training problems of a seed, `count` of each kind."""
    return [problems.options_of(p) for kind in KINDS for p in problems.items("train", seed, kind, problems.LENGTHS, count)]


def training_tasks(pool: Sequence[dict], seed: int, step: int, count: int) -> list[dict]:
    """The tasks of a step, as many of each kind, without repeats until all were used; a longer list begins with the shorter."""
    stream = python_random(seed, "tasks", step)
    groups: dict[str, list[dict]] = {}
    for task in pool:
        groups.setdefault(task.get("kind", ""), []).append(task)
    shuffled = [stream.sample(group, len(group)) for group in groups.values()]
    found = [shuffled[i % len(shuffled)] for i in range(count)]
    return [group[i // len(shuffled) % len(group)] for i, group in enumerate(found)]
