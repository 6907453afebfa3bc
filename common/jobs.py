"""Cells (arm × seed) and the processes that run them: one failing job never stops the others, and none outlives us.

Workers are started once and reused, since importing torch takes seconds; where that is safe they are forked, and import
nothing again. A worker that dies is replaced and its job is reported as failed. Kill the parent in any way and start it
again: finished cells are skipped, the others go on from their checkpoints.
"""

import contextlib
import functools
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from common.files import locked, write_text
from common.live import LiveLine, describe, duration
from common.workers import worker_main

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
POLL_S = 0.25
STOP_S = 10.0
LOG_TAIL_CHARACTERS = 2000
CACHED_S = 1.0  # a job that ends sooner has found its work done


@dataclass(frozen=True)
class Cell:
    """One arm under one seed."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}-seed{self.seed}"


def cell_folder(run_folder: Path, cell: Cell) -> Path:
    """Where a cell keeps its checkpoints and logs."""
    return Path(run_folder) / cell.arm / f"seed{cell.seed}"


def is_done(folder: Path, key: str) -> bool:
    """True if the cell ended under this key (configuration and code); a DONE of another key does not count."""
    done = Path(folder) / "DONE"
    return done.exists() and done.read_text(encoding="utf-8") == key


def mark_done(folder: Path, key: str) -> None:
    """Mark a cell as ended under this key."""
    write_text(Path(folder) / "DONE", key)


def complete_cell(folder: Path, key: str, run: Callable[[], None]) -> bool:
    """Run a cell unless it is done under this key; returns whether it ran.

    What another key left in the folder is moved to `<folder>.stale`, so that a run never goes on from a checkpoint of
    another configuration. A second process that asks for the same cell waits, then finds it done.
    """
    folder = Path(folder)
    with locked(folder.with_name(f".{folder.name}.lock"), lambda: print(f"waiting for another run of {folder}")):
        if is_done(folder, key):
            return False
        owner = folder / "KEY"
        if folder.exists() and (not owner.exists() or owner.read_text(encoding="utf-8") != key):
            stale = folder.with_name(f"{folder.name}.stale")
            shutil.rmtree(stale, ignore_errors=True)
            os.replace(folder, stale)
        write_text(owner, key)
        run()
        mark_done(folder, key)
    return True


@dataclass(frozen=True)
class Job:
    """A call for a worker process: `target` is "package.module:function", which returns None or a JSON dict."""

    name: str
    target: str
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """A job that did not end well, with the text that says why."""

    name: str
    error: str


@dataclass
class Worker:
    """A worker process, the parent's end of its pipe, and what it is doing."""

    process: BaseProcess
    connection: Connection
    job: Job | None = None
    log: Path | None = None
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)
    progress: float = 0.0
    since: float = 0.0


@contextlib.contextmanager
def child_environment(threads: int) -> Iterator[None]:
    """Environment in which children start with `threads` threads; it must be set before they import torch or numpy."""
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def end_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit(143), so that the workers are ended on the way out (main thread only)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def start_worker(threads: int, fork: bool) -> Worker:
    # A forked process may use what the parent imported, but neither its GPU nor its thread pools.
    context = multiprocessing.get_context("fork" if fork and threads == 1 and sys.platform == "linux" else "spawn")
    ours, theirs = context.Pipe()
    process: BaseProcess = context.Process(target=worker_main, args=(theirs, threads, os.getpid()))  # type: ignore[attr-defined]
    with child_environment(threads):
        process.start()
    theirs.close()
    return Worker(process, ours)


