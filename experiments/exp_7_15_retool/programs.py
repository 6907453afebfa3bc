"""Programs for the problems, as people write them: in several styles, some with a fault, and what the interpreter replies.

`reply` says for these programs alone what the sandbox would say, because a corpus of a hundred thousand of them is written
faster than run; tests hold it against the sandbox.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from experiments.exp_7_15_retool.problems import Problem, apply

NAMES = "abcdefgh"  # a chain of 7 operations defines 7 of them
STYLES = {"small": ("in_place", "names"), "tower": ("pow",), "equation": ("inverse", "search")}
STYLES |= dict.fromkeys(("medium", "large"), STYLES["small"])
FAULTS = {
    "small": ("NameError", "TypeError", "SyntaxError"),
    "tower": ("TimeoutError", "TimeoutError", "TimeoutError", "SyntaxError"),
    "equation": ("division", "SyntaxError"),
}
FAULTS |= {"medium": FAULTS["small"], "large": (*FAULTS["small"], "no modulo")}
ERRORS = ("NameError", "TypeError", "SyntaxError", "TimeoutError", "ZeroDivisionError", "ValueError", "OverflowError",
          "IndentationError", "MemoryError", "AttributeError", "IndexError")  # fmt: skip
NOTHING = "nothing printed"
CUT = "..."
CODE_PHRASES = [
    *("x", "x=", "x*=", "x+=", "x-=", "\n", "print(", ")", "pow(", ",", "%", "**", "*", "+", "-", "/", "(", "."),
    *("for x in range(", "):", " if ", "==", ":"),
    *NAMES,
    *(f"{name}=" for name in NAMES),
]


class Written(NamedTuple):
    """A program and the reply to it. ``fault``: what is wrong with it, "" if nothing."""

    code: str
    reply: str
    fault: str = ""


def write(problem: Problem, style: str) -> Written:
    """A right program in that style."""
    return Written(WRITERS[style](problem), str(problem.answer))


def write_faulty(problem: Problem, fault: str, stream: random.Random) -> Written:
    """A program with that fault."""
    code, reply = FAULTY[fault](problem, stream)
    return Written(code, reply, fault)


def draw(problem: Problem, stream: random.Random, slip: float) -> Written:
    """A program in any style, with a fault in that share of cases."""
    if stream.random() < slip:
        return write_faulty(problem, stream.choice(FAULTS[problem.kind]), stream)
    return write(problem, stream.choice(STYLES[problem.kind]))


def printed(name: str, problem: Problem) -> str:
    """The line that prints the result."""
    return f"print({name}%{problem.modulus})" if problem.modulus else f"print({name})"


def in_place(problem: Problem) -> str:
    """x=23, x*=47, x+=16, print(x%97), a line each."""
    lines = [f"x{op}={number}" for op, number in zip(problem.operations, problem.numbers[1:], strict=True)]
    return "\n".join([f"x={problem.numbers[0]}", *lines, printed("x", problem)])


def named_lines(problem: Problem) -> list[str]:
    """a=23*47, b=a+16, ...: every result has a name of its own."""
    lines, value = [], str(problem.numbers[0])
    for name, op, number in zip(NAMES, problem.operations, problem.numbers[1:], strict=False):
        lines.append(f"{name}={value}{op}{number}")
        value = name
    return lines


def names(problem: Problem) -> str:
    """The named lines, and the last one printed."""
    return "\n".join([*named_lines(problem), printed(NAMES[len(problem.operations) - 1], problem)])


def by_pow(problem: Problem) -> str:
    """print(pow(23,47**61,83))."""
    base, power, height = problem.numbers
    return f"print(pow({base},{power}**{height},{problem.modulus}))"


def inverse(problem: Problem) -> str:
    """print(pow(23,-1,97)*16%97)."""
    factor, rest = problem.numbers
    return f"print(pow({factor},-1,{problem.modulus})*{rest}%{problem.modulus})"


def search(problem: Problem) -> str:
    """Tries every number."""
    factor, rest = problem.numbers
    return f"for x in range({problem.modulus}):\n if x*{factor}%{problem.modulus}=={rest}:print(x)"


def unknown_name(problem: Problem, stream: random.Random) -> tuple[str, str]:
    """Prints a name, or goes on from one, that was never given a value."""
    missing = NAMES[len(problem.operations)]
    if stream.random() < 0.5:
        return "\n".join([*named_lines(problem), printed(missing, problem)]), "NameError"
    lines = in_place(problem).split("\n")
    return "\n".join(lines[1:]), "NameError"  # the line that gives x its value is missing


def printed_value(problem: Problem, stream: random.Random) -> tuple[str, str]:
    """Goes on from what print returned, which is nothing."""
    lines = in_place(problem).split("\n")
    lines[0] = f"x=print({problem.numbers[0]})"
    return "\n".join(lines), "TypeError"


def open_bracket(problem: Problem, stream: random.Random) -> tuple[str, str]:
    """The last bracket is missing."""
    style = stream.choice(STYLES[problem.kind])
    return WRITERS[style](problem)[:-1], "SyntaxError"


def no_modulo(problem: Problem, stream: random.Random) -> tuple[str, str]:
    """Prints the whole number: it runs, and is of no use."""
    value = problem.numbers[0]
    for op, number in zip(problem.operations, problem.numbers[1:], strict=True):
        value = apply(value, op, number)
    return in_place(problem).rsplit("\n", 1)[0] + "\nprint(x)", shown(str(value))


def plain_power(problem: Problem, stream: random.Random) -> tuple[str, str]:
    """Builds the power before it is reduced: a number that no machine holds."""
    base, power, height = problem.numbers
    return f"print({base}**{power}**{height}%{problem.modulus})", "TimeoutError"


def division(problem: Problem, stream: random.Random) -> tuple[str, str]:
    """Divides as if the modulus were not there: it runs, and is of no use."""
    factor, rest = problem.numbers
    return f"print({rest}/{factor}%{problem.modulus})", shown(str(rest / factor % problem.modulus))


def shown(text: str, limit: int = 24) -> str:
    """A reply of at most `limit` characters: beyond them the first ones and CUT."""
    return text if len(text) <= limit else text[: limit - len(CUT)] + CUT


WRITERS: dict[str, Callable[[Problem], str]] = {
    "in_place": in_place, "names": names, "pow": by_pow, "inverse": inverse, "search": search,
}  # fmt: skip
FAULTY: dict[str, Callable[[Problem, random.Random], tuple[str, str]]] = {
    "NameError": unknown_name, "TypeError": printed_value, "SyntaxError": open_bracket, "no modulo": no_modulo,
    "TimeoutError": plain_power, "division": division,
}  # fmt: skip
SILENT = ("no modulo", "division")  # faults that the interpreter does not report

__all__ = ["CODE_PHRASES", "ERRORS", "FAULTS", "NOTHING", "SILENT", "STYLES", "Written", "draw", "shown", "write"]
