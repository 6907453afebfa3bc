"""AdaptThink: a reasoning model learns by reinforcement when to think (Zhang et al. 2025, arXiv 2505.13417).

Half of the answers to a prompt are forced to begin with </think> (NoThinking), half are forced to think. The advantage of
an answer y to x is, with the score R in {0, 1} as the paper defines it,

    A(x, y) = delta * 1[y begins with </think>] + R(x, y) - mean reference score of x, presampled in thinking mode,

so NoThinking pays on x as long as it costs less than delta of accuracy. The loss is PPO's,

    -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A),

where the old probability of the first token is that of the rule that drew it (one half for </think>), the others' that of
the policy. `ratio` says what r is:

- token: one ratio per token, as the paper writes. Only the first token's is not 1: pi(</think>) / 0.5.
- sequence: one ratio per answer, exp of the mean log-ratio of its tokens, as the released code computes. The first token's
  correction is divided by the answer's length: (pi(</think>) / 0.5) ** (1 / tokens).
- unclipped: token, without the clip: the importance weight alone.
- none: no correction; answers are forced all the same.

What follows for one update per batch (derivation of ours, tested by experiment 7-10): below 1 - clip_low, answers with A < 0
have no gradient, those with A > 0 keep theirs, so pi(</think>) rises whatever the mean advantage says, up to the floor
0.5 * (1 - clip_low) ** T for NoThinking answers of T tokens (T = 1 for `token`); above 0.5 * (1 + clip_high) ** T the
answers with A > 0 are cut, and it rises no further. See `bounds`.

Departures: the thinking half may begin with any token but </think> (the paper forces one fixed word), and its first token's
old probability is one half times its share of these; both halves have the same token limit; no KL and no entropy term, as
in the released code. Shape suffixes: _B episodes, _P prompts, _T tokens, _N packed policy tokens.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import losses
from common.algo import AlgoConfig
from common.compute import Budget, Meter
from common.episodes import Batch, Episode
from common.loop import (
    TaskAt,
    averages,
    episode_metrics,
    evaluations_due,
    make_optimizer,
    resume,
    save,
    set_learning_rate,
    speed_metrics,
    to_batch,
    trainable,
)
from common.models import parameter_count
from common.modes import end_think_id, play_modes, skips
from common.policy import TokenOutputs, check_head, micro_batches, score_tokens, select, tokens_to_forward
from common.runlog import RunLog
from common.schema import ConfigError, one_of, within
from common.seeding import generator

RATIOS = ("sequence", "token", "unclipped", "none")


@dataclass(frozen=True)
class AdaptThinkConfig:
    """``delta``: what NoThinking earns on top of the score. ``ratio``: see the module. ``forced``: half of the answers in
    each mode; false leaves the mode to the policy, as a plain policy gradient does. ``sample_batch``: answers
    in flight together.
    """

    delta: float = 0.05
    ratio: str = "sequence"
    forced: bool = True
    prompts_per_step: int = 24
    group_size: int = 16
    lr: float = 3e-4
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    grad_clip: float = 1.0
    warmup_steps: int = 0
    lr_decay: str = "none"
    clip_low: float = 0.2
    clip_high: float = 0.2
    loss_agg: str = "token_mean"
    temperature: float = 1.0
    max_new_tokens: int = 64
    sample_batch: int = 1024

    def __post_init__(self) -> None:
        one_of("adaptthink.ratio", self.ratio, RATIOS)
        one_of("adaptthink.lr_decay", self.lr_decay, ("none", "linear", "cosine"))
        one_of("adaptthink.loss_agg", self.loss_agg, losses.AGGREGATIONS)
        for key in ("prompts_per_step", "group_size", "sample_batch"):
            within(f"adaptthink.{key}", getattr(self, key), 1)
        within("adaptthink.max_new_tokens", self.max_new_tokens, 2)
        for key in ("lr", "grad_clip", "temperature", "clip_high"):
            within(f"adaptthink.{key}", getattr(self, key), 0, above=True)
        for key in ("delta", "weight_decay", "warmup_steps"):
            within(f"adaptthink.{key}", getattr(self, key), 0)
        within("adaptthink.clip_low", self.clip_low, 0, 1, above=True)
        if self.forced and self.group_size % 2:
            raise ConfigError(f"adaptthink.group_size={self.group_size}: must be even: half of them are forced to think.")

    @property
    def modes(self) -> list[str]:
        """The mode of each member of a group."""
        half = self.group_size // 2
        return ["nothink"] * half + ["think"] * half if self.forced else ["free"] * self.group_size

    @property
    def algo(self) -> AlgoConfig:
        """The part that the optimizer reads, in the form that the other loops use."""
        shared = {item.name for item in dataclasses.fields(AlgoConfig)} & {item.name for item in dataclasses.fields(self)}
        own = {name: getattr(self, name) for name in shared}
        return AlgoConfig(name="reinforce", advantage="reward", drop_zero_variance=False, **own)


def bounds(config: AdaptThinkConfig, tokens: int) -> tuple[float, float]:
    """(floor, ceiling) of the probability of </think>, for NoThinking answers of `tokens` tokens.

    Up to the floor no answer with a negative advantage pushes it down; from the ceiling on none pushes it up. (0, 1) where
    nothing is clipped or corrected.
    """
    if config.ratio in ("unclipped", "none") or not config.forced:
        return 0.0, 1.0
    power = tokens if config.ratio == "sequence" else 1
    return 0.5 * (1 - config.clip_low) ** power, min(1.0, 0.5 * (1 + config.clip_high) ** power)


def train_adaptthink(
    model: Any,
    tokenizer: Any,
    make_env: Callable,
    task_at: TaskAt,
    reference: Callable[[dict], float],
    config: AdaptThinkConfig,
    *,
    seed: int,
    budget: Budget,
    log: RunLog,
    folder: Path,
    stratum: Callable[[dict], str] | None = None,
    evaluate: Callable[[int, int], None] | None = None,
    evaluate_every_flops: float | None = None,
    checkpoint_every: int = 25,
) -> Meter:
    """Trains `model` in place until the budget is used, from folder/state.pt on if there is one. Returns the meter.

    Args:
        task_at: (step, n) -> the n tasks of a step, of one turn each; the score of an answer is its episode's success.
        reference: task -> mean score of the start in thinking mode (common.presample).
        stratum: task -> a name; the probability of NoThinking is logged for each of them, too.
        evaluate: called with the step and the FLOPs used whenever another `evaluate_every_flops` are used.

    Raises ConfigError if the tokenizer's template does not let the first token decide the mode.
    """
    end = end_think_id(tokenizer)
    check_head(model)
    optimizer = make_optimizer(list(trainable(model).values()), [], config.algo)
    meter = Meter(parameter_count(model))
    step, evaluations = resume(folder / "state.pt", {"policy": model}, optimizer, meter, log)
    while not meter.exhausted(budget, step):
        start = time.perf_counter()
        set_learning_rate(optimizer, config.algo, step, meter.used(budget, step))
        model.eval()
        tasks = task_at(step, config.prompts_per_step)
        episodes, nothink_P = play_step(model, tokenizer, make_env, tasks, config, end, seed, step)
        meter.add_forward(sum(episode.tokens_forward for episode in episodes))
        sampled = time.perf_counter()
        advantage_B = advantages(episodes, end, reference, config.delta)
        batch = to_batch(episodes, tokenizer, model)
        metrics = episode_metrics(episodes, advantage_B) | mode_metrics(episodes, end, nothink_P, tasks, stratum)
        model.train()
        metrics |= update(model, optimizer, batch, advantage_B, config, meter)
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


def play_step(
    model: Any, tokenizer: Any, make_env: Callable, tasks: list[dict], config: AdaptThinkConfig, end: int, seed: int, step: int
) -> tuple[list[Episode], Tensor]:
    """The episodes of a step, task-major, and P(</think>) behind each prompt, (P,)."""
    return play_modes(
        model,
        tokenizer,
        make_env,
        tasks,
        config.modes,
        end=end,
        generator=generator(seed, "rollout", step),
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        batch_size=config.sample_batch,
    )


def advantages(episodes: list[Episode], end: int, reference: Callable[[dict], float], delta: float) -> Tensor:
    """A = delta * 1[NoThinking] + score - reference, (B,); see the module."""
    return torch.tensor([delta * skips(e, end) + float(e.success) - reference(e.task) for e in episodes])


def mode_metrics(
    episodes: list[Episode], end: int, nothink_P: Tensor, tasks: list[dict], stratum: Callable[[dict], str] | None
) -> dict[str, float]:
    """Probability of NoThinking, exact and not sampled, and success and length of the answers in each mode."""
    metrics = {"mode/nothink_p": float(nothink_P.mean())}
    by_name: dict[str, list[float]] = defaultdict(list)
    for task, probability in zip(tasks, nothink_P.tolist(), strict=True):
        if stratum is not None:
            by_name[stratum(task)].append(probability)
    metrics |= {f"mode/nothink_p/{name}": sum(found) / len(found) for name, found in by_name.items()}
    for mode, wanted in (("nothink", True), ("think", False)):
        some = [episode for episode in episodes if skips(episode, end) == wanted]
        if some:
            metrics[f"success/{mode}"] = sum(episode.success for episode in some) / len(some)
            metrics[f"len/{mode}_mean"] = sum(sum(episode.mask) for episode in some) / len(some)
    return metrics


def update(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    advantage_B: Tensor,
    config: AdaptThinkConfig,
    meter: Meter,
) -> dict[str, float]:
    """One optimizer step on all answers; those with advantage 0 are not forwarded, but count in the weights."""
    advantage_B = advantage_B.to(batch.ids_BT.device)
    weight_B = losses.sequence_weights(batch.mask_BT.sum(1), config.loss_agg, constant=config.max_new_tokens)
    rows = (advantage_B != 0).nonzero()[:, 0]
    if len(rows) == 0:
        return {}
    sums: dict[str, float] = defaultdict(float)
    optimizer.zero_grad(set_to_none=True)
    for part in micro_batches(batch, rows):
        some = select(batch, part)
        length_B = some.mask_BT.sum(1)
        out = score_tokens(model, some, config.temperature)
        advantage_N, weight_N = (x_B[part].repeat_interleave(length_B) for x_B in (advantage_B, weight_B))
        loss_N, ratio_N = mode_surrogate(out.logp_N, some.logp_BT[some.mask_BT.bool()], advantage_N, length_B, config)
        loss = losses.weighted_sum(loss_N, weight_N)
        loss.backward()
        add_sums(sums, loss, out, ratio_N, advantage_N, config)
    meter.add_train(tokens_to_forward(batch, rows))
    sums["grad_norm"] += float(torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], config.grad_clip))
    optimizer.step()
    return averages(sums, 1)


def mode_surrogate(
    logp_N: Tensor, sampler_N: Tensor, advantage_N: Tensor, length_B: Tensor, config: AdaptThinkConfig
) -> tuple[Tensor, Tensor]:
    """Loss per token and ratio (detached) by `config.ratio`.

    logp_N: of the policy, answers packed one behind the other, length_B tokens each. sampler_N: behaviour log-probabilities,
    of which only the first of each answer is read: with one update per batch, the old policy is the policy.
    """
    first_N = torch.zeros_like(logp_N, dtype=torch.bool)
    first_N[length_B.cumsum(0) - length_B] = True
    old_N = logp_N.detach()
    if config.ratio != "none" and config.forced:
        old_N = torch.where(first_N, sampler_N, old_N)
    if config.ratio == "sequence":
        return losses.gspo(logp_N, old_N, advantage_N, length_B, config.clip_low, config.clip_high)
    low, high = (1.0, math.inf) if config.ratio == "unclipped" else (config.clip_low, config.clip_high)
    return losses.ppo_clip(logp_N, old_N, advantage_N, low, high)


def add_sums(
    sums: dict[str, float], loss: Tensor, out: TokenOutputs, ratio_N: Tensor, advantage_N: Tensor, config: AdaptThinkConfig
) -> None:
    """Adds a micro-batch to the metric sums."""
    low_N, high_N = losses.clip_fractions(ratio_N, advantage_N, config.clip_low, config.clip_high)
    sums["loss/policy"] += float(loss.detach())
    sums["entropy"] += float(out.entropy_N.detach().sum())
    sums["ratio/clip_low_frac"] += float(low_N.sum())
    sums["ratio/clip_high_frac"] += float(high_N.sum())
    sums["tokens"] += len(ratio_N)
