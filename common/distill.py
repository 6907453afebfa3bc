"""On-policy distillation: the student writes, a teacher judges each of its tokens, and the student moves towards it.

Two uses of one loop: a stronger teacher (on-policy distillation), or the same weights that see more than the student
does, such as the reference solution (on-policy self-distillation). Losses: common/target_losses.py.
Shape suffixes: _B episodes, _T tokens, _N packed policy tokens, _V vocabulary.

Departures from the papers:
- On-policy distillation (Lu & Thinking Machines Lab 2025): one update per batch of samples, so that the importance ratio
  is 1 by definition; the student's log-probabilities are computed anew, not taken from the sampler; no task reward.
- GKD (Agarwal et al. 2024): on-policy samples alone (its lambda is 1), and no reward is mixed in.
- Self-distillation (Zhao et al. 2026, On-policy self-distillation): whole distributions as there; no clip per word.
- Both distributions are those at the sampling temperature, and the loss is not rescaled by it.
- The teacher never uses dropout.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import losses
from common.advantages import rewards_tensor
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
    sample_step,
    save,
    set_learning_rate,
    speed_metrics,
    to_batch,
    trainable,
)
from common.models import parameter_count
from common.policy import (
    MICRO_TOKENS,
    check_head,
    make_reference,
    micro_batches,
    network,
    reference_mode,
    select,
    token_distributions,
    tokens_to_forward,
)
from common.runlog import RunLog
from common.schema import ConfigError, one_of, within
from common.target_losses import OBJECTIVES, distillation_loss, kl_divergence
from common.tokenizers import encode_prompt

# What the teacher reads in place of the student's prompt: a user turn's text, or token ids.
Privileged = Callable[[dict], str | list[int]]


@dataclass(frozen=True)
class DistillConfig:
    """``objective``: sampled (log-ratio of the token written), reverse_kl, forward_kl, jsd (with ``beta``) on whole
    distributions. ``self_teacher``: when the teacher is the student itself, its weights at the start or the present ones.
    ``environment_tokens``: masked, or learned as if the student had written them (all that follows the prompt).

    ``micro_tokens``: padded tokens per forward; each needs two rows of the vocabulary's size in memory.
    """

    objective: str = "reverse_kl"
    beta: float = 0.5
    self_teacher: str = "fixed"
    environment_tokens: str = "masked"
    prompts_per_step: int = 64
    group_size: int = 4
    lr: float = 3e-4
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    warmup_steps: int = 0
    lr_decay: str = "none"
    loss_agg: str = "token_mean"
    temperature: float = 1.0
    max_new_tokens: int = 64
    max_turns: int = 1
    micro_tokens: int = MICRO_TOKENS

    def __post_init__(self) -> None:
        one_of("distill.objective", self.objective, OBJECTIVES)
        one_of("distill.self_teacher", self.self_teacher, ("fixed", "moving"))
        one_of("distill.environment_tokens", self.environment_tokens, ("masked", "learned"))
        one_of("distill.lr_decay", self.lr_decay, ("none", "linear", "cosine"))
        one_of("distill.loss_agg", self.loss_agg, losses.AGGREGATIONS)
        for key in ("prompts_per_step", "group_size", "max_new_tokens", "max_turns", "micro_tokens"):
            within(f"distill.{key}", getattr(self, key), 1)
        for key in ("lr", "grad_clip", "temperature"):
            within(f"distill.{key}", getattr(self, key), 0, above=True)
        for key in ("weight_decay", "warmup_steps"):
            within(f"distill.{key}", getattr(self, key), 0)
        if self.objective == "jsd" and not 0 < self.beta < 1:
            raise ConfigError(
                f"distill.beta={self.beta}: must be above 0 and below 1; the limits are objective=forward_kl and reverse_kl."
            )
        if self.objective == "sampled" and self.learns_all:
            raise ConfigError(
                "distill.environment_tokens=learned: the environment's tokens are no samples of the student, and "
                "distill.objective=sampled needs such; use an objective on whole distributions."
            )

    @property
    def learns_all(self) -> bool:
        """Whether the environment's tokens are learnt too."""
        return self.environment_tokens == "learned"

    @property
    def algo(self) -> AlgoConfig:
        """The part that sampling and the optimizer read, in the form that the other loops use."""
        shared = {item.name for item in dataclasses.fields(AlgoConfig)} & {item.name for item in dataclasses.fields(self)}
        own = {name: getattr(self, name) for name in shared}
        return AlgoConfig(name="reinforce", advantage="reward", drop_zero_variance=False, **own)


