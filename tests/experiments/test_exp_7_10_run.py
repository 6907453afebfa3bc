"""7-10 end to end at smoke scale: every arm, a SIGKILL, the same bytes, a model that loads, a pre-trained one in its place."""

import json
import sys

import pytest

from common.config import compose
from common.models import DecoderConfig, build_decoder
from experiments.exp_7_10_adaptthink import data
from experiments.exp_7_10_adaptthink.settings import Settings
from tests.experiments.harness import command, kill_when, records, refusal, run

EXPERIMENT = "exp_7_10_adaptthink"
FEW = ["start", "adaptthink"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All arms, killed as soon as one has a checkpoint, and started again."""
    folder = tmp_path_factory.mktemp("whole")
    kill_when(command(EXPERIMENT, folder), f"{folder}/runs/7-10/smoke/main/base/*/seed100/state.pt")
    run(command(EXPERIMENT, folder))
    return folder


def test_every_arm_ends_with_numbers_on_every_split(whole):
    settings = compose("7-10", Settings, ["scale=smoke"])
    rows = [json.loads(line) for line in records(whole).splitlines()]
    final = {(row["arm"], row["split"], row["metric"]) for row in rows if row["final"]}
    metrics = ("success", "length", "saving", "nothink_p", "nothink_share", "success_think", "success_nothink")
    assert {settings.branches[arm].method for arm in settings.chosen()} == {
        branch.method for branch in settings.branches.values()
    }
    for arm in settings.chosen():
        assert {(arm, split, metric) for split in ("id", "level1", "level6", "ood") for metric in metrics} <= final, arm
    (provenance,) = (whole / "results").rglob("provenance.json")
    written = json.loads(provenance.read_text())
    assert written["failed"] == []
    flops = {cell["arm"]: cell["flops"] for cell in written["cells"]}
    assert flops["start"] == flops["never_think"] == 0
    assert all(flops[arm] > 0 for arm in settings.chosen() if settings.branches[arm].method != "none")
    (report,) = (whole / "results").rglob("report.md")
    assert "Where the clip holds the share" in report.read_text()


def test_killed_and_started_again_it_ends_with_the_records_of_an_undisturbed_run(whole, tmp_path):
    run(command(EXPERIMENT, tmp_path, f"arms=[{','.join(FEW)}]", "workers=1"))
    resumed = [line for line in records(whole).splitlines() if json.loads(line)["arm"] in FEW]
    assert sorted(resumed) == sorted(records(tmp_path).splitlines())


LOADS = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
turns = [{"role": "user", "content": "Compute 7+3-2."}]
text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
assert text.endswith("<think>"), text
ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
print(model.generate(**ids, max_new_tokens=3).shape)
"""


def test_a_trained_model_loads_with_plain_transformers(whole):
    folder = whole / "runs/7-10/smoke/main/base/adaptthink/seed100/model"
    assert "torch.Size" in run([sys.executable, "-c", LOADS, str(folder)], cwd="/")


@pytest.fixture
def pretrained(tmp_path):
    """A tiny model in the place of DeepSeek-R1-Distill, and a file of problems it can read."""
    tokenizer = data.build_tokenizer()
    shape = DecoderConfig(hidden=16, layers=1, heads=2, kv_heads=2, feedforward=24, max_length=64)
    build_decoder(shape, tokenizer, 0).save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    rows = [{"question": f"Compute {n}+1.", "answer": str(n + 1)} for n in range(12)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def on_files(folder, *changes):
    sums = folder / "sums.jsonl"
    own = [f"model_path={folder / 'tiny'}", f"problems={{train: {sums}, test: {{sums: {sums}}}}}", "lora.enabled=true"]
    return command(EXPERIMENT, folder, *own, "arms=[adaptthink]", "workers=1", "max_new_tokens=6", *changes)


def test_a_pretrained_model_learns_from_files_with_an_adapter(pretrained):
    run(on_files(pretrained))
    rows = [json.loads(line) for line in records(pretrained).splitlines()]
    assert {row["split"] for row in rows} == {"sums", "id"}
    (adapter,) = (pretrained / "runs").rglob("adaptthink/seed100/model/adapter_model.safetensors")
    assert adapter.stat().st_size > 0


def test_a_template_that_hides_the_mode_token_stops_the_run(pretrained):
    hidden = "chat_template='{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}'"
    assert "must end a prompt with one <think>" in refusal(on_files(pretrained, hidden))


def test_the_gpu_configuration_is_the_published_one():
    settings = compose("7-10", Settings, ["scale=gpu"])
    config = settings.arm_config("adaptthink")
    assert settings.model_path == "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
    assert (config.lr, config.delta, config.group_size, config.prompts_per_step) == (2e-6, 0.05, 16, 128)
    assert (config.clip_low, config.temperature, config.ratio) == (0.2, 0.6, "sequence")
    assert set(settings.problems.test) == {"gsm8k", "math500", "aime2024"}
