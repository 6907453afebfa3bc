"""The figures and tables of the report, from records alone: what each way of paying buys, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.claims import load_claims
from common.records import Point, Record, ordered, sample_at
from common.report.figures import bars, curve
from common.report.tables import Table
from common.report.text import NOT_AVAILABLE, interval
from common.statistics import estimate

CLAIMS = load_claims(Path(__file__).with_name("claims.yaml"))
LABELS = CLAIMS.labels
FAMILIES = {
    "files": "FileOps, one stage", "chain": "FileOps, two stages", "desk": "CSOps", "proofs": "theorems",
    "terminal": "terminal",
}  # fmt: skip
AXIS = "compute of the arm's own training, percent"


def family(arm: str) -> str:
    """The world of an arm: its name's first word, or files."""
    head = arm.split("_")[0]
    return {"wide": "proofs", "deep": "proofs"}.get(head, head if head in FAMILIES else "files")


def figures(records: list[Record], folder: Path) -> list[str]:
    """Success and violations of each world at the end and along the way, and credits that nothing came of."""
    names = []
    for name, title in FAMILIES.items():
        arms = [arm for arm in ordered(records, "arm") if family(arm) == name]
        trained = [arm for arm in arms if any(row["arm"] == arm and not row["final"] for row in records)]
        for metric, what in (("success", "success"), ("violations", "violations per episode")):
            if not arms or (name == "proofs" and metric == "violations"):
                continue
            unit = None if metric == "success" else "number"
            path, share = folder / f"{name}-{metric}.svg", {"labels": LABELS, "unit": unit, "x_label": what}
            names.append(bars(records, "hidden", metric, arms, path, title=f"{title}: {what} at the end", **share))
            if trained:
                share = {"labels": LABELS, "unit": unit, "x_label": AXIS, "y_label": what}
                path = folder / f"{name}-{metric}-curve.svg"
                names.append(curve(records, "hidden", metric, trained, path, title=f"{title}: {what} along training", **share))
    arms = [arm for arm in ordered(records, "arm") if family(arm) == "files"]
    if arms:
        path, title = folder / "farmed.svg", "FileOps: credits per episode that nothing came of"
        names.append(bars(records, "hidden", "unused_credits", arms, path, title=title, labels=LABELS, unit="number"))
    return names


BEHAVIOUR = ("success", "perfect", "perfect_all", "violations", "calls", "changes", "credits", "unused_credits")
WAYS = ("outcome", "penalty", "path", "progress")


def sections(records: list[Record]) -> dict[str, str]:
    """Heading -> Markdown: what each policy does, which rules it breaks, and dead groups counted in four ways."""
    found = {}
    for name, title in FAMILIES.items():
        arms = [arm for arm in ordered(records, "arm") if family(arm) == name]
        metrics = BEHAVIOUR if name != "proofs" else ("success", "progress", "calls", "malformed")
        if arms:
            found[f"What the policies do: {title}"] = table(records, arms, metrics, "hidden")
        rules = sorted({row["metric"] for row in records if row["arm"] in arms and row["metric"].startswith("rule/")})
        if arms and name != "proofs":
            found[f"Which rules are broken, times per episode: {title}"] = table(records, arms, rules, "hidden")
    counted = {row["arm"] for row in records if row["metric"] == "dead_path_early"}
    trained = [arm for arm in ordered(records, "arm") if arm in counted]
    if trained:
        metrics = [f"dead_{way}_{when}" for way in WAYS for when in ("early", "late")]
        found["Dead groups: the same samples scored in four ways"] = table(records, trained, metrics, "train")
    return found


def table(records: list[Record], arms: list[str], metrics: Sequence[str], split: str) -> str:
    """One line per arm, one column per metric: mean and interval."""

    def cell(arm: str, metric: str) -> str:
        unit = CLAIMS.metric(metric).unit
        value = estimate(sample_at(records, Point(arm, metric, split)), rate=unit == "rate")
        return interval(value, unit) if value else NOT_AVAILABLE

    names = [metric.removeprefix("rule/").removeprefix("dead_").replace("_", " ") for metric in metrics]
    return Table(("arm", *names), [(LABELS.get(arm, arm), *(cell(arm, metric) for metric in metrics)) for arm in arms]).markdown
