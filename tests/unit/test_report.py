"""Reports from synthetic records: numbers in tables, failed cells, escaping, determinism and the check mode."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from common.claims import load_claims
from common.records import Point, read_json, read_jsonl
from common.report import tables
from common.report.build import build, check, load, main_table
from common.report.figures import bars, curve, title_of
from common.report.index import generated, replaced

ARMS = {"start": 0.15, "sft": 0.10, "grpo": 0.22}
HOSTILE = '<script>alert(1)</script> <img src=x onerror=alert(2)> </pre> \u202e\x1b[31m & "q" é\n| a | b |\u2028end'
CLAIMS = """
experiment: "7-99"
title: A synthetic experiment
claims:
  - id: rl-raises
    sentence: RL raises success under the unseen rule
    book: "+3.5 points"
    source: 11.5 to 15.0
    test: {kind: difference, metric: success, split: ood, arm: grpo, versus: start, direction: greater}
  - id: sft-raises
    sentence: SFT raises success under the unseen rule
    book: "-8.1 points"
    source: 11.5 to 3.4
    test: {kind: difference, metric: success, split: ood, arm: sft, versus: start, direction: greater, margin: 0.01}
  - id: start-near-15
    sentence: The start is at 15 %
    book: 11.5 %
    source: 11.5 %
    test: {kind: within, metric: success, split: ood, arm: start, low: 0.1499, high: 0.1501}
  - id: more-tries
    sentence: More tries help
    book: "+5.99"
    source: "+5.99"
    study: ablation
    test: {kind: value, metric: tries, split: ood, arm: ten, threshold: 1, direction: greater}
discrepancies:
  - {id: level, book: 15.0 %, source: 15.1 %, claim: rl-raises, ours: {metric: success, split: ood, arm: grpo}}
table:
  - {variant: grpo, metric: success, split: ood, book: 15.0 %, source: 15.0 %, claim: rl-raises}
  - {variant: start, metric: success, split: ood, book: 11.5 %, source: 11.5 %}
  - {variant: grpo, metric: tries, split: ood}
  - {variant: ppo, metric: success, split: ood}
departures: [A tiny model <b>instead</b> of a large one.]
metrics:
  tries: {unit: count, meaning: answers given per hand}
