r"""Mathematical answers in LaTeX or plain text, compared exactly: what math-verify parses, under rules it does not have.

The written rule
----------------
1. Of a completion's answer text (behind </think>, see common.verifiers.thinking) the \boxed{...} counts. There must be one,
   closed; several must say the same, letter by letter. Nothing is looked for elsewhere.
2. Numbers, fractions, mixed numbers, powers and factorials of integers are valued by an exact grammar of our own, as
   fractions, whatever their spelling: 2/3 = \frac{2}{3} = \frac23 = 4/6, 2\frac14 = 2 1/4 = 9/4 = 2.25. No tolerance: 0.333
   is not 1/3. `1,234` is one number. Currency signs in front, and %, degrees and \text{units} behind a number are dropped.
3. A list (`1, 2`, `1 and 2`, `1 or 2`, \{1, 2\}) equals a list with equal members, each used once; a part of the members, or
   more of them, is wrong. A tuple or interval equals one with the same brackets and equal ends, in order.
4. `x = 5` states 5 where the gold answer is no equation. Two equations are equal if one is a nonzero multiple of the other.
5. Anything else is parsed by math-verify (optional: extra [math]), as a whole; what it cannot parse has no value and is
   never equal to anything but the same text. Expressions are equal if their difference simplifies to 0, or, between
   numbers without a free symbol, if it vanishes to 40 digits relative to their size.
6. A gold answer that cannot be valued is an error when it is loaded, not a task that nobody can solve.
"""

from __future__ import annotations

import re
import threading
from fractions import Fraction
from functools import lru_cache
from math import factorial
from typing import Any, NamedTuple

from common.schema import ConfigError

RIGHT = "right"
WRONG = "another answer"
NO_BOX = "no boxed answer"
UNCLOSED = "boxed answer not closed"
SEVERAL = "several boxed answers"
UNPARSABLE = "answer not parsable"
TOO_LONG = "answer too long"
MAX_ANSWER = 300  # characters
MAX_POWER, MAX_FACTORIAL = 10_000, 5_000
DIGITS = 40

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SPACES = re.compile(r"\\[,;:!]|\\ |~|\\(?:quad|qquad|left|right|displaystyle|limits)(?![a-zA-Z])|\s+")
_UNIT = re.compile(r"(?<=[0-9}])(?:\\?%|\^\{?\\circ\}?|\\text\{[^{}]*\}|\\mbox\{[^{}]*\})+$")
_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_ATOM = re.compile(rf"(?P<n>{_NUMBER})(?:\^(?:\{{(?P<braced>-?[0-9]+)\}}|(?P<bare>[0-9]))|(?P<factorial>!))?")
_MIXED = re.compile(r"(?P<whole>[0-9]+) ?(?:(?P<top>[0-9]+)/(?P<bottom>[0-9]+)|(?P<frac>\\frac.*))")
_POWER_OF_POWER = re.compile(r"\^\{?[^{}]*\^|\^\{?-?[0-9]{5}")
_PROSE = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{4,}")  # math-verify reads a word as a product of its letters
_NAMED = re.compile(r"^[a-zA-Z](?:_\{?\w+\}?)?=(?!.*=)")


class BadAnswer(ConfigError):
    """A gold answer that cannot be valued."""


class Verdict(NamedTuple):
    """``reason``: one of the constants above; ``stated``: what the box holds."""

    success: bool
    reason: str
    stated: str | None = None


def grade_math(*, gold: str, text: str) -> Verdict:
    """Judges the boxed answer of `text` against `gold` by the module's rule; never raises on any text."""
    boxes = boxed(text)
    if not boxes:
        return Verdict(False, UNCLOSED if _BOX.search(text) else NO_BOX)
    if len({"".join(box.split()) for box in boxes}) > 1:
        return Verdict(False, SEVERAL)
    if len(boxes) != len(_BOX.findall(text)):
        return Verdict(False, UNCLOSED)
    stated = boxes[0]
    if len(stated) > MAX_ANSWER:
        return Verdict(False, TOO_LONG)
    if same_answer(gold=gold, stated=stated):
        return Verdict(True, RIGHT, stated)
    return Verdict(False, WRONG if has_value(stated) else UNPARSABLE, stated)


def boxed(text: str) -> list[str]:
    r"""The contents of every closed \boxed{...}, in order; a box inside a box belongs to the outer one."""
    found, end = [], 0
    for match in _BOX.finditer(text):
        if match.start() < end:
            continue
        depth, place = 1, match.end()
        while depth and place < len(text):
            depth += {"{": 1, "}": -1}.get(text[place], 0) if text[place - 1] != "\\" else 0
            place += 1
        if depth == 0:
            found.append(text[match.end() : place - 1])
            end = place
    return found


