"""launcher=ray: the jobs of the local launcher on Ray, with the same results and failures (extra `verl` only)."""

import importlib
import os
import sys
from functools import partial
from pathlib import Path

import pytest

from common.config import compose
from common.jobs import Job, run_jobs
from common.schema import ConfigError
from experiments.exp_7_01_q_learning import run
from experiments.exp_7_01_q_learning.settings import Settings

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return importlib.import_module("toy_jobs")


def test_without_ray_the_key_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="launcher=ray: Ray is not installed here"):
        run_jobs([Job("a", "toy_jobs:good", {"value": 1})], workers=1, threads=1, launcher="ray")


def test_the_key_allows_two_launchers():
    assert compose("7-1", Settings, ["launcher=ray"]).variant is None
    with pytest.raises(ConfigError, match="launcher=slurm: allowed are local, ray"):
        compose("7-1", Settings, ["launcher=slurm"])


def test_results_failures_and_a_killed_worker(tmp_path, capfd):
    pytest.importorskip("ray")
    jobs = [Job(f"good {index}", "toy_jobs:good", {"value": index}) for index in (1, 2)]
    jobs += [Job("raises", "toy_jobs:raises", {}), Job("sys exit", "toy_jobs:sys_exit", {})]
    jobs += [Job("cannot be sent", "toy_jobs:good", {"value": sys._getframe()})]
    jobs += [Job("killed once", "toy_jobs:killed_once", {"folder": str(tmp_path)})]
    jobs += [Job("always killed", "toy_jobs:calls_exit", {})]
    before = set(os.listdir("/tmp"))
    found: dict[str, dict[str, dict]] = {"local": {}, "ray": {}}
    for launcher, chosen in (("local", jobs[:2]), ("ray", jobs)):
        note = partial(lambda results, job, result: results.update({job.name: result}), found[launcher])
        failures = run_jobs(chosen, workers=2, threads=1, on_done=note, logs=tmp_path, launcher=launcher)
    errors = {failure.name: failure.error for failure in failures}
    assert list(errors) == ["raises", "sys exit", "cannot be sent", "always killed"]
    assert errors["raises"].startswith("Traceback") and "ValueError: the reward of hand 7 é is undefined" in errors["raises"]
    assert "sys.exit(5)" in errors["sys exit"] and "could not be sent" in errors["cannot be sent"]
    assert "Ray lost the job 3 times" in errors["always killed"]
    assert found["ray"]["killed once"] == {"value": 0} and (tmp_path / "killed").exists()
    for name in ("good 1", "good 2"):
        assert {**found["ray"][name], "pid": 0} == {**found["local"][name], "pid": 0}  # threads and random numbers too
    assert "a word from the job" in (tmp_path / "good_1.log").read_text()
    assert "a word from the job" not in capfd.readouterr().out
    assert not {name for name in set(os.listdir("/tmp")) - before if name.startswith("ray")}


def test_records_are_the_same_on_both_launchers(tmp_path):
    pytest.importorskip("ray")
    texts = []
    for launcher in ("local", "ray"):
        folders = [f"runs_dir={tmp_path / launcher}", f"results_dir={tmp_path / launcher / 'results'}"]
        settings = compose("7-1", Settings, ["scale=smoke", f"launcher={launcher}", *folders])
        assert run.main(settings) == 0
        (records,) = (tmp_path / launcher / "results").rglob("records.jsonl")
        texts.append(records.read_text(encoding="utf-8"))
    assert texts[0] == texts[1] and texts[0].count("\n") > 10
