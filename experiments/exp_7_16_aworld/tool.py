"""Tools as plain functions: a server is a short module of them, whoever serves it and however.

    search = Server("search", "Finds pages of the local site.")

    @search.tool(cost=1)
    def find(place: Place, words: str) -> str:
        \"\"\"Pages that hold all the words.\"\"\"

The first parameter is the place that the tool works in; the others, str or int, are what the caller gives. What a tool
returns is its answer; ToolError is an answer, too, and says what went wrong. Nothing here knows of a protocol.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

KINDS = {"str": "string", "int": "integer"}
LARGEST_FILE = 1_000_000  # bytes that a tool writes
MOST_FILES = 64  # files of an episode


class ToolError(Exception):
    """The call cannot be done; the message is what the caller reads."""


@dataclass(frozen=True)
class Place:
    """Where a tool works: the world's folder, read only, and the episode's own, which hides files of the same name."""

    world: Path
    own: Path

    def path(self, name: str) -> Path:
        """The file of that name. ToolError where there is none, or the name leads elsewhere."""
        pure = PurePosixPath(name)
        if not name or "\0" in name or pure.is_absolute() or ".." in pure.parts or len(name) > 200:
            raise ToolError("no such file")
        found = next((folder / name for folder in (self.own, self.world) if (folder / name).is_file()), None)
        if found is None:
            raise ToolError("no such file")
        return found

    def names(self, folder: str = ".") -> list[str]:
        """Names of the files in a folder, world's and own, sorted."""
        roots = [root / folder for root in (self.world, self.own) if (root / folder).is_dir()]
        return sorted({entry.name for root in roots for entry in root.iterdir() if entry.is_file() and entry.name[0] != "."})

    def write(self, name: str, data: bytes) -> None:
        """Keeps a file for the rest of the episode. ToolError for a bad name and at the limits."""
        if not name.replace(".", "").replace("_", "").replace("-", "").isalnum() or name[0] == "." or len(name) > 60:
            raise ToolError("bad file name")
        if len(data) > LARGEST_FILE or (len(self.names()) >= MOST_FILES and not (self.own / name).exists()):
            raise ToolError("no room")
        self.own.mkdir(parents=True, exist_ok=True)
        (self.own / name).write_bytes(data)

    def state(self, name: str) -> Path:
        """A hidden file in which a tool keeps what it must remember during the episode; its folder is made."""
        self.own.mkdir(parents=True, exist_ok=True)
        return self.own / f".{name}.json"


@dataclass(frozen=True)
class Tool:
    """``params``: (name, kind) in order. ``cost``: units of the budget. ``needs``: tool that must have answered before, in
    this episode. ``excludes``: tools that must not have. Both are full names, ``server.tool``."""

    server: str
    name: str
    run: Callable[..., str]
    params: tuple[tuple[str, str], ...]
    text: str
    cost: int = 1
    needs: str = ""
    excludes: tuple[str, ...] = ()

    @property
    def full(self) -> str:
        return f"{self.server}.{self.name}"

    @property
    def description(self) -> str:
        """The text with its constraints, as a client reads it."""
        parts = [self.text, f"Cost {self.cost}."]
        parts += [f"Needs {self.needs} first."] if self.needs else []
        parts += [f"Never after {' or '.join(self.excludes)}."] if self.excludes else []
        return " ".join(parts)

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        properties = {name: {"type": KINDS[kind]} for name, kind in self.params}
        return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}

    def fault(self, arguments: dict[str, Any]) -> str:
        """What is wrong with the arguments, or nothing."""
        names = [name for name, _ in self.params]
        if sorted(arguments) != sorted(names):
            return f"wrong arguments, takes {', '.join(names) or 'none'}"
        for name, kind in self.params:
            if type(arguments[name]).__name__ != kind:
                return f"{name} must be {KINDS[kind]}"
        return ""


@dataclass
class Server:
    """Named tools that one process serves."""

    name: str
    text: str
    tools: dict[str, Tool] = field(default_factory=dict)

    def tool(self, cost: int = 1, needs: str = "", excludes: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
        """Registers a function; its name, parameters and docstring become the tool's."""

        def register(function: Callable[..., str]) -> Callable[..., str]:
            params = list(inspect.signature(function).parameters.values())[1:]
            kinds = tuple((param.name, str(param.annotation)) for param in params)
            text = " ".join((function.__doc__ or "").split())
            name = function.__name__.rstrip("_")
            self.tools[name] = Tool(self.name, name, function, kinds, text, cost, needs, excludes)
            return function

        return register
