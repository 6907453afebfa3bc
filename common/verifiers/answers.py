"""Final answers as JSON: the one object of a completion that counts, found by a written rule and checked strictly.

The written rule
----------------
1. Only the completion is read, never the prompt. Reasoning blocks (`<think>` to the next `</think>`) in front of the
   first `{` outside them are skipped; one that is never closed means that there is no answer. A `</think>` before any
   `<think>` closes a block that the prompt opened.
2. The answer is the first JSON object that is completed in that text. Text in front of it is free. A bracket that does
   not begin an object (`{24}`) is stepped over; one that does (`{` followed by a quoted key) must be valid JSON, or the
   completion has no answer: a later object never replaces a broken one, so several guesses are worth no more than one.
3. Text after the object does not matter, but is counted (`run_on`).
4. Duplicate keys, NaN and Infinity, nesting and sizes above the limits, missing keys and wrong types are refused, each
   with its own reason. Unknown keys are ignored. true is not a number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

NO_OBJECT = "no JSON object"
UNCLOSED = "JSON object not closed"
NOT_JSON = "not valid JSON"
TOO_LONG = "JSON object too long"
TOO_DEEP = "JSON nested too deep"
DUPLICATE = "duplicate key"
NOT_FINITE = "NaN or Infinity"
UNFINISHED = "reasoning not finished"
MISSING = "missing key"
WRONG_TYPE = "wrong type"
REASONS = (NO_OBJECT, UNCLOSED, NOT_JSON, TOO_LONG, TOO_DEEP, DUPLICATE, NOT_FINITE, UNFINISHED, MISSING, WRONG_TYPE)

MAX_TEXT = 100_000  # characters of a completion in which an object is looked for
MAX_OBJECT = 4_000  # characters of the object
MAX_DEPTH = 8
MAX_CANDIDATES = 64

_SCAN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]"]', re.DOTALL)
_OBJECT_START = re.compile(r'\{\s*["}]')


class Answer(NamedTuple):
    """The object's fields, or the reason why there is none; `run_on` counts the non-blank characters after it."""

    value: dict[str, Any] | None
    reason: str | None
    run_on: int = 0


@dataclass(frozen=True)
class Field:
    """What a key must hold: `kind` is the exact JSON type, `item` the exact type of the elements of a list."""

    kind: type
    item: type | None = None
    required: bool = True
    max_items: int = 64


class _Refused(ValueError):
    pass


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise _Refused(DUPLICATE)
    return table


def _not_finite(name: str) -> None:
    raise _Refused(NOT_FINITE)


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):  # 1e999
        raise _Refused(NOT_FINITE)
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_not_finite, parse_float=_finite)


def extract_json(text: str, fields: Mapping[str, Field]) -> Answer:
    """The answer of a completion under the module's rule; never raises on any text.

    fields: key -> what it must hold. Costs about 10 microseconds for an answer of 150 characters; text beyond MAX_TEXT
    characters is neither searched nor counted.
    """
    start = _after_reasoning(text)
    if start < 0:
        return Answer(None, UNFINISHED)
    for _ in range(MAX_CANDIDATES):
        start = text.find("{", start, MAX_TEXT)
        if start < 0:
            return Answer(None, NO_OBJECT)
        if _OBJECT_START.match(text, start):
            return _decode(text, start, fields)
        end, reason = _region_end(text, start)
        if reason == TOO_DEEP:
            return Answer(None, reason)
        start = end if not reason else start + 1
    return Answer(None, NO_OBJECT)


def _after_reasoning(text: str) -> int:
    """Where the text after the reasoning blocks in front of the first `{` begins; -1 if one never ends."""
    opened, closed = text.find("<think>"), text.find("</think>")
    start = 0
    if closed >= 0 and (opened < 0 or closed < opened):  # the prompt opened it
        start = closed + len("</think>")
    brace = text.find("{", start)
    for _ in range(MAX_CANDIDATES):
        opened = text.find("<think>", start)
        if opened < 0 or 0 <= brace < opened:
            return start
        closed = text.find("</think>", opened)
        if closed < 0:
            return -1
        start = closed + len("</think>")
        brace = text.find("{", start)
    return -1


def _region_end(text: str, start: int) -> tuple[int, str | None]:
    """(end, None) of the bracketed region that opens at start, or (0, reason). Brackets inside strings do not count."""
    depth = 0
    limit = start + MAX_OBJECT
    for token in _SCAN.finditer(text, start, limit):
        sign = token.group()
        if sign in "{[":
            depth += 1
            if depth > MAX_DEPTH:
                return 0, TOO_DEEP
        elif sign in "}]":
            depth -= 1
            if depth == 0:
                return token.end(), None
        elif sign == '"':
            break
    return 0, TOO_LONG if len(text) > limit else UNCLOSED


def _decode(text: str, start: int, fields: Mapping[str, Field]) -> Answer:
    """The object that begins at start, decoded from a bounded slice and checked."""
    piece = text[start : start + MAX_OBJECT]
    try:
        value, length = _DECODER.raw_decode(piece)
    except _Refused as refused:
        return Answer(None, str(refused))
    except (ValueError, RecursionError):
        # The slow scan tells an object that is cut off or oversized from one that is wrong.
        return Answer(None, _region_end(text, start)[1] or NOT_JSON)
    if piece.count("{", 0, length) + piece.count("[", 0, length) > MAX_DEPTH:
        reason = _region_end(text, start)[1]
        if reason:
            return Answer(None, reason)
    reason = check_fields(value, fields)
    run_on = len("".join(text[start + length : MAX_TEXT].split()))
    return Answer(None if reason else value, reason, run_on)


def check_fields(value: Mapping[str, Any], fields: Mapping[str, Field]) -> str | None:
    """MISSING or WRONG_TYPE with the key's name, or None if every field is as declared."""
    for name, field in fields.items():
        if name not in value:
            if field.required:
                return f"{MISSING}: {name}"
            continue
        if type(value[name]) is not field.kind or not _items_fit(value[name], field):
            return f"{WRONG_TYPE}: {name}"
    return None


def _items_fit(found: Any, field: Field) -> bool:
    if field.item is None:
        return True
    return len(found) <= field.max_items and all(type(item) is field.item for item in found)
