"""Llama- and Qwen3-like models through fused weights: the same function and the same gradients in fewer operations.

A model of less than some ten million parameters spends most of its time outside matrix products. Here the projections of
a layer are joined, norm weights and LoRA updates are folded into them, RoPE is one complex product, and in training the
prompt that the members of a group share is computed once. The model's own parameters stay the only ones: fused weights
are made from them for each call and pass gradients back to them.

Shape suffixes: _B rows, _P different prompts, _T tokens, _N rows times tokens, _D width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Qwen3ForCausalLM

# Fused weights are a copy of the model, made anew for every call; beyond this size the copy costs more than it saves.
FUSED_PARAMETERS = 20_000_000
# A shared prompt is computed once where that spares at least this share of the tokens.
SHARE_FROM = 0.1


def can_fuse(model: Any) -> bool:
    """Whether the fused weights compute the same function as this model's own forward, in its present mode."""
    if type(model) not in (Qwen3ForCausalLM, LlamaForCausalLM) or model.num_parameters() > FUSED_PARAMETERS:
        return False
    if model.dtype != torch.float32 or type(model.model.embed_tokens) is not nn.Embedding:
        return False
    config = model.config
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    if config.hidden_act != "silu" or sliding or config.rope_parameters["rope_type"] not in ("default", "linear"):
        return False
    if model.training and (config.attention_dropout > 0 or model.is_gradient_checkpointing):
        return False
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return False
    layers = model.model.layers
    linears = [module for layer in layers for module in (*layer.self_attn.children(), *layer.mlp.children())]
    matrices = [module for module in linears if getattr(module, "weight", None) is not None and module.weight.ndim == 2]
    return type(model.lm_head) is nn.Linear and is_plain(model.lm_head) and all(map(is_plain, matrices))


def is_plain(linear: Any) -> bool:
    """A linear layer without bias, or one with LoRA updates that are nothing but low-rank matrices."""
    base = getattr(linear, "base_layer", linear)
    if type(base) is not nn.Linear or base.bias is not None:
        return False
    if base is linear:
        return True
    dropout = linear.training and any(getattr(module, "p", 0) > 0 for module in linear.lora_dropout.values())
    return not (dropout or any(linear.lora_variant.values()) or any(linear.lora_bias.values()))


def effective_weight(linear: Any) -> Tensor:
    """The matrix a plain linear layer applies, active LoRA updates included."""
    base = getattr(linear, "base_layer", linear)
    if base is linear or linear.disable_adapters or linear.merged:
        return base.weight
    updates = [linear.get_delta_weight(name) for name in linear.active_adapters if name in linear.lora_A]
    return sum(updates, base.weight)


