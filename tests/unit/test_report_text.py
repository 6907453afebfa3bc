"""How reports write numbers, how they treat text that a model wrote, and the command that builds them."""

import json
from types import SimpleNamespace

import pytest

from common.records import read_jsonl
from common.report.build import shown
from common.report.text import cell, interval, number, visible
from common.statistics import Estimate
from scripts import report

MODULE = "experiments.exp_7_99_synthetic.run"


@pytest.mark.parametrize(
    ("value", "unit", "is_difference", "text"),
    [
        (0.201, "rate", False, "20.1 %"),
        (0.049, "rate", True, "+4.9 points"),
        (-0.081, "rate", True, "-8.1 points"),
        (-0.0001, "rate", True, "+0.0 points"),
        (145.0, "count", False, "145"),
        (7432.25, "count", False, "7,432.2"),
        (3.456, "seconds", False, "3.46 s"),
        (0.1234, "nats", False, "0.123 nats"),
        (None, "rate", False, "n/a"),
    ],
)
def test_numbers_are_written_one_way(value, unit, is_difference, text):
    assert number(value, unit, is_difference) == text


def test_intervals_name_the_unit_once_and_vanish_for_a_single_seed():
    assert interval(Estimate(0.201, 0.189, 0.213, 5), "rate") == "20.1 % [18.9, 21.3]"
    assert interval(Estimate(0.049, 0.02, 0.08, 5), "rate", True) == "+4.9 points [+2.0, +8.0]"
    assert interval(Estimate(143.0, 141.5, 145.0, 5), "count") == "143.0 [141.5, 145.0]"
    assert interval(Estimate(0.201, 0.201, 0.201, 1), "rate") == "20.1 %"


def test_an_end_near_zero_shows_its_side():
    assert interval(Estimate(0.021, -0.0004, 0.048, 5), "rate", True) == "+2.1 points [-0.04, +4.8]"
    assert interval(Estimate(0.027, 0.0002, 0.052, 5), "rate", True) == "+2.7 points [+0.02, +5.2]"
    assert interval(Estimate(0.02, 0.0, 1e-9, 5), "rate") == "2.0 % [0.0, 0]"


def test_e16_model_text_survives_json_lines_and_table_cells(tmp_path):
    texts = ['x,y\nz "q" é─', "=1+1", "a\u2028b\u2029c\x85d", "\ufeffbom", "lone \ud800 surrogate"]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="ascii")
    assert [row["text"] for row in read_jsonl(path)] == texts
    raw = tmp_path / "raw.jsonl"
    raw.write_text('{"text": "a\u2028b"}\n{"text": "c"}\n', encoding="utf-8")
    assert [row["text"] for row in read_jsonl(raw)] == ["a\u2028b", "c"]
    assert cell('x|y\nz <b>"q"</b> é─') == 'x\\|y z &lt;b>"q"&lt;/b> é─'


def test_long_rollouts_are_cut_and_counted():
    assert shown("a" * 5000).endswith("a [1,000 more characters]")


def test_visible_spells_out_hidden_characters_only():
    assert visible("a\tb\nc é\u202e\x00") == "a\tb\nc é\\u202e\\u0000"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A tiny checkout with one experiment and one result, whose run module draws no figure."""
    folder = tmp_path / "experiments" / "exp_7_99_synthetic"
    folder.mkdir(parents=True)
    (folder / "claims.yaml").write_text('experiment: "7-99"\ntitle: A synthetic experiment\nclaims: []\n')
    (folder / "README.md").write_text("<!-- report:begin -->\n<!-- report:end -->\n")
    (tmp_path / "README.md").write_text("<!-- results:begin -->\n<!-- results:end -->\n")
    row = {"arm": "base", "split": "test", "metric": "success", "n": 10, "step": 1, "final": True}
    for scale in ("laptop", "smoke"):
        result = tmp_path / "results" / "7-99" / scale
        result.mkdir(parents=True)
        rows = [{**row, "seed": seed, "value": 0.5 + 0.1 * (seed - 101)} for seed in (100, 101, 102)]
        (result / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
        (result / "provenance.json").write_text(json.dumps({"configuration": {"scale": scale}, "arms": ["base"]}))
    module = SimpleNamespace(
        figures=lambda records, pictures: [], sections=lambda records: {"Mechanism": f"{len(records)} *records* <b>"}
    )
    monkeypatch.setattr(report, "importlib", SimpleNamespace(import_module=lambda name: {MODULE: module}[name]))
    return tmp_path


def test_the_command_builds_everything_and_then_finds_it_unchanged(checkout, capsys):
    assert report.run(checkout, report.parse([])) == 0
    laptop = checkout / "results" / "7-99" / "laptop"
    assert "50.0 % [" in (checkout / "README.md").read_text()
    assert "7-99/laptop/report.md" in (checkout / "results" / "README.md").read_text()
    assert "smoke" not in (checkout / "results" / "README.md").read_text()
    assert (checkout / "results" / "7-99" / "smoke" / "report.md").is_file()
    assert "## Mechanism\n\n3 *records* <b>" in (laptop / "report.md").read_text()
    assert "<em>records</em> &lt;b&gt;" in (laptop / "report.html").read_text()
    capsys.readouterr()
    assert report.run(checkout, report.parse(["check=true", "experiment=7-99"])) == 0
    assert capsys.readouterr().out == "7-99: comparing its reports with its records\nAll reports match their records.\n"


@pytest.mark.parametrize("name", ["results/README.md", "results/7-99/laptop/report.html", "README.md", "docs/metrics.md"])
def test_check_names_a_file_that_differs_by_one_character(checkout, capsys, name):
    report.run(checkout, report.parse([]))
    path = checkout / name
    text = path.read_text()
    middle = text.index("success" if "success" in text else "7-99")
    path.write_text(text[:middle] + "?" + text[middle + 1 :])
    capsys.readouterr()
    assert report.run(checkout, report.parse(["check=true"])) == 1
    assert f"differs from its records: {name}" in capsys.readouterr().out.splitlines()
    assert path.read_text()[middle] == "?"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chek=true"], "chek=true: unknown. Did you mean `check`?"),
        (["check=1"], "check=1: allowed are true, false."),
        (["report"], "report: unknown."),
    ],
)
def test_bad_arguments_are_refused_with_one_sentence(words, message, capsys):
    assert report.main(words) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_experiment_is_named(checkout):
    with pytest.raises(report.ConfigError, match="experiment=7-98: allowed are all, 7-99"):
        report.run(checkout, report.parse(["experiment=7-98"]))
