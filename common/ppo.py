"""PPO with a value head on the policy's own trunk (Schulman et al. 2017), at token or turn level.

One forward pass of the trunk gives logits and values: both are read from the hidden state before each token.
Shape suffixes: _B episodes, _T tokens, _N packed policy tokens, _D hidden width.

Departures from the paper, and choices it leaves open:
- The actor and the critic share the trunk; the value head, a two-layer perceptron that starts at 0, has its own
  learning rate, and the first `value_warmup_steps` steps train it alone on a trunk that stands still.
- An action is a token, or with gae_level=turn a whole answer: then V is read before its first token only, all its
  tokens share its advantage, and each token keeps its own ratio. Prompt and environment tokens take no part in GAE.
- An episode that the environment ended has no future. One that was cut from outside (turn limit, context) is worth
  the value of its last state.
- The sampler's log-probabilities are the old ones; no second pass computes them.
- Policy and value gradients are clipped to grad_clip separately.
- The FLOPs of the value head, a small share of the trunk's, are not counted.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common import advantages, losses
from common.algo import AlgoConfig
from common.compute import Budget, Meter
from common.episodes import Batch, Episode
from common.fused import states_before
from common.loop import (
    TaskAt,
    averages,
    episode_metrics,
    evaluations_due,
    learnable,
    make_optimizer,
    policy_loss,
    resume,
    sample_step,
    save,
    set_learning_rate,
    speed_metrics,
    to_batch,
    token_rewards,
    trainable,
)
from common.policy import (
    build_value_head,
    check_head,
    images_to_encode,
    make_reference,
    micro_batches,
    network,
    reference_logprobs,
    score_tokens,
    select,
    tokens_to_forward,
)
from common.runlog import RunLog
from common.seeding import rng
from common.vision import meter_for


class Targets(NamedTuple):
    """What an update aims at, fixed for all its epochs: see `advantages.gae`; ref_logp_BT only with KL in the loss."""

    advantages_BT: Tensor
    returns_BT: Tensor
    action_BT: Tensor
    values_BT: Tensor
    ref_logp_BT: Tensor | None


def train_ppo(
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

    Args: as `common.grpo.train_grpo`. The value head lives in folder/state.pt alone.
    """
    check_head(model)
    reference = make_reference(model, reference, needed=algo.kl_coef > 0)
    head = build_value_head(model, seed)
    modules = {"policy": model, "value": head}
    optimizer = make_optimizer(list(trainable(model).values()), list(head.parameters()), algo)
    meter = meter_for(model)
    step, evaluations = resume(folder / "state.pt", modules, optimizer, meter, log)
    while not meter.exhausted(budget, step):
        start = time.perf_counter()
        set_learning_rate(optimizer, algo, step, meter.used(budget, step))
        model.eval()
        tasks = task_at(step, algo.prompts_per_step)
        episodes = sample_step(model, tokenizer, make_env, tasks, algo, seed, step)
        batch = to_batch(episodes, tokenizer, model)
        meter.add_forward(sum(episode.tokens_forward for episode in episodes))
        meter.add_images(sum(episode.images_forward for episode in episodes))
        sampled = time.perf_counter()
        targets, metrics = make_targets(model, reference, head, episodes, batch, algo, meter)
        kept = learnable(episodes, algo).nonzero()[:, 0].to(batch.ids_BT.device)
        model.train()
        metrics |= update(model, head, optimizer, batch, targets, kept, algo, seed, step, meter)
        model.eval()
        step += 1
        metrics |= {"progress/step": step, **speed_metrics(start, sampled, batch)}
        log.metrics(step, metrics, progress=meter.used(budget, step))
        if evaluate is not None and evaluations_due(meter, evaluate_every_flops) > evaluations:
            evaluations = evaluations_due(meter, evaluate_every_flops)
            evaluate(step, meter.flops)
        if step % checkpoint_every == 0 or meter.exhausted(budget, step):
            save(folder / "state.pt", modules, optimizer, meter, step, evaluations)
            log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)
    return meter


