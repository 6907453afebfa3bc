"""Intervals and tests: Wilson, pass@k, standard errors, and the bootstrap over seeds and items.

The bootstrap is two-way. Seeds and items are redrawn independently and each acts through its own mean, so an
interval covers both "another training run" and "other test items". With five seeds the plain percentile bootstrap
is too narrow; the seed part is therefore stretched by sqrt(S / (S - 1)) * t(S - 1) / z, the factor that makes it
agree with Student's t when the seeds are all there is (Hesterberg 2015, "What Teachers Should Know About the
Bootstrap", section 4.3). Everything is drawn from generators with fixed seeds: the same data give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations

import numpy as np
from scipy import special

DRAWS = 4000
CONFIDENCE = 0.95
MIN_SEEDS = 3  # fewer seeds never yield a verdict


@dataclass(frozen=True)
class Sample:
    """One arm on one metric: `values[seed]`, and `items[seed]` (per-item means in one fixed item order) where known."""

    values: Mapping[int, float]
    items: Mapping[int, Sequence[float]] = field(default_factory=dict)

    @property
    def seeds(self) -> list[int]:
        return sorted(self.values)

    def matrix(self, seeds: Sequence[int]) -> np.ndarray | None:
        """Values as [S, I]; None when a seed has no items, their counts differ (not shared) or one is undefined."""
        rows = [self.items.get(seed, ()) for seed in seeds]
        if len({len(row) for row in rows}) != 1 or not len(rows[0]) or any(None in row for row in rows):
            return None
        return np.asarray(rows, dtype=float)


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval over `seeds` seeds and `items` shared items (0: seeds only)."""

    mean: float
    low: float
    high: float
    seeds: int
    items: int = 0
    paired: bool = False


