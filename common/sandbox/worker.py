"""The parent's side of one worker process: start it, send it a program, read what comes back with a cap, end it."""

import contextlib
import json
import math
import os
import selectors
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.sandbox.data import OUTPUT_FLOOD, Limits, SandboxError

RUNNER = Path(__file__).with_name("runner.py")
START_S, GRACE_S, DRAIN_S = 30.0, 20.0, 0.5
"""Seconds: for a worker to start, for its answer after a program's wall limit, for output that a killed program left."""
_CHUNK = 65536


class WorkerLost(SandboxError):
    """The worker process died or does not answer; the message says what is known."""


class Capture:
    """The first and the last half of a stream up to a cap; the middle of a longer one is counted and dropped."""

    def __init__(self, cap: int) -> None:
        self.half, self.total = cap // 2, 0
        self.head, self.tail = bytearray(), bytearray()

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        room = self.half - len(self.head)
        self.head += data[:room]
        self.tail += data[room:]
        if len(self.tail) > 2 * self.half:
            del self.tail[: -self.half]

    def raw(self) -> bytes:
        """Head and tail joined: the whole stream unless it was cut."""
        return bytes(self.head + self.tail[-self.half :])

    @property
    def cut(self) -> bool:
        return self.total > 2 * self.half

    def text(self) -> str:
        """UTF-8 with U+FFFD for each byte sequence that is none; NUL stays. A cut never leaves half a character."""
        if not self.cut:
            return self.raw().decode("utf-8", "replace")
        head, tail = whole_characters(bytes(self.head), bytes(self.tail[-self.half :]))
        dropped = self.total - len(head) - len(tail)
        return f"{head.decode('utf-8', 'replace')}\n[... {dropped} bytes dropped ...]\n{tail.decode('utf-8', 'replace')}"


def whole_characters(head: bytes, tail: bytes) -> tuple[bytes, bytes]:
    """`head` without a character that its end cuts, `tail` without the rest of one at its start."""
    for back in range(1, min(4, len(head) + 1)):
        byte = head[-back]
        if byte >= 0xC0:  # a lead byte: how many bytes it announces
            if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4):
                head = head[:-back]
            break
        if byte < 0x80:
            break
    start = 0
    while start < min(3, len(tail)) and 0x80 <= tail[start] < 0xC0:
        start += 1
    return head, tail[start:]


@dataclass
class Reply:
    """What the worker reported and what the program wrote."""

    report: dict[str, Any]
    stdout: Capture
    stderr: Capture
    answers: Capture


