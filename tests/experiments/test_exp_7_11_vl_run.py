"""7-11-vl end to end at smoke scale: the public command, a SIGKILL at three points, the same bytes, a model that loads."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.config import ConfigError, compose
from experiments.exp_7_11_vl_general_points.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
RUN = [sys.executable, "-m", "experiments.exp_7_11_vl_general_points.run", "scale=smoke", "workers=1"]
ARMS = "arms=[start,sft,ppo,grpo_frozen]"
QUICK = ("evaluation.curve_hands=2", "train_hands=12")


def command(folder, *changes):
    return [*RUN, f"runs_dir={folder / 'runs'}", f"results_dir={folder / 'results'}", *changes]


def run(folder, *changes):
    return subprocess.run(command(folder, *changes), cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


def records(folder):
    (file,) = (folder / "results").rglob("records.jsonl")
    return file.read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The command that `make exp-7-11-vl SCALE=smoke` runs."""
    folder = tmp_path_factory.mktemp("whole")
    done = run(folder, ARMS)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_records_cover_every_arm_split_and_metric(whole):
    rows = [json.loads(line) for line in records(whole).splitlines()]
    final = {(row["arm"], row["split"], row["metric"]) for row in rows if row["final"]}
    for arm in ("start", "sft", "ppo", "grpo_frozen"):
        for split in ("id", "rule", "visual", "both"):
            for metric in ("success", "recognition", "cards", "correlation", "kl_start", "failure/number"):
                assert (arm, split, metric) in final
        for metric in ("recognition/A", "recognition/10", "recognition/suit H"):
            assert (arm, "visual", metric) in final
        steps = {row["step"] for row in rows if row["arm"] == arm and row["metric"] == "recognition/K" and not row["final"]}
        assert 0 in steps and (len(steps) > 1) == (arm != "start")  # along training too
    start = [row for row in rows if row["arm"] == "start" and row["metric"] == "kl_start"]
    assert all(abs(row["value"]) < 1e-4 for row in start)
    (report,) = (whole / "results").rglob("report.md")
    assert "GRPO, frozen vision encoder" in report.read_text() and "no verdict" in report.read_text()


def test_the_frozen_arm_keeps_its_eyes_and_the_others_do_not(whole):
    from common.checkpoints import load_model

    (start,) = (whole / "runs/stages").glob("start-*")
    cells = whole / "runs/7-11-vl/smoke/main/base"
    before = load_model(start / "model")[0].state_dict()
    for arm, moved in (("sft", True), ("ppo", True), ("grpo_frozen", False)):
        after = load_model(cells / arm / "seed100" / "model")[0].state_dict()
        changed = any("vision_tower" in name and bool((value != before[name]).any()) for name, value in after.items())
        assert changed is moved
        spent = json.loads((cells / arm / "seed100" / "cost.json").read_text())
        assert spent["flops"] >= 4e9


def kill_when(folder, pattern, *changes):
    """Starts the run and kills its whole process group the moment a file matches."""
    process = subprocess.Popen(
        command(folder, *changes), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 300
    while not list((folder / "runs").glob(pattern)):
        assert process.poll() is None and time.monotonic() < deadline, f"nothing matched {pattern}"
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_killed_at_two_points_it_ends_with_the_same_records(whole, tmp_path):
    kill_when(tmp_path, "stages/base-*.partial/metrics.jsonl", ARMS)
    kill_when(tmp_path, "7-11-vl/smoke/main/base/ppo/seed100/state.pt", ARMS)
    done = run(tmp_path, ARMS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert records(tmp_path) == records(whole)


def test_the_trained_model_loads_and_sees_in_plain_transformers(whole):
    folder = whole / "runs/7-11-vl/smoke/main/base/grpo_frozen/seed100/model"
    code = (
        "import sys, torch; from transformers import AutoModelForImageTextToText, AutoTokenizer; "
        "m = AutoModelForImageTextToText.from_pretrained(sys.argv[1]); t = AutoTokenizer.from_pretrained(sys.argv[1]); "
        "ids = t('<image>' * 16 + '4*3', return_tensors='pt')['input_ids']; "
        "a, b = (m(input_ids=ids, pixel_values=torch.full((1, 3, 48, 48), v)).logits for v in (0.0, 1.0)); "
        "print('sees', not torch.allclose(a, b))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0 and "sees True" in done.stdout, done.stderr


def test_the_gpu_scale_trains_a_local_model_folder(whole, tmp_path):
    base = next((whole / "runs/stages").glob("base-*")) / "model"
    done = run(
        tmp_path, "scale=gpu", f"model_path={base}", "device=cpu", "dtype=float32", "seeds=1", "start_steps=1",
        "branch_flops=2e9", "max_new_tokens=48", "evaluation.orders=1", "evaluation.curve_hands=2", "evaluation.points=1",
        "train_hands=8", "arms=[sft]", "sft.batch_size=8", "start.batch_size=8",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("branches.grpo.frozenn=true", "branches.grpo.frozen"),
        ("branches.grpo.method=rft", "none, sft, rl"),
        ("arms=[gropo]", "grpo"),
        ("pictures.inks=[red]", "pictures.inks"),
        ("pictures.full=1.5", "pictures.full"),
        ("vision.patch_size=7", "vision.patch_size=7"),
        ("vision.image_size=96", "48 pixels"),
        ("corpus.full=0.9", "sum to 1"),
        ("scale=gpu model_path=null", "model_path"),
    ],
)
def test_bad_values_are_refused_with_a_sentence(change, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        compose("7-11-vl", Settings, ["scale=smoke", *change.split()])
