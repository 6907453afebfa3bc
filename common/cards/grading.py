"""One answer judged: class, reason, points and what the answer's fields say. Pure functions of text and deal.

The reward ladder is the published program's: right 5, no solution -1, wrong lists -1.5, wrong numbers -2, illegal -3,
no trial left -1. The rule here: one penalty, the worst fault that applies. Where the published program does otherwise,
the behaviour is a named switch (DEFECTS), off by default.
"""

from __future__ import annotations

import operator
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from common.cards import hands, prompts
from common.verifiers import answers, expressions

POINTS = {
    "correct": 5.0,
    "partial": 1.0,
    "no_solution": -1.0,
    "lists": -1.5,
    "number": -2.0,
    "illegal_formula": -3.0,
    "no_answer": -3.0,
    "step_limit": -1.0,
}
DEFECTS = {
    "float_grading": "the value is a float: 8/(3-8/3) misses 24",
    "piled_penalties": "faults are counted token by token and their penalties add up; an unclosed formula can earn +1",
    "cut_at_equals": "the formula is cut at the first '=', whatever the stated side says",
    "loose_json": "an answer that is no JSON is searched for a formula key",
    "leaking_feedback": "the feedback names the longest part of the formula that begins a solution",
    "ungraded_last_call": "after the last graded answer there is one more call, ungraded and penalised",
}
# Not the published text program's behaviour either: off by default.
EXTENSIONS = {
    "graded_lists": "the card and number lists must be right too, else -1.5",
    "cards_first": "the published image program: -1.5 for a card list that is not the cards shown, and nothing else counts",
}
SWITCHES = {**DEFECTS, **EXTENSIONS}
FIELDS = {
    "cards": answers.Field(list, str, max_items=16),
    "number": answers.Field(list, int, max_items=16),
    "formula": answers.Field(str),
    "trace": answers.Field(str, required=False),
}
_LOOSE_FORMULA = re.compile(r'"formula"\s*:\s*"([^"]{0,200})"')
_SOURCE_TOKEN = re.compile(r"\d+|[+\-*/()]", re.ASCII)
_NUMBER = r"(?:\d{1,6}|\(-?\d{1,6}(?:/\d{1,6})?\))"
_STEP = re.compile(rf"({_NUMBER})([-+*/])({_NUMBER})=({_NUMBER})((?:, {_NUMBER})*)\Z", re.ASCII)
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@dataclass(frozen=True)
class Deal:
    """A task: card names in order, what J, Q and K count as, the target, and the numbers of the cards."""

    cards: tuple[str, ...]
    rule: hands.Rule
    target: int
    values: tuple[int, ...]


class Grade(NamedTuple):
    """kind: a key of POINTS. reason: the fault in words. parts: kind -> points, their sum is the ladder reward.

    recognised / cards_correct: the number / card list states the deal, in order. rule10: the formula would be right if
    J, Q and K counted as 10. trace: `absent`, `valid` or the first fault of the step trace. run_on: see answers.
    """

    kind: str
    reason: str
    parts: dict[str, float]
    recognised: bool = False
    cards_correct: bool = False
    rule10: bool = False
    trace: str = "absent"
    run_on: int = 0
    formula: str = ""

    @property
    def success(self) -> bool:
        return self.kind == "correct"


def deal(cards: Sequence[str], rule: Sequence[int], target: int = hands.TARGET) -> Deal:
    """A checked deal; ValueError names what is wrong with cards, rule or target."""
    if len(cards) != 4 or any(card not in hands.RANKS for card in cards):
        raise ValueError(f"cards must be four of {', '.join(hands.RANKS)}; got {list(cards)}")
    if len(rule) != 3 or any(type(value) is not int or not 1 <= value <= 99 for value in rule):
        raise ValueError(f"face_values must be three integers 1..99 (J, Q, K); got {list(rule)}")
    if type(target) is not int or not 1 <= target <= 999:
        raise ValueError(f"target must be an integer 1..999; got {target}")
    triple = (rule[0], rule[1], rule[2])
    return Deal(tuple(cards), triple, target, hands.card_values(cards, triple))


