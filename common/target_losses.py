"""Losses with a target: weights and choice of supervised tokens, and divergences from a teacher's distribution.

Pure tensor functions. Shape suffixes: _B rows, _T tokens, _N packed tokens, _V vocabulary. The plain supervised loss,
which the weights here multiply, is `common.losses.sft_loss`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from common.losses import ppo_clip

SFT_VARIANTS = ("nll", "dft", "importance", "entropy", "kl", "entropy_kl")
RATIO_LEVELS = ("sequence", "token")
OBJECTIVES = ("sampled", "reverse_kl", "forward_kl", "jsd")


def dft_weights(logp: Tensor) -> Tensor:
    """Weight of each target token: its own probability, without gradient; `logp` of any shape.

    Dynamic fine-tuning, Wu et al. 2025 (On the generalization of SFT): loss -sg(p) log p. The gradient of
    -log p holds a factor 1 / p, as of an importance weight with reward one; multiplying by p takes it away.
    """
    return logp.detach().exp()


def importance_weights(
    logp_BT: Tensor, ref_logp_BT: Tensor, mask_BT: Tensor, level: str = "sequence", low: float = 0.0, high: float = 16.0
) -> Tensor:
    """Weight (B, T) of each target token: clipped ratio of policy to reference, without gradient, 0 off the mask.

    sequence: clip(exp(mean over the row's targets of logp - ref_logp)), one weight a row.
    token: clip(exp(logp - ref_logp)).

    iw-SFT, Qin & Springenberg 2025 (Supervised fine tuning on curated data is reinforcement learning): the weight of a
    sequence tightens SFT's lower bound on the RL objective. The ratio of a whole sequence explodes with its length; the
    mean over tokens and both clips (sequence 0..16, token 0.2..1.8) are those of the authors' program. Raises
    ValueError for an unknown level.
    """
    mask_BT = mask_BT.bool()
    difference_BT = torch.where(mask_BT, logp_BT.detach() - ref_logp_BT, 0.0)
    if level == "sequence":
        mean_B = difference_BT.sum(1) / mask_BT.sum(1).clamp(min=1)
        difference_BT = mean_B[:, None].expand_as(difference_BT)
    elif level != "token":
        raise ValueError(f"ratio_level={level!r} is unknown; allowed: {', '.join(RATIO_LEVELS)}")
    return torch.where(mask_BT, difference_BT.exp().clamp(low, high), 0.0)


def keep_lowest(value: Tensor, mask: Tensor, drop_share: float) -> Tensor:
    """The mask (bool) without the `drop_share` of its positions where `value` is highest; any one shape.

    int(share * positions) are dropped, fewer where values tie with the highest one kept: a model that equals its
    reference loses nothing. EKSFT, Liu et al. 2026 (Entropy-KL divergence-based token masking), drops the top fifth by
    entropy and the top fifth by KL from a reference.
    """
    mask = mask.bool()
    positions = int(mask.sum())
    kept = positions - int(drop_share * positions)
    if kept == positions:
        return mask
    return mask & (value <= value[mask].kthvalue(kept).values)


def kl_divergence(logp_V: Tensor, other_V: Tensor) -> Tensor:
    """KL(p || q) in nats from full log-probability vectors, (..., V) -> (...); p = 0 adds nothing, with gradient in both."""
    floor = torch.finfo(logp_V.dtype).min
    return (logp_V.exp() * (logp_V.clamp(min=floor) - other_V.clamp(min=floor))).sum(-1)


def generalized_jsd(logp_V: Tensor, teacher_V: Tensor, beta: float) -> Tensor:
    """JSD(beta) of teacher and student, (..., V) -> (...), in nats. Agarwal et al. 2024 (GKD), eq. 1.

    beta * KL(teacher || m) + (1 - beta) * KL(student || m) with m = beta * teacher + (1 - beta) * student, 0 < beta < 1.
    It is symmetric at 0.5 and at most ln 2 there. Divided by beta (by 1 - beta) it tends to KL(teacher || student) for
    beta -> 0 (to KL(student || teacher) for beta -> 1); TRL takes beta 0 and 1 to mean these two.
    """
    mixture_V = torch.logaddexp(teacher_V + math.log(beta), logp_V + math.log1p(-beta))
    return beta * kl_divergence(teacher_V, mixture_V) + (1 - beta) * kl_divergence(logp_V, mixture_V)


def distillation_loss(objective: str, logp_NV: Tensor, teacher_NV: Tensor, ids_N: Tensor, beta: float = 0.5) -> Tensor:
    """Loss of each token the student wrote, (N,), from both full distributions; the teacher's carries no gradient.

    | objective  | value of a token                        | gradient                                               |
    | sampled    | log p(token) - log q(token)             | that value times grad log p(token): advantage -value   |
    | reverse_kl | KL(student p || teacher q)              | of the value; the mean of `sampled` over the samples   |
    | forward_kl | KL(teacher q || student p)              | of the value: cross-entropy on the teacher's soft labels |
    | jsd        | generalised JSD(beta)                   | of the value                                           |

    sampled: Lu & Thinking Machines Lab 2025 (On-policy distillation), a policy gradient whose advantage looks at the
    token alone (discount 0). The others: Agarwal et al. 2024 (GKD), section 3. Raises ValueError for an unknown name.
    """
    teacher_NV = teacher_NV.detach()
    if objective == "sampled":
        logp_N = logp_NV.gather(1, ids_N[:, None])[:, 0]
        advantage_N = teacher_NV.gather(1, ids_N[:, None])[:, 0] - logp_N.detach()
        return ppo_clip(logp_N, logp_N.detach(), advantage_N)[0]
    if objective == "reverse_kl":
        return kl_divergence(logp_NV, teacher_NV)
    if objective == "forward_kl":
        return kl_divergence(teacher_NV, logp_NV)
    if objective == "jsd":
        return generalized_jsd(logp_NV, teacher_NV, beta)
    raise ValueError(f"objective={objective!r} is unknown; allowed: {', '.join(OBJECTIVES)}")
