"""The figures of the report, from records alone: what each way of paying buys, and what it costs."""

from __future__ import annotations

from pathlib import Path

from common.claims import load_claims
from common.records import Record, ordered
from common.report.figures import bars, curve

LABELS = load_claims(Path(__file__).with_name("claims.yaml")).labels
FAMILIES = {
    "files": "FileOps, one stage", "chain": "FileOps, three stages", "desk": "CSOps", "proofs": "theorems",
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