def grade(text: str, task: Deal, switches: Collection[str] = ()) -> Grade:
    """Judges one completion (never prompt + completion). Never raises on any text.

    Under the rule the worst fault counts: no JSON answer or an illegal formula, then numbers not used exactly once,
    then wrong lists, then another value than the target.
    """
    found = answers.extract_json(text, FIELDS)
    if found.value is None:
        if "loose_json" not in switches:
            return Grade("no_answer", found.reason or "", {"no_answer": POINTS["no_answer"]}, run_on=found.run_on)
        loose = _LOOSE_FORMULA.search(text[: answers.MAX_TEXT])
        fields: dict[str, Any] = {"cards": [], "number": [], "formula": loose.group(1) if loose else ""}
    else:
        fields = found.value
    written = fields["formula"]
    if "cut_at_equals" in switches:
        written = written.partition("=")[0]
    formula = expressions.parse_formula(written, task.target)
    recognised = fields["number"] == list(task.values)
    cards_correct = fields["cards"] == list(task.cards)
    if "cards_first" in switches and not cards_correct:
        kind, reason = "lists", "the card list does not state the cards shown"
        parts = {kind: POINTS[kind]}
    elif "piled_penalties" in switches:
        kind, reason, parts = _piled(written, task, formula, "float_grading" in switches)
    else:
        lists_right = "graded_lists" not in switches or (recognised and cards_correct)
        kind, reason = _judge(written, task, formula, lists_right, "float_grading" in switches)
        parts = {kind: POINTS[kind]}
    return Grade(
        kind,
        reason,
        parts,
        recognised,
        cards_correct,
        formula.value == task.target and _same_numbers(formula, hands.card_values(task.cards, hands.TRAINING_RULE)),
        check_trace(fields["trace"], task, written) if "trace" in fields else "absent",
        found.run_on,
        written,
    )


def _judge(written: str, task: Deal, formula: expressions.Formula, lists_right: bool, floats: bool) -> tuple[str, str]:
    """(kind, reason) under the rule: the worst fault."""
    if formula.value is None:
        return "illegal_formula", formula.reason or ""
    if not _same_numbers(formula, task.values):
        return "number", _number_reason(formula.leaves, task.values)
    if not lists_right:
        return "lists", "the lists do not state the cards and their numbers"
    value = _float_value(written) if floats else formula.value
    if value != task.target:
        return "no_solution", f"the value is {value}"
    return "correct", "correct"


def _number_reason(leaves: Sequence[int], values: Sequence[int]) -> str:
    """The first that holds: a number that is not on the table, one used too often, one left out."""
    used, given = Counter(leaves), Counter(values)
    if any(number not in given for number in used):
        return "a number that no card has"
    return "a number used too often" if any(used[n] > given[n] for n in used) else "a number left out"


def _same_numbers(formula: expressions.Formula, values: Sequence[int]) -> bool:
    return sorted(formula.leaves) == sorted(values)


def check_trace(trace: str, task: Deal, formula: str) -> str:
    """What is right or wrong with a step trace; it is reported, never graded.

    The rule: one step `a+b=c` for each operator but in the order of work, each followed by the other numbers that are
    left (any order). The first fault is named: `layout`, `number` (an operand that is not there), `arithmetic`,
    `rest` (the numbers left), `target` (the last result), `formula` (the formula is not the steps' composition in full
    brackets, spaces and stated side apart). Otherwise `valid`.
    """
    table: list[hands.Number] = list(task.values)
    steps: list[hands.Step] = []
    parts = trace.split(prompts.SEMICOLON)
    if len(parts) != len(table) - 1:
        return "layout"
    for part in parts:
        step = _STEP.match(part)
        if not step:
            return "layout"
        first, sign, second, outcome, others = step.groups()
        try:
            a, b, result = _trace_number(first), _trace_number(second), _trace_number(outcome)
            rest = [_trace_number(number) for number in others.split(prompts.COMMA)[1:]]
        except ZeroDivisionError:  # a fraction such as (1/0)
            return "layout"
        if a not in table:
            return "number"
        table.remove(a)
        if b not in table:
            return "number"
        table.remove(b)
        if hands.apply(a, sign, b) != result:
            return "arithmetic"
        if sorted(rest) != sorted(table):
            return "rest"
        table.append(result)
        steps.append((a, sign, b, result))
    if steps[-1][3] != task.target:
        return "target"
    side = formula.partition("=")[0].replace(" ", "")
    return "valid" if side == prompts.compose(task.values, steps) else "formula"


def _trace_number(text: str) -> hands.Number:
    if text[0] != "(":
        return int(text)
    value = Fraction(text[1:-1])
    return int(value) if value.denominator == 1 else value


