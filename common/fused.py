"""Llama- and Qwen3-like models through fused weights: the same function and the same gradients in fewer operations.

A model of less than some ten million parameters spends most of its time outside matrix products. Here the projections of
a layer are joined, norm weights and LoRA updates are folded into them, and what lies between the products is compiled
(common.kernels). Rows are packed without padding, and the prompt that the members of a group share is computed once.
The model's own parameters stay the only ones: fused weights are made from them for each call and pass gradients back to
them.

Shape suffixes: _B rows, _T tokens, _N packed tokens, _S segments, _D width, _H heads, _W width of a head, _X queries,
keys and values side by side.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlavaForConditionalGeneration, Qwen3ForCausalLM

from common import kernels
from common.vision import ENCODERS, Images, embed, features

# Fused weights are a copy of the model, made anew for every call; beyond this size the copy costs more than it saves.
FUSED_PARAMETERS = 20_000_000


def can_fuse(model: Any) -> bool:
    """Whether the fused weights compute the same function as this model's own forward, in its present mode."""
    if type(model) not in (Qwen3ForCausalLM, LlamaForCausalLM, LlavaForConditionalGeneration):
        return False
    config, trunk = model.config.get_text_config(), trunk_of(model)
    if config.model_type not in ("qwen3", "llama") or model.num_parameters() > FUSED_PARAMETERS:
        return False
    if model.device.type != "cpu" or model.dtype != torch.float32 or type(trunk.embed_tokens) is not nn.Embedding:
        return False
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    if config.hidden_act != "silu" or sliding or config.rope_parameters["rope_type"] not in ("default", "linear"):
        return False
    if model.training and (config.attention_dropout > 0 or model.is_gradient_checkpointing):
        return False
    hooked = [name for name, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks]
    if not all(
        any(part in name for part in ENCODERS) for name in hooked
    ):  # an encoder is run by its own forward, hooks and all
        return False
    linears = [module for layer in trunk.layers for module in (*layer.self_attn.children(), *layer.mlp.children())]
    matrices = [module for module in linears if getattr(module, "weight", None) is not None and module.weight.ndim == 2]
    return type(model.lm_head) is nn.Linear and is_plain(model.lm_head) and all(map(is_plain, matrices))


def trunk_of(model: Any) -> Any:
    """Embedding, layers and last norm: those of the decoder in a model that sees."""
    return getattr(model.model, "language_model", model.model)


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


class FusedLayer:
    """The weights of one layer, (outputs, inputs), with norm weights and constant factors folded in."""

    def __init__(self, layer: Any, heads: int, kv_heads: int, width: int) -> None:
        attention, mlp, scale = layer.self_attn, layer.mlp, width**-0.5
        query, key = effective_weight(attention.q_proj), effective_weight(attention.k_proj)
        hidden = query.shape[1]
        self.normed = hasattr(attention, "q_norm")
        self.norm_HW = query.new_ones(heads + kv_heads, width)
        if self.normed:
            norms = ((attention.q_norm.weight * scale, heads), (attention.k_norm.weight, kv_heads))
            self.norm_HW = torch.cat([weight.expand(count, width) for weight, count in norms]) * width**0.5
        else:
            query = query * scale
        before_attention = layer.input_layernorm.weight * hidden**0.5
        before_mlp = layer.post_attention_layernorm.weight * hidden**0.5
        self.qkv = torch.cat([query, key, effective_weight(attention.v_proj)]) * before_attention
        self.out = effective_weight(attention.o_proj)
        self.gate_up = torch.cat([effective_weight(mlp.gate_proj), effective_weight(mlp.up_proj)]) * before_mlp
        self.down = effective_weight(mlp.down_proj)


