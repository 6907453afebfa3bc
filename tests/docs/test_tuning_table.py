"""The README's table of tuning tries says what tuning.jsonl says."""

import json
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "experiments/exp_7_11_general_points"


def test_the_table_of_tries_is_the_record_of_tries():
    tries = [json.loads(line) for line in (FOLDER / "tuning.jsonl").read_text().splitlines()]
    text = (FOLDER / "README.md").read_text()
    table = text.split("<!-- tuning:begin -->")[1].split("<!-- tuning:end -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()[2:]]
    assert len(rows) == len(tries)
    for row, record in zip(rows, tries, strict=True):
        rate = "" if record["lr"] is None else f"{record['lr']:g}"
        assert row[:3] == [record["arm"], rate, record["note"]]
        assert row[3:6] == [f"{100 * x:.1f} %" for x in (record["id"], record["ood"], (record["id"] + record["ood"]) / 2)]
        assert record["seed"] < 100


def test_every_arm_had_the_same_number_of_tries():
    tries = [json.loads(line) for line in (FOLDER / "tuning.jsonl").read_text().splitlines()]
    counts = {arm: sum(record["arm"] == arm for record in tries) for arm in {r["arm"] for r in tries} - {"start"}}
    assert counts == dict.fromkeys(("sft_one", "sft_diverse", "rft", "ppo", "grpo"), 4)
