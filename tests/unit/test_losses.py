"""Losses by value and by gradient. Case ids (L..) name public faults of other programs that a test guards against."""

import math

import pytest
import torch
from torch.nn import functional as F

from common import losses

TWO_ROWS = torch.tensor([[0.9, 0.3, 0, 0, 0, 0], [0.2] * 6])
MASK = torch.tensor([[1, 1, 0, 0, 0, 0], [1] * 6])
SPLITS = [[8], [4, 4], [2, 2, 2, 2], [1] * 8, [3, 3, 2], [5, 3], [4, 3, 1]]


def close(value, tolerance=1e-6):
    return pytest.approx(value, abs=tolerance)


def weights(mask_BT, aggregation, constant=None):
    return mask_BT * losses.sequence_weights(mask_BT.sum(1), aggregation, constant=constant)[:, None]


def average(loss_BT, mask_BT, aggregation, constant=None):
    return losses.weighted_sum(loss_BT, weights(mask_BT, aggregation, constant))


def logprobs(logits, ids):
    return torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0]


@pytest.mark.parametrize(
    ("aggregation", "constant", "plain", "signed"),
    [("token_mean", None, 0.3, 0.5), ("seq_mean", None, 0.4, 0.0), ("seq_sum_const", 1, 1.2, 2.0)],
)
def test_L08_aggregation_values(aggregation, constant, plain, signed):
    assert average(TWO_ROWS, MASK, aggregation, constant=constant).item() == close(plain)
    opposed = torch.tensor([[-1.0] * 6, [1.0] * 6])
    assert average(opposed, MASK, aggregation, constant=constant).item() == close(signed)


def test_L08_dr_grpo_divides_by_the_longest_possible_length():
    assert average(TWO_ROWS, MASK, "seq_sum_const", constant=8).item() == close(0.15)
    opposed = torch.tensor([[-1.0] * 6, [1.0] * 6])
    assert average(opposed, MASK, "seq_sum_const", constant=8).item() == close(0.25)


def test_L08_weight_of_a_token():
    assert losses.sequence_weights(torch.tensor([2, 6]), "token_mean").tolist() == close([1 / 8, 1 / 8])
    assert losses.sequence_weights(torch.tensor([2, 6]), "seq_mean").tolist() == close([1 / 4, 1 / 12])
    assert losses.sequence_weights(torch.tensor([2, 6]), "seq_sum_const", constant=8).tolist() == close([1 / 16] * 2)
    assert losses.sequence_weights(torch.tensor([2, 0, 6]), "seq_mean")[[0, 2]].tolist() == close([1 / 4, 1 / 12])


def test_L08_unknown_aggregation_and_missing_constant():
    with pytest.raises(ValueError, match="token_mean, seq_mean, seq_sum_const"):
        average(TWO_ROWS, MASK, "mean")
    with pytest.raises(ValueError, match="needs the longest completion length"):
        average(TWO_ROWS, MASK, "seq_sum_const")


def test_L07_token_level_and_sequence_level_differ():
    token = average(TWO_ROWS, MASK, "token_mean").item()
    sequence = average(TWO_ROWS, MASK, "seq_mean").item()
    assert (token, sequence) == (close(0.3), close(0.4))


def test_L09_micro_batches_give_the_token_mean():
    loss = torch.tensor([[2.0, 4, 0, 0, 0, 0], [1] * 6])
    share = weights(MASK, "token_mean")
    pieces = [losses.weighted_sum(loss[b : b + 1], share[b : b + 1]).item() for b in range(2)]
    assert sum(pieces) == close(1.5)
    total = MASK.sum()
    assert sum(losses.sft_loss(-loss[b], MASK[b], total).item() for b in range(2)) == close(1.5)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
def test_L09_any_split_gives_the_same_policy_gradient(aggregation, split):
    stream = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 7, 11, generator=stream)
    ids = torch.randint(11, (8, 7), generator=stream)
    mask = torch.arange(7) < torch.tensor([7, 1, 3, 5, 2, 7, 4, 6])[:, None]
    advantages = torch.randn(8, 1, generator=stream)
    old = logprobs(logits, ids) + 0.3 * torch.randn(8, 7, generator=stream)
    share = weights(mask, aggregation, constant=7)

    def gradient(sizes):
        leaf = logits.clone().requires_grad_()
        start = 0
        for size in sizes:
            rows = slice(start, start + size)
            logp = logprobs(leaf[rows], ids[rows])
            loss, _ = losses.ppo_clip(logp, old[rows], advantages[rows])
            losses.weighted_sum(loss, share[rows]).backward()
            start += size
        return leaf.grad

    assert torch.allclose(gradient(split), gradient([8]), atol=1e-6)
    assert gradient(split).abs().max() > 1e-3


