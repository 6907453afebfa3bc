"""What a sandboxed process does once it is shut in: run Python source, call a function, run a shell command, move files.

The process was forked from a warm interpreter. It holds nothing of the suite, of earlier programs or of what is expected.
"""

import atexit
import base64
import contextlib
import errno
import io
import json
import linecache
import os
import signal
import sys
import threading
import traceback
import types
from typing import Any

MEMORY, DISK, PROCESSES = 250, 251, 252
"""Exit codes by which an uncaught MemoryError, a full or too large file, and a refused fork are told apart."""
ANSWERS = 3
"""The descriptor of the answers of `Call` and of the episode's file operations; no other program has it."""
_NAME = "program.py"
_CAUSES = {errno.EFBIG: DISK, errno.ENOSPC: DISK, errno.EDQUOT: DISK, errno.EAGAIN: PROCESSES}


def run(payload: dict[str, Any], shell: str) -> None:
    """Do what the payload says and end this process; never returns."""
    fresh_streams()
    failed = guarded(lambda: place_files(payload["files"]))
    if failed:
        finish(failed)
    kind = payload["kind"]
    if kind == "shell":
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execve(shell, ["sh", "-c", payload["code"]], dict(os.environ))
    if kind == "python":
        finish(guarded(lambda: execute(payload["code"], "__main__")))
    if kind == "call":
        finish(guarded(lambda: answer_cases(payload["code"], payload["function"], payload["cases"])))
    finish(move_files(kind, payload["code"]))


def fresh_streams() -> None:
    """sys.stdin, stdout and stderr over this process's own descriptors: UTF-8; what UTF-8 cannot say as \\udcXX text."""
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = open(descriptor, "wb", closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.__stdin__ = sys.stdin  # type: ignore[misc]


def place_files(files: list[tuple[str, str | None, str | None]]) -> None:
    """Write [path, text or None, base64 or None] into the working folder, not through a link that leads out of it."""
    for path, text, encoded in files:
        inside(path)
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        content = text.encode("utf-8", "backslashreplace") if text is not None else base64.b64decode(encoded or "")
        with open(path, "wb") as file:
            file.write(content)


def inside(path: str) -> None:
    """PermissionError where a link leads out of the working folder."""
    folder = os.path.realpath(".")
    if os.path.commonpath([folder, os.path.realpath(path)]) != folder:
        raise PermissionError(errno.EPERM, "leads out of the working folder", path)


def move_files(kind: str, path: str) -> int:
    """read, list or write for an episode; the content or the listing goes to the answers, an error to stderr."""
    try:
        inside(path)
        if kind == "read":
            with open(path, "rb") as file, open(ANSWERS, "wb") as answers:
                while chunk := file.read(65536):
                    answers.write(chunk)
        if kind == "list":
            names = [name + "/" * os.path.isdir(os.path.join(path, name)) for name in sorted(os.listdir(path))]
            with open(ANSWERS, "w", encoding="ascii") as answers_text:
                json.dump(names, answers_text)
    except OSError as error:
        print(f"{error.strerror}: {path}", file=sys.stderr)
        return _CAUSES.get(error.errno or 0, 1)
    return 0


def execute(code: str, name: str) -> dict[str, Any]:
    """Run source as a module of this name; returns its names."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    module.__dict__["__file__"] = _NAME
    sys.argv, sys.path[:0] = [_NAME], [""]
    linecache.cache[_NAME] = (len(code), None, code.splitlines(keepends=True), _NAME)
    exec(compile(code, _NAME, "exec"), module.__dict__)
    return module.__dict__


def answer_cases(code: str, function: str, cases: list[list[Any]]) -> None:
    """One JSON line per case: [index, "value", value] or [index, "failure", why]; nothing from the code decides more."""
    called = execute(code, "program")[function]
    descriptor = os.dup(ANSWERS)
    for index, case in enumerate(cases):
        try:
            line = json.dumps([index, "value", called(*case)])
        except Exception as error:
            line = json.dumps([index, "failure", f"{type(error).__name__}: {error}"[:500]])
        data = line.encode() + b"\n"
        while data:
            data = data[os.write(descriptor, data) :]


def guarded(work: Any) -> int:
    """The exit code that Python itself would give, except that the causes above have their own."""
    try:
        work()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        with contextlib.suppress(Exception):
            print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        cause = MEMORY if isinstance(error, MemoryError) else 1
        if isinstance(error, OSError):
            cause = _CAUSES.get(error.errno or 0, 1)
        if isinstance(error, RuntimeError) and "start new thread" in str(error):
            cause = PROCESSES
        show(error)
        return cause
    return 0


def show(error: BaseException) -> None:
    """The traceback from the program's first line on, without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    with contextlib.suppress(BaseException):  # no memory left, stderr closed: the exit code still says what happened
        traceback.print_exception(type(error), error, trace)


def finish(code: int) -> None:
    """Wait for threads, run exit handlers and flush as Python does at its end; then end with this exit code."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code)