def array(x: Tensor) -> np.ndarray:
    """The tensor's numbers as the compiled loops read them; shares memory with a contiguous tensor."""
    return x.detach().contiguous().numpy()


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, epsilon: float) -> Tensor:
        y_ND, inverse_N = torch.empty_like(x_ND), x_ND.new_empty(len(x_ND))
        kernels.normalise(array(x_ND), np.float32(epsilon), array(y_ND), array(inverse_N))
        ctx.save_for_backward(y_ND, inverse_N)
        return y_ND

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        y_ND, inverse_N = ctx.saved_tensors
        out_ND = torch.empty_like(y_ND)
        kernels.normalise_back(array(gradients[0]), array(y_ND), array(inverse_N), array(out_ND))
        return out_ND, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both_NX: Tensor) -> Tensor:
        out_ND = both_NX.new_empty(len(both_NX), both_NX.shape[1] // 2)
        kernels.gate(array(both_NX), array(out_ND))
        ctx.save_for_backward(both_NX)
        return out_ND

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (both_NX,) = ctx.saved_tensors
        out_NX = torch.empty_like(both_NX)
        kernels.gate_back(array(gradients[0]), array(both_NX), array(out_NX))
        return out_NX


class _Attend(torch.autograd.Function):
    """Norm and rotation of queries and keys, then attention; also returns the rotated rows, which have no gradient."""

    @staticmethod
    def forward(
        ctx: Any, qkv_NX: Tensor, norm_HW: Tensor, rows: "Rows", rotary: "Rotary", kv_heads: int
    ) -> tuple[Tensor, Tensor]:
        width = norm_HW.shape[1]
        rotated_NX = qkv_NX.clone()
        kernels.rotate(array(rotated_NX), array(norm_HW), *rotary.at(rows.position_N))
        out_ND = qkv_NX.new_empty(len(qkv_NX), (norm_HW.shape[0] - kv_heads) * width)
        kernels.attend(array(rotated_NX), kv_heads, width, rows.segment_S4, array(out_ND))
        ctx.save_for_backward(qkv_NX, rotated_NX, norm_HW)
        ctx.constants = rows, rotary, kv_heads
        ctx.mark_non_differentiable(rotated_NX)
        return out_ND, rotated_NX

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        qkv_NX, rotated_NX, norm_HW = ctx.saved_tensors
        rows, rotary, kv_heads = ctx.constants
        out_NX, norm_out_HW = torch.zeros_like(qkv_NX), torch.zeros_like(norm_HW)
        kernels.attend_back(array(gradients[0]), array(rotated_NX), kv_heads, norm_HW.shape[1], rows.segment_S4, array(out_NX))
        kernels.rotate_back(array(out_NX), array(qkv_NX), array(norm_out_HW), array(norm_HW), *rotary.at(rows.position_N))
        return out_NX, norm_out_HW, None, None, None


class Rotary(NamedTuple):
    """Cosines and sines (positions, width / 2), and the epsilon of the norm before the rotation, negative without one."""

    cosine_TF: np.ndarray
    sine_TF: np.ndarray
    epsilon: np.float32

    def at(self, position_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.float32]:
        """The arguments of kernels.rotate for rows at these positions."""
        return self.cosine_TF, self.sine_TF, position_N, self.epsilon


class FusedModel:
    """Fused weights of a model and the steps of its layers; rotations for ``positions`` positions."""

    def __init__(self, model: Any, positions: int) -> None:
        config, trunk = model.config.get_text_config(), trunk_of(model)
        hidden = config.hidden_size
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.width = getattr(config, "head_dim", None) or hidden // self.heads
        self.embedding = trunk.embed_tokens.weight
        # A sampled padding token trains its embedding in text models, on which committed results rest, and not in others.
        self.padding = None if trunk is model.model else trunk.embed_tokens.padding_idx
        self.layers = [FusedLayer(layer, self.heads, self.kv_heads, self.width) for layer in trunk.layers]
        self.norm_D = trunk.norm.weight * hidden**0.5
        self.head = model.lm_head.weight
        self.epsilon = config.rms_norm_eps * hidden
        cosine, sine = trunk.rotary_emb(self.embedding, torch.arange(positions)[None])
        half = self.width // 2
        epsilon = config.rms_norm_eps * self.width if self.layers[0].normed else -1.0
        self.rotary = Rotary(array(cosine[0, :, :half]), array(sine[0, :, :half]), np.float32(epsilon))

    def project(self, layer: FusedLayer, x_ND: Tensor) -> Tensor:
        """Queries, keys and values side by side, (N, X), before norm and rotation."""
        return nn.functional.linear(_Normalise.apply(x_ND, self.epsilon), layer.qkv)

    def finish(self, layer: FusedLayer, x_ND: Tensor, attended_ND: Tensor) -> Tensor:
        """The layer's output from the residual stream before attention and what the heads attended to."""
        x_ND = torch.addmm(x_ND, attended_ND, layer.out.T)
        both_NX = nn.functional.linear(_Normalise.apply(x_ND, self.epsilon), layer.gate_up)
        return torch.addmm(x_ND, _Gate.apply(both_NX), layer.down.T)

    def run(self, rows: "Rows", shown: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        """Residual stream after the last layer (N, D), and each layer's rotated queries, keys and values (N, X).

        ``shown``: packed tokens that an image stands for, and its features in their place (see `show`).
        """
        x_ND = nn.functional.embedding(torch.from_numpy(rows.ids_N), self.embedding, self.padding)
        if shown is not None:
            x_ND = x_ND.index_copy(0, *shown)
        kept = []
        for layer in self.layers:
            attended_ND, rotated_NX = _Attend.apply(self.project(layer, x_ND), layer.norm_HW, rows, self.rotary, self.kv_heads)
            kept.append(rotated_NX)
            x_ND = self.finish(layer, x_ND, attended_ND)
        return x_ND, kept

    def last_norm(self, x_ND: Tensor) -> Tensor:
        """What the output layer reads, less the weight of the last norm (norm_D)."""
        return _Normalise.apply(x_ND, self.epsilon)


class Rows(NamedTuple):
    """Rows without padding, one behind the other; a prefix that several rows share stands there once.

    segment_S4: first packed token and length of a piece, first packed token and length of the prefix before it.
    prefix_B, rest_B: where the prefix and the rest of each row begin; prefix_length_B: tokens of its prefix.
    """

    ids_N: np.ndarray
    position_N: np.ndarray
    segment_S4: np.ndarray
    prefix_B: np.ndarray
    prefix_length_B: np.ndarray
    rest_B: np.ndarray


def pack(rows: Sequence[Sequence[int]], prefix_lengths: Sequence[int], images: Sequence[int] | None = None) -> Rows:
    """Packs rows whose first ``prefix_lengths`` tokens are computed once where they are equal and show the same image."""
    ids: list[int] = []
    positions: list[int] = []
    segments: list[tuple[int, int, int, int]] = []
    prefixes: dict[tuple[int, tuple[int, ...]], int] = {}
    places = []
    for row, length, image in zip(rows, prefix_lengths, images or [0] * len(rows), strict=True):
        prefix = tuple(row[:length])
        if (image, prefix) not in prefixes:
            prefixes[image, prefix] = len(ids)
            segments.append((len(ids), length, 0, 0))
            ids += prefix
            positions += range(length)
        first = prefixes[image, prefix]
        places.append((first, length, len(ids)))
        if len(row) > length:
            segments.append((len(ids), len(row) - length, first, length))
            ids += row[length:]
            positions += range(length, len(row))
    return Rows(np.array(ids), np.array(positions), np.array(segments), *np.array(places).T)


def show(model: Any, rows: Rows, ids: Sequence[Sequence[int]], lengths: Sequence[int], images: Images) -> tuple[Tensor, Tensor]:
    """Packed tokens that the images stand for (K,), the first image tokens of each row, and the features there (K, D).

    Only the first ``lengths`` tokens of ``ids`` were packed. ValueError where a row has fewer image tokens than its image
    has features.
    """
    seen_IFD = features(model, images.pixels_ICHW)
    starts = zip(rows.prefix_B.tolist(), rows.prefix_length_B.tolist(), rows.rest_B.tolist(), strict=True)
    found: dict[int, tuple[int, int]] = {}  # packed token -> image and feature; rows that share a prefix agree on it
    for row, length, (first, shared, rest), image in zip(ids, lengths, starts, images.index_B.tolist(), strict=True):
        places = np.flatnonzero(np.array(row) == model.config.image_token_id)[: seen_IFD.shape[1]]
        if len(places) < seen_IFD.shape[1]:
            raise ValueError(f"a row holds {len(places)} image tokens, an image has {seen_IFD.shape[1]}")
        for feature, place in enumerate(places[places < length].tolist()):
            found[first + place if place < shared else rest + place - shared] = image, feature
    image_K, feature_K = torch.tensor(list(found.values()), dtype=torch.long).reshape(-1, 2).T
    return torch.tensor(list(found), dtype=torch.long), seen_IFD[image_K, feature_K]


def states_before(model: Any, ids_BT: Tensor, mask_BT: Tensor, images: Images | None = None) -> Tensor:
    """Last hidden states [N, D] from which the masked tokens are predicted, in row-major order; position 0 never counts.

    Rows are padded on the right. Nothing behind a row's last masked token is computed, and with fused weights the tokens
    before its first one are computed once for all rows that share them. ``images``: what the rows show.
    """
    if not can_fuse(model):
        # Padding needs no attention mask: under causal attention nothing real sees what comes after it.
        before = ids_BT[:, :-1]
        given = {"input_ids": before} if images is None else {"inputs_embeds": embed(model, before, images)}
        return model.base_model(**given, use_cache=False).last_hidden_state[mask_BT[:, 1:].bool()]
    wanted_BT = mask_BT[:, 1:].int()
    # The state before column c + 1 is that of token c: the last one is needed, and all up to the first may be shared.
    length_B = (wanted_BT * torch.arange(1, ids_BT.shape[1])).amax(1).clamp(min=1)
    prefix_B = torch.minimum(wanted_BT.argmax(1) + 1, length_B)
    whole, lengths = ids_BT.tolist(), length_B.tolist()
    begun = [ids[:length] for ids, length in zip(whole, lengths, strict=True)]
    rows = pack(begun, prefix_B.tolist(), None if images is None else images.index_B.tolist())
    fused = FusedModel(model, int(length_B.max()))
    x_ND, _ = fused.run(rows, None if images is None else show(model, rows, whole, lengths, images))
    row_N, before_N = (index.numpy() for index in wanted_BT.nonzero(as_tuple=True))
    beyond_N = before_N - rows.prefix_length_B[row_N]
    place_N = np.where(beyond_N < 0, rows.prefix_B[row_N] + before_N, rows.rest_B[row_N] + beyond_N)
    return fused.last_norm(x_ND[torch.from_numpy(place_N)]) * fused.norm_D