@pytest.mark.parametrize("split", SPLITS)
def test_L09_any_split_gives_the_same_sft_gradient(split):
    logp = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    mask = (torch.arange(6) < torch.tensor([6, 1, 2, 5, 3, 6, 4, 1])[:, None]).float()
    start = 0
    for size in split:
        losses.sft_loss(logp[start : start + size], mask[start : start + size], mask.sum()).backward()
        start += size
    assert torch.allclose(logp.grad, -mask / mask.sum(), atol=1e-7)


def test_L11_last_short_window_is_divided_by_what_it_holds():
    lengths = torch.tensor([3, 3])
    share = losses.sequence_weights(lengths, "seq_mean")
    assert (share * lengths * torch.tensor([3.0, 1.0])).sum().item() == close(2.0)
    window = torch.ones(10, 2).split(4)[-1]
    assert losses.sft_loss(-window * torch.tensor([[3.0], [1.0]]), torch.ones(2, 2)).item() == close(2.0)


def test_L12_padding_is_told_by_length_not_by_id():
    loss = torch.tensor([[0.2, 0.4, 0.6, 9, 9]])
    assert average(loss, torch.tensor([[1, 1, 1, 0, 0]]), "token_mean").item() == close(0.4)


def test_masked_positions_may_hold_anything():
    broken = torch.tensor([[0.2, math.nan, math.inf]], requires_grad=True)
    total = average(broken, torch.tensor([[1, 0, 0]]), "seq_mean")
    total.backward()
    assert total.item() == close(0.2)
    assert broken.grad.tolist() == [[1.0, 0.0, 0.0]]


def test_ppo_clip_values_and_gradients():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    logp = ratio.log().requires_grad_()
    loss, seen = losses.ppo_clip(logp, torch.zeros(5), advantage)
    loss.sum().backward()
    assert loss.tolist() == close([-1.2, 1.5, -0.5, 0.8, -1.1])
    assert logp.grad.tolist() == close([0.0, 1.5, -0.5, 0.0, -1.1])
    assert torch.allclose(seen, ratio)
    low, high = losses.clip_fractions(ratio, advantage, 0.2, 0.2)
    assert low.tolist() == [False, False, False, True, False]
    assert high.tolist() == [True, False, False, False, False]


def test_clip_higher_moves_the_upper_bound_alone():
    logp = torch.tensor([1.25, 0.75]).log()
    loss, ratio = losses.ppo_clip(logp, torch.zeros(2), torch.tensor([1.0, -1.0]), 0.2, 0.28)
    assert loss.tolist() == close([-1.25, 0.8])
    low, high = losses.clip_fractions(ratio, torch.tensor([1.0, -1.0]), 0.2, 0.28)
    assert (low.tolist(), high.tolist()) == ([False, True], [False, False])


def test_one_update_per_batch_is_plain_policy_gradient():
    logp = torch.tensor([-0.5, -2.0], requires_grad=True)
    loss, ratio = losses.ppo_clip(logp, logp.detach(), torch.tensor([0.7, -0.3]))
    loss.sum().backward()
    assert logp.grad.tolist() == close([-0.7, 0.3])
    assert ratio.tolist() == [1.0, 1.0]


def packed(*rows):
    return torch.tensor([value for row in rows for value in row])


def test_gspo_values_and_gradients():
    """Two sequences with s = sqrt(1.2 * 0.9) and s = (0.5 * 1 * 1.6) ** (1 / 3); bounds 0.95 and 1.05."""
    ratio, lengths = packed([1.2, 0.9], [0.5, 1.0, 1.6]), torch.tensor([2, 3])
    first, second = 1.03923048, 0.92831777
    for signs, expected, slopes in (
        ((1.0, -1.0), [-first] * 2 + [0.95] * 3, [-first] * 2 + [0.0] * 3),
        ((-1.0, 1.0), [first] * 2 + [-second] * 3, [first] * 2 + [-second] * 3),
    ):
        logp = ratio.log().requires_grad_()
        advantages = torch.tensor(signs).repeat_interleave(lengths)
        loss, seen = losses.gspo(logp, torch.zeros(5), advantages, lengths, 0.05, 0.05)
        loss.sum().backward()
        assert loss.tolist() == close(expected)
        assert logp.grad.tolist() == close(slopes)
        assert seen.tolist() == close([first] * 2 + [second] * 3)
    low, high = losses.clip_fractions(seen, torch.tensor([1.0, -1.0]).repeat_interleave(lengths), 0.05, 0.05)
    assert (low.tolist(), high.any().item()) == ([False] * 2 + [True] * 3, False)


