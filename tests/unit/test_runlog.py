"""The log of a cell: steps once after a resume (E14), strict JSON (E15), any text (E16), trackers that fail (E13)."""

import json
import math
import multiprocessing
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import pytest

from common.compute import Budget, Meter
from common.files import locked, read_json_lines, strict_json, write_json_lines, write_text
from common.live import LiveLine, describe, duration
from common.runlog import RunLog

FORK = multiprocessing.get_context("fork")
LABELS = {"experiment": "toy", "scale": "smoke", "variant": None, "arm": "grpo", "seed": 100}


def open_log(folder: Path, **options) -> RunLog:
    return RunLog(folder, LABELS, quiet=True, **options)


def strict(path: Path) -> list[dict]:
    def refuse(word: str) -> float:
        raise ValueError(word)

    return [json.loads(line, parse_constant=refuse) for line in path.read_bytes().decode("ascii").split("\n") if line]


def test_a_record_has_its_keys_in_one_order(tmp_path):
    with open_log(tmp_path) as log:
        log.record(split="ood", metric="success", value=0.25, n=4, step=3, items=[1.0, 0.0, 1 / 3, 0])
        log.record(split="test", metric="success", value=1, n=4, step=3, final=True)
    assert (tmp_path / "records.jsonl").read_text() == (
        '{"experiment":"toy","scale":"smoke","variant":null,"arm":"grpo","seed":100,"split":"ood",'
        '"metric":"success","value":0.25,"n":4,"step":3,"final":false,"items":[1,0,0.333333,0]}\n'
        '{"experiment":"toy","scale":"smoke","variant":null,"arm":"grpo","seed":100,"split":"test",'
        '"metric":"success","value":1.0,"n":4,"step":3,"final":true}\n'
    )


def test_labels_must_be_complete(tmp_path):
    with pytest.raises(ValueError, match="must be exactly experiment, scale, variant, arm, seed"):
        RunLog(tmp_path, {"experiment": "toy"})


def test_e14_after_a_resume_every_step_stands_once(tmp_path):
    with open_log(tmp_path) as log:
        log.resume(0)
        for step in range(1, 213):
            log.metrics(step, {"loss/sft": float(step)})
            log.record(split="validation", metric="gap", value=step, n=1, step=step)
            log.rollouts([{"step": step, "text": "first"}])
    with open_log(tmp_path) as log:
        log.resume(200)
        for step in range(201, 251):
            log.metrics(step, {"loss/sft": float(-step)})
            log.record(split="validation", metric="gap", value=-step, n=1, step=step)
            log.rollouts([{"step": step, "text": "second"}])
    metrics = strict(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, 251))
    assert [row["loss/sft"] for row in metrics[198:202]] == [199.0, 200.0, -201.0, -202.0]
    assert [row["value"] for row in strict(tmp_path / "records.jsonl")[198:202]] == [199.0, 200.0, -201.0, -202.0]
    assert [row["text"] for row in strict(tmp_path / "rollouts.jsonl")] == ["first"] * 200 + ["second"] * 50


def test_e14_a_step_logged_again_replaces_the_old_one_also_without_resume(tmp_path):
    with open_log(tmp_path) as log:
        log.metrics(0, {"eval/ood/success": 0.1, "loss/sft": 2.0})
        log.record(split="ood", metric="success", value=0.1, n=10, step=0)
    with open_log(tmp_path) as log:
        log.metrics(0, {"eval/ood/success": 0.2})
        log.record(split="ood", metric="success", value=0.2, n=10, step=0)
    assert strict(tmp_path / "metrics.jsonl") == [{"step": 0, "eval/ood/success": 0.2, "loss/sft": 2.0}]
    assert [row["value"] for row in strict(tmp_path / "records.jsonl")] == [0.2]


