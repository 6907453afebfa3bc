"""Credit along the path: what single turns of an episode earn beside its outcome, and how both become token advantages.

An environment with path signals names in each step's info `violations` and `credits`, lists of rule names; it may give
`progress`, a number in 0..1, and `state`, a text that is equal where two episodes stand at the same place.

    A_token = A_outcome(episode) + s(turn of the token) * N / M

A_outcome is the scalar reward less its group's mean. s is the turn's path signal, -penalty * violations + credit *
credits. N counts the policy's tokens of the step and M those that carry a path signal: the channels are averaged each over
its own tokens ("own"), or both over all of them ("all": no factor). RLVP, after its authors' program: neither channel is
divided by a standard deviation, and penalty and credit have weights of their own, where the book writes R = O + beta * Phi.

Shape suffixes: _B episodes, _K turns of an episode (padded on the right), _T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from common import advantages
from common.episodes import Batch, Episode
from common.schema import ConfigError, one_of, within

Credit = Callable[[list[Episode], Batch, Tensor, float], tuple[Tensor, dict[str, float]]]

CHANNELS = ("none", "scalar", "token", "both")
NORMALISERS = ("own", "all")
BASELINES = ("none", "group", "state")
DEAD = ("outcome", "penalty", "path", "progress")  # scalar rewards by which the same samples are asked for dead groups


@dataclass(frozen=True)
class CreditConfig:
    """How outcome and path are paid.

    ``outcome``, ``progress``: weights in the scalar reward. ``penalty`` (lambda) per violation and ``credit`` (beta) per
    paired credit, in the ``channel``: scalar, token, or both. ``clip_events``: most violations, and most credits, of an
    episode that the scalar counts. ``gated``: credits count in successful episodes only. ``positive``: a turn without a
    violation earns the penalty's weight instead of a violating one losing it. ``normaliser``, ``baseline``: of the token
    channel; baseline group takes off the mean of the group's turns, state that of the turns at the same state, on returns
    from the turn on, discounted by ``gamma``. ``fade``: share of the budget after which penalties and credits fall to zero.
    ``drop_rules``: rules that are never paid for.
    """

    outcome: float = 1.0
    progress: float = 0.0
    penalty: float = 0.25
    credit: float = 0.25
    channel: str = "none"
    clip_events: int = 2
    gated: bool = False
    positive: bool = False
    normaliser: str = "all"
    baseline: str = "none"
    gamma: float = 0.95
    fade: float = 1.0
    drop_rules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        one_of("credits.channel", self.channel, CHANNELS)
        one_of("credits.normaliser", self.normaliser, NORMALISERS)
        one_of("credits.baseline", self.baseline, BASELINES)
        for key in ("outcome", "progress", "penalty", "credit"):
            within(f"credits.{key}", getattr(self, key), 0)
        within("credits.clip_events", self.clip_events, 1)
        for key in ("gamma", "fade"):
            within(f"credits.{key}", getattr(self, key), 0, 1)
        if self.positive and self.channel not in ("token", "both"):
            raise ConfigError(f"credits.positive with credits.channel={self.channel}: needs token or both.")


class Path(NamedTuple):
    """What happened in some episodes: outcome, progress (B,); violations, credits, acted (B, K); state_BK numbers states."""

    outcome_B: Tensor
    progress_B: Tensor
    violations_BK: Tensor
    credits_BK: Tensor
    acted_BK: Tensor
    state_BK: Tensor


def path_of(episodes: Sequence[Episode], drop_rules: Sequence[str] = ()) -> Path:
    """The path signals in the episodes' infos; a state gets one number per group, so that groups share none."""
    shape = len(episodes), max(len(episode.infos) for episode in episodes)
    violations_BK, credits_BK = torch.zeros(shape), torch.zeros(shape)
    acted_BK, state_BK = torch.zeros(shape, dtype=torch.bool), torch.full(shape, -1)
    numbers: dict[tuple, int] = {}
    for row, episode in enumerate(episodes):
        for turn, info in enumerate(episode.infos):
            violations_BK[row, turn] = sum(name not in drop_rules for name in info.get("violations", ()))
            credits_BK[row, turn] = sum(name not in drop_rules for name in info.get("credits", ()))
            acted_BK[row, turn] = True
            state_BK[row, turn] = numbers.setdefault((episode.group, info.get("state")), len(numbers))
    outcome_B = torch.tensor([float(episode.success) for episode in episodes])
    progress_B = torch.tensor([float(episode.infos[-1].get("progress", 0.0)) for episode in episodes])
    return Path(outcome_B, progress_B, violations_BK, credits_BK, acted_BK, state_BK)


def counted_credits(path: Path, gated: bool) -> Tensor:
    """Credits (B, K) that are paid: all, or those of successful episodes."""
    return path.credits_BK * path.outcome_B[:, None] if gated else path.credits_BK


def scalar_rewards(path: Path, config: CreditConfig, strength: float = 1.0) -> Tensor:
    """Outcome, progress and, in the scalar channel, clipped penalties and credits, (B,), float64.

    strength: factor of penalties and credits (see `strength_at`).
    """
    rewards_B = config.outcome * path.outcome_B.double() + config.progress * path.progress_B.double()
    if config.channel in ("scalar", "both"):
        violations_B = path.violations_BK.sum(1).clamp(max=config.clip_events)
        credits_B = counted_credits(path, config.gated).sum(1).clamp(max=config.clip_events)
        rewards_B = rewards_B + strength * (config.credit * credits_B - config.penalty * violations_B).double()
    return rewards_B


