"""Losses: pure tensor functions of log-probabilities, values and masks.

Shape suffixes: _B episodes, _T tokens, _V vocabulary. A name without a suffix stands for tensors of any one shape
(padded (B, T) or packed (N,)): the functions work element by element.

How a loss is made: a function here gives one number per token; `sequence_weights` gives each token its share for the
whole update; the loss is their inner product. Because the shares are fixed before the batch is cut into micro-batches, the
summed gradient is the same for every cut, also when the last piece is shorter than the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

AGGREGATIONS = ("token_mean", "seq_mean", "seq_sum_const")
KL_ESTIMATORS = ("k1", "k2", "k3")
SURROGATES = ("ppo_clip", "gspo", "cispo")


def sequence_weights(length_B: Tensor, aggregation: str, *, constant: float | None = None) -> Tensor:
    """Weight that each token of a sequence has in the loss of one update, shape (B,), float32.

    token_mean: 1 / (trainable tokens of the update), DAPO (Yu et al. 2025, eq. 8).
    seq_mean: 1 / (sequences * own length), GRPO (Shao et al. 2024, eq. 3); favours short right and long wrong answers.
    seq_sum_const: 1 / (sequences * constant), Dr. GRPO (Liu et al. 2025), `constant` = longest possible completion.

    `length_B` holds the trainable tokens of every sequence of the *update*; a sequence without any is not counted. Cut
    the result into micro-batches. Raises ValueError for an unknown name or a missing constant.
    """
    length_B = length_B.float()
    sequences = (length_B > 0).sum().clamp(min=1)
    if aggregation == "token_mean":
        return torch.ones_like(length_B) / length_B.sum().clamp(min=1)
    if aggregation == "seq_mean":
        return 1 / (sequences * length_B.clamp(min=1))
    if aggregation == "seq_sum_const":
        if not constant or constant <= 0:
            raise ValueError(f"loss_agg=seq_sum_const needs the longest completion length as constant, got {constant}")
        return torch.ones_like(length_B) / (sequences * constant)
    raise ValueError(f"loss_agg={aggregation!r} is unknown; allowed: {', '.join(AGGREGATIONS)}")


def weighted_sum(x: Tensor, weights: Tensor) -> Tensor:
    """Inner product that ignores whatever stands where the weight is 0 (NaN and infinity included)."""
    return torch.where(weights != 0, x * weights, 0.0).sum()


def entropy_from_logprobs(logp_V: Tensor) -> Tensor:
    """Entropy in nats of a full log-probability vector, (..., V) -> (...); a log-probability of -inf counts as absent."""
    return -(logp_V.exp() * logp_V.clamp(min=torch.finfo(logp_V.dtype).min)).sum(-1)


def ppo_clip(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, Tensor]:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) per token, and the ratio (detached).

    PPO, Schulman et al. 2017, eq. 7; separate bounds ("clip-higher") are DAPO's, Yu et al. 2025, eq. 8. With
    old_logp = logp.detach() (one update per batch of samples) the gradient is exactly that of -A * logp.
    """
    ratio = (logp - old_logp).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages), ratio.detach()


def gspo(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantages_N: Tensor,
    length_B: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, Tensor]:
    """`ppo_clip` with one ratio per sequence, s = exp(mean over its tokens of logp - old_logp), and that ratio.

    GSPO, Zheng et al. 2025, eq. 5 and 7, in the token form of eq. 13 and 14: each token's ratio has the value s and the
    gradient s * grad logp of its own token. With the same advantage on all tokens of a sequence the gradient is that of
    the sequence form, and tokens may also have their own. A sequence is clipped as a whole.

    length_B: tokens of each sequence in the packed tensors, which hold whole sequences one after the other. The ratio
    of a long sequence stays far closer to 1 than that of a token, hence the paper's narrow bounds.
    """
    row_N = torch.repeat_interleave(torch.arange(len(length_B), device=logp_N.device), length_B)
    total_B = torch.zeros(len(length_B), device=logp_N.device).index_add(0, row_N, (logp_N - old_logp_N).detach())
    mean_N = (total_B / length_B.clamp(min=1))[row_N]
    return ppo_clip(mean_N + logp_N - logp_N.detach(), torch.zeros_like(mean_N), advantages_N, clip_low, clip_high)


