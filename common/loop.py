"""What the policy-gradient loops share: sampling a step's episodes, the optimizer, the state on disk, the metrics."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common import advantages, losses
from common.algo import AlgoConfig
from common.checkpoints import load_state, save_state
from common.compute import Meter
from common.episodes import Batch, Episode, collate, run_episodes
from common.policy import BATCH_FIELDS, TokenOutputs, network
from common.runlog import RunLog
from common.seeding import generator

TaskAt = Callable[[int, int], list[dict]]


def sample_step(
    model: Any,
    tokenizer: Any,
    make_env: Callable,
    tasks: list[dict],
    algo: AlgoConfig,
    seed: int,
    step: int,
    part: int = 0,
    numbers: Sequence[int] | None = None,
) -> list[Episode]:
    """group_size episodes of each task. `part` counts the sampling rounds of a step.

    numbers: the group that each task's episodes belong to, for rounds after the first; None numbers them 0, 1, 2, ...
    """
    episodes = run_episodes(
        model,
        tokenizer,
        make_env,
        tasks,
        group_size=algo.group_size,
        max_turns=algo.max_turns,
        max_new_tokens=algo.max_new_tokens,
        temperature=algo.temperature,
        generator=generator(seed, "rollout", step, part),
    )
    if numbers is not None:
        for episode in episodes:
            episode.group = numbers[episode.group]
    if hasattr(make_env, "rescore"):  # a learned reward in place of the environment's: common.reward_model
        make_env.rescore(episodes)
    return episodes


def to_batch(episodes: list[Episode], tokenizer: Any, model: Any) -> Batch:
    """The episodes as right-padded tensors on the model's device."""
    batch = collate(episodes, tokenizer.pad_token_id)
    device = network(model).device
    moved = Batch(*(getattr(batch, name).to(device) for name in BATCH_FIELDS))
    moved.images = None if batch.images is None else batch.images.to(device)
    return moved


def learnable(episodes: list[Episode], algo: AlgoConfig) -> Tensor:
    """Bool (B,): scored, and has a token to learn from. With mask_truncated, episodes cut by a limit do not count."""
    return torch.tensor(
        [any(e.mask) and not math.isnan(e.reward) and not (algo.mask_truncated and e.truncated) for e in episodes]
    )


def overlong_penalties(episodes: list[Episode], algo: AlgoConfig) -> Tensor:
    """Soft overlong punishment (B,) of each episode's longest turn, measured against the token limit of a turn."""
    longest = [max((e.turns.count(turn) for turn in set(e.turns) - {-1}), default=0) for e in episodes]
    return losses.overlong_penalty(torch.tensor(longest), algo.max_new_tokens, algo.overlong_buffer, algo.overlong_penalty)


def token_rewards(episodes: list[Episode], batch: Batch, algo: AlgoConfig) -> Tensor:
    """Reward after each token, (B, T): a turn's reward at its last token, the overlong punishment at the very last."""
    turn_BT = batch.turn_BT
    after_BT = nn.functional.pad(turn_BT[:, 1:], (0, 1), value=-1)
    last_BT = batch.mask_BT.bool() & (turn_BT != after_BT)
    rewards = [reward for episode in episodes for reward in episode.turn_rewards]
    rewards_BT = torch.zeros_like(batch.logp_BT)
    rewards_BT[last_BT] = advantages.rewards_tensor(rewards, int(last_BT.sum())).to(rewards_BT)
    end_B1 = (last_BT * torch.arange(last_BT.shape[1], device=last_BT.device)).argmax(1, keepdim=True)
    return rewards_BT.scatter_add(1, end_B1, overlong_penalties(episodes, algo).to(rewards_BT)[:, None])


def make_optimizer(policy: list[nn.Parameter], value: list[nn.Parameter], algo: AlgoConfig) -> torch.optim.AdamW:
    """AdamW over the policy (group 0) and the value head (group 1, if any), each with its own learning rate."""
    groups = [{"params": policy, "lr": algo.lr}] + ([{"params": value, "lr": algo.value_lr}] if value else [])
    return torch.optim.AdamW(groups, betas=algo.betas, eps=algo.adam_eps, weight_decay=algo.weight_decay, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, algo: AlgoConfig, step: int, used: float) -> None:
    """Linear warm-up over warmup_steps, then constant, linear or cosine decay by the share of the budget `used`."""
    factor = min(1.0, (step + 1) / algo.warmup_steps) if algo.warmup_steps else 1.0
    if algo.lr_decay == "linear":
        factor *= 1 - used
    elif algo.lr_decay == "cosine":
        factor *= 0.5 * (1 + math.cos(math.pi * used))
    for group, base in zip(optimizer.param_groups, (algo.lr, algo.value_lr), strict=False):
        group["lr"] = base * factor


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def save(path: Path, modules: Mapping[str, nn.Module], optimizer: Any, meter: Meter, step: int, evaluations: int) -> None:
    """Everything a run needs to go on after `step` finished steps; random numbers come from (seed, step) alone."""
    weights = {key: {n: p.detach() for n, p in trainable(m).items()} for key, m in modules.items()}
    state = {"weights": weights, "optimizer": optimizer.state_dict(), "meter": meter.state_dict()}
    save_state(path, {**state, "step": step, "evaluations": evaluations})


