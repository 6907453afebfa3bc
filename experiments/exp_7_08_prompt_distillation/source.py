"""Where texts, gold labels and prompts come from: a seed's rule table, or a reader's own file of sentences.

Texts are given to training, validation and test by a hash of what they say, so that no two of them share one.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from common.schema import ConfigError
from common.seeding import python_random, stream_seed
from common.tokenizers import encode_prompt
from experiments.exp_7_08_prompt_distillation import data, rules
from experiments.exp_7_08_prompt_distillation.rules import Table, Text

Encode = Callable[["Item", bool, bool], list[int]]
PROMPT_FILE = Path(__file__).with_name("language_prompt.txt")
FILE_LABELS = rules.LABELS  # the real prompt has the same thirteen
MAX_SENTENCE = 2000  # characters


class Item(NamedTuple):
    """``gold``: the label, None where nobody knows it. ``kind``: which rule decides. ``tail``: it holds a rare word."""

    text: str
    gold: str | None
    kind: str = ""
    tail: bool = False


class Source(Protocol):
    """``prompt(item, prompted, think)``: what a model reads, with the rules or without, asked to think or not."""

    labels: tuple[str, ...]

    def items(self, role: str, count: int) -> tuple[Item, ...]: ...

    def prompt(self, item: Item, prompted: bool, think: bool) -> str: ...

    def encoder(self, tokenizer: Any) -> Encode: ...


class RuleSource:
    """The texts of a seed under its table, or (``changed``) under the table after its rules were changed."""

    labels = rules.LABELS

    def __init__(self, seed: int, changed: float = 0.0) -> None:
        self.seed, self.table = seed, data.world(seed)
        if changed:
            self.table = data.changed_world(seed, changed)

    def items(self, role: str, count: int) -> tuple[Item, ...]:
        """`count` items of a role; the texts do not depend on the change of rules, the gold labels do."""
        return tuple(item(text, self.table) for text in data.texts(self.seed, role, count))

    def prompt(self, item: Item, prompted: bool, think: bool) -> str:
        return rules.prompt(Text(tuple(item.text.split())), self.table if prompted else None, think)

    def encoder(self, tokenizer: Any) -> Encode:
        """The ids of `prompt` as the tokenizer makes them, without searching the text for its tokens."""
        vocabulary, bos = tokenizer.get_vocab(), tokenizer.bos_token_id
        table = [vocabulary[piece] for piece in rules.table_pieces(self.table)]

        def ids(item: Item, prompted: bool, think: bool) -> list[int]:
            asked = rules.question_pieces(Text(tuple(item.text.split())), think, prompted)
            return [bos, *(table if prompted else []), *(vocabulary[piece] for piece in asked)]

        return ids


def item(text: Text, table: Table) -> Item:
    """The text with its gold label under a table."""
    gold, kind = rules.decide(table, text)
    return Item(" ".join(text.words), gold, kind, bool(rules.tail() & set(text.words)))


class FileSource:
    """Sentences of a UTF-8 file, one a line, `label<TAB>sentence` or the sentence alone, under a prompt of a file.

    ConfigError names file and line where a line has an unknown label or is too long, or where a role has too few.
    """

    labels = FILE_LABELS

    def __init__(self, path: Path, prompt_file: Path = PROMPT_FILE) -> None:
        self.path = path
        for needed in (path, prompt_file):
            if not needed.is_file():
                raise ConfigError(f"{needed}: no such file; give sentences=<file> and prompt_file=<file> by their paths.")
        self.rules = prompt_file.read_text(encoding="utf-8").strip()
        self.by_role = read_sentences(path)

    def items(self, role: str, count: int) -> tuple[Item, ...]:
        found = self.by_role[role]
        if not found:
            raise ConfigError(f"{self.path}: it has no sentence for {role}; add more sentences.")
        return found[:count]

    def prompt(self, item: Item, prompted: bool, think: bool) -> str:
        """The rules, then the sentence; or the sentence alone. Whether it thinks is the model's habit."""
        return f"{self.rules}\n\nText: {item.text}" if prompted else item.text

    def encoder(self, tokenizer: Any) -> Encode:
        return lambda item, prompted, think: encode_prompt(tokenizer, self.prompt(item, prompted, think))


@cache
def read_sentences(path: Path) -> dict[str, tuple[Item, ...]]:
    """Role -> items in an order that depends on the sentences alone; repeated sentences count once."""
    found: dict[str, Item] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        line = unicodedata.normalize("NFC", line.strip("\r"))
        if not line.strip():
            continue
        label, tab, sentence = line.partition("\t")
        gold, sentence = (label.strip(), sentence.strip()) if tab else (None, line.strip())
        if gold is not None and gold not in FILE_LABELS:
            raise ConfigError(f"{path}, line {number}: label {gold!r} is not one of {', '.join(FILE_LABELS)}.")
        if not sentence or len(sentence) > MAX_SENTENCE:
            raise ConfigError(f"{path}, line {number}: a sentence has 1 to {MAX_SENTENCE} characters, not {len(sentence)}.")
        found.setdefault(sentence, Item(sentence, gold))
    roles: dict[str, list[Item]] = {role: [] for role in ("train", "validation", "test")}
    for sentence in sorted(found):
        bucket = stream_seed("sentence", sentence) % rules.BUCKETS
        roles["test" if bucket == 9 else "validation" if bucket == 8 else "train"].append(found[sentence])
    for name, items in roles.items():
        python_random("sentences", name).shuffle(items)
    return {name: tuple(items) for name, items in roles.items()}
