"""Batched sampling from any Hugging Face causal language model, built for many short completions on a CPU.

Where the time goes, and what is done about it:
- Equal prompts are prefilled once; their keys and values are then copied to every member of the group.
- Keys and values live in buffers of the final length, so that a step writes one column and allocates nothing.
- Rows that have finished leave the batch as soon as enough of them have.
- Small models are decoded through fused weights (common.decoding).
- Random numbers are drawn before the first step, one per row and token, and turned into tokens by the inverse of the
  cumulative distribution: which rows are still in the batch never changes what a row samples.

Shape suffixes: _N rows of the result, _B rows of the batch, _T tokens, _V vocabulary, _S steps since rows were dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.decoding import Decoder, make_decoder
from common.vision import stack

# Rows leave the batch once this share has finished: copying keys and values that rarely costs less than it saves.
DROP_SHARE = 0.15


@dataclass
class Completion:
    """One sampled completion.

    ``ids``: the tokens written, with the stop id if there was one. ``logps``: their log-probabilities under
    softmax(logits / temperature) over the whole vocabulary (whatever top-p and top-k allowed). ``finished``: ended by a
    stop id or stop string, not by the token limit.
    """

    ids: list[int]
    logps: list[float]
    finished: bool


@dataclass
class Prefilled:
    """What one call of `sample` leaves to the next, whose prompts go on from its prompts: their keys and values.

    For one model while its weights stay as they are.
    """

    decoder: Decoder | None = None


@dataclass(frozen=True)
class _Rule:
    """How tokens are drawn and when a row stops."""

    temperature: float
    top_p: float
    top_k: int
    stops: Tensor
    stop_strings: Sequence[str]
    tokenizer: Any


def sample(
    model: Any,
    prompts: list[list[int]],
    *,
    group_size: int = 1,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
    stop_strings: Sequence[str] = (),
    tokenizer: Any = None,
    prefilled: Prefilled | None = None,
    images: Sequence[np.ndarray] | None = None,
) -> list[Completion]:
    """Samples ``group_size`` completions of each prompt: len(prompts) * group_size of them, prompt-major.

    ``temperature`` 0 is greedy, with log-probabilities at temperature 1. ``top_p`` and ``top_k`` (0: off) restrict what
    is drawn, never the reported log-probabilities: ratios computed from them assume that both are off. A row's tokens
    depend on its prompt, the generator's state, the row's index and ``max_new_tokens`` alone. ``prefilled``: read, and
    filled for the next turn. ``images``: what each prompt shows (see common.vision). The model may be wrapped by PEFT; it is
    run in evaluation mode and left as it was. Raises ValueError on an empty prompt, on sampling without a generator, and on
    stop strings without a tokenizer.
    """
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"sample() needs at least one token in every prompt; prompt {index} is empty")
    if group_size < 1 or max_new_tokens < 1:
        raise ValueError(f"group_size={group_size} and max_new_tokens={max_new_tokens} must be at least 1")
    if temperature < 0 or not 0 < top_p <= 1 or top_k < 0:
        raise ValueError(f"temperature={temperature} and top_k={top_k} must be >= 0, top_p={top_p} in (0, 1]")
    if stop_strings and tokenizer is None:
        raise ValueError("stop_strings need the tokenizer")
    if not prompts:
        return []
    network = model.get_base_model() if hasattr(model, "get_base_model") else model
    was_training = network.training
    network.eval()
    try:
        with torch.inference_mode():
            uniform_NT = _uniform(len(prompts) * group_size, max_new_tokens, temperature, generator, network.device)
            stops = torch.tensor(sorted(set(stop_ids)), dtype=torch.long, device=network.device)
            rule = _Rule(temperature, top_p, top_k, stops, stop_strings, tokenizer)
            before = prefilled or Prefilled()
            return _sample_all(network, prompts, group_size, max_new_tokens, uniform_NT, rule, before, images)
    finally:
        network.train(was_training)


def _uniform(
    rows: int, steps: int, temperature: float, generator: torch.Generator | None, device: torch.device
) -> Tensor | None:
    if temperature == 0:
        return None
    if generator is None:
        raise ValueError("sampling needs a torch.Generator (common.seeding.generator); temperature=0 is greedy")
    return torch.rand(rows, steps, generator=generator, device=generator.device).to(device)


def _sample_all(
    model,
    prompts: list[list[int]],
    group_size: int,
    max_new_tokens: int,
    uniform_NT: Tensor | None,
    rule: _Rule,
    prefilled: Prefilled,
    images: Sequence[np.ndarray] | None,
) -> list[Completion]:
    # Two prompts are one if their tokens are equal and they show the same image.
    keys = [(tuple(prompt), b"" if images is None else images[row].tobytes()) for row, prompt in enumerate(prompts)]
    first = {key: row for row, key in reversed(list(enumerate(keys)))}
    unique = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    shown = None if images is None else stack([images[first[key]] for key in unique])
    ids = [prompt for prompt, _ in unique]
    decoder = prefilled.decoder = make_decoder(model, ids, max_new_tokens, prefilled.decoder, shown)
    source = [unique[key] for key in keys for _ in range(group_size)]
    source_N = torch.tensor(source, device=model.device)
    ids_NT = torch.zeros(len(source), max_new_tokens, dtype=torch.long, device=model.device)
    logp_NT = torch.zeros(ids_NT.shape, device=model.device)
    stop_NT = torch.zeros(ids_NT.shape, dtype=torch.bool, device=model.device)
    decoder.start(source_N)
    _decode(decoder, decoder.logits_PV[source_N], uniform_NT, rule, (ids_NT, logp_NT, stop_NT))
    finished_N = stop_NT.any(1)
    length_N = torch.where(finished_N, stop_NT.int().argmax(1) + 1, max_new_tokens)
    return [
        Completion(ids[:length], logps[:length], finished)
        for ids, logps, length, finished in zip(
            ids_NT.tolist(), logp_NT.tolist(), length_N.tolist(), finished_N.tolist(), strict=True
        )
    ]


def _decode(decoder: Decoder, logits_BV: Tensor, uniform_NT: Tensor | None, rule: _Rule, results: tuple[Tensor, ...]) -> None:
    """Decodes all rows to their end; writes tokens, log-probabilities and stop flags into the results, [N, T] each."""
    rows, limit = results[0].shape
    rows_B = torch.arange(rows, device=logits_BV.device)
    uniform_TB = None if uniform_NT is None else uniform_NT.T.contiguous()
    done_B = torch.zeros(len(rows_B), dtype=torch.bool, device=rows_B.device)
    written: list[tuple[Tensor, Tensor, Tensor]] = []
    for step in range(limit):
        tokens_B, logp_B = choose(logits_BV, None if uniform_TB is None else uniform_TB[step], rule)
        stop_B = (tokens_B[:, None] == rule.stops).any(-1)
        if rule.stop_strings:
            before = results[0][rows_B, : step - len(written)]
            recent = torch.stack([*(tokens for tokens, _, _ in written), tokens_B], 1)
            stop_B |= _holds_stop_string(torch.cat([before, recent], 1), rule)
        written.append((tokens_B, logp_B, stop_B))
        done_B |= stop_B
        done = int(done_B.sum())
        if done == len(done_B) or step + 1 == limit:
            break
        if done > DROP_SHARE * len(done_B):
            _write(results, rows_B, step + 1, written)
            written = []
            index_B = (~done_B).nonzero()[:, 0]
            decoder.keep(index_B)
            rows_B, tokens_B, done_B = rows_B[index_B], tokens_B[index_B], done_B[index_B]
            uniform_TB = None if uniform_TB is None else uniform_TB[:, index_B]
        logits_BV = decoder.step(tokens_B)
    _write(results, rows_B, step + 1, written)


def _write(results: tuple[Tensor, ...], rows_B: Tensor, end: int, written: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    for result_NT, steps in zip(results, zip(*written, strict=True), strict=True):
        result_NT[rows_B, end - len(written) : end] = torch.stack(steps, 1)


def choose(logits_BV: Tensor, uniform_B: Tensor | None, rule: _Rule) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their full-support log-probabilities [B] at the temperature (1 when greedy).

    A row takes the first token whose cumulative probability exceeds its uniform number in [0, 1).
    """
    logits_BV = logits_BV.float()
    if uniform_B is None:
        tokens_B = logits_BV.argmax(-1)
        return tokens_B, torch.log_softmax(logits_BV, -1).gather(-1, tokens_B[:, None])[:, 0]
    logp_BV = torch.log_softmax(logits_BV if rule.temperature == 1.0 else logits_BV / rule.temperature, -1)
    weights_BV = logp_BV.exp()
    if rule.top_k or rule.top_p < 1:
        weights_BV = truncate(weights_BV, rule.top_p, rule.top_k)
    cumulative_BV = weights_BV.cumsum(-1)
    target_B1 = uniform_B[:, None] * cumulative_BV[:, -1:]
    tokens_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True).clamp_(max=logits_BV.shape[-1] - 1)
    return tokens_B1[:, 0], logp_BV.gather(-1, tokens_B1)[:, 0]


