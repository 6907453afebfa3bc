"""What goes into the sandbox and what comes out: limits, programs, calls, results."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Any, Literal

from common.schema import ConfigError, within

Status = Literal["ok", "error", "timeout", "memory", "processes", "disk", "output", "killed", "lost"]
OUTPUT_FLOOD = 16  # a program that writes this many times its output limit is ended


class SandboxError(RuntimeError):
    """The sandbox itself cannot do what was asked: no isolation on this machine, closed, a bad file name."""


@dataclass(frozen=True)
class Limits:
    """What one program may use, with all the processes that it starts."""

    wall_s: float = 10.0
    """Seconds from its start to its end."""
    cpu_s: float = 10.0
    """CPU seconds of all its processes together."""
    memory_mb: int = 512
    """MiB of address space of each process, and of resident memory of all together."""
    processes: int = 64
    """Processes and threads at once, the program itself among them."""
    open_files: int = 128
    """Open descriptors of each process."""
    file_size_mb: int = 64
    """MiB of one file."""
    folder_mb: int = 128
    """MiB of the working folder, /tmp and /dev/shm together."""
    files: int = 4096
    """Files and folders in the same three together."""
    output_bytes: int = 65536
    """Bytes kept of stdout and of stderr: the first and the last half."""

    def __post_init__(self) -> None:
        lowest = {"wall_s": 0.01, "cpu_s": 0.01, "memory_mb": 64, "processes": 1, "open_files": 16}
        lowest |= {"file_size_mb": 1, "folder_mb": 1, "files": 16, "output_bytes": 64}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, int if item.type is int else (int, float)):
                raise ConfigError(f"sandbox.{item.name}={value}: must be {'a whole' if item.type is int else 'a'} number.")
            if not math.isfinite(value):
                raise ConfigError(f"sandbox.{item.name}={value}: must be finite.")
            within(f"sandbox.{item.name}", value, lowest[item.name], 2**31)


@dataclass(frozen=True)
class Program:
    """Python source with what it finds: text on stdin (None: at its end at once) and files {relative path: content}.

    `wall_s` and `cpu_s` lower the pool's limits for this program; they never raise them.
    """

    code: str
    stdin: str | None = None
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    wall_s: float | None = None
    cpu_s: float | None = None


@dataclass(frozen=True)
class Call:
    """A function of untrusted code and the arguments of each call to it, as JSON values.

    What is right stays with the caller: `passes` compares outside, so the code under test never sees what is expected
    and there is no verdict in its reach that it could forge.
    """

    code: str
    function: str
    cases: tuple[tuple[Any, ...], ...]
    wall_s: float | None = None
    cpu_s: float | None = None


@dataclass(frozen=True)
class Result:
    """How a program ended. `exit_code` is negative for a signal, None where it was ended from outside."""

    status: Status
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    wall_s: float = 0.0
    cpu_s: float = 0.0
    stdout_cut: bool = False
    stderr_cut: bool = False
    reason: str = ""
    """One sentence for everything but ok, such as "wall time limit of 2 s"."""

    @property
    def ok(self) -> bool:
        """It came to its end with exit code 0. This says nothing about whether an answer is right: see `Call`."""
        return self.status == "ok"


@dataclass(frozen=True)
class Answer:
    """What one case gave: a value (JSON types only), or why there is none."""

    value: Any = None
    failure: str = ""


@dataclass(frozen=True)
class Answers:
    """One answer per case, in order, and how the run as a whole ended."""

    answers: tuple[Answer, ...]
    result: Result


def passes(answer: Answer, expected: Any) -> bool:
    """Whether a case gave `expected`: same type and value throughout, so 1 is not True and "" is not None."""
    return not answer.failure and same(answer.value, expected)


def same(left: Any, right: Any) -> bool:
    """Equality of JSON values with types: bool is not int, int is not float; tuples count as lists."""
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return type(left) is type(right) and bool(left == right)


def file_name(path: str) -> str:
    """`path` if it is a plain relative file name within the working folder. SandboxError otherwise (S09)."""
    pure = PurePosixPath(path)
    if not path or "\0" in path or pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise SandboxError(f"{path!r} is not a file name inside the working folder: relative, without `..`.")
    return path