def train_distill(
    model: Any,
    teacher: Any | None,
    tokenizer: Any,
    make_env: Callable,
    task_at: TaskAt,
    config: DistillConfig,
    *,
    seed: int,
    budget: Budget,
    log: RunLog,
    folder: Path,
    privileged: Privileged | None = None,
    learn_from: Callable[[Episode], Sequence[int]] | None = None,
    evaluate: Callable[[int, int], None] | None = None,
    evaluate_every_flops: float | None = None,
    checkpoint_every: int = 10,
) -> Meter:
    """Trains `model` in place until the budget is used, from folder/state.pt on if there is one. Returns the meter.

    Args:
        teacher: frozen model with the same tokenizer; None: the student itself (a PEFT student's fixed self is its base).
        task_at: (step, n) -> the n tasks of a step.
        privileged: task -> what the teacher reads in place of the student's prompt; the tokens behind it are the same.
        learn_from: episode -> 1 on tokens to learn from, one entry per token of the episode (prompt included); only the
            student's own tokens ever count, unless environment_tokens=learned. None: all of them.
        evaluate: called with the step and the FLOPs used whenever another `evaluate_every_flops` are used.

    Raises ConfigError where student and teacher cannot differ, ValueError for another vocabulary or too long a row.
    """
    check_head(model)
    moving = teacher is None and config.self_teacher == "moving"
    teacher = choose_teacher(model, teacher, privileged, moving)
    optimizer = make_optimizer(list(trainable(model).values()), [], config.algo)
    meter = Meter(parameter_count(model))
    step, evaluations = resume(folder / "state.pt", {"policy": model}, optimizer, meter, log)
    while not meter.exhausted(budget, step):
        start = time.perf_counter()
        set_learning_rate(optimizer, config.algo, step, meter.used(budget, step))
        model.eval()
        tasks = task_at(step, config.prompts_per_step)
        episodes = sample_step(model, tokenizer, make_env, tasks, config.algo, seed, step)
        meter.add_forward(sum(episode.tokens_forward for episode in episodes))
        sampled = time.perf_counter()
        metrics = episode_metrics(episodes, rewards_tensor([e.reward for e in episodes], len(episodes)))
        played = to_batch(episodes, tokenizer, model)
        batch, seen = make_batches(episodes, played, tokenizer, model, teacher, privileged, learn_from, config.learns_all)
        model.train()
        metrics |= update(model, teacher, moving, optimizer, batch, seen, config, meter)
        model.eval()
        step += 1
        metrics |= {"progress/step": step, **speed_metrics(start, sampled, played)}
        log.metrics(step, metrics, progress=meter.used(budget, step))
        if evaluate is not None and evaluations_due(meter, evaluate_every_flops) > evaluations:
            evaluations = evaluations_due(meter, evaluate_every_flops)
            evaluate(step, meter.flops)
        if step % checkpoint_every == 0 or meter.exhausted(budget, step):
            save(folder / "state.pt", {"policy": model}, optimizer, meter, step, evaluations)
            log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)
    return meter


def choose_teacher(model: Any, teacher: Any | None, privileged: Privileged | None, moving: bool) -> Any:
    """The model that judges: the given one, or the student itself, moving or as it is now (adapter off, or a copy)."""
    if teacher is model:
        raise ConfigError("distill: the teacher is the student; pass teacher=None and say by self_teacher which weights judge.")
    if teacher is not None:
        check_head(teacher)
        own, other = (len(network(m).get_output_embeddings().weight) for m in (model, teacher))
        if own != other:
            raise ValueError(f"the teacher's vocabulary has {other} entries, the student's {own}; they must share a tokenizer")
        return teacher
    if privileged is None:
        raise ConfigError("distill: without a teacher, privileged must tell what the student's own weights see beyond it.")
    return model if moving else make_reference(model, None, needed=True)


def make_batches(
    episodes: list[Episode],
    played: Batch,
    tokenizer: Any,
    model: Any,
    teacher: Any,
    privileged: Privileged | None,
    learn_from: Callable[[Episode], Sequence[int]] | None,
    whole: bool = False,
) -> tuple[Batch, Batch]:
    """The rows as the student wrote them (`played`) and as the teacher reads them, the mask on the tokens to learn from.

    Both masks hold the same tokens in the same order. ``whole``: tokens of the environment behind the prompt count too.
    """
    batch = played
    if learn_from is not None or whole:
        episodes = [dataclasses.replace(episode, mask=learned_mask(episode, learn_from, whole)) for episode in episodes]
        batch = to_batch(episodes, tokenizer, model)
    if privileged is None:
        return batch, batch
    seen = [behind_prompt(episode, prompt_ids(privileged(episode.task), tokenizer)) for episode in episodes]
    context = getattr(network(teacher).config, "max_position_embeddings", None) or 2**31
    longest = max(len(episode.ids) for episode in seen)
    if longest > context:
        raise ValueError(f"with its privileged prompt a row has {longest} tokens, the teacher's context {context}; shorten it")
    return batch, to_batch(seen, tokenizer, model)


