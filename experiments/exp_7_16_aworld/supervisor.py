"""Keeps servers of the Model Context Protocol at work: starts, asks, checks, restarts and stops them.

A server is started when it is first needed and talked to through the official SDK. Whatever it does — hang, crash, answer
late, break the protocol, answer without end — the caller gets a `Reply` within the time limit, and the next call meets a
server that works, if one can be started. A reply that comes too late is dropped by the SDK, which tells replies by their
number. Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from mcp import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp_types import PaginatedRequestParams

from experiments.exp_7_16_aworld.desk import PASSING, PATIENCE, Conditions, Patience, Reply, cut

ROOT = Path(__file__).resolve().parents[2]
LOST = "error: the server did not answer"
DOWN = "error: the server is down"
MOST_TOOLS, MOST_PAGES, MOST_BLOCKS = 200, 20, 64
# The SDK does not say which process it started. A shell that writes its number and becomes the server does; the SDK starts
# it at the head of a process group of its own.
NUMBERED = 'echo $$ > "$0"; exec "$@"'


class ServerFault(RuntimeError):
    """A server cannot be used; the message names it and says why."""


@dataclass
class Life:
    """One run of a server's process: its session, and the events that begin and end it."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    session: ClientSession | None = None
    task: asyncio.Task | None = None


class Keeper:
    """One server. ``starts``: processes started; ``lost``: calls without an answer; ``tools``: what it lists, by name."""

    def __init__(self, name: str, command: StdioServerParameters, patience: Patience, errors: IO[str]) -> None:
        self.name, self.command, self.patience, self.errors = name, command, patience, errors
        self.starts = self.lost = self.failures = 0
        self.tools: dict[str, Any] = {}
        self.life: Life | None = None
        self.lives: list[Life] = []
        self.not_before = 0.0
        self.starting = asyncio.Lock()

    async def call(self, tool: str, arguments: Mapping[str, Any], meta: Mapping[str, Any]) -> Reply:
        """The server's answer; a lost one leaves a server behind that was found alive, or is started anew."""
        try:
            life = await self.alive()
        except ServerFault:
            self.lost += 1
            return Reply(DOWN, failed=True, lost=True)
        assert life.session is not None
        try:
            async with asyncio.timeout(2 * self.patience.call_s):  # the SDK's own limit comes first
                result = await life.session.call_tool(
                    tool, dict(arguments), read_timeout_seconds=self.patience.call_s, meta=dict(meta)
                )
        except Exception as error:  # the SDK passes on what the other side's text made of its parsers
            print(f"{self.name}.{tool}: {type(error).__name__}: {error}"[:500], file=self.errors, flush=True)
            self.lost += 1
            if not await self.check(life):
                self.retire(life)
            return Reply(LOST, failed=True, lost=True)
        texts = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content[:MOST_BLOCKS]]
        if len(result.content) > MOST_BLOCKS:
            texts.append(f"[{len(result.content)} parts]")
        passing = bool((result.meta or {}).get(PASSING))
        return Reply(cut(" ".join(texts)), failed=bool(result.is_error), passing=passing)

    async def alive(self) -> Life:
        """The life at work, begun if there is none. ServerFault where that fails, or failed a short while ago."""
        async with self.starting:
            if self.life is not None and self.life.task is not None and not self.life.task.done():
                return self.life
            if time.monotonic() < self.not_before:
                raise ServerFault(f"{self.name} failed to start a moment ago")
            life, ready = Life(), asyncio.get_running_loop().create_future()
            self.lives = [*(life for life in self.lives if life.task and not life.task.done()), life]
            life.task = asyncio.create_task(self.live(life, ready))
            self.starts += 1
            try:
                await ready
            except ServerFault:
                self.failures += 1
                self.not_before = time.monotonic() + min(60.0, self.patience.pause_s * 2 ** (self.failures - 1))
                raise
            self.failures, self.life = 0, life
            return life

    async def live(self, life: Life, ready: asyncio.Future) -> None:
        """The server's process from its start to its end; `ready` gets its list of tools, or the fault."""
        command, number = numbered(self.command)
        try:
            async with stdio_client(command, errlog=self.errors) as streams, ClientSession(*streams) as session:
                async with asyncio.timeout(self.patience.start_s):
                    await session.initialize()
                    self.tools = await listed(self.name, session)
                life.session = session
                ready.set_result(None)
                await life.stop.wait()
        except Exception as error:  # any fault of a foreign program ends its own life alone
            cause = first(error)
            if not ready.done():
                known = isinstance(cause, ServerFault)
                text = str(cause) if known else f"{self.name} does not start: {type(cause).__name__} {cause}"
                ready.set_exception(ServerFault(text))
            print(f"{self.name}: {type(cause).__name__}: {cause}"[:500], file=self.errors, flush=True)
        finally:
            end_group(number)
            if not ready.done():
                ready.set_exception(ServerFault(f"{self.name} was stopped while it started"))

    async def check(self, life: Life | None = None) -> bool:
        """Whether the server answers a ping in time."""
        life = life or self.life
        if life is None or life.session is None or life.task is None or life.task.done():
            return False
        try:
            async with asyncio.timeout(self.patience.ping_s):
                await life.session.send_ping()
        except Exception:  # time limit, closed streams of several kinds, an answer that is none
            return False
        return True

    def retire(self, life: Life) -> None:
        """Ends a life in the background; the next call begins another."""
        if self.life is life:
            self.life = None
        life.stop.set()
        if life.session is None and life.task is not None:  # still at its handshake
            life.task.cancel()

    async def restart(self) -> None:
        """Ends the life at work, if any, and begins another. ServerFault where that fails."""
        await self.stop()
        await self.alive()

    async def stop(self) -> None:
        """Ends every life and waits until its process is gone."""
        for life in self.lives:
            self.retire(life)
        await asyncio.gather(*(life.task for life in self.lives if life.task), return_exceptions=True)
        self.lives.clear()


