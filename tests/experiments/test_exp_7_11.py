"""7-11 end to end at smoke scale: the public command, a SIGKILL at three points, the same bytes, a model that loads."""

import json
import os
import re
import subprocess
import sys

import pytest

from common.config import ConfigError, compose
from experiments.exp_7_11_general_points.settings import Settings
from tests.experiments.harness import ROOT, command, kill_when, records, run

EXPERIMENT = "exp_7_11_general_points"
ARMS = "arms=[start,sft_one,grpo]"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The front door itself: `make exp-7-11 SCALE=smoke`."""
    folder = tmp_path_factory.mktemp("whole")
    arguments = " ".join([f"runs_dir={folder / 'runs'}", f"results_dir={folder / 'results'}", ARMS])
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    line = ["make", "exp-7-11", "SCALE=smoke", f"ARGS={arguments}"]
    done = subprocess.run(line, cwd=ROOT, env=plain, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_records_cover_every_arm_split_and_metric(whole):
    rows = [json.loads(line) for line in records(whole).splitlines()]
    final = {(row["arm"], row["split"], row["metric"]) for row in rows if row["final"]}
    for arm in ("start", "sft_one", "grpo"):
        for split in ("id", "ood"):
            for metric in ("success", "recognition", "training_rule", "kl_start", "failure/number"):
                assert (arm, split, metric) in final
        assert (arm, "ood", "training_rule_probability") in final
    assert all(row["seed"] == 100 and row["variant"] is None for row in rows)
    start = [row for row in rows if row["arm"] == "start" and row["metric"] == "kl_start"]
    assert all(abs(row["value"]) < 1e-4 for row in start)


def test_the_report_stands_beside_the_records(whole):
    (report,) = (whole / "results").rglob("report.md")
    text = report.read_text()
    assert "GRPO" in text and "no verdict" in text  # one seed never yields a verdict
    assert (report.parent / "report.html").stat().st_size > 10_000


def test_rft_from_a_start_without_a_right_answer_stays_at_the_start(tmp_path):
    run(command(EXPERIMENT, tmp_path, "arms=[rft]"))
    rows = [json.loads(line) for line in records(tmp_path).splitlines()]
    assert [row["value"] for row in rows if row["metric"] == "success" and row["final"]] == [0.0, 0.0, 0.0]


def test_arms_of_the_ablation_study_train_and_answer_again(tmp_path):
    changes = ["study=ablation", "arms=[grpo_after_overfit,iterations_3]", "evaluation.curve_hands=3"]
    run(command(EXPERIMENT, tmp_path, *changes))
    rows = [json.loads(line) for line in records(tmp_path).splitlines()]
    length = {row["arm"]: row["value"] for row in rows if row["metric"] == "length" and row["split"] == "ood"}
    assert length["iterations_3"] > 2 * length["grpo_after_overfit"]  # three answers, none of them right
    assert "3 answers" in next((tmp_path / "results").rglob("report.md")).read_text()


def test_killed_at_three_points_it_ends_with_the_same_records(whole, tmp_path):
    line = command(EXPERIMENT, tmp_path, ARMS)
    kill_when(line, f"{tmp_path}/runs/stages/base-*.partial/metrics.jsonl")
    kill_when(line, f"{tmp_path}/runs/stages/start-*/stage.json")  # between two stages
    kill_when(line, f"{tmp_path}/runs/7-11/smoke/main/base/sft_one/seed100/state.pt")
    run(line)
    assert records(tmp_path) == records(whole)


def test_the_trained_model_loads_in_plain_transformers(whole):
    folder = whole / "runs/7-11/smoke/main/base/grpo/seed100/model"
    code = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer; "
        "m = AutoModelForCausalLM.from_pretrained(sys.argv[1]); t = AutoTokenizer.from_pretrained(sys.argv[1]); "
        "print(t.decode(m.generate(**t('4*3', return_tensors='pt'), max_new_tokens=2)[0]))"
    )
    assert "4*3" in run([sys.executable, "-c", code, str(folder)], cwd="/")


def test_the_gpu_scale_trains_adapters_on_a_local_model_folder(whole, tmp_path):
    base = next((whole / "runs/stages").glob("base-*")) / "model"
    changes = [
        f"model_path={base}", "device=cpu", "dtype=float32", "seeds=1", "start_steps=2",
        "branch_flops=3e9", "max_new_tokens=48", "train_hands=16", "evaluation.orders=1", "evaluation.curve_hands=4",
        "evaluation.points=1", "arms=[sft_one,ppo]", "lora.sft_rank=4", "lora.rl_rank=2",
        "branches.ppo.changes.prompts_per_step=16",
    ]  # fmt: skip
    run(command(EXPERIMENT, tmp_path, *changes, scale="gpu"))
    adapters = sorted((tmp_path / "runs").rglob("adapter_config.json"))
    assert [json.loads(file.read_text())["r"] for file in adapters] == [2, 4]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("algo.lrr=1", "algo.lr"),
        ("branches.grpo.method=rll", "none, sft, rft, rl"),
        ("arms=[gropo]", "grpo"),
        ("corpus.full=0.9", "sum to 1"),
        ("model.hidden=95", "hidden"),
        ("branch_flops=-1", "branch_flops"),
        ("scale=huge", "smoke"),
    ],
)
def test_bad_values_are_refused_with_a_sentence(change, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        compose("7-11", Settings, ["scale=smoke", change])


def test_a_bad_value_ends_the_command_at_once_and_leaves_nothing(tmp_path):
    line = command(EXPERIMENT, tmp_path, "algo.lrr=1")
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "algo.lr" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())