# --- the oracle's hint and the published program's ways --------------------------------------------------------------


@lru_cache(maxsize=2048)
def _solution_texts(values: tuple[int, ...], target: int) -> tuple[str, ...]:
    """Every writing of every solution as spaced tokens, sorted: full and sparse brackets, all operand orders."""
    texts = set()
    for solution in hands.solve(values, target):
        for tree in hands.orders(solution.tree):
            for text in (hands.render(tree), hands.render(tree, brackets=True), hands.render_sparse(tree)):
                texts.add(" ".join(_SOURCE_TOKEN.findall(text)) + " ")
    return tuple(sorted(texts))


def longest_right_prefix(formula: str, task: Deal) -> str:
    """The longest run of the formula's first tokens that begins some solution of the deal; "" if none does."""
    texts = _solution_texts(tuple(sorted(task.values)), task.target)
    tokens = _SOURCE_TOKEN.findall(formula.partition("=")[0])
    prefix = ""
    for count, token in enumerate(tokens):
        longer = f"{prefix}{token} "
        place = bisect_left(texts, longer)
        if place == len(texts) or not texts[place].startswith(longer):
            return "".join(tokens[:count])
        prefix = longer
    return "".join(tokens)


def _float_value(formula: str) -> float | None:
    """The value as Python's own int and float arithmetic gives it; None for a division by zero."""
    numbers: list[float] = []
    pending: list[str] = []
    level = {"(": 0, "+": 1, "-": 1, "*": 2, "/": 2}
    # Only called for formulas that the whitelist grammar has accepted, so operands and brackets match.
    side = max(formula.translate(expressions.WRITINGS).split("="), key=len)
    try:
        for token in [*_SOURCE_TOKEN.findall(side), ""]:
            if token.isdigit():
                numbers.append(int(token))
                continue
            if token != "(":
                while pending and pending[-1] != "(" and level[pending[-1]] >= level.get(token, 0):
                    right = numbers.pop()
                    numbers.append(_OPERATORS[pending.pop()](numbers.pop(), right))
            if token == ")":
                pending.pop()
            else:
                pending.append(token)
    except ZeroDivisionError:
        return None
    return numbers[0]


def _piled(written: str, task: Deal, formula: expressions.Formula, floats: bool) -> tuple[str, str, dict[str, float]]:
    """(kind, reason, parts) as the published program counts: -3 per fault of sequence, -2 and -2 for the numbers.

    Only ASCII signs are tokens; anything else costs -3 and ends the check. A formula that only lacks closing brackets
    passes the token check: it earns +1 if it begins a solution, otherwise -1.
    """
    illegal, number = POINTS["illegal_formula"], POINTS["number"]
    if _SOURCE_TOKEN.sub("", written).strip():
        return "illegal_formula", expressions.CHARACTER, {"illegal_formula": illegal}
    tokens = _SOURCE_TOKEN.findall(written)
    faults = _sequence_faults(tokens)
    used, given = Counter(int(token) for token in tokens if token.isdigit()), Counter(task.values)
    extra = any(used[n] > given[n] for n in used)
    missing = any(used[n] < given[n] for n in given)
    parts = {}
    if faults:
        parts["illegal_formula"] = illegal * faults
    if extra or missing:
        parts["number"] = number * (extra + missing)
    if parts:
        kind = "illegal_formula" if faults else "number"
        return kind, f"{faults} sequence faults, numbers extra: {extra}, missing: {missing}", parts
    if formula.value is None and longest_right_prefix(written, task) == "".join(tokens):
        return "partial", "an unclosed beginning of a solution", {"partial": POINTS["partial"]}
    value = _float_value(written) if floats and formula.value is not None else formula.value
    if value == task.target:
        return "correct", "correct", {"correct": POINTS["correct"]}
    return "no_solution", f"the value is {value}", {"no_solution": POINTS["no_solution"]}


def _sequence_faults(tokens: Sequence[str]) -> int:
    """Tokens that may not stand where they stand; unclosed brackets are not counted."""
    faults = depth = 0
    before = "("
    for token in tokens:
        ends_operand = before == ")" or before.isdigit()
        opens = token == "(" or token.isdigit()
        faults += ends_operand == opens
        depth += (token == "(") - (token == ")")
        if depth < 0:
            faults, depth = faults + 1, 0
        before = token
    return faults