def resume(path: Path, modules: Mapping[str, nn.Module], optimizer: Any, meter: Meter, log: RunLog) -> tuple[int, int]:
    """Loads the saved state into the modules and drops later log lines. Returns (finished steps, evaluations done)."""
    state = load_state(path)
    if state is None:
        log.resume(0)
        return 0, 0
    for key, module in modules.items():
        parameters, saved = trainable(module), state["weights"][key]
        if parameters.keys() != saved.keys():
            raise ValueError(f"{path} holds other parameters than the {key}: delete it or restore the settings")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(saved[name])
    optimizer.load_state_dict(state["optimizer"])
    meter.load_state_dict(state["meter"])
    log.resume(state["step"])
    return state["step"], state["evaluations"]


def evaluations_due(meter: Meter, every_flops: float | None) -> int:
    """How many multiples of `every_flops` have been passed: one evaluation belongs to each (None: none)."""
    return int(meter.flops / every_flops) if every_flops else 0


def policy_loss(
    out: TokenOutputs,
    sampler_N: Tensor,
    advantage_N: Tensor,
    weight_N: Tensor,
    length_B: Tensor,
    ref_logp_N: Tensor | None,
    algo: AlgoConfig,
    sums: dict[str, float],
) -> Tensor:
    """Policy loss, KL (when ref_logp_N is given) and entropy bonus of some episodes' tokens; adds to the metric `sums`.

    length_B: policy tokens of each of these episodes, whose tokens are packed one episode after the other.
    With one update per batch of samples the ratio is 1 by definition: the gradient is that of -advantage * logp, and
    the sampler's log-probabilities serve the metric kl/old alone.
    """
    old_N = out.logp_N.detach() if algo.epochs * algo.minibatches == 1 else sampler_N
    loss_N, ratio_N = losses.surrogate(
        algo.policy_loss, out.logp_N, old_N, advantage_N, length_B, algo.clip_low, algo.clip_high
    )
    loss = losses.weighted_sum(loss_N, weight_N)
    sums["loss/policy"] += float(loss.detach())
    if ref_logp_N is not None:
        kl_N = losses.kl(out.logp_N, ref_logp_N, algo.kl_estimator)
        loss = loss + algo.kl_coef * losses.weighted_sum(kl_N, weight_N)
        sums["kl/ref"] += float(kl_N.detach().sum())
    if algo.entropy_coef > 0:
        loss = loss - algo.entropy_coef * losses.weighted_sum(out.entropy_N, weight_N)
    sign_N = ratio_N - 1 if algo.policy_loss == "cispo" else advantage_N  # CISPO bounds the weight whatever the sign
    low_N, high_N = losses.clip_fractions(ratio_N, sign_N, algo.clip_low, algo.clip_high)
    sums["entropy"] += float(out.entropy_N.detach().sum())
    sums["kl/old"] += float(losses.kl(sampler_N, out.logp_N.detach(), "k3").sum())
    sums["ratio/clip_low_frac"] += float(low_N.sum())
    sums["ratio/clip_high_frac"] += float(high_N.sum())
    sums["tokens"] += len(loss_N)
    return loss


def averages(sums: dict[str, float], updates: int) -> dict[str, float]:
    """Losses and norms per update, everything else per trained token; empty if nothing was trained."""
    tokens = sums.pop("tokens", 0)
    if not tokens:
        return {}
    per_update = ("loss/policy", "loss/value", "grad_norm")
    return {name: total / (updates if name in per_update else tokens) for name, total in sums.items()}


def episode_metrics(episodes: list[Episode], rewards_B: Tensor) -> dict[str, float]:
    """success/, score/, reward/ and len/ metrics of a step's samples: all of them, whatever the update leaves out."""
    values = {
        "success/mean": sum(e.success for e in episodes) / len(episodes),
        "score/mean": sum(e.reward for e in episodes) / len(episodes),
        "reward/mean": float(rewards_B.mean()),
        "len/completion_mean": sum(sum(e.mask) for e in episodes) / len(episodes),
        "len/truncated_frac": sum(e.truncated for e in episodes) / len(episodes),
    }
    parts: dict[str, float] = defaultdict(float)
    for info in (info for episode in episodes for info in episode.infos):
        for name, part in (info.get("parts") or {}).items():
            parts[name] += part
    return values | {f"reward/{name}": total / len(episodes) for name, total in parts.items()}


def speed_metrics(start: float, sampled: float, batch: Batch) -> dict[str, float]:
    """time/ and throughput/ of a step that began at `start` and had its samples at `sampled` (perf_counter seconds)."""
    rollout_s = sampled - start
    return {
        "time/rollout": rollout_s,
        "time/update": time.perf_counter() - sampled,
        "throughput/tokens_per_s": float(batch.mask_BT.sum()) / max(rollout_s, 1e-9),
    }
