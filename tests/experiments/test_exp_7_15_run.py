"""7-15 end to end at smoke scale: every kind of arm, a SIGKILL, the same bytes, a model that loads with plain transformers."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.config import compose
from common.sandbox import isolation
from experiments.exp_7_15_retool.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
RUN = [sys.executable, "-m", "experiments.exp_7_15_retool.run", "scale=smoke"]
FEW = ["text_rl", "tool_rl"]

if not isolation().strong:
    pytest.skip(isolation().why, allow_module_level=True)


def command(folder, *changes):
    return [*RUN, f"runs_dir={folder / 'runs'}", f"results_dir={folder / 'results'}", *changes]


def run(folder, *changes):
    done = subprocess.run(command(folder, *changes), cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def records(folder):
    (file,) = (folder / "results").rglob("records.jsonl")
    return file.read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All arms of smoke, killed as soon as one has a checkpoint, and started again."""
    folder = tmp_path_factory.mktemp("whole")
    process = subprocess.Popen(
        command(folder), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 300
    while not list((folder / "runs").glob("7-15/smoke/main/base/*/seed100/state.pt")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    run(folder)
    return folder


def test_every_arm_ends_with_numbers_on_every_split(whole):
    settings = compose("7-15", Settings, ["scale=smoke"])
    rows = [json.loads(line) for line in records(whole).splitlines()]
    final = {(row["arm"], row["split"], row["metric"]) for row in rows if row["final"]}
    for arm in settings.chosen():
        for split in ("id", "small", "tower", "long"):
            assert {(arm, split, metric) for metric in ("success", "calls", "length", "mended", "code_ok")} <= final, arm
    isolated = {row["arm"]: row["value"] for row in rows if row["metric"] == "isolated"}
    assert isolated == {arm: 1.0 if settings.branches[arm].tool else None for arm in settings.chosen()}
    (provenance,) = (whole / "results").rglob("provenance.json")
    written = json.loads(provenance.read_text())
    assert written["failed"] == []
    flops = {cell["arm"]: cell["flops"] for cell in written["cells"]}
    for arm in settings.chosen():
        assert (flops[arm] > settings.branch_flops * 0.9) == (settings.branches[arm].method != "none")
    (report,) = (whole / "results").rglob("report.md")
    assert "the sandbox isolated the programs" in report.read_text()


def test_killed_and_started_again_it_ends_with_the_records_of_an_undisturbed_run(whole, tmp_path):
    run(tmp_path, f"arms=[{','.join(FEW)}]", "workers=1")
    resumed = [line for line in records(whole).splitlines() if json.loads(line)["arm"] in FEW]
    assert sorted(resumed) == sorted(records(tmp_path).splitlines())


LOADS = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
turns = [{"role": "user", "content": "Which number times 23 leaves 16 modulo 97?"}]
ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(model.generate(**ids, max_new_tokens=3).shape)
"""


def test_a_trained_model_loads_with_plain_transformers(whole):
    folder = whole / "runs/7-15/smoke/main/base/tool_rl/seed100/model"
    done = subprocess.run([sys.executable, "-c", LOADS, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "torch.Size" in done.stdout, done.stderr
