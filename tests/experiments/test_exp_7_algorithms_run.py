"""The comparison end to end at smoke scale: every arm, a SIGKILL, the same bytes, the generated page."""

import json
import re

import pytest

from common.config import compose
from experiments.exp_7_algorithms import figures
from experiments.exp_7_algorithms.settings import Settings
from tests.experiments.harness import ROOT, command, kill_when, records, run

EXPERIMENT = "exp_7_algorithms"
FEW = ["sft", "grpo"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All arms, killed as soon as one has a checkpoint, and started again."""
    folder = tmp_path_factory.mktemp("whole")
    kill_when(command(EXPERIMENT, folder), f"{folder}/runs/7-algorithms/smoke/main/base/*/seed100/state.pt")
    run(command(EXPERIMENT, folder))
    return folder


def test_every_arm_ends_with_numbers_on_both_splits_within_its_budget(whole):
    settings = compose("7-algorithms", Settings, ["scale=smoke"])
    rows = [json.loads(line) for line in records(whole).splitlines()]
    final = {(row["arm"], row["split"], row["metric"]) for row in rows if row["final"]}
    for arm, branch in settings.branches.items():
        wanted = {"success", "length"} | ({"kl_start"} if branch.method != "best_of" else {"success_proxy"})
        assert {(arm, split, metric) for split in ("id", "ood") for metric in wanted} <= final, arm
    assert ("grpo", "train", "zero_early") in final and ("rlhf", "id", "proxy") in final
    (provenance,) = (whole / "results").rglob("provenance.json")
    written = json.loads(provenance.read_text())
    assert written["failed"] == []
    flops = {cell["arm"]: cell["flops"] for cell in written["cells"]}
    assert flops["start"] == 0 and flops["best_of_4"] > flops["best_of_2"] > 0
    for arm, branch in settings.branches.items():
        if branch.method not in ("none", "best_of"):
            assert 0 < flops[arm] < 3 * branch.budget * settings.branch_flops, arm  # a step is most of a smoke budget


def test_the_page_takes_the_table_of_a_result(whole, tmp_path):
    (result,) = (whole / "results").rglob("provenance.json")
    laptop = tmp_path / "results" / "7-algorithms" / "laptop"
    laptop.mkdir(parents=True)
    for name in ("records.jsonl", "provenance.json"):
        (laptop / name).write_bytes((result.parent / name).read_bytes())
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "algorithms.md").write_text(f"before\n\n{figures.BLOCK[0]}\n\n{figures.BLOCK[1]}\n\nafter\n")
    ((path, text),) = figures.pages(tmp_path, tmp_path / "results").items()
    assert path.name == "algorithms.md" and text.startswith("before\n") and text.endswith("after\n")
    assert "| GRPO | " in text and "../results/7-algorithms/laptop/report.md" in text


def test_killed_in_the_middle_of_an_arm_it_ends_with_the_records_of_an_undisturbed_run(whole, tmp_path):
    run(command(EXPERIMENT, tmp_path, f"arms=[{','.join(FEW)}]", "workers=1"))
    resumed = [line for line in records(whole).splitlines() if json.loads(line)["arm"] in FEW]
    assert sorted(resumed) == sorted(records(tmp_path).splitlines())


def test_the_entries_of_the_page_name_files_that_are_there():
    text = (ROOT / "docs" / "algorithms.md").read_text()
    for name in re.findall(r"`((?:common|conf)/[\w/.]+\.(?:py|yaml))`", text):
        assert (ROOT / name).is_file(), name
