"""Two ways to run a causal language model token by token: through its own forward, or through fused weights.

``ModelDecoder`` works with any Hugging Face model; a small Llama- or Qwen3-like model, LoRA or not, is decoded by
``FusedDecoder`` through the weights of common.fused and two batched products for attention. Both keep keys and values in
buffers that are allocated once, and prefill every prompt exactly once.

Prompts of unequal length are padded on the right: under a causal mask no real token sees the padding behind it, so the
prefill needs no mask. While decoding, the unused slots between a short prompt and its completion are hidden and every
token has its true position.

In an episode of many turns each prompt goes on from the one before. A decoder that is given its predecessor takes the keys
and values of that prompt from it and computes only the tokens behind: the last answer (again, now many tokens at a time)
and what the environment replied.

Shape suffixes: _P prompts, _B rows of the batch, _T slots, _N rows times tokens, _D width, _V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from common import kernels
from common.fused import FusedModel, array, can_fuse, pack, show
from common.vision import Images, embed


class Decoder(Protocol):
    """Prefilled prompts (``ids``), of which rows are started, stepped and dropped. ``logits_PV``: after each prompt."""

    ids: list[tuple[int, ...]]
    logits_PV: Tensor

    def start(self, source_B: Tensor) -> None:
        """Sets up the rows; row b continues prompt ``source_B[b]``."""

    def step(self, tokens_B: Tensor) -> Tensor:
        """Feeds one token per row; returns the logits [B, V] of the next."""

    def keep(self, index_B: Tensor) -> None:
        """Drops all rows but those of the index."""


def make_decoder(
    model: Any,
    prompts: list[tuple[int, ...]],
    max_new_tokens: int,
    before: Decoder | None = None,
    images: Images | None = None,
) -> Decoder:
    """Prefills the prompts (each one once, any lengths) with the fastest decoder that fits the model.

    ``before``: a decoder of the same weights; where each prompt goes on from one of its prompts, only the rest is computed.
    ``images``: what the prompts show; they are then always computed whole.
    """
    kind: Any = FusedDecoder if can_fuse(model) else ModelDecoder
    if images is not None:
        return kind(model, prompts, max_new_tokens, images=images)
    parents = find_parents(before.ids, prompts) if isinstance(before, kind) else None
    return kind(model, prompts, max_new_tokens) if parents is None else kind(model, prompts, max_new_tokens, before, parents)


def find_parents(earlier: Sequence[tuple[int, ...]], prompts: Sequence[tuple[int, ...]]) -> list[int] | None:
    """For each prompt the longest of the earlier ones that it goes on from (a true prefix); None where one has none."""
    index = {ids: number for number, ids in enumerate(earlier)}
    lengths = sorted({len(ids) for ids in earlier}, reverse=True)
    parents = []
    for ids in prompts:
        length = next((length for length in lengths if length < len(ids) and ids[:length] in index), None)
        if length is None:
            return None
        parents.append(index[ids[:length]])
    return parents


def additive(hidden_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask, of any shape, that is added to attention scores to hide these slots."""
    return torch.zeros(hidden_BT.shape, dtype=dtype, device=hidden_BT.device).masked_fill(hidden_BT, torch.finfo(dtype).min)


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

    ids: list[tuple[int, ...]]
    prompt_slots: int
    prefilled: list[SlotLayer]

    def __init__(
        self,
        model: Any,
        prompts: list[tuple[int, ...]],
        max_new_tokens: int,
        before: "ModelDecoder | None" = None,
        parents: Sequence[int] = (),
        images: Images | None = None,
    ) -> None:
        text, device = model.config.get_text_config(), model.device
        known = [len(before.ids[parent]) for parent in parents] if before else [0] * len(prompts)
        rest = [prompt[start:] for prompt, start in zip(prompts, known, strict=True)]
        width, used = max(map(len, rest)), before.prompt_slots if before else 0
        self.ids, self.model, self.prompt_slots = prompts, model, used + width
        self.slots = self.prompt_slots + max_new_tokens
        window = getattr(text, "sliding_window", None)
        if window and "sliding_attention" in (getattr(text, "layer_types", None) or []) and window < self.slots:
            raise ValueError(f"prompt and completion take {self.slots} tokens, the model's sliding window is {window}")
        ids_PT = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in rest], device=device)
        known_P, last_P = torch.tensor(known, device=device), torch.tensor([len(ids) - 1 for ids in rest], device=device)
        steps_T = torch.arange(width, device=device)
        self.hidden_PT, mask = steps_T > last_P[:, None], None
        if before:
            parents_P = torch.tensor(parents, device=device)
            self.prefilled = [layer.select(parents_P, self.prompt_slots) for layer in before.prefilled]
            hidden_PT = before.hidden_PT[parents_P]
            later_PNT = (steps_T > steps_T[:, None]).expand(len(prompts), -1, -1)
            mask = additive(torch.cat([hidden_PT[:, None].expand(-1, width, -1), later_PNT], -1)[:, None], model.dtype)
            self.hidden_PT = torch.cat([hidden_PT, self.hidden_PT], 1)
        else:
            self.prefilled = [SlotLayer(self.prompt_slots) for _ in range(text.num_hidden_layers)]
        needed = last_P.unique()
        tokens = {"input_ids": ids_PT} if images is None else {"inputs_embeds": embed(model, ids_PT, images.to(device))}
        logits_PNV = model(
            **tokens,
            attention_mask=mask,
            position_ids=known_P[:, None] + steps_T,
            past_key_values=Cache(layers=list(self.prefilled)),
            use_cache=True,
            logits_to_keep=needed,
        ).logits
        self.last_P = known_P + last_P
        self.logits_PV = logits_PNV[torch.arange(len(prompts), device=device), torch.searchsorted(needed, last_P)]

    def start(self, source_B: Tensor) -> None:
        self.layers = [layer.select(source_B, self.slots) for layer in self.prefilled]
        self.cache = Cache(layers=list(self.layers))
        self.last_B = self.last_P[source_B]
        hidden_BT = nn.functional.pad(self.hidden_PT[source_B], (0, self.slots - self.prompt_slots))
        self.mask_BT = additive(hidden_BT, self.model.dtype) if bool(self.hidden_PT.any()) else None

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

    def __init__(
        self,
        model: Any,
        prompts: list[tuple[int, ...]],
        max_new_tokens: int,
        before: "FusedDecoder | None" = None,
        parents: Sequence[int] = (),
        images: Images | None = None,
    ) -> None:
        lengths, self.slots, self.ids = list(map(len, prompts)), max_new_tokens, prompts
        fused = self.fused = FusedModel(model, max(lengths) + max_new_tokens)
        self.head = fused.head * fused.norm_D
        self.norms = [array(layer.norm_HW) for layer in fused.layers]
        self.length_P = np.array(lengths)
        if before is None:
            rows = pack(prompts, lengths, None if images is None else images.index_B.tolist())
            x_ND, rotated = fused.run(rows, None if images is None else show(model, rows, prompts, lengths, images))
            self.prompts = [self._prompt_cache(rotated_NX, rows.prefix_B) for rotated_NX in rotated]
            last_P = rows.prefix_B + self.length_P - 1
        else:
            x_ND, last_P = self._go_on(before, np.array(parents))
        self.logits_PV = nn.functional.linear(fused.last_norm(x_ND[torch.from_numpy(last_P)]), self.head)

    def _go_on(self, before: "FusedDecoder", parent_P: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Residual stream of the tokens that the earlier decoder has not seen, and where each prompt's last one stands.

        For each layer all tokens are packed, prompt by prompt; keys and values of the earlier tokens come from there.
        """
        fused, known_P = self.fused, before.length_P[parent_P]
        first_P = self.length_P.cumsum() - self.length_P
        new_P = self.length_P - known_P
        old_N, slot_N = _ranges(first_P, known_P)
        new_N, position_N = _ranges(first_P + known_P, new_P)
        position_N = position_N + known_P.repeat(new_P)
        segment_P4 = np.stack([first_P + known_P, new_P, first_P, known_P], 1)
        ids = [token for ids, start in zip(self.ids, known_P, strict=True) for token in ids[start:]]
        x_ND = nn.functional.embedding(torch.tensor(ids), fused.embedding)
        parent_N, tokens, self.prompts = parent_P.repeat(known_P), int(self.length_P.sum()), []
        for layer, norm_HW, (keys, values) in zip(fused.layers, self.norms, before.prompts, strict=True):
            qkv_NX = fused.project(layer, x_ND)
            kernels.rotate(array(qkv_NX), norm_HW, *fused.rotary.at(position_N))
            all_NHW = np.empty((tokens, fused.heads + 2 * fused.kv_heads, fused.width), np.float32)
            all_NHW[new_N] = array(qkv_NX).reshape(len(new_N), -1, fused.width)
            earlier = keys[parent_N, :, :, slot_N], values[parent_N, :, slot_N]
            all_NHW[old_N, fused.heads :] = np.concatenate(earlier, 1)
            all_NX, attended_ND = all_NHW.reshape(tokens, -1), np.empty((tokens, fused.heads * fused.width), np.float32)
            kernels.attend(all_NX, fused.kv_heads, fused.width, segment_P4, attended_ND)
            self.prompts.append(self._prompt_cache(torch.from_numpy(all_NX), first_P))
            x_ND = fused.finish(layer, x_ND, torch.from_numpy(attended_ND[new_N]))
        return x_ND, new_P.cumsum() - 1

    def _prompt_cache(self, rotated_NX: Tensor, first_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys (P, kv_heads, width, longest) and values (P, kv_heads, longest, width) of a layer."""
        fused, longest = self.fused, int(self.length_P.max())
        slot_PL = np.minimum(first_P[:, None] + np.arange(longest), len(rotated_NX) - 1)
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


def _ranges(first_P: np.ndarray, length_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """first, first + 1, ... of each range, one range behind the other; and how far into its range each one stands."""
    within_N = np.arange(length_P.sum()) - (length_P.cumsum() - length_P).repeat(length_P)
    return first_P.repeat(length_P) + within_N, within_N
