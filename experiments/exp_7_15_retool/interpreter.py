"""The Python interpreter that answers code blocks: common.sandbox, and what it says as one short line of text.

    with Interpreter(InterpreterConfig()) as run:
        run("print(6*7)")  # Reply("42", "ok", False)

A program sees nothing of earlier ones and has no clock and no randomness of its own, so equal programs have equal replies and
run once: `executions` counts those that ran, `calls` all that were asked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from common.sandbox import Limits, Program, Result, Sandbox, SandboxError
from common.schema import within
from experiments.exp_7_15_retool.programs import NOTHING, shown

KEPT = 20_000  # replies kept; beyond that the oldest are dropped
STATUS = {"timeout": "TimeoutError", "memory": "MemoryError", "processes": "BlockingIOError", "disk": "OSError",
          "output": "OSError", "killed": "ChildProcessError"}  # fmt: skip
_ERROR = re.compile(r"([A-Za-z_][A-Za-z_0-9.]*)(?::.*)?")


@dataclass(frozen=True)
class InterpreterConfig:
    """Limits of one program. ``cpu_s``: so far above what a program needs that the machine's load never decides.

    ``reply_chars``: longest reply. ``messages``: an error is shown with its message; else by its name alone, which is all
    that a tiny model can read. ``allow_weak``: run where the machine cannot isolate programs (docs/sandbox.md).
    """

    cpu_s: float = 0.1
    wall_s: float = 10.0
    memory_mb: int = 256
    reply_chars: int = 24
    messages: bool = False
    allow_weak: bool = False

    def __post_init__(self) -> None:
        within("interpreter.reply_chars", self.reply_chars, 8)
        self.limits()

    def limits(self) -> Limits:
        """The sandbox's limits; a program here has no business with processes or files."""
        return Limits(
            wall_s=self.wall_s, cpu_s=self.cpu_s, memory_mb=self.memory_mb, processes=4, file_size_mb=1, folder_mb=2,
            files=32, output_bytes=4096,
        )  # fmt: skip


class Reply(NamedTuple):
    """What stands between <interpreter> and </interpreter>. ``status``: the sandbox's. ``failed``: anything but ok."""

    text: str
    status: str
    failed: bool


class Interpreter:
    """A sandbox of one worker: episodes ask one after the other. A context manager; SandboxError as `Sandbox` raises it."""

    def __init__(self, config: InterpreterConfig) -> None:
        self.config = config
        self.box = Sandbox(config.limits(), workers=1, allow_weak=config.allow_weak)
        self.replies: dict[str, Reply] = {}
        self.calls = self.executions = 0

    @property
    def strong(self) -> bool:
        """Whether programs are isolated from this machine, not only limited."""
        return self.box.strong

    def __call__(self, code: str) -> Reply:
        """Runs a program. SandboxError where the sandbox itself failed: that is no fault of the program's author."""
        self.calls += 1
        known = self.replies.get(code)
        if known is not None:
            return known
        self.executions += 1
        result = self.box.run([Program(code)])[0]
        if result.status == "lost":
            raise SandboxError(f"the sandbox lost a program twice: {result.reason}")
        if len(self.replies) >= KEPT:
            self.replies.pop(next(iter(self.replies)))
        reply = self.replies[code] = Reply(reply_text(result, self.config), result.status, not result.ok)
        return reply

    def close(self) -> None:
        """Ends the worker."""
        self.box.close()

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reply_text(result: Result, config: InterpreterConfig) -> str:
    """One line: what was printed, or the error that ended the program. Never a tag: `<` is shown as `(`."""
    if result.ok:
        text = result.stdout.strip() or NOTHING
    else:
        lines = result.stderr.strip().splitlines()
        last = lines[-1].strip() if lines else ""
        named = _ERROR.fullmatch(last)
        text = STATUS.get(result.status) or (last if config.messages and last else named[1] if named else "Error")
    plain = "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)
    return shown(plain.replace("<", "(").replace("\n", " "), config.reply_chars)
