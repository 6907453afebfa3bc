"""Intervals, pass@k, standard errors and the bootstrap, by value and by small simulations."""

import math
from itertools import combinations

import numpy as np
import pytest

from common.statistics import (
    Estimate,
    Sample,
    best_of_k,
    difference,
    estimate,
    group_mean,
    judge,
    mean_pass_at_k,
    overlaps,
    pass_at_k,
    standard_error,
    wilson,
)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(0, 20, 0.0, 0.16112516), (7, 25, 0.14283854, 0.47576605), (20, 20, 0.83887484, 1.0)],
)
def test_wilson_reference_values(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=1e-8)


@pytest.mark.parametrize(("successes", "n"), [(3, 2), (-1, 5), (0, 0)])
def test_wilson_refuses_impossible_counts(successes, n):
    with pytest.raises(ValueError, match="wilson"):
        wilson(successes, n)


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [(10, 3, 5, 11 / 12), (10, 3, 1, 0.3), (10, 3, 10, 1.0), (10, 0, 5, 0.0), (4, 1, 2, 0.5), (5, 2, 3, 0.9)],
)
def test_pass_at_k_reference_values(n, c, k, value):
    assert pass_at_k(n, c, k) == pytest.approx(value, abs=1e-12)


def test_e01_pass_at_k_with_fewer_samples_than_k_is_not_available():
    assert pass_at_k(2, 0, 5) is None
    assert pass_at_k(2, 2, 5) is None


def test_e01_pass_at_k_equals_enumeration_of_all_subsets():
    for n in range(1, 9):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_e02_pass_at_k_is_per_problem_and_never_pooled():
    solved = [(1, 1)] * 50 + [(1, 0)] * 114
    assert mean_pass_at_k(solved, 1) == pytest.approx(0.30487805, abs=1e-8)
    assert mean_pass_at_k(solved, 10) is None
    assert mean_pass_at_k([(10, 0), (10, 10)], 5) == 0.5
    values = [mean_pass_at_k([(10, 1), (10, 4)], k) for k in range(1, 11)]
    assert values == sorted(values)


def test_best_of_k_reference_values():
    assert best_of_k([0.0, 1.0, 2.0, 3.0], 1) == 1.5
    assert best_of_k([3.0, 0.0, 2.0, 1.0], 2) == pytest.approx((1 + 2 * 2 + 3 * 3) / 6)
    assert best_of_k([3.0, 0.0, 2.0, 1.0], 4) == 3.0
    assert best_of_k([1.0, 2.0], 3) is None
    assert best_of_k([1, 1, 0, 0], 2, [0.0, 1.0, 5.0, 5.0]) == pytest.approx((5 * 0.5 + 1 * 5) / 6)
    for scores, k, values in (([1.0], 0, None), ([1.0, 2.0], 1, [1.0])):
        with pytest.raises(ValueError, match="best of k needs"):
            best_of_k(scores, k, values)


def test_best_of_k_equals_enumeration_of_all_subsets():
    generator = np.random.default_rng(0)
    for n in range(1, 8):
        scores, values = generator.normal(size=n).tolist(), generator.normal(size=n).tolist()
        for k in range(1, n + 1):
            picked = [values[max(draw, key=scores.__getitem__)] for draw in combinations(range(n), k)]
            assert best_of_k(scores, k, values) == pytest.approx(sum(picked) / len(picked), abs=1e-12)
        for c in range(n + 1):
            assert best_of_k([1] * c + [0] * (n - c), k) == pytest.approx(pass_at_k(n, c, k), abs=1e-12)


def test_best_of_k_by_a_wrong_scorer_can_fall():
    """Over-optimisation in one line: the answer the proxy likes most is the worst."""
    proxy, true = [1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 1.0, -1.0]
    assert [best_of_k(proxy, k, true) for k in (1, 2, 4)] == pytest.approx([0.25, 0.0, -1.0])


