"""The worker side of `common.jobs`: a long-lived process that runs one job after another and reports to its parent.

Messages to the parent are tuples: ("metrics", step, values, progress), ("warning", text), ("result", value or None)
and ("error", text); the last two end a job.
"""

import importlib
import os
import random
import signal
import sys
import threading
import time
import traceback
import zlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common.files import strict_json
from common.runlog import Listener

REPORT_EVERY_S = 0.5
PARENT_CHECK_S = 1.0


def end_with_parent(parent: int) -> None:
    """Watch the parent from a thread; when it is gone, however it went, end this process and all it started."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def redirect_output(log: Path) -> None:
    """Send everything this process prints, also below Python, to a log file; the terminal is the parent's."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def prepare_libraries(name: str, threads: int) -> None:
    """Fix thread counts and the global generators: what a job draws from them depends on its name alone."""
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
        sys.modules["torch"].manual_seed(seed)


def call_target(name: str, target: str, kwargs: dict[str, Any], threads: int) -> dict[str, Any] | None:
    """Import and call "package.module:function". TypeError unless it returns None or a dict of strict JSON."""
    module, _, function = target.partition(":")
    call = getattr(importlib.import_module(module), function)
    prepare_libraries(name, threads)
    result = call(**kwargs)
    if result is not None and not isinstance(result, dict):
        raise TypeError(f"{target} returned a {type(result).__name__}; a job returns None or a dict of JSON values.")
    strict_json(result)
    return result


def worker_main(connection: Connection, threads: int, parent: int) -> None:
    """Run jobs from the connection until it sends None or closes."""
    os.setpgid(0, 0)  # one group for this process and all it starts, so that the parent can end them together
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked worker has the parent's handler
    end_with_parent(parent)
    # A forked worker may have found streams that do not end in descriptors 1 and 2.
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, encoding="utf-8", closefd=False) for number in (1, 2))
    sending = threading.Lock()
    last_report = 0.0

    def send(*message: Any) -> None:
        with sending:
            connection.send(message)

    def report(step: int, values: dict[str, float], progress: float | None) -> None:
        nonlocal last_report
        if time.monotonic() - last_report >= REPORT_EVERY_S:
            last_report = time.monotonic()
            send("metrics", step, values, progress)

    Listener.metrics, Listener.warning = report, lambda text: send("warning", text)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        if job is None:
            return
        name, target, kwargs, log = job
        redirect_output(log)
        try:
            send("result", call_target(name, target, kwargs, threads))
        except Exception:  # whatever a job raises is its own failure; the worker takes the next job
            send("error", traceback.format_exc())
        except SystemExit as stop:
            send("error", f"the job called sys.exit({stop.code!r}); a job ends by returning")
