"""Two ways to run a causal language model token by token: through its own forward, or through fused weights.

``ModelDecoder`` works with any Hugging Face model. A model of less than some ten million parameters spends most of a
step outside its matrix products, so the Llama and Qwen3 families (LoRA too) are decoded by ``FusedDecoder``: the same
function with projections joined, norm weights and adapters folded into them, and two batched products for attention.
Both keep keys and values in buffers that are allocated once, and prefill every prompt exactly once.

Prompts of unequal length are padded on the right: under a causal mask no real token sees the padding behind it, so the
prefill needs no mask. While decoding, the unused slots between a short prompt and its completion are hidden and every
token has its true position.

Shape suffixes: _P prompts, _B rows of the batch, _T slots, _N rows times tokens, _D width, _V vocabulary.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaForCausalLM, Qwen3ForCausalLM
from transformers.cache_utils import CacheLayerMixin

# Fused weights are a copy of the model, made anew for every call; beyond this size the copy costs more than it saves.
FUSED_PARAMETERS = 20_000_000


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


def can_fuse(model: Any) -> bool:
    """Whether ``FusedDecoder`` computes the same function as this model."""
    if type(model) not in (Qwen3ForCausalLM, LlamaForCausalLM) or model.num_parameters() > FUSED_PARAMETERS:
        return False
    if model.dtype != torch.float32 or type(model.model.embed_tokens) is not nn.Embedding:
        return False
    config = model.config
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    if config.hidden_act != "silu" or sliding or config.rope_parameters["rope_type"] not in ("default", "linear"):
        return False
    linears = [module for layer in model.model.layers for module in (*layer.self_attn.children(), *layer.mlp.children())]
    matrices = [module for module in linears if getattr(module, "weight", None) is not None and module.weight.ndim == 2]
    return is_plain(model.lm_head) and type(model.lm_head) is nn.Linear and all(map(is_plain, matrices))


def is_plain(linear: Any) -> bool:
    """A linear layer without bias, or one with LoRA updates that are nothing but low-rank matrices."""
    base = getattr(linear, "base_layer", linear)
    if type(base) is not nn.Linear or base.bias is not None:
        return False
    variants = getattr(linear, "lora_variant", {})
    return base is linear or not (any(variants.values()) or any(linear.lora_bias.values()))


def effective_weight(linear: Any) -> Tensor:
    """The matrix a plain linear layer applies, active LoRA updates included."""
    base = getattr(linear, "base_layer", linear)
    if base is linear or linear.disable_adapters or linear.merged:
        return base.weight
    updates = [linear.get_delta_weight(name) for name in linear.active_adapters if name in linear.lora_A]
    return sum(updates, base.weight)


class FusedLayer:
    """The weights of one layer, transposed for ``x @ weight``, with norm weights and constant factors folded in."""

    def __init__(self, layer: Any, heads: int, kv_heads: int, width: int, scale: float) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        query, key = (
            interleave(effective_weight(projection), count, width)
            for projection, count in ((attention.q_proj, heads), (attention.k_proj, kv_heads))
        )
        self.norm_HD: Tensor | None = None
        if hasattr(attention, "q_norm"):
            norms = [(attention.q_norm.weight * scale, heads), (attention.k_norm.weight, kv_heads)]
            rows = [interleave(weight[:, None], 1, width).T.expand(count, width) for weight, count in norms]
            self.norm_HD = torch.cat(rows) * width**0.5
        else:
            query = query * scale
        hidden = query.shape[1]
        before_attention = layer.input_layernorm.weight * hidden**0.5
        before_mlp = layer.post_attention_layernorm.weight * hidden**0.5
        self.qkv = (torch.cat([query, key, effective_weight(attention.v_proj)]) * before_attention).T.contiguous()
        self.out = effective_weight(attention.o_proj).T.contiguous()
        both = torch.cat([effective_weight(mlp.gate_proj), effective_weight(mlp.up_proj)])
        self.gate_up = (both * before_mlp).T.contiguous()
        self.down = effective_weight(mlp.down_proj).T.contiguous()


def interleave(weight: Tensor, heads: int, width: int) -> Tensor:
    """Reorders the rows of each head from (first half, second half) to pairs, so that RoPE is one complex product."""
    return weight.view(heads, 2, width // 2, -1).transpose(1, 2).reshape(heads * width, -1)


class FusedDecoder:
    """Decodes Llama- and Qwen3-like models with about a third of the operations of their own forward."""

    def __init__(self, model: Any, ids_PT: Tensor, lengths_P: Tensor, max_new_tokens: int) -> None:
        config = model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.width = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.prompt_slots = ids_PT.shape[1]
        self.slots = self.prompt_slots + max_new_tokens
        self.ragged = bool((lengths_P != self.prompt_slots).any())
        self.last_P = lengths_P - 1
        self.embedding = model.model.embed_tokens.weight
        self.layers = [
            FusedLayer(layer, self.heads, self.kv_heads, self.width, self.width**-0.5) for layer in model.model.layers
        ]
        hidden = config.hidden_size
        self.head = (model.lm_head.weight * (model.model.norm.weight * hidden**0.5)).T.contiguous()
        self.epsilon = self.embedding.new_tensor(config.rms_norm_eps * hidden)
        self.head_epsilon = self.embedding.new_tensor(config.rms_norm_eps * self.width)
        positions_1T = torch.arange(self.slots, device=ids_PT.device)[None]
        cosine, sine = model.model.rotary_emb(self.embedding, positions_1T)
        half = self.width // 2
        self.rotation_TD = torch.complex(cosine[0, :, :half].float(), sine[0, :, :half].float())
        self.prefilled: list[tuple[Tensor, Tensor]] = []
        self.logits_PV = self._prefill(ids_PT)

    def _normed(self, x: Tensor, epsilon: Tensor) -> Tensor:
        """x / sqrt(sum of squares + epsilon): RMSNorm less the factors that stand in the weights."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(epsilon, norm, norm).rsqrt_()

    def _project(self, layer: FusedLayer, x_ND: Tensor, rotation_N1D: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys [N, heads + kv_heads, width] and values [N, kv_heads, width]."""
        qkv_ND = self._normed(x_ND, self.epsilon) @ layer.qkv
        qkv = qkv_ND.view(len(x_ND), -1, self.width)
        qk, value = qkv[:, : self.heads + self.kv_heads], qkv[:, self.heads + self.kv_heads :]
        if layer.norm_HD is not None:
            qk = self._normed(qk, self.head_epsilon).mul_(layer.norm_HD)
        pairs = torch.view_as_complex(qk.float().reshape(*qk.shape[:2], -1, 2))
        return torch.view_as_real(pairs * rotation_N1D).reshape(qk.shape).to(qk.dtype), value

    def _finish(self, layer: FusedLayer, x_ND: Tensor, attended_ND: Tensor) -> Tensor:
        x_ND = torch.addmm(x_ND, attended_ND, layer.out)
        gate, up = (self._normed(x_ND, self.epsilon) @ layer.gate_up).chunk(2, dim=-1)
        return torch.addmm(x_ND, nn.functional.silu(gate).mul_(up), layer.down)

    def _prefill(self, ids_PT: Tensor) -> Tensor:
        prompts, length = ids_PT.shape
        x_ND = self.embedding[ids_PT.flatten()]
        rotation_N1D = self.rotation_TD[:length].repeat(prompts, 1)[:, None]
        for layer in self.layers:
            qk, value = self._project(layer, x_ND, rotation_N1D)
            query, key, value = (
                part.view(prompts, length, -1, self.width).transpose(1, 2)
                for part in (qk[:, : self.heads], qk[:, self.heads :], value)
            )
            self.prefilled.append((key.contiguous(), value.contiguous()))
            attended = nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=1.0, enable_gqa=self.heads != self.kv_heads
            )
            x_ND = self._finish(layer, x_ND, attended.transpose(1, 2).reshape(len(x_ND), -1))
        last_ND = x_ND.view(prompts, length, -1)[torch.arange(prompts, device=ids_PT.device), self.last_P]
        return self._normed(last_ND, self.epsilon) @ self.head

    def start(self, source_B: Tensor) -> None:
        self.used = self.prompt_slots
        self.cache = [self._copy(key, source_B) + self._copy(value, source_B) for key, value in self.prefilled]
        self.last_B = self.last_P[source_B]
        self.mask = None
        if self.ragged:
            mask_BT = hidden_slots(self.last_B, self.prompt_slots, self.slots, self.embedding.dtype)
            self.mask = mask_BT.repeat_interleave(self.kv_heads, 0)[:, None]

    def _copy(self, old: Tensor, rows_B: Tensor) -> tuple[Tensor, Tensor]:
        """A buffer [B, kv_heads, slots, width] with the used slots of these rows, and a view as [B * kv_heads, ...]."""
        new = old.new_empty(len(rows_B), self.kv_heads, self.slots, self.width)
        torch.index_select(old[:, :, : self.used], 0, rows_B, out=new[:, :, : self.used])
        return new, new.view(-1, self.slots, self.width)

    def step(self, tokens_B: Tensor) -> Tensor:
        self.last_B = self.last_B + 1
        slot, self.used = self.used, self.used + 1
        rows, shape = len(tokens_B), (-1, self.heads // self.kv_heads, self.width)
        mask = None if self.mask is None else self.mask[..., : self.used]
        x_BD = self.embedding[tokens_B]
        rotation_B1D = self.rotation_TD[self.last_B][:, None] if self.ragged else self.rotation_TD[slot]
        for layer, (keys, keys_flat, values, values_flat) in zip(self.layers, self.cache, strict=True):
            qk, value = self._project(layer, x_BD, rotation_B1D)
            keys[:, :, slot] = qk[:, self.heads :]
            values[:, :, slot] = value
            query = qk[:, : self.heads].reshape(shape)
            seen = keys_flat[:, : self.used].transpose(1, 2)
            scores = torch.bmm(query, seen) if mask is None else torch.baddbmm(mask, query, seen)
            attended = torch.bmm(scores.softmax(-1), values_flat[:, : self.used])
            x_BD = self._finish(layer, x_BD, attended.view(rows, -1))
        return self._normed(x_BD, self.epsilon) @ self.head

    def keep(self, index_B: Tensor) -> None:
        self.last_B = self.last_B[index_B]
        self.cache = [self._copy(keys, index_B) + self._copy(values, index_B) for keys, _, values, _ in self.cache]
        if self.mask is not None:
            self.mask = self.mask.view(-1, self.kv_heads, self.slots)[index_B].reshape(-1, 1, self.slots)
