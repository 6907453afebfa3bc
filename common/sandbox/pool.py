"""The sandbox as the suite uses it: a pool of workers, programs in, results out, in order.

    with Sandbox(Limits(wall_s=5.0), workers=2) as box:
        for result in box.run([Program("print(6 * 7)"), Program("while True: pass")]):
            print(result.status, result.stdout)

Each worker has a thread of this process. It starts the worker, hands it one program at a time, reads its output and starts
it anew when it dies. Methods may be called from many threads at once.
"""

import base64
import contextlib
import functools
import itertools
import json
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from common.sandbox import worker as process
from common.sandbox.data import Answer, Answers, Call, Limits, Program, Result, SandboxError, Status, file_name
from common.sandbox.program import DISK, MEMORY, PROCESSES
from common.sandbox.worker import Reply, Worker, WorkerLost, whole_seconds
from common.schema import within

WEAK = (
    "nothing but resource limits hold: programs can read and write this user's files, reach the network and the memory of "
    "this user's processes, and send them signals; the number of processes and the size of the working folder are not limited, "
    "memory and CPU time only of each process by itself; on macOS memory is not limited and a process that leaves its session "
    "outlives its program"
)


@dataclass(frozen=True)
class Isolation:
    """What this machine can do: `strong` means namespaces, a root of its own, no network, seccomp; `why` says why not."""

    strong: bool
    why: str = ""

    def lines(self) -> list[str]:
        """Plain sentences for `make doctor`."""
        if self.strong:
            first = "namespaces: own root, users, processes, mounts, network and ipc; seccomp filter; resource limits"
            return [
                first,
                "not isolated: the kernel itself, and what Python's own folder, /usr/bin and /usr/lib hold can be read",
            ]
        return [f"NOT ISOLATED: {self.why}", WEAK, "experiments that run code refuse to start without allow_weak=True"]


@dataclass
class _Job:
    """Work for the thread of a worker; pinned to one where an episode lives there."""

    work: Callable[[Worker], Any]
    future: Future
    slot: int | None = None
    generation: int | None = None


@functools.cache
def isolation() -> Isolation:
    """Start one worker and run a program in it, to see what this machine allows; asked once per process."""
    if sys.platform != "linux":
        return Isolation(False, f"{sys.platform} has no namespaces")
    try:
        worker = Worker(Limits(), True)
    except SandboxError as error:
        return Isolation(False, str(error))
    try:
        reply = worker.run(_payload("python", "print(6 * 7)", {}), None, {"wall_s": 10, "cpu_s": 10, "episode": None}, 0)
        good = reply.stdout.raw() == b"42\n"
        return Isolation(good, "" if good else f"a first program ended with {reply.report} {reply.stderr.text()}")
    except SandboxError as error:
        return Isolation(False, str(error))
    finally:
        worker.close()


