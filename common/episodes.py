"""Many-turn episodes between a policy and text environments, and the batches that training reads.

A row is built from token ids alone: the prompt's, then turn by turn the ids that were sampled and the ids of the
environment's reply. Nothing is decoded and encoded again, and every mask comes from lengths, never from comparing ids
with the pad or end token (the two may be equal).
"""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from common.fused import states_before
from common.rollout import Completion, Prefilled, sample
from common.tokenizers import encode_feedback, encode_prompt
from common.vision import Images, expand, image_tokens, stack

MakeEnv = Callable[[], gymnasium.Env]


@dataclass
class Episode:
    """One episode as tokens. The lists ``ids``, ``mask``, ``logps``, ``turns`` have one entry per token.

    ``mask``: 1 where the policy wrote the token. ``logps``: behaviour log-probability at the sampling temperature, 0.0
    on other tokens. ``turns``: index of the policy's turn, -1 on other tokens. ``reward``: sum of ``turn_rewards``, the
    environment's reward per step (NaN: unscored). ``terminated``: the environment itself ended the task.
    ``truncated``: ended by a token or turn limit (an answer cut by the token limit may be both). ``texts``: the
    policy's answers, one per turn, special tokens left out. ``infos``: the environment's info per step.
    ``tokens_forward``: tokens the sampler had to process for the episode; the prompt of a group counts once, for the
    group's first member, and an answer twice where another turn follows it: written, then read with the reply.
    ``image``: what the prompt shows (height, width, 3), uint8; None in a text task. ``images_forward``: images that the
    sampler had to encode for the episode: 1 for the first member of a group that shows one, and 1 for each further turn.
    """

    ids: list[int]
    mask: list[int]
    logps: list[float]
    turns: list[int]
    prompt_length: int
    task: dict
    group: int
    reward: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    success: bool = False
    truncated: bool = False
    terminated: bool = False
    infos: list[dict] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tokens_forward: int = 0
    image: np.ndarray | None = None
    images_forward: int = 0

    def append(self, ids: Sequence[int], logps: Sequence[float] | None, turn: int) -> None:
        """Adds tokens of the policy (with ``logps``) or of the environment (``logps`` None)."""
        own = logps is not None
        self.ids += ids
        self.mask += [int(own)] * len(ids)
        self.logps += logps if logps is not None else [0.0] * len(ids)
        self.turns += [turn if own else -1] * len(ids)


def run_episodes(
    model: Any,
    tokenizer: Any,
    make_env: MakeEnv,
    tasks: list[dict],
    *,
    group_size: int = 1,
    max_turns: int = 1,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
    batch_size: int = 1024,
    openings: Sequence[Sequence[int]] | None = None,
) -> list[Episode]:
    """Plays ``group_size`` episodes of each task; returns len(tasks) * group_size episodes, task-major.

    Each task goes to ``env.reset(seed=task.get("seed"), options=task)``; every episode has its own environment. An
    observation is a text, or a dict with ``text`` and ``image`` (one image per episode, shown by its first prompt). A turn
    samples up to ``max_new_tokens`` tokens. The episode ends when the environment terminates or truncates it, after
    ``max_turns`` turns, or when the row would outgrow the model's context; an end by limit sets ``truncated``. A turn
    cut off by ``max_new_tokens`` is still given to the environment, and leaves ``truncated`` set if it was the last.
    Where ``make_env`` has a ``step_all(envs, texts)``, it steps all environments of a turn together (slow tools side by side).
    ``batch_size``: most episodes in flight together. ``openings``: for each episode, tokens of one length (below
    ``max_new_tokens``) that its first answer begins with; they count as the policy's, with log-probability 0.0. Raises
    ValueError when the environment returns a reward that is not one number, or an info without "success" and "reason".
    """
    if min(group_size, max_turns, batch_size) < 1:
        raise ValueError(f"group_size={group_size}, max_turns={max_turns}, batch_size={batch_size} must be at least 1")
    if openings is not None and (len(openings) != len(tasks) * group_size or len(set(map(len, openings))) > 1):
        raise ValueError(f"openings={len(openings)}: needs one for each of {len(tasks) * group_size} episodes, of one length")
    settings = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "generator": generator,
    }
    jobs = [(index, member) for index in range(len(tasks)) for member in range(group_size)]
    episodes: list[Episode] = []
    for start in range(0, len(jobs), batch_size):
        chunk = jobs[start : start + batch_size]
        begun = openings and openings[start : start + batch_size]
        episodes += _play(model, tokenizer, make_env, tasks, chunk, max_turns, settings, begun)
    return episodes


