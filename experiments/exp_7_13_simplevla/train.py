"""Reinforcement learning of the policy on what its episodes come to: SimpleVLA-RL's GRPO, and PPO as its rival.

Advantages, surrogates, value loss, optimizer and checkpoints are those of `common`; what is here is how a step's episodes
become tensors. Shape suffixes: _B episodes, _K decisions, _L control steps, _A tokens, _N packed tokens, _M decisions of
some episodes, one after the other.

Departures from SimpleVLA-RL (Li et al. 2025):
- Groups are left out when all their episodes earn the same; with 8 episodes and a binary reward this is the paper's "success
  rate between 0.1 and 0.9". Refilling stops after `refill_rounds` and the step trains on what it has.
- The tokens of control steps that were no longer carried out are left out of the loss.
- PPO: an action is a chunk. Its value is read from the placeholders' mean state; a shared trunk, as in `common.ppo`. An
  episode that its last control step ends has no future: there is nothing behind it to be worth anything.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from common import advantages, losses
from common.algo import AlgoConfig
from common.compute import Budget, Meter
from common.loop import averages, evaluations_due, make_optimizer, policy_loss, resume, save, set_learning_rate, trainable
from common.models import parameter_count
from common.policy import TokenOutputs, build_value_head
from common.runlog import RunLog
from common.seeding import generator, rng
from experiments.exp_7_13_simplevla import tasks
from experiments.exp_7_13_simplevla.episodes import Played, play
from experiments.exp_7_13_simplevla.policy import Inputs, VlaPolicy, log_probabilities

MICRO = 512  # decisions per forward and backward pass
REWARDS = ("outcome", "process")


class Batch(NamedTuple):
    """Episodes of a step as training reads them."""

    inputs: Inputs
    tokens_BKLA: Tensor
    logp_BKLA: Tensor
    mask_BKLA: Tensor
    reward_BK: Tensor
    group_B: Tensor

    @property
    def acted_BK(self) -> Tensor:
        return self.mask_BKLA[:, :, 0, 0]


def rewards(played: Played, kind: str) -> Tensor:
    """Reward after each decision, (B, K), float64. outcome: 1 at the end if solved. process: that, and the progress made.

    The progress (holding the block, bringing it nearer) pays half a point in all, so that solving stays the larger part.
    """
    last = played.acted.sum(1).numpy() - 1
    reward = np.zeros(played.progress.shape)
    reward[np.arange(len(last)), last] = played.solved
    if kind == "process":
        gained = np.diff(played.progress, axis=1, prepend=0)
        reward += 0.5 * np.where(played.acted.numpy(), gained, 0)
    return torch.from_numpy(reward)


def training_layouts(count: int, seed: int, step: int, part: int) -> tasks.Layouts:
    """Fresh layouts of trained tasks, each task as often as any other."""
    order = rng(seed, "tasks", step, part).permutation(np.resize(tasks.SEEN, max(count, len(tasks.SEEN))))
    return tasks.draw("train", order[:count], seed, "rollout", step, part)


def collect(
    policy: VlaPolicy, algo: AlgoConfig, reward: str, decisions: int, seed: int, step: int, meter: Meter
) -> tuple[Batch, Tensor, dict[str, float]]:
    """Samples a step: batch, keep_B (takes part in the update), metrics of all samples.

    With drop_zero_variance, more layouts are sampled until prompts_per_step groups disagree, for refill_rounds rounds.
    """
    rounds: list[Played] = []
    for part in range(algo.refill_rounds + 1):
        starts = training_layouts(algo.prompts_per_step, seed, step, part)
        starts = starts.take(np.repeat(np.arange(algo.prompts_per_step), algo.group_size))
        stream = generator(seed, "rollout", step, part)
        rounds.append(play(policy, starts, decisions=decisions, temperature=algo.temperature, stream=stream))
        meter.add_forward(int(rounds[-1].acted.sum()) * policy.length)
        reward_BK = torch.cat([rewards(played, reward) for played in rounds])
        group_B = torch.arange(len(reward_BK)) // algo.group_size
        keep_B, dead = torch.ones(len(group_B), dtype=torch.bool), 0.0
        if algo.group_size > 1:
            flat_B = advantages.zero_spread(reward_BK.sum(1), group_B)
            dead = float(flat_B.double().mean())
            keep_B = ~flat_B if algo.drop_zero_variance else keep_B
        kept = group_B[keep_B].unique()
        if not algo.drop_zero_variance or len(kept) >= algo.prompts_per_step:
            break
    keep_B &= torch.isin(group_B, kept[: algo.prompts_per_step])
    inputs = Inputs(*(None if x[0] is None else torch.cat(x) for x in zip(*(p.inputs for p in rounds), strict=True)))
    tensors = [torch.cat(values) for values in zip(*((p.tokens, p.logps, p.mask) for p in rounds), strict=True)]
    solved, pushed, height = (np.concatenate([getattr(p, name) for p in rounds]) for name in ("solved", "pushed", "height"))
    metrics = {
        "success/mean": float(solved.mean()),
        "reward/mean": float(reward_BK.sum(1).mean()),
        "reward/zero_std_frac": dead,
        "vla/pushcut": float(pushed.sum() / max(1, solved.sum())),
        "vla/height": float(height.mean()),
        "vla/episodes": float(len(solved)),
    }
    return Batch(inputs, *tensors, reward_BK, group_B), keep_B, metrics


def value_of(head: nn.Module, hidden_MLD: Tensor) -> Tensor:
    """Value of each decision, (M,)."""
    return head(hidden_MLD.mean(1))[:, 0]


@torch.no_grad()
def predict_values(policy: VlaPolicy, head: nn.Module, batch: Batch) -> Tensor:
    """Value before each decision, (B, K), 0 where there was none."""
    where = batch.acted_BK.nonzero()
    found = [value_of(head, policy.states(at(batch.inputs, part))) for part in where.split(MICRO)]
    return torch.zeros(batch.acted_BK.shape).masked_scatter(batch.acted_BK, torch.cat(found).cpu())


def at(inputs: Inputs, where_M2: Tensor) -> Inputs:
    """The observations of decisions (episode, number)."""
    return Inputs(*(None if x is None else x[where_M2[:, 0], where_M2[:, 1]] for x in inputs))


class Targets(NamedTuple):
    """What an update aims at, fixed for all its passes; values and returns are None without a critic."""

    advantage_BK: Tensor
    value_BK: Tensor | None
    return_BK: Tensor | None


def make_targets(policy: VlaPolicy, head: nn.Module | None, batch: Batch, algo: AlgoConfig, meter: Meter) -> Targets:
    """Advantage of every decision: of the whole episode within its group, or by the critic."""
    if head is None:
        total_B = batch.reward_BK.sum(1)
        adv_B = advantages.outcome_advantages(algo.advantage, total_B, batch.group_B, ddof=algo.std_ddof, eps=algo.std_eps)
        return Targets(adv_B[:, None] * batch.acted_BK, None, None)
    value_BK = predict_values(policy, head, batch)
    meter.add_forward(int(batch.acted_BK.sum()) * policy.length)
    adv_BK, return_BK, _ = advantages.gae(batch.reward_BK, value_BK, batch.acted_BK, gamma=algo.gamma, lam=algo.lam)
    if algo.whiten:
        adv_BK = advantages.masked_whiten(adv_BK, batch.acted_BK)
    return Targets(adv_BK, value_BK, return_BK)


def update(
    policy: VlaPolicy,
    head: nn.Module | None,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    keep_B: Tensor,
    targets: Targets,
    algo: AlgoConfig,
    seed: int,
    step: int,
    meter: Meter,
) -> dict[str, float]:
    """epochs * minibatches optimizer steps on the kept episodes; the first value_warmup_steps move the critic alone."""
    kept, sums, updates = keep_B.nonzero()[:, 0], defaultdict[str, float](float), 0
    warmup = head is not None and step < algo.value_warmup_steps
    for epoch in range(algo.epochs if len(kept) else 0):
        order = torch.from_numpy(rng(seed, "minibatch", step, epoch).permutation(len(kept)))
        for rows in kept[order].tensor_split(min(algo.minibatches, len(kept))):
            length_B = batch.mask_BKLA[rows].sum((1, 2, 3))
            longest = batch.mask_BKLA[0].numel()
            weight_B = torch.zeros(len(keep_B))
            weight_B[rows] = losses.sequence_weights(length_B, algo.loss_agg, constant=longest)
            value_weight = 1 / batch.acted_BK[rows].sum()
            optimizer.zero_grad(set_to_none=True)
            rows = rows if head is not None else rows[(targets.advantage_BK[rows] != 0).any(1)]
            if not len(rows):
                continue
            for part in rows.split(max(1, MICRO // batch.acted_BK.shape[1])):
                accumulate(policy, head, batch, part, targets, weight_B, value_weight, algo, warmup, sums)
            decisions = int(batch.acted_BK[rows].sum())
            (meter.add_forward if warmup else meter.add_train)(decisions * policy.length)
            for number, group in enumerate(optimizer.param_groups):
                norm = nn.utils.clip_grad_norm_(group["params"], algo.grad_clip)
                sums["grad_norm"] += float(norm) if number == 0 and not warmup else 0.0
            optimizer.step()
            updates += 1
    return averages(sums, updates)


def accumulate(
    policy: VlaPolicy,
    head: nn.Module | None,
    batch: Batch,
    rows: Tensor,
    targets: Targets,
    weight_B: Tensor,
    value_weight: Tensor,
    algo: AlgoConfig,
    warmup: bool,
    sums: dict[str, float],
) -> None:
    """Adds the gradient of some episodes, and their sums for the metrics."""
    where = batch.acted_BK[rows].nonzero()
    where = torch.stack([rows[where[:, 0]], where[:, 1]], 1)
    mask_MLA = batch.mask_BKLA[where[:, 0], where[:, 1]]
    tokens_MLA = batch.tokens_BKLA[where[:, 0], where[:, 1]].to(policy.device)
    with torch.set_grad_enabled(not warmup):
        logits, hidden_MLD = policy(at(batch.inputs, where))
    logp_MLAV = log_probabilities(logits, algo.temperature)
    logp_N = logp_MLAV.gather(-1, tokens_MLA[..., None])[..., 0][mask_MLA]
    entropy_N = losses.entropy_from_logprobs(logp_MLAV[mask_MLA])
    out = TokenOutputs(logp_N, entropy_N, hidden_MLD)
    count_M = mask_MLA.sum((1, 2))
    length_B = batch.mask_BKLA[rows].sum((1, 2, 3))
    advantage_N = targets.advantage_BK[where[:, 0], where[:, 1]].repeat_interleave(count_M)
    sampler_N = batch.logp_BKLA[where[:, 0], where[:, 1]][mask_MLA]
    weight_N = weight_B[rows].repeat_interleave(length_B)
    loss = torch.zeros(())
    if head is not None:
        value_M, old_M, return_M = value_of(head, hidden_MLD), *(x[where[:, 0], where[:, 1]] for x in targets[1:])
        value_loss = losses.value_loss(value_M, old_M, return_M, algo.value_clip or None).sum() * value_weight
        sums["loss/value"] += float(value_loss.detach())
        loss = algo.value_coef * value_loss
    actor = policy_loss(out, sampler_N, advantage_N, weight_N, length_B, None, algo, sums)
    (loss if warmup else loss + actor).backward()


def train_rl(
    policy: VlaPolicy,
    algo: AlgoConfig,
    reward: str,
    *,
    decisions: int,
    seed: int,
    budget: Budget,
    log: RunLog,
    folder: Path,
    evaluate: Callable[[int, int], None] | None = None,
    evaluate_every_flops: float | None = None,
    checkpoint_every: int = 10,
) -> Meter:
    """Trains `policy` in place until the budget is used, from folder/state.pt on if there is one. Returns the meter."""
    head = build_value_head(policy, seed) if algo.advantage == "gae" else None
    modules: dict[str, nn.Module] = {"policy": policy} | ({} if head is None else {"value": head})
    optimizer = make_optimizer(list(trainable(policy).values()), [] if head is None else list(head.parameters()), algo)
    meter = Meter(parameter_count(policy))
    step, evaluations = resume(folder / "state.pt", modules, optimizer, meter, log)
    while not meter.exhausted(budget, step):
        start = time.perf_counter()
        set_learning_rate(optimizer, algo, step, meter.used(budget, step))
        batch, keep_B, metrics = collect(policy, algo, reward, decisions, seed, step, meter)
        sampled = time.perf_counter()
        targets = make_targets(policy, head, batch, algo, meter)
        metrics |= update(policy, head, optimizer, batch, keep_B, targets, algo, seed, step, meter)
        step += 1
        metrics |= {"progress/step": step, "time/rollout": sampled - start, "time/update": time.perf_counter() - sampled}
        log.metrics(step, metrics, progress=meter.used(budget, step))
        if evaluate is not None and evaluations_due(meter, evaluate_every_flops) > evaluations:
            evaluations = evaluations_due(meter, evaluate_every_flops)
            evaluate(step, meter.flops)
        if step % checkpoint_every == 0 or meter.exhausted(budget, step):
            save(folder / "state.pt", modules, optimizer, meter, step, evaluations)
            log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)
    return meter
