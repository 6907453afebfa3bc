"""A reward model learned from pairs, and RLHF with it: the policy-gradient loops with a learned reward for the true one.

The model is Hugging Face's sequence classifier with one output: the policy's decoder under a scalar head. The loop is
ours, because transformers (and so TRL's RewardTrainer) reads the score at the last token whose id is not the pad id:
where pad and end token are one id, as in many chat models, that is not the row's last token. Here lengths decide.

RLHF: give `LearnedReward(make_env, ...)` to `train_grpo` or `train_ppo` in make_env's place, with kl_in=reward. The
metrics reward/proxy and reward/true then show over-optimisation: the proxy keeps rising while the true reward rises and
falls (Gao et al. 2022, arXiv 2210.10760).

Shape suffixes: _P pairs, _B rows, _T tokens, _D hidden width.

Departures from the papers:
- Ouyang et al. 2022: every pair counts the same, where the paper averages over the pairs of each prompt first; the
  pairs are the verifier's; the score's zero is not moved (the loss does not fix it, and the group and batch advantages
  do not see it).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from common.compute import Budget, Meter
from common.config import ConfigError
from common.episodes import Episode, MakeEnv
from common.loop import resume, save
from common.models import parameter_count
from common.pairs import Pair, Row, answer_row
from common.runlog import RunLog
from common.seeding import rng
from common.sft import SftConfig, make_optimizers, pad_rows, rate_factor
from common.trl_adapter import frozen_copy

SCORE_ROWS = 256


def bradley_terry_loss(better_P: Tensor, worse_P: Tensor) -> Tensor:
    """-log sigmoid(better - worse) per pair: minus the log-probability that the better one wins.

    Ouyang et al. 2022 (arXiv 2203.02155), eq. 1; Bradley and Terry 1952. Only differences of scores matter.
    """
    return -nn.functional.logsigmoid(better_P - worse_P)


def build_reward_model(policy: Any) -> Any:
    """A sequence classifier with one output that starts as the policy's decoder under a head of zeros: every score is 0.

    An adapter is merged first. The result is a plain Hugging Face model; save it with `common.checkpoints.save_model`.
    """
    start = frozen_copy(policy)
    config = copy.deepcopy(start.config)
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config, dtype=start.dtype)
    model.base_model.load_state_dict(start.base_model.state_dict())
    nn.init.zeros_(model.score.weight)
    return model.to(start.device).eval()


def score_rows(model: Any, ids_BT: Tensor, attention_BT: Tensor) -> Tensor:
    """Score (B,) of right-padded rows, float32: the head on the hidden state of each row's last real token."""
    hidden_BTD = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    end_B = attention_BT.sum(1) - 1
    return model.score(hidden_BTD[torch.arange(len(end_B), device=end_B.device), end_B]).float()[:, 0]


@torch.no_grad()
def score_answers(model: Any, rows: Sequence[Row], pad_id: int) -> Tensor:
    """Scores (B,) of rows in their order, on the CPU; see `common.pairs.answer_row` for a row of an episode."""
    scores_B = torch.zeros(len(rows))
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    for start in range(0, len(order), SCORE_ROWS):
        part = order[start : start + SCORE_ROWS]
        ids_BT, attention_BT, _ = (x.to(model.device) for x in pad_rows([rows[i] for i in part], pad_id))
        scores_B[part] = score_rows(model, ids_BT, attention_BT).cpu()
    return scores_B


def pair_accuracy(model: Any, pairs: Sequence[Pair], pad_id: int) -> float:
    """Share of pairs whose chosen answer scores higher; an equal score is wrong."""
    better_P = score_answers(model, [pair.chosen for pair in pairs], pad_id)
    worse_P = score_answers(model, [pair.rejected for pair in pairs], pad_id)
    return float((better_P > worse_P).double().mean())


def train_reward_model(
    model: Any,
    pairs: Sequence[Pair],
    config: SftConfig,
    *,
    pad_id: int,
    seed: int,
    budget: Budget,
    log: RunLog,
    folder: Path,
    checkpoint_every: int = 50,
) -> Meter:
    """Minimises the mean Bradley-Terry loss, batch_size pairs a step, from folder/state.pt on if there is one.

    Batches are a function of (seed, step) alone. Raises ConfigError for keys the loop does not know and for too few pairs.
    """
    if config.optimizer != "adamw" or config.micro_batch is not None:
        raise ConfigError(f"optimizer={config.optimizer}, micro_batch={config.micro_batch}: allowed are adamw and null")
    if len(pairs) < config.batch_size:
        raise ConfigError(f"batch_size={config.batch_size}: there are {len(pairs)} pairs; allowed is up to that many")
    (optimizer,) = make_optimizers(model, config)
    meter = Meter(parameter_count(model))
    step, _ = resume(folder / "state.pt", {"reward model": model}, optimizer, meter, log)
    model.train()
    while not meter.exhausted(budget, step):
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * rate_factor(config, step, meter.used(budget, step))
        batch = [pairs[i] for i in rng(seed, "reward model", step).choice(len(pairs), config.batch_size, replace=False)]
        rows = [pair.chosen for pair in batch] + [pair.rejected for pair in batch]
        ids_BT, attention_BT, _ = (x.to(model.device) for x in pad_rows(rows, pad_id))
        better_P, worse_P = score_rows(model, ids_BT, attention_BT).chunk(2)
        loss = bradley_terry_loss(better_P, worse_P).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        step += 1
        meter.add_train(int(attention_BT.sum()))
        metrics = {
            "loss/reward": float(loss.detach()),
            "preference/margin": float((better_P - worse_P).detach().mean()),
            "preference/accuracy": float((better_P > worse_P).float().mean()),
            "grad_norm": float(norm),
            "time/update": time.perf_counter() - started,
            "progress/step": step,
        }
        log.metrics(step, metrics, progress=meter.used(budget, step))
        if step % checkpoint_every == 0 or meter.exhausted(budget, step):
            save(folder / "state.pt", {"reward model": model}, optimizer, meter, step, 0)
            log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)
    model.eval()
    return meter


@dataclass
class LearnedReward:
    """Stands in make_env's place in a policy-gradient loop, whose episodes then earn the model's score (RLHF).

    The environment still judges: its reward is kept in the last info's parts as "true", beside "proxy", the score;
    score/mean of the loop is the score's mean. `policy_parameters` prices the model's pass: its tokens are charged to the
    episode's tokens_forward in tokens of the policy.
    """

    make_env: MakeEnv
    model: Any
    pad_id: int
    policy_parameters: int

    def __call__(self) -> gymnasium.Env:
        return self.make_env()

    def rescore(self, episodes: Sequence[Episode]) -> None:
        """Replaces the rewards of sampled episodes, in place; the score falls due with the last answer."""
        rows = [answer_row(episode) for episode in episodes]
        price = parameter_count(self.model) / self.policy_parameters
        for episode, (ids, _), score in zip(episodes, rows, score_answers(self.model, rows, self.pad_id).tolist()):
            parts = episode.infos[-1].get("parts") or {}
            episode.infos[-1]["parts"] = parts | {"proxy": score, "true": episode.reward}
            episode.reward = score
            episode.turn_rewards = [0.0] * (len(episode.turn_rewards) - 1) + [score]
            episode.tokens_forward += math.ceil(len(ids) * price)
