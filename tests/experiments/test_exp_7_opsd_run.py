"""On-policy self-distillation end to end at smoke scale: every arm, a SIGKILL, the same bytes."""

import json
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.config import ConfigError, compose
from experiments.exp_7_opsd_self_distillation.settings import Settings
from tests.experiments.harness import command, kill_when, records, run
from tests.unit.chat_model import chat_folder

EXPERIMENT = "exp_7_opsd_self_distillation"
FEW = ["rlvr", "opsd_moving", "sft_solutions"]

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
    kill_when(command(EXPERIMENT, folder), f"{folder}/runs/7-opsd/smoke/main/base/*/seed100/state.pt")
    run(command(EXPERIMENT, folder))
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
    run(command(EXPERIMENT, tmp_path, f"arms=[{','.join(FEW)}]", "workers=1"))
    resumed = [line for line in records(whole).splitlines() if json.loads(line)["arm"] in FEW]
    assert sorted(resumed) == sorted(records(tmp_path).splitlines())


def test_the_gpu_scale_trains_adapters_that_load_with_plain_peft(tmp_path):
    small = ["pretraining_steps=1", "pretraining.batch_size=2", "train_items=4", "episodes_per_step=4", "branch_flops=2e8"]
    small += ["evaluation.items=2", "evaluation.samples=1", "evaluation.curve_items=2", "sft.batch_size=4"]
    arms = ["base", "sft_solutions", "opsd_solution", "opsd_moving", "codes_opsd"]
    machine = ["device=cpu", "dtype=float32", "seeds=1", "workers=1", "lora.sft_rank=4", "lora.rl_rank=2"]
    source = f"model_path={chat_folder(tmp_path / 'model')}"
    run(command(EXPERIMENT, tmp_path, source, *small, *machine, f"arms=[{','.join(arms)}]", scale="gpu"))
    rows = [json.loads(line) for line in records(tmp_path).splitlines()]
    assert {row["arm"] for row in rows if row["final"] and row["metric"] == "entropy"} == set(arms)
    adapters = {file.parts[-4]: file for file in (tmp_path / "runs").rglob("adapter_config.json")}
    ranks = {arm: json.loads(file.read_text())["r"] for arm, file in adapters.items()}
    assert ranks == {"sft_solutions": 4, "opsd_solution": 2, "opsd_moving": 2, "codes_opsd": 2}
    folder = str(adapters["opsd_solution"].parent)
    assert "torch.Size" in run([sys.executable, "-c", LOADS, folder], cwd="/")


def test_the_gpu_configuration_is_the_published_one_where_it_can_be():
    settings = compose("7-opsd", Settings, ["scale=gpu"])
    config = settings.arm_config("opsd_solution")
    assert settings.model_path == "Qwen/Qwen3-1.7B" and (settings.lora.rl_rank, settings.lora.alpha_over_rank) == (64, 2.0)
    assert (config.lr, config.objective, config.beta, config.self_teacher) == (2e-4, "jsd", 0.5, "fixed")
    with pytest.raises(ConfigError, match="scale=gpu needs a local model folder"):
        compose("7-opsd", Settings, ["scale=gpu", "model_path=null"])