def kill_worker(worker: Worker) -> None:
    """End a worker at once, with every process that its job started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process.pid or 0, signal.SIGKILL)
    worker.process.kill()
    worker.process.join()
    worker.connection.close()


def kill_pool(pool: list[Worker]) -> None:
    """End all workers at once; a second Ctrl-C meanwhile must not leave the rest alive, and us waiting for them."""
    waiting = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        for worker in pool:
            kill_worker(worker)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, waiting)


def retire_worker(worker: Worker) -> None:
    """Let an idle worker end in order, then end what its jobs left behind."""
    with contextlib.suppress(OSError):
        worker.connection.send(None)
    worker.process.join(STOP_S)
    kill_worker(worker)


def give_job(worker: Worker, job: Job, logs: Path) -> Failure | None:
    """Send a job to a worker; a Failure when it cannot be sent."""
    worker.job, worker.step, worker.values, worker.progress, worker.since = job, 0, {}, 0.0, time.monotonic()
    worker.log = logs / (re.sub(r"[^\w.=,+-]", "_", job.name) + ".log")
    try:
        worker.connection.send((job.name, job.target, job.kwargs, worker.log))
    except Exception as error:  # arguments that cannot be pickled raise many types
        return Failure(job.name, f"the job could not be sent to a worker: {type(error).__name__}: {error}")
    return None


def death_notice(worker: Worker) -> str:
    """Why a worker that is gone took its job with it: exit code or signal, and the end of its output."""
    code = worker.process.exitcode
    how = f"exit code {code}"
    if code is not None and code < 0:
        how = f"signal {signal.Signals(-code).name}"
    text = f"the worker process died with {how} before the job ended"
    if code == -signal.SIGKILL:
        text += " (the system kills processes when memory runs out)"
    if worker.log is not None and worker.log.exists():
        tail = worker.log.read_bytes()[-LOG_TAIL_CHARACTERS:].decode("utf-8", errors="replace").strip()
        if tail:
            text += "; its last output:\n" + tail
    return text


def receive(worker: Worker, say: Callable[[str], None]) -> tuple[bool, dict[str, Any] | None, str | None]:
    """Take in what a worker has sent: (ended, result, error)."""
    alive = worker.process.is_alive()  # asked first: what a dead worker sent before is already in the pipe
    try:
        while worker.connection.poll():
            kind, *content = worker.connection.recv()
            if kind == "metrics":
                worker.step, worker.values, progress = content
                worker.progress = worker.progress if progress is None else progress
            elif kind == "warning":
                say(f"warning: {content[0]}")
            else:
                return True, content[0] if kind == "result" else None, content[0] if kind == "error" else None
    except (EOFError, OSError):
        worker.process.join(STOP_S)
        alive = worker.process.is_alive()
    return (False, None, None) if alive else (True, None, death_notice(worker))


def time_left(
    waiting: Iterable[Job], busy: Sequence[Worker], spent: Mapping[str, Sequence[float]], workers: int
) -> float | None:
    """Wall seconds left, each job at the mean of those of its kind (its target) that have ended; None while one is unknown.

    `spent`: target -> seconds of the jobs that had something to do (a job that finds its work done ends at once).
    """
    shares = [(job.target, 1.0) for job in waiting]
    shares += [(worker.job.target, 1.0 - worker.progress) for worker in busy if worker.job]
    if any(not spent.get(target) for target, _ in shares):
        return None
    return sum(share * sum(spent[target]) / len(spent[target]) for target, share in shares) / workers


def status_lines(jobs: str, began: float, left: float | None, busy: Sequence[Worker]) -> list[str]:
    """The overall line, then a line for each running job."""
    head = f"{jobs} {duration(time.monotonic() - began)}" + ("" if left is None else f", about {duration(left)} left")
    return [head] + [f"{worker.job.name} {describe(worker.step, worker.values)}" for worker in busy if worker.job]


class Once:
    """Says each text once: many cells may give the same warning."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.said = say, set[str]()

    def __call__(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            self.say(text)


def run_jobs(
    jobs: list[Job],
    *,
    workers: int,
    threads: int,
    on_done: Callable[[Job, dict[str, Any] | None], None] | None = None,
    logs: Path | None = None,
    quiet: bool = False,
    launcher: str = "local",
    fork: bool = False,
) -> list[Failure]:
    """Run jobs on `workers` processes of `threads` threads each; returns the failures in job order.

    `on_done(job, result)` is called in this process after each job that ended well. `logs`: folder that keeps what
    each job printed, `<name>.log`. SIGINT and SIGTERM end all workers and are passed on; nothing finished is lost.
    `launcher`: local, or ray for the same on Ray (common.backends.ray_launcher). `fork`: workers of one thread may be
    forked; only for a parent that has neither touched a GPU nor computed with several threads.
    """
    if workers < 1 or threads < 1:
        raise ValueError(f"run_jobs workers={workers}, threads={threads}: both must be at least 1.")
    if len({job.name for job in jobs}) != len(jobs):
        raise ValueError("run_jobs: two jobs share a name; names must differ.")
    with contextlib.ExitStack() as stack:
        if logs is None:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs.mkdir(parents=True, exist_ok=True)
        if launcher == "ray":
            from common.backends.ray_launcher import run_on_ray  # needs the extra [verl]

            return run_on_ray(jobs, workers=workers, threads=threads, on_done=on_done, logs=logs, quiet=quiet)
        pool: list[Worker] = []
        live = LiveLine(quiet=quiet)
        stack.callback(live.close)
        stack.callback(kill_pool, pool)
        stack.enter_context(end_on_sigterm())
        start = functools.partial(start_worker, threads, fork)
        failures = work_through(jobs, workers, start, on_done, logs, pool, live)
        while pool:
            retire_worker(pool[-1])
            pool.pop()
    order = {job.name: index for index, job in enumerate(jobs)}
    return sorted(failures, key=lambda failure: order[failure.name])


def headline(error: str) -> str:
    """The line of a failure's text that says most: a traceback's last, else the first."""
    lines = error.strip().splitlines()
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]


