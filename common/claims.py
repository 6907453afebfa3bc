"""claims.yaml: the chapter's statements as tests that were fixed before the run, and their verdicts on records.

Kinds of test:
  difference  arm (on metric, split, step) minus `versus` is greater / less than `margin`
  value       the arm's metric is greater / less than `threshold`
  within      the arm's metric (or, with `versus`, the difference) lies between `low` and `high`, ends included
`versus` is an arm's name, or a mapping that changes any of arm, metric, split, step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from common.config import FIRST_REPORT_SEED
from common.metrics import UNITS, Metric, find
from common.records import Point, Record, sample_at
from common.schema import ConfigError, build, one_of
from common.statistics import MIN_SEEDS, Estimate, difference, estimate, judge

VERDICTS = ("supported", "contradicted", "undecided", "no verdict")
Study = Literal["main", "ablation"]


class ClaimsError(ValueError):
    """claims.yaml is wrong; the message names the file, the claim and the key."""


@dataclass(frozen=True)
class Versus:
    """What the compared number changes; what is left out stays as in the test."""

    arm: str | None = None
    metric: str | None = None
    split: str | None = None
    step: int | None = None


@dataclass(frozen=True)
class Comparison:
    kind: Literal["difference", "value", "within"]
    metric: str
    split: str
    arm: str
    step: int | None = None
    versus: str | Versus | None = None
    direction: Literal["greater", "less"] | None = None
    margin: float = 0.0
    threshold: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def points(self) -> list[Point]:
        """The number, and the number it is compared with if there is one."""
        point = Point(self.arm, self.metric, self.split, self.step)
        if self.versus is None:
            return [point]
        change = Versus(arm=self.versus) if isinstance(self.versus, str) else self.versus
        return [point, replace(point, **{key: value for key, value in vars(change).items() if value is not None})]

    @property
    def bounds(self) -> tuple[float, float]:
        """The range that the claim puts the number (or the difference) in."""
        if self.kind == "within":
            return -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high
        edge = self.margin if self.threshold is None else self.threshold
        if self.direction == "greater":
            return edge, math.inf
        return -math.inf, -edge if self.threshold is None else edge


@dataclass(frozen=True)
class Claim:
    id: str
    sentence: str
    book: str
    source: str
    test: Comparison
    study: Study = "main"


@dataclass(frozen=True)
class Discrepancy:
    id: str
    book: str
    source: str
    ours: tuple[Point, ...] = ()
    claim: str | None = None
    note: str = ""
    study: Study = "main"


@dataclass(frozen=True)
class Row:
    variant: str
    metric: str
    split: str
    book: str = ""
    source: str = ""
    claim: str | None = None
    step: int | None = None
    study: Study = "main"

    @property
    def point(self) -> Point:
        return Point(self.variant, self.metric, self.split, self.step)


@dataclass(frozen=True)
class MetricEntry:
    unit: str
    meaning: str
    label: str = ""


@dataclass(frozen=True)
class Claims:
    """The whole file. `metrics`: the experiment's own metrics; `labels`: what the reader calls an arm."""

    experiment: str
    title: str
    claims: tuple[Claim, ...]
    discrepancies: tuple[Discrepancy, ...] = ()
    table: tuple[Row, ...] = ()
    departures: tuple[str, ...] = ()
    metrics: dict[str, MetricEntry] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def own_metrics(self) -> dict[str, Metric]:
        return {name: Metric(name, entry.unit, entry.meaning, entry.label) for name, entry in self.metrics.items()}

    def metric(self, name: str) -> Metric:
        """The metric's entry; names outside the registry are plain numbers."""
        return find(name, self.own_metrics) or Metric(name, "number", "")

    def label(self, arm: str) -> str:
        """What the reader calls an arm."""
        return self.labels.get(arm, arm)


@dataclass(frozen=True)
class Finding:
    """A claim and what the records say: `reason` is set where there is no verdict."""

    claim: Claim
    verdict: str
    interval: Estimate | None
    reason: str = ""


KEYS = {
    "difference": ("versus", "direction", "margin"),
    "value": ("direction", "threshold"),
    "within": ("versus", "low", "high"),
}
REQUIRED = {"difference": ("versus", "direction"), "value": ("direction", "threshold"), "within": ()}


