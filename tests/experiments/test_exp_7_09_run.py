"""7-9 end to end at smoke scale: a SIGKILL, a cut collection, the same bytes, a model that loads.

What a worker process does is called in this one where no kill needs it: importing torch costs more than all the training.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

from common.config import compose, run_folder
from common.jobs import Cell, cell_folder
from common.teacher import LocalTeacher
from experiments.exp_7_09_cot_distillation import run, stages
from experiments.exp_7_09_cot_distillation.settings import Settings
from tests.experiments.harness import command, kill_when, records
from tests.experiments.harness import run as run_to_the_end

ARMS = ["start", "teacher", "unfiltered", "mixed", "star", "grpo"]
FEW = ["unfiltered", "star"]
SEED = 100


def line(folder):
    return command("exp_7_09_cot_distillation", folder, "workers=1", f"arms=[{','.join(ARMS)}]")


def settings_in(folder):
    return compose(run.NUMBER, Settings, line(folder)[3:])


def cell_records(settings, arm):
    return (cell_folder(run_folder(settings), Cell(arm, SEED)) / "records.jsonl").read_bytes()


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
    kill_when(line(folder), f"{folder}/runs/7-9/smoke/main/**/unfiltered/seed100/state.pt")
    run_to_the_end(line(folder))
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The settings of two arms that ran in one go."""
    settings = settings_in(tmp_path_factory.mktemp("undisturbed"))
    for arm in FEW:
        run.run_cell(settings, arm, SEED)
    return settings


def test_every_arm_ends_with_numbers_on_both_splits(whole):
    rows = [json.loads(row) for row in records(whole).splitlines()]
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
    assert "Compute 4+3" in run_to_the_end([sys.executable, "-c", code, str(folder)], cwd="/")