def cispo(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, clip_low: float = 1.0, clip_high: float = 4.0
) -> tuple[Tensor, Tensor]:
    """-stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logp per token, and the ratio (detached).

    CISPO, MiniMax-M1 2025, eq. 4 and 5: the importance weight is bounded, and no token loses its gradient. clip_low 1
    sets no lower bound, as in the paper.
    """
    ratio = (logp - old_logp).exp().detach()
    return -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages * logp, ratio


def surrogate(
    name: str,
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantages_N: Tensor,
    length_B: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Loss per token and ratio (detached) by the rule `name` (one of SURROGATES); length_B as in `gspo`."""
    if name == "ppo_clip":
        return ppo_clip(logp_N, old_logp_N, advantages_N, clip_low, clip_high)
    if name == "gspo":
        return gspo(logp_N, old_logp_N, advantages_N, length_B, clip_low, clip_high)
    if name == "cispo":
        return cispo(logp_N, old_logp_N, advantages_N, clip_low, clip_high)
    raise ValueError(f"policy_loss={name!r} is unknown; allowed: {', '.join(SURROGATES)}")


def clip_fractions(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Bool per token: the gradient was cut at the lower bound (A < 0), at the upper bound (A > 0)."""
    return (ratio < 1 - clip_low) & (advantages < 0), (ratio > 1 + clip_high) & (advantages > 0)


def kl(logp: Tensor, ref_logp: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate per token of KL(policy || reference) from samples of the policy. Schulman 2020 (Approximating KL).

    With d = logp - ref_logp (expectations over the policy's own samples):

    | name | value            | mean value | mean gradient when used as a loss                              |
    | k1   | d                | exact KL   | 0: useless as a loss, right as a reward penalty                 |
    | k2   | d^2 / 2          | biased     | that of KL(policy || reference): the right one for a loss       |
    | k3   | exp(-d) - 1 + d  | exact KL   | that of KL(reference || policy): p - q on the logits            |

    GRPO (Shao et al. 2024, eq. 4) puts k3 into the loss; AlgoConfig refuses k1 there. Raises ValueError for an unknown
    name.
    """
    difference = logp - ref_logp
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    if estimator == "k3":
        return (-difference).exp() - 1 + difference
    raise ValueError(f"kl_estimator={estimator!r} is unknown; allowed: {', '.join(KL_ESTIMATORS)}")


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = None) -> Tensor:
    """0.5 * max((V - R)^2, (clip(V, V_old +- clip) - R)^2) per token; None: 0.5 * (V - R)^2.

    The clipped form is that of the original PPO program (Engstrom et al. 2020, Implementation matters, section 3).
    """
    squared = (values - returns) ** 2
    if clip is None:
        return 0.5 * squared
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum(squared, (clipped - returns) ** 2)


def sft_loss(logp_BT: Tensor, mask_BT: Tensor, total_tokens: Tensor | float | None = None) -> Tensor:
    """Mean negative log-likelihood of the target tokens (mask 1).

    For a micro-batch give `total_tokens`, the target tokens of the whole update: the pieces then add up to the mean
    over all tokens, whatever the cut. None: this is the whole update.
    """
    total = mask_BT.sum() if total_tokens is None else torch.as_tensor(total_tokens, dtype=torch.float32)
    return weighted_sum(-logp_BT, mask_BT.float() / total.clamp(min=1))


def overlong_penalty(lengths_B: Tensor, max_length: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """Soft overlong punishment, <= 0, shape (B,). DAPO, Yu et al. 2025, eq. 13.

    0 up to max_length - buffer tokens, then linear to -penalty at max_length and beyond. buffer 0 switches it off.
    """
    if buffer == 0:
        return torch.zeros_like(lengths_B, dtype=torch.float32)
    excess_B = (lengths_B - (max_length - buffer)).float() / buffer
    return -penalty * excess_B.clamp(0.0, 1.0)