labels: {grpo: GRPO, sft: "SFT, one solution"}
"""


def synthetic_records(seeds=range(100, 105), arms=ARMS, items=80, shift=0.0):
    rows = []
    hard = np.random.default_rng(0).normal(0.0, 0.02, size=items)
    for arm, level in arms.items():
        for seed in seeds:
            rng = np.random.default_rng((seed, len(arm)))
            labels = {"experiment": "7-99", "scale": "laptop", "variant": None, "arm": arm, "seed": seed}
            for step in range(0, 50, 10):
                value = round(float(0.15 + (level - 0.15) * step / 50 + rng.normal(0, 0.01)), 6)
                rows.append(
                    {
                        **labels,
                        "split": "ood",
                        "metric": "success",
                        "value": value,
                        "n": items,
                        "step": step,
                        "final": False,
                    }
                )
            values = np.clip(level + shift + hard + rng.normal(0.0, 0.03, size=items), 0, 1).round(6)
            final = {**labels, "split": "ood", "n": items, "step": 50, "final": True}
            rows.append({**final, "metric": "success", "value": round(float(values.mean()), 6), "items": values.tolist()})
            rows.append({**final, "metric": "tries", "value": 3.0 + seed % 2})
    return rows


def synthetic_provenance(seeds=range(100, 105), arms=ARMS, failed=(), **configuration):
    cells = [
        {"arm": arm, "seed": seed, "wall_s": 10.0, "cpu_s": 9.5, "peak_memory_mb": 400.0, "flops": 2.5e12}
        for arm in arms
        for seed in seeds
        if (arm, seed) not in failed
    ]
    return {
        "command": "python -m experiments.exp_7_99.run scale=laptop",
        "commit": "0123abc",
        "dirty": False,
        "configuration": {
            "scale": "laptop",
            "study": "main",
            "variant": None,
            "overrides": [],
            "device": "cpu",
            "dtype": "float32",
        }
        | configuration,
        "packages": {"torch": "2.13.0"},
        "machine": {"cpu": "Some CPU", "cores": 2, "memory_gib": 7.8, "system": "Linux x86_64", "python": "3.11.2"},
        "arms": list(arms),
        "seeds": list(seeds),
        "wall_s": 90.0,
        "totals": {"wall_s": 150.0, "cpu_s": 140.0, "peak_memory_mb": 400.0, "flops": 3.75e13},
        "stages": [],
        "cells": cells,
        "failed": [{"arm": arm, "seed": seed, "error": "ValueError: <boom>"} for arm, seed in failed],
    }


def rollout(arm, pick, text):
    return {
        "pick": pick,
        "arm": arm,
        "seed": 100,
        "prompt": "GP 1 2 3 4 => ",
        "reward": 1.0,
        "parts": {"format": 0.5},
        "reason": "ok",
        "success": True,
        "segments": [{"text": text, "mask": 1}, {"text": "try again", "mask": 0}],
    }


def write_result(folder, records, provenance, rollouts=()):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "records.jsonl").write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in records))
    (folder / "provenance.json").write_text(json.dumps(provenance, allow_nan=False))
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rollouts))
    return folder


def report_text(folder, claims_path):
    """report.md, built without figures (they take most of the time)."""
    build(folder, claims_path, figures=lambda records, pictures: [])
    return (folder / "report.md").read_text()


@pytest.fixture
def claims_path(tmp_path):
    folder = tmp_path / "experiments" / "exp_7_99_synthetic"
    folder.mkdir(parents=True)
    (folder / "claims.yaml").write_text(CLAIMS)
    return folder / "claims.yaml"


@pytest.fixture
def result(tmp_path):
    rollouts = [rollout("grpo", pick, HOSTILE) for pick in ("surprising", "worst", "best")]
    folder = tmp_path / "results" / "7-99" / "laptop"
    return write_result(folder, synthetic_records(), synthetic_provenance(), rollouts)


def row_of(markdown, *words):
    lines = [line for line in markdown.splitlines() if line.startswith("|") and all(word in line for word in words)]
    assert len(lines) == 1, lines
    return lines[0]


def test_report_shows_the_three_verdicts_with_their_numbers(result, claims_path):
    text = report_text(result, claims_path)
    assert "Verdicts: 1 supported, 1 contradicted, 1 undecided." in text
    assert row_of(text, "RL raises success", "success (ood): GRPO minus start > 0 |").endswith("| supported |")
    assert row_of(text, "SFT raises success", "5 seeds, 80 items, paired").endswith("| contradicted |")
    assert row_of(text, "The start is at 15 %").endswith("| undecided |")
    assert "More tries help" not in text
    rows = read_jsonl(result / "records.jsonl")
    mean = np.mean([row["value"] for row in rows if row["arm"] == "grpo" and row["final"] and row["metric"] == "success"])
    assert f"{100 * mean:.1f} % [" in row_of(text, "| GRPO | success, ood |", "15.0 %")
    assert row_of(text, "| ppo |").split("|")[3].strip() == "not run"
    assert "15.1 %" in row_of(text, "| level |", "supported")
    assert "0123abc" in text and "python -m experiments.exp_7_99.run scale=laptop" in text
    assert "seeds 100, 101, 102, 103, 104" in text


def test_e06_failed_cells_stay_in_view(tmp_path, claims_path):
    values = {100: 0.8, 101: 0.9, 104: 0.85}
    rows = [row for row in synthetic_records(items=80) if row["arm"] != "grpo"]
    base = {
        "experiment": "7-99",
        "scale": "laptop",
        "variant": None,
        "arm": "grpo",
        "split": "ood",
        "metric": "success",
    }
    rows += [{**base, "seed": seed, "value": value, "n": 80, "step": 50, "final": True} for seed, value in values.items()]
    failed = (("grpo", 102), ("grpo", 103), *(("ppo", seed) for seed in range(100, 105)))
    folder = write_result(tmp_path / "r", rows, synthetic_provenance(arms=[*ARMS, "ppo"], failed=failed))
    text = report_text(folder, claims_path)
    assert "over 3 of 5 seeds (2 failed; 51.0 % with failures as 0)" in row_of(text, "| GRPO | success, ood |", "15.0 %")
    assert row_of(text, "| ppo | success").split("|")[3].strip() == "n/a (0 of 5 seeds; 5 failed)"
    assert "- grpo, seed 102: ValueError: &lt;boom>" in text
    assert "Warning: no cell of ppo finished." in text
    assert "Warning: grpo" not in text
    assert not re.search(r"\bnan\b", text.lower())
    assert row_of(text, "| GRPO | 3 of 5 |")


def test_a_cell_that_has_not_run_yet_is_no_failure(tmp_path, claims_path):
    rows = [row for row in synthetic_records(items=80) if (row["arm"], row["seed"]) != ("grpo", 104)]
    provenance = synthetic_provenance(failed=(("grpo", 104),))
    provenance["failed"][0]["error"] = "not finished"
    text = report_text(write_result(tmp_path / "r", rows, provenance), claims_path)
    shown = next(line for line in text.splitlines() if line.startswith("| GRPO | success, ood |"))
    assert "over 4 of 5 seeds (1 not finished)" in shown and "failed" not in shown


def test_e15_undefined_values_are_named_and_nan_is_refused(tmp_path, claims_path):
    rows = synthetic_records()
    for row in rows:
        if row["arm"] == "grpo" and row["final"] and row["metric"] == "tries":
            row.update(value=None, reason="no answer had the word NaN")
    folder = write_result(tmp_path / "r", rows, synthetic_provenance())
    result = load(folder, load_claims(claims_path))
    shown = tables.measured(result.records, Point("grpo", "tries", "ood"), result.claims, result.provenance)
    assert shown == "n/a (0 of 5 seeds; 5 undefined: no answer had the word NaN)"
    (folder / "records.jsonl").write_text('{"value": 1}\n{"value": NaN}\n')
    with pytest.raises(ValueError, match=r"records.jsonl, line 2: NaN is not JSON"):
        read_jsonl(folder / "records.jsonl")
    (folder / "provenance.json").write_text('{"wall_s": Infinity}')
    with pytest.raises(ValueError, match="Infinity"):
        read_json(folder / "provenance.json")


class Page(HTMLParser):
    """Tags, attributes and the text per class of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.classes, self.text = [], [], [], {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.classes.append(dict(attrs).get("class"))

    def handle_endtag(self, tag):
        self.classes.append(None)

    def handle_data(self, data):
        if self.classes and self.classes[-1]:
            self.text.setdefault(self.classes[-1], []).append(data)


def test_hostile_rollout_text_is_escaped_and_made_visible(result, claims_path):
    report_text(result, claims_path)
    html = (result / "report.html").read_text()
    page = Page(html)
    assert "script" not in page.tags and "img" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    policy = page.text["policy"]
    assert len(policy) == 3
    assert policy[0] == HOSTILE.replace("\u202e", "\\u202e").replace("\x1b", "\\u001b").replace("\u2028", "\\u2028")
    assert "try again" in page.text["environment"]
    assert [h.split(":")[0] for h in re.findall(r"<h3>([^<]+)", html)] == ["Best", "Worst", "Surprising"]
    assert "&lt;b&gt;instead&lt;/b&gt;" in html


def test_the_page_is_self_contained(result, claims_path):
    build(result, claims_path)
    page = Page((result / "report.html").read_text())
    fetched = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "data", "srcset")]
    assert fetched and all(value.startswith("#") for value in fetched)
    assert "url(http" not in (result / "report.html").read_text()
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in fetched} <= set(ids)
    assert page.tags.count("svg") == len(list((result / "figures").glob("*.svg"))) == 3


