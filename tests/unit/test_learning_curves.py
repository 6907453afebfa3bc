"""Curves read off, and when they reach a target, by hand."""

import pytest

from common.learning_curves import crossing, curve_of, read_off, speed_table

POINTS = [(0.0, 0.2), (10.0, 0.4), (20.0, 0.3), (40.0, 0.9)]


def test_a_curve_is_read_off_between_its_points_and_flat_beyond_them():
    assert [read_off(POINTS, x) for x in (0, 5, 30, 99)] == pytest.approx([0.2, 0.3, 0.6, 0.9])


def test_where_a_curve_first_reaches_a_target():
    assert crossing(POINTS, 0.3) == pytest.approx(5) and crossing(POINTS, 0.6) == pytest.approx(30)
    assert crossing(POINTS, 0.1) == 0 and crossing(POINTS, 0.95) is None and crossing([], 0.1) is None
    assert crossing([(3.0, 0.5)], 0.5) == 3.0 and crossing([(3.0, 0.4)], 0.5) is None


def rows(arm, seed, curve, flops, final, used):
    base = {"arm": arm, "seed": seed}
    found = [{**base, "split": "id", "metric": "success", "step": s, "value": v, "final": False} for s, v in curve.items()]
    found += [{**base, "split": "train", "metric": "flops", "step": s, "value": v, "final": False} for s, v in flops.items()]
    found += [{**base, "split": "id", "metric": "success", "step": 9, "value": final, "final": True}]
    return found + [
        {**base, "split": "train", "metric": f"{x}_used", "step": 9, "value": v, "final": True} for x, v in used.items()
    ]


def test_the_speed_of_an_arm_against_its_rival():
    records = []
    for seed, target in ((100, 0.4), (101, 0.4), (102, 0.8)):
        records += rows("grpo", seed, {0: 0.0, 100: 0.4}, {0: 0.0, 100: 50.0}, target, {"step": 100.0, "flops": 50.0})
        records += rows("opd", seed, {0: 0.0, 20: 0.5}, {0: 0.0, 20: 25.0}, 0.5, {"step": 20.0, "flops": 25.0})
    assert curve_of(records, "opd", 100, "id", "success", "flops") == [(0.0, 0.0), (25.0, 0.5)]
    table = speed_table(records, ["opd", "grpo"], "grpo", {"steps": "step", "FLOPs": "flops"}, {"opd": "OPD"})
    assert table.rows[0] == ("OPD", "2 of 3", "16.0 %", "40.0 %")
    assert table.rows[1] == ("grpo", "2 of 3", "100.0 %", "100.0 %")
    assert table.header[2:] == ("after this share of its steps", "after this share of its FLOPs")
