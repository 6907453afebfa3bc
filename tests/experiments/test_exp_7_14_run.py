"""RLVP through its public command: every arm at smoke scale, killed and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.config import compose
from experiments.exp_7_14_rlvp.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
RUN = [sys.executable, "-m", "experiments.exp_7_14_rlvp.run", "scale=smoke"]
FEW = ["rlvp", "sft_perfect"]


def command(folder, *changes):
    return [*RUN, f"runs_dir={folder / 'runs'}", f"results_dir={folder / 'results'}", *changes]


def run(folder, *changes):
    done = subprocess.run(command(folder, *changes), cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def records(folder):
    (file,) = (folder / "results").rglob("records.jsonl")
    return file.read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All arms of the main study, killed as soon as one has a checkpoint, and started again."""
    folder = tmp_path_factory.mktemp("whole")
    process = subprocess.Popen(
        command(folder), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 600
    while not list((folder / "runs").glob("7-14/smoke/main/base/*/seed100/state.pt")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    run(folder)
    return folder


def test_every_arm_ends_with_its_numbers_in_every_view(whole):
    settings = compose("7-14", Settings, ["scale=smoke"])
    rows = [json.loads(line) for line in records(whole).splitlines()]
    final = {(row["arm"], row["split"], row["metric"]) for row in rows if row["final"]}
    for arm in settings.chosen():
        branch = settings.branches[arm]
        views = {"hidden", *branch.views}
        wanted = {"success", "clean", "perfect_all", "violations", "violations_per_100", "unused_credits", "kl_start"}
        assert {(arm, view, metric) for view in views for metric in wanted} <= final, arm
        if branch.method == "policy_gradient":
            wanted = {"success_area", "training_steps"} | ({"dead_path_early"} if branch.own_credits else set())
            assert {(arm, "train", metric) for metric in wanted} <= final, arm
    guarded = {row["value"] for row in rows if (row["split"], row["metric"]) == ("guarded", "violations")}
    assert guarded == {0.0}
    (provenance,) = (whole / "results").rglob("provenance.json")
    written = json.loads(provenance.read_text())
    assert written["failed"] == [] and {cell["arm"] for cell in written["cells"]} == set(settings.chosen())


def test_killed_in_the_middle_of_an_arm_it_ends_with_the_records_of_an_undisturbed_run(whole, tmp_path):
    run(tmp_path, f"arms=[{','.join(FEW)}]", "workers=1")
    resumed = [line for line in records(whole).splitlines() if json.loads(line)["arm"] in FEW]
    assert sorted(resumed) == sorted(records(tmp_path).splitlines())
