"""SimpleVLA-RL through its public command at smoke scale: every arm, and killed and resumed."""

import json

import pytest

from tests.experiments.harness import command, kill_when, records, run

EXPERIMENT = "exp_7_13_simplevla"
MAIN = ("sft", "full", "plain", "process", "ppo")
MORE = ("single", "pixels", "tight")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The arms of the main study and some of the ablation, undisturbed."""
    folder = tmp_path_factory.mktemp("whole")
    run(command(EXPERIMENT, folder, f"arms=[{','.join((*MAIN, *MORE))}]", "workers=1"))
    return folder


def test_every_arm_ends_with_its_numbers_in_every_view(whole):
    rows = [json.loads(line) for line in records(whole).splitlines()]
    final = {(row["arm"], row["split"], row["metric"]) for row in rows if row["final"]}
    for arm in (*MAIN, *MORE):
        views = {"seen", "space", "object", "goal"}
        wanted = {"success", "progress", "pushcut", "height", "control_steps"}
        assert {(arm, view, metric) for view in views for metric in wanted} <= final, arm
        if arm != "sft":
            assert {(arm, "train", metric) for metric in ("success_area", "training_steps", "dead_early")} <= final, arm
    assert ("sft", "demonstration", "film") in final
    (report,) = (whole / "results").rglob("report.md")
    assert "## Films" in report.read_text() and (report.parent / "figures/film-demonstration-sft.gif").stat().st_size > 1000
    (provenance,) = (whole / "results").rglob("provenance.json")
    assert json.loads(provenance.read_text())["failed"] == []


def test_killed_in_the_middle_of_an_arm_it_ends_with_the_records_of_an_undisturbed_run(whole, tmp_path):
    line = command(EXPERIMENT, tmp_path, "arms=[full,ppo]", "workers=1")
    kill_when(line, f"{tmp_path}/runs/7-13/smoke/main/base/*/seed100/state.pt")
    run(line)
    undisturbed = [row for row in records(whole).splitlines() if json.loads(row)["arm"] in ("full", "ppo")]
    assert sorted(undisturbed) == sorted(records(tmp_path).splitlines())
