"""Two ways to run a causal language model token by token: through its own forward, or through fused weights.

``ModelDecoder`` works with any Hugging Face model; a small Llama- or Qwen3-like model, LoRA or not, is decoded by
``FusedDecoder`` through the weights of common.fused and two batched products for attention. Both keep keys and values in
buffers that are allocated once, and prefill every prompt exactly once.

Prompts of unequal length are padded on the right: under a causal mask no real token sees the padding behind it, so the
prefill needs no mask. While decoding, the unused slots between a short prompt and its completion are hidden and every
token has its true position.

Shape suffixes: _P prompts, _B rows of the batch, _T slots, _N rows times tokens, _D width, _V vocabulary.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from common.fused import FusedModel, can_fuse, normalise


class Decoder(Protocol):
    """Prefilled prompts, of which rows are started, stepped and dropped. ``logits_PV``: after each prompt."""

    logits_PV: Tensor

    def start(self, source_B: Tensor) -> None:
        """Sets up the rows; row b continues prompt ``source_B[b]``."""

    def step(self, tokens_B: Tensor) -> Tensor:
        """Feeds one token per row; returns the logits [B, V] of the next."""

    def keep(self, index_B: Tensor) -> None:
        """Drops all rows but those of the index."""


def make_decoder(model: Any, prompts: list[tuple[int, ...]], max_new_tokens: int) -> Decoder:
    """Prefills the prompts (each one once, any lengths) with the fastest decoder that fits the model."""
    lengths_P = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    width = max(map(len, prompts))
    ids_PT = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=model.device)
    kind = FusedDecoder if can_fuse(model) else ModelDecoder
    return kind(model, ids_PT, lengths_P, max_new_tokens)


def hidden_slots(last_B: Tensor, prompt_slots: int, slots: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, slots] that hides the slots between a prompt's last token and the first completion slot."""
    slots_T = torch.arange(slots, device=last_B.device)
    hidden_BT = (slots_T > last_B[:, None]) & (slots_T < prompt_slots)
    zeros_BT = torch.zeros(hidden_BT.shape, dtype=dtype, device=last_B.device)
    return zeros_BT.masked_fill(hidden_BT, torch.finfo(dtype).min)


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [rows, heads, slots, width], in buffers that are allocated once."""

    is_sliding = False
    keys: Any
    values: Any

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots = slots
        self.used = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, heads, _, width = key_states.shape
        self.keys = key_states.new_empty(rows, heads, self.slots, width)
        self.values = value_states.new_empty(rows, heads, self.slots, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.used = self.used, self.used + key_states.shape[2]
        self.keys[:, :, start : self.used] = key_states
        self.values[:, :, start : self.used] = value_states
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    def select(self, rows_B: Tensor, slots: int) -> "SlotLayer":
        """A layer of these rows with room for ``slots``; an index may repeat, so a group shares its prefill."""
        new = SlotLayer(slots)
        new.update(self.keys[rows_B, :, : self.used], self.values[rows_B, :, : self.used])
        return new

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used + query_length, 0

    def get_seq_length(self) -> int:
        return self.used

    def get_max_cache_shape(self) -> int:
        return self.slots


class ModelDecoder:
    """Decodes through the model's own forward; any Hugging Face causal model without sliding windows."""

    def __init__(self, model: Any, ids_PT: Tensor, lengths_P: Tensor, max_new_tokens: int) -> None:
        text = model.config.get_text_config()
        self.model = model
        self.prompt_slots = ids_PT.shape[1]
        self.slots = self.prompt_slots + max_new_tokens
        window = getattr(text, "sliding_window", None)
        if window and "sliding_attention" in (getattr(text, "layer_types", None) or []) and window < self.slots:
            raise ValueError(f"prompt and completion take {self.slots} tokens, the model's sliding window is {window}")
        self.last_P = lengths_P - 1
        self.ragged = bool((lengths_P != self.prompt_slots).any())
        self.prefilled = [SlotLayer(self.prompt_slots) for _ in range(text.num_hidden_layers)]
        needed = self.last_P.unique()
        logits_PNV = model(
            ids_PT,
            position_ids=torch.arange(self.prompt_slots, device=ids_PT.device)[None],
            past_key_values=Cache(layers=list(self.prefilled)),
            use_cache=True,
            logits_to_keep=needed,
        ).logits
        prompts_P = torch.arange(len(ids_PT), device=ids_PT.device)
        self.logits_PV = logits_PNV[prompts_P, torch.searchsorted(needed, self.last_P)]

    def start(self, source_B: Tensor) -> None:
        self.layers = [layer.select(source_B, self.slots) for layer in self.prefilled]
        self.cache = Cache(layers=list(self.layers))
        self.last_B = self.last_P[source_B]
        self.mask_BT = None
        if self.ragged:
            self.mask_BT = hidden_slots(self.last_B, self.prompt_slots, self.slots, self.model.dtype)

    def step(self, tokens_B: Tensor) -> Tensor:
        self.last_B = self.last_B + 1
        mask = None if self.mask_BT is None else self.mask_BT[:, None, None, : self.layers[0].used + 1]
        positions = self.last_B[:, None]
        out = self.model(
            tokens_B[:, None], attention_mask=mask, position_ids=positions, past_key_values=self.cache, use_cache=True
        )
        return out.logits[:, -1]

    def keep(self, index_B: Tensor) -> None:
        self.last_B = self.last_B[index_B]
        self.mask_BT = None if self.mask_BT is None else self.mask_BT[index_B]
        self.layers = [layer.select(index_B, self.slots) for layer in self.layers]
        self.cache = Cache(layers=list(self.layers))


