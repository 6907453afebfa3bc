"""The tool language: a call as text, in two spellings, read by a strict parser.

    compact   read s1/web.cfg                              (the whole answer is one call)
    json      Action: read_file {"path": "s1/web.cfg"}     (the last action of the answer)

What is not a call raises BadCall with the reason; nothing is guessed or repaired.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from common.schema import one_of

SYNTAXES = ("compact", "json")
LONGEST = 10_000  # characters of an answer that are read at all
_ACTION = re.compile(r"Action:[ \t]*([a-z_]+)[ \t]*")


class BadCall(ValueError):
    """The answer is not a call; the message says why."""


class Call(NamedTuple):
    """A tool's name and its arguments as text, in the order of the tool's parameters; a last list is spread out."""

    tool: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tool:
    """One tool: `verb` is its compact name, `params` maps each parameter to the pattern of its compact text.

    `rest`: a last parameter that takes one or more words of this pattern, a list in JSON.
    """

    name: str
    verb: str
    params: tuple[tuple[str, str], ...] = ()
    rest: tuple[str, str] | None = None

    @property
    def pattern(self) -> str:
        """Compact spelling as a regular expression; groups are the arguments, the last one all words of `rest`."""
        parts = [re.escape(self.verb), *(f"({pattern})" for _, pattern in self.params)]
        if self.rest:
            parts.append(f"({self.rest[1]}(?: {self.rest[1]})*)")
        return " ".join(parts)

    @property
    def usage(self) -> str:
        """How the compact spelling is explained."""
        names = [name.upper() for name, _ in self.params] + ([f"{self.rest[0].upper()}..."] if self.rest else [])
        return " ".join([self.verb, *names])


def parse(text: str, tools: Sequence[Tool], syntax: str = "compact") -> Call:
    """The call that an answer makes. Raises BadCall."""
    one_of("syntax", syntax, SYNTAXES)
    if len(text) > LONGEST:
        raise BadCall(f"the answer has {len(text)} characters, at most {LONGEST} are read")
    return parse_compact(text, tools) if syntax == "compact" else parse_json(text, tools)


def parse_compact(text: str, tools: Sequence[Tool]) -> Call:
    """The whole answer must be one call: verb and arguments, parted by single spaces. Raises BadCall."""
    tool = next((tool for tool in tools if tool.verb == text.split(" ", 1)[0]), None)
    if tool is None:
        raise BadCall("no such tool")
    match = re.fullmatch(tool.pattern, text, re.ASCII)
    if match is None:
        raise BadCall(f"wrong arguments, use: {tool.usage}")
    args = match.groups()
    return Call(tool.name, (*args[:-1], *args[-1].split(" ")) if tool.rest else args)


def parse_json(text: str, tools: Sequence[Tool]) -> Call:
    """The last `Action: name {...}` of the answer; the arguments are exactly the tool's. Raises BadCall."""
    found = list(_ACTION.finditer(text))
    if not found or "Action:" in text[found[-1].end() :]:
        raise BadCall('no call, write: Action: name {"argument": "value"}')
    tool = next((tool for tool in tools if tool.name == found[-1][1]), None)
    if tool is None:
        raise BadCall("no such tool")
    wanted = [name for name, _ in tool.params] + ([tool.rest[0]] if tool.rest else [])
    values = arguments(text[found[-1].end() :])
    if sorted(values) != sorted(wanted):
        raise BadCall(f"wrong arguments, {tool.name} takes {', '.join(wanted) or 'none'}")
    args: list[str] = []
    for name in wanted:
        words = values[name] if tool.rest and name == tool.rest[0] else [values[name]]
        if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
            raise BadCall(f"{name} must be {'a list of texts' if tool.rest and name == tool.rest[0] else 'a text'}")
        args += words
    return Call(tool.name, tuple(args))


def arguments(text: str) -> dict[str, Any]:
    """The JSON object that the text begins with; what follows it is not read. Raises BadCall, also for a repeated key."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(items)) < len(items):
            raise BadCall("an argument is given twice")
        return dict(items)

    try:
        values, _ = json.JSONDecoder(object_pairs_hook=pairs).raw_decode(text)
    except RecursionError:
        raise BadCall("the arguments are nested too deeply") from None
    except ValueError as error:
        if isinstance(error, BadCall):
            raise
        raise BadCall("the arguments are not a JSON object") from None
    if not isinstance(values, dict):
        raise BadCall("the arguments are not a JSON object")
    return values


def write(call: Call, tools: Sequence[Tool], syntax: str = "compact") -> str:
    """The call as text; `parse` gives it back."""
    tool = next(tool for tool in tools if tool.name == call.tool)
    if syntax == "compact":
        return " ".join([tool.verb, *call.args])
    values: dict[str, Any] = dict(zip((name for name, _ in tool.params), call.args, strict=False))
    if tool.rest:
        values[tool.rest[0]] = list(call.args[len(tool.params) :])
    return f"Action: {tool.name} {json.dumps(values)}"


def usage(tools: Sequence[Tool], syntax: str = "compact") -> str:
    """The format hint: all tools with their arguments."""
    if syntax == "compact":
        return " | ".join(tool.usage for tool in tools)
    lines = []
    for tool in tools:
        values = {name: "..." for name, _ in tool.params} | ({tool.rest[0]: ["..."]} if tool.rest else {})
        lines.append(f"Action: {tool.name} {json.dumps(values)}")
    return "\n".join(lines)
