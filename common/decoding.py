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

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from common import kernels
from common.fused import FusedModel, Rows, array, can_fuse, pack


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
    kind = FusedDecoder if can_fuse(model) else ModelDecoder
    return kind(model, prompts, max_new_tokens)


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

    def __init__(self, model: Any, prompts: list[tuple[int, ...]], max_new_tokens: int) -> None:
        lengths_P = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
        width = max(map(len, prompts))
        ids_PT = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=model.device)
        text = model.config.get_text_config()
        self.model = model
        self.prompt_slots = width
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
    """Decodes Llama- and Qwen3-like models with about a fifth of the operations of their own forward.

    A prompt's keys and values stay in one place for all rows that continue it; a row has room for its own tokens only.
    """

    def __init__(self, model: Any, prompts: list[tuple[int, ...]], max_new_tokens: int) -> None:
        lengths, self.slots = list(map(len, prompts)), max_new_tokens
        rows = pack(prompts, lengths)
        fused = self.fused = FusedModel(model, max(lengths) + max_new_tokens)
        self.head = fused.head * fused.norm_D
        self.norms = [array(layer.norm_HW) for layer in fused.layers]
        x_ND, rotated = fused.run(rows)
        self.length_P = np.array(lengths)
        self.prompts = [self._prompt_cache(rotated_NX, rows) for rotated_NX in rotated]
        last_P = torch.from_numpy(rows.prefix_B + self.length_P - 1)
        self.logits_PV = nn.functional.linear(fused.last_norm(x_ND[last_P]), self.head)

    def _prompt_cache(self, rotated_NX: Tensor, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Keys (P, kv_heads, width, longest) and values (P, kv_heads, longest, width) of a layer."""
        fused, longest = self.fused, int(self.length_P.max())
        slot_PL = np.minimum(rows.prefix_B[:, None] + np.arange(longest), len(rotated_NX) - 1)
        heads = rotated_NX[torch.from_numpy(slot_PL)].unflatten(-1, (-1, fused.width))[:, :, fused.heads :]
        keys, values = heads.split(fused.kv_heads, 2)
        return array(keys.permute(0, 2, 3, 1)), array(values.transpose(1, 2))

    def start(self, source_B: Tensor) -> None:
        fused, self.source_B, self.used = self.fused, source_B.numpy(), 0
        shape = len(source_B), fused.kv_heads
        self.cache = [
            (fused.head.new_empty(*shape, fused.width, self.slots), fused.head.new_empty(*shape, self.slots, fused.width))
            for _ in fused.layers
        ]
        self._set_buffers()

    def _set_buffers(self) -> None:
        """Room for what a step computes, as tensors and as arrays on the same memory: a step itself allocates nothing."""
        fused, rows, layer = self.fused, len(self.source_B), self.fused.layers[0]
        hidden, attended, between = layer.out.shape[0], layer.out.shape[1], layer.down.shape[1]
        widths = {"x": hidden, "y": hidden, "qkv": len(layer.qkv), "attended": attended, "both": 2 * between, "gated": between}
        self.tensors = {name: fused.head.new_empty(rows, width) for name, width in widths.items()}
        self.arrays = {name: array(tensor) for name, tensor in self.tensors.items()}
        self.inverse = np.empty(rows, np.float32)
        self.cache_arrays = [(array(keys), array(values)) for keys, values in self.cache]

    def step(self, tokens_B: Tensor) -> Tensor:
        fused, x, y = self.fused, self.tensors["x"], self.tensors["y"]
        qkv, attended, both, gated = (self.tensors[name] for name in ("qkv", "attended", "both", "gated"))
        arrays, epsilon = self.arrays, np.float32(fused.epsilon)
        rotation = fused.rotary.at(self.length_P[self.source_B] + self.used)
        torch.index_select(fused.embedding, 0, tokens_B, out=x)
        for layer, norm_HW, prompts, own in zip(fused.layers, self.norms, self.prompts, self.cache_arrays, strict=True):
            kernels.normalise(arrays["x"], epsilon, arrays["y"], self.inverse)
            torch.mm(y, layer.qkv.T, out=qkv)
            kernels.rotate(arrays["qkv"], norm_HW, *rotation)
            kernels.attend_step(arrays["qkv"], *prompts, self.source_B, self.length_P, *own, self.used, arrays["attended"])
            x.addmm_(attended, layer.out.T)
            kernels.normalise(arrays["x"], epsilon, arrays["y"], self.inverse)
            torch.mm(y, layer.gate_up.T, out=both)
            kernels.gate(arrays["both"], arrays["gated"])
            x.addmm_(gated, layer.down.T)
        self.used += 1
        kernels.normalise(arrays["x"], epsilon, arrays["y"], self.inverse)
        return nn.functional.linear(y, self.head)

    def keep(self, index_B: Tensor) -> None:
        self.source_B = self.source_B[index_B.numpy()]
        self.cache = [(keys[index_B], values[index_B]) for keys, values in self.cache]
        self._set_buffers()