def _play(model, tokenizer, make_env, tasks, jobs, max_turns: int, settings: dict[str, Any], openings=None) -> list[Episode]:
    episodes, envs = [], []
    # The members of a group read the same text; encoding it is dear beside a tiny model's forward.
    encode_start, encode_reply = _remembered(encode_prompt, tokenizer), _remembered(encode_feedback, tokenizer)
    for index, member in jobs:
        env = make_env()
        observation, _ = env.reset(seed=tasks[index].get("seed"), options=dict(tasks[index]))
        text, image = see(observation)
        prompt = encode_start(text)
        if image is not None:
            prompt = expand(prompt, model.config.image_token_id, image_tokens(model))
        episode = Episode([], [], [], [], prompt_length=len(prompt), task=tasks[index], group=index, image=image)
        episode.images_forward = int(image is not None and member == 0)
        episode.append(prompt, None, -1)
        episode.tokens_forward = len(prompt) if member == 0 else 0
        envs.append(env)
        episodes.append(episode)
    step_all = getattr(make_env, "step_all", _step_each)
    text_config = getattr(model.config, "text_config", model.config)
    context = getattr(text_config, "max_position_embeddings", None) or 2**31
    active, prefilled, read = list(range(len(jobs))), Prefilled(), [0] * len(jobs)
    for turn in range(max_turns):
        active = _drop_too_long(episodes, active, context, settings["max_new_tokens"])
        if not active:
            break
        prompts = [episodes[row].ids for row in active]
        settings = {**settings, "images": shown([episodes[row] for row in active])}
        if turn == 0 and openings:  # no row was dropped: a first prompt that is too long is an error
            completions = _sample_behind(model, prompts, openings, tokenizer.eos_token_id, settings, prefilled)
        else:
            completions = sample(model, prompts, stop_ids=[tokenizer.eos_token_id], prefilled=prefilled, **settings)
        texts = [tokenizer.decode(completion.ids, skip_special_tokens=True) for completion in completions]
        replies = step_all([envs[row] for row in active], texts)
        going = []
        for row, completion, text, reply in zip(active, completions, texts, replies, strict=True):
            if turn > 0:
                again = episodes[row].image is not None  # a row with an image is computed anew from its beginning
                episodes[row].tokens_forward += len(episodes[row].ids) - (0 if again else read[row])
                episodes[row].images_forward += again
            read[row] = len(episodes[row].ids)
            observation = _take(episodes[row], envs[row], completion, text, reply, turn, last=turn + 1 == max_turns)
            if observation is not None:
                episodes[row].append(encode_reply(see(observation)[0], completion.finished), None, -1)
                going.append(row)
        active = going
    for env in envs:
        env.close()
    return episodes


def see(observation: Any) -> tuple[str, np.ndarray | None]:
    """Text and image of an observation. The image is copied: an environment may paint over its own buffer."""
    if isinstance(observation, str):
        return observation, None
    return observation["text"], np.array(observation["image"])


def shown(episodes: Sequence[Episode]) -> list[np.ndarray] | None:
    """The image of each episode, or None in a text task; ValueError where only some have one."""
    images = [episode.image for episode in episodes if episode.image is not None]
    if images and len(images) < len(episodes):
        raise ValueError(f"{len(images)} of {len(episodes)} episodes show an image; in a batch all do or none does")
    return images or None


def _sample_behind(model, prompts, openings, stop_id: int, settings: dict[str, Any], prefilled) -> list[Completion]:
    """Completions that begin with the openings."""
    rest = {**settings, "max_new_tokens": settings["max_new_tokens"] - len(openings[0])}
    starts = [[*prompt, *opening] for prompt, opening in zip(prompts, openings, strict=True)]
    sampled = sample(model, starts, stop_ids=[stop_id], prefilled=prefilled, **rest)
    completions = []
    for opening, end in zip(openings, sampled, strict=True):
        if opening[-1:] == [stop_id]:  # the opening ends the answer, whatever was sampled behind it
            end = Completion([], [], True)
        completions.append(Completion([*opening, *end.ids], [0.0] * len(opening) + end.logps, end.finished))
    return completions


def _remembered(encode: Callable[..., list[int]], tokenizer: Any) -> Callable[..., list[int]]:
    """``encode`` with its tokenizer filled in; each text is encoded once."""
    return functools.cache(functools.partial(encode, tokenizer))


def _drop_too_long(episodes: list[Episode], active: list[int], context: int, max_new_tokens: int) -> list[int]:
    kept = []
    for row in active:
        if len(episodes[row].ids) + max_new_tokens <= context:
            kept.append(row)
        elif not episodes[row].texts:
            raise ValueError(
                f"a prompt of {len(episodes[row].ids)} tokens and max_new_tokens={max_new_tokens} "
                f"do not fit the model's context of {context}"
            )
        else:
            episodes[row].truncated = True
    return kept


def _step_each(envs: Sequence[gymnasium.Env], texts: Sequence[str]) -> list[tuple]:
    return [env.step(text) for env, text in zip(envs, texts, strict=True)]