def test_gspo_clips_at_the_papers_bounds_by_default():
    rises = torch.tensor([3e-4, 5e-4, -2e-4, -4e-4])
    loss, ratio = losses.gspo(rises, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.tensor([1, 1, 1, 1]))
    assert (loss * torch.tensor([-1, -1, 1, 1])).tolist() == close([1.0003, 1.0004, 0.9998, 0.9997], 1e-7)
    assert ratio.tolist() == close([1.0003, 1.0005, 0.9998, 0.9996], 1e-6)


def test_gspo_in_token_form_has_the_gradient_of_the_sequence_form():
    stream = torch.Generator().manual_seed(0)
    lengths = torch.tensor([4, 1, 2, 5, 3])
    base, old = torch.randn(15, generator=stream), torch.randn(15, generator=stream)
    advantages_B = torch.tensor([0.7, -1.1, 0.4, 1.3, -0.6])
    token, sequence = base.clone().requires_grad_(), base.clone().requires_grad_()
    loss, _ = losses.gspo(token, old, advantages_B.repeat_interleave(lengths), lengths, 0.1, 0.1)
    losses.weighted_sum(loss, losses.sequence_weights(lengths, "seq_mean").repeat_interleave(lengths)).backward()
    s_B = torch.stack([row.mean() for row in (sequence - old).split(lengths.tolist())]).exp()
    (-torch.minimum(s_B * advantages_B, s_B.clamp(0.9, 1.1) * advantages_B)).mean().backward()
    assert torch.allclose(token.grad, sequence.grad, atol=1e-6)
    assert (token.grad == 0).any()
    assert token.grad.abs().max() > 1e-2


def test_gspo_lets_tokens_have_their_own_advantage():
    logp = torch.tensor([0.1, -0.1], requires_grad=True)
    loss, _ = losses.gspo(logp, torch.zeros(2), torch.tensor([1.0, -2.0]), torch.tensor([2]), 0.2, 0.2)
    loss.sum().backward()
    assert loss.tolist() == close([-1.0, 2.0])
    assert logp.grad.tolist() == close([-1.0, 2.0])


def test_cispo_values_and_gradients():
    ratio, sign = torch.tensor([6.0, 6.0, 0.5, 0.5, 1.5]), torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    logp = torch.full((5,), -0.5, requires_grad=True)
    loss, seen = losses.cispo(logp, -0.5 - ratio.log(), sign)
    loss.sum().backward()
    assert loss.tolist() == close([2.5, -2.5, 0.25, -0.25, 1.5])
    assert logp.grad.tolist() == close([-5.0, 5.0, -0.5, 0.5, -3.0])
    assert torch.allclose(seen, ratio)
    loss, _ = losses.cispo(logp, -0.5 - ratio.log(), sign, 0.2, 0.3)
    assert loss.tolist() == close([0.65, -0.65, 0.4, -0.4, 1.3])


def test_cispo_keeps_a_gradient_where_ppo_cuts_it():
    sign = torch.tensor([1.0, -1.0])
    gradients = []
    for name in ("ppo_clip", "cispo"):
        logp = torch.tensor([1.5, 0.5]).log().requires_grad_()
        loss, _ = losses.surrogate(name, logp, torch.zeros(2), sign, torch.tensor([2]), 0.2, 0.2)
        loss.sum().backward()
        gradients.append(logp.grad.tolist())
    assert gradients == [[0.0, 0.0], close([-1.2, 0.8])]


@pytest.mark.parametrize("name", losses.SURROGATES)
def test_one_update_per_batch_is_plain_policy_gradient_for_every_surrogate(name):
    logp = torch.tensor([-0.5, -2.0, -1.0], requires_grad=True)
    advantages = torch.tensor([0.7, 0.7, -0.3])
    loss, ratio = losses.surrogate(name, logp, logp.detach(), advantages, torch.tensor([2, 1]), 3e-4, 4e-4)
    loss.sum().backward()
    assert logp.grad.tolist() == close([-0.7, -0.7, 0.3])
    assert ratio.tolist() == [1.0, 1.0, 1.0]


def test_an_unknown_surrogate_names_the_allowed_ones():
    with pytest.raises(ValueError, match="policy_loss='grpo' is unknown; allowed: ppo_clip, gspo, cispo"):
        losses.surrogate("grpo", torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.tensor([1]), 0.2, 0.2)


@pytest.mark.parametrize(
    ("logp", "reference", "k1", "k2", "k3"),
    [(-1, -1.5, 0.5, 0.125, 0.10653066), (-0.5, -2, 1.5, 1.125, 0.72313016), (-2, -0.5, -1.5, 1.125, 1.98168907)],
)
def test_kl_estimator_values(logp, reference, k1, k2, k3):
    for name, expected in (("k1", k1), ("k2", k2), ("k3", k3)):
        value = losses.kl(torch.tensor([float(logp)]), torch.tensor([float(reference)]), name).item()
        assert value == close(expected)


