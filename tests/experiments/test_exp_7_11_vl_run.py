"""7-11-vl end to end at smoke scale: the public command, a SIGKILL, the same bytes, a model that loads."""

import json
import re
import subprocess
import sys

import pytest
import torch

from common.config import ConfigError, compose
from common.jobs import Cell
from common.study import run_study
from experiments.exp_7_11_vl_general_points import run
from experiments.exp_7_11_vl_general_points.settings import Settings
from tests.experiments.harness import command, kill_when, records

ARMS = ["start", "ppo", "grpo_frozen"]


def changes(folder):
    return [f"arms=[{','.join(ARMS)}]", f"runs_dir={folder / 'runs'}", f"results_dir={folder / 'results'}"]


def go_on(folder):
    """Runs the cells that are not done in this process, which has torch loaded, and gathers them."""
    torch.set_num_threads(1)
    settings = compose("7-11-vl", Settings, ["scale=smoke", *changes(folder)])
    for arm in ARMS:
        run.run_cell(settings, arm, 100)
    cells = [Cell(arm, 100) for arm in ARMS]
    assert run_study(settings, [], cells, claims=run.CLAIMS, figures=run.figures, sections=run.sections) == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    go_on(folder)
    return folder


def test_records_cover_every_arm_split_and_metric(whole):
    rows = [json.loads(line) for line in records(whole).splitlines()]
    final = {(row["arm"], row["split"], row["metric"]) for row in rows if row["final"]}
    for arm in ("start", "ppo", "grpo_frozen"):
        for split in ("id", "rule", "visual", "both"):
            for metric in ("success", "recognition", "cards", "correlation", "kl_start", "failure/number"):
                assert (arm, split, metric) in final
        for metric in ("recognition/A", "recognition/suit H", "recognition/suit D"):
            assert (arm, "visual", metric) in final
        along = [row for row in rows if row["arm"] == arm and row["metric"] == "recognition/suit H" and not row["final"]]
        assert along[0]["step"] == 0 and (len(along) > 1) == (arm != "start")  # along training too
    start = [row for row in rows if row["arm"] == "start" and row["metric"] == "kl_start"]
    assert all(abs(row["value"]) < 1e-4 for row in start)
    (report,) = (whole / "results").rglob("report.md")
    assert "GRPO, frozen vision encoder" in report.read_text() and "no verdict" in report.read_text()


def test_the_frozen_arm_keeps_its_eyes_and_the_others_do_not(whole):
    from common.checkpoints import load_model

    (start,) = (whole / "runs/stages").glob("start-*")
    cells = whole / "runs/7-11-vl/smoke/main/base"
    before = load_model(start / "model")[0].state_dict()
    for arm, moved in (("ppo", True), ("grpo_frozen", False)):
        after = load_model(cells / arm / "seed100" / "model")[0].state_dict()
        changed = any("vision_tower" in name and bool((value != before[name]).any()) for name, value in after.items())
        assert changed is moved
        spent = json.loads((cells / arm / "seed100" / "cost.json").read_text())
        assert spent["flops"] >= 3e9


def test_killed_in_the_midst_of_an_arm_it_ends_with_the_same_records(whole, tmp_path):
    """The command that `make exp-7-11-vl SCALE=smoke` runs, killed with its workers, then gone on with."""
    line = command("exp_7_11_vl_general_points", tmp_path, f"arms=[{','.join(ARMS)}]", "workers=1")
    kill_when(line, f"{tmp_path}/runs/7-11-vl/smoke/main/base/ppo/seed100/state.pt")
    cells = tmp_path / "runs/7-11-vl/smoke/main/base"
    assert (cells / "start/seed100/DONE").is_file() and not (cells / "ppo/seed100/DONE").exists()
    go_on(tmp_path)
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
    words = (
        f"model_path={base}", f"runs_dir={tmp_path}", "device=cpu", "dtype=float32", "start_steps=1", "branch_flops=1e9",
        "max_new_tokens=8", "evaluation.orders=1", "evaluation.hands=2", "evaluation.curve_hands=2", "evaluation.points=1",
        "train_hands=8", "sft.batch_size=8", "start.batch_size=8", "sft.micro_batch=4",
    )  # fmt: skip
    settings = compose("7-11-vl", Settings, ["scale=gpu", *words])
    done = run.run_cell(settings, "sft", 100)
    assert len(done["stages"]) == 2 and done["headline"].startswith("success id ")
    assert list(tmp_path.rglob("sft/seed100/model/model.safetensors"))


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
