"""Policy gradient without a value head: GRPO, Dr. GRPO, DAPO, GSPO, CISPO, RLOO, REINFORCE and its kin.

They differ only in configuration (conf/algo/): how the advantage is made (advantage, whiten), how a token's loss is
bounded (policy_loss), how token losses are averaged (loss_agg), and options.
Shape suffixes: _B episodes, _T tokens, _N packed policy tokens.

Departures from the papers:
- GRPO (Shao et al. 2024): no reward model, the reward is the environment's. KL off unless kl_coef > 0.
- DAPO (Yu et al. 2025): dynamic sampling asks for at most `refill_rounds` further batches of prompts, then trains on
  what it has; the overlong punishment looks at an episode's longest turn. The chapter describes dynamic sampling
  otherwise, as more samples for tasks of middling difficulty: `refill_with=answers` is that (see `refill`).
- GSPO (Zheng et al. 2025): the token form of its ratio, which has the same gradient.
- CISPO (MiniMax-M1, 2025): its dynamic sampling and length penalty are DAPO's keys and off in the preset.
- REINFORCE++ (Hu 2025): rewards of several turns count from their turn on, and KL from its token on; whitening is over
  the trained tokens of a step. Its -baseline variant whitens rewards minus the group mean and has k2 in the loss.
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
from common.algo import PREFERENCE_NAMES, AlgoConfig
from common.compute import Budget, Meter
from common.credits import Credit
from common.episodes import Batch, Episode
from common.guests import Guests, invite
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
    token_rewards,
    trainable,
)
from common.policy import (
    check_head,
    images_to_encode,
    make_reference,
    micro_batches,
    reference_logprobs,
    score_tokens,
    select,
    tokens_to_forward,
)
from common.runlog import RunLog
from common.schema import ConfigError
from common.seeding import rng
from common.vision import meter_for

MIDDLING = (0.2, 0.8)  # success rates of the prompts that refill_with=answers samples more of


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
    credit: Credit | None = None,
    guests: Guests | None = None,
) -> Meter:
    """Trains `model` in place until the budget is used, from folder/state.pt on if there is one. Returns the meter.

    Args:
        task_at: (step, n) -> the n tasks of a step; a longer list must begin with the shorter one, because refill
            rounds ask for more.
        reference: frozen model for KL; None takes the start policy (adapter off, or a copy), if kl_coef > 0.
        evaluate: called with the step and the FLOPs used whenever another `evaluate_every_flops` are used.
        credit: makes the advantages in place of algo.advantage, for signals along the path (common.credits).
        guests: episodes that others wrote, one more in each group (common.guests); the metrics of samples leave them out.
    """
    if credit is not None and algo.drop_zero_variance:
        raise ConfigError("algo.drop_zero_variance=true: a group of equal outcomes may differ along the path; set it to false.")
    if algo.name in PREFERENCE_NAMES:
        raise ConfigError(f"algo.name={algo.name}: train_grpo does not train by preference; see common.preference.")
    check_head(model)
    reference = make_reference(model, reference, needed=algo.kl_coef > 0)
    optimizer = make_optimizer(list(trainable(model).values()), [], algo)
    meter = meter_for(model)
    step, evaluations = resume(folder / "state.pt", {"policy": model}, optimizer, meter, log)
    while not meter.exhausted(budget, step):
        start = time.perf_counter()
        set_learning_rate(optimizer, algo, step, meter.used(budget, step))
        model.eval()
        batch, advantages_BT, keep_B, metrics = collect(
            model, reference, tokenizer, make_env, task_at, algo, seed, step, meter, credit, guests, meter.used(budget, step)
        )
        sampled = time.perf_counter()
        model.train()
        metrics |= update(model, reference, optimizer, batch, advantages_BT, keep_B, algo, seed, step, meter)
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
    credit: Credit | None = None,
    guests: Guests | None = None,
    used: float = 0.0,
) -> tuple[Batch, Tensor, Tensor, dict[str, float]]:
    """Samples one step: batch, advantages_BT, keep_B (takes part in the update), metrics. used: share of the budget.

    While groups without spread leave the batch short, more is sampled (see `refill`), for at most refill_rounds rounds.
    """
    episodes: list[Episode] = []
    rewards: list[Tensor] = []
    own: list[bool] = []
    numbers = list(range(algo.prompts_per_step))
    for part in range(algo.refill_rounds + 1):
        tasks = task_at(step, max(numbers) + 1)
        chosen = [tasks[number] for number in numbers]
        fresh = sample_step(model, tokenizer, make_env, chosen, algo, seed, step, part, numbers)
        meter.add_forward(sum(episode.tokens_forward for episode in fresh))
        meter.add_images(sum(episode.images_forward for episode in fresh))
        own += [True] * len(fresh)
        if guests is not None:
            fresh += invite(guests, model, tokenizer, chosen, numbers, algo.temperature, meter)
            own += [False] * len(chosen)
        episodes += fresh
        shaped_B, kl_BT = shaped_rewards(model, reference, fresh, to_batch(fresh, tokenizer, model), algo, meter)
        rewards.append(shaped_B)
        rewards_B = torch.cat(rewards)
        group_B = torch.tensor([episode.group for episode in episodes])
        valid_B = learnable(episodes, algo)
        keep_B = advantages.scored(rewards_B, valid_B)
        flat_B = torch.zeros_like(keep_B)
        if algo.group_size > 1:
            flat_B = advantages.zero_spread(rewards_B, group_B, valid_B)
        if algo.drop_zero_variance:
            keep_B &= ~flat_B
        numbers = refill(episodes, keep_B, part + 1, algo)
        if not numbers:
            break
    keep_B &= torch.isin(group_B, group_B[keep_B].unique()[: algo.prompts_per_step])
    batch = to_batch(episodes, tokenizer, model)
    sampled = [episode for episode, is_own in zip(episodes, own, strict=True) if is_own]
    metrics = episode_metrics(sampled, rewards_B[torch.tensor(own)]) | {"reward/zero_std_frac": float(flat_B.double().mean())}
    if credit is not None:
        advantages_BT, extra = credit(episodes, batch, valid_B, used)
        return batch, advantages_BT, keep_B, metrics | extra
    advantages_BT = token_advantages(episodes, batch, rewards_B, kl_BT, keep_B, algo)
    return batch, advantages_BT, keep_B, metrics


def token_advantages(
    episodes: list[Episode], batch: Batch, rewards_B: Tensor, kl_BT: Tensor, keep_B: Tensor, algo: AlgoConfig
) -> Tensor:
    """The advantage of every token of the policy, (B, T), by the configured rule; 0 off the mask."""
    if algo.advantage == "reward_to_go":  # never refilled, so kl_BT is that of all episodes
        rewards_BT = token_rewards(episodes, batch, algo) - algo.kl_coef * kl_BT
        advantages_BT = advantages.reward_to_go(rewards_BT, batch.mask_BT, algo.gamma)
    else:
        group_B = torch.tensor([episode.group for episode in episodes])
        advantages_B = advantages.outcome_advantages(
            algo.advantage, rewards_B, group_B, learnable(episodes, algo), ddof=algo.std_ddof, eps=algo.std_eps
        )
        advantages_BT = advantages_B.to(batch.ids_BT.device)[:, None] * batch.mask_BT
    if algo.whiten:
        kept_BT = batch.mask_BT & keep_B.to(batch.ids_BT.device)[:, None]
        advantages_BT = advantages.masked_whiten(advantages_BT, kept_BT)
    return advantages_BT


def refill(episodes: list[Episode], keep_B: Tensor, part: int, algo: AlgoConfig) -> list[int]:
    """Numbers of the groups that round `part` of a step's sampling adds group_size answers to; [] ends the sampling.

    refill_with=prompts: as many new prompts as a step has, until enough groups are kept (DAPO, Yu et al. 2025, eq. 11).
    refill_with=answers: more answers to the step's own prompts of which 20 to 80 % of the answers succeed, those nearest
    to one half first, until enough episodes are kept.
    """
    wanted = algo.prompts_per_step
    if algo.refill_with == "prompts":
        kept = {episode.group for episode, keep in zip(episodes, keep_B.tolist(), strict=True) if keep}
        return [] if len(kept) >= wanted else list(range(wanted * part, wanted * (part + 1)))
    outcomes: dict[int, list[bool]] = defaultdict(list)
    for episode in episodes:
        outcomes[episode.group].append(episode.success)
    rates = {group: sum(successes) / len(successes) for group, successes in outcomes.items()}
    middling = [group for group, rate in rates.items() if MIDDLING[0] <= rate <= MIDDLING[1]]
    missing = (wanted * algo.group_size - int(keep_B.sum())) // algo.group_size
    return sorted(middling, key=lambda group: abs(rates[group] - 0.5))[:missing]


def shaped_rewards(
    model: Any, reference: Any | None, episodes: list[Episode], batch: Batch, algo: AlgoConfig, meter: Meter
) -> tuple[Tensor, Tensor]:
    """What training maximises, (B,): score, overlong punishment and, with kl_in=reward, minus kl_coef * summed KL.

    Second: that KL per token, (B, T), 0 off the mask and everywhere if it is not in the reward.
    """
    rewards_B = advantages.rewards_tensor([e.reward for e in episodes], len(episodes))
    rewards_B = rewards_B + overlong_penalties(episodes, algo)
    if reference is None or algo.kl_in != "reward":
        return rewards_B, torch.zeros_like(batch.logp_BT)
    ref_logp_BT = reference_logprobs(model, reference, batch, algo.temperature)
    meter.add_forward(int(batch.attention_BT.sum()))
    meter.add_images(images_to_encode(batch))
    kl_BT = losses.kl(batch.logp_BT, ref_logp_BT, algo.kl_estimator) * batch.mask_BT
    return rewards_B - algo.kl_coef * kl_BT.sum(1).double().cpu(), kl_BT


def update(
    model: Any,
    reference: Any | None,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    advantages_BT: Tensor,
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
    kl_loss = reference is not None and algo.kl_in == "loss"
    ref_logp_BT = None
    if kl_loss:
        ref_logp_BT = reference_logprobs(model, reference, batch, algo.temperature)
        meter.add_forward(int(batch.attention_BT.sum()))
        meter.add_images(images_to_encode(batch))
    sums: dict[str, float] = defaultdict(float)
    parameters = optimizer.param_groups[0]["params"]
    updates = 0
    for epoch in range(algo.epochs):
        order = torch.from_numpy(rng(seed, "minibatch", step, epoch).permutation(len(kept))).to(kept.device)
        for rows in kept[order].tensor_split(min(algo.minibatches, len(kept))):
            weight_B = torch.zeros_like(advantages_BT[:, 0])
            weight_B[rows] = losses.sequence_weights(
                batch.mask_BT[rows].sum(1), algo.loss_agg, constant=algo.max_new_tokens * algo.max_turns
            )
            if not kl_loss and algo.entropy_coef == 0:
                rows = rows[(advantages_BT[rows] != 0).any(1)]  # no gradient: not forwarded, still counted in the weights
            if len(rows) == 0:
                continue
            optimizer.zero_grad(set_to_none=True)
            for part in micro_batches(batch, rows):
                accumulate(model, batch, part, advantages_BT, weight_B, ref_logp_BT, algo, sums)
                meter.add_images(images_to_encode(batch, part), train=True)
            meter.add_train(tokens_to_forward(batch, rows))
            sums["grad_norm"] += float(torch.nn.utils.clip_grad_norm_(parameters, algo.grad_clip))
            optimizer.step()
            updates += 1
    return averages(sums, updates)


def accumulate(
    model: Any,
    batch: Batch,
    rows: Tensor,
    advantages_BT: Tensor,
    weight_B: Tensor,
    ref_logp_BT: Tensor | None,
    algo: AlgoConfig,
    sums: dict[str, float],
) -> None:
    """Adds the gradient of one micro-batch, and its sums for the metrics."""
    part = select(batch, rows)
    mask_BT = part.mask_BT.bool()
    length_B = mask_BT.sum(1)
    ref_logp_N = None if ref_logp_BT is None else ref_logp_BT[rows, : mask_BT.shape[1]][mask_BT]
    out = score_tokens(model, part, algo.temperature, entropy_gradient=algo.entropy_coef > 0)
    loss = policy_loss(
        out,
        part.logp_BT[mask_BT],
        advantages_BT[rows, : mask_BT.shape[1]][mask_BT],
        weight_B[rows].repeat_interleave(length_B),
        length_B,
        ref_logp_N,
        algo,
        sums,
    )
    loss.backward()
