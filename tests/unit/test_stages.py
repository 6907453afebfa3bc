"""Stages and the two promises behind them: built once, and the same records after a kill at any moment."""

import importlib
import json
import multiprocessing
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.stages import code_hash, fingerprint, plain, stage

FORK = multiprocessing.get_context("fork")
HERE = Path(__file__).parent


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("toy_jobs")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes versions of one module and gives its code hash."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def hash_of(source: str) -> str:
        (tmp_path / "toy_source.py").write_text(source)
        importlib.invalidate_caches()
        return code_hash("toy_source")

    return hash_of


def test_code_hash_ignores_comments_docstrings_and_layout(module):
    plain_source = "def f(x):\n    return x + 1\n"
    dressed = '"""Doc."""\n# why\ndef f(x):\n    """Adds one."""\n\n    return (x + 1)  # because\n'
    assert module(plain_source) == module(dressed)
    assert module(plain_source) != module("def f(x):\n    return x + 2\n")
    assert module("TEXT = 'a'\n") != module("TEXT = 'b'\n")


def test_code_hash_names_a_module_without_source():
    with pytest.raises(ModuleNotFoundError, match=r"common\.no_such_module"):
        code_hash("common.no_such_module")


def test_fingerprint_depends_on_configuration_code_and_inputs(tmp_path):
    @dataclass
    class Config:
        lr: float
        path: Path

    file = tmp_path / "data.txt"
    file.write_text("one")
    base = fingerprint(Config(1e-4, Path("x")), ["common.compute"], [file])
    assert len(base) == 16
    assert base == fingerprint({"lr": 1e-4, "path": "x"}, ["common.compute"], [file])
    assert base != fingerprint(Config(2e-4, Path("x")), ["common.compute"], [file])
    assert base != fingerprint(Config(1e-4, Path("x")), ["common.files"], [file])
    file.write_text("two")
    assert base != fingerprint(Config(1e-4, Path("x")), ["common.compute"], [file])
    assert plain((1, {"a": Path("b")})) == [1, {"a": "b"}]


def test_a_stage_is_built_once_and_again_when_its_input_changes(tmp_path):
    built = []

    def build(folder: Path) -> None:
        built.append(folder.name)
        (folder / "out.txt").write_text("made")

    def ask(lr: float) -> tuple[Path, Path]:
        first = stage("first", build, config={"lr": lr}, modules=["common.files"], root=tmp_path)
        return first, stage("second", build, config={}, modules=["common.files"], inputs=[first], root=tmp_path)

    first, second = ask(0.1)
    assert (first, second) == ask(0.1)
    assert len(built) == 2
    assert (second / "out.txt").read_text() == "made"
    assert json.loads((first / "stage.json").read_text())["config"] == {"lr": 0.1}
    other_first, other_second = ask(0.2)
    assert other_first != first and other_second != second
    assert len(built) == 4


def test_a_build_that_raises_is_taken_up_in_its_folder(tmp_path):
    def build(folder: Path) -> None:
        progress = folder / "progress"
        if not progress.exists():
            progress.write_text("half")
            raise RuntimeError("disk full")
        (folder / "result").write_text(progress.read_text() + " then whole")

    arguments = {"config": 1, "modules": ["common.files"], "root": tmp_path}
    with pytest.raises(RuntimeError, match="disk full"):
        stage("s", build, **arguments)
    assert [path.name for path in tmp_path.glob("s-*") if not path.name.endswith(".partial")] == []
    assert (stage("s", build, **arguments) / "result").read_text() == "half then whole"


def slow_build(folder: Path) -> None:
    time.sleep(0.2)
    with open(folder.parent / "builds.txt", "a") as handle:
        handle.write("built\n")
    (folder / "out.txt").write_text("whole")


def ask_together(root: Path, barrier, answers) -> None:
    barrier.wait()
    folder = stage("shared", slow_build, config=1, modules=["common.files"], root=root)
    answers.put(((folder / "out.txt").read_text(), folder.name))


def test_e09_eight_processes_at_once_make_one_build(tmp_path):
    barrier, answers = FORK.Barrier(8), FORK.Queue()
    processes = [FORK.Process(target=ask_together, args=(tmp_path, barrier, answers)) for _ in range(8)]
    for process in processes:
        process.start()
    got = {answers.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert len(got) == 1 and got.pop()[0] == "whole"
    assert (tmp_path / "builds.txt").read_text() == "built\n"
    assert [process.exitcode for process in processes] == [0] * 8


KILLS = [
    "start step 3",
    "start save 4",
    "start written",
    "stage boundary",
    "adam-seed100 step 5",
    "adam-seed100 save 6",
    "adam-seed101 final",
    "adam-seed101 done",
]


def timeless(path: Path) -> list[dict]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "progress/eta_s"} for row in rows]


@pytest.mark.filterwarnings("ignore:Skipped")
def test_kill_anywhere_and_run_again_gives_the_same_bytes(toy, tmp_path):
    toy.experiment(tmp_path / "whole")
    wanted = tmp_path / "whole" / "results"
    assert len((wanted / "records.jsonl").read_text().splitlines()) == 2 * (toy.STEPS + 1)
    for kill_at in KILLS:
        root = tmp_path / kill_at
        process = FORK.Process(target=toy.experiment, args=(root, kill_at))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL, kill_at
        assert not (root / "results").exists()
        toy.experiment(root)
        for name in ("records.jsonl", "rollouts.jsonl"):
            assert (root / "results" / name).read_bytes() == (wanted / name).read_bytes(), (kill_at, name)
        for cell in toy.CELLS:
            parts = (Path("runs") / cell.arm / f"seed{cell.seed}", "metrics.jsonl")
            assert timeless(root.joinpath(*parts)) == timeless(tmp_path.joinpath("whole", *parts)), kill_at


@pytest.mark.filterwarnings("ignore:Skipped")
def test_killed_twice_in_one_run(toy, tmp_path):
    toy.experiment(tmp_path / "whole")
    for kill_at in ("adam-seed100 save 4", "adam-seed100 save 6"):
        process = FORK.Process(target=toy.experiment, args=(tmp_path / "cut", kill_at))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    toy.experiment(tmp_path / "cut")
    results = [(tmp_path / name / "results" / "records.jsonl").read_bytes() for name in ("whole", "cut")]
    assert results[0] == results[1]
