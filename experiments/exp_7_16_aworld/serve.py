"""Serves one of the servers over stdio, by the official SDK:

    python -m experiments.exp_7_16_aworld.serve search --worlds FOLDER [--world 0] [--conditions JSON]

Without --worlds it writes world 0 below runs/7-16/worlds and serves that. Any client of the Model Context Protocol can
start this line. Only the protocol goes to stdout; what tools print goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import mcp_types as types
from mcp.server.lowlevel import Server as Protocol
from mcp.server.stdio import stdio_server

from experiments.exp_7_16_aworld.desk import PASSING, Conditions, Desk
from experiments.exp_7_16_aworld.servers import SERVERS

DEFAULT = Path("runs/7-16/worlds")


def protocol_server(desk: Desk) -> Protocol:
    """The desk as a server of the SDK."""
    listed = [
        types.Tool(name=tool.name, description=tool.description, input_schema=tool.schema)
        for tool in desk.server.tools.values()
    ]

    async def list_tools(context: object, params: object) -> types.ListToolsResult:
        return types.ListToolsResult(tools=listed)

    async def call_tool(context: object, params: types.CallToolRequestParams) -> types.CallToolResult:
        reply = await desk.call(params.name, params.arguments or {}, dict(params.meta or {}))
        content = [types.TextContent(type="text", text=reply.text)]
        meta = {"_meta": {PASSING: True}} if reply.passing else {}
        return types.CallToolResult(content=content, is_error=reply.failed, **meta)

    return Protocol(desk.server.name, instructions=desk.server.text, on_list_tools=list_tools, on_call_tool=call_tool)


async def serve(desk: Desk) -> None:
    """Answers until stdin ends."""
    server = protocol_server(desk)
    async with stdio_server() as (reader, writer):
        await server.run(reader, writer, server.create_initialization_options())


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Serves one server of the world over stdio.")
    parser.add_argument("server", choices=sorted(SERVERS))
    parser.add_argument("--worlds", type=Path)
    parser.add_argument("--world", type=int, default=0)
    parser.add_argument("--conditions", default="{}", help="latency_s, failure_rate, quota as JSON")
    given = parser.parse_args(words)
    root = given.worlds or DEFAULT
    if given.worlds is None and not (root / "w0").is_dir():
        from experiments.exp_7_16_aworld.world import make_world, world_folder, write_world  # torch: only where it is needed

        write_world(make_world(0), world_folder(root, 0))
    conditions = Conditions(**json.loads(given.conditions))
    asyncio.run(serve(Desk(SERVERS[given.server], root, conditions, given.world)))


if __name__ == "__main__":
    main()
