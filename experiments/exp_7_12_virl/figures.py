"""The figures and tables of 7-12, from records alone."""

from __future__ import annotations

from pathlib import Path

from common.claims import load_claims
from common.records import Point, Record, ordered, sample_at
from common.report.figures import bars, curve
from common.report.tables import Table
from common.report.text import NOT_AVAILABLE, number
from common.statistics import estimate
from experiments.exp_7_12_virl.evaluate import CURVES

CLAIMS = load_claims(Path(__file__).with_name("claims.yaml"))
LABELS = CLAIMS.labels
PUBLISHED = {"start": 0.808, "ppo": 0.918, "sft": 0.013}
SPLITS = {
    "id": "new routes, training rule",
    "rule": "new routes, relative rule",
    "city": "other cities, training rule",
    "both": "other cities, relative rule",
}


def figures(records: list[Record], folder: Path) -> list[str]:
    """Per stop and per route at the end for every split, and along training."""
    arms = ordered(records, "arm")
    names = []
    for split, what in SPLITS.items():
        book = PUBLISHED if split == "rule" else None
        note = " (diamonds: the book, an 11 B model)" if book else ""
        names.append(
            bars(records, split, "step_accuracy", arms, folder / f"steps-{split}.svg", book=book, labels=LABELS,
                 title=f"Stops answered rightly within the tries: {what}{note}")
        )  # fmt: skip
        title = f"Routes without a failed stop: {what}"
        names.append(bars(records, split, "success", arms, folder / f"routes-{split}.svg", labels=LABELS, title=title))
    trained = [arm for arm in arms if any(row["arm"] == arm and not row["final"] for row in records)]
    for split in CURVES if trained else ():
        names.append(
            curve(records, split, "step_accuracy", trained, folder / f"curve-{split}.svg", labels=LABELS,
                  title=f"Stops answered rightly along training: {SPLITS[split]}", x_label="compute of the branch, percent")
        )  # fmt: skip
    return names


# What the report shows of each arm under the relative rule, in the order of the columns.
OUTCOMES = {
    "step_first": "first answer right",
    "turn_first": "first answer right where a turn is due",
    "training_rule": "turn written as the training rule has it",
    "failure/illegal_action": "no action of the space",
    "failure/wrong_action": "another action of the space",
    "failure/no_answer": "no JSON answer",
    "recognition": "landmark stated rightly",
    "located": "instruction stated rightly",
}


RULES = {
    "id": "compass (trained)",
    "degrees": "degrees",
    "clock": "clock",
    "renamed": "relative, other verbs",
    "rule": "relative (withheld)",
}


def cell(records: list[Record], arm: str, metric: str, split: str) -> str:
    """A mean over seeds, or that there is none."""
    found = estimate(sample_at(records, Point(arm, metric, split)))
    return number(found.mean, CLAIMS.metric(metric).unit) if found else NOT_AVAILABLE


def sections(records: list[Record]) -> dict[str, str]:
    """Heading -> Markdown: which rules every arm obeys, and which mechanism its failures under the unseen one point to."""
    arms = ordered(records, "arm")
    obeyed = [(LABELS.get(arm, arm), *(cell(records, arm, "step_first", split) for split in RULES)) for arm in arms]
    failed = [(LABELS.get(arm, arm), *(cell(records, arm, metric, "rule") for metric in OUTCOMES)) for arm in arms]
    return {
        "Which rules each arm obeys": "Share of stops whose first answer is right, means over seeds, on new routes in the "
        "training cities. The base was pre-trained on all of these but the last, arms were trained on the first alone.\n\n"
        + Table(("arm", *RULES.values()), obeyed).markdown,
        "Which mechanism the failures under the relative rule point to": "Means over seeds and routes of first answers under "
        "the relative rule, as shares of the stops (of the turns in the second and third column). A policy that memorised the "
        "training rule writes compass words where left and right are asked for.\n\n"
        + Table(("arm", *OUTCOMES.values()), failed).markdown,
    }
