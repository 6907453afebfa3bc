"""Losses: pure tensor functions of log-probabilities, values and masks.

Shape suffixes: _B episodes, _T tokens, _V vocabulary. A name without a suffix stands for tensors of any one shape
(padded (B, T) or packed (N,)): the functions work element by element.

How a loss is made: a function here gives one number per token; `loss_weights` gives each token its share for the whole
update; the loss is their inner product. Because the shares are fixed before the batch is cut into micro-batches, the
summed gradient is the same for every cut, also when the last piece is shorter than the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

AGGREGATIONS = ("token_mean", "seq_mean", "seq_sum_const")
KL_ESTIMATORS = ("k1", "k2", "k3")


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


def loss_weights(mask_BT: Tensor, aggregation: str, *, constant: float | None = None) -> Tensor:
    """`sequence_weights` spread over the tokens of a mask, shape (B, T), 0 off the mask. For SFT use token_mean."""
    mask_BT = mask_BT.float()
    return mask_BT * sequence_weights(mask_BT.sum(1), aggregation, constant=constant)[:, None]


def weighted_sum(x: Tensor, weights: Tensor) -> Tensor:
    """Inner product that ignores whatever stands where the weight is 0 (NaN and infinity included)."""
    return torch.where(weights != 0, x * weights, 0.0).sum()


def aggregate(loss_BT: Tensor, mask_BT: Tensor, aggregation: str, *, constant: float | None = None) -> Tensor:
    """Token losses of one whole update -> scalar. See `loss_weights` for the three rules and for micro-batches."""
    return weighted_sum(loss_BT, loss_weights(mask_BT, aggregation, constant=constant))


def token_logprobs_from_logits(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at `ids`; logits (..., V), ids (...), result (...), float32.

    The logits are divided, never the log-probabilities, so that sampler and trainer agree at any temperature.
    """
    logp_V = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logp_V.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of softmax(logits / temperature), (..., V) -> (...); a logit of -inf counts as absent."""
    logp_V = torch.log_softmax(logits.float() / temperature, dim=-1)
    return entropy_from_logprobs(logp_V)


def entropy_from_logprobs(logp_V: Tensor) -> Tensor:
    """Entropy in nats of a full log-probability vector, (..., V) -> (...)."""
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

    GRPO (Shao et al. 2024, eq. 4) puts k3 into the loss. Raises ValueError for an unknown name.
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
