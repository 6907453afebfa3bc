"""LoRA through PEFT, with the chapter's rules as defaults; full fine-tuning is the same call with ``enabled`` off."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from common.schema import ConfigError, one_of, within
from common.seeding import generator


@dataclass(frozen=True)
class LoraSettings:
    """``targets``: "all-linear" or module names. ``rate_factor``: learning rate as a multiple of full fine-tuning's.

    The chapter's rules: adapters on all linear layers, rank 8-32 for RL and 64-256 for SFT, about 10 times the rate.
    """

    enabled: bool = False
    sft_rank: int = 64
    rl_rank: int = 16
    alpha_over_rank: float = 2.0
    targets: str | list[str] = "all-linear"
    rate_factor: float = 10.0

    def __post_init__(self) -> None:
        within("lora.sft_rank", self.sft_rank, 1)
        within("lora.rl_rank", self.rl_rank, 1)
        within("lora.alpha_over_rank", self.alpha_over_rank, 0, above=True)
        within("lora.rate_factor", self.rate_factor, 0, above=True)


def add_adapter(model: nn.Module, settings: LoraSettings, purpose: str, seed: int) -> Any:
    """The model with a fresh trainable adapter for ``purpose`` ("sft" or "rl"), or the model itself if LoRA is off.

    The adapter's A matrices depend on ``seed`` alone; B starts at zero, so the function is unchanged at first.
    ConfigError where a named target matches no module.
    """
    one_of("purpose", purpose, ("sft", "rl"))
    if not settings.enabled:
        return model
    if not isinstance(settings.targets, str):
        names = [name for name, _ in model.named_modules()]
        unmatched = [target for target in settings.targets if not any(n == target or n.endswith(f".{target}") for n in names)]
        if unmatched:
            raise ConfigError(f"lora.targets={settings.targets}: {', '.join(unmatched)} matches no module of the model.")
    rank = settings.sft_rank if purpose == "sft" else settings.rl_rank
    config = LoraConfig(
        r=rank,
        lora_alpha=round(settings.alpha_over_rank * rank),
        target_modules=settings.targets,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config)
    stream = generator(seed, "lora")
    with torch.no_grad():
        for name, parameter in sorted(adapted.named_parameters()):
            if "lora_A" in name:
                bound = 1 / math.sqrt(parameter.shape[1])
                values = torch.rand(parameter.shape, generator=stream) * 2 * bound - bound
                parameter.copy_(values.to(parameter))
    if not any(parameter.requires_grad for parameter in adapted.parameters()):
        raise ConfigError("the adapter has no trainable parameter; check lora.targets.")
    return adapted


def learning_rate(full_rate: float, settings: LoraSettings) -> float:
    """The rate to use: that of full fine-tuning, times ``rate_factor`` where LoRA is on."""
    return full_rate * settings.rate_factor if settings.enabled else full_rate
