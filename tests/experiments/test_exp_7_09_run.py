"""7-9 end to end at smoke scale: a SIGKILL, a cut collection, the same bytes, a model that loads.

What a worker process does is called in this one where no kill needs it: importing torch costs more than all the training.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from common.config import compose, run_folder
from common.jobs import Cell, cell_folder
from common.teacher import LocalTeacher
from experiments.exp_7_09_cot_distillation import run, stages
from experiments.exp_7_09_cot_distillation.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
ARMS = ["start", "teacher", "unfiltered", "mixed", "star", "grpo"]
FEW = ["unfiltered", "star"]
SEED = 100


def words(folder):
    folders = [f"runs_dir={folder / 'runs'}", f"results_dir={folder / 'results'}"]
    return ["scale=smoke", "workers=1", *folders, f"arms=[{','.join(ARMS)}]"]


def command(folder):
    return [sys.executable, "-m", "experiments.exp_7_09_cot_distillation.run", *words(folder)]


def settings_in(folder):
    return compose(run.NUMBER, Settings, words(folder))


def cell_records(settings, arm):
    return (cell_folder(run_folder(settings), Cell(arm, SEED)) / "records.jsonl").read_bytes()


def kill_while_training(folder, arm):
    """Starts the run and kills its whole process group the moment a cell has a training state."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command(folder), cwd=ROOT, start_new_session=True, **quiet)
    deadline = time.monotonic() + 300
    while not any(path.stat().st_size for path in (folder / "runs").glob(f"7-9/smoke/main/**/{arm}/seed100/state.pt")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Killed while an arm trains, then run to its end."""
    folder = tmp_path_factory.mktemp("whole")
    kill_while_training(folder, "unfiltered")
    done = subprocess.run(command(folder), cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The settings of two arms that ran in one go."""
    settings = settings_in(tmp_path_factory.mktemp("undisturbed"))
    for arm in FEW:
        run.run_cell(settings, arm, SEED)
    return settings


def test_every_arm_ends_with_numbers_on_both_splits(whole):
    (file,) = (whole / "results").rglob("records.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    final = {(row["arm"], row["split"], row["metric"]) for row in rows if row["final"]}
    for arm in ARMS:
        wanted = {"success", "greedy", "length", "verification", "backtracking", "slip", "caught", "recovered"}
        assert {(arm, split, metric) for split in ("id", "ood") for metric in wanted} <= final, arm
        assert (arm, "train", "imitated") in final
    counts = {row["metric"]: row["value"] for row in rows if (row["arm"], row["split"]) == ("mixed", "data")}
    removed = sum(counts[f"filter/{name}"] for name in ("cut", "wrong", "repeated", "over_cap", "kept"))
    assert counts["filter/sampled"] == removed == 12 * 8
    (provenance,) = (whole / "results").rglob("provenance.json")
    cells = {cell["arm"]: cell for cell in json.loads(provenance.read_text())["cells"]}
    assert cells["start"]["flops"] == cells["teacher"]["flops"] == 0 < cells["grpo"]["flops"]
    assert cells["mixed"]["tokens_forward"] > 0  # the teachers' sampling


def test_killed_and_started_again_it_ends_with_the_records_of_an_undisturbed_run(whole, undisturbed):
    for arm in FEW:
        assert cell_records(settings_in(whole), arm) == cell_records(undisturbed, arm)


def test_a_collection_that_breaks_off_ends_with_the_same_answers(undisturbed, tmp_path, monkeypatch):
    class PowerCutError(Exception):
        pass

    def some(self, asks, done, keep):
        left = iter(range(5))

        def until_it_breaks(ask, reply):
            if next(left, None) is None:
                raise PowerCutError
            return keep(ask, reply)

        return answer(self, asks, done, until_it_breaks)

    settings, answer = settings_in(tmp_path), LocalTeacher.answer
    with monkeypatch.context() as broken, pytest.raises(PowerCutError):
        broken.setattr(LocalTeacher, "answer", some)
        stages.answers(settings, "text", SEED)
    (cut,) = (tmp_path / "runs/stages").glob("answers-text-*.partial/answers.jsonl")
    assert len(cut.read_bytes().splitlines()) == 1 + 5
    whole = stages.answers(settings, "text", SEED) / "answers.jsonl"
    (right,) = (Path(undisturbed.runs_dir) / "stages").glob("answers-text-*/answers.jsonl")
    assert whole.read_bytes() == right.read_bytes()


def test_the_trained_model_loads_in_plain_transformers(whole):
    (folder,) = (whole / "runs/7-9").rglob("unfiltered/seed100/model")
    code = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer; "
        "m = AutoModelForCausalLM.from_pretrained(sys.argv[1]); t = AutoTokenizer.from_pretrained(sys.argv[1]); "
        "print(t.decode(m.generate(**t('Compute 4+3', return_tensors='pt'), max_new_tokens=2)[0]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0 and "Compute 4+3" in done.stdout, done.stderr
