"""Advantages by value. Case ids (L.., G..) name the public faults of other programs that a test guards against."""

import math

import numpy as np
import pytest
import torch

from common import advantages as adv
from common.advantages import gae, group_centre, group_norm, outcome_advantages, rloo

NAN = math.nan


def rewards(*values):
    return torch.tensor(values, dtype=torch.float64)


def groups(*sizes):
    return torch.tensor([group for group, size in enumerate(sizes) for _ in range(size)])


def assert_close(actual, expected, tolerance=1e-6):
    assert actual.tolist() == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(
    ("ddof", "eps", "winner", "loser"),
    [
        (1, 0.0, 1.5, -0.5),
        (1, 1e-4, 1.49970006, -0.49990002),
        (0, 0.0, 1.73205081, -0.57735027),
        (0, 1e-4, 1.7316509, -0.57721697),
    ],
)
def test_group_norm_reference_values(ddof, eps, winner, loser):
    assert_close(group_norm(rewards(1, 0, 0, 0), groups(4), ddof=ddof, eps=eps), [winner] + [loser] * 3)


def test_group_centre_and_rloo_reference_values():
    assert_close(group_centre(rewards(1, 0, 0, 0), groups(4)), [0.75, -0.25, -0.25, -0.25])
    assert_close(rloo(rewards(1, 0, 0, 0), groups(4)), [1.0, -1 / 3, -1 / 3, -1 / 3])


def test_batch_centre_and_reward_values():
    assert_close(adv.batch_centre(rewards(1, 0, 0, 1, 0)), [0.6, -0.4, -0.4, 0.6, -0.4])
    assert_close(adv.reward(rewards(1, NAN, 0.25)), [1.0, 0.0, 0.25])