class Sandbox:
    """A pool of `workers` sandboxed workers with the same limits; a context manager.

    SandboxError where this machine cannot isolate programs, unless `allow_weak`: then resource limits alone hold (`WEAK`).
    """

    def __init__(self, limits: Limits | None = None, *, workers: int = 2, allow_weak: bool = False) -> None:
        within("sandbox.workers", workers, 1, 256)
        found = isolation()
        if not found.strong and not allow_weak:
            raise SandboxError(
                f"This machine cannot isolate model-written code: {found.why}. `make doctor` says more; with "
                f"allow_weak=True {WEAK}."
            )
        self._open(limits or Limits(), workers, found.strong)

    def _open(self, limits: Limits, workers: int, strong: bool) -> None:
        self.limits, self.strong = limits, strong
        self._jobs: deque[_Job] = deque()
        self._ready = threading.Condition()
        self._closed = False
        self._workers: list[Worker | None] = [None] * workers
        self._generations = [0] * workers
        self._names = itertools.count()
        self._threads = [threading.Thread(target=self._serve, args=(slot,), daemon=True) for slot in range(workers)]
        for thread in self._threads:
            thread.start()
        try:
            for future in [self._submit(lambda worker: None, slot) for slot in range(workers)]:
                future.result()  # an error in starting a worker shows here, not at the first program
        except BaseException:
            self.close()
            raise

    # --- programs -------------------------------------------------------------------------------------------------------

    def run(self, programs: Sequence[Program]) -> list[Result]:
        """Run each program in an empty folder of its own; results in order. Raises only where the pool is closed."""
        futures = [self._start("python", item.code, item.files, item.stdin, item.wall_s, item.cpu_s) for item in programs]
        return [outcome(future)[0] for future in futures]

    def call(self, calls: Sequence[Call]) -> list[Answers]:
        """Call functions of untrusted code with given arguments; what they return comes back as data, to be compared here."""
        futures = []
        for item in calls:
            more = {"function": item.function, "cases": [list(case) for case in item.cases]}
            futures.append(self._start("call", item.code, {}, None, item.wall_s, item.cpu_s, more=more))
        found = []
        for item, future in zip(calls, futures, strict=True):
            result, answers = outcome(future)
            found.append(Answers(read_answers(answers, len(item.cases), result), result))
        return found

    def shell(self, commands: Sequence[tuple["Episode", str]], wall_s: float | None = None) -> list[Result]:
        """Run one shell command in the folder of each episode, side by side where they lie with different workers."""
        futures = [self._start("shell", text, {}, None, wall_s, None, episode) for episode, text in commands]
        return [outcome(future)[0] for future in futures]

    def episode(self, files: Mapping[str, str | bytes] | None = None) -> "Episode":
        """A working folder that lasts over many commands, with these files in it."""
        number = next(self._names)
        slot, name = number % len(self._workers), f"episode-{number}"

        def make(worker: Worker) -> int:
            worker.episode("open", name)
            return self._generations[slot]

        episode = Episode(self, name, slot, self._submit(make, slot).result())
        if files:
            episode.write(files)
        return episode

    def _start(
        self,
        kind: str,
        code: str,
        files: Mapping[str, str | bytes],
        stdin: str | None,
        wall_s: float | None,
        cpu_s: float | None,
        episode: "Episode | None" = None,
        more: Mapping[str, Any] | None = None,
    ) -> Future:
        """A future of (result, captured answers)."""
        payload = _payload(kind, code, files) | dict(more or {})
        given = None if stdin is None else stdin.encode("utf-8", "backslashreplace")
        request = {
            "wall_s": whole_seconds(self.limits.wall_s, wall_s),
            "cpu_s": whole_seconds(self.limits.cpu_s, cpu_s),
            "episode": episode.name if episode else None,
        }
        answers = {"call": 16 * self.limits.output_bytes, "list": 2**24, "read": self.limits.file_size_mb * 2**20}.get(kind, 0)

        def work(worker: Worker) -> tuple[Result, process.Capture]:
            reply = worker.run(payload, given, request, answers)
            return judge(reply, self.limits, request, kind), reply.answers

        if episode is None:
            return self._submit(work)
        return self._submit(work, episode.slot, episode.generation)

    # --- workers --------------------------------------------------------------------------------------------------------

    def _submit(self, work: Callable[[Worker], Any], slot: int | None = None, generation: int | None = None) -> Future:
        job = _Job(work, Future(), slot, generation)
        with self._ready:
            if self._closed:
                raise SandboxError("The sandbox is closed.")
            self._jobs.append(job)
            self._ready.notify_all()
        return job.future

    def _next(self, slot: int) -> _Job | None:
        """The oldest job that this worker may do; None when the pool is closed."""
        with self._ready:
            while not self._closed:
                for index, job in enumerate(self._jobs):
                    if job.slot in (None, slot):
                        del self._jobs[index]
                        return job
                self._ready.wait()
        return None

    def _serve(self, slot: int) -> None:
        """The thread of one worker."""
        while (job := self._next(slot)) is not None:
            reason = "the sandbox was closed" if self._closed else "the episode's worker died and its folder is gone"
            for _ in range(2 if job.generation is None else 1):  # a program is safe to repeat: its folder is its own
                if self._closed or job.generation not in (None, self._generations[slot]):
                    break
                try:
                    worker = self._workers[slot] = self._workers[slot] or Worker(self.limits, self.strong)
                    if self._closed:
                        raise WorkerLost("the sandbox was closed")
                    job.future.set_result(job.work(worker))
                    break
                except SandboxError as error:
                    reason = str(error)
                    self._drop(slot)
                except BaseException as error:
                    self._drop(slot)
                    job.future.set_exception(error)
                    break
            if not job.future.done():
                job.future.set_exception(WorkerLost(reason))
        self._drop(slot)

    def _drop(self, slot: int) -> None:
        worker, self._workers[slot] = self._workers[slot], None
        self._generations[slot] += 1
        if worker is not None:
            worker.close()

    def close(self) -> None:
        """End all workers and whatever runs in them; calls under way end with status "lost"."""
        with self._ready:
            self._closed = True
            waiting = list(self._jobs)
            self._jobs.clear()
            self._ready.notify_all()
        for job in waiting:
            job.future.set_exception(SandboxError("The sandbox was closed."))
        for worker in list(self._workers):
            if worker is not None:
                worker.cancel()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Episode:
    """A persistent working folder. Each command is a new shell that starts in it; background processes end with it."""

    box: Sandbox
    name: str
    slot: int
    generation: int

    def shell(self, command: str, stdin: str | None = None, wall_s: float | None = None) -> Result:
        """Run a shell command in the folder."""
        return outcome(self.box._start("shell", command, {}, stdin, wall_s, None, self))[0]

    def python(self, program: Program) -> Result:
        """Run a program in the folder; its files are written there first."""
        given = (program.files, program.stdin, program.wall_s, program.cpu_s, self)
        return outcome(self.box._start("python", program.code, *given))[0]

    def write(self, files: Mapping[str, str | bytes]) -> None:
        """Write files. SandboxError where a name or a link leads out of the folder, or there is no room."""
        self._move("write", ".", files)

    def read(self, path: str) -> bytes:
        """The content of a file. SandboxError where there is none, or a link leads out of the folder."""
        return self._move("read", file_name(path), {})

    def list(self, path: str = ".") -> list[str]:
        """The names in a folder, sorted; folders end in a slash."""
        return [str(name) for name in json.loads(self._move("list", path if path == "." else file_name(path), {}))]

    def close(self) -> None:
        """Remove the folder."""
        with contextlib.suppress(SandboxError):
            self.box._submit(lambda worker: worker.episode("close", self.name), self.slot, self.generation).result()

    def _move(self, kind: str, path: str, files: Mapping[str, str | bytes]) -> bytes:
        result, answers = self.box._start(kind, path, files, None, None, None, self).result()
        if result.status != "ok":
            raise SandboxError(f"{kind} failed: {result.stderr.strip().splitlines()[-1] if result.stderr else result.reason}")
        if answers.cut:
            raise SandboxError(f"{path}: more than {2 * answers.half} bytes")
        return bytes(answers.raw())

    def __enter__(self) -> "Episode":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def outcome(future: Future) -> tuple[Result, process.Capture]:
    """What a call gave; where its worker was lost, again and again, a result that says so."""
    try:
        result, answers = future.result()
    except WorkerLost as error:
        return Result("lost", reason=str(error)), process.Capture(0)
    return result, answers


