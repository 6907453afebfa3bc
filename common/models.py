"""Tiny decoders built from a configuration: real Hugging Face models, small enough to pre-train on a laptop."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from common.seeding import generator

FOURIER_PERIODS = (2, 3, 4, 5, 7, 10, 13, 20, 40, 80, 200)


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a Qwen3-like decoder; ``max_length`` in tokens."""

    hidden: int = 96
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    feedforward: int = 192
    rope_base: float = 1000.0
    max_length: int = 1024
    tied: bool = False


def build_decoder(
    config: DecoderConfig, tokenizer: PreTrainedTokenizerBase, seed: int, numbers: Mapping[int, int] | None = None
) -> Qwen3ForCausalLM:
    """A randomly initialised model whose weights depend on ``seed`` alone.

    ``numbers`` maps token id to the integer the token writes; those rows of the input and output embeddings start with
    cosine and sine features of the integer (periods 2 to 200), the prior that lets a tiny model read arithmetic off few
    examples.
    """
    if config.hidden % config.heads or (config.hidden // config.heads) % 2:
        raise ValueError(f"model.hidden={config.hidden} must be an even multiple of model.heads={config.heads}")
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.hidden // config.heads,
            intermediate_size=config.feedforward,
            max_position_embeddings=config.max_length,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
            tie_word_embeddings=config.tied,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    stream = generator(seed, "model")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
            else:
                residual = 1 / math.sqrt(2 * config.layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                parameter.normal_(0.0, residual / math.sqrt(parameter.shape[1]), generator=stream)
        if numbers:
            for embedding in {model.get_input_embeddings(), model.get_output_embeddings()}:
                _write_fourier_features(embedding.weight, numbers)
    return model


def _write_fourier_features(weight_VD: torch.Tensor, numbers: Mapping[int, int]) -> None:
    ids = torch.tensor(list(numbers))
    angles = 2 * math.pi * torch.tensor(list(numbers.values()))[:, None] / torch.tensor(FOURIER_PERIODS)
    features = torch.cat([angles.cos(), angles.sin()], dim=1) / math.sqrt(2 * len(FOURIER_PERIODS))
    weight_VD[ids, : features.shape[1]] = features[:, : weight_VD.shape[1]]


def parameter_count(model: nn.Module) -> int:
    """All parameters of the model, embeddings included: the N of the cost model (6N FLOPs per trained token)."""
    return sum(parameter.numel() for parameter in model.parameters())
