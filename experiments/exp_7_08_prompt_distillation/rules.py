"""The task: name the language of a short text by a long table of rules, in the order that the table states.

    Rules. 1. A mark decides; marks of two languages mean ot: tavo = el! miru = hi! ...
    2. Without a mark the language with the most hints, on a tie the one whose hint stands first: keso = fr, ...
    3. Names say nothing: buna = - ...
    4. Otherwise en.
    Text: keso buna tavo lize demo fapi. Look up each word, then give the label.

    <think> keso = fr, buna = - tavo = el! ...</think>el

It has the structure of the chapter's prompt (script first, then heuristics, then names, then a default, mixed text apart)
over made-up words, so that a new table can be drawn at will and every text has a gold label. Whether a word is a mark, a hint
or a name never changes, its language does with every table. A rule is one token of the tiny tokenizer, and so is a word.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import cache
from typing import NamedTuple

from common.seeding import python_random, stream_seed
from common.verifiers.thinking import END_THINK, THINK

LABELS = ("ar", "de", "el", "en", "es", "fr", "hi", "ru", "tr", "ur", "vi", "zh", "ot")
MIXED = "ot"
VOCABULARY = 240  # words that exist
TAIL = 60  # of them the rarest: the long tail
FLAT = 20.0  # the larger, the less frequencies differ
LENGTH = 6  # words of a text
COHERENCE = 16.0  # times as likely: a word of the language that a text is mostly in
MARK, HINT, NAME = "!", ",", "-"
PATTERN = MARK * 6 + HINT * 11 + NAME * 3  # kinds of 20 words that follow each other in frequency, before shuffling
ROLES = {"corpus": range(5), "train": range(5, 8), "validation": range(8, 9), "test": range(9, 10)}
BUCKETS = 10
KINDS = ("mark", "mixed", "hints", "tie", "default")  # which rule decides a text

HEADS = {
    MARK: "Rules. 1. A mark decides; marks of two languages mean ot:",
    HINT: "\n2. Without a mark the language with the most hints, on a tie the one whose hint stands first:",
    NAME: "\n3. Names say nothing:",
}
OTHERWISE = "\n4. Otherwise "
TEXT = ".\nText:"
BARE = "Text:"
THINK_FIRST = ". Look up each word, then give the label.\n"
LABEL_ONLY = ". Label only.\n"
PHRASES = [*HEADS.values(), OTHERWISE, TEXT, BARE, THINK_FIRST, LABEL_ONLY, THINK, END_THINK, *LABELS]


@cache
def words() -> tuple[str, ...]:
    """Every word, the most frequent first: two syllables each."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    every = [first + second for first in syllables for second in syllables]
    return tuple(python_random("words").sample(every, VOCABULARY))


@cache
def kinds() -> dict[str, str]:
    """The kind of every word."""
    stream, found = python_random("kinds"), list[str]()
    while len(found) < VOCABULARY:
        found += stream.sample(PATTERN, len(PATTERN))
    return dict(zip(words(), found, strict=False))


@cache
def frequencies() -> dict[str, float]:
    """How often each word is met, relative to the most frequent one: Zipf's law with its head flattened (Mandelbrot)."""
    return {word: FLAT / (rank + FLAT) for rank, word in enumerate(words())}


@cache
def tail() -> frozenset[str]:
    """The rare words."""
    return frozenset(words()[-TAIL:])


def rule(word: str, label: str) -> str:
    """A rule as table and thought write it: tavo = el! (mark), keso = fr, (hint), buna = - (name)."""
    kind = kinds()[word]
    return f" {word} = -" if kind == NAME else f" {word} = {label}{kind}"


def all_rules() -> list[str]:
    """Every rule that a table can hold."""
    return list(dict.fromkeys(rule(word, label) for word in words() for label in LABELS))


class Table(NamedTuple):
    """``rules``: word -> its language ("" for a name) in the order of the table; ``default``: where nothing else decides."""

    rules: dict[str, str]
    default: str


class Text(NamedTuple):
    """A text to label: its words, none twice."""

    words: tuple[str, ...]


def weighted_sample(stream: random.Random, weights: dict[str, float], count: int) -> list[str]:
    """`count` different keys, drawn one after the other in proportion to their weights (Efraimidis and Spirakis 2006)."""
    keys = {key: math.log(stream.random()) / weight for key, weight in weights.items()}
    return sorted(keys, key=keys.__getitem__, reverse=True)[:count]


def random_table(stream: random.Random, count: int) -> Table:
    """A table of `count` words, by frequency, with random languages."""
    chosen = weighted_sample(stream, frequencies(), count)
    stream.shuffle(chosen)
    return Table({word: "" if kinds()[word] == NAME else stream.choice(LABELS) for word in chosen}, stream.choice(LABELS))


def random_text(stream: random.Random, table: Table, without: frozenset[str] | set[str] = frozenset()) -> Text:
    """A text of words of the table, most of them of one language; words in `without` stay out."""
    language, marked = stream.choice(LABELS), stream.random() < 0.5
    weights, often, kind = {}, frequencies(), kinds()
    for word, label in table.rules.items():
        if word not in without:
            weights[word] = often[word] * (COHERENCE if label == language else 1.0)
            if kind[word] == MARK:
                weights[word] *= 0.5 if marked else 0.0001
    chosen = weighted_sample(stream, weights, LENGTH)
    stream.shuffle(chosen)
    return Text(tuple(chosen))


def decide(table: Table, text: Text) -> tuple[str, str]:
    """(label, which rule decided): see KINDS."""
    found = [(kinds()[word], table.rules[word]) for word in text.words]
    marks = {label for kind, label in found if kind == MARK}
    if marks:
        return (marks.pop(), "mark") if len(marks) == 1 else (MIXED, "mixed")
    hints = Counter(label for kind, label in found if kind == HINT)
    if not hints:
        return table.default, "default"
    most = [label for label in hints if hints[label] == max(hints.values())]  # a Counter keeps the order of first sight
    return most[0], "hints" if len(most) == 1 else "tie"


# Pieces are the tokens of the tiny tokenizer, and their texts joined are what a model reads.


def table_pieces(table: Table) -> list[str]:
    """The long prompt."""
    pieces = []
    for kind, head in HEADS.items():
        pieces += [head, *(rule(word, label) for word, label in table.rules.items() if kinds()[word] == kind)]
    return [*pieces, OTHERWISE, table.default]


def question_pieces(text: Text, think: bool, prompted: bool) -> list[str]:
    """What stands behind the table, or alone."""
    return [TEXT if prompted else BARE, *(f" {word}" for word in text.words), THINK_FIRST if think else LABEL_ONLY]


def prompt(text: Text, table: Table | None, think: bool) -> str:
    """The whole prompt; without a table the text alone."""
    return "".join([*(table_pieces(table) if table else []), *question_pieces(text, think, table is not None)])


def answer_pieces(table: Table, text: Text, think: bool) -> list[str]:
    """The right answer, behind the look-up of every word in order, or bare."""
    looked_up = [THINK, *(rule(word, table.rules[word]) for word in text.words), END_THINK] if think else []
    return [*looked_up, decide(table, text)[0]]


def role(text: Text) -> str:
    """Who may see the text: one role for all orders of the same words."""
    bucket = stream_seed("text", *sorted(text.words)) % BUCKETS
    return next(name for name, buckets in ROLES.items() if bucket in buckets)