def wilson(successes: int, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson score interval of a rate (Wilson 1927). Raises ValueError unless 0 <= successes <= n and n > 0."""
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"wilson needs 0 <= successes <= n and n > 0, not {successes} of {n}")
    z = float(special.ndtri(0.5 + confidence / 2))
    rate = successes / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return low, high


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """Unbiased pass@k of one problem, 1 - C(n-c, k) / C(n, k) (Chen et al. 2021); None when n < k samples exist."""
    if not 0 <= c <= n or k < 1:
        raise ValueError(f"pass@k needs 0 <= c <= n and k >= 1, not n={n} c={c} k={k}")
    if n < k:
        return None
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean_pass_at_k(samples: Iterable[tuple[int, int]], k: int) -> float | None:
    """Mean over problems of pass@k, from (n samples, c correct) per problem; None when any problem has n < k."""
    per_problem = [pass_at_k(n, c, k) for n, c in samples]
    known = [value for value in per_problem if value is not None]
    if not known or len(known) < len(per_problem):
        return None
    return sum(known) / len(known)


def best_of_k(scores: Sequence[float], k: int, values: Sequence[float] | None = None) -> float | None:
    """Unbiased mean value of the answer with the highest score among k, from n >= k answers to one problem; else None.

    Mean over all subsets of k answers: the i-th lowest score (from 1) is the highest of C(i-1, k-1) of C(n, k) of them
    (Nakano et al. 2021, WebGPT, appendix on best-of-n; Gao et al. 2023). Equal scores share their chance evenly.
    `scores` picks (a reward model, or the verifier itself); `values` judges what is picked (default: the scores). With
    scores of 0 and 1 this is `pass_at_k`.
    """
    values = scores if values is None else values
    if k < 1 or len(values) != len(scores):
        raise ValueError(f"best of k needs k >= 1 and a value per score, not k={k}, {len(scores)} scores, {len(values)} values")
    if len(scores) < k:
        return None
    levels: dict[float, list[float]] = {}
    for score, value in sorted(zip(scores, values, strict=True)):
        levels.setdefault(score, []).append(value)
    total, below = 0.0, 0
    for level in levels.values():
        chance = math.comb(below + len(level), k) - math.comb(below, k)
        total += chance * sum(level) / len(level)
        below += len(level)
    return total / math.comb(len(scores), k)


def standard_error(successes: int, n: int) -> float:
    """Standard error of a rate, sqrt(p (1 - p) / (n - 1)); use `wilson` for an interval (this is 0 at 0 of n)."""
    if not 0 <= successes <= n or n < 2:
        raise ValueError(f"a standard error needs 0 <= successes <= n and n >= 2, not {successes} of {n}")
    rate = successes / n
    return math.sqrt(rate * (1 - rate) / (n - 1))


def group_mean(rates: Sequence[float], sizes: Sequence[int], weighted: bool) -> tuple[float, float]:
    """Mean of group rates and its standard error: by group (weighted=False) or by item (weighted=True)."""
    total = sum(sizes) if weighted else len(sizes)
    weights = [(size if weighted else 1) / total for size in sizes]
    mean = sum(w * p for w, p in zip(weights, rates, strict=True))
    variance = sum(w * w * p * (1 - p) / (n - 1) for w, p, n in zip(weights, rates, sizes, strict=True))
    return mean, math.sqrt(variance)


def overlaps(splits: Mapping[str, Iterable[Hashable]]) -> dict[tuple[str, str], int]:
    """How many distinct items each pair of splits shares; items are canonical keys (sorted deal plus rule, say)."""
    sets = {name: set(keys) for name, keys in splits.items()}
    return {(a, b): len(sets[a] & sets[b]) for a, b in combinations(sorted(sets), 2)}


@lru_cache(maxsize=4)
def _shares(n: int, stream: int) -> np.ndarray:
    """Bootstrap weights [DRAWS, n] that sum to 1 per row, centred at 1/n so that a draw is a deviation."""
    generator = np.random.default_rng((20260, stream, n))
    counts = generator.multinomial(n, np.full(n, 1.0 / n), size=DRAWS)
    return (counts - 1.0) / n


def _stretch(seeds: int) -> float:
    """Small-sample factor of the seed part (see the module's docstring)."""
    level = 0.5 + CONFIDENCE / 2
    return math.sqrt(seeds / (seeds - 1)) * float(special.stdtrit(seeds - 1, level) / special.ndtri(level))


def _deviations(values_S: np.ndarray, matrix_SI: np.ndarray | None, stream: int) -> np.ndarray:
    """Bootstrap deviations of the mean, [DRAWS]: stretched seed part plus item part."""
    draws = np.zeros(DRAWS)
    if len(values_S) > 1:
        draws += _stretch(len(values_S)) * (_shares(len(values_S), stream) @ (values_S - values_S.mean()))
    if matrix_SI is not None:
        items_I = matrix_SI.mean(axis=0)
        draws += _shares(len(items_I), 0) @ (items_I - items_I.mean())
    return draws


def _bootstrap(values_S: np.ndarray, matrix_SI: np.ndarray | None) -> tuple[float, float, float]:
    mean = float(values_S.mean())
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(_deviations(values_S, matrix_SI, 1), [tail, 1 - tail])
    return mean, mean + float(low), mean + float(high)


def _rate_interval(values_S: np.ndarray, fewest: int) -> tuple[float, float] | None:
    """Wilson where the bootstrap would claim false certainty: one trial per seed, or a rate stuck at 0 or 1.

    `fewest`: items of the seed that has fewest, shared or not; a stuck rate counts as one model on that many items.
    """
    if values_S.min() == values_S.max() and values_S[0] in (0.0, 1.0):
        n = max(fewest, len(values_S))
        return wilson(n if values_S[0] else 0, n)
    if not fewest and np.isin(values_S, (0.0, 1.0)).all():
        return wilson(int(values_S.sum()), len(values_S))
    return None


def estimate(sample: Sample, rate: bool = False) -> Estimate | None:
    """Mean of one arm with a 95 % interval over seeds (and shared items); None without any seed.

    `rate`: the values are shares in [0, 1]; the interval is then clipped to it and never has zero width at 0 or 1.
    One seed without items gives an interval of zero width around the only number there is (no verdict rests on it).
    """
    seeds = sample.seeds
    if not seeds:
        return None
    values_S = np.array([sample.values[seed] for seed in seeds], dtype=float)
    matrix_SI = sample.matrix(seeds)
    items = 0 if matrix_SI is None else matrix_SI.shape[1]
    mean, low, high = _bootstrap(values_S, matrix_SI)
    if rate:
        fewest = min(len(sample.items.get(seed, ())) for seed in seeds)
        low, high = _rate_interval(values_S, fewest) or (max(0.0, low), min(1.0, high))
    return Estimate(mean, low, high, len(seeds), items)


def difference(arm: Sample, versus: Sample, rate: bool = False) -> Estimate | None:
    """Mean of arm - versus with a 95 % interval; None when either side has no seed.

    Paired by seed (and by item where both carry the same number of items) over the common seeds. With fewer than
    three common seeds, the two arms are independent samples and their intervals are combined (MOVER, Zou & Donner 2008;
    for two rates this is Newcombe's hybrid score interval). The same combination replaces a paired interval of rates
    that would have zero width or rests on one trial per seed.
    """
    if not arm.values or not versus.values:
        return None
    common = sorted(set(arm.values) & set(versus.values))
    if len(common) < min(MIN_SEEDS, len(arm.values), len(versus.values)):
        return _apart(arm, versus, rate)
    values_S = np.array([arm.values[seed] - versus.values[seed] for seed in common], dtype=float)
    ours, theirs = arm.matrix(common), versus.matrix(common)
    shared = ours is not None and theirs is not None and ours.shape == theirs.shape
    matrix_SI = ours - theirs if shared and ours is not None and theirs is not None else None
    items = 0 if matrix_SI is None else matrix_SI.shape[1]
    mean, low, high = _bootstrap(values_S, matrix_SI)
    if rate:
        if math.isclose(low, high, abs_tol=1e-12) or (not items and np.isin(values_S, (-1.0, 0.0, 1.0)).all()):
            wider = _apart(_only(arm, common), _only(versus, common), rate)
            low, high = (wider.low, wider.high) if wider else (low, high)
        low, high = max(-1.0, low), min(1.0, high)
    return Estimate(mean, low, high, len(common), items, paired=True)


def _only(sample: Sample, seeds: Sequence[int]) -> Sample:
    items = {seed: sample.items[seed] for seed in seeds if seed in sample.items}
    return Sample({seed: sample.values[seed] for seed in seeds}, items)


def _apart(arm: Sample, versus: Sample, rate: bool) -> Estimate | None:
    """Difference of two independent samples: their own intervals combined (MOVER)."""
    left, right = estimate(arm, rate), estimate(versus, rate)
    if left is None or right is None:
        return None
    mean = left.mean - right.mean
    low = mean - math.hypot(left.mean - left.low, right.high - right.mean)
    high = mean + math.hypot(left.high - left.mean, right.mean - right.low)
    return Estimate(mean, low, high, min(left.seeds, right.seeds))


def judge(interval: Estimate, low: float = -math.inf, high: float = math.inf, closed: bool = False) -> str:
    """Verdict on the claim that the true value lies between `low` and `high` (ends included if `closed`).

    supported: the 95 % interval lies wholly inside; contradicted: wholly outside, on one side; else undecided;
    "no verdict" with fewer than three seeds.
    """
    if interval.seeds < MIN_SEEDS:
        return "no verdict"
    if (low < interval.low and interval.high < high) or (closed and low <= interval.low and interval.high <= high):
        return "supported"
    if interval.high < low or interval.low > high:
        return "contradicted"
    return "undecided"
