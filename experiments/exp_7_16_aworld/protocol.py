"""What a policy writes in a turn: a call or the answer, in two spellings, read strictly.

    compact   tables.lookup staff.csv Ada age              (the whole turn is one call; the last argument takes the rest)
    json      <tool_call>{"name": "tables.lookup", "arguments": {...}}</tool_call>   (once, behind any reasoning)
    both      <answer>43</answer>

What is neither raises BadTurn with the reason; nothing is guessed or repaired.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from common.schema import one_of
from common.verifiers.answers import Field, extract_json
from experiments.exp_7_16_aworld.questions import Call
from experiments.exp_7_16_aworld.scorer import CLOSE, OPEN, answer_in
from experiments.exp_7_16_aworld.tool import Tool

SYNTAXES = ("compact", "json")
LONGEST = 20_000  # characters of a turn that are read at all
BEGIN, END = "<tool_call>", "</tool_call>"
FIELDS = {"name": Field(str), "arguments": Field(dict)}


class BadTurn(ValueError):
    """The turn is neither a call nor an answer; the message says why."""


def parse(text: str, tools: Mapping[str, Tool], syntax: str = "compact") -> Call | str:
    """The call that a turn makes, or the answer as text. Raises BadTurn."""
    one_of("syntax", syntax, SYNTAXES)
    if len(text) > LONGEST:
        raise BadTurn(f"the turn has {len(text)} characters, at most {LONGEST} are read")
    if OPEN in text or CLOSE in text:
        answer = answer_in(text)
        if answer is None or (syntax == "compact" and not (text.startswith(OPEN) and text.endswith(CLOSE))):
            raise BadTurn("not one answer")
        return answer
    return parse_compact(text, tools) if syntax == "compact" else parse_json(text, tools)


def parse_compact(text: str, tools: Mapping[str, Tool]) -> Call:
    """Name and arguments, parted by single spaces. Raises BadTurn."""
    name, *rest = text.split(" ", 1)
    tool = tools.get(name)
    if tool is None:
        raise BadTurn("no such tool")
    words = rest[0].split(" ", len(tool.params) - 1) if rest and tool.params else rest
    if len(words) != len(tool.params) or not all(words):
        raise BadTurn(f"wrong arguments, use: {usage(tool)}")
    arguments: dict[str, Any] = {}
    for (key, kind), word in zip(tool.params, words, strict=True):
        if kind == "int" and not (word.isascii() and word.removeprefix("-").isdigit() and len(word) < 10):
            raise BadTurn(f"{key} must be a whole number")
        arguments[key] = int(word) if kind == "int" else word
    return Call(name, arguments)


def parse_json(text: str, tools: Mapping[str, Tool]) -> Call:
    """The one call behind the reasoning. Raises BadTurn."""
    text = text.rpartition("</think>")[2]
    if "<think>" in text or text.count(BEGIN) != 1 or text.count(END) != 1:
        raise BadTurn("not one call")
    found = extract_json(text.partition(BEGIN)[2].partition(END)[0], FIELDS)
    if found.value is None:
        raise BadTurn(f"not a call: {found.reason}")
    tool = tools.get(found.value["name"])
    if tool is None:
        raise BadTurn("no such tool")
    fault = tool.fault(found.value["arguments"])
    if fault:
        raise BadTurn(fault)
    return Call(tool.full, found.value["arguments"])


def write(call: Call, syntax: str = "compact") -> str:
    """The call as text; `parse` gives it back where no argument but the last holds a space."""
    if syntax == "compact":
        return " ".join([call.tool, *map(str, call.arguments.values())])
    return f"{BEGIN}{json.dumps({'name': call.tool, 'arguments': call.arguments})}{END}"


def usage(tool: Tool) -> str:
    """How the compact spelling of a call looks."""
    return " ".join([tool.full, *(name.upper() for name, _ in tool.params)])


def manual(tools: Mapping[str, Tool]) -> str:
    """All tools for the prompt of a pre-trained model."""
    lines = [json.dumps({"name": t.full, "description": t.description, "parameters": t.schema}) for t in tools.values()]
    head = f'Make one call per turn: {BEGIN}{{"name": ..., "arguments": {{...}}}}{END}. End with {OPEN}...{CLOSE}. Tools:'
    return "\n".join([head, *lines])
