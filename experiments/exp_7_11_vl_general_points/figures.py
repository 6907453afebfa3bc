"""The figures of 7-11-vl, from records alone, and what the pictures look like."""

import base64
from pathlib import Path

import numpy as np

from common.cards.hands import RANKS
from common.claims import load_claims
from common.files import write_text
from common.records import Record
from common.report.figures import bars, curve
from common.seeding import python_random
from experiments.exp_7_11_vl_general_points import drawing

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
    return [*names, looks(folder / "looks.svg")]


def looks(path: Path, columns: int = 5) -> str:
    """Writes example pictures, one look a row, equal cards and jitter in a column; the file's name.

    The pixels stand in the SVG as a bitmap without compression, so that every machine writes the same bytes.
    """
    stream = python_random("looks")
    rows: list[list[np.ndarray]] = [[], [], []]
    for seed in range(columns):
        cards = tuple(stream.choices(RANKS, k=4))
        picks = [tuple(stream.choices(drawing.SUITS_OF[look], k=4)) for look in ("black", "red")] + [("S", "H", "D", "C")]
        inks = [drawing.in_their_ink(suits) for suits in picks[:2]] + [("black", *drawing.COOL)]
        for row, suits, ink in zip(rows, picks, inks, strict=True):
            row.append(drawing.draw(cards, suits, ink, seed))
    image = np.vstack([np.hstack(row) for row in rows])
    height, width, _ = image.shape
    numbers = {2: 54 + image.size, 10: 54, 14: 40, 18: width, 22: height, 34: image.size}  # byte offset -> four-byte field
    head = bytearray(54)
    for place, number in numbers.items():
        head[place : place + 4] = number.to_bytes(4, "little")
    head[:2], head[26], head[28] = b"BM", 1, 24
    data = base64.b64encode(bytes(head) + image[::-1, :, ::-1].tobytes()).decode()  # rows upwards, blue first
    title = "What a model sees, four cards a picture: training (top), the visual shift, other inks of pre-training (bottom)"
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{3 * width}" height="{3 * height}">'
        f'<metadata><dc:title xmlns:dc="http://purl.org/dc/elements/1.1/">{title}</dc:title></metadata>'
        f'<image width="{width}" height="{height}" style="image-rendering: pixelated" href="data:image/bmp;base64,{data}"/>'
        "</svg>\n"
    )
    write_text(path, svg)
    return path.name


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