def learned_mask(episode: Episode, learn_from: Callable[[Episode], Sequence[int]] | None, whole: bool) -> list[int]:
    """1 on the tokens of an episode to learn from: its own, or all behind its prompt, as far as `learn_from` wants them."""
    own = [int(place >= episode.prompt_length) for place in range(len(episode.ids))] if whole else episode.mask
    wanted = own if learn_from is None else learn_from(episode)
    return [mine & int(bool(asked)) for mine, asked in zip(own, wanted, strict=True)]


def prompt_ids(prompt: str | list[int], tokenizer: Any) -> list[int]:
    """A text becomes a first user turn exactly as the student's prompts do."""
    return encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else prompt


def behind_prompt(episode: Episode, prompt: list[int]) -> Episode:
    """The episode with another prompt in front of what followed its own."""
    seen = dataclasses.replace(episode, ids=[], mask=[], logps=[], turns=[], prompt_length=len(prompt))
    seen.append(prompt, None, -1)
    for name in ("ids", "mask", "logps", "turns"):
        getattr(seen, name).extend(getattr(episode, name)[episode.prompt_length :])
    return seen


def update(
    model: Any,
    teacher: Any,
    moving: bool,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    seen: Batch,
    config: DistillConfig,
    meter: Meter,
) -> dict[str, float]:
    """One optimizer step on all rows that hold a token to learn from. Returns loss/, kl/, entropy and grad_norm."""
    rows = batch.mask_BT.any(1).nonzero()[:, 0]
    if len(rows) == 0:
        return {}
    constant = config.max_new_tokens * config.max_turns
    weight_B = losses.sequence_weights(batch.mask_BT.sum(1), config.loss_agg, constant=constant)
    sums: dict[str, float] = defaultdict(float)
    optimizer.zero_grad(set_to_none=True)
    for part in micro_batches(batch, rows, config.micro_tokens):
        own = select(batch, part)
        teacher_NV = teacher_distributions(model, teacher, moving, select(seen, part), config.temperature)
        weight_N = weight_B[part].repeat_interleave(own.mask_BT.sum(1))
        accumulate(model, own, teacher_NV, weight_N, config, sums)
    meter.add_forward(tokens_to_forward(seen, rows), parameter_count(teacher))
    meter.add_train(tokens_to_forward(batch, rows))
    sums["grad_norm"] += float(torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], config.grad_clip))
    optimizer.step()
    return averages(sums, 1)


@torch.no_grad()
def teacher_distributions(model: Any, teacher: Any, moving: bool, seen: Batch, temperature: float) -> Tensor:
    """The teacher's log-probabilities (N, V) at every token of the mask; its mode is left as it was."""
    was_training = teacher.training
    teacher.eval()
    with reference_mode(None if moving else model, teacher):
        logp_NV, _ = token_distributions(teacher, seen.ids_BT, seen.mask_BT, temperature)
    teacher.train(was_training)
    return logp_NV


def accumulate(
    model: Any, batch: Batch, teacher_NV: Tensor, weight_N: Tensor, config: DistillConfig, sums: dict[str, float]
) -> None:
    """Adds the gradient of one micro-batch, and its sums for the metrics."""
    mask_BT = batch.mask_BT.bool()
    ids_N = batch.ids_BT[mask_BT]
    logp_NV, _ = token_distributions(model, batch.ids_BT, mask_BT, config.temperature)
    loss_N = distillation_loss(config.objective, logp_NV, teacher_NV, ids_N, config.beta)
    loss = losses.weighted_sum(loss_N, weight_N)
    loss.backward()
    with torch.no_grad():
        logp_N = logp_NV.gather(1, ids_N[:, None])[:, 0]
        sums["loss/policy"] += float(loss)
        sums["kl/teacher"] += float(kl_divergence(logp_NV, teacher_NV).sum())
        written_N = batch.turn_BT[mask_BT] >= 0  # nobody sampled the environment's tokens
        sums["kl/old"] += float(losses.kl(batch.logp_BT[mask_BT], logp_N, "k3")[written_N].sum())
        sums["entropy"] += float(losses.entropy_from_logprobs(logp_NV).sum())
        sums["tokens"] += len(loss_N)