class FusedDecoder:
    """Decodes Llama- and Qwen3-like models with about a third of the operations of their own forward."""

    def __init__(self, model: Any, ids_PT: Tensor, lengths_P: Tensor, max_new_tokens: int) -> None:
        self.prompt_slots = ids_PT.shape[1]
        self.slots = self.prompt_slots + max_new_tokens
        self.ragged = bool((lengths_P != self.prompt_slots).any())
        self.last_P = lengths_P - 1
        self.fused = FusedModel(model, self.slots)
        self.head = (self.fused.head * self.fused.norm_D).T.contiguous()
        self.prefilled: list[tuple[Tensor, Tensor]] = []
        self.logits_PV = self._prefill(ids_PT)

    def _prefill(self, ids_PT: Tensor) -> Tensor:
        fused, (prompts, length) = self.fused, ids_PT.shape
        x_ND = fused.embedding[ids_PT.flatten()]
        rotation_N1D = fused.rotation_TD[:length].repeat(prompts, 1)[:, None]
        slots_T = torch.arange(length, device=ids_PT.device)
        causal = torch.where(slots_T > slots_T[:, None], -torch.inf, x_ND.new_zeros(()))[None, None]
        for layer in fused.layers:
            qk, value = fused.project(layer, x_ND, rotation_N1D)
            query, key, value = (
                part.reshape(prompts, length, -1, fused.width) for part in (qk[:, : fused.heads], qk[:, fused.heads :], value)
            )
            self.prefilled.append((key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()))
            x_ND = fused.finish(layer, x_ND, fused.attend(query, key, value, causal))
        last_PD = x_ND.view(prompts, length, -1)[torch.arange(prompts, device=ids_PT.device), self.last_P]
        return normalise(last_PD, fused.epsilon) @ self.head

    def start(self, source_B: Tensor) -> None:
        self.used = self.prompt_slots
        self.cache = [self._copy(key, source_B) + self._copy(value, source_B) for key, value in self.prefilled]
        self.last_B = self.last_P[source_B]
        self.mask = None
        if self.ragged:
            mask_BT = hidden_slots(self.last_B, self.prompt_slots, self.slots, self.fused.embedding.dtype)
            self.mask = mask_BT.repeat_interleave(self.fused.kv_heads, 0)[:, None]

    def _copy(self, old: Tensor, rows_B: Tensor) -> tuple[Tensor, Tensor]:
        """A buffer [B, kv_heads, slots, width] with the used slots of these rows, and a view as [B * kv_heads, ...]."""
        new = old.new_empty(len(rows_B), old.shape[1], self.slots, old.shape[3])
        torch.index_select(old[:, :, : self.used], 0, rows_B, out=new[:, :, : self.used])
        return new, new.view(-1, self.slots, old.shape[3])

    def step(self, tokens_B: Tensor) -> Tensor:
        fused = self.fused
        self.last_B = self.last_B + 1
        slot, self.used = self.used, self.used + 1
        rows, shape = len(tokens_B), (-1, fused.heads // fused.kv_heads, fused.width)
        mask = None if self.mask is None else self.mask[..., : self.used]
        x_BD = fused.embedding[tokens_B]
        rotation_B1D = fused.rotation_TD[self.last_B][:, None] if self.ragged else fused.rotation_TD[slot]
        for layer, (keys, keys_flat, values, values_flat) in zip(fused.layers, self.cache, strict=True):
            qk, value = fused.project(layer, x_BD, rotation_B1D)
            keys[:, :, slot] = qk[:, fused.heads :]
            values[:, :, slot] = value
            query = qk[:, : fused.heads].reshape(shape)
            seen = keys_flat[:, : self.used].transpose(1, 2)
            scores = torch.bmm(query, seen) if mask is None else torch.baddbmm(mask, query, seen)
            attended = torch.bmm(scores.softmax(-1), values_flat[:, : self.used])
            x_BD = fused.finish(layer, x_BD, attended.view(rows, -1))
        return normalise(x_BD, fused.epsilon) @ self.head

    def keep(self, index_B: Tensor) -> None:
        self.last_B = self.last_B[index_B]
        self.cache = [self._copy(keys, index_B) + self._copy(values, index_B) for keys, _, values, _ in self.cache]
        if self.mask is not None:
            self.mask = self.mask.view(len(self.mask) // self.fused.kv_heads, -1, self.slots)[index_B]
            self.mask = self.mask.reshape(-1, 1, self.slots)