def _payload(kind: str, code: str, files: Mapping[str, str | bytes]) -> dict[str, Any]:
    """What program.py reads. Text keeps its lone surrogates: JSON escapes them."""
    placed = []
    for path, content in files.items():
        encoded = None if isinstance(content, str) else base64.b64encode(content).decode()
        placed.append([file_name(path), content if isinstance(content, str) else None, encoded])
    return {"kind": kind, "code": code, "files": placed}


def judge(reply: Reply, limits: Limits, request: Mapping[str, Any], kind: str) -> Result:
    """The status from what the worker, not the program, says; exit codes of program.py only refine a failure."""
    cause, code = reply.report["cause"], reply.report["code"]
    status, reason = _status(cause, code, kind, limits, request)
    if code in (MEMORY, DISK, PROCESSES) and status != "error":
        code = 1
    return Result(
        status,
        reply.stdout.text(),
        reply.stderr.text(),
        code,
        reply.report["wall"],
        reply.report["cpu"],
        reply.stdout.cut,
        reply.stderr.cut,
        reason,
    )


def _status(cause: str, code: int | None, kind: str, limits: Limits, request: Mapping[str, Any]) -> tuple[Status, str]:
    if cause == "wall":
        return "timeout", f"wall time limit of {request['wall_s']:g} s"
    if cause == "cpu" or code == -signal.SIGXCPU:
        return "timeout", f"CPU time limit of {request['cpu_s']:g} s"
    if cause == "memory" or (code == MEMORY and kind != "shell"):
        return "memory", f"memory limit of {limits.memory_mb} MiB"
    if cause == "output":
        return "output", f"far more output than the limit of {limits.output_bytes} bytes"
    if code == -signal.SIGXFSZ or code == (128 + signal.SIGXFSZ if kind == "shell" else DISK):
        return "disk", f"limit of {limits.file_size_mb} MiB a file, {limits.folder_mb} MiB and {limits.files} files in all"
    if cause == "processes" or (code == PROCESSES and kind != "shell"):
        return "processes", f"limit of {limits.processes} processes"
    if code is None or code < 0:
        return "killed", f"signal {-code if code else 'unknown'}"
    return ("error", f"exit code {code}") if code else ("ok", "")


def read_answers(answers: process.Capture, count: int, result: Result) -> tuple[Answer, ...]:
    """Answers of `Call` from what untrusted code wrote: the first readable line of each case counts, nothing else does."""
    found: dict[int, Answer] = {}
    for line in [] if answers.cut else answers.raw().split(b"\n"):
        try:
            index, kind, value = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue
        if type(index) is int and 0 <= index < count and index not in found:
            if kind == "value":
                found[index] = Answer(value)
            elif kind == "failure":
                found[index] = Answer(failure=f"runtime error: {value}")
    why = {"ok": "the program ended before it answered", "error": "runtime error"}.get(result.status, result.status)
    why = "more answers than the limit on output" if answers.cut else why
    return tuple(found.get(index, Answer(failure=why)) for index in range(count))
