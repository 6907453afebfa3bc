"""A shell and Python, in the sandbox: neither the world's files nor this machine can be harmed (docs/sandbox.md)."""

from __future__ import annotations

import atexit
import functools

from common import sandbox
from experiments.exp_7_16_aworld.tool import Place, Server, ToolError

shell = Server("shell", "Runs commands and Python beside copies of the text files.")
LIMITS = sandbox.Limits(wall_s=5.0, cpu_s=5.0, memory_mb=256, processes=16, folder_mb=8, files=128)
TEXTS = (".csv", ".txt")


@functools.cache
def box() -> sandbox.Sandbox:
    """The pool of this process. ToolError where this machine cannot isolate programs."""
    try:
        made = sandbox.Sandbox(LIMITS, workers=1)
    except sandbox.SandboxError as error:
        raise ToolError("no sandbox on this machine") from error
    atexit.register(made.close)
    return made


def texts(place: Place) -> dict[str, bytes]:
    """The text files that a program finds."""
    return {name: place.path(name).read_bytes() for name in place.names() if name.endswith(TEXTS)}


def told(result: sandbox.Result) -> str:
    """What a program printed. ToolError where it failed, with its last word."""
    if result.ok:
        return result.stdout.strip() or "nothing printed"
    said = result.stderr.strip().splitlines()
    raise ToolError(said[-1] if said and result.status == "error" else result.reason)


@shell.tool(cost=4, excludes=("shell.run",))
def python(place: Place, code: str) -> str:
    """What a Python program prints."""
    return told(box().run([sandbox.Program(code, files=texts(place))])[0])


@shell.tool(cost=4, excludes=("shell.python",))
def run(place: Place, command: str) -> str:
    """What a shell command prints. It works on copies: what it writes is gone afterwards."""
    with box().episode(texts(place)) as folder:
        return told(folder.shell(command))


@shell.tool()
def files(place: Place) -> str:
    """Names of the files."""
    return "; ".join(place.names())


@shell.tool(cost=3)
def read(place: Place, file: str) -> str:
    """A text file."""
    if not file.endswith(TEXTS):
        raise ToolError("not a text file")
    return "; ".join(place.path(file).read_text(encoding="utf-8").splitlines())


@shell.tool()
def write(place: Place, file: str, text: str) -> str:
    """Writes a text file."""
    if not file.endswith(TEXTS):
        raise ToolError("not a text file")
    place.write(file, text.encode())
    return "written"