@torch.no_grad()
def predict_values(model: Any, head: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Value before each policy token, (B, T), 0 elsewhere; and value after the last token of each row, (B,)."""
    end_B1 = batch.attention_BT.sum(1, keepdim=True)
    ids_BT, wanted_BT, values_BT = (
        nn.functional.pad(x_BT, (0, 1)) for x_BT in (batch.ids_BT, batch.mask_BT, torch.zeros_like(batch.logp_BT))
    )
    wanted_BT.scatter_(1, end_B1, True)  # what follows the end of a row is judged by the state after its last token
    for rows in micro_batches(batch, torch.arange(len(ids_BT), device=ids_BT.device)):
        longest = int(end_B1[rows].max()) + 1
        part_BT = wanted_BT[rows, :longest]
        images = None if batch.images is None else batch.images.take(rows)
        values_N = head(states_before(network(model), ids_BT[rows, :longest], part_BT, images).float())[:, 0]
        values_BT[rows, :longest] = values_BT[rows, :longest].masked_scatter(part_BT, values_N)
    final_B = values_BT.gather(1, end_B1)[:, 0]
    return torch.where(batch.mask_BT, values_BT[:, :-1], 0.0), final_B


def make_targets(
    model: Any,
    reference: Any | None,
    head: nn.Module,
    episodes: list[Episode],
    batch: Batch,
    algo: AlgoConfig,
    meter: Meter,
) -> tuple[Targets, dict[str, float]]:
    """Advantages and value targets of a step's episodes, and the metrics of its samples."""
    device = batch.ids_BT.device
    rewards_BT = token_rewards(episodes, batch, algo)
    metrics: dict[str, float] = {}
    ref_logp_BT = None
    if reference is not None:
        ref_logp_BT = reference_logprobs(model, reference, batch, algo.temperature)
        meter.add_forward(int(batch.attention_BT.sum()))
        meter.add_images(images_to_encode(batch))
        kl_BT = losses.kl(batch.logp_BT, ref_logp_BT, algo.kl_estimator) * batch.mask_BT
        metrics["kl/ref"] = float(kl_BT.sum() / batch.mask_BT.sum().clamp(min=1))
        if algo.kl_in == "reward":
            rewards_BT, ref_logp_BT = rewards_BT - algo.kl_coef * kl_BT, None
    values_BT, final_B = predict_values(model, head, batch)
    meter.add_forward(int(batch.attention_BT.sum()))
    meter.add_images(images_to_encode(batch))
    terminated_B = torch.tensor([episode.terminated for episode in episodes], device=device)
    advantages_BT, returns_BT, action_BT = advantages.gae(
        rewards_BT,
        values_BT,
        batch.mask_BT,
        gamma=algo.gamma,
        lam=algo.lam,
        bootstrap_B=advantages.bootstrap_values(final_B, terminated_B, ~terminated_B),
        turn_BT=batch.turn_BT if algo.gae_level == "turn" else None,
    )
    if algo.whiten:
        learn_B = learnable(episodes, algo).to(device)
        advantages_BT = advantages.masked_whiten(advantages_BT, batch.mask_BT.bool() & learn_B[:, None])
    metrics |= episode_metrics(episodes, rewards_BT.sum(1).double())
    return Targets(advantages_BT, returns_BT, action_BT, values_BT, ref_logp_BT), metrics


def update(
    model: Any,
    head: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    targets: Targets,
    kept: Tensor,
    algo: AlgoConfig,
    seed: int,
    step: int,
    meter: Meter,
) -> dict[str, float]:
    """epochs * minibatches optimizer steps. Returns loss/, kl/, ratio/, entropy and grad_norm.

    During value warm-up the trunk runs without gradient and only the value head moves.
    """
    warmup = step < algo.value_warmup_steps
    sums: dict[str, float] = defaultdict(float)
    updates = 0
    for epoch in range(algo.epochs):
        order = torch.from_numpy(rng(seed, "minibatch", step, epoch).permutation(len(kept))).to(kept.device)
        for rows in kept[order].tensor_split(min(algo.minibatches, len(kept))) if len(kept) else ():
            policy_B = torch.zeros(len(batch.ids_BT), device=kept.device)
            policy_B[rows] = losses.sequence_weights(
                batch.mask_BT[rows].sum(1), algo.loss_agg, constant=algo.max_new_tokens * algo.max_turns
            )
            value_weight = 1 / targets.action_BT[rows].sum().clamp(min=1)
            optimizer.zero_grad(set_to_none=True)
            for part in micro_batches(batch, rows):
                accumulate(model, head, batch, part, targets, policy_B, value_weight, algo, warmup, sums)
                meter.add_images(images_to_encode(batch, part), train=not warmup)
            (meter.add_forward if warmup else meter.add_train)(tokens_to_forward(batch, rows))
            if not warmup:
                policy = optimizer.param_groups[0]["params"]
                sums["grad_norm"] += float(nn.utils.clip_grad_norm_(policy, algo.grad_clip))
            nn.utils.clip_grad_norm_(head.parameters(), algo.grad_clip)
            optimizer.step()
            updates += 1
    return averages(sums, updates)


def accumulate(
    model: Any,
    head: nn.Module,
    batch: Batch,
    rows: Tensor,
    targets: Targets,
    policy_B: Tensor,
    value_weight: Tensor,
    algo: AlgoConfig,
    warmup: bool,
    sums: dict[str, float],
) -> None:
    """Adds the gradient of one micro-batch, and its sums for the metrics."""
    part = select(batch, rows)
    mask_BT = part.mask_BT.bool()
    with torch.set_grad_enabled(not warmup):
        out = score_tokens(model, part, algo.temperature, entropy_gradient=algo.entropy_coef > 0)
    advantage_N, return_N, action_N, old_value_N = (
        x_BT[rows, : mask_BT.shape[1]][mask_BT] for x_BT in targets[:4] if x_BT is not None
    )
    value_N = head(out.hidden_ND.float())[:, 0]
    value_loss_N = losses.value_loss(value_N, old_value_N, return_N, algo.value_clip or None)
    value_loss = losses.weighted_sum(value_loss_N, action_N * value_weight)
    sums["loss/value"] += float(value_loss.detach())
    loss = algo.value_coef * value_loss
    length_B = mask_BT.sum(1)
    weight_N = policy_B[rows].repeat_interleave(length_B)
    ref_logp_N = None
    if targets.ref_logp_BT is not None:
        ref_logp_N = targets.ref_logp_BT[rows, : mask_BT.shape[1]][mask_BT]
    actor_loss = policy_loss(out, part.logp_BT[mask_BT], advantage_N, weight_N, length_B, ref_logp_N, algo, sums)
    (loss if warmup else loss + actor_loss).backward()
