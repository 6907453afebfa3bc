"""The same jobs as common.jobs on Ray: `launcher=ray`, for sweeps over several machines that share a file system.

Without RAY_ADDRESS a Ray of `workers` slots is started on this machine and ended with the run; with it, the jobs go to that
cluster, whose size is then Ray's affair. A job whose worker dies is started again (RETRIES times); a cell then goes on from
its checkpoint, and what other cells did is not lost. Threads, random numbers and logs are those of the local launcher, so
that the records are the same.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common.jobs import THREAD_VARIABLES, Failure, Job, end_on_sigterm, headline
from common.live import LiveLine
from common.schema import ConfigError
from common.workers import call_target, redirect_output

ROOT = Path(__file__).resolve().parents[2]
RETRIES = 2
WAIT_S = 1.0


def run_on_ray(
    jobs: list[Job],
    *,
    workers: int,
    threads: int,
    on_done: Callable[[Job, dict[str, Any] | None], None] | None = None,
    logs: Path,
    quiet: bool = False,
) -> list[Failure]:
    """Runs the jobs as Ray tasks of `threads` CPUs each; returns the failures in job order. ConfigError without Ray.

    `on_done(job, result)` is called in this process after each job that ended well.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "launcher=ray: Ray is not installed here; run `.venv/bin/pip install -c constraints.txt -e '.[verl]'`."
        ) from None
    failures: dict[str, Failure] = {}
    live, done = LiveLine(quiet=quiet), 0
    with ExitStack() as stack:
        stack.callback(live.close)
        stack.enter_context(end_on_sigterm())
        _connect(ray, workers * threads, stack)
        variables = dict.fromkeys(THREAD_VARIABLES, str(threads))
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        task = ray.remote(_run).options(num_cpus=threads, max_retries=RETRIES, runtime_env={"env_vars": variables})
        waiting: dict[Any, Job] = {}
        for job in jobs:
            try:
                waiting[task.remote(job.name, job.target, job.kwargs, threads, str(_log(logs, job)))] = job
            except Exception as refusal:  # arguments that cannot be pickled raise many types
                text = f"the job could not be sent to a worker: {type(refusal).__name__}: {refusal}"
                failures[job.name], done = Failure(job.name, text), done + 1
        while waiting:
            ready, _ = ray.wait(list(waiting), timeout=WAIT_S)
            for reference in ready:
                job, done = waiting.pop(reference), done + 1
                result, error = _outcome(ray, reference)
                if error is not None:
                    failures[job.name] = Failure(job.name, error)
                    live.say(f"FAILED {job.name}: {headline(error)}")
                elif on_done is not None:
                    on_done(job, result)
            if live.due():
                live.show([f"{done}/{len(jobs)} jobs on Ray" + (f" ({len(failures)} failed)" if failures else "")])
    return [failures[job.name] for job in jobs if job.name in failures]


def _connect(ray: Any, cpus: int, stack: ExitStack) -> None:
    """Joins the cluster of RAY_ADDRESS, or starts a Ray of `cpus` slots whose files go with it."""
    quietly = {"log_to_driver": False, "logging_level": "warning"}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quietly)
    else:
        folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: Ray makes sockets below it, whose paths are limited
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        ray.init(num_cpus=cpus, include_dashboard=False, _temp_dir=folder, **quietly)
    stack.callback(ray.shutdown)


def _log(logs: Path, job: Job) -> Path:
    logs.mkdir(parents=True, exist_ok=True)
    return logs.resolve() / (re.sub(r"[^\w.=,+-]", "_", job.name) + ".log")


def _run(name: str, target: str, kwargs: dict[str, Any], threads: int, log: str) -> tuple[dict[str, Any] | None, str | None]:
    """On a Ray worker: the job's result, or the text of what it raised (which Ray shall not repeat)."""
    redirect_output(Path(log))
    try:
        return call_target(name, target, kwargs, threads), None
    except Exception:  # whatever a job raises is its own failure
        return None, traceback.format_exc()
    except SystemExit as stop:
        return None, f"the job called sys.exit({stop.code!r}); a job ends by returning"


def _outcome(ray: Any, reference: Any) -> tuple[dict[str, Any] | None, str | None]:
    """Result and error of a task that has ended, by itself or with its worker."""
    try:
        result, error = ray.get(reference)
    except ray.exceptions.RayError as lost:
        return None, f"Ray lost the job {RETRIES + 1} times: {type(lost).__name__}: {str(lost).strip()}"
    return result, error
