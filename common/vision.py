"""Policies that see: images beside rows of tokens, for models that read an image as a run of tokens (Llava, SmolVLM).

A row holds one image token per feature of its image; the vision encoder's features take the place of their embeddings,
and from there on the model is a decoder like any other. Each distinct image of a forward pass is encoded once, whatever
the number of rows that show it, so the members of a group share the work and their gradients add up in it.

Shape suffixes: _I distinct images, _B rows, _T tokens, _F features of an image, _D hidden width, _CHW colour, height, width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from common.compute import FORWARD_FLOPS, TRAIN_FLOPS, Meter
from common.models import parameter_count
from common.seeding import generator

IMAGE = "<image>"  # where the image stands in a text; one token of the tokenizer
# Where Llava, SmolVLM and Idefics3 keep what turns an image into embeddings: the encoder, and what joins it to the decoder.
ENCODERS, PROJECTORS = ("vision_tower.", "vision_model."), ("multi_modal_projector.", "connector.")
IN_THE_SEQUENCE = ("llava", "smolvlm", "idefics3")


@dataclass(frozen=True)
class VisionConfig:
    """Shape of a SigLIP-like encoder of square images; ``image_size`` and ``patch_size`` in pixels."""

    image_size: int = 48
    patch_size: int = 12
    hidden: int = 64
    layers: int = 3
    heads: int = 2
    feedforward: int = 192

    @property
    def tokens(self) -> int:
        """Tokens that one image takes in a row."""
        return (self.image_size // self.patch_size) ** 2


class Images(NamedTuple):
    """Distinct images (I, 3, height, width), uint8, and the one that each row shows (B,)."""

    pixels_ICHW: Tensor
    index_B: Tensor

    def take(self, rows: Tensor) -> Images:
        """The images of some rows; those that none of them shows are left out."""
        used_I, index_B = torch.unique(self.index_B[rows], return_inverse=True)
        return Images(self.pixels_ICHW[used_I], index_B)

    def to(self, device: torch.device | str) -> Images:
        return Images(self.pixels_ICHW.to(device), self.index_B.to(device))


def stack(images: Sequence[np.ndarray]) -> Images:
    """One image per row, each (height, width, 3) uint8 and all of one size; equal images are kept once."""
    known: dict[bytes, int] = {}
    index = [known.setdefault(image.tobytes(), len(known)) for image in images]
    distinct = [images[index.index(number)] for number in range(len(known))]
    pixels_ICHW = torch.from_numpy(np.stack(distinct)).permute(0, 3, 1, 2).contiguous()
    return Images(pixels_ICHW, torch.tensor(index))


def image_tokens(model: Any) -> int:
    """Tokens that one image takes in a row. ValueError for a model that reads images in another way."""
    config = model.config
    if config.model_type not in IN_THE_SEQUENCE:
        raise ValueError(
            f"{config.model_type} does not read an image as tokens of the row, or is not known here; "
            f"allowed: {', '.join(IN_THE_SEQUENCE)}"
        )
    side = config.vision_config.image_size // config.vision_config.patch_size
    return (side // getattr(config, "scale_factor", 1)) ** 2


def expand(ids: Sequence[int], token: int, count: int) -> list[int]:
    """Token ids with the one image ``token`` repeated ``count`` times; ValueError unless there is exactly one."""
    if list(ids).count(token) != 1:
        raise ValueError(f"a prompt with an image needs {IMAGE} exactly once; it has it {list(ids).count(token)} times")
    place = list(ids).index(token)
    return [*ids[:place], *[token] * count, *ids[place + 1 :]]


def features(network: Any, pixels_ICHW: Tensor) -> Tensor:
    """What the decoder sees of each image, (I, F, D); pixels 0..255 are scaled to -1..1 and to the encoder's size."""
    config = network.config
    pixels = pixels_ICHW.to(network.device, network.dtype) / 127.5 - 1
    size = config.vision_config.image_size
    if pixels.shape[-1] != size or pixels.shape[-2] != size:
        pixels = nn.functional.interpolate(pixels, (size, size), mode="bilinear", antialias=True)
    if config.model_type != "llava":
        pixels = pixels[:, None]  # one image per row
    return torch.stack(list(network.base_model.get_image_features(pixel_values=pixels).pooler_output))