def test_a_line_cut_by_a_kill_is_left_out(tmp_path):
    with open_log(tmp_path) as log:
        log.metrics(1, {"loss/sft": 1.0})
    with open(tmp_path / "metrics.jsonl", "ab") as handle:
        handle.write(b'{"step": 2, "loss/s')
    with open_log(tmp_path) as log:
        log.metrics(2, {"loss/sft": 2.0})
    assert strict(tmp_path / "metrics.jsonl") == [{"step": 1, "loss/sft": 1.0}, {"step": 2, "loss/sft": 2.0}]


def test_e15_undefined_numbers_become_null_with_a_reason(tmp_path):
    with open_log(tmp_path) as log:
        log.metrics(1, {"kl/ref": math.nan, "loss/policy": -math.inf, "score/mean": 1.0})
        log.record(split="ood", metric="NaN share", value=math.nan, n=0, step=1, items=[math.nan, 1.0])
        log.record(split="ood", metric="success", value=None, n=0, step=1, reason="no answer was sampled")
        log.rollouts([{"text": "the word NaN and Infinity stay"}])
        with pytest.raises(ValueError, match="give a reason"):
            log.record(split="ood", metric="success", value=None, n=0, step=2)
        with pytest.raises(ValueError, match="not JSON compliant"):
            log.rollouts([{"reward": math.nan}])
    assert strict(tmp_path / "metrics.jsonl") == [
        {"step": 1, "kl/ref": None, "loss/policy": None, "score/mean": 1.0}
        | {"reasons": {"kl/ref": "nan", "loss/policy": "-inf"}}
    ]
    undefined, absent = strict(tmp_path / "records.jsonl")
    assert (undefined["metric"], undefined["value"], undefined["reason"]) == ("NaN share", None, "nan")
    assert undefined["items"] == [None, 1]
    assert (absent["value"], absent["reason"]) == (None, "no answer was sampled")
    assert strict(tmp_path / "rollouts.jsonl") == [{"text": "the word NaN and Infinity stay"}]
    with pytest.raises(ValueError, match="not JSON compliant"):
        strict_json({"value": math.inf})


TEXTS = ['x,y\nz "q" é─', "=1+1", "\r\n\t\x00\x1b[31m", "\u2028\u2029\x85", "\ufeffmark", "\udcff lone", "😀", "a\\n"]


def test_e16_any_text_comes_back_as_it_was(tmp_path):
    rows = [{"text": text} for text in TEXTS]
    with open_log(tmp_path) as log:
        log.rollouts(rows)
    assert strict(tmp_path / "rollouts.jsonl") == rows
    assert read_json_lines(tmp_path / "rollouts.jsonl") == rows


def test_e16_an_ascii_locale_changes_nothing(tmp_path):
    write_json_lines(tmp_path / "in.jsonl", [{"text": text} for text in TEXTS])
    code = (
        "import sys; from pathlib import Path; from common.files import *\n"
        "folder = Path(sys.argv[1]); rows = read_json_lines(folder / 'in.jsonl')\n"
        "write_json_lines(folder / 'out.jsonl', rows); write_text(folder / 'text', rows[0]['text'])"
    )
    root = Path(__file__).parents[2]
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True, timeout=120)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "in.jsonl").read_bytes()
    assert (tmp_path / "text").read_bytes().decode("utf-8") == TEXTS[0]


