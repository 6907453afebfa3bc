"""What stands in the README of 7-11 beside the report: GRPO under both backends, and the demonstration on SmolLM2.

    python -m experiments.exp_7_11_general_points.pages <result folder of a run with backend=trl>

keeps what the comparison needs of such a run under results/backends/7-11-trl; `make report` writes the tables.
"""

import sys
from pathlib import Path
from typing import Any

from common.claims import load_claims
from common.files import strict_json, write_json
from common.records import Point, Record, read_json, read_jsonl, sample_at
from common.report.index import COMMITTED_SCALE, REPORT_BLOCK, find_experiments, replaced, report_block
from common.report.tables import Table
from common.report.text import interval, plural
from common.statistics import difference, estimate

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLAIMS = HERE / "claims.yaml"
BACKENDS_BLOCK = ("<!-- backends:begin -->", "<!-- backends:end -->")
SMOLLM2_BLOCK = ("<!-- smollm2:begin -->", "<!-- smollm2:end -->")
TRL_FOLDER = Path("backends") / "7-11-trl"
SMOLLM2_FILE = Path("smollm2") / "7-11.json"
SPLITS = {"ood": "unseen rule", "id": "training rule"}
KEPT = ("command", "commit", "dirty", "packages", "machine", "seeds", "wall_s", "cells", "failed")


def keep(source: Path, target: Path) -> None:
    """Copies the final success records and the costs of a run; one line per record."""
    rows = [row for row in read_jsonl(source / "records.jsonl") if row["final"] and row["metric"] == "success"]
    if not rows:
        raise ValueError(f"{source} holds no final success records; give the result folder of a finished run")
    target.mkdir(parents=True, exist_ok=True)
    (target / "records.jsonl").write_text("".join(strict_json(row) + "\n" for row in rows), encoding="utf-8")
    provenance = read_json(source / "provenance.json")
    write_json(target / "provenance.json", {key: provenance[key] for key in KEPT if key in provenance})


def cpu_seconds(provenance: dict[str, Any], arm: str, seeds: list[int]) -> str:
    """Mean CPU seconds of an arm's cells under these seeds."""
    known = [cell["cpu_s"] for cell in provenance["cells"] if cell["arm"] == arm and cell["seed"] in seeds]
    return f"{sum(known) / len(known):,.0f}" if known else ""


def backend_rows(native: list[Record], trl: list[Record], costs: tuple[dict[str, Any], dict[str, Any]]) -> list[list[str]]:
    """One row per arm and rule: both backends on the seeds that both have, and the paired difference."""
    labels = load_claims(CLAIMS).labels
    rows = []
    for arm in ("grpo", "start"):
        for split, rule in SPLITS.items():
            ours, theirs = (sample_at(records, Point(arm, "success", split)) for records in (native, trl))
            seeds = sorted(set(ours.values) & set(theirs.values))
            ours, theirs = (type(s)({k: s.values[k] for k in seeds}, {k: s.items[k] for k in seeds}) for s in (ours, theirs))
            gap, pair = difference(theirs, ours, rate=True), [estimate(sample, rate=True) for sample in (ours, theirs)]
            if gap is None or pair[0] is None or pair[1] is None:
                continue
            inside = pair[0].low <= pair[1].mean <= pair[0].high
            cells = [interval(sample, "rate") for sample in pair if sample is not None]
            gap_text = "equal on every hand" if ours == theirs else interval(gap, "rate", difference=True)
            spent = [cpu_seconds(cost, arm, seeds) for cost in costs]
            rows.append(
                [labels.get(arm, arm), rule, *cells, gap_text, "yes" if inside else "no", plural(len(seeds), "seed"), *spent]
            )
    return rows


def backends_text(results: Path) -> str:
    """GRPO trained by the native loop and by TRL, from the committed records of both."""
    ours, theirs = results / "7-11" / COMMITTED_SCALE, results / TRL_FOLDER
    if not (ours / "provenance.json").is_file() or not (theirs / "provenance.json").is_file():
        return "No comparison yet."
    costs = read_json(ours / "provenance.json"), read_json(theirs / "provenance.json")
    rows = backend_rows(read_jsonl(ours / "records.jsonl"), read_jsonl(theirs / "records.jsonl"), costs)
    header = (
        "arm", "rule", "native, success", "TRL, success", "TRL less native, paired", "TRL's mean in native's interval",
        "both ran", "CPU s a cell, native", "CPU s a cell, TRL",
    )  # fmt: skip
    packages = costs[1]["packages"]
    made = f"Made by `{costs[1]['command']}` with TRL {packages['trl']}, transformers {packages['transformers']}."
    return f"{made}\n\n{Table(header, rows).markdown}"


def smollm2_text(results: Path) -> str:
    """What the demonstration measured, phase by phase, from its committed record."""
    if not (results / SMOLLM2_FILE).is_file():
        return "Not measured yet."
    record = read_json(results / SMOLLM2_FILE)
    rows = [[str(phase.get(key, "")) for key in record["columns"]] for phase in record["phases"]]
    return f"{record['note']}\n\n{Table(list(record['columns'].values()), rows).markdown}"


def pages(root: Path, results: Path) -> dict[Path, str]:
    """The README of 7-11 with all its generated blocks."""
    (experiment,) = (e for e in find_experiments(root) if e.claims.experiment == "7-11")
    readme = root / "experiments" / HERE.name / "README.md"
    text = replaced(readme, REPORT_BLOCK, report_block(root, results, experiment))
    text = replaced(readme, BACKENDS_BLOCK, backends_text(results), text)
    return {readme: replaced(readme, SMOLLM2_BLOCK, smollm2_text(results), text)}


if __name__ == "__main__":
    keep(Path(sys.argv[1]), ROOT / "results" / TRL_FOLDER)
