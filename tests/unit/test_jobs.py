"""Jobs on worker processes: failures are reported and stay alone (D03), and no process outlives its parent."""

import importlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from common.jobs import Cell, Job, Worker, cell_folder, complete_cell, is_done, mark_done, run_jobs, time_left
from common.live import LiveLine
from common.workers import prepare_libraries

FORK = multiprocessing.get_context("fork")
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("toy_jobs")


def gone(pid: int) -> bool:
    """True if the process has ended (a zombie has)."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return state.strip() == "" or state.startswith("Z")


def wait_until(condition, seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("fork", [False, True])
def test_d03_jobs_that_fail_in_every_way_are_reported_and_the_others_end(tmp_path, capfd, monkeypatch, fork):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    bad = {
        "raises": "raises",
        "wrong type": "wrong_type",
        "not a number": "not_a_number",
        "calls exit": "calls_exit",
        "sys exit": "sys_exit",
        "no such function": "absent",
    }
    jobs = [Job("good 1", "toy_jobs:good", {"value": 1})]
    jobs += [Job(name, f"toy_jobs:{function}", {}) for name, function in bad.items()]
    jobs += [Job("killed", "toy_jobs:killed_with_child", {"folder": str(tmp_path)})]
    jobs += [Job("cannot be sent", "toy_jobs:good", {"value": lambda: 1})]
    jobs += [Job("good 2", "toy_jobs:good", {"value": 2}), Job("no module", "toy_absent:good", {})]
    results = {}
    failures = run_jobs(
        jobs, workers=2, threads=1, on_done=lambda job, r: results.update({job.name: r}), logs=tmp_path, fork=fork
    )
    assert {name: result["value"] for name, result in results.items()} == {"good 1": 1, "good 2": 2}
    assert {result["threads"] for result in results.values()} == {"1"}
    assert "OMP_NUM_THREADS" not in os.environ
    errors = {failure.name: failure.error for failure in failures}
    assert list(errors) == [job.name for job in jobs if job.name not in results]
    assert "ValueError: the reward of hand 7 é is undefined" in errors["raises"] and "Traceback" in errors["raises"]
    assert "returned a int; a job returns None or a dict" in errors["wrong type"]
    assert "not JSON compliant" in errors["not a number"]
    assert "exit code 3" in errors["calls exit"] and errors["calls exit"].endswith("last words")
    assert "sys.exit(5)" in errors["sys exit"]
    assert "has no attribute 'absent'" in errors["no such function"]
    assert "signal SIGKILL" in errors["killed"]
    assert "could not be sent" in errors["cannot be sent"]
    assert "No module named 'toy_absent'" in errors["no module"]
    assert wait_until(lambda: gone(int((tmp_path / "child").read_text())))
    assert all(wait_until(lambda pid=result["pid"]: gone(pid)) for result in results.values())
    assert "a word from the job" in (tmp_path / "good_1.log").read_text()
    shown = capfd.readouterr().out
    assert "FAILED raises: ValueError: the reward of hand 7 é is undefined\n" in shown
    assert "a word from the job" not in shown


def test_workers_are_reused_and_a_jobs_random_numbers_depend_on_its_name_alone():
    results: list[dict[str, dict]] = []
    for workers, fork in ((1, False), (2, False), (2, True)):
        found: dict[str, dict] = {}
        jobs = [Job(f"job {index}", "toy_jobs:good", {"value": index}) for index in range(4)]
        done = found.__setitem__
        assert run_jobs(jobs, workers=workers, threads=1, on_done=lambda job, r, done=done: done(job.name, r), fork=fork) == []
        results.append(found)
    assert len({result["pid"] for result in results[0].values()}) == 1
    assert [result["random"] for result in results[0].values()] != [results[0]["job 0"]["random"]] * 4
    draws = [{name: result["random"] for name, result in found.items()} for found in results]
    assert draws[0] == draws[1] == draws[2]


def test_global_generators_and_threads_are_fixed_before_a_job():
    before = torch.get_num_threads()
    draws = []
    for name in ("a", "b", "a"):
        prepare_libraries(name, 1)
        draws.append((random.random(), float(np.random.rand()), float(torch.rand(()))))  # noqa: NPY002
        assert torch.get_num_threads() == 1
    torch.set_num_threads(before)
    assert draws[0] == draws[2]
    assert all(first != second for first, second in zip(draws[0], draws[1]))


def test_metrics_and_warnings_of_workers_reach_the_parents_line(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("common.jobs.LiveLine", partial(LiveLine, every_s=0.0))
    jobs = [Job(name, "toy_jobs:logs_metrics", {"folder": str(tmp_path / name)}) for name in ("one", "two")]
    assert run_jobs(jobs, workers=2, threads=1) == []
    shown = capfd.readouterr().out
    assert "two step 3 reward 0.250 success 0.500 KL 0.0100" in shown
    assert "0/2 jobs" in shown
    assert shown.count("warning: tracker=trackio failed in init") == 1
    assert len((tmp_path / "one" / "metrics.jsonl").read_text().splitlines()) == 3


PARENT = """
import signal, sys
from common.jobs import Job, run_jobs
# A shell that starts the tests in the background has them ignore SIGINT; a reader's terminal does not.
signal.signal(signal.SIGINT, signal.default_int_handler)
folder = sys.argv[1]
jobs = [Job(name, "toy_jobs:sleeps", {"folder": folder, "name": name}) for name in ("one", "two")]
run_jobs(jobs, workers=2, threads=1, fork=sys.argv[2] == "fork")
"""


@pytest.mark.parametrize("start", ["spawn", "fork"])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_no_worker_and_none_of_its_children_outlives_the_parent(tmp_path, number, code, start):
    environment = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}"}
    command = [sys.executable, "-c", PARENT, str(tmp_path), start]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: (tmp_path / "one").exists() and (tmp_path / "two").exists(), 120)
        pids = [int(pid) for name in ("one", "two") for pid in (tmp_path / name).read_text().split()]
        assert len(pids) == 4 and not any(gone(pid) for pid in pids)
        parent.send_signal(number)
        assert parent.wait(60) == code
        assert wait_until(lambda: all(gone(pid) for pid in pids), 30)
    finally:
        parent.kill()


AGAIN = """
import os
from common import jobs
kill = jobs.kill_worker
jobs.kill_worker = lambda worker: (os.kill(os.getpid(), signal.SIGINT), kill(worker))
"""


def test_a_second_ctrl_c_while_the_workers_are_ended_leaves_none(tmp_path):
    environment = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}"}
    script = PARENT.replace("folder = ", AGAIN + "folder = ")
    command = [sys.executable, "-c", script, str(tmp_path), "fork"]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: (tmp_path / "one").exists() and (tmp_path / "two").exists(), 120)
        pids = [int(pid) for name in ("one", "two") for pid in (tmp_path / name).read_text().split()]
        parent.send_signal(signal.SIGINT)
        assert parent.wait(20) == -signal.SIGINT
        assert wait_until(lambda: all(gone(pid) for pid in pids), 30)
    finally:
        parent.kill()


def test_bad_arguments_are_refused():
    job = Job("a", "toy_jobs:good", {"value": 1})
    with pytest.raises(ValueError, match="workers=0, threads=1"):
        run_jobs([job], workers=0, threads=1)
    with pytest.raises(ValueError, match="share a name"):
        run_jobs([job, job], workers=1, threads=1)
    assert run_jobs([], workers=1, threads=1) == []


def test_a_done_mark_counts_only_under_its_key(tmp_path):
    folder = cell_folder(tmp_path, Cell("grpo", 101))
    assert folder == tmp_path / "grpo" / "seed101" and Cell("grpo", 101).name == "grpo-seed101"
    assert not is_done(folder, "k1")
    mark_done(folder, "k1")
    assert is_done(folder, "k1") and not is_done(folder, "k2")


def test_e08_a_cell_of_another_key_is_moved_aside_not_mixed_in(tmp_path):
    folder = tmp_path / "grpo" / "seed100"
    assert complete_cell(folder, "k1", lambda: (folder / "state.pt").write_text("first") and None)
    assert not complete_cell(folder, "k1", lambda: pytest.fail("a finished cell ran again"))
    seen = []
    assert complete_cell(folder, "k2", lambda: seen.extend(sorted(path.name for path in folder.iterdir())))
    assert seen == ["KEY"]
    assert (tmp_path / "grpo" / "seed100.stale" / "state.pt").read_text() == "first"
    with pytest.raises(RuntimeError, match="boom"):
        complete_cell(folder, "k3", lambda: fail_halfway(folder))
    assert not is_done(folder, "k3")
    assert complete_cell(folder, "k3", lambda: seen.extend(sorted(path.name for path in folder.iterdir())))
    assert seen == ["KEY", "KEY", "half"]  # what the failed try left is still there to go on from


def fail_halfway(folder: Path) -> None:
    (folder / "half").touch()
    raise RuntimeError("boom")


def run_together(folder: Path, barrier) -> None:
    def run() -> None:
        time.sleep(0.2)
        with open(folder / "runs.jsonl", "a") as handle:
            handle.write(json.dumps({"pid": os.getpid()}, allow_nan=False) + "\n")

    barrier.wait()
    complete_cell(folder, "key", run)


def test_e09_eight_processes_run_a_cell_once(tmp_path):
    barrier = FORK.Barrier(8)
    processes = [FORK.Process(target=run_together, args=(tmp_path / "cell", barrier)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    assert len((tmp_path / "cell" / "runs.jsonl").read_text().splitlines()) == 1


def test_the_time_left_goes_by_the_kind_of_job_and_waits_until_each_kind_is_known():
    stages, cells = [Job("a", "m:stage", {})], [Job(f"c{index}", "m:cell", {}) for index in range(4)]
    half = Worker(None, None, job=cells[0], progress=0.5)
    assert time_left([*stages, *cells[1:]], [half], {"m:stage": [300.0]}, workers=2) is None
    known = {"m:stage": [300.0, 20.0], "m:cell": [50.0, 70.0]}
    assert time_left([*stages, *cells[1:]], [half], known, workers=2) == (160 + 3 * 60 + 30) / 2
    assert time_left([], [], {}, workers=2) == 0