def environment() -> dict[str, str]:
    """All that a program finds in its environment: nothing of the suite's own."""
    path = os.pathsep.join(dict.fromkeys([str(Path(sys.base_prefix) / "bin"), "/usr/local/bin", "/usr/bin", "/bin"]))
    text = {"PATH": path, "HOME": "/sandbox/work", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "TERM": "dumb"}
    return text | {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def readable_paths() -> list[str]:
    """Folders and files that Python and a shell need; they are all that a program can read beside its own folder."""
    system = ["/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/share/zoneinfo"]
    system += ["/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"]
    prefix = sys.base_prefix
    python = [f"{prefix}/bin", f"{prefix}/lib"] if prefix in ("/usr", "/usr/local") else [prefix]
    stdlib = sysconfig.get_path("stdlib")  # not platstdlib: in a virtual environment that is the environment's own folder
    paths = [path for path in dict.fromkeys([*system, *python, stdlib]) if os.path.exists(path)]
    return [path for path in paths if not any(path.startswith(other + "/") for other in paths)]


class Worker:
    """One worker process. Its methods belong to one thread, whose end the process does not outlive."""

    def __init__(self, limits: Limits, namespaces: bool) -> None:
        self.limits, self.namespaces = limits, namespaces
        self.folder = None if namespaces else tempfile.mkdtemp(prefix="sandbox-")
        config = {"namespaces": namespaces, "limits": asdict(limits), "parent": os.getpid(), "folder": self.folder}
        config["readable"] = readable_paths() if namespaces else []
        python = getattr(sys, "_base_executable", None) or sys.executable
        self.control, theirs = socket.socketpair()
        try:
            self.process = subprocess.Popen(
                [python, "-sSBP", str(RUNNER), json.dumps(config), str(theirs.fileno())],
                env=environment(),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            self.control.close()
            if self.folder is not None:
                os.rmdir(self.folder)
            raise WorkerLost(f"no worker process could be started: {error}") from error
        finally:
            theirs.close()
        self.control.settimeout(START_S)  # of one receive or send
        try:
            self._receive()
        except SandboxError:
            self.close()
            raise

    def run(self, payload: dict[str, Any], stdin: bytes | None, request: dict[str, Any], answers: int) -> Reply:
        """Run one payload (program.py) to its end; `answers` is the cap of its answers' bytes, 0 for none."""
        cap = self.limits.output_bytes
        captures = [Capture(cap), Capture(cap), Capture(answers)]
        with contextlib.ExitStack() as stack:
            content = stack.enter_context(temporary(json.dumps(payload).encode()))
            given = stack.enter_context(temporary(stdin or b""))
            ends = []
            with contextlib.ExitStack() as theirs:
                sent = [content.fileno(), given.fileno()]
                for _ in range(3 if answers else 2):
                    read_end, write_end = os.pipe()
                    stack.callback(os.close, read_end)
                    theirs.callback(os.close, write_end)
                    os.set_blocking(read_end, False)
                    ends.append(read_end)
                    sent.append(write_end)
                try:
                    socket.send_fds(self.control, [json.dumps({"do": "run", **request}).encode() + b"\n"], sent)
                except OSError as error:
                    raise WorkerLost(f"the worker process is gone: {error}") from error
            report = self._follow(ends, captures, request["wall_s"] + GRACE_S, answers)
        return Reply(report, *captures)

    def _follow(self, ends: list[int], captures: list[Capture], patience: float, answers: int) -> dict[str, Any]:
        """Read the program's streams until the worker reports its end, then what is left in them."""
        flood = [OUTPUT_FLOOD * self.limits.output_bytes] * 2 + [answers]
        deadline, killed, report = time.monotonic() + patience, False, None
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ, None)
            for index, end in enumerate(ends):
                selector.register(end, selectors.EVENT_READ, index)
            while selector.get_map():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                for key, _ in selector.select(left):
                    if key.data is None:
                        report, deadline = self._receive(), time.monotonic() + DRAIN_S
                        selector.unregister(self.control)
                        continue
                    data = read_some(key.fd)
                    if data == b"":
                        selector.unregister(key.fd)
                    elif data:
                        captures[key.data].feed(data)
                        if not killed and report is None and captures[key.data].total > flood[key.data]:
                            killed = True
                            self._send({"do": "kill"})
        if report is None:
            raise WorkerLost("the worker process did not answer in time")
        return report

    def episode(self, action: str, name: str) -> None:
        """Make ("open") or remove ("close") the folder of an episode."""
        self._send({"do": action, "episode": name})
        self._receive()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self.control.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise WorkerLost(f"the worker process is gone: {error}") from error

    def _receive(self) -> dict[str, Any]:
        """The next message. WorkerLost where none comes; SandboxError where the worker says why it cannot."""
        data = b""
        while not data.endswith(b"\n"):
            try:
                part = self.control.recv(_CHUNK)
            except OSError as error:
                raise WorkerLost(f"no answer from the worker process: {error}") from error
            if not part:
                raise WorkerLost("the worker process died")
            data += part
        message: dict[str, Any] = json.loads(data)
        if "failed" in message:
            raise SandboxError(message["failed"])
        return message

    def cancel(self) -> None:
        """From any thread: whatever runs ends, and the thread that waits for it sees the worker lost."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the process and all below it; nothing of it is left afterwards."""
        self.control.close()
        try:
            self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.folder is not None:
            with contextlib.suppress(RecursionError):  # the worker has removed what programs left, unless it was killed
                shutil.rmtree(self.folder, ignore_errors=True)


def temporary(content: bytes) -> Any:
    """An open file with this content and no name."""
    if hasattr(os, "memfd_create"):
        file: Any = os.fdopen(os.memfd_create("sandbox"), "w+b", buffering=0)
    else:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]
    file.seek(0)
    return file


def read_some(descriptor: int) -> bytes | None:
    """What can be read now: b"" at the end, None if there is nothing yet."""
    try:
        return os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return None


def whole_seconds(limit: float, own: float | None) -> float:
    """The smaller of the pool's limit and the caller's own; the caller's never raises it (S13)."""
    return limit if own is None or not math.isfinite(own) else max(0.01, min(limit, own))