def idle_worker(pool: list[Worker], workers: int, start: Callable[[], Worker]) -> Worker | None:
    """A worker without a job, started if there is room for one; None if all are busy."""
    for worker in [worker for worker in pool if worker.job is None]:
        if worker.process.is_alive():
            return worker
        pool.remove(worker)
        kill_worker(worker)
    if len(pool) == workers:
        return None
    pool.append(start())
    return pool[-1]


def work_through(
    jobs: list[Job],
    workers: int,
    start: Callable[[], Worker],
    on_done: Callable[[Job, dict[str, Any] | None], None] | None,
    logs: Path,
    pool: list[Worker],
    live: LiveLine,
) -> list[Failure]:
    """Keep up to `workers` processes of the pool busy until every job has ended."""
    waiting, failures, ended, began = deque(jobs), list[Failure](), 0, time.monotonic()
    spent: dict[str, list[float]] = defaultdict(list)
    say = Once(live.say)

    def fail(failure: Failure) -> None:
        failures.append(failure)
        live.say(f"FAILED {failure.name}: {headline(failure.error)}")

    while ended < len(jobs):
        while waiting and (worker := idle_worker(pool, workers, start)):
            if failure := give_job(worker, waiting.popleft(), logs):
                worker.job, ended = None, ended + 1
                fail(failure)
        busy = [worker for worker in pool if worker.job is not None]
        wait([worker.connection for worker in busy] + [worker.process.sentinel for worker in busy], timeout=POLL_S)
        for worker in busy:
            over, result, error = receive(worker, say)
            if not over or worker.job is None:
                continue
            job, worker.job, ended = worker.job, None, ended + 1
            if (seconds := time.monotonic() - worker.since) > CACHED_S:
                spent[job.target].append(seconds)
            if error is not None:
                fail(Failure(job.name, error))
            elif on_done is not None:
                on_done(job, result)
        if live.due():
            busy = [worker for worker in pool if worker.job is not None]
            done = f"{ended}/{len(jobs)} jobs" + (f" ({len(failures)} failed)" if failures else "")
            live.show(status_lines(done, began, time_left(waiting, busy, spent, workers), busy))
    return failures