def test_e03_standard_errors_belong_to_their_estimator():
    assert standard_error(14, 307) == pytest.approx(0.01192611, abs=1e-8)
    assert standard_error(2, 123) == pytest.approx(0.01145045, abs=1e-8)
    assert group_mean([0.9, 0.1], [10, 1000], weighted=False) == pytest.approx((0.5, 0.05022472), abs=1e-8)
    assert group_mean([0.9, 0.1], [10, 1000], weighted=True) == pytest.approx((0.10792079, 0.00944962), abs=1e-8)


def test_e03_a_rate_of_zero_or_one_never_has_zero_width():
    single_trials = estimate(Sample(dict.fromkeys(range(20), 0.0)), rate=True)
    assert (single_trials.low, single_trials.high) == pytest.approx((0.0, 0.16112516), abs=1e-8)
    items = {seed: [1.0] * 50 for seed in range(5)}
    with_items = estimate(Sample(dict.fromkeys(range(5), 1.0), items), rate=True)
    assert (with_items.low, with_items.high) == pytest.approx(wilson(50, 50))
    own_items = {0: [0.0] * 280, 1: [0.0] * 280, 2: [0.0] * 300}  # two hand splits: no items are shared
    unshared = estimate(Sample(dict.fromkeys(range(3), 0.0), own_items), rate=True)
    assert (unshared.low, unshared.high) == pytest.approx(wilson(0, 280))
    gap = difference(Sample(dict.fromkeys(range(20), 1.0)), Sample(dict.fromkeys(range(20), 0.0)), rate=True)
    assert gap.low == pytest.approx(1 - math.hypot(0.16112516, 0.16112516), abs=1e-7)
    assert gap.high == 1.0
    none = {seed: [0.0] * 300 for seed in range(5)}
    zeros = Sample(dict.fromkeys(none, 0.0), none)
    both_zero = difference(zeros, zeros, rate=True)
    assert (both_zero.low, both_zero.high) == pytest.approx((-0.01264, 0.01264), abs=1e-4)


def test_e05_planted_duplicate_is_counted_by_canonical_key():
    train = [tuple(sorted(deal)) for deal in [(1, 2, 3, 4), (5, 6, 7, 8)]]
    test = [tuple(sorted(deal)) for deal in [(4, 3, 2, 1), (9, 9, 9, 9)]]
    assert overlaps({"train": train, "test": test, "ood": [(0,)]}) == {
        ("ood", "test"): 0,
        ("ood", "train"): 0,
        ("test", "train"): 1,
    }


def test_interval_over_seeds_alone_agrees_with_student_t():
    values = np.random.default_rng(0).normal(10.0, 2.0, size=8)
    found = estimate(Sample(dict(enumerate(values))))
    half = 2.3646 * values.std(ddof=1) / math.sqrt(8)
    assert found.mean == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * half, rel=0.06)
    assert (found.seeds, found.items, found.paired) == (8, 0, False)


def test_pairing_by_seed_removes_what_seeds_share():
    rng = np.random.default_rng(1)
    shared = rng.normal(0.0, 5.0, size=5)
    start = Sample({seed: shared[seed] for seed in range(5)})
    better = Sample({seed: shared[seed] + 1.0 + rng.normal(0.0, 0.05) for seed in range(5)})
    paired = difference(better, start)
    assert paired.paired
    assert 0.8 < paired.low < 1.0 < paired.high < 1.2
    apart = difference(better, Sample({seed + 50: value for seed, value in start.values.items()}))
    assert not apart.paired
    assert apart.high - apart.low > 10 * (paired.high - paired.low)


def _crossed(rng, seeds, items, effect=0.0, seed_sd=0.0, item_sd=0.2, noise=0.3):
    seed_part = rng.normal(0.0, seed_sd, size=(seeds, 1)) if seed_sd else np.zeros((seeds, 1))
    matrix = effect + seed_part + rng.normal(0.0, item_sd, size=(1, items)) + rng.normal(0.0, noise, size=(seeds, items))
    return Sample({s: float(matrix[s].mean()) for s in range(seeds)}, {s: list(matrix[s]) for s in range(seeds)})