def truncate(weights_BV: Tensor, top_p: float, top_k: int) -> Tensor:
    """Probabilities with all but the top_k zeroed (0: all stay), then all outside the nucleus.

    The nucleus is the smallest set of most likely tokens that holds at least ``top_p`` of what is left (Holtzman et al.
    2020, section 3.1). The result is not rescaled.
    """
    ordered_BV, order_BV = weights_BV.sort(dim=-1, descending=True, stable=True)
    if top_k:
        ordered_BV[:, top_k:] = 0
    if top_p < 1:
        before_BV = ordered_BV.cumsum(-1) - ordered_BV
        ordered_BV = ordered_BV.masked_fill(before_BV >= top_p * ordered_BV.sum(-1, keepdim=True), 0)
    return torch.zeros_like(weights_BV).scatter_(-1, order_BV, ordered_BV)


def _holds_stop_string(ids_BT: Tensor, rule: _Rule) -> Tensor:
    """Whether each row's text ends in a stop string, looked for in as many last tokens as one can span."""
    tail = max(len(text.encode()) for text in rule.stop_strings) + 4
    texts = rule.tokenizer.batch_decode(ids_BT[:, -tail:])
    return torch.tensor([any(stop in text for stop in rule.stop_strings) for text in texts], device=ids_BT.device)
