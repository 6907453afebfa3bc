"""Gathering cells into a result folder: failed ones are named, nothing of another run is overwritten, all is strict."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import Common
from common.jobs import Cell, Failure, cell_folder, mark_done
from common.provenance import collect, command, git_state, machine, packages, pick_rollouts, surprise
from common.records import read_records
from common.runlog import RunLog

LABELS = {"experiment": "toy", "scale": "smoke", "variant": None}
CELLS = [Cell(arm, seed) for seed in (101, 100) for arm in ("sft", "grpo")]


def run_cell(runs: Path, cell: Cell, variant: str | None = None, done: bool = True) -> None:
    folder = cell_folder(runs, cell)
    with RunLog(folder, {**LABELS, "variant": variant, "arm": cell.arm, "seed": cell.seed}, quiet=True) as log:
        for step in (2, 1):
            log.record(split="ood", metric="success", value=cell.seed / 1000 * step, n=4, step=step, final=step == 2)
        log.rollouts([{"text": f"{cell.name} {index}", "reward": index / 10, "success": index > 7} for index in range(10)])
        log.cost(flops=100.0, tokens_trained=10)
    if done:
        mark_done(folder, "key")


def test_collect_sorts_records_sums_costs_and_names_failed_cells(tmp_path):
    for cell in CELLS[:3]:
        run_cell(tmp_path / "runs", cell)
    run_cell(tmp_path / "runs", CELLS[3], done=False)
    failure = Failure("grpo-seed100", "Traceback (most recent call last):\n  File ...\nValueError: boom")
    results = tmp_path / "results"
    stage = tmp_path / "runs" / "base-0123"
    stage.mkdir()
    (stage / "stage.json").write_text(json.dumps({"name": "base", "key": "0123", "config": {}, "wall_s": 5.0}))
    settings = Common(experiment="toy", scale="smoke")
    found = collect(tmp_path / "runs", CELLS, results, settings=settings, failures=[failure], stages=[stage])
    assert found == json.loads((results / "provenance.json").read_text())
    assert found["failed"] == [{"arm": "grpo", "seed": 100, "error": "ValueError: boom"}]
    rows = [json.loads(line) for line in (results / "records.jsonl").read_text().splitlines()]
    assert [(row["arm"], row["seed"], row["step"]) for row in rows] == [
        ("grpo", 101, 1), ("grpo", 101, 2), ("sft", 100, 1), ("sft", 100, 2), ("sft", 101, 1), ("sft", 101, 2)
    ]  # fmt: skip
    assert found["totals"]["flops"] == 300.0 and found["totals"]["tokens_trained"] == 30
    assert found["stages"] == [{"name": "base", "key": "0123", "wall_s": 5.0}]
    assert [(cell["arm"], cell["seed"], cell["flops"]) for cell in found["cells"]] == [
        ("sft", 101, 100.0), ("grpo", 101, 100.0), ("sft", 100, 100.0)
    ]  # fmt: skip
    assert (found["arms"], found["seeds"]) == (["sft", "grpo"], [100, 101])
    assert found["configuration"]["experiment"] == "toy" and found["wall_s"] > 0
    assert found["totals"]["peak_memory_mb"] > 10 and found["cells"][0]["cpu_s"] >= 0


def test_collect_writes_the_same_bytes_whatever_the_order(tmp_path):
    for name, order in (("one", CELLS), ("two", CELLS[::-1])):
        for cell in order:
            run_cell(tmp_path / name / "runs", cell)
        collect(tmp_path / name / "runs", CELLS, tmp_path / name / "results")
    for file in ("records.jsonl", "rollouts.jsonl"):
        assert (tmp_path / "one/results" / file).read_bytes() == (tmp_path / "two/results" / file).read_bytes()


def test_measured_times_stand_apart_from_the_records_that_a_second_run_repeats(tmp_path):
    folder = cell_folder(tmp_path / "runs", CELLS[0])
    with RunLog(folder, {**LABELS, "variant": None, "arm": "sft", "seed": 101}, quiet=True) as log:
        for metric in ("success", "time/answer"):
            log.record(split="test", metric=metric, value=0.5, n=4, step=1, final=True)
    mark_done(folder, "key")
    collect(tmp_path / "runs", CELLS[:1], tmp_path / "results")
    files = {name: (tmp_path / "results" / name).read_text().splitlines() for name in ("records.jsonl", "times.jsonl")}
    assert {name: [json.loads(line)["metric"] for line in lines] for name, lines in files.items()} == {
        "records.jsonl": ["success"], "times.jsonl": ["time/answer"]
    }  # fmt: skip
    assert [row["metric"] for row in read_records(tmp_path / "results")] == ["success", "time/answer"]


def test_e08_the_records_of_another_variant_are_not_overwritten(tmp_path):
    run_cell(tmp_path / "base", CELLS[0])
    run_cell(tmp_path / "variant", CELLS[0], variant="algo.lr=1e-4")
    results = tmp_path / "results"
    collect(tmp_path / "base", CELLS[:1], results)
    before = {path.name: path.read_bytes() for path in results.iterdir()}
    with pytest.raises(ValueError, match=r"holds the records of .*algo\.lr=1e-4|not of .*algo\.lr=1e-4"):
        collect(tmp_path / "variant", CELLS[:1], results)
    with pytest.raises(RuntimeError, match="No cell"):
        collect(tmp_path / "empty", CELLS[:1], results)
    assert {path.name: path.read_bytes() for path in results.iterdir()} == before


def test_ten_rollouts_an_arm_best_worst_surprising():
    rows = [{"id": index, "reward": float(index), "success": index >= 10} for index in range(20)]
    for index, row in enumerate(rows):
        row["logps"], row["mask"] = [-9.0, -float(index)], [0, 1]
    picked = pick_rollouts(rows)
    assert [(row["pick"], row["id"]) for row in picked] == (
        [("best", index) for index in (19, 18, 17, 16)]
        + [("worst", index) for index in (0, 1, 2)]
        # mean log-probability of own tokens: successes 10..15 at -10..-15 are the least expected
        + [("surprising", index) for index in (15, 14, 13)]
    )
    assert surprise({"surprise": 2, "success": True}) == 2.0
    assert len(pick_rollouts(rows[:4])) == 4
    assert pick_rollouts([]) == []


def test_machine_packages_and_command():
    found = machine()
    assert set(found) >= {"cpu", "cores", "memory_gib", "system", "python"}
    assert found["python"] == platform.python_version() and found["cores"] >= 1 and found["memory_gib"] > 0.1
    assert packages()["torch"].startswith("2.13.0")
    assert command().startswith("python ")


def test_command_names_the_module(tmp_path):
    (tmp_path / "toy_main.py").write_text("from common.provenance import command\nprint(command())\n")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "toy_main", "algo.lr=1e-4", "a b"],
        env={"PYTHONPATH": f"{tmp_path}:{root}"}, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "python -m toy_main algo.lr=1e-4 'a b'"


def test_git_state(tmp_path):
    assert git_state(tmp_path) == {"commit": None, "dirty": None}

    def git(*words: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        answer = subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return answer.stdout.strip()

    git("init", "-q")
    (tmp_path / "code.py").write_text("a")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "report.md").write_text("a")
    git("add", ".")
    git("commit", "-qm", "first")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "results" / "report.md").write_text("b")
    assert git_state(tmp_path)["dirty"] is False
    (tmp_path / "code.py").write_text("b")
    assert git_state(tmp_path)["dirty"] is True