def interleave(weight: Tensor, heads: int, width: int) -> Tensor:
    """Reorders the rows of each head from (first half, second half) to pairs, so that RoPE is one complex product."""
    return weight.view(heads, 2, width // 2, -1).transpose(1, 2).reshape(heads * width, -1)


class FusedLayer:
    """The weights of one layer, transposed for ``x @ weight``, with norm weights and constant factors folded in."""

    def __init__(self, layer: Any, heads: int, kv_heads: int, width: int) -> None:
        attention, mlp, scale = layer.self_attn, layer.mlp, width**-0.5
        query, key = (
            interleave(effective_weight(projection), count, width)
            for projection, count in ((attention.q_proj, heads), (attention.k_proj, kv_heads))
        )
        self.norm_HD: Tensor | None = None
        if hasattr(attention, "q_norm"):
            norms = ((attention.q_norm.weight * scale, heads), (attention.k_norm.weight, kv_heads))
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


class _Normalise(torch.autograd.Function):
    """x / sqrt(sum of squares + epsilon) over the last dimension; saves two tensors, where autograd would save five."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.addcmul(epsilon, norm, norm).rsqrt_()
        y = x * inverse
        ctx.save_for_backward(y, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        y, inverse = ctx.saved_tensors
        along = torch.linalg.vecdot(gradients[0], y).unsqueeze(-1)
        return torch.addcmul(gradients[0], y, along, value=-1).mul_(inverse), None


def normalise(x: Tensor, epsilon: Tensor) -> Tensor:
    """RMSNorm less the factors that stand in the weights."""
    if torch.is_grad_enabled():
        return _Normalise.apply(x, epsilon)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(epsilon, norm, norm).rsqrt_()


class FusedModel:
    """Fused weights of a model and the steps of a layer around its attention; RoPE for ``positions`` positions."""

    def __init__(self, model: Any, positions: int) -> None:
        config = model.config
        hidden = config.hidden_size
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.width = getattr(config, "head_dim", None) or hidden // self.heads
        self.embedding = model.model.embed_tokens.weight
        self.layers = [FusedLayer(layer, self.heads, self.kv_heads, self.width) for layer in model.model.layers]
        self.norm_D = model.model.norm.weight * hidden**0.5
        self.head = model.lm_head.weight
        self.epsilon = self.embedding.new_tensor(config.rms_norm_eps * hidden)
        self.head_epsilon = self.embedding.new_tensor(config.rms_norm_eps * self.width)
        positions_1T = torch.arange(positions, device=self.embedding.device)[None]
        cosine, sine = model.model.rotary_emb(self.embedding, positions_1T)
        half = self.width // 2
        self.rotation_TD = torch.complex(cosine[0, :, :half], sine[0, :, :half])

    def project(self, layer: FusedLayer, x_ND: Tensor, rotation_N1D: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys [N, heads + kv_heads, width] and values [N, kv_heads, width]."""
        qkv_ND = normalise(x_ND, self.epsilon) @ layer.qkv
        qkv = qkv_ND.view(len(x_ND), -1, self.width)
        qk, value = qkv[:, : self.heads + self.kv_heads], qkv[:, self.heads + self.kv_heads :]
        if layer.norm_HD is not None:
            qk = normalise(qk, self.head_epsilon) * layer.norm_HD
        pairs = torch.view_as_complex(qk.reshape(*qk.shape[:2], -1, 2))
        return torch.view_as_real(pairs * rotation_N1D).view(qk.shape), value

    def finish(self, layer: FusedLayer, x_ND: Tensor, attended_ND: Tensor) -> Tensor:
        """The layer's output from the residual stream before attention and what the heads attended to."""
        x_ND = torch.addmm(x_ND, attended_ND, layer.out)
        gate, up = (normalise(x_ND, self.epsilon) @ layer.gate_up).chunk(2, dim=-1)
        return torch.addmm(x_ND, nn.functional.silu(gate) * up, layer.down)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Attention of queries [R, T, heads, width] over keys [R, L, kv_heads, width]; [R * T, heads * width].

        ``mask`` [R or 1, 1, T, L] is additive. The query heads of a key head stand one below the other, so that keys and
        values are not repeated.
        """
        rows, tokens, repeats = *query.shape[:2], self.heads // self.kv_heads
        stacked = query.reshape(rows, tokens, self.kv_heads, repeats, self.width).permute(0, 2, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(
            stacked.reshape(rows, self.kv_heads, repeats * tokens, self.width),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask.repeat(1, 1, repeats, 1),
            scale=1.0,
        )
        out = out.view(rows, self.kv_heads, repeats, tokens, self.width).permute(0, 3, 1, 2, 4)
        return out.reshape(rows * tokens, -1)


class _Shared(NamedTuple):
    """Rows cut in two: a prefix of row b is prefix ``source_B[b]``; the rest of the row follows it. [P, L] and [B, S]."""

    prefix_PL: Tensor
    prefix_length_P: Tensor
    source_B: Tensor
    rest_BS: Tensor


def split_prefixes(ids_BT: Tensor, length_B: Tensor, prefix_B: Tensor) -> _Shared:
    """Finds equal prefixes of the given lengths; without enough of them every row is a prefix and nothing is left."""
    prefixes: dict[tuple[int, ...], int] = {}
    rows = list(zip(ids_BT.tolist(), length_B.tolist(), prefix_B.tolist(), strict=True))
    source = [prefixes.setdefault(tuple(ids[:prefix]), len(prefixes)) for ids, _, prefix in rows]
    spared = sum(prefix for _, _, prefix in rows) - sum(map(len, prefixes))
    if spared < SHARE_FROM * sum(length for _, length, _ in rows):
        source_B = torch.arange(len(rows), device=ids_BT.device)
        return _Shared(ids_BT[:, : int(length_B.max())], length_B, source_B, ids_BT[:, :0])
    width = max(map(len, prefixes))
    padded = [[*prefix, *[0] * (width - len(prefix))] for prefix in prefixes]
    rest = int((length_B - prefix_B).max())
    columns_BS = prefix_B[:, None] + torch.arange(rest, device=ids_BT.device)
    rest_BS = ids_BT.gather(1, columns_BS.clamp(max=ids_BT.shape[1] - 1))
    return _Shared(ids_BT.new_tensor(padded), ids_BT.new_tensor(list(map(len, prefixes))), ids_BT.new_tensor(source), rest_BS)


def states_before(model: Any, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Last hidden states [N, D] from which the masked tokens are predicted, in row-major order; position 0 never counts.

    Rows are padded on the right. Nothing behind a row's last masked token is computed, and with fused weights the tokens
    before its first one are computed once for all rows that share them.
    """
    if not can_fuse(model):
        # Padding needs no attention mask: under causal attention nothing real sees what comes after it.
        return model.base_model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state[mask_BT[:, 1:].bool()]
    rows_N, before_N = mask_BT[:, 1:].nonzero(as_tuple=True)
    wanted_BT = mask_BT[:, 1:].int()
    # The state before column c + 1 is that of token c: the last one is needed, and all up to the first may be shared.
    length_B = (wanted_BT * torch.arange(1, ids_BT.shape[1], device=ids_BT.device)).amax(1).clamp(min=1)
    prefix_B = torch.minimum(wanted_BT.argmax(1) + 1, length_B)
    parts = split_prefixes(ids_BT, length_B, prefix_B)
    x_ND, epsilon, norm_D = _run(FusedModel(model, parts.prefix_PL.shape[1] + parts.rest_BS.shape[1]), parts)
    (prefixes, width), rest = parts.prefix_PL.shape, parts.rest_BS.shape[1]
    beyond_N = before_N - parts.prefix_length_P[parts.source_B[rows_N]]
    in_prefix_N = parts.source_B[rows_N] * width + before_N
    place_N = torch.where(beyond_N < 0, in_prefix_N, prefixes * width + rows_N * rest + beyond_N)
    return normalise(x_ND[place_N], epsilon) * norm_D


def _run(fused: FusedModel, parts: _Shared) -> tuple[Tensor, Tensor, Tensor]:
    """Residual stream after the last layer, [P * L + B * S, D], prefixes first; epsilon and weight of the last norm."""
    (prefixes, width), (rows, rest) = parts.prefix_PL.shape, parts.rest_BS.shape
    ids_N = torch.cat([parts.prefix_PL.flatten(), parts.rest_BS.flatten()])
    start_B11 = parts.prefix_length_P[parts.source_B][:, None, None]
    slots_L = torch.arange(width + rest, device=ids_N.device)
    positions_N = torch.cat([slots_L[:width].repeat(prefixes), (start_B11 + slots_L[:rest]).flatten()])
    rotation_N1D = fused.rotation_TD[positions_N][:, None]
    x_ND = nn.functional.embedding(ids_N, fused.embedding)
    zero = x_ND.new_zeros(())
    causal_TL = torch.where(slots_L[:width] > slots_L[:width, None], -torch.inf, zero)
    gap_B1L = (slots_L >= start_B11) & (slots_L < width)
    hidden_BSL = gap_B1L[: 1 if bool((start_B11 == width).all()) else rows] | (slots_L - width > slots_L[:rest, None])
    behind_BSL = torch.where(hidden_BSL, -torch.inf, zero)
    heads, kv_heads, count = fused.heads, fused.kv_heads, prefixes * width
    for layer in fused.layers:
        qk, values = fused.project(layer, x_ND, rotation_N1D)
        queries, keys = qk.split([heads, kv_heads], 1)
        query, key, value = (part[:count].view(prefixes, width, -1, fused.width) for part in (queries, keys, values))
        attended_ND = fused.attend(query, key, value, causal_TL[None, None])
        if rest:
            later = (part[count:].view(rows, rest, -1, fused.width) for part in (queries, keys, values))
            query, later_key, later_value = later
            key = torch.cat([key[parts.source_B], later_key], 1)
            value = torch.cat([value[parts.source_B], later_value], 1)
            attended_ND = torch.cat([attended_ND, fused.attend(query, key, value, behind_BSL[:, None])])
        x_ND = fused.finish(layer, x_ND, attended_ND)
    return x_ND, fused.epsilon, fused.norm_D
