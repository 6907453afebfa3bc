"""The policy: instruction, scene and placeholders through a small Qwen3 decoder, a chunk of actions out in parallel.

The shape is that of OpenVLA-OFT (Kim et al. 2025): action tokens are not written one after the other; placeholders at the
end of the input see everything, and each is read as the tokens of one control step. The tokens are then independent given
the input, so the log-probability of a chunk is the exact sum over its tokens.

The scene is a list of objects (name, place and distance to the gripper, each number also as a row of bumps one centimetre
apart), or with view=image a small picture from above in patches, beside the gripper's own place.

Shape suffixes: _N decisions, _L control steps, _A tokens of a control step, _V bins, _O objects, _D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel, Qwen3Config, Qwen3Model

from common.seeding import generator
from experiments.exp_7_13_simplevla.tasks import LENGTH, WORDS
from experiments.exp_7_13_simplevla.tokens import BINS, WIDTHS
from experiments.exp_7_13_simplevla.world import OBJECTS

ACTION = len(WIDTHS)
BUMPS = 24  # on either side of zero, a centimetre apart
PATCH = 8


class Inputs(NamedTuple):
    """Observations as tensors; `image` (N, 3, H, W) bytes, or None where the scene is a list."""

    words: Tensor
    names: Tensor
    places: Tensor
    opening: Tensor
    image: Tensor | None = None

    def take(self, rows: Tensor) -> Inputs:
        return Inputs(*(None if value is None else value[rows] for value in self))


class VlaConfig(PretrainedConfig):
    """Shape of the policy."""

    model_type = "simplevla_tabletop"
    attribute_map = {"hidden_size": "hidden"}  # noqa: RUF012 (transformers reads it so)

    def __init__(
        self,
        hidden: int = 64,
        layers: int = 2,
        heads: int = 4,
        feedforward: int = 128,
        chunk: int = 4,
        view: str = "state",
        pixels: int = 48,
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        self.hidden, self.layers, self.heads, self.feedforward = hidden, layers, heads, feedforward
        self.chunk, self.view, self.pixels = chunk, view, pixels


class VlaPolicy(PreTrainedModel):
    """Observation -> logits of the tokens of a chunk. `config.chunk` control steps."""

    config_class = VlaConfig

    def __init__(self, config: VlaConfig) -> None:
        super().__init__(config)
        width = config.hidden
        self.scene_tokens = OBJECTS if config.view == "state" else 1 + (config.pixels // PATCH) ** 2
        self.length = LENGTH + self.scene_tokens + config.chunk
        self.trunk = Qwen3Model(
            Qwen3Config(
                vocab_size=len(WORDS),
                hidden_size=width,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.heads,
                head_dim=width // config.heads,
                intermediate_size=config.feedforward,
                max_position_embeddings=self.length,
                rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
                use_cache=False,
            )
        )
        self.place = nn.Linear(3 * (2 * BUMPS + 1) + 4, width)
        self.patch = nn.Linear(3 * PATCH * PATCH, width) if config.view == "image" else None
        self.slot = nn.Parameter(torch.zeros(config.chunk, width))
        self.head = nn.Linear(width, ACTION * BINS)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Rotary tables, which are not saved, are worked out anew; weights are drawn by `build_policy`, from its seed."""
        if not list(module.parameters(recurse=False)):
            super()._init_weights(module)

    def objects(self, inputs: Inputs) -> Tensor:
        """Scene tokens of the list, (N, O, D)."""
        gap = inputs.places - inputs.places[:, :1]
        centres = torch.arange(-BUMPS, BUMPS + 1, device=gap.device)
        bumps = torch.exp(-0.5 * (gap[..., None] * 100 - centres) ** 2).flatten(2)
        opening = inputs.opening[:, None, None].expand(-1, gap.shape[1], 1)
        return self.place(torch.cat([bumps, inputs.places * 10, opening * 25 - 1], -1))

    def patches(self, image: Tensor) -> Tensor:
        """Scene tokens of the picture, (N, patches, D)."""
        pieces = image.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)  # (N, 3, rows, columns, PATCH, PATCH)
        flat = pieces.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return self.patch(flat / 127.5 - 1)

    def states(self, inputs: Inputs) -> Tensor:
        """Last hidden states of the placeholders, (N, L, D)."""
        table = self.trunk.get_input_embeddings()
        if self.patch is None:
            scene = self.objects(inputs) + table(inputs.names)
        else:
            own = Inputs(*(None if x is None else x[:, :1] for x in inputs[:3]), inputs.opening)
            scene = torch.cat([self.objects(own) + table(own.names), self.patches(inputs.image)], 1)
        slots = self.slot.expand(len(scene), -1, -1)
        embedded = torch.cat([table(inputs.words), scene, slots], 1)
        return self.trunk(inputs_embeds=embedded).last_hidden_state[:, -self.config.chunk :]

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Logits (N, L, A, V), -inf where a token has no such bin, and the placeholders' states (N, L, D)."""
        hidden = self.states(inputs)
        logits = self.head(hidden).unflatten(-1, (ACTION, BINS))
        forbidden = torch.arange(BINS, device=logits.device) >= torch.tensor(WIDTHS, device=logits.device)[:, None]
        return logits.masked_fill(forbidden, -torch.inf), hidden


AutoConfig.register(VlaConfig.model_type, VlaConfig)
AutoModel.register(VlaConfig, VlaPolicy)


def build_policy(config: VlaConfig, seed: int) -> VlaPolicy:
    """A policy whose weights depend on `seed` alone."""
    policy, stream = VlaPolicy(config), generator(seed, "policy")
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0 if "norm" in name else 0.0)
            else:
                scale = 0.5 if "embeddings" in name or name == "slot" else parameter.shape[1] ** -0.5
                parameter.normal_(0.0, scale, generator=stream)
    return policy.eval()


def log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature), (..., V)."""
    return torch.log_softmax(logits / temperature, -1)


@torch.no_grad()
def choose(policy: VlaPolicy, inputs: Inputs, temperature: float, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (N, L, A) and their log-probabilities at `temperature`; 0 takes the likeliest tokens, at temperature 1."""
    logp = log_probabilities(policy(inputs)[0], temperature or 1.0)
    if temperature == 0:
        tokens = logp.argmax(-1)
    else:
        flat = logp.exp().flatten(0, -2)
        tokens = torch.multinomial(flat, 1, generator=stream)[:, 0].view(logp.shape[:-1])
    return tokens, logp.gather(-1, tokens[..., None])[..., 0]