def test_e08_a_folder_of_another_cell_is_refused_and_unchanged(tmp_path):
    with open_log(tmp_path) as log:
        log.record(split="ood", metric="success", value=0.1, n=10, step=0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="holds the log of"):
        RunLog(tmp_path, LABELS | {"variant": "algo.lr=1e-4"}, quiet=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def write_together(folder: Path, barrier, answers) -> None:
    barrier.wait()
    try:
        with open_log(folder) as log:
            log.record(split="ood", metric="success", value=0.5, n=2, step=1)
            answers.put("wrote")
            time.sleep(1.0)
    except RuntimeError as error:
        answers.put(str(error))


def test_e09_of_eight_processes_one_writes_a_folder(tmp_path):
    barrier, answers = FORK.Barrier(8), FORK.Queue()
    processes = [FORK.Process(target=write_together, args=(tmp_path / "cell", barrier, answers)) for _ in range(8)]
    for process in processes:
        process.start()
    got = sorted(answers.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert got[-1] == "wrote" and all("being written by another process" in text for text in got[:-1])
    assert len(strict(tmp_path / "cell" / "records.jsonl")) == 1


class StubRun:
    """A tracker that wants rising steps, as W&B does, and raises where it is told to."""

    def __init__(self, fails_in: str) -> None:
        self.fails_in, self.points, self.last = fails_in, [], -1

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "progress/step")

    def log(self, values: dict, step: int | None = None) -> None:
        if self.fails_in == "log":
            raise ConnectionError("no route to host")
        if step is None or step > self.last:
            self.points.append(values)
            self.last = self.last if step is None else step

    def finish(self) -> None:
        if self.fails_in == "finish":
            raise OSError("cannot flush")


def stub_wandb(monkeypatch, fails_in: str = "") -> list[StubRun]:
    runs: list[StubRun] = []

    def init(**options) -> StubRun:
        assert options["mode"] == "offline"
        if fails_in == "init":
            raise RuntimeError("api_key not configured (no-tty)")
        runs.append(StubRun(fails_in))
        return runs[-1]

    stub = types.ModuleType("wandb")
    stub.init, stub.Settings = init, lambda **options: options
    monkeypatch.setitem(sys.modules, "wandb", stub)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return runs


@pytest.mark.parametrize("fails_in", ["init", "log", "finish"])
def test_e13_a_failing_tracker_gives_one_warning_and_the_run_goes_on(tmp_path, monkeypatch, fails_in):
    stub_wandb(monkeypatch, fails_in)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with open_log(tmp_path, tracker="wandb") as log:
            for step in range(1, 6):
                log.metrics(step, {"loss/sft": 1.0 / step})
    assert [str(warning.message).split(" (")[0] for warning in caught] == [f"tracker=wandb failed in {fails_in}"]
    assert [row["step"] for row in strict(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_e13_a_tracker_that_is_not_installed_warns_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with (
        pytest.warns(UserWarning, match="tracker=trackio failed in init") as caught,
        open_log(tmp_path, tracker="trackio") as log,
    ):
        log.metrics(1, {"loss/sft": 1.0})
        log.metrics(2, {"loss/sft": 0.5})
    assert len(caught) == 1 and len(strict(tmp_path / "metrics.jsonl")) == 2


def test_e13_without_a_tracker_no_client_is_imported(tmp_path):
    code = (
        "import sys; from pathlib import Path; from common.runlog import RunLog\n"
        f"log = RunLog(Path(sys.argv[1]), {LABELS!r}); log.metrics(1, {{'loss/sft': 1.0}}); log.close()\n"
        "print(sorted({'wandb', 'trackio', 'tensorboard', 'torch'} & set(sys.modules)))"
    )
    line = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(line, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_unknown_tracker_is_named(tmp_path):
    with pytest.raises(ValueError, match="tracker='wandbb' is unknown; allowed: none, wandb, trackio, tensorboard"):
        open_log(tmp_path, tracker="wandbb")


def test_e14_the_tracker_keeps_every_step_of_a_resumed_run(tmp_path, monkeypatch):
    runs = stub_wandb(monkeypatch)
    with open_log(tmp_path, tracker="wandb") as log:
        for step in range(1, 6):
            log.metrics(step, {"loss/sft": 1.0, "kl/ref": math.nan})
        log.resume(3)  # a loop that goes back within one session
        for step in range(4, 8):
            log.metrics(step, {"loss/sft": 2.0})
    local = [(row["step"], row["loss/sft"]) for row in strict(tmp_path / "metrics.jsonl")]
    newest = {point["progress/step"]: point["loss/sft"] for point in runs[0].points}
    assert sorted(newest.items()) == local == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0), (7, 2.0)]
    assert "kl/ref" not in runs[0].points[0]


def test_tensorboard_receives_the_points(tmp_path):
    pytest.importorskip("tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with open_log(tmp_path, tracker="tensorboard") as log:
        log.metrics(1, {"loss/sft": 0.5})
        log.metrics(2, {"loss/sft": 0.25})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss/sft")] == [(1, 0.5), (2, 0.25)]


def test_costs_add_up_over_sessions(tmp_path):
    with open_log(tmp_path) as log:
        log.cost(flops=6.0, tokens_trained=1)
        time.sleep(0.05)
    first = json.loads((tmp_path / "cost.json").read_text())
    with open_log(tmp_path) as log:
        log.cost(flops=12.0, tokens_trained=2)
        time.sleep(0.05)
    second = json.loads((tmp_path / "cost.json").read_text())
    assert first["wall_s"] >= 0.05 and first["wall_s"] + 0.05 <= second["wall_s"] < 60
    assert (second["flops"], second["tokens_trained"]) == (12.0, 2)
    assert 10 < first["peak_memory_mb"] <= second["peak_memory_mb"]


def test_the_live_line_says_step_reward_success_kl_speed_and_time_left(capsys):
    values = {"reward/mean": 0.4125, "success/mean": 0.5, "kl/ref": 0.01234, "throughput/tokens_per_s": 1900.4}
    assert describe(40, values | {"progress/eta_s": 185.2, "loss/policy": math.nan}) == (
        "step 40 reward 0.412 success 0.500 KL 0.0123 tok/s 1,900 3m05s left"
    )
    assert [duration(seconds) for seconds in (0.4, 59.6, 3599, 7620)] == ["0s", "1m00s", "59m59s", "2h07m"]
    line = LiveLine(every_s=60)
    line.show(["1/3 jobs", describe(1, {})])
    line.show(["too early"])
    line.say("stays")
    line.close()
    assert capsys.readouterr().out == "1/3 jobs | step 1\nstays\n"


def test_time_left_follows_the_pace_of_this_session(tmp_path):
    with open_log(tmp_path) as log:
        log.metrics(50, {"loss/sft": 1.0}, progress=0.5)
        time.sleep(0.2)
        log.metrics(60, {"loss/sft": 1.0}, progress=0.6)
    first, second = strict(tmp_path / "metrics.jsonl")
    assert "progress/eta_s" not in first
    assert 0.8 <= second["progress/eta_s"] < 30


def test_the_meter_counts_2n_forward_and_6n_trained():
    meter = Meter(parameters=1000)
    meter.add_forward(10)
    meter.add_train(5)
    assert meter.flops == 2 * 1000 * 10 + 6 * 1000 * 5 == 50_000
    assert (meter.used(Budget(flops=100_000), step=9), meter.exhausted(Budget(flops=100_000), step=9)) == (0.5, False)
    assert meter.exhausted(Budget(flops=50_000), step=0)
    assert meter.used(Budget(flops=100_000, steps=10), step=8) == 0.8
    assert meter.exhausted(Budget(steps=3), step=3) and not meter.exhausted(Budget(steps=3), step=2)
    copy = Meter(1000)
    copy.load_state_dict(meter.state_dict())
    assert (copy.flops, copy.tokens_forward, copy.tokens_trained) == (50_000, 10, 5)
    with pytest.raises(ValueError, match="belongs to another model"):
        Meter(999).load_state_dict(meter.state_dict())
    with pytest.raises(ValueError, match="neither"):
        Budget()
    with pytest.raises(ValueError, match="steps=-1"):
        Budget(steps=-1)


def test_an_atomic_write_that_fails_leaves_the_old_file(tmp_path):
    write_text(tmp_path / "file", "old")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_lines(tmp_path / "file", [{"a": math.nan}])
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_lock_says_that_it_waits(tmp_path):
    said = []
    with locked(tmp_path / "lock", lambda: said.append("first")):
        process = FORK.Process(target=hold_lock, args=(tmp_path,))
        process.start()
        deadline = time.monotonic() + 30
        while not (tmp_path / "waiting").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not (tmp_path / "held").exists()
    process.join()
    assert (tmp_path / "held").exists() and said == []


def hold_lock(folder: Path) -> None:
    with locked(folder / "lock", (folder / "waiting").touch):
        (folder / "held").touch()