P, Q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)


@pytest.mark.parametrize(("name", "mean"), [("k1", 0.04746866), ("k2", 0.05635559), ("k3", 0.04746866)])
def test_kl_estimator_means(name, mean):
    assert (P * losses.kl(P.log(), Q.log(), name)).sum().item() == close(mean)


@pytest.mark.parametrize(
    ("name", "gradient"),
    [("k1", (0, 0, 0)), ("k2", (-0.11489511, -0.0142406, 0.1291357)), ("k3", (-0.1, 0, 0.1))],
)
def test_L14_mean_gradient_of_each_kl_estimator(name, gradient):
    logits = P.log().clone().requires_grad_()
    logp = torch.log_softmax(logits, 0)
    (P * losses.kl(logp, Q.log(), name)).sum().backward()
    assert logits.grad.tolist() == close(gradient)


def test_L14_k2_has_the_gradient_of_reverse_kl_and_k3_of_forward_kl():
    logits = P.log().clone().requires_grad_()
    logp = torch.log_softmax(logits, 0)
    reverse = torch.autograd.grad((logp.exp() * (logp - Q.log())).sum(), logits, retain_graph=True)[0]
    forward = torch.autograd.grad((Q * (Q.log() - logp)).sum(), logits)[0]
    assert reverse.tolist() == close((-0.11489511, -0.0142406, 0.1291357))
    assert forward.tolist() == close((-0.1, 0, 0.1))
    with pytest.raises(ValueError, match="k1, k2, k3"):
        losses.kl(P, Q, "k4")


def test_L21_entropy_values_and_absent_logits():
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, -math.inf, 3.0], [0.0, 1000.0, 0.0]], requires_grad=True)
    entropy = losses.entropy_from_logprobs(torch.log_softmax(logits, -1))
    expected = -(torch.softmax(logits[0], 0) * torch.log_softmax(logits[0], 0)).sum().item()
    assert entropy.tolist() == close([expected, 0.36533386, 0.0])
    assert (entropy >= 0).all()
    entropy.sum().backward()
    assert logits.grad.isfinite().all()


def test_L21_entropy_is_a_mean_over_policy_tokens_alone():
    values = torch.tensor([[0.5, 1.0, 4.0, 4.0, 4.0]])
    mask = torch.tensor([[1, 1, 0, 0, 0]])
    assert average(values, mask, "token_mean").item() == close(0.75)


def test_L26_masked_positions_add_no_ratio():
    logp = torch.tensor([[-0.5, 1.0, -1.0]])
    old = torch.tensor([[-0.5, 0.0, -1.0]])
    _, ratio = losses.ppo_clip(logp, old, torch.ones(1, 3))
    mask = torch.tensor([[1, 0, 1]])
    assert average(ratio, mask, "token_mean").item() == 1.0


def test_L28_small_engine_differences_stay_small_per_token():
    _, ratio = losses.ppo_clip(torch.full((100,), -1.0), torch.full((100,), -1.012), torch.ones(100))
    assert ratio.tolist() == close([1.01207229] * 100)
    assert ratio.prod().item() == close(3.32011692, 1e-3)
    low, high = losses.clip_fractions(ratio, torch.ones(100), 0.2, 0.2)
    assert not (low | high).any()


def test_value_loss_values_and_gradient():
    values = torch.tensor([0.9, 0.9, 0.1], requires_grad=True)
    old, returns = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([1.0, 0.0, 1.0])
    assert losses.value_loss(values, old, returns).tolist() == close([0.005, 0.405, 0.405])
    clipped = losses.value_loss(values, old, returns, 0.2)
    assert clipped.tolist() == close([0.045, 0.405, 0.405])
    clipped.sum().backward()
    assert values.grad.tolist() == close([0.0, 0.9, -0.9])


def test_sft_loss_is_the_mean_over_targets():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    ids, mask = torch.tensor([[1, 2, 3], [4, 0, 1]]), torch.tensor([[1, 1, 0], [0, 1, 1]])
    logp = logprobs(logits, ids)
    expected = F.cross_entropy(logits[mask.bool()], ids[mask.bool()])
    assert losses.sft_loss(logp, mask).item() == close(expected.item())


def test_overlong_penalty_values():
    lengths = torch.tensor([0, 48, 52, 56, 64, 70])
    assert losses.overlong_penalty(lengths, 64, 16).tolist() == close([0, 0, -0.25, -0.5, -1, -1])
    assert losses.overlong_penalty(lengths, 64, 16, 0.5).tolist() == close([0, 0, -0.125, -0.25, -0.5, -0.5])
    assert losses.overlong_penalty(lengths, 64, 0).abs().max() == 0.0