def embed(network: Any, ids_BT: Tensor, images: Images) -> Tensor:
    """Embeddings of the rows (B, T, D), the images' features in place of each row's first image tokens.

    An image token that the policy wrote itself stands behind them and keeps its own embedding, as when it was sampled.
    ValueError where a row has fewer image tokens than its image has features.
    """
    embeds_BTD = network.get_input_embeddings()(ids_BT)
    seen_IFD = features(network, images.pixels_ICHW)
    image_BT = ids_BT == network.config.image_token_id
    if bool((image_BT.sum(1) < seen_IFD.shape[1]).any()):
        raise ValueError(f"rows hold {image_BT.sum(1).unique().tolist()} image tokens, an image has {seen_IFD.shape[1]}")
    image_BT &= image_BT.cumsum(1) <= seen_IFD.shape[1]
    return embeds_BTD.masked_scatter(image_BT[..., None], seen_IFD[images.index_B])


def meter_for(model: nn.Module) -> Meter:
    """A meter of the model's compute: 2N and 6N per token for the decoder, and the same per patch for what encodes images.

    A part of which no weight is trained costs 2N per patch in training too: nothing flows back into it.
    """
    encoder, projector = (_weights(model, prefixes) for prefixes in (ENCODERS, PROJECTORS))
    if not encoder:
        return Meter(parameter_count(model))
    forward = trained = 0
    for part in (encoder, projector):
        count = sum(p.numel() for p in part)
        forward += FORWARD_FLOPS * count
        trained += (TRAIN_FLOPS if any(p.requires_grad for p in part) else FORWARD_FLOPS) * count
    config: Any = model.config
    vision = config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    own = parameter_count(model) - sum(p.numel() for p in [*encoder, *projector])
    return Meter(own, image_flops=(forward * patches, trained * patches))


def freeze_encoder(model: nn.Module) -> None:
    """Takes the vision encoder out of training; its projector and the decoder stay trainable."""
    for parameter in _weights(model, ENCODERS):
        parameter.requires_grad_(False)


def _weights(model: nn.Module, prefixes: tuple[str, ...]) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if any(prefix in name for prefix in prefixes)]


def add_eyes(decoder: Any, config: VisionConfig, image_token_id: int, seed: int) -> Any:
    """A Llava-like model around a trained Qwen3-like decoder: same decoder weights, a vision encoder that knows nothing yet."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration, SiglipVisionConfig

    if config.image_size % config.patch_size or config.hidden % config.heads:
        raise ValueError(f"vision: image_size must be a multiple of patch_size, hidden of heads; got {asdict(config)}")
    eyes: dict[str, Any] = {
        "hidden_size": config.hidden,
        "intermediate_size": config.feedforward,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "vision_use_head": False,
    }
    ends = {name: getattr(decoder.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=SiglipVisionConfig(**eyes),
            text_config=decoder.config,
            image_token_index=image_token_id,
            image_seq_length=config.tokens,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
            tie_word_embeddings=decoder.config.tie_word_embeddings,
            **ends,
        )
    )
    stream = generator(seed, "eyes")
    with torch.no_grad():
        for part in (model.model.vision_tower, model.model.multi_modal_projector):
            for name, parameter in part.named_parameters():
                if parameter.ndim < 2:
                    parameter.fill_(1.0 if name.endswith("weight") else 0.0)
                else:
                    parameter.normal_(0.0, parameter[0].numel() ** -0.5, generator=stream)
    model.model.language_model.load_state_dict(decoder.model.state_dict())
    model.lm_head.load_state_dict(decoder.lm_head.state_dict())
    return model
