"""Arithmetic formulas from model text, parsed by a whitelist grammar and valued in exact fractions.

The written rule
----------------
A formula is built from non-negative integers, the signs + - * / and round brackets, with the usual precedence:

    side   = term { (+ | -) term }      term = factor { (* | /) factor }      factor = integer | ( side )
    answer = side [ = integer ]  |  integer = side

Accepted writings of the same: white space between tokens (also no-break and full-width spaces), redundant brackets,
`×` `·` `⋅` `∗` for *, `÷` `∕` for /, `−` and `–` for -, and full-width digits, signs and brackets.
The stated side (`= 24` at the end or `24 =` in front) must be one bare integer. It is compared, never valued in place
of the formula: with a target it must equal the target, without one it must equal the formula's value.

Refused, each with its own reason: powers, `//`, `%`, `!`, bit signs, comparisons (operator not allowed); a sign without
a left operand (unary sign); `4 3` (two numbers in a row); `(1+2)(8)` (implicit multiplication); decimals; leading zeros
(`04`); LaTeX; letters, other brackets, commas and any other character; a second `=`; another stated side; division by
zero; and anything longer, deeper or with more digits than the limits.

The parser is one pass with two stacks: no recursion, no evaluation, time linear in the (bounded) length.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import NamedTuple

EMPTY = "empty"
TOO_LONG = "too long"
TOO_DEEP = "too deep"
TOO_LARGE = "number too large"
OPERATOR = "operator not allowed"
CHARACTER = "character not allowed"
DECIMAL = "decimal"
LATEX = "LaTeX"
LEADING_ZERO = "leading zero"
UNARY = "unary sign"
TWO_NUMBERS = "two numbers in a row"
IMPLICIT = "implicit multiplication"
MISSING_OPERAND = "missing operand"
BRACKETS = "unbalanced brackets"
EQUALS = "more than one equals sign"
RIGHT_SIDE = "another right-hand side"
ZERO_DIVISION = "division by zero"
REASONS = (
    *(EMPTY, TOO_LONG, TOO_DEEP, TOO_LARGE, OPERATOR, CHARACTER, DECIMAL, LATEX, LEADING_ZERO, UNARY),
    *(TWO_NUMBERS, IMPLICIT, MISSING_OPERAND, BRACKETS, EQUALS, RIGHT_SIDE, ZERO_DIVISION),
)


@dataclass(frozen=True)
class Limits:
    """Sizes above which a formula is refused unread."""

    length: int = 200
    depth: int = 20
    digits: int = 6


class Formula(NamedTuple):
    """What a text says: its exact value and its numbers in reading order, or the reason why it is refused."""

    value: Fraction | None
    reason: str | None
    leaves: tuple[int, ...]


WRITINGS = str.maketrans(
    {
        **dict.fromkeys("×·⋅∗＊", "*"),
        **dict.fromkeys("÷∕／", "/"),
        **dict.fromkeys("−–－", "-"),
        **dict.fromkeys("\u00a0\u202f\u3000", " "),
        **dict(zip("＋（）＝", "+()=", strict=True)),
        **dict(zip("０１２３４５６７８９", "0123456789", strict=True)),
    }
)
_ALLOWED = re.compile(r"[0-9+\-*/()= \t\r\n]*\Z")
_TOKEN = re.compile(r"[0-9]+|[-+*/()]")
_DECIMAL = re.compile(r"[0-9]\s*[.,]\s*[0-9]|\.[0-9]|[0-9]\.")
_FOREIGN_OPERATOR = re.compile(r"[\^%!<>&|~@√]|[²³⁰¹⁴-⁹]")
_BARE = re.compile(r"\s*([0-9]+)\s*\Z")
_LEVEL = {"+": 1, "-": 1, "*": 2, "/": 2, "(": 0}
_LIMITS = Limits()


def _refused(reason: str) -> Formula:
    return Formula(None, reason, ())


def parse_formula(text: str, target: int | None = None, limits: Limits = _LIMITS) -> Formula:
    """Value and numbers of a formula under the module's rule; never raises on any text.

    target: the number that a stated side must name; None lets it name the formula's own value. The value itself is not
    compared with the target here. Cost is about 10 microseconds for four numbers, and a length test for oversized text.
    """
    if len(text) > limits.length:
        return _refused(TOO_LONG)
    if not text.isascii():
        text = text.translate(WRITINGS)
    if not _ALLOWED.match(text):
        return _refused(_foreign(text))
    if "**" in text or "//" in text:
        return _refused(OPERATOR)
    stated = None
    if "=" in text:
        text, stated, reason = _split_sides(text, limits)
        if reason:
            return _refused(reason)
        if target is not None and stated != target:
            return _refused(RIGHT_SIDE)
    formula = _value(text, limits)
    if stated is not None and target is None and formula.value is not None and formula.value != stated:
        return _refused(RIGHT_SIDE)
    return formula


def _foreign(text: str) -> str:
    """Why a text with characters outside the grammar is refused: the most telling reason first."""
    if "\\" in text or "$" in text:
        return LATEX
    if _DECIMAL.search(text):
        return DECIMAL
    return OPERATOR if _FOREIGN_OPERATOR.search(text) else CHARACTER


def _split_sides(text: str, limits: Limits) -> tuple[str, int | None, str | None]:
    """(formula side, stated integer, reason): the integer stands at the end, or in front."""
    if text.count("=") > 1:
        return text, None, EQUALS
    left, _, right = text.partition("=")
    if stated := _BARE.match(right):
        side = left
    elif stated := _BARE.match(left):
        side = right
    else:
        return text, None, RIGHT_SIDE
    digits = stated.group(1)
    if len(digits) > limits.digits:
        return side, None, TOO_LARGE
    return side, int(digits), None


def _value(text: str, limits: Limits) -> Formula:
    """Two-stack evaluation of one side; numbers are (numerator, denominator) pairs without a common factor."""
    numbers: list[tuple[int, int]] = []
    operators: list[str] = []
    leaves: list[int] = []
    depth = 0
    before = ""  # the token before: "" at the start
    for token in _TOKEN.findall(text):
        if token.isdigit():
            reason = _number_fault(token, before, limits)
            if reason:
                return _refused(reason)
            leaves.append(int(token))
            numbers.append((leaves[-1], 1))
        elif token == "(":
            depth += 1
            if before == ")" or before.isdigit():
                return _refused(IMPLICIT)
            if depth > limits.depth:
                return _refused(TOO_DEEP)
            operators.append(token)
        elif not (before == ")" or before.isdigit()):
            return _refused(_operand_fault(token, before))
        else:
            level = 0 if token == ")" else _LEVEL[token]
            while operators and operators[-1] != "(" and _LEVEL[operators[-1]] >= level:
                if not _reduce(numbers, operators.pop()):
                    return _refused(ZERO_DIVISION)
            if token == ")":
                if not operators:
                    return _refused(BRACKETS)
                operators.pop()
                depth -= 1
            else:
                operators.append(token)
        before = token
    if not before:
        return _refused(EMPTY)
    if before in _LEVEL:
        return _refused(MISSING_OPERAND)
    while operators:
        operator = operators.pop()
        if operator == "(":
            return _refused(BRACKETS)
        if not _reduce(numbers, operator):
            return _refused(ZERO_DIVISION)
    return Formula(Fraction(*numbers[0]), None, tuple(leaves))


def _number_fault(token: str, before: str, limits: Limits) -> str | None:
    if before.isdigit():
        return TWO_NUMBERS
    if before == ")":
        return IMPLICIT
    if len(token) > limits.digits:
        return TOO_LARGE
    return LEADING_ZERO if token[0] == "0" and len(token) > 1 else None


def _operand_fault(token: str, before: str) -> str:
    """Why an operator or closing bracket may not follow what stands before it."""
    if token in "+-":
        return UNARY
    if token == ")" and before == "":
        return BRACKETS
    return MISSING_OPERAND


def _reduce(numbers: list[tuple[int, int]], operator: str) -> bool:
    """Replaces the top two numbers by their result; False for a division by zero."""
    c, d = numbers.pop()
    a, b = numbers.pop()
    if operator == "+":
        top, bottom = a * d + c * b, b * d
    elif operator == "-":
        top, bottom = a * d - c * b, b * d
    elif operator == "*":
        top, bottom = a * c, b * d
    elif c == 0:
        return False
    else:
        top, bottom = a * d, b * c
    shared = gcd(top, bottom)
    numbers.append((top // shared, bottom // shared))
    return True
