"""The figures, films and tables of the report, from records alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.claims import load_claims
from common.records import Point, Record, ordered, sample_at
from common.report.figures import bars, curve
from common.report.tables import Table
from common.report.text import NOT_AVAILABLE, interval
from common.statistics import estimate
from experiments.exp_7_13_simplevla import films

CLAIMS = load_claims(Path(__file__).with_name("claims.yaml"))
LABELS = CLAIMS.labels
AXIS = "compute of the arm's reinforcement learning, percent"
VIEWS = {"seen": "trained tasks", "space": "wider spread", "object": "unseen shapes", "goal": "unseen pairs"}
WAY = ("pushcut", "height", "control_steps")


def figures(records: list[Record], folder: Path) -> list[str]:
    """Success along training and at the end of each view, how tasks are solved along the way; films are written beside."""
    arms = ordered([row for row in records if row["metric"] == "success"], "arm")
    trained = [arm for arm in arms if any(row["arm"] == arm and not row["final"] for row in records)]
    names = []
    if trained:
        for metric, what in (("success", "success"), ("pushcut", "solved without a lift"), ("height", "rise of the block, cm")):
            path, unit = folder / f"{metric}-curve.svg", CLAIMS.metric(metric).unit
            title = f"Trained tasks, new layouts: {what}"
            shared = {"labels": LABELS, "unit": unit, "x_label": AXIS, "y_label": what}
            names.append(curve(records, "seen", metric, trained, path, title=title, **shared))
    for view, what in VIEWS.items():
        path = folder / f"{view}-success.svg"
        names.append(bars(records, view, "success", arms, path, title=f"Success: {what}", labels=LABELS, x_label="success"))
    for row in filmed(records):
        films.write_gif(row["items"], folder / film_name(row))
    return names


def filmed(records: list[Record]) -> list[Record]:
    """The records that hold a film."""
    return [row for row in records if row["metric"] == "film"]


def film_name(row: Record) -> str:
    return f"film-{row['split']}-{row['arm']}.gif"


def sections(records: list[Record]) -> dict[str, str]:
    """Heading -> Markdown: every view, every task, how it is done, and films."""
    arms = ordered([row for row in records if row["metric"] == "success"], "arm")
    found = {"Success by view": table(records, arms, [(view, "success", title) for view, title in VIEWS.items()])}
    names = sorted({row["metric"] for row in records if row["metric"].startswith("task/")})
    found["Success by task"] = table(records, arms, [("seen", name, name.removeprefix("task/")) for name in names])
    found["How it is done: trained tasks"] = table(
        records, arms, [("seen", metric, metric.replace("_", " ")) for metric in WAY]
    )
    counted = {row["arm"] for row in records if row["metric"] == "training_steps"}
    if counted:
        columns = [
            ("train", name, name.replace("_", " ")) for name in ("training_steps", "success_area", "dead_early", "dead_late")
        ]
        found["Training"] = table(records, [arm for arm in arms if arm in counted], columns)
    pictures = [
        f"{caption(row)}\n\n![{caption(row)}](figures/{film_name(row)})" for row in filmed(records)
    ]  # fmt: skip
    if pictures:
        head = "Left from above, right from the side; one control step is 60 ms, shown at half speed. Of an arm, the solved "
        head += "episode with the lowest carry among its evaluation on the first seed."
        found["Films"] = "\n\n".join([head, *pictures])
    return found


def caption(row: Record) -> str:
    """What a film shows."""
    who = "A demonstration" if row["split"] == "demonstration" else LABELS.get(row["arm"], row["arm"])
    return f"{who}: {films.task_name(int(row['items'][3]))}, the block rises {row['value']:.1f} cm"


def table(records: list[Record], arms: Sequence[str], columns: Sequence[tuple[str, str, str]]) -> str:
    """One line per arm, one column per (split, metric, heading): mean and interval."""

    def cell(arm: str, split: str, metric: str) -> str:
        unit = CLAIMS.metric(metric).unit
        if metric.startswith("task/"):
            unit = "rate"
        value = estimate(sample_at(records, Point(arm, metric, split)), rate=unit == "rate")
        return interval(value, unit) if value else NOT_AVAILABLE

    lines = [(LABELS.get(arm, arm), *(cell(arm, split, metric) for split, metric, _ in columns)) for arm in arms]
    return Table(("arm", *(title for _, _, title in columns)), lines).markdown