def _take(episode: Episode, env: gymnasium.Env, completion: Completion, text: str, reply: tuple, turn: int, last: bool) -> Any:
    """Takes what the environment said to one answer; the observation when the episode goes on, else None."""
    episode.append(completion.ids, completion.logps, turn)
    episode.tokens_forward += len(completion.ids)
    observation, reward, terminated, truncated, info = reply
    value = _checked_reward(env, reward)
    episode.texts.append(text)
    episode.turn_rewards.append(value)
    episode.reward += value
    if "success" not in info or "reason" not in info:
        raise ValueError(f'{_name(env)}.step() must return an info with "success" and "reason"; it has {sorted(info)}')
    # A copy: an environment may reuse its own dictionary.
    episode.infos.append(copy.deepcopy(info))
    episode.success = bool(info["success"])
    if terminated or truncated or last:
        episode.terminated = bool(terminated)
        episode.truncated = bool(truncated) or not completion.finished or not terminated
        return None
    return observation


def _checked_reward(env: gymnasium.Env, reward: Any) -> float:
    try:
        value = math.inf if isinstance(reward, str) or getattr(reward, "ndim", 0) > 0 else float(reward)
    except (TypeError, ValueError):
        value = math.inf
    if math.isinf(value):
        raise ValueError(f"{_name(env)}.step() must return one finite number as reward; it returned {reward!r}")
    return value


def _name(env: gymnasium.Env) -> str:
    return type(env.unwrapped).__name__


@dataclass
class Batch:
    """Right-padded rows, [B, T]: position t of ``logp``, ``mask`` and ``turn`` speaks of the token ``ids[:, t]``.

    ``images``: what the rows show; None in a text task.
    """

    ids_BT: Tensor
    attention_BT: Tensor
    mask_BT: Tensor
    logp_BT: Tensor
    turn_BT: Tensor
    images: Images | None = None


def collate(episodes: Sequence[Episode], pad_id: int) -> Batch:
    """Pads episodes on the right. ids, turns: int64; attention, mask: bool, true on real and on the policy's tokens."""
    if not episodes:
        raise ValueError("collate() needs at least one episode")
    shape = len(episodes), max(len(episode.ids) for episode in episodes)
    ids_BT = torch.full(shape, pad_id, dtype=torch.long)
    turn_BT = torch.full(shape, -1, dtype=torch.long)
    attention_BT = torch.zeros(shape, dtype=torch.bool)
    mask_BT = torch.zeros(shape, dtype=torch.bool)
    logp_BT = torch.zeros(shape)
    for row, episode in enumerate(episodes):
        length = len(episode.ids)
        ids_BT[row, :length] = torch.tensor(episode.ids)
        turn_BT[row, :length] = torch.tensor(episode.turns)
        attention_BT[row, :length] = True
        mask_BT[row, :length] = torch.tensor(episode.mask, dtype=torch.bool)
        logp_BT[row, :length] = torch.tensor(episode.logps)
    images = shown(episodes)
    return Batch(ids_BT, attention_BT, mask_BT, logp_BT, turn_BT, None if images is None else stack(images))


def token_logprobs(
    model: Any,
    ids_BT: Tensor,
    attention_BT: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    mask_BT: Tensor | None = None,
    images: Images | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each token given those before it, aligned with ``ids_BT``; position 0 is 0.0.

    log_softmax(logits / temperature) over the whole vocabulary, as the sampler reports it; entropies [B, T] in nats of
    the same distribution. ``mask_BT``: compute only these positions, all others are 0.0; by default all real tokens.
    Padding may be on either side; its positions, and the first real token behind left padding, are 0.0. Rows with
    ``images`` must be padded on the right.
    """
    wanted_BT = (attention_BT if mask_BT is None else mask_BT).bool().clone()
    wanted_BT[:, 0] = False
    wanted_BT[:, 1:] &= attention_BT[:, :-1].bool()
    network = model.get_base_model() if hasattr(model, "get_base_model") else model
    if bool(attention_BT[:, 0].all()):
        hidden_ND = states_before(network, ids_BT, wanted_BT, images)
    elif images is not None:
        raise ValueError("rows with images must be padded on the right")
    else:
        positions_BT = (attention_BT.long().cumsum(-1) - 1).clamp(min=0)
        out = network.base_model(
            input_ids=ids_BT, attention_mask=attention_BT.long(), position_ids=positions_BT, use_cache=False
        )
        hidden_ND = out.last_hidden_state[:, :-1][wanted_BT[:, 1:]]
    logits_NV = network.get_output_embeddings()(hidden_ND).float()
    logp_NV = torch.log_softmax(logits_NV if temperature == 1.0 else logits_NV / temperature, -1)
    logp_N = logp_NV.gather(-1, ids_BT[wanted_BT][:, None])[:, 0]
    zeros_BT = logp_N.new_zeros(ids_BT.shape)
    logp_BT = zeros_BT.masked_scatter(wanted_BT, logp_N)
    if not with_entropy:
        return logp_BT, None
    entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
    return logp_BT, zeros_BT.masked_scatter(wanted_BT, entropy_N)
