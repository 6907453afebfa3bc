"""RLVP through its public command: every arm at smoke scale, killed and resumed."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.config import compose
from common.models import DecoderConfig, build_decoder
from experiments.exp_7_14_rlvp import data
from experiments.exp_7_14_rlvp.run import run_cell
from experiments.exp_7_14_rlvp.settings import Settings
from tests.experiments.harness import command, kill_when, records, run

EXPERIMENT = "exp_7_14_rlvp"
SMOKE = compose("7-14", Settings, ["scale=smoke"])
ALL = [*SMOKE.chosen(), "dapo", "rlvp_mixed", "rlvp_judged", "step_groups"]  # the main study, and what the ablation adds
FEW = "arms=[rlvp,sft_perfect]"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All arms, undisturbed."""
    folder = tmp_path_factory.mktemp("whole")
    run(command(EXPERIMENT, folder, f"arms=[{','.join(ALL)}]", "workers=1"))
    return folder


def test_every_arm_ends_with_its_numbers_in_every_view(whole):
    settings = SMOKE
    rows = [json.loads(line) for line in records(whole).splitlines()]
    final = {(row["arm"], row["split"], row["metric"]) for row in rows if row["final"]}
    for arm in ALL:
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
    assert written["failed"] == [] and {cell["arm"] for cell in written["cells"]} == set(ALL)
    (report,) = (whole / "results").rglob("report.md")
    for heading in ("What the policies do: FileOps, two stages", "Which rules are broken", "Dead groups"):
        assert heading in report.read_text()


def test_killed_in_the_middle_of_an_arm_it_ends_with_the_records_of_an_undisturbed_run(whole, tmp_path):
    kill_when(command(EXPERIMENT, tmp_path, FEW, "workers=1"), f"{tmp_path}/runs/7-14/smoke/main/base/*/seed100/state.pt")
    run(command(EXPERIMENT, tmp_path, FEW, "workers=1"))
    undisturbed = [line for line in records(whole).splitlines() if json.loads(line)["arm"] in ("rlvp", "sft_perfect")]
    assert sorted(undisturbed) == sorted(records(tmp_path).splitlines())


def test_a_trained_model_loads_with_plain_transformers(whole):
    folder = whole / "runs/7-14/smoke/main/base/rlvp/seed100/model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    text = "create s1/web.cfg port=1 size=2 mode=3; "
    assert model.num_parameters() > 10_000 and tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_a_pretrained_model_calls_by_json_and_learns_with_an_adapter(tmp_path):
    tokenizer = data.build_tokenizer("fileops")
    shape = DecoderConfig(hidden=16, layers=1, heads=2, kv_heads=2, feedforward=24, max_length=4096)
    build_decoder(shape, tokenizer, 0).save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    own = [f"model_path={tmp_path / 'tiny'}", "lora.enabled=true", "max_new_tokens=4", "worlds.files.flops=1e6"]
    settings = compose("7-14", Settings, ["scale=smoke", f"runs_dir={tmp_path / 'runs'}", "arms=[rlvp]", *own])
    run_cell(settings, "rlvp", 100)
    (file,) = (tmp_path / "runs").rglob("rlvp/seed100/records.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    found = {row["metric"]: row["value"] for row in rows if row["final"] and row["split"] == "hidden"}
    assert found["malformed"] == found["calls"] == 12 and found["success"] == 0
    (adapter,) = (tmp_path / "runs").rglob("rlvp/seed100/model/adapter_model.safetensors")
    assert adapter.stat().st_size > 0
