"""The policy under training: log-probabilities, entropy and values of the tokens it wrote, and of its reference.

Shape suffixes: _B episodes, _T tokens, _N packed policy tokens (row by row, in order), _D hidden width, _V vocabulary.

How work is kept small: rows are grouped by length and cut to the longest of their group; the last token of a row is
not forwarded (nothing is read after it); logits are made only at the positions that predict a policy token; batches are
padded on the right, so under the causal mask no real token sees padding and no attention mask is needed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.episodes import Batch
from common.fused import states_before
from common.losses import entropy_from_logprobs
from common.seeding import generator
from common.vision import Images

MICRO_TOKENS = 4096  # tokens per forward: large enough for full matrix products, small enough for a laptop's cache


class TokenOutputs(NamedTuple):
    """What the policy says about its own tokens; entropy_N carries a gradient only when asked for."""

    logp_N: Tensor
    entropy_N: Tensor
    hidden_ND: Tensor


def network(model: Any) -> Any:
    """The Hugging Face model inside a PEFT wrapper (its layers carry the adapter), or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def hidden_states(model: Any, ids_BT: Tensor) -> Tensor:
    """Last hidden states (B, T, D) of right-padded rows."""
    return network(model).base_model(input_ids=ids_BT, use_cache=False).last_hidden_state


def check_head(model: Any) -> None:
    """Raises ValueError if the model does more to its logits than its output layer does (such as soft-capping).

    Everything here computes logits from selected hidden states, so that must be the whole truth.
    """
    ids_BT = torch.tensor([[0, 1]], device=network(model).device)
    with torch.no_grad():
        ours_BTV = network(model).get_output_embeddings()(hidden_states(model, ids_BT))
        theirs_BTV = network(model)(input_ids=ids_BT, use_cache=False).logits
    if not torch.allclose(ours_BTV.float(), theirs_BTV.float(), rtol=1e-2, atol=1e-3):
        name = type(network(model)).__name__
        raise ValueError(f"{name} changes its logits after the output layer; training such a model is not supported")


def select(batch: Batch, rows: Tensor) -> Batch:
    """The rows of a batch, cut to the longest of them."""
    longest = int(batch.attention_BT[rows].sum(1).max())
    part = Batch(*(getattr(batch, name)[rows, :longest] for name in BATCH_FIELDS))
    part.images = None if batch.images is None else batch.images.take(rows)
    return part


BATCH_FIELDS = ("ids_BT", "attention_BT", "mask_BT", "logp_BT", "turn_BT")