def load_claims(path: Path) -> Claims:
    """The validated claims file. Raises ClaimsError naming the file, the claim and the key."""
    where = f"{path.parent.name}/{path.name}"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(data, Mapping):
            raise ConfigError("the file must be a mapping with the keys experiment, title, claims, ...")
        for item in data.get("discrepancies") or []:
            if isinstance(item, dict) and isinstance(item.get("ours"), dict):
                item["ours"] = [item["ours"]]  # one number may stand without a list around it
        named: list[tuple[str, Any, str, Callable[[int, Any], str]]] = [
            ("claims", Claim, "claim", lambda i, item: repr(item.get("id", f"number {i}"))),
            ("discrepancies", Discrepancy, "discrepancy", lambda i, item: repr(item.get("id", f"number {i}"))),
            ("table", Row, "table row", lambda i, item: str(i)),
        ]
        for key, schema, word, name in named:
            for i, item in enumerate(data.get(key) or [], start=1):
                build(schema, item, f"{word} {name(i, item) if isinstance(item, Mapping) else i}")
        loaded: Claims = build(Claims, data)
        _check(loaded)
    except yaml.YAMLError as error:
        raise ClaimsError(f"{where}: not valid YAML: {error}") from error
    except ConfigError as error:
        raise ClaimsError(f"{where}: {error}") from error
    return loaded


def _check(claims: Claims) -> None:
    """What types alone cannot say: ids are unique, tests complete, references point somewhere, metrics known."""
    ids = [claim.id for claim in claims.claims]
    for claim in claims.claims:
        here = f"claim {claim.id!r}"
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", claim.id):
            raise ConfigError(f"{here}.id: must be kebab-case (lower case, digits, single hyphens).")
        if ids.count(claim.id) > 1:
            raise ConfigError(f"{here}.id: is used twice.")
        _check_test(claim.test, f"{here}.test")
    for name, entry in claims.metrics.items():
        one_of(f"metrics.{name}.unit", entry.unit, UNITS)
    used = [(f"table row {i}", row.claim, [row.point]) for i, row in enumerate(claims.table, start=1)]
    used += [(f"discrepancy {item.id!r}", item.claim, list(item.ours)) for item in claims.discrepancies]
    used += [(f"claim {claim.id!r}.test", None, claim.test.points) for claim in claims.claims]
    for here, reference, points in used:
        if reference is not None:
            one_of(f"{here}.claim", reference, ids)
        for point in points:
            if find(point.metric, claims.own_metrics) is None:
                raise ConfigError(
                    f"{here}.metric={point.metric}: no registry knows it; add it to the `metrics` block of this file"
                    " with its unit and meaning."
                )


def _check_test(test: Comparison, here: str) -> None:
    for key in ("versus", "direction", "threshold", "low", "high"):
        given = getattr(test, key) is not None
        if given and key not in KEYS[test.kind]:
            raise ConfigError(f"{here}.{key}: is not used by kind={test.kind} (which has {', '.join(KEYS[test.kind])}).")
        if not given and key in REQUIRED[test.kind]:
            raise ConfigError(f"{here}.{key} is missing: kind={test.kind} needs it.")
    if test.margin < 0 or (test.margin and test.kind != "difference"):
        raise ConfigError(f"{here}.margin={test.margin}: the least difference that counts, not negative.")
    if len(test.points) == 2 and test.points[0] == test.points[1]:
        raise ConfigError(f"{here}.versus: names the very number it is compared with.")
    low, high = test.bounds
    if low > high or (test.kind == "within" and low == -math.inf and high == math.inf):
        raise ConfigError(f"{here}.low={test.low}, high={test.high}: give at least one, with low <= high.")


def evaluate(claim: Claim, records: Sequence[Record], rate: bool) -> Finding:
    """The verdict on one claim; `rate` says that the claim's metric is a share in [0, 1]."""
    test = claim.test
    points = test.points
    samples = [sample_at(records, point) for point in points]
    missing = [point for point, sample in zip(points, samples, strict=True) if not sample.values]
    if missing:
        at = f" at step {missing[0].step}" if missing[0].step is not None else ""
        what = f"{missing[0].metric} of {missing[0].arm} on {missing[0].split}{at}"
        return Finding(claim, "no verdict", None, f"no record of {what}")
    interval = estimate(samples[0], rate) if len(samples) == 1 else difference(samples[0], samples[1], rate)
    if interval is None:
        raise ValueError(f"claim {claim.id}: no estimate from {points}")
    if min(seed for sample in samples for seed in sample.values) < FIRST_REPORT_SEED:
        return Finding(claim, "no verdict", interval, f"seeds below {FIRST_REPORT_SEED} are for tuning")
    low, high = test.bounds
    verdict = judge(interval, low, high, closed=test.kind == "within")
    reason = f"{interval.seeds} of at least {MIN_SEEDS} seeds" if verdict == "no verdict" else ""
    return Finding(claim, verdict, interval, reason)


def evaluate_all(claims: Claims, records: Sequence[Record], study: str = "main") -> list[Finding]:
    """The verdicts on every claim of the study, in the file's order."""
    return [
        evaluate(claim, records, claims.metric(claim.test.metric).unit == "rate")
        for claim in claims.claims
        if claim.study == study
    ]
