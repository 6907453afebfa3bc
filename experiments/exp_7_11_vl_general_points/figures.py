"""The figures of 7-11-vl, from records alone."""

from pathlib import Path

from common.cards.hands import RANKS
from common.claims import load_claims
from common.records import Record
from common.report.figures import bars, curve

LABELS = load_claims(Path(__file__).with_name("claims.yaml")).labels
PUBLISHED = {
    "rule": {"start": 0.112, "ppo": 0.142, "sft": 0.056},
    "visual": {"start": 0.236, "ppo": 0.412, "sft": 0.137},
}
SPLITS = {"id": "nothing shifted", "rule": "rule shift", "visual": "visual shift", "both": "both shifts"}
SUITS = {"id": ("S", "C"), "visual": ("H", "D")}


def figures(records: list[Record], folder: Path) -> list[str]:
    """Success under each shift, reading of the cards at the end and along the way, and how the two hang together."""
    arms = list(dict.fromkeys(row["arm"] for row in records))
    share = {"labels": LABELS, "x_label": "compute of the branch, percent"}
    names = [
        bars(
            records, split, "success", arms, folder / f"{split}.svg", book=PUBLISHED.get(split), labels=LABELS,
            title=f"Success, {words}{' (diamonds: the book, an 11 B model)' if split in PUBLISHED else ''}",
        )
        for split, words in SPLITS.items()
    ]  # fmt: skip
    trained = [arm for arm in arms if any(row["arm"] == arm and row["step"] not in (0, 100) for row in records)]
    for split in ("visual", "rule"):
        title = f"Success, {SPLITS[split]}, along training, on some of the hands"
        names.append(curve(records, split, "success", trained, folder / f"curve-{split}.svg", title=title, **share))
    for split, look in (("visual", "red"), ("id", "black")):
        title = f"Cards read off pictures in {look} suits along training"
        file = folder / f"recognition-{split}.svg"
        names.append(curve(records, split, "recognition", trained, file, title=title, unit="rate", **share))
    return names


def mean(records: list[Record], arm: str, split: str, metric: str) -> float | None:
    """Mean over seeds of a final number."""
    values = [
        row["value"]
        for row in records
        if row["final"] and (row["arm"], row["split"], row["metric"]) == (arm, split, metric) and row["value"] is not None
    ]
    return sum(values) / len(values) if values else None


def sections(records: list[Record]) -> dict[str, str]:
    """Heading -> Markdown: reading rank by rank and suit by suit, and reading beside success."""
    arms = list(dict.fromkeys(row["arm"] for row in records))
    return {
        "Which cards are read": _ranks(records, arms),
        "Reading and success": _together(records, arms),
    }


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.1f} %"


def _ranks(records: list[Record], arms: list[str]) -> str:
    """A table per look: arms by ranks and suits."""
    parts = []
    for split, look in (("visual", "red (the visual shift)"), ("id", "black (as in training)")):
        columns = [*RANKS, *(f"suit {suit}" for suit in SUITS[split])]
        lines = [f"Pictures in {look} suits:", "", f"| arm | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
        for arm in arms:
            cells = [_percent(mean(records, arm, split, f"recognition/{column}")) for column in columns]
            lines.append(f"| {LABELS.get(arm, arm)} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "Share of the cards that the answer's list states in their place, means over seeds.\n\n" + "\n\n".join(parts)


def _together(records: list[Record], arms: list[str]) -> str:
    """Per arm: change of reading and of success against the start, and their correlation within the arm's answers."""
    columns = ["cards read", "success", "cards read, less the start", "success, less the start", "correlation of the two"]
    parts = []
    for split in ("visual", "id"):
        lines = [f"{SPLITS[split]}:", "", f"| arm | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
        first = [mean(records, "start", split, metric) for metric in ("recognition", "success")]
        for arm in arms:
            now = [mean(records, arm, split, metric) for metric in ("recognition", "success")]
            gaps = [
                "n/a" if a is None or b is None else f"{100 * (a - b):+.1f} points" for a, b in zip(now, first, strict=True)
            ]
            within = mean(records, arm, split, "correlation")
            cells = [*map(_percent, now), *gaps, "n/a" if within is None else f"{within:+.2f}"]
            lines.append(f"| {LABELS.get(arm, arm)} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    text = (
        "Means over seeds. The last column is Pearson's correlation, over the answers of one arm and seed, of the share of "
        "cards read with success.\n\n"
    )
    return text + "\n\n".join(parts)