def test_rebuilding_gives_the_same_bytes(result, claims_path, tmp_path):
    build(result, claims_path)
    first = {path.name: path.read_bytes() for path in result.rglob("*") if path.is_file()}
    build(result, claims_path, out=tmp_path / "again")
    for path in (tmp_path / "again").rglob("*.*"):
        if path.is_file():
            assert path.read_bytes() == first[path.name], path.name
    assert check(result, claims_path) == []


def one_figure(records, folder):
    (folder / "one.svg").write_text(f"<svg><dc:title>{len(records)} records</dc:title></svg>")
    return ["one.svg"]


def test_check_finds_one_changed_character_and_stray_or_missing_figures(result, claims_path):
    build(result, claims_path, one_figure)
    report, figure, stray = result / "report.md", result / "figures" / "one.svg", result / "figures" / "zzz.svg"
    report.write_text(report.read_text().replace("supported |", "supportee |", 1))
    assert check(result, claims_path, one_figure) == [str(report)]
    build(result, claims_path, one_figure)
    figure.rename(stray)
    assert check(result, claims_path, one_figure) == [str(figure), str(stray)]
    build(result, claims_path, one_figure)
    assert not stray.exists()
    rows = read_jsonl(result / "records.jsonl")
    next(row for row in rows if row["final"])["value"] += 1
    write_result(result, rows, synthetic_provenance(), read_jsonl(result / "rollouts.jsonl"))
    assert str(report) in check(result, claims_path, one_figure)


def test_a_variant_stands_beside_its_base_with_the_changed_keys(result, claims_path):
    folder = result / "variants" / "algo.lr=0.1"
    changed = {"variant": "algo.lr=0.1", "overrides": ["algo.lr=0.1"]}
    write_result(folder, synthetic_records(shift=0.05), synthetic_provenance(**changed))
    text = report_text(folder, claims_path)
    assert "Changed against the base: `algo.lr=0.1`" in text
    line = row_of(text, "| GRPO | success, ood |", "15.0 %")
    assert "points [" in line and "beyond noise" in line
    table = main_table(load(folder, load_claims(claims_path)))
    assert list(table.header[2:5]) == ["ours (95 % interval, n)", "base", "this minus base"]