def check_gold(gold: str, where: str) -> None:
    """BadAnswer (a ConfigError) unless the gold answer has a value; `where` names the item.

    Control characters show a broken escape.
    """
    if any(ord(sign) < 32 and sign not in "\n\t" for sign in gold):
        raise BadAnswer(f"{where}: the answer {gold!r} holds a control character; a backslash was lost when it was written.")
    if not has_value(gold):
        raise BadAnswer(f"{where}: the answer {gold!r} cannot be valued; mend it or leave the item out.")


def has_value(text: str) -> bool:
    """Whether an answer, or each member of a list, can be valued."""
    text = plain(text)
    members = members_of(text)
    if members is not None:
        return all(map(has_value, members[1]))
    return exact(text) is not None or parsed(text) is not None


def same_answer(*, gold: str, stated: str) -> bool:
    """Whether two answers are equal under the module's rule; keyword arguments, because rule 4 is not symmetric."""
    gold, stated = plain(gold), plain(stated)
    if gold == stated:
        return gold != ""
    if "=" not in gold:
        stated = _NAMED.sub("", stated)
    expected, found = members_of(gold), members_of(stated)
    if expected is not None or found is not None:
        return expected is not None and found is not None and same_members(expected, found)
    value, other = exact(gold), exact(stated)
    if value is not None and other is not None:
        return value == other
    a, b = parsed(gold), parsed(stated)
    return a is not None and b is not None and same_value(a, b)


def plain(text: str) -> str:
    r"""The answer without what never changes its value: $, \left, spacing, units; \dfrac is \frac, \mathrm{e} is e."""
    text = text.strip().strip("$").strip()
    text = re.sub(r"\\[()\[\]]", "", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text).replace("−", "-").replace("\\$", "").lstrip("$£€")
    text = re.sub(r"\\(?:mathrm|text|textbf|mathbf|mbox)\{(e|i|and|or| and | or |[A-Z])\}", r" \1 ", text)
    text = re.sub(r"\\(?:cdot|times)(?![a-zA-Z])", "*", text).replace("×", "*")
    text = _SPACES.sub(" ", text).strip().rstrip(".").rstrip()
    text = _UNIT.sub("", text)
    return re.sub(r" ?([-+*/=<>(){}\[\],^_!]) ?", r"\1", text) if " " in text else text


def members_of(text: str) -> tuple[str, list[str]] | None:
    """(kind, members) of a list, set, tuple or interval; None for a single answer. kind: its brackets, "" for a list."""
    kind, inner = "", text
    if re.match(r"\\\{.*\\\}$", text):
        inner = text[2:-2]
        kind = "set"
    elif text[:1] in ("(", "[") and text[-1:] in (")", "]") and len(split_top(text[1:-1])) > 1:
        kind, inner = text[0] + text[-1], text[1:-1]
    if kind == "" and re.fullmatch(_NUMBER, inner):
        return None
    members = split_top(inner)
    if kind == "" and len(members) < 2:
        return None
    return ("" if kind == "set" else kind), members


def split_top(text: str) -> list[str]:
    """Cut at commas, semicolons, `and` and `or` outside all brackets; a comma in front of `and` counts once."""
    pieces, depth, start, place = [], 0, 0, 0
    separator = re.compile(r",?\s*\b(?:and|or)\b\s*|[,;]\s*")
    thousands = re.compile(r"(?<=[0-9]),[0-9]{3}(?![0-9])")
    while place < len(text):
        if text[place] in "([{":
            depth += 1
        elif text[place] in ")]}":
            depth -= 1
        match = separator.match(text, place) if depth == 0 else None
        if match and not (thousands.match(text, place) and re.search(rf"(?:^|[,; ])({_NUMBER})$", text[start:place])):
            pieces.append(text[start:place].strip())
            start = place = match.end()
            continue
        place += 1
    return [*pieces, text[start:].strip()]