def turn_signals(path: Path, config: CreditConfig, strength: float = 1.0) -> Tensor:
    """Path signal of each turn (B, K), 0 where none was taken and everywhere without a token channel."""
    if config.channel not in ("token", "both"):
        return torch.zeros_like(path.violations_BK)
    penalty_BK = -config.penalty * path.violations_BK
    if config.positive:
        penalty_BK = config.penalty * (path.violations_BK == 0)
    signal_BK = strength * (penalty_BK + config.credit * counted_credits(path, config.gated)) * path.acted_BK
    if config.baseline == "group":
        # one number per group of episodes: the states' numbers begin anew in each group
        signal_BK = centred_turns(signal_BK, path.acted_BK, group_numbers(path))
    if config.baseline == "state":
        signal_BK = signal_BK.scatter_add(1, last_turns(path), config.outcome * path.outcome_B[:, None])
        signal_BK = centred_turns(returns(signal_BK, config.gamma), path.acted_BK, path.state_BK)
    return signal_BK


def last_turns(path: Path) -> Tensor:
    """Index of each episode's last turn, (B, 1)."""
    return (path.acted_BK.sum(1, keepdim=True) - 1).clamp(min=0)


def group_numbers(path: Path) -> Tensor:
    """The state's number of each episode's first turn, which its siblings share, for all its turns, (B, K)."""
    return path.state_BK[:, :1].expand_as(path.state_BK)


def returns(signal_BK: Tensor, gamma: float) -> Tensor:
    """Discounted sum of the signals from each turn on, (B, K)."""
    total_BK, tail_B = torch.zeros_like(signal_BK), torch.zeros_like(signal_BK[:, 0])
    for turn in reversed(range(signal_BK.shape[1])):
        tail_B = signal_BK[:, turn] + gamma * tail_B
        total_BK[:, turn] = tail_B
    return total_BK


def centred_turns(signal_BK: Tensor, acted_BK: Tensor, key_BK: Tensor) -> Tensor:
    """Signal less the mean of the turns with the same key, 0 where no turn was taken; a turn alone with its key gets 0.

    With states as keys: the step groups of GiGPO (Feng et al. 2025, section 3.2), without its division by the deviation.
    """
    _, index_N, count_G = torch.unique(key_BK[acted_BK], return_inverse=True, return_counts=True)
    values_N = signal_BK[acted_BK]
    mean_G = torch.zeros(len(count_G), dtype=values_N.dtype).index_add(0, index_N, values_N) / count_G
    return torch.zeros_like(signal_BK).masked_scatter(acted_BK, values_N - mean_G[index_N])


def token_advantages(outcome_B: Tensor, signal_BK: Tensor, turn_BT: Tensor, mask_BT: Tensor, normaliser: str = "all") -> Tensor:
    """Advantage of each policy token, (B, T): its episode's outcome advantage plus its turn's path signal, 0 off the mask.

    normaliser: own multiplies the path signal by N / M (see the module), so that under a loss that is a mean over tokens
    each channel is a mean over its own; all leaves it as it is.
    """
    one_of("normaliser", normaliser, NORMALISERS)
    mask_BT = mask_BT.bool()
    path_BT = signal_BK.gather(1, turn_BT.clamp(min=0)) * mask_BT
    if normaliser == "own":
        path_BT = path_BT * mask_BT.sum() / (path_BT != 0).sum().clamp(min=1)
    return (outcome_B[:, None] * mask_BT + path_BT).float()


def strength_at(config: CreditConfig, used: float) -> float:
    """Factor of penalties and credits when the share `used` of the budget is used: 1 until `fade`, then linearly to 0."""
    return 1.0 if used <= config.fade else (1 - used) / (1 - config.fade)


def dead_shares(path: Path, group_B: Tensor, valid_B: Tensor, config: CreditConfig) -> dict[str, float]:
    """Share of groups without spread when the same samples are scored in each of the ways of DEAD."""
    violations_B, credits_B = path.violations_BK.sum(1), path.credits_BK.sum(1)
    outcome_B = path.outcome_B.double()
    penalised_B = outcome_B - config.penalty * violations_B
    ways = (outcome_B, penalised_B, penalised_B + config.credit * credits_B, outcome_B + path.progress_B)
    return {
        f"dead/{name}": float(advantages.zero_spread(rewards_B, group_B, valid_B).double().mean())
        for name, rewards_B in zip(DEAD, ways, strict=True)
    }


def make_credit(config: CreditConfig) -> Credit:
    """The function that `train_grpo` asks for advantages: (episodes, batch, valid_B, share of the budget) -> (B, T), metrics.

    An episode that is not valid (it cannot learn) gets 0 and leaves its group's mean.
    """

    def credit(episodes: list[Episode], batch: Batch, valid_B: Tensor, used: float) -> tuple[Tensor, dict[str, float]]:
        path, strength = path_of(episodes, config.drop_rules), strength_at(config, used)
        group_B = torch.tensor([episode.group for episode in episodes])
        rewards_B = scalar_rewards(path, config, strength)
        outcome_B = advantages.group_centre(rewards_B, group_B, valid_B)
        signal_BK = turn_signals(path, config, strength) * valid_B[:, None]
        outcome_B, signal_BK = outcome_B.to(batch.ids_BT.device), signal_BK.to(batch.ids_BT.device)
        advantages_BT = token_advantages(outcome_B, signal_BK, batch.turn_BT, batch.mask_BT, config.normaliser)
        metrics = {
            "reward/mean": float(rewards_B.mean()),
            "path/violations": float(path.violations_BK.sum(1).mean()),
            "path/credits": float(path.credits_BK.sum(1).mean()),
            "path/turns": float(path.acted_BK.sum(1).double().mean()),
        }
        return advantages_BT, metrics | dead_shares(path, group_B, valid_B, config)

    return credit
