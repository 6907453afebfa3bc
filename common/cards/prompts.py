"""The text of the game: prompt, answer and feedback turn, built from a few constant phrases around varying numbers.

The game's facts (sections, JSON keys, how J, Q and K are announced, feedback that names the reason of the failure)
follow the language variant of Chu et al. 2025; the wording is ours. Every phrase is exported, so that a small tokenizer
can hold each as one token and a tiny model reads and writes the very text that a large one does.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.cards.hands import Number, Step

# Prompt: TASK 24 FACES 10 [SECOND 11 THIRD 13] (SAME | EACH) "4", "3", "2", "K" (REPLY | REPLY_TRACE)
TASK = (
    "[Task Description]\n"
    "You are an expert player of a card game. You see four cards and must write one formula over their numbers "
    "that equals "
)
FACES = (
    ". Use the number of every card exactly once. The formula may hold the numbers of the cards and the signs "
    "'+', '-', '*', '/', '(', ')' and '='. 'A' counts as '1', and 'J', 'Q', and 'K' count as '"
)
SECOND = "', '"
THIRD = "', and '"
SAME = "'.\n\n[Input]\nCards: ["
EACH = "' respectively.\n\n[Input]\nCards: ["
REPLY = (
    "]\n\n[Output]\nReply with one JSON object and nothing else. Its keys are:\n"
    '"cards": the list of the cards,\n'
    '"number": the list of their numbers,\n'
    '"formula": the formula.'
)
REPLY_TRACE = (
    "]\n\n[Output]\nReply with one JSON object and nothing else. Its keys are:\n"
    '"cards": the list of the cards,\n'
    '"number": the list of their numbers,\n'
    '"trace": the steps as a+b=c, each followed by the other numbers left, with "; " between steps,\n'
    '"formula": the formula.'
)
# Answer: OPEN cards NUMBER numbers (TRACE steps FORMULA_AFTER_TRACE | FORMULA) formula CLOSE
OPEN = '{"cards": ['
NUMBER = '], "number": ['
TRACE = '], "trace": "'
FORMULA_AFTER_TRACE = '", "formula": "'
FORMULA = '], "formula": "'
CLOSE = '"}'
COMMA = ", "
SEMICOLON = "; "
# Feedback: FAILED reason [HINT prefix HINT_END] AGAIN cards CARDS_END
FAILED = "You failed this trial because "
REASONS = {
    "no_answer": "your reply is not one JSON object with the keys asked for.",
    "illegal_formula": "your formula is not legal.",
    "number": "your formula does not use the number of every card exactly once.",
    "lists": "your lists do not state the cards and their numbers.",
    "no_solution": "your formula does not have the value asked for.",
    "step_limit": "no trial was left.",
}
HINT = " This part of it begins a solution: "
HINT_END = " ."
AGAIN = "\nTry again.\n\n[Input]\nCards: ["
CARDS_END = "]"

PROMPT_PHRASES = [TASK, FACES, SECOND, THIRD, SAME, EACH, REPLY, REPLY_TRACE]
ANSWER_PHRASES = [OPEN, NUMBER, TRACE, FORMULA_AFTER_TRACE, FORMULA, CLOSE, COMMA, SEMICOLON]
FEEDBACK_PHRASES = [FAILED, *REASONS.values(), HINT, HINT_END, AGAIN, CARDS_END]
PHRASES = PROMPT_PHRASES + ANSWER_PHRASES + FEEDBACK_PHRASES


def quoted(cards: Sequence[str]) -> str:
    """The cards as the inside of a JSON list: `"4", "3", "2", "K"`."""
    return COMMA.join([f'"{card}"' for card in cards])


def prompt(cards: Sequence[str], target: int, face_values: Sequence[int], trace: bool) -> str:
    """The first turn: task with target and card rule, the four cards in order, the form of the answer.

    face_values: what J, Q and K count as. `trace` asks for the optional step trace.
    """
    return framed(quoted(cards), target, face_values, trace)


def framed(shown: str, target: int, face_values: Sequence[int], trace: bool) -> str:
    """The first turn around whatever shows the cards: their names, or the place of an image."""
    jack, queen, king = face_values
    if jack == queen == king:
        rule = f"{jack}{SAME}"
    else:
        rule = f"{jack}{SECOND}{queen}{THIRD}{king}{EACH}"
    return f"{TASK}{target}{FACES}{rule}{shown}{REPLY_TRACE if trace else REPLY}"


def feedback(cards: Sequence[str], failure: str, hint: str | None = None) -> str:
    """The turn after a wrong answer: the class of the failure, the oracle's hint if given, the cards once more.

    failure: a key of REASONS. hint: the part of the formula that begins a solution (leaking mode).
    """
    return f"{failed(failure, hint)}{AGAIN}{quoted(cards)}{CARDS_END}"


def failed(failure: str, hint: str | None = None) -> str:
    """How a turn after a wrong answer begins: what was wrong, and the oracle's hint if given."""
    leak = f"{HINT}{hint}{HINT_END}" if hint else ""
    return f"{FAILED}{REASONS[failure]}{leak}"


def number_text(number: Number) -> str:
    """A number in a trace: fractions and negative numbers stand in brackets, so that a step has one reading."""
    return str(number) if isinstance(number, int) and number >= 0 else f"({number})"


def trace_text(values: Sequence[int], steps: Sequence[Step]) -> str:
    """The step trace: per step `a op b=r` and the other numbers left (cards in order, then results), joined by `; `.

    Example: `4*3=12, 2, 10; 12+2=14, 10; 14+10=24`. An operand that stands both as a result and as a card is taken
    from the results. Raises ValueError if a step uses a number that is not there.
    """
    leaves: list[Number] = list(values)
    results: list[Number] = []
    parts = []
    for a, op, b, result in steps:
        for operand in (a, b):
            _take(operand, results, leaves)
        rest = [number_text(number) for number in (*leaves, *results)]
        parts.append(COMMA.join([f"{number_text(a)}{op}{number_text(b)}={number_text(result)}", *rest]))
        results.append(result)
    return SEMICOLON.join(parts)


def _take(operand: Number, results: list[Number], leaves: list[Number]) -> None:
    source = results if operand in results else leaves
    source.remove(operand)


def compose(values: Sequence[int], steps: Sequence[Step]) -> str:
    """The formula that a trace stands for, inner expressions in brackets: `((4*3)+2)+10`. Errors as in trace_text."""
    leaves: list[Number] = list(values)
    results: list[tuple[Number, str]] = []
    for a, op, b, result in steps:
        results.append((result, f"({_name(a, results, leaves)}{op}{_name(b, results, leaves)})"))
    return results[-1][1][1:-1]


def _name(operand: Number, results: list[tuple[Number, str]], leaves: list[Number]) -> str:
    for place in range(len(results) - 1, -1, -1):
        if results[place][0] == operand:
            return results.pop(place)[1]
    leaves.remove(operand)
    return str(operand)


def answer(cards: Sequence[str], values: Sequence[int], steps: Sequence[Step], target: int, trace: bool = True) -> str:
    """The answer's text: one JSON object with cards, numbers, the trace if asked for, and `formula=target`.

    values: the numbers of the cards in the same order. steps: three steps (a, operator, b, result) over them.
    """
    numbers = COMMA.join([str(value) for value in values])
    middle = f"{TRACE}{trace_text(values, steps)}{FORMULA_AFTER_TRACE}" if trace else FORMULA
    return f"{OPEN}{quoted(cards)}{NUMBER}{numbers}{middle}{compose(values, steps)}={target}{CLOSE}"
