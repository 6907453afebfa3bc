"""Evaluation of a policy on a list of tasks: every task, several samples of each, nothing dropped or counted twice."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from common.episodes import Episode, MakeEnv, collate, run_episodes, token_logprobs


@dataclass
class Evaluation:
    """``items``: per metric one mean over samples for each task, in the tasks' order; ``episodes``: task-major."""

    items: dict[str, list[float]]
    episodes: list[Episode]
    samples: int

    def mean(self, metric: str) -> float:
        """Mean over tasks of the per-task means; n is the number of tasks."""
        return sum(self.items[metric]) / len(self.items[metric])


def evaluate_tasks(
    model: Any,
    tokenizer: Any,
    make_env: MakeEnv,
    tasks: list[dict],
    *,
    samples: int = 1,
    max_turns: int = 1,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    batch_size: int = 1024,
) -> Evaluation:
    """Plays ``samples`` episodes of every task; per-task means of success, first_success, reward and truncated.

    ``success``: the environment's verdict at the end of the episode; ``first_success``: after the first answer. A last
    batch that is short is played all the same; greedy results do not depend on ``batch_size``. Raises ValueError when
    there is no task or an episode is left unscored.
    """
    if not tasks:
        raise ValueError("evaluate_tasks() got no tasks")
    episodes = run_episodes(
        model,
        tokenizer,
        make_env,
        tasks,
        group_size=samples,
        max_turns=max_turns,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        generator=generator,
        batch_size=batch_size,
    )
    unscored = [index for index, episode in enumerate(episodes) if math.isnan(episode.reward)]
    if unscored:
        first = episodes[unscored[0]].task
        raise ValueError(f"{len(unscored)} of {len(episodes)} episodes have no reward, the first one on task {first}")
    items: dict[str, list[float]] = {"success": [], "first_success": [], "reward": [], "truncated": []}
    for start in range(0, len(episodes), samples):
        group = episodes[start : start + samples]
        items["success"].append(sum(episode.success for episode in group) / samples)
        items["first_success"].append(sum(bool(episode.infos[0]["success"]) for episode in group) / samples)
        items["reward"].append(sum(episode.reward for episode in group) / samples)
        items["truncated"].append(sum(episode.truncated for episode in group) / samples)
    return Evaluation(items, episodes, samples)


@torch.no_grad()
def kl_on_samples(reference: Any, episodes: list[Episode], pad_id: int, temperature: float = 1.0) -> float:
    """Monte-Carlo KL(policy, reference) in nats per episode, on episodes that the policy sampled at ``temperature``."""
    total = 0.0
    for part in range(0, len(episodes), 256):
        batch = collate(episodes[part : part + 256], pad_id)
        ids_BT, attention_BT, mask_BT = (t.to(reference.device) for t in (batch.ids_BT, batch.attention_BT, batch.mask_BT))
        images = None if batch.images is None else batch.images.to(reference.device)
        logp_BT, _ = token_logprobs(reference, ids_BT, attention_BT, temperature, mask_BT=mask_BT, images=images)
        total += float((batch.logp_BT - logp_BT.cpu()).sum())
    return total / len(episodes)


def rollout_row(episode: Episode, tokenizer: Any) -> dict[str, Any]:
    """An episode to read: prompt, text segments with the policy's mask, reward parts and the verifier's reason.

    ``surprise`` is high where the outcome goes against the policy's mean log-probability of its own tokens.
    """
    segments: list[dict] = []
    for position, (token, mask) in enumerate(zip(episode.ids, episode.mask, strict=True)):
        if position and segments[-1]["mask"] == mask:
            segments[-1]["ids"].append(token)
        else:
            segments.append({"mask": mask, "ids": [token]})
    logps = [logp for logp, mask in zip(episode.logps, episode.mask, strict=True) if mask]
    confidence = sum(logps) / max(1, len(logps))
    last = episode.infos[-1]
    return {
        "prompt": tokenizer.decode(segments[0]["ids"]),
        "segments": [{"text": tokenizer.decode(s["ids"]), "mask": s["mask"]} for s in segments[1:]],
        "reward": episode.reward,
        "parts": last.get("parts") or {},
        "reason": last["reason"],
        "success": episode.success,
        "surprise": -confidence if episode.success else confidence,
    }