def first(error: BaseException) -> BaseException:
    """The first of the errors that a group holds, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def numbered(command: StdioServerParameters) -> tuple[StdioServerParameters, Path]:
    """The command so that it writes its process number to a file, and that file, still empty."""
    handle, name = tempfile.mkstemp(prefix="server-")
    os.close(handle)
    words = ["-c", NUMBERED, name, command.command, *command.args]
    return command.model_copy(update={"command": "/bin/sh", "args": words}), Path(name)


def end_group(number: Path) -> None:
    """Kills what a server that has ended left running in its process group; removes the file."""
    written = number.read_text(encoding="utf-8").strip()
    number.unlink()
    if written.isdigit():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(int(written), signal.SIGKILL)


async def listed(name: str, session: ClientSession) -> dict[str, Any]:
    """The tools that a server lists. ServerFault for a name listed twice, and for lists without end."""
    tools: dict[str, Any] = {}
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
        for tool in page.tools:
            if tool.name in tools:
                raise ServerFault(f"{name} lists the tool {tool.name!r} twice")
            tools[tool.name] = tool
        if len(tools) > MOST_TOOLS:
            raise ServerFault(f"{name} lists more than {MOST_TOOLS} tools")
        cursor = page.next_cursor
        if not cursor:
            return tools
    raise ServerFault(f"{name} lists its tools on more than {MOST_PAGES} pages")


class Supervisor:
    """All servers by name. Tools are called by server and name, so equal names of two servers stay apart."""

    def __init__(
        self, commands: Mapping[str, StdioServerParameters], patience: Patience = PATIENCE, errors: IO[str] = sys.stderr
    ) -> None:
        self.keepers = {name: Keeper(name, command, patience, errors) for name, command in commands.items()}

    async def call(self, server: str, tool: str, arguments: Mapping[str, Any], meta: Mapping[str, Any]) -> Reply:
        """The answer of a server's tool."""
        keeper = self.keepers.get(server)
        return Reply("error: no such server", failed=True) if keeper is None else await keeper.call(tool, arguments, meta)

    async def start(self, names: Sequence[str] = ()) -> None:
        """Starts servers (none named: all), side by side. ServerFault for the first that does not start."""
        await asyncio.gather(*(self.keepers[name].alive() for name in names or self.keepers))

    async def health(self) -> dict[str, bool]:
        """Server -> whether it answers; one that was never started does not."""
        names = list(self.keepers)
        return dict(zip(names, await asyncio.gather(*(self.keepers[name].check() for name in names)), strict=True))

    async def stop(self) -> None:
        """Stops all servers and waits for their processes."""
        await asyncio.gather(*(keeper.stop() for keeper in self.keepers.values()))

    @property
    def lost(self) -> int:
        """Calls that no server answered."""
        return sum(keeper.lost for keeper in self.keepers.values())

    @property
    def restarts(self) -> int:
        """Starts beyond the first of each server."""
        return sum(max(0, keeper.starts - 1) for keeper in self.keepers.values())


def own_command(server: str, worlds: Path, conditions: Conditions) -> StdioServerParameters:
    """The line that serves one of our servers over these worlds."""
    words = ["-m", "experiments.exp_7_16_aworld.serve", server, "--worlds", str(Path(worlds).resolve())]
    words += ["--conditions", json.dumps(vars(conditions))]
    return StdioServerParameters(command=sys.executable, args=words, cwd=ROOT)
