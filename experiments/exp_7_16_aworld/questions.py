"""Questions about a world, in the three levels of GAIA by the number of tool calls, each with its answer and shortest plan.

A question is a chain of relations ("the age of the leader of Acme"), or two numbers put together. Each relation has one
source; what its tools need first belongs to the plan, and two that exclude each other never meet in one question.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from common.seeding import python_random
from experiments.exp_7_16_aworld import world as files
from experiments.exp_7_16_aworld.servers import TOOLS
from experiments.exp_7_16_aworld.world import SHEETS, YEARS, World

LEVELS = {1: range(1, 2), 2: range(2, 4), 3: range(4, 8)}  # calls of the shortest plan
COMBINE = {"calculator.evaluate": "{a} plus {b}", "calculator.larger": "the larger of {a} and {b}"}


class Call(NamedTuple):
    """A call of a tool by its full name."""

    tool: str
    arguments: dict[str, Any]

    @property
    def cost(self) -> int:
        return TOOLS[self.tool].cost


@dataclass(frozen=True)
class Relation:
    """``takes`` and ``gives``: person, company, city, number or day. ``words``: with {x} for what it takes, {y} for a year.

    ``plan``: (world, x, year) -> the calls that find it. ``value``: (world, x, year) -> what it is.
    """

    takes: str
    gives: str
    words: str
    years: tuple[Any, ...]
    plan: Callable[[World, str, Any], list[Call]]
    value: Callable[[World, str, Any], Any]


def _call(tool: str, *values: Any) -> Call:
    return Call(tool, dict(zip((name for name, _ in TOOLS[tool].params), values, strict=True)))


NONE = (None,)
RELATIONS = {
    "age": Relation("person", "number", "the age of {x}", NONE,
                    lambda w, x, y: [_call("tables.lookup", files.STAFF, x, "age")], lambda w, x, y: w.people[x].age),
    "home": Relation("person", "city", "the home of {x}", NONE,
                     lambda w, x, y: [_call("tables.lookup", files.STAFF, x, "city")], lambda w, x, y: w.people[x].city),
    "employer": Relation("person", "company", "the employer of {x}", NONE,
                         lambda w, x, y: [_call("search.find", x), _call("browser.open", w.people[x].page)],
                         lambda w, x, y: w.people[x].employer),
    "citations": Relation("person", "number", "the citation count of {x}", NONE,
                          lambda w, x, y: [_call("papers.author", x), _call("papers.cited", w.people[x].paper)],
                          lambda w, x, y: w.people[x].cited),
    "meeting": Relation("person", "day", "the meeting day of {x}", NONE,
                        lambda w, x, y: [_call("calendar.when", x)], lambda w, x, y: w.people[x].day),
    "leader": Relation("company", "person", "the leader of {x}", NONE,
                       lambda w, x, y: [_call("documents.docx_find", files.MEMO, x)],
                       lambda w, x, y: w.companies[x].leader),
    "past leader": Relation("company", "person", "the leader of {x} in {y}", YEARS,
                            lambda w, x, y: [_call("archive.list", x), _call("archive.open", x, y)],
                            lambda w, x, y: w.companies[x].past[str(y)]),
    "seat": Relation("company", "city", "the seat of {x}", NONE,
                     lambda w, x, y: [_call("documents.pptx_find", files.DECK, x)], lambda w, x, y: w.companies[x].city),
    "earnings": Relation("company", "number", "the earnings of {x}", NONE,
                         lambda w, x, y: [_call("documents.pdf_pages", files.REPORT),
                                          _call("documents.pdf_find", files.REPORT, x)],
                         lambda w, x, y: w.companies[x].earned),
    "units": Relation("company", "number", "the units of {x} in {y}", SHEETS,
                      lambda w, x, y: [_call("tables.sheets", files.SALES), _call("tables.cell", files.SALES, y, x)],
                      lambda w, x, y: w.companies[x].units[y]),
    "price": Relation("company", "number", "the price of {x}", NONE,
                      lambda w, x, y: [_call("images.read", f"{x}.png")], lambda w, x, y: w.companies[x].price),
    "code": Relation("company", "number", "the code of {x}", NONE,
                     lambda w, x, y: [_call("audio.transcribe", f"{x}.wav")], lambda w, x, y: w.companies[x].code),
    "population": Relation("city", "number", "the population of {x}", NONE,
                           lambda w, x, y: [_call("encyclopaedia.fact", x, "population")],
                           lambda w, x, y: w.cities[x]["population"]),
}  # fmt: skip
NAMES: dict[str, Callable[[World], list[str]]] = {
    "person": lambda world: list(world.people),
    "company": lambda world: list(world.companies),
    "city": lambda world: list(world.cities),
}


class Chain(NamedTuple):
    """Relations one behind the other: words, answer, what it is, and the calls."""

    words: str
    value: Any
    kind: str
    calls: list[Call]


@dataclass(frozen=True)
class Question:
    """``budget``: units that the calls of an episode may cost."""

    text: str
    answer: str
    level: int
    plan: tuple[Call, ...]

    @property
    def cost(self) -> int:
        return sum(call.cost for call in self.plan)


def draw_chain(world: World, stream: random.Random, hops: int, gives: str | None = None) -> Chain:
    """A chain of `hops` relations that begins with a name and ends with what `gives` says (None: anything)."""
    while True:
        kind = stream.choice(("person", "company", "city"))
        name = stream.choice(NAMES[kind](world))
        words, value, calls = name, name, list[Call]()
        for _ in range(hops):
            fitting = [relation for relation in RELATIONS.values() if relation.takes == kind]
            if not fitting:
                break
            relation = stream.choice(fitting)
            year = stream.choice(relation.years)
            calls += relation.plan(world, value, year)
            words, value, kind = relation.words.format(x=words, y=year), relation.value(world, value, year), relation.gives
        else:
            if gives in (None, kind) and consistent(calls):
                return Chain(words, value, kind, calls)


def consistent(calls: list[Call]) -> bool:
    """No call stands behind one that excludes it."""
    seen = list[str]()
    for call in calls:
        if any(other in seen for other in TOOLS[call.tool].excludes):
            return False
        seen.append(call.tool)
    return True


def draw_question(world: World, stream: random.Random, level: int) -> Question:
    """A question of a level."""
    while True:
        if level > 1 and stream.random() < 0.5:
            first, second = (draw_chain(world, stream, stream.randint(1, level - 1), "number") for _ in range(2))
            tool = stream.choice(tuple(COMBINE))
            a, b = first.value, second.value
            end, value = (_call(tool, f"{a}+{b}"), a + b) if tool == "calculator.evaluate" else (_call(tool, a, b), max(a, b))
            words, calls = COMBINE[tool].format(a=first.words, b=second.words), [*first.calls, *second.calls, end]
        else:
            words, value, _, calls = draw_chain(world, stream, stream.randint(1, level))
        if len(calls) in LEVELS[level] and consistent(calls):
            return Question(f"What is {words}?", str(value), level, tuple(calls))


def question(world: World, number: int) -> Question:
    """The question of that number about a world; levels take turns."""
    return draw_question(world, python_random("question", world.number, number), 1 + number % 3)