def same_members(one: tuple[str, list[str]], other: tuple[str, list[str]]) -> bool:
    """Lists as multisets, tuples and intervals in order."""
    if one[0] != other[0] or len(one[1]) != len(other[1]) or "" in one[1] + other[1]:
        return False
    if one[0]:
        return all(same_answer(gold=a, stated=b) for a, b in zip(one[1], other[1], strict=True))
    left = list(other[1])
    for member in one[1]:
        match = next((candidate for candidate in left if same_answer(gold=member, stated=candidate)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def exact(text: str) -> Fraction | None:
    """The value of a number under the exact grammar of rule 2, or None."""
    text = plain(text) if " " in text.strip() else text
    sign = 1
    while text[:1] in ("-", "+"):
        sign, text = (-sign if text[0] == "-" else sign), text[1:].lstrip()
    if (mixed := _MIXED.fullmatch(text)) and (mixed["frac"] or " " in text):
        part = exact(mixed["frac"]) if mixed["frac"] else ratio(exact(mixed["top"]), exact(mixed["bottom"]))
        return None if part is None or not 0 < part < 1 else sign * (int(mixed["whole"]) + part)
    if text.startswith("\\frac"):
        parts = fraction_parts(text[5:].lstrip())
        value = None if parts is None else ratio(exact(parts[0]), exact(parts[1]))
    elif text.count("/") == 1:
        top, bottom = text.split("/")
        value = ratio(exact(top), exact(bottom)) if top and bottom else None
    else:
        value = atom(text)
    return None if value is None else sign * value


def ratio(top: Fraction | None, bottom: Fraction | None) -> Fraction | None:
    """Their quotient, if there is one."""
    return top / bottom if top is not None and bottom else None


def fraction_parts(text: str) -> tuple[str, str] | None:
    r"""Numerator and denominator of what follows \frac: {a}{b}, or two single digits."""
    if re.fullmatch(r"[0-9]{2}", text):
        return text[0], text[1]
    match = re.fullmatch(r"(?:\{([^{}]*)\}|([0-9])) ?(?:\{([^{}]*)\}|([0-9]))", text)
    return (match[1] or match[2] or "", match[3] or match[4] or "") if match else None


def atom(text: str) -> Fraction | None:
    """A number, a power or a factorial of one; brackets around it do not matter."""
    while text[:1] in "({" and text[-1:] in ")}" and len(text) > 2:
        text = text[1:-1].strip()
        if text[:1] == "-":
            return None if (inner := atom(text[1:])) is None else -inner
    match = _ATOM.fullmatch(text)
    if match is None:
        return None
    value = Fraction(match["n"].replace(",", ""))
    if match["factorial"]:
        return Fraction(factorial(int(value))) if value.denominator == 1 and value <= MAX_FACTORIAL else None
    power = match["braced"] or match["bare"]
    if power is None:
        return value
    if abs(int(power)) > MAX_POWER or (value == 0 and int(power) < 0):
        return None
    return value ** int(power)


@lru_cache(maxsize=4096)
def parsed(text: str) -> Any | None:
    """What math-verify reads the whole text as, or None; ConfigError where it is not installed."""
    if len(text) > MAX_ANSWER or _POWER_OF_POWER.search(text) or _PROSE.search(text) or not text:
        return None
    try:
        from math_verify import LatexExtractionConfig, parse
    except ImportError:
        raise ConfigError(
            f"the answer {text!r} needs math-verify, which is not installed: pip install -c constraints.txt -e '.[math]'"
        ) from None
    reading = [LatexExtractionConfig(boxed_match_priority=0)]
    # Its time limit is a signal, which only the main thread may set; the limits above keep texts small in any case.
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    found = parse(f"\\boxed{{{text}}}", extraction_config=reading, fallback_mode="no_fallback", parsing_timeout=limit)
    return None if not found or isinstance(found[0], str) else found[0]


def same_value(a: Any, b: Any) -> bool:
    """Whether two parsed answers are equal (rules 4 and 5)."""
    import sympy

    if isinstance(a, sympy.Equality) or isinstance(b, sympy.Equality):
        if not (isinstance(a, sympy.Equality) and isinstance(b, sympy.Equality)):
            return False
        one, other = (sympy.simplify(side.lhs - side.rhs) for side in (a, b))
        if one == 0 or other == 0:
            return bool(one == other)
        quotient = sympy.simplify(one / other)
        return bool(not quotient.free_symbols and quotient.is_finite and quotient != 0)
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return bool(type(a) is type(b) and a == b)
    if a.is_infinite or b.is_infinite:
        return bool(a == b)
    try:
        gap = sympy.simplify(sympy.nsimplify(a, rational=True) - sympy.nsimplify(b, rational=True))
        if gap == 0 or gap.is_Rational or gap.free_symbols:
            return bool(gap == 0)
        size = max(abs(sympy.N(a, DIGITS + 20)), abs(sympy.N(b, DIGITS + 20)))
        return bool(abs(sympy.N(gap, DIGITS + 20)) <= size * sympy.Float(10) ** -DIGITS)
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):  # sympy on odd expressions
        return False
