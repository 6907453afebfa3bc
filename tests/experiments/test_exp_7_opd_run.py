"""On-policy distillation end to end at smoke scale: every arm, a SIGKILL, the same bytes."""

import json
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.config import ConfigError, compose
from experiments.exp_7_opd_distillation.settings import Settings
from tests.experiments.harness import command, kill_when, records, run
from tests.unit.chat_model import chat_folder

EXPERIMENT = "exp_7_opd_distillation"
FEW = ["chain_opd_masked", "dial_sft"]

LOADS = """
import sys
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer
model, tokenizer = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
print(model.generate(**tokenizer("at 1 to 4", return_tensors="pt"), max_new_tokens=2).shape)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All arms, killed as soon as one has a checkpoint, and started again."""
    folder = tmp_path_factory.mktemp("whole")
    kill_when(command(EXPERIMENT, folder), f"{folder}/runs/7-opd/smoke/main/base/*/seed100/state.pt")
    run(command(EXPERIMENT, folder))
    return folder


def test_every_arm_ends_with_numbers_within_its_budget(whole):
    settings = compose("7-opd", Settings, ["scale=smoke"])
    rows = [json.loads(line) for line in records(whole).splitlines()]
    final = {(row["arm"], row["split"], row["metric"]) for row in rows if row["final"]}
    on_the_way = {(row["arm"], row["metric"]) for row in rows if not row["final"]}
    for arm, branch in settings.branches.items():
        assert {(arm, split, "success") for split in ("id", "ood", "k4", "k8", "k12")} <= final, arm
        assert (arm, "lengths", "decay") in final
        if branch.method != "none":
            assert {(arm, "success"), (arm, "flops"), (arm, "success_at_compute")} <= on_the_way, arm
    assert {("chain_sft_few", "few", "memorised"), ("dial_start", "after", "teacher_right/narrow")} <= final
    (provenance,) = (whole / "results").rglob("provenance.json")
    written = json.loads(provenance.read_text())
    assert written["failed"] == []
    for cell in written["cells"]:
        branch = settings.branches[cell["arm"]]
        budget = settings.task_config(cell["arm"]).branch_flops
        assert cell["flops"] == 0 if branch.method == "none" else 0.9 * budget < cell["flops"] < 3 * budget, cell
    (report,) = (whole / "results").rglob("report.md")
    assert "How soon GRPO" in report.read_text()


def test_a_trained_model_loads_with_plain_transformers(whole):
    folder = whole / "runs/7-opd/smoke/main/base/dial_opd/seed100/model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.num_parameters() > 10_000 and tokenizer.decode(tokenizer("at 3 to 7")["input_ids"]) == "at 3 to 7"


def test_killed_in_the_middle_of_an_arm_it_ends_with_the_records_of_an_undisturbed_run(whole, tmp_path):
    run(command(EXPERIMENT, tmp_path, f"arms=[{','.join(FEW)}]", "workers=1"))
    resumed = [line for line in records(whole).splitlines() if json.loads(line)["arm"] in FEW]
    assert sorted(resumed) == sorted(records(tmp_path).splitlines())


def test_the_gpu_scale_trains_adapters_that_load_with_plain_peft(tmp_path):
    paths = [f"{key}={chat_folder(tmp_path / key, seed)}" for seed, key in enumerate(("model_path", "teacher_path"))]
    small = [
        f"{task}.{key}"
        for task in ("chain", "dial")
        for key in ("student_steps=1", "teacher_steps=1", "train_items=6", "few_items=2")
    ]
    small += ["chain.episodes_per_step=4", "dial.episodes_per_step=4", "chain.branch_flops=2e8", "dial.branch_flops=4e8"]
    small += ["dial.narrow_steps=1", "pretraining.batch_size=2", "evaluation.items=1", "evaluation.curve_items=2"]
    arms = ["chain_start", "chain_grpo_steps", "chain_opd_masked", "dial_sft", "dial_opd_unmasked", "dial_opd_narrow"]
    machine = ["device=cpu", "dtype=float32", "seeds=1", "workers=1", "lora.sft_rank=4", "lora.rl_rank=2", "sft.batch_size=4"]
    run(command(EXPERIMENT, tmp_path, *paths, *small, *machine, f"arms=[{','.join(arms)}]", scale="gpu"))
    rows = [json.loads(line) for line in records(tmp_path).splitlines()]
    assert {row["arm"] for row in rows if row["final"] and (row["split"], row["metric"]) == ("id", "success")} == set(arms)
    adapters = {file.parts[-4]: file for file in (tmp_path / "runs").rglob("adapter_config.json")}
    ranks = {arm: json.loads(file.read_text())["r"] for arm, file in adapters.items()}
    assert ranks == {arm: 4 if arm == "dial_sft" else 2 for arm in arms if arm != "chain_start"}
    folder = str(adapters["dial_opd_narrow"].parent)
    assert "torch.Size" in run([sys.executable, "-c", LOADS, folder], cwd="/")


def test_the_gpu_configuration_says_what_it_needs_and_scales_its_rates():
    settings = compose("7-opd", Settings, ["scale=gpu"])
    assert settings.model_path == "Qwen/Qwen3-0.6B" and settings.teacher_path == "Qwen/Qwen3-1.7B"
    assert settings.arm_config("chain_opd").lr == pytest.approx(1e-4) and settings.arm_config("chain_grpo").lr == pytest.approx(
        1e-5
    )
    assert compose("7-opd", Settings, ["scale=gpu", "arms=[chain_opd]", "algo.lr=3e-5"]).arm_config("chain_opd").lr == 3e-5
    for changes, words in (("model_path=null", "name both student and teacher"), ("teacher_path=null", "name both")):
        with pytest.raises(ConfigError, match=words):
            compose("7-opd", Settings, ["scale=gpu", changes])
    with pytest.raises(ConfigError, match="scale=gpu needs a local model folder"):
        compose("7-opd", Settings, ["scale=gpu", "model_path=null", "teacher_path=null"])
