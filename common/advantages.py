"""Advantages: how much better than expected was what the policy did?

Pure tensor functions. Shape suffixes: _B episodes, _P prompts (groups), _N packed actions, _T tokens.

Rules that hold for every estimator:
- A reward that is None or NaN means *unscored*: the episode leaves its group's statistics and gets advantage 0.
- An episode without a trainable token (`valid_B` false) is treated the same way: it cannot learn, so it must not
  move its siblings' baseline either.
- A group whose rewards are all equal gets advantages of exactly 0. Equality is judged by the spread (max - min) of
  that group alone, whatever the scaling; a spread below 1e-9 counts as equal, because the same reward parts summed
  in another order differ in the last bit.
- A group with a single member is an error (there is nothing to compare with); a group that *shrinks* to a single
  scored member gives it advantage 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

EQUAL_SPREAD = 1e-9
SCAN_BLOCK = 256  # GAE multiplies by a (block, block) matrix of powers: bounded memory at any length

ESTIMATORS = ("group_norm", "group_centre", "rloo", "batch_centre", "reward")


def rewards_tensor(rewards: Iterable[float | None], expected: int, source: str = "environment") -> Tensor:
    """One reward per episode as a float64 tensor; None becomes NaN (unscored).

    Args: rewards of any iterable kind; `expected` the number of episodes; `source` the name used in the message.
    Raises: ValueError when the count differs (one number is never spread over many episodes) or a reward is infinite.
    """
    if not isinstance(rewards, Iterable):
        raise ValueError(f"{source} returned a single number for {expected} episodes: return one reward per episode")
    values = [math.nan if r is None else float(r) for r in rewards]
    if len(values) != expected:
        raise ValueError(f"{source} returned {len(values)} rewards for {expected} episodes: return one per episode")
    if any(math.isinf(v) for v in values):
        raise ValueError(f"{source} returned an infinite reward: return a finite number, or None if it cannot score")
    return torch.tensor(values, dtype=torch.float64)


def scored(rewards_B: Tensor, valid_B: Tensor | None = None) -> Tensor:
    """Episodes that take part: reward present and at least one trainable token. Bool, shape (B,)."""
    present_B = ~torch.isnan(rewards_B)
    return present_B if valid_B is None else present_B & valid_B.bool()


def _centre_by_group(rewards_B: Tensor, group_B: Tensor, valid_B: Tensor | None) -> tuple[Tensor, ...]:
    """Deviation from the group mean, members scored, and flag 'no spread', each of shape (B,), in float64.

    Deviations of unscored episodes and of groups without spread are exactly 0.
    """
    _, index_B, size_P = torch.unique(group_B, return_inverse=True, return_counts=True)
    if bool((size_P < 2).any()):
        raise ValueError(
            f"{int((size_P < 2).sum())} of {len(size_P)} groups have one episode: a group estimator compares an "
            "episode with its siblings, set group_size >= 2 or choose advantage=batch_centre or reward"
        )
    ok_B = scored(rewards_B, valid_B)
    clean_B = torch.where(ok_B, rewards_B, 0.0).double()
    zeros_P = torch.zeros(len(size_P), dtype=torch.float64, device=rewards_B.device)
    count_P = zeros_P.index_add(0, index_B, ok_B.double())
    mean_P = zeros_P.index_add(0, index_B, clean_B) / count_P.clamp(min=1)
    high_P = (zeros_P - math.inf).scatter_reduce(0, index_B, torch.where(ok_B, clean_B, -math.inf), "amax")
    low_P = (zeros_P + math.inf).scatter_reduce(0, index_B, torch.where(ok_B, clean_B, math.inf), "amin")
    scale_P = torch.maximum(high_P.abs(), low_P.abs()).clamp(min=1.0)
    flat_P = (count_P < 2) | (high_P - low_P <= EQUAL_SPREAD * scale_P)
    flat_B = flat_P[index_B]
    centred_B = torch.where(ok_B & ~flat_B, clean_B - mean_P[index_B], 0.0)
    return centred_B, count_P[index_B], flat_B, index_B


def zero_spread(rewards_B: Tensor, group_B: Tensor, valid_B: Tensor | None = None) -> Tensor:
    """Bool (B,): the episode's group has equal rewards (or fewer than two scored members), so it teaches nothing."""
    return _centre_by_group(rewards_B, group_B, valid_B)[2]


