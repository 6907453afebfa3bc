"""Learning curves as evidence of speed: a curve read off between its points, and when it first reaches a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

import numpy as np

from common.records import Record
from common.report.tables import Table
from common.report.text import NOT_AVAILABLE, number

Points = Sequence[tuple[float, float]]  # (x, value), x rising


def read_off(points: Points, x: float) -> float:
    """The value at x on the straight lines through the points; that of the nearest end beyond them."""
    xs, values = zip(*points, strict=True)
    return float(np.interp(x, xs, values))


def crossing(points: Points, target: float) -> float | None:
    """The first x at which the straight lines through the points reach the target; None if they never do."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 >= target:
            return x0
        if y1 >= target:
            return x0 + (x1 - x0) * (target - y0) / (y1 - y0)
    return points[-1][0] if points and points[-1][1] >= target else None


def curve_of(
    records: Sequence[Record], arm: str, seed: int, split: str, metric: str, x: str = "step"
) -> list[tuple[float, float]]:
    """An arm's curve under one seed from its records on the way; ``x``: "step", or a metric recorded at the same steps."""
    rows = [
        row for row in records if (row["arm"], row["seed"], row["final"]) == (arm, seed, False) and row["value"] is not None
    ]
    place = {row["step"]: row["value"] for row in rows if row["metric"] == x}
    values = {row["step"]: row["value"] for row in rows if (row["split"], row["metric"]) == (split, metric)}
    return sorted((float(step) if x == "step" else place[step], value) for step, value in values.items())


def final_of(records: Sequence[Record], arm: str, split: str, metric: str) -> dict[int, float]:
    """{seed: final value}, undefined ones left out."""
    wanted = (arm, split, metric, True)
    rows = [row for row in records if (row["arm"], row["split"], row["metric"], row["final"]) == wanted]
    return {row["seed"]: row["value"] for row in rows if row["value"] is not None}


def speed_table(
    records: Sequence[Record],
    arms: Sequence[str],
    rival: str,
    axes: Mapping[str, str],
    labels: Mapping[str, str],
    *,
    split: str = "id",
    metric: str = "success",
) -> Table:
    """Per arm: under how many seeds its curve reaches the rival's final value, and after which share of what the rival used.

    ``axes``: heading -> "step" or the metric of the x axis, of which each arm's final record on split ``train`` says the
    total (metric ``<x>_used``). A share is the median over the seeds that reach it.
    """
    targets = final_of(records, rival, split, metric)
    lines = []
    for arm in arms:
        seeds = [seed for seed in targets if curve_of(records, arm, seed, split, metric)]
        shares: list[str] = []
        reached = 0
        for x in axes.values():
            used = final_of(records, rival, "train", f"{x}_used")
            at = {seed: crossing(curve_of(records, arm, seed, split, metric, x), targets[seed]) for seed in seeds}
            found = [place / used[seed] for seed, place in at.items() if place is not None]
            reached = len(found)
            shares.append(number(median(found), "rate") if found else NOT_AVAILABLE)
        if seeds:
            lines.append((labels.get(arm, arm), f"{reached} of {len(seeds)}", *shares))
    return Table(("arm", "seeds that reach it", *(f"after this share of its {name}" for name in axes)), lines)