def test_e04_a_gap_under_different_settings_or_within_noise_is_not_called_real(result, claims_path):
    folder = result / "variants" / "dtype=bfloat16"
    changed = {"variant": "dtype=bfloat16", "overrides": ["dtype=bfloat16"], "dtype": "bfloat16"}
    write_result(folder, synthetic_records(shift=0.05), synthetic_provenance(**changed))
    line = row_of(report_text(folder, claims_path), "| GRPO | success, ood |", "15.0 %")
    assert "not comparable: dtype bfloat16 against float32" in line
    same = result / "variants" / "x=1"
    write_result(same, synthetic_records(), synthetic_provenance(variant="x=1", overrides=["x=1"]))
    text = report_text(same, claims_path)
    assert "within noise" in row_of(text, "| GRPO | success, ood |", "15.0 %")
    assert "device cpu, dtype float32" in text


def test_e17_report_prints_n_and_draws_no_verdict_from_two_seeds(tmp_path, claims_path):
    seeds = range(100, 102)
    folder = write_result(tmp_path / "r", synthetic_records(seeds), synthetic_provenance(seeds))
    text = report_text(folder, claims_path)
    assert "Verdicts: 3 no verdict." in text
    assert "2 of at least 3 seeds" in row_of(text, "| RL raises success")
    assert "2 seeds, 80 items" in row_of(text, "| GRPO | success, ood |", "15.0 %")


def test_e05_contaminated_splits_are_named(tmp_path, claims_path):
    rows = synthetic_records()
    rows.append({**rows[-1], "metric": "overlap", "value": 2})
    folder = write_result(tmp_path / "r", rows, synthetic_provenance())
    warning = "Items of ood that also occur in training: 2. Warning: results on this split are contaminated."
    assert warning in report_text(folder, claims_path)


def test_ablation_reports_hold_only_their_own_claims(result, claims_path):
    arms = {"ten": 0.2}
    folder = write_result(result / "ablation", synthetic_records(arms=arms), synthetic_provenance(arms=arms, study="ablation"))
    text = report_text(folder, claims_path)
    assert row_of(text, "More tries help").endswith("| supported |")
    assert "RL raises success" not in text
    assert "**Ablation study.**" in text
    assert row_of(text, "| ten | success, ood |")


def test_figures_are_deterministic_and_carry_their_title(tmp_path):
    records = synthetic_records()
    for folder in ("a", "b"):
        assert curve(records, "ood", "success", list(ARMS), tmp_path / folder / "c.svg", {"book 15 %": 0.15}) == "c.svg"
        bars(
            records,
            "ood",
            "success",
            [*ARMS, "ppo"],
            tmp_path / folder / "b.svg",
            book={"grpo": 0.15},
            title="Final & <all>",
        )
    for name in ("c.svg", "b.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    svg = (tmp_path / "a" / "b.svg").read_text()
    assert title_of(svg) == "Final & <all>"
    assert "no value" in svg and "<dc:date>" not in svg


def test_index_and_readme_blocks_come_from_the_records(tmp_path, result, claims_path):
    (tmp_path / "README.md").write_text("# Suite\n<!-- results:begin -->\nold\n<!-- results:end -->\ntail\n")
    readme = claims_path.parent / "README.md"
    readme.write_text("<!-- report:begin --><!-- report:end -->\n")
    texts = generated(tmp_path, tmp_path / "results")
    index = texts[tmp_path / "results" / "README.md"]
    assert row_of(index, "[7-99 A synthetic experiment](7-99/laptop/report.md)", "| 1 | 1 | 1 | 0 | 1.5 | Some CPU, 2 cores |")
    front = texts[tmp_path / "README.md"]
    assert front.startswith("# Suite\n<!-- results:begin -->\n\n| experiment | claim | book |")
    name = "[7-99](results/7-99/laptop/report.md): 1 supported, 1 contradicted, 1 undecided"
    assert row_of(front, f"| {name} | RL raises success").endswith("| supported |")
    assert front.endswith("<!-- results:end -->\ntail\n") and "old" not in front
    assert row_of(texts[readme], "| RL raises success").endswith("| supported |")
    assert "| `tries` | count | answers given per hand |" in texts[tmp_path / "docs" / "metrics.md"]
    assert "| `kl/ref` | nats |" in texts[tmp_path / "docs" / "metrics.md"]
    readme.write_text("no markers\n")
    with pytest.raises(ValueError, match=r"exp_7_99_synthetic/README\.md needs one line <!-- report:begin -->"):
        replaced(readme, ("<!-- report:begin -->", "<!-- report:end -->"), "x")
