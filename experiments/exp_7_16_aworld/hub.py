"""Where an episode's calls go: to tools in this process, to servers of the protocol, to a store that replays them.

All hubs answer `call(call, context)`. A thread of its own runs the event loop of a hub, so that a training loop that knows
nothing of asyncio can wait for one call, or for those of many episodes at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from common.files import json_line, locked, read_json_lines, strict_json
from experiments.exp_7_16_aworld.desk import DRAW, EPISODE, PATIENCE, WORLD, Desk, Patience, Reply, conditions_of
from experiments.exp_7_16_aworld.questions import Call
from experiments.exp_7_16_aworld.servers import SERVERS

Result = TypeVar("Result")
ConditionTable = Mapping[str, Mapping[str, Any]]


@dataclass
class Context:
    """Whose call it is. ``draw`` decides failures and latencies; ``past`` hashes the episode's calls so far."""

    world: int
    digest: str
    episode: str
    draw: int
    past: str = ""

    @property
    def meta(self) -> dict[str, Any]:
        return {WORLD: self.world, EPISODE: self.episode, DRAW: self.draw}

    def key(self, call: Call) -> str:
        """Hash of the world, of the draw, of the episode's earlier calls and of this one: what an answer depends on."""
        content = [self.digest, self.draw, self.past, call.tool, call.arguments]
        return hashlib.sha256(strict_json(content, sort_keys=True).encode()).hexdigest()


class Hub(Protocol):
    async def call(self, call: Call, context: Context) -> Reply: ...

    async def close(self) -> None: ...


class LocalHub:
    """The tools in this process, without any protocol: for scripts and tests."""

    def __init__(self, root: Path, conditions: ConditionTable | None = None) -> None:
        self.desks = {name: Desk(server, root, conditions_of(conditions or {}, name)) for name, server in SERVERS.items()}

    async def call(self, call: Call, context: Context) -> Reply:
        server, _, tool = call.tool.partition(".")
        return await self.desks[server].call(tool, call.arguments, context.meta)

    async def close(self) -> None:
        pass


class ServerHub:
    """The servers of the protocol, each a process, kept by a supervisor."""

    def __init__(
        self, root: Path, conditions: ConditionTable | None = None, patience: Patience = PATIENCE, errors: Path | None = None
    ) -> None:
        from experiments.exp_7_16_aworld.supervisor import Supervisor, own_command  # a second of imports: only for servers

        self.errors: IO[str] = open(errors or "/dev/null", "a", encoding="utf-8")  # noqa: SIM115 - open as long as the servers
        commands = {name: own_command(name, root, conditions_of(conditions or {}, name)) for name in SERVERS}
        self.supervisor = Supervisor(commands, patience, self.errors)

    async def call(self, call: Call, context: Context) -> Reply:
        server, _, tool = call.tool.partition(".")
        return await self.supervisor.call(server, tool, call.arguments, context.meta)

    async def close(self) -> None:
        await self.supervisor.stop()
        self.errors.close()


class ReplayMiss(RuntimeError):
    """The store has no answer to a call."""


class Store:
    """Answers by content hash, one line of a file each; every line carries the hash of its own answer."""

    def __init__(self, path: Path) -> None:
        self.path, self.replies = path, dict[str, Reply]()
        for row in read_json_lines(path):
            reply = Reply(**row["reply"])
            if row["check"] != self.check(reply):
                raise ValueError(f"{path}: the answer with key {row['key'][:12]} is not the one that was recorded")
            self.replies[row["key"]] = reply

    @staticmethod
    def check(reply: Reply) -> str:
        return hashlib.sha256(strict_json(asdict(reply), sort_keys=True).encode()).hexdigest()[:16]

    def put(self, key: str, reply: Reply) -> None:
        """Keeps an answer; the first one to a key stays."""
        if key in self.replies:
            return
        self.replies[key] = reply
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path.with_name(f".{self.path.name}.lock")), open(self.path, "ab") as file:
            file.write(json_line({"key": key, "reply": asdict(reply), "check": self.check(reply)}).encode())


class RecordingHub:
    """Keeps what another hub answers. Lost calls are no answer of the world and are not kept."""

    def __init__(self, inner: Hub, store: Store) -> None:
        self.inner, self.store = inner, store

    async def call(self, call: Call, context: Context) -> Reply:
        reply = await self.inner.call(call, context)
        if not reply.lost:
            self.store.put(context.key(call), reply)
        return reply

    async def close(self) -> None:
        await self.inner.close()


class ReplayHub:
    """Answers from a store alone; no server runs. ReplayMiss for a call that was never recorded."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def call(self, call: Call, context: Context) -> Reply:
        reply = self.store.replies.get(context.key(call))
        if reply is None:
            raise ReplayMiss(f"{self.store.path} has no answer to {call.tool} {call.arguments} here: record this run first")
        return reply

    async def close(self) -> None:
        pass


class Bridge:
    """A hub whose event loop runs in a thread; a context manager that closes both."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine that runs on the hub's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        """Closes the hub, then its loop and thread. A second call does nothing."""
        if self.loop.is_closed():
            return
        try:
            self.wait(self.hub.close())
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()

    def __enter__(self) -> Bridge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