def test_pairing_by_item_needs_equal_item_counts_and_defined_items():
    rng = np.random.default_rng(2)
    arm, start = _crossed(rng, 5, 40), _crossed(rng, 5, 40)
    assert difference(arm, start).items == 40
    shorter = Sample(start.values, {**start.items, 3: list(start.items[3])[:-1]})
    assert difference(arm, shorter).items == 0
    undefined = Sample(start.values, {**start.items, 3: [None, *list(start.items[3])[1:]]})
    assert difference(arm, undefined).items == 0
    assert difference(arm, Sample(start.values)).paired


def test_more_item_noise_widens_the_interval():
    quiet = estimate(_crossed(np.random.default_rng(3), 5, 40, item_sd=0.05, noise=0.01))
    loud = estimate(_crossed(np.random.default_rng(3), 5, 40, item_sd=0.5, noise=0.01))
    assert loud.high - loud.low > 3 * (quiet.high - quiet.low)


def test_the_same_data_give_the_same_interval():
    arm = _crossed(np.random.default_rng(4), 5, 60)
    assert estimate(arm) == estimate(Sample(dict(arm.values), dict(arm.items)))


def test_missing_arms_have_no_estimate():
    assert estimate(Sample({})) is None
    assert difference(Sample({}), Sample({1: 0.5})) is None


def test_rates_stay_inside_their_range():
    found = estimate(Sample({1: 0.01, 2: 0.0, 3: 0.2}), rate=True)
    assert 0.0 <= found.low <= found.mean <= found.high <= 1.0


def test_e17_two_small_runs_are_not_ranked():
    sixteen, forty = [1.0] * 4 + [0.0] * 21, [1.0] * 10 + [0.0] * 15
    gap = difference(Sample(dict(enumerate(forty))), Sample({i + 100: v for i, v in enumerate(sixteen)}), rate=True)
    assert gap.mean == pytest.approx(0.24)
    assert judge(gap, low=0.0) == "undecided"


def test_e17_fewer_than_three_seeds_give_no_verdict():
    assert judge(Estimate(1.0, 0.9, 1.1, seeds=2), low=0.0) == "no verdict"
    assert judge(Estimate(1.0, 0.9, 1.1, seeds=3), low=0.0) == "supported"


def test_verdicts_three_ways_and_at_the_edges():
    assert judge(Estimate(1.0, 0.5, 1.5, 5), low=0.0) == "supported"
    assert judge(Estimate(-1.0, -1.5, -0.5, 5), low=0.0) == "contradicted"
    assert judge(Estimate(0.2, -0.1, 0.5, 5), low=0.0) == "undecided"
    assert judge(Estimate(0.0, 0.0, 0.0, 5), low=0.0) == "undecided"
    assert judge(Estimate(11.0, 11.0, 11.0, 5), 11.0, 11.0, closed=True) == "supported"
    assert judge(Estimate(3.0, 2.0, 4.0, 5), 1.0, 3.5) == "undecided"
    assert judge(Estimate(9.0, 8.0, 10.0, 5), 1.0, 3.5) == "contradicted"


@pytest.mark.parametrize(("seeds", "seed_sd"), [(3, 0.05), (5, 0.05), (5, 0.0), (10, 0.02)])
def test_a_null_effect_stays_undecided_and_a_planted_one_is_found(seeds, seed_sd):
    rng = np.random.default_rng(5)
    null = [difference(_crossed(rng, seeds, 60, 0.0, seed_sd), _crossed(rng, seeds, 60, 0.0, seed_sd)) for _ in range(200)]
    undecided = sum(judge(gap, low=0.0) == "undecided" for gap in null) / len(null)
    assert 0.92 <= undecided <= 1.0
    planted = [difference(_crossed(rng, seeds, 60, 0.6, seed_sd), _crossed(rng, seeds, 60, 0.0, seed_sd)) for _ in range(20)]
    assert sum(judge(gap, low=0.0) == "supported" for gap in planted) / len(planted) >= 0.9
