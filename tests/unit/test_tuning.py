"""Tries of learning rates: which is taken, what is written."""

import json

from common import tuning
from common.tuning import Tuning

ROWS = [
    {"arm": "start", "lr": None, "seed": 0, "id": 0.2, "ood": 0.1, "steps": None, "cpu_s": 1.0},
    {"arm": "sft", "lr": 0.001, "seed": 0, "id": 0.5, "ood": 0.3, "steps": 9, "cpu_s": 2.4},
    {"arm": "sft", "lr": 0.01, "seed": 0, "id": 0.3, "ood": 0.5, "steps": 8, "cpu_s": 2.6},
]


def test_the_try_to_take_has_the_highest_mean_and_of_equal_ones_the_lower_rate():
    assert tuning.best(ROWS[1:])["lr"] == 0.001
    assert tuning.best([ROWS[1], {**ROWS[2], "ood": 0.51}])["lr"] == 0.01


def test_tries_are_written_in_the_order_of_the_arms(tmp_path):
    plan = Tuning("7-opd", None, None, tmp_path, {"sft": (0.001, 0.01)}, ("start",), lambda arm: ("id", "ood"))
    (tmp_path / "README.md").write_text(f"before\n\n{tuning.BLOCK[0]}\n{tuning.BLOCK[1]}\n\nafter\n")
    tuning.write(plan, ROWS[::-1])
    assert [json.loads(line) for line in plan.file.read_text().splitlines()] == ROWS
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n") and text.endswith("after\n")
    assert "| start |  | 20.0 % | 10.0 % | 15.0 % |  | 1 |  |" in text
    assert "| sft | 0.001 | 50.0 % | 30.0 % | 40.0 % | 9 | 2 | taken |" in text
    assert list(plan.tries) == ["start", "sft"]
