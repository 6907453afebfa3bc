"""The world for a client of someone else's making: chuk-mcp, which implements the protocol without the official SDK.

    python -m experiments.exp_7_16_aworld.clients [FOLDER]

It starts each server by the line that any client would use, lists its tools and calls every one of them, and compares the
answers with those of the same tools in this process.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.exp_7_16_aworld.desk import Conditions, Desk, forget
from experiments.exp_7_16_aworld.servers import SERVERS
from experiments.exp_7_16_aworld.tool import Tool
from experiments.exp_7_16_aworld.world import DECK, MEMO, REPORT, SALES, SHEETS, STAFF, World, make_world

FIRST = ("put", "when", "csv_write", "xlsx_write", "docx_write", "pptx_write", "pdf_write", "write")  # what others build on


def sample_arguments(tool: Tool, world: World) -> dict[str, Any]:
    """Arguments with which a tool has something to say in that world."""
    company, person, city = (next(iter(found)) for found in (world.companies, world.people, world.cities))
    page, paper = world.people[person].page, world.people[person].paper
    file = {"tables": STAFF, "images": f"{company}.png", "audio": f"{company}.wav", "shell": "notes.txt"}.get(tool.server, "")
    if tool.server == "documents":
        file = {"docx": MEMO, "pptx": DECK, "pdf": REPORT}[tool.name.split("_")[0]]
    if tool.name in ("sheets", "sheet", "cell"):
        file = SALES
    if tool.name.endswith("write"):
        file = f"new.{tool.name.split('_')[0] if '_' in tool.name else 'txt'}"
    values: dict[str, Any] = {
        "words": person, "start": person[0], "page": page, "word": company,
        "name": company if tool.server == "archive" else person,
        "year": 2019, "title": city, "field": "height", "paper": paper, "file": file, "sheet": SHEETS[0], "number": 1,
        "column": "age", "text": "name age; Ada 7", "code": "print(6 * 7)", "command": "ls", "formula": "(6+4)*7",
        "a": 3, "b": 4, "part": 1, "whole": 4, "day": "Monday",
        "key": {"memory": "note", "tables": person}.get(tool.server, ""),
    }  # fmt: skip
    if tool.name == "cell":
        values["key"] = company
    return {name: values[name] for name, _ in tool.params}


def in_order(tools: Sequence[Tool]) -> list[Tool]:
    """Tools that others build on come first, those that take something away last."""
    return sorted(tools, key=lambda tool: (tool.name not in FIRST, tool.name in ("drop", "remove")))


async def listed_and_called(root: Path, number: int, names: Sequence[str] = tuple(SERVERS)) -> tuple[int, int]:
    """(tools that are listed and answer as they do in this process, tools that there are)."""
    from chuk_mcp.protocol.messages.initialize.send_messages import send_initialize
    from chuk_mcp.protocol.messages.tools.send_messages import send_tools_call, send_tools_list
    from chuk_mcp.transports.stdio.parameters import StdioParameters
    from chuk_mcp.transports.stdio.stdio_client import stdio_client

    from experiments.exp_7_16_aworld.supervisor import own_command

    world, right, total = make_world(number), 0, 0
    for name in names:
        server, line = SERVERS[name], own_command(name, root, Conditions())
        words = [*line.args, "--world", str(number)]
        local = Desk(server, root, Conditions(), number)
        parameters = StdioParameters(command="/bin/sh", args=["-c", CHANGE, str(line.cwd), line.command, *words])
        async with stdio_client(parameters) as (reader, writer):
            await send_initialize(reader, writer)
            found = await send_tools_list(reader, writer)
            listed = {tool["name"] if isinstance(tool, dict) else tool.name for tool in _get(found, "tools")}
            for tool in in_order(list(server.tools.values())):
                total += 1
                arguments = sample_arguments(tool, world)
                reply = await send_tools_call(reader, writer, tool.name, arguments)
                told = " ".join(_get(block, "text") for block in _get(reply, "content"))
                here = await local.call(tool.name, arguments, {"aworld/episode": "here"})
                right += tool.name in listed and told == here.text and not here.failed
    for episode in ("guest", "here"):
        forget(root, episode)
    return right, total


CHANGE = 'cd "$0" && exec "$@"'  # chuk-mcp starts servers in its own folder; ours are modules of this one


def _get(value: Any, key: str) -> Any:
    """A field of a mapping or of an object: the client's types differ between its two ways of validation."""
    return value[key] if isinstance(value, dict) else getattr(value, key)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/7-16/worlds")
    print("{} of {} tools are listed and answer as they should".format(*asyncio.run(listed_and_called(folder, 0))))
