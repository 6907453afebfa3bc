"""Our advantages, losses and KL estimators against verl's own functions on the same tensors (extra `verl` only)."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common import advantages, losses

pytest.importorskip("verl")
core = pytest.importorskip("verl.trainer.ppo.core_algos")
ActorConfig = pytest.importorskip("verl.workers.config").ActorConfig

ROWS, TOKENS, GROUP = 8, 7, 4
STREAM = torch.Generator().manual_seed(1)
MASK = (torch.arange(TOKENS) < torch.tensor([7, 1, 3, 6, 2, 5, 4, 7])[:, None]).float()
MASK[0, 2:4] = MASK[3, 1:3] = 0  # tool spans
LOGP = -3 * torch.rand(ROWS, TOKENS, generator=STREAM)
OLD = LOGP + 0.4 * torch.randn(ROWS, TOKENS, generator=STREAM)
ADVANTAGES = torch.randn(ROWS, TOKENS, generator=STREAM)
VALUES = torch.randn(ROWS, TOKENS, generator=STREAM)
RETURNS = torch.randn(ROWS, TOKENS, generator=STREAM)
MODES = {"token-mean": "token_mean", "seq-mean-token-mean": "seq_mean", "seq-mean-token-sum-norm": "seq_sum_const"}


class Settings(SimpleNamespace):
    """verl's actor settings as far as its loss reads them; dual clipping is set out of reach."""

    def get(self, key, default=None):
        return getattr(self, key, default)


SETTINGS = Settings(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1e6, global_batch_info={})


def average(loss_BT, aggregation, constant=None):
    weights = MASK * losses.sequence_weights(MASK.sum(1), aggregation, constant=constant)[:, None]
    return losses.weighted_sum(loss_BT, weights)


@pytest.mark.parametrize("mode", MODES)
def test_policy_loss_equals_verl(mode):
    theirs, ours = LOGP.clone().requires_grad_(), LOGP.clone().requires_grad_()
    value, _ = core.compute_policy_loss_vanilla(OLD, theirs, ADVANTAGES, MASK, mode, SETTINGS)
    loss, _ = losses.ppo_clip(ours, OLD, ADVANTAGES, 0.2, 0.28)
    total = average(loss, MODES[mode], TOKENS)
    assert total.item() == pytest.approx(value.item(), abs=1e-6)
    assert torch.allclose(*(torch.autograd.grad(x, leaf)[0] for x, leaf in ((total, ours), (value, theirs))), atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["gspo", "cispo"])
def test_surrogates_equal_verl(name, mode):
    """Each token has its own advantage here, which tells GSPO's token form from its sequence form."""
    actor = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.1,
        clip_ratio_high=0.15,
        global_batch_info={},
    )
    theirs, ours = LOGP.clone().requires_grad_(), LOGP.clone().requires_grad_()
    value, metrics = core.get_policy_loss_fn(name)(OLD, theirs, ADVANTAGES, MASK, mode, actor)
    where, lengths = MASK.bool(), MASK.sum(1).long()
    loss_N, ratio_N = losses.surrogate(name, ours[where], OLD[where], ADVANTAGES[where], lengths, 0.1, 0.15)
    weights = losses.sequence_weights(lengths, MODES[mode], constant=TOKENS).repeat_interleave(lengths)
    total = losses.weighted_sum(loss_N, weights)
    assert total.item() == pytest.approx(value.item(), abs=1e-6)
    gradients = [torch.autograd.grad(x, leaf)[0] for x, leaf in ((total, ours), (value, theirs))]
    assert torch.allclose(*gradients, atol=1e-6)
    assert gradients[0].abs().max() > 1e-2
    sign_N = ratio_N - 1 if name == "cispo" else ADVANTAGES[where]
    low, high = losses.clip_fractions(ratio_N, sign_N, 0.1, 0.15)
    assert (low | high).float().mean().item() == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-6)


def test_value_loss_equals_verl():
    new = VALUES + 0.5 * torch.randn(ROWS, TOKENS, generator=torch.Generator().manual_seed(2))
    value, _ = core.compute_value_loss(new, RETURNS, VALUES, MASK, 0.2)
    ours = average(losses.value_loss(new, VALUES, RETURNS, 0.2), "token_mean")
    assert ours.item() == pytest.approx(value.item(), abs=1e-6)


@pytest.mark.parametrize("estimator", losses.KL_ESTIMATORS)
def test_kl_estimators_equal_verl(estimator):
    assert torch.allclose(losses.kl(LOGP, OLD, estimator), core.kl_penalty(LOGP, OLD, estimator), atol=1e-6)


def test_gae_equals_verl_over_tool_spans():
    rewards = torch.zeros(ROWS, TOKENS)
    rewards[torch.arange(ROWS), (MASK * torch.arange(TOKENS)).argmax(1)] = 1.0
    theirs, their_returns = core.compute_gae_advantage_return(rewards, VALUES, MASK, 0.9, 0.95)
    ours, returns, _ = advantages.gae(rewards, VALUES, MASK, gamma=0.9, lam=0.95)
    whitened = advantages.masked_whiten(ours, MASK)
    assert torch.allclose(whitened * MASK, theirs * MASK, atol=1e-5)
    assert torch.allclose(returns * MASK, their_returns * MASK, atol=1e-5)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp_equals_verl(gamma):
    rewards = 0.1 * torch.randn(ROWS, TOKENS, generator=torch.Generator().manual_seed(3)) * MASK
    theirs, their_returns = core.compute_reinforce_plus_plus_outcome_advantage(rewards, MASK, SimpleNamespace(gamma=gamma))
    returns = advantages.reward_to_go(rewards, MASK, gamma)
    assert torch.allclose(returns, their_returns, atol=1e-6)
    assert torch.allclose(advantages.masked_whiten(returns, MASK), theirs, atol=1e-5)


def test_reinforce_pp_baseline_equals_verl():
    index = np.arange(ROWS) // GROUP
    reward_B = torch.tensor([1.0, 0, 0, 0, 3, 3, 3, 2])
    rewards = torch.zeros(ROWS, TOKENS)
    rewards[:, 0] = reward_B
    theirs, _ = core.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, MASK, index)
    centred_B = advantages.group_centre(reward_B, torch.tensor(index))
    assert torch.allclose(advantages.masked_whiten(centred_B[:, None] * MASK, MASK), theirs, atol=1e-5)


@pytest.mark.parametrize("rewards", [[1.0, 0, 0, 0, 1, 1, 1, 0], [0.25, 1, -1, 0.5, 3, 3, 3, 2]])
def test_outcome_advantages_equal_verl(rewards):
    index = np.arange(ROWS) // GROUP
    reward_B, group_B = torch.tensor(rewards, dtype=torch.float64), torch.tensor(index)
    token_rewards = torch.zeros(ROWS, TOKENS, dtype=torch.float64)
    token_rewards[:, 0] = reward_B
    ones = torch.ones(ROWS, TOKENS, dtype=torch.float64)
    grpo, _ = core.compute_grpo_outcome_advantage(token_rewards.clone(), ones, index, epsilon=1e-4)
    centred, _ = core.compute_grpo_outcome_advantage(token_rewards.clone(), ones, index, norm_adv_by_std_in_grpo=False)
    rloo, _ = core.compute_rloo_outcome_advantage(token_rewards.clone(), ones, index)
    for name, theirs in (("group_norm", grpo), ("group_centre", centred), ("rloo", rloo)):
        ours = advantages.outcome_advantages(name, reward_B, group_B)
        assert ours.tolist() == pytest.approx(theirs[:, 0].tolist(), abs=1e-6)
