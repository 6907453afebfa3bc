"""Calculator, memory and calendar. What they keep is gone at the end of the episode."""

from __future__ import annotations

import json
from fractions import Fraction

from common.verifiers.expressions import parse_formula
from experiments.exp_7_16_aworld.tool import Place, Server, ToolError

calculator = Server("calculator", "Exact arithmetic.")
memory = Server("memory", "Notes that last for the episode.")
calendar = Server("calendar", "Who meets when in this week.")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MOST_NOTES, LONGEST_NOTE = 32, 500


def shown(value: Fraction) -> str:
    """A whole number, or a fraction in lowest terms."""
    return str(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"


@calculator.tool()
def evaluate(place: Place, formula: str) -> str:
    """The value of a formula of whole numbers with + - * / and brackets."""
    found = parse_formula(formula)
    if found.value is None:
        raise ToolError(str(found.reason))
    return shown(found.value)


@calculator.tool()
def larger(place: Place, a: int, b: int) -> str:
    """The larger of two numbers."""
    return str(max(a, b))


@calculator.tool()
def smaller(place: Place, a: int, b: int) -> str:
    """The smaller of two numbers."""
    return str(min(a, b))


@calculator.tool()
def mean(place: Place, a: int, b: int) -> str:
    """The mean of two numbers."""
    return shown(Fraction(a + b, 2))


@calculator.tool()
def percent(place: Place, part: int, whole: int) -> str:
    """How many percent the part is of the whole."""
    if whole == 0:
        raise ToolError("division by zero")
    return shown(Fraction(100 * part, whole))


def notes(place: Place) -> dict[str, str]:
    """Key -> note, as kept so far."""
    path = place.own / ".memory.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


@memory.tool()
def put(place: Place, key: str, text: str) -> str:
    """Keeps a note under a key."""
    found = notes(place) | {key: text}
    if len(found) > MOST_NOTES or len(key) + len(text) > LONGEST_NOTE:
        raise ToolError("no room")
    place.state("memory").write_text(json.dumps(found), encoding="utf-8")
    return "kept"


@memory.tool(needs="memory.put")
def get(place: Place, key: str) -> str:
    """The note under a key."""
    found = notes(place).get(key)
    if found is None:
        raise ToolError("no such note")
    return found


@memory.tool()
def keys(place: Place) -> str:
    """Keys of all notes."""
    return "; ".join(notes(place)) or "none"


@memory.tool(needs="memory.put")
def drop(place: Place, key: str) -> str:
    """Forgets the note under a key."""
    found = notes(place)
    if found.pop(key, None) is None:
        raise ToolError("no such note")
    place.state("memory").write_text(json.dumps(found), encoding="utf-8")
    return "forgotten"


def week(place: Place) -> dict[str, str]:
    """Person -> day, with the changes of this episode."""
    changed = place.own / ".calendar.json"
    path = changed if changed.is_file() else place.world / "calendar.json"
    return json.loads(path.read_text(encoding="utf-8"))


def change(place: Place, found: dict[str, str]) -> None:
    place.state("calendar").write_text(json.dumps(found), encoding="utf-8")


@calendar.tool()
def when(place: Place, name: str) -> str:
    """The day on which somebody has a meeting."""
    return week(place).get(name, "no meeting")


@calendar.tool()
def day(place: Place, day: str) -> str:
    """Who has a meeting on a day."""
    if day not in DAYS:
        raise ToolError("no such day")
    return "; ".join(name for name, own in week(place).items() if own == day) or "nobody"


@calendar.tool()
def free(place: Place) -> str:
    """Days without a meeting."""
    taken = set(week(place).values())
    return "; ".join(own for own in DAYS if own not in taken) or "none"


@calendar.tool(needs="calendar.when")
def add(place: Place, name: str, day: str) -> str:
    """Enters a meeting, or moves it."""
    if day not in DAYS or len(name) > 60:
        raise ToolError("no such day" if day not in DAYS else "no room")
    change(place, week(place) | {name: day})
    return "entered"


@calendar.tool(needs="calendar.when")
def remove(place: Place, name: str) -> str:
    """Strikes out a meeting."""
    found = week(place)
    if found.pop(name, None) is None:
        raise ToolError("no meeting")
    change(place, found)
    return "struck out"
