"""On-policy self-distillation end to end at smoke scale: every arm, a SIGKILL, the same bytes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.config import compose
from experiments.exp_7_opsd_self_distillation.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
RUN = [sys.executable, "-m", "experiments.exp_7_opsd_self_distillation.run", "scale=smoke"]
FEW = ["rlvr", "opsd_moving", "sft_solutions"]


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
    """All arms, killed as soon as one has a checkpoint, and started again."""
    folder = tmp_path_factory.mktemp("whole")
    process = subprocess.Popen(
        command(folder), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 600
    while not list((folder / "runs").glob("7-opsd/smoke/main/base/*/seed100/state.pt")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    run(folder)
    return folder


def test_every_arm_ends_with_numbers_within_its_budget(whole):
    settings = compose("7-opsd", Settings, ["scale=smoke"])
    rows = [json.loads(line) for line in records(whole).splitlines()]
    final = {(row["arm"], row["split"], row["metric"]) for row in rows if row["final"]}
    on_the_way = {(row["arm"], row["metric"]) for row in rows if not row["final"]}
    for arm, branch in settings.branches.items():
        kind = branch.kind
        wanted = {(arm, split, metric) for split in (kind, f"{kind}-train") for metric in ("success", "entropy", "checks")}
        assert wanted <= final, arm
        if branch.method != "none":
            assert {(arm, "success"), (arm, "flops"), (arm, "sampled")} <= on_the_way, arm
    assert {("base", "steps", "teacher_success/solution"), ("codes_base", "codes", "teacher_success/table")} <= final
    (provenance,) = (whole / "results").rglob("provenance.json")
    written = json.loads(provenance.read_text())
    assert written["failed"] == []
    for cell in written["cells"]:
        method, budget = settings.branches[cell["arm"]].method, settings.branch_flops
        assert cell["flops"] == 0 if method == "none" else 0.9 * budget < cell["flops"] < 3 * budget, cell
    (report,) = (whole / "results").rglob("report.md")
    assert "How soon RLVR" in report.read_text()


def test_a_trained_model_loads_with_plain_transformers(whole):
    folder = whole / "runs/7-opsd/smoke/main/base/opsd_solution/seed100/model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.num_parameters() > 10_000 and tokenizer.decode(tokenizer("Find 3 7")["input_ids"]) == "Find 3 7"


def test_killed_in_the_middle_of_an_arm_it_ends_with_the_records_of_an_undisturbed_run(whole, tmp_path):
    run(tmp_path, f"arms=[{','.join(FEW)}]", "workers=1")
    resumed = [line for line in records(whole).splitlines() if json.loads(line)["arm"] in FEW]
    assert sorted(resumed) == sorted(records(tmp_path).splitlines())
