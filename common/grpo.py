"""Policy gradient with one reward per episode: GRPO, DAPO, Dr. GRPO, RLOO, REINFORCE, REINFORCE with baseline.

They differ only in configuration (conf/algo/): how the advantage is made, how token losses are averaged, and options.
Shape suffixes: _B episodes, _T tokens, _N packed policy tokens.

Departures from the papers:
- GRPO (Shao et al. 2024): no reward model, the reward is the environment's. KL off unless kl_coef > 0.
- DAPO (Yu et al. 2025): dynamic sampling asks for at most `refill_rounds` further batches of prompts, then trains on
  what it has; the overlong punishment looks at an episode's longest turn.
- Dr. GRPO (Liu et al. 2025): the constant of the loss is max_new_tokens * max_turns, the longest possible episode.
- RLOO (Ahmadian et al. 2024): token-level ratio and clipping as in PPO instead of one ratio per completion, and the
  loss is averaged by `loss_agg`; at one update per batch both have the same gradient as the paper's, up to scale.
- With epochs * minibatches = 1 the policy that is trained is the policy that sampled, so the ratio is 1 by definition
  and no second pass computes it. With more, the sampler's own log-probabilities are the old ones.
- Groups without spread leave the batch when `drop_zero_variance` is on, and then no KL or entropy term acts on them
  either. When it is off they count in every average; they are only forwarded if a KL or entropy term needs them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import advantages, losses
from common.algo import AlgoConfig
from common.compute import Budget, Meter
from common.episodes import Batch, Episode
from common.loop import (
    TaskAt,
    averages,
    episode_metrics,
    evaluations_due,
    learnable,
    make_optimizer,
    overlong_penalties,
    policy_loss,
    resume,
    sample_step,
    save,
    set_learning_rate,
    speed_metrics,
    to_batch,
    trainable,
)
from common.models import parameter_count
from common.policy import (
    check_head,
    make_reference,
    micro_batches,
    reference_logprobs,
    score_tokens,
    select,
    tokens_to_forward,
)
from common.runlog import RunLog
from common.seeding import rng


def train_grpo(
    model: Any,
    tokenizer: Any,
    make_env: Callable,
    task_at: TaskAt,
    algo: AlgoConfig,
    *,
    seed: int,
    budget: Budget,
    log: RunLog,
    folder: Path,
    reference: Any | None = None,
    evaluate: Callable[[int, int], None] | None = None,
    evaluate_every_flops: float | None = None,
    checkpoint_every: int = 10,
) -> Meter:
    """Trains `model` in place until the budget is used, from folder/state.pt on if there is one. Returns the meter.

    Args:
        task_at: (step, n) -> the n tasks of a step; a longer list must begin with the shorter one, because refill
            rounds ask for more.
        reference: frozen model for KL; None takes the start policy (adapter off, or a copy), if kl_coef > 0.
        evaluate: called with the step and the FLOPs used whenever another `evaluate_every_flops` are used.
    """
    check_head(model)
    reference = make_reference(model, reference, needed=algo.kl_coef > 0)
    optimizer = make_optimizer(list(trainable(model).values()), [], algo)
    meter = Meter(parameter_count(model))
    step, evaluations = resume(folder / "state.pt", {"policy": model}, optimizer, meter, log)
    while not meter.exhausted(budget, step):
        start = time.perf_counter()
        set_learning_rate(optimizer, algo, step, meter.used(budget, step))
        model.eval()
        batch, advantages_B, keep_B, metrics = collect(model, reference, tokenizer, make_env, task_at, algo, seed, step, meter)
        sampled = time.perf_counter()
        model.train()
        metrics |= update(model, reference, optimizer, batch, advantages_B, keep_B, algo, seed, step, meter)
        model.eval()
        step += 1
        metrics |= {"progress/step": step, **speed_metrics(start, sampled, batch)}
        log.metrics(step, metrics, progress=meter.used(budget, step))
        if evaluate is not None and evaluations_due(meter, evaluate_every_flops) > evaluations:
            evaluations = evaluations_due(meter, evaluate_every_flops)
            evaluate(step, meter.flops)
        if step % checkpoint_every == 0 or meter.exhausted(budget, step):
            save(folder / "state.pt", {"policy": model}, optimizer, meter, step, evaluations)
            log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)
    return meter


def collect(
    model: Any,
    reference: Any | None,
    tokenizer: Any,
    make_env: Callable,
    task_at: TaskAt,
    algo: AlgoConfig,
    seed: int,
    step: int,
    meter: Meter,
) -> tuple[Batch, Tensor, Tensor, dict[str, float]]:
    """Samples one step: batch, advantages_B, keep_B (takes part in the update), metrics.

    While groups without spread leave the batch short, further prompts are sampled, for at most refill_rounds rounds.
    """
    episodes: list[Episode] = []
    rewards: list[Tensor] = []
    wanted = algo.prompts_per_step
    for part in range(algo.refill_rounds + 1):
        tasks = task_at(step, wanted * (part + 1))[wanted * part :]
        fresh = sample_step(model, tokenizer, make_env, tasks, algo, seed, step, part)
        meter.add_forward(sum(episode.tokens_forward for episode in fresh))
        episodes += fresh
        rewards.append(shaped_rewards(model, reference, fresh, to_batch(fresh, tokenizer, model), algo, meter))
        rewards_B = torch.cat(rewards)
        group_B = torch.tensor([episode.group for episode in episodes])
        valid_B = learnable(episodes, algo)
        keep_B = advantages.scored(rewards_B, valid_B)
        flat_B = torch.zeros_like(keep_B)
        if algo.group_size > 1:
            flat_B = advantages.zero_spread(rewards_B, group_B, valid_B)
        if algo.drop_zero_variance:
            keep_B &= ~flat_B
        groups = group_B[keep_B].unique()
        if len(groups) >= wanted:
            break
    keep_B &= torch.isin(group_B, groups[:wanted])
    advantages_B = advantages.outcome_advantages(
        algo.advantage, rewards_B, group_B, valid_B, ddof=algo.std_ddof, eps=algo.std_eps
    )
    metrics = episode_metrics(episodes, rewards_B) | {"reward/zero_std_frac": float(flat_B.double().mean())}
    return to_batch(episodes, tokenizer, model), advantages_B, keep_B, metrics


def shaped_rewards(
    model: Any, reference: Any | None, episodes: list[Episode], batch: Batch, algo: AlgoConfig, meter: Meter
) -> Tensor:
    """What training maximises, (B,): score, overlong punishment and, with kl_in=reward, minus kl_coef * summed KL."""
    rewards_B = advantages.rewards_tensor([e.reward for e in episodes], len(episodes))
    rewards_B = rewards_B + overlong_penalties(episodes, algo)
    if reference is None or algo.kl_in != "reward":
        return rewards_B
    ref_logp_BT = reference_logprobs(model, reference, batch, algo.temperature)
    meter.add_forward(int(batch.attention_BT.sum()))
    kl_B = (losses.kl(batch.logp_BT, ref_logp_BT, algo.kl_estimator) * batch.mask_BT).sum(1)
    return rewards_B - algo.kl_coef * kl_B.double().cpu()


def update(
    model: Any,
    reference: Any | None,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    advantages_B: Tensor,
    keep_B: Tensor,
    algo: AlgoConfig,
    seed: int,
    step: int,
    meter: Meter,
) -> dict[str, float]:
    """epochs * minibatches optimizer steps on the kept episodes. Returns loss/, kl/, ratio/, entropy and grad_norm."""
    kept = keep_B.nonzero()[:, 0].to(batch.ids_BT.device)
    if len(kept) == 0:  # every group agrees: nothing to learn from this step, and reward/zero_std_frac says so
        return {}
    advantages_B = advantages_B.to(batch.ids_BT.device)
    kl_loss = reference is not None and algo.kl_in == "loss"
    ref_logp_BT = None
    if kl_loss:
        ref_logp_BT = reference_logprobs(model, reference, batch, algo.temperature)
        meter.add_forward(int(batch.attention_BT.sum()))
    sums: dict[str, float] = defaultdict(float)
    parameters = optimizer.param_groups[0]["params"]
    updates = 0
    for epoch in range(algo.epochs):
        order = torch.from_numpy(rng(seed, "minibatch", step, epoch).permutation(len(kept))).to(kept.device)
        for rows in kept[order].tensor_split(min(algo.minibatches, len(kept))):
            weight_B = torch.zeros_like(advantages_B)
            weight_B[rows] = losses.sequence_weights(
                batch.mask_BT[rows].sum(1), algo.loss_agg, constant=algo.max_new_tokens * algo.max_turns
            )
            if not kl_loss and algo.entropy_coef == 0:
                rows = rows[advantages_B[rows] != 0]  # no gradient: not forwarded, still counted in the weights
            if len(rows) == 0:
                continue
            optimizer.zero_grad(set_to_none=True)
            for part in micro_batches(batch, rows):
                accumulate(model, batch, part, advantages_B, weight_B, ref_logp_BT, algo, sums)
            meter.add_train(tokens_to_forward(batch, rows))
            sums["grad_norm"] += float(torch.nn.utils.clip_grad_norm_(parameters, algo.grad_clip))
            optimizer.step()
            updates += 1
    return averages(sums, updates)


def accumulate(
    model: Any,
    batch: Batch,
    rows: Tensor,
    advantages_B: Tensor,
    weight_B: Tensor,
    ref_logp_BT: Tensor | None,
    algo: AlgoConfig,
    sums: dict[str, float],
) -> None:
    """Adds the gradient of one micro-batch, and its sums for the metrics."""
    part = select(batch, rows)
    mask_BT = part.mask_BT.bool()
    count_B = mask_BT.sum(1)
    ref_logp_N = None if ref_logp_BT is None else ref_logp_BT[rows, : mask_BT.shape[1]][mask_BT]
    out = score_tokens(model, part, algo.temperature, entropy_gradient=algo.entropy_coef > 0)
    loss = policy_loss(
        out,
        part.logp_BT[mask_BT],
        advantages_B[rows].repeat_interleave(count_B),
        weight_B[rows].repeat_interleave(count_B),
        ref_logp_N,
        algo,
        sums,
    )
    loss.backward()
