"""Marks an answer as GAIA's scorer does (Mialon et al. 2023; rules as AWorld's example reward applies them).

The answer is the text of the one `<answer>...</answer>` block behind any reasoning. What the true answer is decides how the
two are compared:

- a number: `$`, `%` and `,` are struck from the given one, the rest must be a plain decimal number of the same value;
- a list (it holds `,` or `;`): both are split there; equally many parts, each compared in order, as a number where the true
  part is one, else as a string that keeps its punctuation;
- a string: white space, case and punctuation do not count.

Departures from the original: numbers are compared exactly, not as floats, and `nan`, `inf`, `1e3` and digits of other
scripts are no numbers; two answer blocks are no answer, and neither is one that stands inside unfinished reasoning.
"""

from __future__ import annotations

import re
import string
from decimal import Decimal

LONGEST = 2000  # characters of an answer that are compared
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)\Z", re.ASCII)
_SPLIT = re.compile(r"[,;]")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
OPEN, CLOSE = "<answer>", "</answer>"


def answer_in(text: str) -> str | None:
    """The text of the answer block, or None unless there is exactly one, behind finished reasoning."""
    text = text.rpartition("</think>")[2]
    if "<think>" in text or text.count(OPEN) != 1 or text.count(CLOSE) != 1:
        return None
    inside, _, _ = text.partition(OPEN)[2].partition(CLOSE)
    return inside.strip() if text.index(OPEN) < text.index(CLOSE) else None


def number(text: str) -> Decimal | None:
    """The value of a plain decimal number, without `$`, `%` and `,`; None where it is none."""
    stripped = text
    for sign in "$%,":
        stripped = stripped.replace(sign, "")
    stripped = stripped.strip()
    return Decimal(stripped) if len(stripped) < 100 and _NUMBER.match(stripped) else None


def plain(text: str, punctuation: bool = False) -> str:
    """Lower case without white space, and without punctuation unless that is kept."""
    joined = "".join(text.split()).lower()
    return joined if punctuation else joined.translate(_PUNCTUATION)


def is_number(text: str) -> bool:
    """Whether a true answer counts as a number: plain, without signs to strike."""
    return bool(_NUMBER.match(text.strip()))


def score(given: str | None, true: str) -> bool:
    """Whether the given answer is right; never raises on any text."""
    if given is None or len(given) > LONGEST:
        return False
    if is_number(true):
        return number(given) == Decimal(true.strip())
    if _SPLIT.search(true):
        parts, wanted = _SPLIT.split(given), _SPLIT.split(true)
        return len(parts) == len(wanted) and all(_same_part(one, other) for one, other in zip(parts, wanted, strict=True))
    return bool(plain(given)) and plain(given) == plain(true)


def _same_part(given: str, true: str) -> bool:
    if is_number(true):
        return number(given) == Decimal(true.strip())
    return plain(given, punctuation=True) == plain(true, punctuation=True)
