"""7-9 end to end at smoke scale: two SIGKILLs, the same bytes, a model that loads."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = [sys.executable, "-m", "experiments.exp_7_09_cot_distillation.run", "scale=smoke", "workers=1"]
ARMS = ["start", "teacher", "unfiltered", "mixed", "star", "grpo"]
FEW = ["unfiltered", "star"]


def command(folder, arms):
    return [*RUN, f"runs_dir={folder / 'runs'}", f"results_dir={folder / 'results'}", f"arms=[{','.join(arms)}]"]


def run(folder, arms):
    done = subprocess.run(command(folder, arms), cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def records(folder):
    (file,) = (folder / "results").rglob("records.jsonl")
    return file.read_bytes().splitlines()


def kill_when(folder, pattern):
    """Starts the run and kills its whole process group the moment a file matches and holds something."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command(folder, ARMS), cwd=ROOT, start_new_session=True, **quiet)
    deadline = time.monotonic() + 300
    while not any(path.stat().st_size for path in (folder / "runs").glob(pattern)):
        assert process.poll() is None and time.monotonic() < deadline, f"nothing matched {pattern}"
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Killed while a teacher answers and while an arm trains, then run to its end."""
    folder = tmp_path_factory.mktemp("whole")
    kill_when(folder, "stages/answers-*.partial/answers.jsonl")
    kill_when(folder, "7-9/smoke/main/**/unfiltered/seed100/state.pt")
    run(folder, ARMS)
    return folder


def test_every_arm_ends_with_numbers_on_both_splits(whole):
    rows = [json.loads(line) for line in records(whole)]
    final = {(row["arm"], row["split"], row["metric"]) for row in rows if row["final"]}
    for arm in ARMS:
        wanted = {"success", "length", "verification", "backtracking", "slip", "caught", "recovered"}
        assert {(arm, split, metric) for split in ("id", "ood") for metric in wanted} <= final, arm
        assert (arm, "train", "imitated") in final
    counts = {row["metric"]: row["value"] for row in rows if (row["arm"], row["split"]) == ("mixed", "data")}
    removed = sum(counts[f"filter/{name}"] for name in ("cut", "wrong", "repeated", "over_cap", "kept"))
    assert counts["filter/sampled"] == removed == 12 * 8
    (provenance,) = (whole / "results").rglob("provenance.json")
    cells = {cell["arm"]: cell for cell in json.loads(provenance.read_text())["cells"]}
    assert cells["start"]["flops"] == cells["teacher"]["flops"] == 0 < cells["grpo"]["flops"]
    assert cells["mixed"]["tokens_forward"] > 0  # the teachers' sampling


def test_killed_twice_it_ends_with_the_records_of_an_undisturbed_run(whole, tmp_path):
    run(tmp_path, FEW)
    resumed = [line for line in records(whole) if json.loads(line)["arm"] in FEW]
    assert resumed == records(tmp_path)
    (left,) = (whole / "runs/stages").glob("answers-text-*/answers.jsonl")
    (right,) = (tmp_path / "runs/stages").glob("answers-text-*/answers.jsonl")
    assert left.read_bytes() == right.read_bytes()


def test_the_trained_model_loads_in_plain_transformers(whole):
    (folder,) = (whole / "runs/7-9").rglob("unfiltered/seed100/model")
    code = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer; "
        "m = AutoModelForCausalLM.from_pretrained(sys.argv[1]); t = AutoTokenizer.from_pretrained(sys.argv[1]); "
        "print(t.decode(m.generate(**t('Compute 4+3', return_tensors='pt'), max_new_tokens=2)[0]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0 and "Compute 4+3" in done.stdout, done.stderr