def test_rloo_is_the_leave_one_out_formula():
    r = torch.rand(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loops = [float(r[i] - (r.sum() - r[i]) / 4) for i in range(5)]
    assert_close(rloo(r, groups(5)), loops)


@pytest.mark.parametrize("name", ["group_norm", "group_centre", "rloo", "batch_centre"])
def test_L01_equal_rewards_give_exactly_zero(name):
    for value in (0.3, 0.1 + 0.2, 1 / 3, 1e6 + 0.1):
        a = outcome_advantages(name, rewards(*[value] * 4), groups(4))
        assert a.abs().max() == 0.0


def test_L01_equality_survives_the_order_of_summation():
    a = group_norm(rewards(0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6, 0.6), groups(4), eps=0.0)
    assert a.abs().max() == 0.0


def test_L01_spread_is_judged_by_group():
    flat = adv.zero_spread(rewards(0.3, 0.3, 0.3, 1, 0, 0), groups(3, 3))
    assert flat.tolist() == [True] * 3 + [False] * 3


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_L02_one_against_the_rest_stays_bounded(n):
    pairs = [(low / 20, high / 20) for low in range(21) for high in range(21)]
    r = rewards(*[value for low, high in pairs for value in (low, *[high] * (n - 1))])
    for a in (
        group_norm(r, groups(*[n] * 441)),
        group_norm(r, groups(*[n] * 441), eps=0.0),
        rloo(r, groups(*[n] * 441)),
    ):
        assert a.abs().max() <= math.sqrt(n)


def test_L02_single_precision_rewards():
    r = torch.tensor([0.0] + [0.95] * 7)
    assert_close(rloo(r, groups(8)), [-0.95] + [0.95 / 7] * 7)
    assert_close(group_norm(r, groups(8), eps=0.0)[:1], [-2.47487373])


def test_L03_statistics_are_per_prompt():
    r, g = rewards(1, 0, 0, 0, 1, 1, 1, 0), groups(4, 4)
    assert_close(group_norm(r, g, eps=0.0), [1.5, -0.5, -0.5, -0.5, 0.5, 0.5, 0.5, -1.5])
    shifted = r + torch.tensor([100.0] * 4 + [0.0] * 4)
    for name in ("group_norm", "group_centre", "rloo"):
        assert_close(outcome_advantages(name, shifted, g), outcome_advantages(name, r, g).tolist())


def test_L03_order_of_episodes_does_not_matter():
    r, g = rewards(1, 0, 0, 0, 1, 1, 1, 0), groups(4, 4)
    order = torch.tensor([7, 0, 3, 5, 1, 2, 6, 4])
    assert torch.equal(group_norm(r[order], g[order]), group_norm(r, g)[order])


@pytest.mark.parametrize("name", ["group_norm", "group_centre", "rloo"])
def test_L05_groups_of_one_are_refused(name):
    with pytest.raises(ValueError, match="3 of 3 groups have one episode"):
        outcome_advantages(name, rewards(1, 0, 1), torch.arange(3))


@pytest.mark.parametrize("name", ["group_norm", "group_centre", "rloo"])
def test_L06_sample_without_tokens_moves_nobody(name):
    assert outcome_advantages(name, rewards(100, 1), groups(2), torch.tensor([False, True])).tolist() == [0.0, 0.0]
    alone = outcome_advantages(name, rewards(1, 0, 0), groups(3))
    for stranger in (-5.0, 100.0, NAN):
        masked = torch.tensor([True, True, True, False])
        a = outcome_advantages(name, rewards(1, 0, 0, stranger), groups(4), masked)
        assert torch.equal(a[:3], alone)
        assert a[3] == 0.0


def test_L22_one_reward_per_episode():
    for wrong in ([], [1.0], [1.0] * 5, [1.0] * 7, np.ones(5), (x for x in [1.0] * 7)):
        with pytest.raises(ValueError, match=r"judge returned \d rewards for 6 episodes"):
            adv.rewards_tensor(wrong, 6, "judge")
    with pytest.raises(ValueError, match="judge returned a single number for 6 episodes"):
        adv.rewards_tensor(1.0, 6, "judge")
    with pytest.raises(ValueError, match="infinite"):
        adv.rewards_tensor([1.0, math.inf], 2)
    for right in ([0, 1, 0, 1, 0, 1], np.array([0, 1] * 3), (x % 2 for x in range(6))):
        assert adv.rewards_tensor(right, 6).tolist() == [0.0, 1.0] * 3


def test_L23_unscored_rewards_leave_their_group():
    r = adv.rewards_tensor([1, None, 0, 1], 4)
    a = group_norm(r, groups(4), eps=0.0)
    assert_close(a, [0.57735027, 0.0, -1.15470054, 0.57735027])
    assert torch.equal(a, group_norm(rewards(1, NAN, 0, 1), groups(4), eps=0.0))
    assert adv.scored(r).tolist() == [True, False, True, True]
    assert outcome_advantages("batch_centre", r, groups(4)).isfinite().all()
    all_missing = adv.rewards_tensor([None, None, 1, 0], 4)
    assert outcome_advantages("rloo", all_missing, groups(2, 2)).tolist() == [0.0, 0.0, 1.0, -1.0]


def test_unknown_estimator_names_the_allowed_ones():
    with pytest.raises(ValueError, match="group_norm, group_centre, rloo, batch_centre, reward"):
        outcome_advantages("gae", rewards(1, 0), groups(2))


# --- generalised advantage estimation ---


def row(*values):
    return torch.tensor([values], dtype=torch.float32)


def test_gae_skips_environment_tokens():
    a, returns, action = gae(row(0, 0, 0, 0, 0, 1), torch.zeros(1, 6), row(1, 1, 0, 0, 1, 1), gamma=0.9, lam=0.95)
    assert_close(a[0], [0.62502637, 0.731025, 0, 0, 0.855, 1])
    assert torch.equal(a, returns)
    assert action[0].tolist() == [True, True, False, False, True, True]


def test_G01_truncated_episodes_bootstrap_and_terminated_ones_do_not():
    r, v, mask = row(1, 1, 1).expand(3, 3), row(2, 2, 2).expand(3, 3), torch.ones(3, 3)
    terminated = torch.tensor([False, True, True])
    truncated = torch.tensor([True, False, True])
    bootstrap = adv.bootstrap_values(torch.tensor([3.0, 3.0, 3.0]), terminated, truncated)
    assert bootstrap.tolist() == [3.0, 0.0, 0.0]
    a, returns, _ = gae(r, v, mask, gamma=0.9, lam=0.95, bootstrap_B=bootstrap)
    assert_close(a[0], [2.7267425, 2.2535, 1.7])
    assert_close(a[1], [0.752975, -0.055, -1])
    assert_close(a[2], [0.752975, -0.055, -1])
    assert torch.allclose(returns, a + v)


@pytest.mark.parametrize(
    ("mask", "rewards_T", "expected"),
    [
        ((1, 1, 0, 0, 1, 1), (0, 0, 0, 0, 0, 1), (1, 1, 0, 0, 1, 1)),
        ((1, 1, 1, 0, 0), (0, 0, 0, 0, 1), (1, 1, 1, 0, 0)),
        ((0, 0, 1, 1), (0, 0, 0, 1), (0, 0, 1, 1)),
        ((0, 1, 1, 0), (1, 0, 0, 0), (0, 1, 0, 0)),
    ],
)
def test_L20_outcome_reward_reaches_every_policy_token(mask, rewards_T, expected):
    _, returns, _ = gae(row(*rewards_T), torch.zeros(1, len(mask)), row(*mask), gamma=1.0, lam=1.0)
    assert returns[0].tolist() == list(expected)


def test_L20_trailing_tool_span_does_not_discount():
    for gamma in (0.9, 0.0):
        a, _, _ = gae(row(0, 0, 0, 0, 1), torch.zeros(1, 5), row(1, 1, 1, 0, 0), gamma=gamma, lam=0.95)
        assert a[0, 2] == 1.0


def test_L18_values_of_masked_positions_are_never_read():
    values = torch.tensor([[NAN, 0.5, 0.5, NAN, 0.5, NAN]])
    mask = row(0, 1, 1, 0, 1, 0)
    a, returns, _ = gae(row(0, 0, 0, 0, 1, 0), values, mask, gamma=1.0, lam=1.0)
    assert_close(a[0], [0, 0.5, 0.5, 0, 0.5, 0])
    assert_close(returns[0], [0, 1, 1, 0, 1, 0])


def slow_gae(r, v, mask, gamma, lam, bootstrap):
    """Plain loops over one row."""
    where = [t for t in range(len(mask)) if mask[t]]
    out, following, next_value = [0.0] * len(mask), 0.0, bootstrap
    for t in reversed(where):
        following = r[t] + gamma * next_value - v[t] + gamma * lam * following
        out[t], next_value = following, v[t]
    return out


def test_gae_equals_plain_loops_on_long_random_rows():
    random = np.random.default_rng(0)
    r, v = random.normal(size=(3, 700)), random.normal(size=(3, 700))
    mask = random.random((3, 700)) < 0.8
    mask[2] = False
    bootstrap = random.normal(size=3)
    a, _, _ = gae(
        torch.tensor(r * mask),
        torch.tensor(v),
        torch.tensor(mask),
        gamma=0.99,
        lam=0.95,
        bootstrap_B=torch.tensor(bootstrap),
    )
    for b in range(3):
        assert_close(a[b], slow_gae(r[b], v[b], mask[b], 0.99, 0.95, bootstrap[b]), 1e-5)


def test_gae_over_turns_counts_one_action_per_turn():
    turn = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1]])
    mask = turn >= 0
    values = torch.tensor([[9.0, 0.2, 9, 9, 9, 9, 0.4, 9]])
    a, returns, action = gae(row(0, 0, 0, 0.5, 0, 0, 0, 1), values, mask, gamma=0.9, lam=0.8, turn_BT=turn)
    second = 1 - 0.4
    first = 0.5 + 0.9 * 0.4 - 0.2 + 0.9 * 0.8 * second
    assert_close(a[0], [0, first, first, first, 0, 0, second, second])
    assert action[0].nonzero()[:, 0].tolist() == [1, 6]
    assert_close(returns[0], [0, first + 0.2, 0, 0, 0, 0, 1.0, 0])


