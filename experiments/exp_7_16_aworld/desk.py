"""What every server does around its tools: conditions that can be set, checked arguments, the episode's own folder.

Which world and which episode a call belongs to stands in the request's `_meta`; a client that sends none works in the first
world, in an episode of its own. Failures and latencies are drawn from what the call says, never from a clock, so the same
episode meets the same ones whenever it is played.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from common.schema import within
from experiments.exp_7_16_aworld.tool import Place, Server, ToolError

WORLD, EPISODE, DRAW = "aworld/world", "aworld/episode", "aworld/draw"
PASSING = "aworld/passing"  # in a result's _meta: the failure may pass
UNAVAILABLE = "error: not available, try again"
QUOTA = "error: quota used up"
LONGEST = 20_000  # characters of an answer; more is cut in its middle
MOST_SESSIONS = 4096  # episodes whose counts are kept


@dataclass(frozen=True)
class Conditions:
    """``latency_s``: mean seconds of a call, drawn between half and one and a half of it. ``failure_rate``: share of calls
    that a passing failure meets. ``quota``: calls of one tool in an episode; 0 sets no limit."""

    latency_s: float = 0.0
    failure_rate: float = 0.0
    quota: int = 0

    def __post_init__(self) -> None:
        within("conditions.latency_s", self.latency_s, 0, 60)
        within("conditions.failure_rate", self.failure_rate, 0, 0.9)
        within("conditions.quota", self.quota, 0)


@dataclass(frozen=True)
class Patience:
    """Seconds: for a start with its handshake, for a call, for a sign of life after a lost call, and from the first failed
    start to the next one (doubled with each further failure, up to a minute)."""

    start_s: float = 30.0
    call_s: float = 20.0
    ping_s: float = 5.0
    pause_s: float = 1.0

    def __post_init__(self) -> None:
        for key in ("start_s", "call_s", "ping_s"):
            within(f"patience.{key}", getattr(self, key), 0, above=True)
        within("patience.pause_s", self.pause_s, 0)


PATIENCE = Patience()


@dataclass(frozen=True)
class Reply:
    """``text``: what the caller reads. ``failed``: the tool could not do it. ``passing``: for a reason that may pass.

    ``lost``: no server answered: it crashed, broke the protocol or took too long.
    """

    text: str
    failed: bool = False
    passing: bool = False
    lost: bool = False


@dataclass
class Session:
    """Calls of an episode so far: by tool, and by tool and arguments."""

    tools: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)


def uniform(*parts: Any) -> float:
    """A number in [0, 1) that the parts alone decide."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "little") / 2**56


def cut(text: str, longest: int = LONGEST) -> str:
    """The text, or its head and tail around a note of its true length."""
    if len(text) <= longest:
        return text
    note = f" ... [{len(text)} characters] ... "
    half = max(0, longest - len(note)) // 2
    return text[:half] + note + text[len(text) - half :]


class Desk:
    """One server's tools over the worlds of a folder."""

    def __init__(self, server: Server, root: Path, conditions: Conditions, first_world: int = 0) -> None:
        self.server, self.root, self.conditions, self.first_world = server, root, conditions, first_world
        self.sessions: OrderedDict[str, Session] = OrderedDict()

    async def call(self, name: str, arguments: Mapping[str, Any], meta: Mapping[str, Any]) -> Reply:
        """The answer to a call; whatever is wrong with it is an answer, too."""
        tool = self.server.tools.get(name)
        if tool is None:
            return Reply("error: no such tool", failed=True)
        episode = str(meta.get(EPISODE, "guest"))
        if not episode.replace("-", "").isalnum() or len(episode) > 80:
            return Reply("error: bad episode", failed=True)
        world, draw, arguments = meta.get(WORLD, self.first_world), meta.get(DRAW, 0), dict(arguments)
        fault = tool.fault(arguments)
        if fault:
            return Reply(f"error: {fault}", failed=True)
        session, written = self.session(episode), f"{name} {json.dumps(arguments, sort_keys=True)}"
        session.tools[name] += 1
        session.calls[written] += 1
        drawn = (world, draw, self.server.name, written, session.calls[written])
        if self.conditions.latency_s:
            await asyncio.sleep(self.conditions.latency_s * (0.5 + uniform("latency", *drawn)))
        if self.conditions.quota and session.tools[name] > self.conditions.quota:
            return Reply(QUOTA, failed=True)
        if uniform("failure", *drawn) < self.conditions.failure_rate:
            return Reply(UNAVAILABLE, failed=True, passing=True)
        folder = self.root / f"w{world}"
        if not isinstance(world, int) or not folder.is_dir():
            return Reply("error: no such world", failed=True)
        try:
            return Reply(cut(tool.run(Place(folder, own_folder(self.root, episode)), **arguments)))
        except ToolError as error:
            return Reply(cut(f"error: {error}"), failed=True)
        except Exception as error:  # a fault of ours must not take the other episodes' server down
            print(f"{self.server.name}.{written}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            return Reply("error: the tool broke", failed=True)

    def session(self, episode: str) -> Session:
        """The counts of an episode; the oldest episode's are dropped at the limit."""
        found = self.sessions.setdefault(episode, Session())
        self.sessions.move_to_end(episode)
        if len(self.sessions) > MOST_SESSIONS:
            self.sessions.popitem(last=False)
        return found


def own_folder(root: Path, episode: str) -> Path:
    """Where an episode's files lie."""
    return root / "episodes" / episode


def forget(root: Path, episode: str) -> None:
    """Removes an episode's files, if it has any."""
    shutil.rmtree(own_folder(root, episode), ignore_errors=True)


def conditions_of(values: Mapping[str, Mapping[str, Any]], server: str) -> Conditions:
    """The conditions of a server: those under its own name over those under `all`."""
    known = {item.name for item in fields(Conditions)}
    merged = {**values.get("all", {}), **values.get(server, {})}
    for key in merged:
        if key not in known:
            raise ValueError(f"conditions.{server}.{key}: allowed are {', '.join(sorted(known))}")
    return Conditions(**merged)