def group_norm(
    rewards_B: Tensor, group_B: Tensor, valid_B: Tensor | None = None, *, ddof: int = 1, eps: float = 1e-4
) -> Tensor:
    """(r - mean) / (std + eps) within each group, shape (B,).

    GRPO, Shao et al. 2024 (DeepSeekMath), section 4.1.2. The spread is a two-pass float64 computation; `ddof` 1 is
    the sample standard deviation (as in TRL and verl), 0 the population's.
    """
    centred_B, count_B, flat_B, index_B = _centre_by_group(rewards_B, group_B, valid_B)
    square_P = torch.zeros(int(index_B.max()) + 1, dtype=torch.float64, device=rewards_B.device)
    square_B = square_P.index_add(0, index_B, centred_B**2)[index_B]
    std_B = (square_B / (count_B - ddof).clamp(min=1)).sqrt()
    return torch.where(flat_B, 0.0, centred_B / (std_B + eps).clamp(min=1e-30)).float()


def group_centre(rewards_B: Tensor, group_B: Tensor, valid_B: Tensor | None = None) -> Tensor:
    """r - mean within each group, shape (B,). Dr. GRPO, Liu et al. 2025 (Understanding R1-Zero-like training)."""
    return _centre_by_group(rewards_B, group_B, valid_B)[0].float()


def rloo(rewards_B: Tensor, group_B: Tensor, valid_B: Tensor | None = None) -> Tensor:
    """r - mean of the *other* members of the group, shape (B,), not scaled. Ahmadian et al. 2024 (RLOO).

    n / (n - 1) times the centred reward is the same number without the cancellation of a subtracted sum.
    """
    centred_B, count_B, _, _ = _centre_by_group(rewards_B, group_B, valid_B)
    return (centred_B * count_B / (count_B - 1).clamp(min=1)).float()


def batch_centre(rewards_B: Tensor, valid_B: Tensor | None = None) -> Tensor:
    """r - mean of the batch, shape (B,). REINFORCE with a constant baseline, Williams 1992."""
    return group_centre(rewards_B, torch.zeros_like(rewards_B, dtype=torch.long), valid_B)


def reward(rewards_B: Tensor, valid_B: Tensor | None = None) -> Tensor:
    """The reward itself, shape (B,); unscored episodes 0. REINFORCE, Williams 1992."""
    return torch.where(scored(rewards_B, valid_B), rewards_B, 0.0).float()


def outcome_advantages(
    name: str, rewards_B: Tensor, group_B: Tensor, valid_B: Tensor | None = None, *, ddof: int = 1, eps: float = 1e-4
) -> Tensor:
    """One advantage per episode by the estimator `name` (one of ESTIMATORS), shape (B,), float32."""
    if name == "group_norm":
        return group_norm(rewards_B, group_B, valid_B, ddof=ddof, eps=eps)
    if name == "group_centre":
        return group_centre(rewards_B, group_B, valid_B)
    if name == "rloo":
        return rloo(rewards_B, group_B, valid_B)
    if name == "batch_centre":
        return batch_centre(rewards_B, valid_B)
    if name == "reward":
        return reward(rewards_B, valid_B)
    raise ValueError(f"advantage={name!r} is not an outcome estimator; allowed: {', '.join(ESTIMATORS)}")


def bootstrap_values(final_B: Tensor, terminated_B: Tensor, truncated_B: Tensor) -> Tensor:
    """Value of what follows the last action, shape (B,): V(final state) if cut from outside, 0 if the task ended.

    Both flags at once count as terminated. Pardo et al. 2018 (Time limits in reinforcement learning).
    """
    return torch.where(truncated_B.bool() & ~terminated_B.bool(), final_B, 0.0)


def _discounted_suffix_sum(x_BN: Tensor, decay: float) -> Tensor:
    """y_n = sum over s >= n of decay^(s - n) * x_s, block by block from the end."""
    steps = x_BN.shape[1]
    out_BN = torch.empty_like(x_BN)
    offset_N = torch.arange(min(SCAN_BLOCK, steps), device=x_BN.device, dtype=x_BN.dtype)
    power_NN = torch.tril(torch.full((), decay, dtype=x_BN.dtype) ** (offset_N[:, None] - offset_N[None, :]).clamp(0))
    carry_B = torch.zeros_like(x_BN[:, 0])
    for stop in range(steps, 0, -SCAN_BLOCK):
        start = max(0, stop - SCAN_BLOCK)
        n = stop - start
        tail_N = decay ** (n - offset_N[:n])
        out_BN[:, start:stop] = x_BN[:, start:stop] @ power_NN[:n, :n] + carry_B[:, None] * tail_N
        carry_B = out_BN[:, start]
    return out_BN


def gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap_B: Tensor | None = None,
    turn_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Generalised advantage estimation over the tokens, or turns, that the policy wrote. Schulman et al. 2016, eq. 16.

    Prompt, environment and padding tokens take no part: no discount passes over them and no value is read there. A
    reward that lies on such a token belongs to the last action before it (to the first one if none came before).

    Args:
        rewards_BT, values_BT: reward after, and value before, token t.
        mask_BT: 1 where the policy wrote the token.
        bootstrap_B: value of the state after the last token (see `bootstrap_values`); None means 0.
        turn_BT: turn number of each token, -1 elsewhere. When given, one action is one whole turn: its value is read
            before its first token, and all its tokens share its advantage.
    Returns: advantages_BT (0 off the mask), returns_BT and action_BT: where a value has a target (each trainable
        token, or the first token of each turn). float32, float32, bool.
    """
    mask_BT = mask_BT.bool()
    action_BT = mask_BT
    if turn_BT is not None:
        before_BT = torch.nn.functional.pad(turn_BT[:, :-1], (1, 0), value=-1)
        action_BT = mask_BT & (turn_BT != before_BT)
    rank_BT = (action_BT.long().cumsum(1) - 1).clamp(min=0)  # the action that token t belongs to or follows
    count_B = action_BT.sum(1)
    if int(count_B.max()) == 0:
        zeros_BT = torch.zeros_like(values_BT, dtype=torch.float32)
        return zeros_BT, zeros_BT.clone(), action_BT
    real_BN = torch.arange(int(count_B.max()), device=mask_BT.device) < count_B[:, None]
    zeros_BN = torch.zeros(real_BN.shape, dtype=torch.float64, device=mask_BT.device)
    rewards_BN = zeros_BN.scatter_add(1, rank_BT, rewards_BT.double()) * real_BN
    values_BN = zeros_BN.masked_scatter(real_BN, values_BT[action_BT].double())
    next_BN = torch.nn.functional.pad(values_BN[:, 1:], (0, 1))
    if bootstrap_B is not None:
        last_BN = real_BN & (count_B[:, None] - 1 == torch.arange(real_BN.shape[1], device=mask_BT.device))
        next_BN = torch.where(last_BN, bootstrap_B.double()[:, None], next_BN)
    delta_BN = torch.where(real_BN, rewards_BN + gamma * next_BN - values_BN, 0.0)
    advantages_BN = _discounted_suffix_sum(delta_BN, gamma * lam)
    advantages_BT = torch.where(mask_BT, advantages_BN.gather(1, rank_BT), 0.0)
    returns_BT = torch.where(action_BT, advantages_BT + values_BT, 0.0)
    return advantages_BT.float(), returns_BT.float(), action_BT


def reward_to_go(rewards_BT: Tensor, mask_BT: Tensor, gamma: float = 1.0) -> Tensor:
    """Discounted sum of the rewards from each policy token on, (B, T), 0 off the mask.

    With the rewards of REINFORCE++ (Hu 2025, eq. 8: the score at the end, minus beta * k1 at each token) and whitened
    over the batch (eq. 10, `masked_whiten`) these are its advantages. GAE with V = 0 and lambda = 1.
    """
    return gae(rewards_BT, torch.zeros_like(rewards_BT), mask_BT, gamma=gamma, lam=1.0)[0]


def masked_whiten(x_BT: Tensor, mask_BT: Tensor, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + eps) over the masked positions (sample variance), 0 elsewhere; any equal shapes.

    Each token counts once, so that long episodes weigh more, as in the program of REINFORCE++'s authors (OpenRLHF).
    Fewer than two positions, or no spread among them, gives exactly 0.
    """
    mask_BT = mask_BT.bool()
    values_N = x_BT[mask_BT]
    if len(values_N) < 2 or bool(values_N.max() == values_N.min()):
        return torch.zeros_like(x_BT)
    scaled_BT = (x_BT - values_N.mean()) * torch.rsqrt(values_N.var(unbiased=True) + eps)
    return torch.where(mask_BT, scaled_BT, 0.0)