def test_gae_over_adjacent_turns_and_rows_without_actions():
    turn = torch.tensor([[0, 0, 1, 1], [-1, -1, -1, -1]])
    a, _, action = gae(
        torch.tensor([[0.0, 1, 0, 2], [0, 0, 0, 0]]), torch.zeros(2, 4), turn >= 0, gamma=1.0, lam=1.0, turn_BT=turn
    )
    assert a.tolist() == [[3, 3, 2, 2], [0, 0, 0, 0]]
    assert action.sum(1).tolist() == [2, 0]
    a, _, _ = gae(torch.zeros(1, 3), torch.zeros(1, 3), torch.zeros(1, 3), gamma=1.0, lam=1.0)
    assert a.tolist() == [[0, 0, 0]]


def test_reward_to_go_skips_environment_tokens():
    """REINFORCE++: the score 1 at the end, minus a penalty per token of the policy's own."""
    rewards_BT, mask = row(-0.1, -0.2, 0, 0.7), row(1, 1, 0, 1)
    assert_close(adv.reward_to_go(rewards_BT, mask)[0], [0.4, 0.5, 0, 0.7])
    assert_close(adv.reward_to_go(rewards_BT, mask, 0.5)[0], [-0.025, 0.15, 0, 0.7])
    assert_close(adv.reward_to_go(row(0, 0, 1, 0), row(1, 1, 0, 0), 0.5)[0], [0.5, 1, 0, 0])


def test_whitened_reward_to_go_counts_every_token_once():
    """Tokens 1, 1, 1 and 0: mean 3/4 and standard deviation 1/2, not those of the two episodes."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    a = adv.masked_whiten(adv.reward_to_go(torch.tensor([[0.0, 0, 1], [0, 5, 5]]) * mask, mask), mask)
    assert_close(a.flatten(), [0.5, 0.5, 0.5, -1.5, 0, 0])


def test_masked_whiten_values():
    x = torch.tensor([[1.0, 3.0, 99.0], [5.0, NAN, 99.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert_close(adv.masked_whiten(x, mask).flatten(), [-1, 0, 0, 1, 0, 0])
    assert adv.masked_whiten(torch.full((2, 2), 0.3), torch.ones(2, 2)).abs().max() == 0.0
    assert adv.masked_whiten(torch.ones(1, 1), torch.ones(1, 1)).tolist() == [[0.0]]
