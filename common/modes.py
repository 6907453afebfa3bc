"""Thinking or not is decided by the first token behind a prompt that ends with <think>: its probability, and answers forced
into one mode.

Shape suffixes: _P prompts, _V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.episodes import Episode, run_episodes
from common.policy import network, token_distributions
from common.schema import ConfigError, one_of
from common.tokenizers import encode_prompt
from common.verifiers.thinking import END_THINK, THINK

MODES = ("think", "nothink", "free")
PROMPT_TOKENS = 16384  # padded prompt tokens per forward pass


def end_think_id(tokenizer: Any) -> int:
    """The id of </think>, once it is certain that the first token of an answer decides the mode.

    ConfigError if </think> is not one token, or if the chat template does not end a prompt with <think> (white space may
    follow): a template that strips or moves the tag splits the modes at another place, and nothing else would tell.
    """
    ids = tokenizer(END_THINK, add_special_tokens=False)["input_ids"]
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise ConfigError(f"model: its tokenizer writes {END_THINK} as {len(ids)} tokens {ids}; the mode needs it to be one.")
    question = "What is 1+1?"
    turns = [{"role": "user", "content": question}]
    text = question
    if tokenizer.chat_template is not None:
        text = str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
    if question not in text:
        raise ConfigError(f"model: its chat template drops the user's text; a prompt reads {text!r}.")
    if not text.rstrip().endswith(THINK) or text.count(THINK) != 1 or END_THINK in text:
        raise ConfigError(
            f"model: its chat template must end a prompt with one {THINK}, so that the next token decides between thinking "
            f"and {END_THINK}; a prompt ends with {text[-60:]!r}. Set model.chat_template to one that does, or take a "
            "reasoning model whose template does (DeepSeek-R1-Distill)."
        )
    return int(ids[0])


def prompts_of(tokenizer: Any, make_env: Callable, tasks: Sequence[dict]) -> list[list[int]]:
    """Token ids of the tasks' first prompts, as run_episodes will make them."""
    env, found = make_env(), []
    for task in tasks:
        observation, _ = env.reset(seed=task.get("seed"), options=dict(task))
        found.append(encode_prompt(tokenizer, observation))
    env.close()
    return found


@torch.no_grad()
def first_logprobs(model: Any, prompts: Sequence[Sequence[int]], temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the first token behind each prompt, (P, V)."""
    device, found = network(model).device, []
    size = max(1, PROMPT_TOKENS // (1 + max(map(len, prompts))))
    for start in range(0, len(prompts), size):
        part = prompts[start : start + size]
        longest = max(map(len, part)) + 1
        ids_PT = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in part], device=device)
        mask_PT = torch.zeros_like(ids_PT, dtype=torch.bool)
        mask_PT[torch.arange(len(part)), torch.tensor([len(prompt) for prompt in part])] = True
        found.append(token_distributions(model, ids_PT, mask_PT, temperature)[0])
    return torch.cat(found)


class Openings(NamedTuple):
    """How answers begin, prompt-major: token, its log-probability under the rule that drew it, and per prompt P(</think>)."""

    tokens: list[list[int]]
    old_logps: list[float]
    nothink_P: Tensor


def draw_openings(logp_PV: Tensor, end: int, modes: Sequence[str], generator: torch.Generator) -> Openings:
    """First tokens of len(modes) answers to each prompt; member i of a group has mode modes[i].

    nothink: </think>. think: drawn from all other tokens. free: drawn from the policy. The log-probability of a forced
    token is that of its mode, the share of the group that is forced into it, times that of the token within the mode:
    AdaptThink (Zhang et al. 2025) sets one half, where the thinking half begins with one fixed word.
    """
    for mode in modes:
        one_of("mode", mode, MODES)
    logp_PV = logp_PV.cpu()
    think_PV = logp_PV.clone()
    think_PV[:, end] = -math.inf
    within = {"think": think_PV.log_softmax(-1), "free": logp_PV}
    token_PG = torch.full((len(logp_PV), len(modes)), end)
    old_PG = torch.zeros(token_PG.shape)
    for mode in dict.fromkeys(modes):
        members = [i for i, own in enumerate(modes) if own == mode]
        if mode in within:
            drawn = torch.multinomial(within[mode].exp(), len(members), replacement=True, generator=generator)
            token_PG[:, members] = drawn
            old_PG[:, members] = within[mode].gather(1, drawn)
        if mode != "free":
            old_PG[:, members] += math.log(len(members) / len(modes))
    nothink_P = logp_PV[:, end].exp()
    return Openings([[token] for token in token_PG.flatten().tolist()], old_PG.flatten().tolist(), nothink_P)


def play_modes(
    model: Any,
    tokenizer: Any,
    make_env: Callable,
    tasks: Sequence[dict],
    modes: Sequence[str],
    *,
    end: int,
    generator: torch.Generator,
    temperature: float = 1.0,
    **sampling: Any,
) -> tuple[list[Episode], Tensor]:
    """len(modes) one-turn episodes of each task, task-major, and P(</think>) behind each prompt, (P,).

    Member i of a group is forced into modes[i]. The first policy token's log-probability is that of the rule that drew it
    (see `draw_openings`); all others are the sampler's. ``end``: end_think_id. ``sampling``: as for run_episodes.
    """
    logp_PV = first_logprobs(model, prompts_of(tokenizer, make_env, tasks), temperature)
    begun = draw_openings(logp_PV, end, modes, generator)
    episodes = run_episodes(
        model,
        tokenizer,
        make_env,
        list(tasks),
        group_size=len(modes),
        temperature=temperature,
        generator=generator,
        openings=begun.tokens,
        **sampling,
    )
    for episode, logp in zip(episodes, begun.old_logps, strict=True):
        episode.logps[episode.prompt_length] = logp
    return episodes, begun.nothink_P


def skips(episode: Episode, end: int) -> bool:
    """NoThinking: the answer begins with </think>."""
    return episode.ids[episode.prompt_length] == end