def micro_batches(batch: Batch, rows: Tensor, micro_tokens: int = MICRO_TOKENS) -> Iterator[Tensor]:
    """Cuts `rows` into pieces of similar length of at most `micro_tokens` padded tokens each (at least one row).

    Rows with the same prompt and image stay side by side, so that a forward can share them; longest groups come first.
    """
    length_B = batch.attention_BT[rows].sum(1)
    prompt_B = batch.mask_BT[rows].int().argmax(1, keepdim=True)
    columns_T = torch.arange(int(prompt_B.max()), device=rows.device)
    prompts_BT = batch.ids_BT[rows, : len(columns_T)].masked_fill(columns_T >= prompt_B, -1)
    if batch.images is not None:
        prompts_BT = torch.cat([batch.images.index_B[rows, None], prompts_BT], 1)
    _, group_B = torch.unique(prompts_BT, dim=0, return_inverse=True)
    longest_P = torch.zeros_like(length_B).scatter_reduce(0, group_B, length_B, "amax")
    order = torch.argsort(longest_P[group_B] * len(rows) + group_B, descending=True, stable=True)
    longest_B = longest_P[group_B][order]
    start = 0
    while start < len(order):
        count = max(1, micro_tokens // int(longest_B[start]))
        yield rows[order[start : start + count]]
        start += count


def tokens_to_forward(batch: Batch, rows: Tensor) -> int:
    """Tokens that one update pass over the rows costs: each row less its last token."""
    return int((batch.attention_BT[rows].sum(1) - 1).clamp(min=0).sum())


def images_to_encode(batch: Batch, rows: Tensor | None = None) -> int:
    """Distinct images of the rows (None: of all), each of which a forward pass encodes once."""
    if batch.images is None:
        return 0
    return len(batch.images.index_B.unique() if rows is None else batch.images.index_B[rows].unique())


def token_distributions(
    model: Any, ids_BT: Tensor, mask_BT: Tensor, temperature: float, images: Images | None = None
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) (N, V) at every masked token, and the hidden state before it (N, D).

    Rows are padded on the right; position 0 never counts, and no other token than a masked one is computed for itself.
    """
    hidden_ND = states_before(network(model), ids_BT, mask_BT, images)
    logits_NV = network(model).get_output_embeddings()(hidden_ND).float()
    return torch.log_softmax(logits_NV if temperature == 1.0 else logits_NV / temperature, dim=-1), hidden_ND


def score_tokens(model: Any, batch: Batch, temperature: float, *, entropy_gradient: bool = False) -> TokenOutputs:
    """log softmax(logits / temperature), entropy and the hidden state *before* it, for every policy token of the batch.

    Index n runs over batch.mask_BT in row-major order; the state before token t is read at position t - 1.
    """
    written_BT = batch.mask_BT[:, 1:].bool()
    logp_NV, hidden_ND = token_distributions(model, batch.ids_BT, batch.mask_BT, temperature, batch.images)
    logp_N = logp_NV.gather(1, batch.ids_BT[:, 1:][written_BT][:, None])[:, 0]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_N = entropy_from_logprobs(logp_NV)
    return TokenOutputs(logp_N, entropy_N, hidden_ND)


def make_reference(model: Any, reference: Any | None, needed: bool) -> Any | None:
    """The model that KL is measured against: the one given, else the start policy; None if no KL is asked for.

    A PEFT model serves as its own reference with its adapter off (then the start is the base model); any other model
    is copied and frozen. Call before a checkpoint is loaded into `model`.
    """
    if reference is not None or not needed:
        return reference
    return model if hasattr(model, "disable_adapter") else copy.deepcopy(model).requires_grad_(False).eval()


def reference_mode(model: Any, reference: Any) -> contextlib.AbstractContextManager:
    """In it `reference` computes the reference: an adapter of `model` is off where the two are one object."""
    return reference.disable_adapter() if reference is model else contextlib.nullcontext()


@torch.no_grad()
def reference_logprobs(
    model: Any, reference: Any, batch: Batch, temperature: float, micro_tokens: int = MICRO_TOKENS
) -> Tensor:
    """Log-probability of each policy token under the reference, (B, T), 0 off the mask.

    `reference` is a frozen model, or `model` itself: a PEFT model whose adapter is switched off meanwhile.
    """
    logp_BT = torch.zeros_like(batch.logp_BT)
    with reference_mode(model, reference):
        for rows in micro_batches(batch, torch.arange(len(batch.ids_BT), device=batch.ids_BT.device), micro_tokens):
            part = select(batch, rows)
            part_logp_BT = torch.zeros_like(part.logp_BT)
            part_logp_BT[part.mask_BT.bool()] = score_tokens(reference, part, temperature).logp_N
            logp_BT[rows, : part_logp_BT.shape[1]] = part_logp_BT
    return logp_BT


def build_value_head(model: Any, seed: int) -> nn.Sequential:
    """A two-layer perceptron on the policy's last hidden state, (..., D) -> (..., 1); it starts at V = 0."""
    hidden = network(model).config.get_text_config().hidden_size
    head = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    stream = generator(seed, "value head")
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        next(head.parameters()).normal_(0.0, hidden**-0.5, generator=stream)
    return head.to(network(model).device)
