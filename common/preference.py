"""Learning from preferences: DPO and KTO through TRL, step-level DPO, online DPO.

DPO and KTO on fixed data are TRL's trainers; `train_dpo` and `train_kto` only bring them our token ids, masks, order of
batches, learning rate, budget, metrics and resumable state. Step-level DPO is DPO on `common.pairs.step_pairs`. TRL's
online trainer reads and judges text, so online DPO is a loop of ours. beta is `algo.kl_coef` throughout: the weight of
the KL in the objective that DPO solves (Rafailov et al. 2023, eq. 3).

Shape suffixes: _P pairs, _B rows, _T tokens, _N packed policy tokens.

Departures from the papers:
- DPO (Rafailov et al. 2023), KTO (Ethayarajh et al. 2024): the preferences are the verifier's, not a person's. Tokens of
  the environment inside an answer are context: they are in no sum.
- KTO: the answer that stands in for an unrelated one is the nearest before it in the batch that has another prompt.
- Step-DPO (Lai et al. 2024): the pairs differ, see `common.pairs.step_pairs`.
- Online DPO (Guo et al. 2024): the verifier annotates, not a language model. With more than two answers to a prompt the
  best meets the worst, the second best the second worst, and so on. A prompt whose answers all earn the same is left out.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.algo import AlgoConfig
from common.compute import Budget, Meter
from common.episodes import Batch
from common.loop import (
    TaskAt,
    episode_metrics,
    evaluations_due,
    learnable,
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
from common.pairs import Answer, Pair, Row, pairs_from_episodes
from common.policy import MICRO_TOKENS, check_head, network, reference_logprobs, score_tokens, select, tokens_to_forward
from common.reward_model import bradley_terry_loss
from common.runlog import RunLog
from common.schema import ConfigError
from common.sft import pad_rows
from common.trl_adapter import TrlJob, frozen_copy, train_with_trl

# What has no place in a preference update, and the only value that says so.
UNUSED = {"epochs": 1, "minibatches": 1, "refill_rounds": 0, "overlong_buffer": 0, "entropy_coef": 0.0}
# What TRL's trainers call the three tensors of `common.sft.pad_rows`.
TRL_INPUTS = ("input_ids", "attention_mask", "completion_mask")


def dpo_loss(
    chosen_P: Tensor, rejected_P: Tensor, ref_chosen_P: Tensor, ref_rejected_P: Tensor, beta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """DPO loss per pair, and the implicit rewards of chosen and rejected (detached). Rafailov et al. 2023, eq. 7.

    -log sigmoid(r(chosen) - r(rejected)), the Bradley-Terry loss on r = beta * log(policy / reference). The arguments
    are log-probabilities summed over an answer's tokens, in nats.
    """
    chosen_reward_P = beta * (chosen_P - ref_chosen_P)
    rejected_reward_P = beta * (rejected_P - ref_rejected_P)
    return bradley_terry_loss(chosen_reward_P, rejected_reward_P), chosen_reward_P.detach(), rejected_reward_P.detach()


def check_keys(algo: AlgoConfig, **only: float) -> None:
    """ConfigError unless beta is positive, keys that play no part are off, and the keys in `only` have that value."""
    if algo.kl_coef <= 0:
        raise ConfigError(f"algo.kl_coef={algo.kl_coef}: it is the beta of preference methods and must be above 0.")
    for key, allowed in (UNUSED | only).items():
        if getattr(algo, key) != allowed:
            raise ConfigError(f"algo.{key}={getattr(algo, key)}: a preference update has no use for it; allowed is {allowed}.")


# Online DPO -----------------------------------------------------------------------------------------------------------


def train_online_dpo(
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
    """Sample answers, let the verifier compare them, take one DPO step on the pairs; until the budget is used.

    Guo et al. 2024 (arXiv 2402.04792), algorithm 1. Args as `common.grpo.train_grpo`; `reference` None: the start policy.
    Probabilities are those at the sampling temperature. Raises ConfigError for keys that a DPO step has no use for.
    """
    check_keys(algo)
    if algo.group_size < 2:
        raise ConfigError(f"algo.group_size={algo.group_size}: a pair takes two answers to a prompt; allowed is 2 and above.")
    check_head(model)
    reference = frozen_copy(model) if reference is None else reference
    optimizer = make_optimizer(list(trainable(model).values()), [], algo)
    meter = Meter(parameter_count(model))
    step, evaluations = resume(folder / "state.pt", {"policy": model}, optimizer, meter, log)
    while not meter.exhausted(budget, step):
        start = time.perf_counter()
        set_learning_rate(optimizer, algo, step, meter.used(budget, step))
        model.eval()
        tasks = task_at(step, algo.prompts_per_step)
        episodes = sample_step(model, tokenizer, make_env, tasks, algo, seed, step)
        meter.add_forward(sum(episode.tokens_forward for episode in episodes))
        sampled = time.perf_counter()
        kept = [episode for episode, keep in zip(episodes, learnable(episodes, algo).tolist()) if keep]
        pairs = pairs_from_episodes(kept, "best_worst", per_prompt=algo.group_size // 2)
        metrics = episode_metrics(episodes, torch.tensor([episode.reward for episode in episodes]))
        metrics["preference/pairs"] = len(pairs)
        if pairs:
            model.train()
            metrics |= dpo_step(model, reference, optimizer, pairs, tokenizer.pad_token_id, algo, meter)
            model.eval()
        step += 1
        metrics |= {"progress/step": step, **speed_metrics(start, sampled, to_batch(episodes, tokenizer, model))}
        log.metrics(step, metrics, progress=meter.used(budget, step))
        if evaluate is not None and evaluations_due(meter, evaluate_every_flops) > evaluations:
            evaluations = evaluations_due(meter, evaluate_every_flops)
            evaluate(step, meter.flops)
        if step % checkpoint_every == 0 or meter.exhausted(budget, step):
            save(folder / "state.pt", {"policy": model}, optimizer, meter, step, evaluations)
            log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)
    return meter


def pair_batch(pairs: Sequence[Pair], pad_id: int, device: Any) -> Batch:
    """Right-padded rows chosen, rejected, chosen, rejected, ...: pair p is in rows 2p and 2p + 1."""
    ids_BT, attention_BT, mask_BT = (x.to(device) for x in pad_rows([row for pair in pairs for row in pair], pad_id))
    unknown_BT = torch.zeros(ids_BT.shape, device=device)
    return Batch(ids_BT, attention_BT.bool(), mask_BT.bool(), unknown_BT, torch.full_like(ids_BT, -1))


def pair_pieces(batch: Batch, micro_tokens: int) -> Iterator[Tensor]:
    """Row numbers of whole pairs of similar length, longest first, at most `micro_tokens` padded tokens (or one pair)."""
    length_P = batch.attention_BT.sum(1).view(-1, 2).amax(1)
    order = torch.argsort(length_P, descending=True, stable=True)
    start = 0
    while start < len(order):
        piece = order[start : start + max(1, micro_tokens // (2 * int(length_P[order[start]])))]
        yield torch.stack([2 * piece, 2 * piece + 1], 1).flatten()
        start += len(piece)


def dpo_step(
    model: Any,
    reference: Any,
    optimizer: torch.optim.Optimizer,
    pairs: Sequence[Pair],
    pad_id: int,
    algo: AlgoConfig,
    meter: Meter,
    micro_tokens: int = MICRO_TOKENS,
) -> dict[str, float]:
    """One optimizer step on the mean DPO loss of the pairs; the metrics of that step."""
    batch = pair_batch(pairs, pad_id, network(model).device)
    ref_logp_B = reference_logprobs(model, reference, batch, algo.temperature).sum(1)
    meter.add_forward(int(batch.attention_BT.sum()))
    optimizer.zero_grad(set_to_none=True)
    sums: dict[str, float] = defaultdict(float)
    for rows in pair_pieces(batch, micro_tokens):
        part = select(batch, rows)
        logp_N = score_tokens(model, part, algo.temperature).logp_N
        logp_B = logp_N.new_zeros(part.ids_BT.shape).masked_scatter(part.mask_BT, logp_N).sum(1)
        ref_B = ref_logp_B[rows]
        loss_P, chosen_P, rejected_P = dpo_loss(logp_B[::2], logp_B[1::2], ref_B[::2], ref_B[1::2], algo.kl_coef)
        (loss_P.sum() / len(pairs)).backward()
        sums["loss/policy"] += float(loss_P.detach().sum())
        sums["preference/chosen"] += float(chosen_P.sum())
        sums["preference/rejected"] += float(rejected_P.sum())
        sums["preference/margin"] += float((chosen_P - rejected_P).sum())
        sums["preference/accuracy"] += float((chosen_P > rejected_P).sum())
    meter.add_train(tokens_to_forward(batch, torch.arange(len(batch.ids_BT), device=batch.ids_BT.device)))
    norm = torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], algo.grad_clip)
    optimizer.step()
    return {name: total / len(pairs) for name, total in sums.items()} | {"grad_norm": float(norm)}


# DPO and KTO through TRL ----------------------------------------------------------------------------------------------


def train_dpo(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[Pair],
    algo: AlgoConfig,
    *,
    seed: int,
    budget: Budget,
    log: RunLog,
    folder: Path,
    reference: Any | None = None,
    evaluate: Callable[[int, int], None] | None = None,
    evaluate_every_flops: float | None = None,
    checkpoint_every: int = 50,
) -> Meter:
    """DPO (see `dpo_loss`) on fixed pairs with TRL's DPOTrainer, prompts_per_step pairs at a time; returns the meter.

    Trains `model` in place until the budget is used, from folder/state.pt on if there is one. `reference` None: the start
    policy. Probabilities are those at temperature 1. Raises ConfigError for keys without use and for too few pairs.
    """

    def collate(batch: Sequence[Pair]) -> dict[str, Tensor]:
        rows = [pair.chosen for pair in batch] + [pair.rejected for pair in batch]
        return dict(zip(TRL_INPUTS, pad_rows(rows, tokenizer.pad_token_id)))

    def count(batch: Sequence[Pair], meter: Meter) -> None:
        tokens = sum(len(ids) for pair in batch for ids, _ in pair)
        meter.add_train(tokens)
        meter.add_forward(tokens)  # the reference

    check_keys(algo, temperature=1.0)
    schedule = (evaluate, evaluate_every_flops, checkpoint_every)
    settings = {"loss_type": ["sigmoid"]}
    job = TrlJob("DPO", pairs, collate, count, settings, algo, seed, budget, log, folder, *schedule)
    return train_with_trl(job, model, tokenizer, reference)


def train_kto(
    model: Any,
    tokenizer: Any,
    answers: Sequence[Answer],
    algo: AlgoConfig,
    *,
    seed: int,
    budget: Budget,
    log: RunLog,
    folder: Path,
    reference: Any | None = None,
    evaluate: Callable[[int, int], None] | None = None,
    evaluate_every_flops: float | None = None,
    checkpoint_every: int = 50,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Meter:
    """KTO on labelled answers with TRL's KTOTrainer, prompts_per_step answers at a time; else as `train_dpo`.

    Mean over answers of weight * (1 - sigmoid(r - z)) for a desirable one and of weight * (1 - sigmoid(z - r)) for
    another, with r = beta * log(policy / reference) of the answer and z = beta * max(0, mean of log(policy / reference)
    over answers put behind other prompts), without gradient. Ethayarajh et al. 2024 (arXiv 2402.01306), section 4.1.
    """

    def collate(batch: Sequence[Answer]) -> dict[str, Tensor]:
        rows = [answer.row for answer in batch]
        own, other = pad_rows(rows, tokenizer.pad_token_id), pad_rows(mismatched(rows), tokenizer.pad_token_id)
        labels = {"label": torch.tensor([answer.desirable for answer in batch])}
        return dict(zip(TRL_INPUTS, own)) | dict(zip((f"KL_{name}" for name in TRL_INPUTS), other)) | labels

    def count(batch: Sequence[Answer], meter: Meter) -> None:
        rows = [answer.row for answer in batch]
        tokens, others = (sum(len(ids) for ids, _ in some) for some in (rows, mismatched(rows)))
        meter.add_train(tokens)
        meter.add_forward(tokens + 2 * others)  # the reference on both, the policy on the mismatched answers

    check_keys(algo, temperature=1.0)
    schedule = (evaluate, evaluate_every_flops, checkpoint_every)
    settings = {"loss_type": "kto", "desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    job = TrlJob("KTO", answers, collate, count, settings, algo, seed, budget, log, folder, *schedule)
    return train_with_trl(job, model, tokenizer, reference)


def mismatched(rows: Sequence[Row]) -> list[Row]:
    """Each row's prompt with the answer of the nearest row before it (round the end) that has another prompt.

    Raises ValueError where there is none.
    """
    cuts = [mask.index(1) for _, mask in rows]
    prompts = [ids[:cut] for (ids, _), cut in zip(rows, cuts)]
    made = []
    for i, prompt in enumerate(prompts):
        other = next((i - back for back in range(1, len(rows)) if prompts[i - back] != prompt), None)
        if other is None:
            raise ValueError(f"KTO needs two prompts in a batch; all {len(rows)} answers have the same one. Mix or enlarge it.")
        ids, mask = rows[other]
        made.append((prompt + ids[cuts[other] :], [0] * len(prompt) + mask[cuts[other] :]))
    return made
