"""7-15 end to end at smoke scale: every kind of arm, a SIGKILL, the same bytes, a model that loads with plain transformers."""

import json
import sys

import pytest

from common.config import compose
from common.sandbox import isolation
from experiments.exp_7_15_retool.settings import Settings
from tests.experiments.harness import command, kill_when, records, run

FEW = ["text_rl", "tool_rl"]

if not isolation().strong:
    pytest.skip(isolation().why, allow_module_level=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All arms of smoke, killed as soon as one has a checkpoint, and started again."""
    folder = tmp_path_factory.mktemp("whole")
    kill_when(command("exp_7_15_retool", folder), str(folder / "runs/7-15/smoke/main/base/*/seed100/state.pt"))
    run(command("exp_7_15_retool", folder))
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
    run(command("exp_7_15_retool", tmp_path, f"arms=[{','.join(FEW)}]", "workers=1"))
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
    assert "torch.Size" in run([sys.executable, "-c", LOADS, str(folder)])
