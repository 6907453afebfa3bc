"""7-12 end to end at smoke scale: the public command, a SIGKILL in the middle of an arm, the same records, the saved model."""

import json
import sys

import pytest

from common import tuning
from common.config import compose
from common.episodes import Episode
from common.seeding import base_seed
from experiments.exp_7_12_virl import evaluate, figures, run, tune
from experiments.exp_7_12_virl.settings import Settings
from tests.experiments.harness import command, kill_when, records
from tests.experiments.harness import run as run_to_the_end

ARMS = ["start", "sft", "grpo"]
SPLITS = ("id", "rule", "city", "both", "degrees", "clock", "renamed")


def line(folder):
    return command("exp_7_12_virl", folder, f"arms=[{','.join(ARMS)}]", "workers=1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run_to_the_end(line(folder))
    return folder


def rows_of(folder):
    return [json.loads(row) for row in records(folder).splitlines()]


def test_records_cover_every_arm_split_and_metric(whole):
    rows = rows_of(whole)
    final = {(row["arm"], row["split"], row["metric"]) for row in rows if row["final"]}
    wanted = ("success", "step_accuracy", "step_first", "recognition", "training_rule", "kl_start", "failure/no_answer")
    assert {(arm, split, metric) for arm in ARMS for split in SPLITS for metric in wanted} <= final
    curve = {(row["arm"], row["step"]) for row in rows if not row["final"]}
    assert curve == {(arm, step) for arm in ("sft", "grpo") for step in (0, 100)}
    start = [row for row in rows if row["arm"] == "start" and row["metric"] == "kl_start"]
    assert all(abs(row["value"]) < 1e-4 for row in start)
    (report,) = (whole / "results").rglob("report.md")
    assert "GRPO" in report.read_text() and "no verdict" in report.read_text()


CHILD = (
    "import sys; from common.config import compose; from experiments.exp_7_12_virl import run; "
    "from experiments.exp_7_12_virl.settings import Settings; "
    "run.run_cell(compose('7-12', Settings, sys.argv[1:]), 'grpo', 100)"
)


def test_killed_in_the_middle_of_an_arm_it_ends_with_the_records_of_an_undisturbed_run(whole, tmp_path):
    changes = line(tmp_path)[3:]
    kill_when([sys.executable, "-c", CHILD, *changes], f"{tmp_path}/runs/**/grpo/seed100/state.pt")
    assert not list((tmp_path / "runs").rglob("grpo/seed100/DONE*"))
    settings = compose("7-12", Settings, changes)
    run.run_cell(settings, "grpo", 100)
    (resumed,) = (tmp_path / "runs").glob("**/grpo/seed100/records.jsonl")
    undisturbed = [row for row in rows_of(whole) if row["arm"] == "grpo"]
    again = [json.loads(row) for row in resumed.read_text().splitlines()]
    assert sorted(map(str, again)) == sorted(map(str, undisturbed))


def test_the_trained_model_loads_in_plain_transformers(whole):
    (folder,) = (whole / "runs").glob("**/grpo/seed100/model")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("forward", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=2).shape[1] == 3


def test_the_plan_shares_starts_and_covers_every_cell():
    settings = compose("7-12", Settings, ["scale=laptop", "study=ablation"])
    jobs = run.plan(settings, [100, 101, 102], settings.chosen())
    cells = [job.name for job in jobs if not job.name.startswith("start of")]
    assert len(cells) == len(set(cells)) == 3 * len(settings.chosen())
    assert len(jobs) - len(cells) == 6  # three seeds, two kinds of start


def test_report_seeds_see_test_routes_and_tuning_seeds_validation_routes():
    settings = compose("7-12", Settings, ["scale=laptop"])
    tuning, report = evaluate.evaluation_tasks(settings, 3), evaluate.evaluation_tasks(settings, 100)
    assert {task["role"] for tasks in tuning.values() for task in tasks} == {"validation"}
    assert {task["role"] for tasks in report.values() for task in tasks} == {"test"}
    assert tuple(report["city"][0]["cities"]) == settings.cities.test != tuple(tuning["city"][0]["cities"])
    assert report["rule"][0]["rule"] == "relative" and report["id"][0]["rule"] == "absolute"
    assert [base_seed(seed, settings.bases) for seed in (0, 1, 2, 100, 101, 102)] == [0, 1, 0, 100, 101, 100]
    known = {split: (tasks[0]["rule"], tasks[0]["verbs"][1]) for split, tasks in report.items() if split in evaluate.KNOWN}
    assert known == {
        "degrees": ("degrees", "turn_direction"), "clock": ("clock", "turn_direction"), "renamed": ("relative", "face"),
    }  # fmt: skip


def answered(*steps):
    """An episode under the relative rule; a step is (action, due, trial, solved, recognised)."""
    task = {"rule": "relative", "verbs": ["forward", "turn_direction", "stop"]}
    infos = [
        {"due": due, "trial": trial, "solved": solved, "recognised": known, "located": True, "class": ""}
        for _, due, trial, solved, known in steps
    ]
    texts = [f'{{"current observation": "", "current instruction": "", "action": "{action}"}}' for action, *_ in steps]
    return Episode([5] * 4, [0, 1, 1, 0], [0.0] * 4, [0] * 4, 1, task, 0, infos=infos, texts=texts)


def test_metrics_speak_of_first_answers_and_tell_the_old_rule_from_other_mistakes():
    episode = answered(
        ("turn_direction(north)", "turn", 1, False, True),  # the training rule
        ("turn_direction(left)", "turn", 2, True, True),
        ("forward()", "forward", 1, True, False),
        ("turn_direction(right)", "turn", 1, False, True),  # a mistake within the stated rule
        ("turn_direction(east)", "turn", 2, False, True),
        ("stop()", "stop", 1, True, True),
    )
    found = {metric: values[0] for metric, values in evaluate.route_metrics([episode]).items()}
    assert (found["stops"], found["step_accuracy"], found["step_first"]) == (4, 3 / 4, 2 / 4)
    assert (found["turn_first"], found["training_rule"], found["recognition"]) == (0, 1 / 2, 3 / 4)
    assert found["length"] == 2


def test_every_arm_has_a_label_and_a_row():
    settings = compose("7-12", Settings, [])
    assert set(settings.branches) <= set(figures.LABELS)
    assert set(settings.branches) <= {row.variant for row in figures.CLAIMS.table}


def test_the_readmes_table_of_tries_is_the_record_of_tries_and_all_arms_had_the_same_number():
    tries = [json.loads(line) for line in tune.TUNING.file.read_text().splitlines()] if tune.TUNING.file.exists() else []
    block = (tune.TUNING.folder / "README.md").read_text().split(tuning.BLOCK[0])[1].split(tuning.BLOCK[1])[0].strip()
    assert block == (tuning.table(tries, tune.HEADINGS) if tries else "")
    counts = {arm: sum(row["arm"] == arm for row in tries) for arm in {row["arm"] for row in tries} & set(tune.RATES)}
    assert set(counts.values()) <= {3} and all(row["seed"] < 100 for row in tries)
    settings = compose("7-12", Settings, [])
    for arm, other in tune.SAME_AS.items():
        assert settings.branches[arm].lr == settings.branches[other].lr, arm
    for arm in counts:
        assert settings.branches[arm].lr == tuning.best([row for row in tries if row["arm"] == arm])["lr"], arm
