"""The figures of 7-11, from records alone."""

from pathlib import Path

from common.claims import load_claims
from common.records import Record
from common.report.figures import bars, curve

LABELS = load_claims(Path(__file__).with_name("claims.yaml")).labels
PUBLISHED = {"start": 0.115, "sft_one": 0.034, "ppo": 0.150}


def figures(records: list[Record], folder: Path) -> list[str]:
    """Success in and out of distribution at the end and along the way, and what goes wrong under the unseen rule."""
    arms = list(dict.fromkeys(row["arm"] for row in records))
    share = {"labels": LABELS, "x_label": "compute of the branch, percent"}
    names = [
        bars(
            records, "ood", "success", arms, folder / "ood.svg", book=PUBLISHED, labels=LABELS,
            title="Success under the unseen rule J, Q, K = 11, 12, 13 (diamonds: the book, an 11 B model)",
        ),
        bars(
            records, "id", "success", arms, folder / "id.svg", labels=LABELS,
            title="Success on new hands under the training rule J = Q = K = 10",
        ),
    ]  # fmt: skip
    trained = [arm for arm in arms if any(row["arm"] == arm and not row["final"] for row in records)]
    for split, rule in (("ood", "unseen rule"), ("id", "training rule")):
        title = f"Success under the {rule} along training, on some of the hands"
        names.append(curve(records, split, "success", trained, folder / f"curve-{split}.svg", title=title, **share))
    names.append(
        bars(
            records, "ood", "recognition", arms, folder / "recognition.svg", labels=LABELS, unit="rate",
            title="Answers whose number list is right under the unseen rule",
        )
    )  # fmt: skip
    return names


# What the report shows of each arm under the unseen rule, in the order of the columns.
OUTCOMES = {
    "success": "right",
    "training_rule": "right only if J = Q = K = 10",
    "failure/number": "a number not on the table, missing or twice",
    "failure/no_solution": "another value than 24",
    "failure/illegal_formula": "illegal formula",
    "recognition": "number list right",
    "training_rule_probability": "probability of writing 10 for a face card",
}


def sections(records: list[Record]) -> dict[str, str]:
    """Heading -> Markdown: which mechanism the failures under the unseen rule point to, arm by arm."""
    final = [row for row in records if row["final"] and row["split"] == "ood" and row["value"] is not None]
    lines = [f"| arm | {' | '.join(OUTCOMES.values())} |", "| --- |" + " --- |" * len(OUTCOMES)]
    for arm in dict.fromkeys(row["arm"] for row in records):
        cells = []
        for metric in OUTCOMES:
            values = [row["value"] for row in final if (row["arm"], row["metric"]) == (arm, metric)]
            cells.append(f"{100 * sum(values) / len(values):.2f} %" if values else "n/a")
        lines.append(f"| {LABELS.get(arm, arm)} | {' | '.join(cells)} |")
    text = (
        "Means over seeds of first answers under J, Q, K = 11, 12, 13. A policy that memorised the training rule would "
        "write 10 for a face card, so the second and the last column would grow; a policy that no longer reads the cards "
        "would lose the number list; one that reads the rule but drifts back to familiar numbers inside the formula would "
        "grow in the third column.\n\n"
    )
    return {"Which mechanism the failures point to": text + "\n".join(lines)}
