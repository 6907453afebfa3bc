"""Supervised training: pre-training and SFT are this one loop, with a loss mask that says which tokens are targets.

Departures from usual practice: pre-training of tiny models may use Muon for matrices (Jordan et al. 2024) beside AdamW
for embeddings and norms; batches are a pure function of the step, so a killed run resumes at the exact next batch.

Variants of the loss (`SftConfig.variant`; formulas and sources in common/target_losses.py), and how they depart:
- dft: as published. importance (iw-SFT): the reference is the start policy, and there are no quality scores.
- entropy, kl, entropy_kl (EKSFT): the share to drop is taken over the whole batch, not per device, so that micro-batches
  change nothing. EKSFT's entropy bonus and KL penalty on the dropped tokens are left out.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from common.checkpoints import load_state, save_state
from common.compute import Budget, Meter
from common.config import ConfigError
from common.episodes import token_logprobs
from common.loop import evaluations_due, trainable
from common.losses import entropy_from_logprobs, sft_loss
from common.muon import Muon
from common.policy import make_reference, reference_mode, token_distributions
from common.runlog import RunLog
from common.schema import one_of, within
from common.target_losses import RATIO_LEVELS, SFT_VARIANTS, dft_weights, importance_weights, keep_lowest, kl_divergence
from common.vision import Images, meter_for

# (ids_BT, attention_BT, mask_BT): token ids, 1 on real tokens, 1 on targets.
SftBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# The same with what the rows show; None where they show nothing.
SeenBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Images | None]


@dataclass(frozen=True)
class SftConfig:
    """One supervised phase. ``decay_share``: last share of the budget, over which the rate falls linearly to ``floor``.

    ``micro_batch``: rows per forward pass (None: all); the gradient does not depend on it.

    ``variant``: nll (the mean negative log-likelihood), dft (each token weighted by its probability), importance (by the
    ratio of the policy to the reference, per ``ratio_level`` sequence or token, clipped to ``ratio_low``..``ratio_high``),
    entropy, kl, entropy_kl (without the ``drop_share`` of the targets where the policy's entropy, its KL from the
    reference, or either is highest).
    """

    lr: float = 1e-3
    optimizer: str = "adamw"
    muon_lr: float = 0.02
    batch_size: int = 64
    warmup_steps: int = 10
    decay_share: float = 0.0
    floor: float = 0.1
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    micro_batch: int | None = None
    variant: str = "nll"
    ratio_level: str = "sequence"
    ratio_low: float = 0.0
    ratio_high: float = 16.0
    drop_share: float = 0.2

    def __post_init__(self) -> None:
        if self.optimizer not in ("adamw", "muon"):
            raise ConfigError(f"optimizer={self.optimizer!r} is unknown; allowed: adamw, muon")
        if not 0 <= self.decay_share <= 1 or not 0 <= self.floor <= 1:
            raise ConfigError(f"decay_share={self.decay_share} and floor={self.floor} must lie in 0..1")
        one_of("sft.variant", self.variant, SFT_VARIANTS)
        one_of("sft.ratio_level", self.ratio_level, RATIO_LEVELS)
        within("sft.ratio_low", self.ratio_low, 0, self.ratio_high)
        within("sft.ratio_high", self.ratio_high, 0, above=True)
        within("sft.drop_share", self.drop_share, 0, 0.45 if self.variant == "entropy_kl" else 0.95)


def pad_rows(rows: list[tuple[list[int], list[int]]], pad_id: int) -> SftBatch:
    """Right-padded batch from (ids, mask) rows; attention comes from lengths, so pad may equal the end token.

    Raises ValueError where a row has no target, or targets only at position 0, which nothing precedes.
    """
    for index, (ids, mask) in enumerate(rows):
        if len(ids) != len(mask) or not any(mask[1:]):
            raise ValueError(
                f"row {index} holds {len(ids)} tokens and no target behind the first; drop it or lengthen the limit"
            )
    length = max(len(ids) for ids, _ in rows)
    ids_BT = torch.full((len(rows), length), pad_id)
    attention_BT, mask_BT = torch.zeros_like(ids_BT), torch.zeros_like(ids_BT)
    for row, (ids, mask) in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        mask_BT[row, : len(ids)] = torch.tensor(mask)
        attention_BT[row, : len(ids)] = 1
    return ids_BT, attention_BT, mask_BT


def make_optimizers(model: nn.Module, config: SftConfig) -> list[torch.optim.Optimizer]:
    """AdamW on everything that requires a gradient, or Muon on the matrices inside the layers and AdamW on the rest."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ConfigError("no parameter requires a gradient; load the adapter as trainable or unfreeze a layer")
    inner = [p for name, p in named if config.optimizer == "muon" and p.ndim == 2 and ".layers." in name]
    rest = [p for _, p in named if all(p is not matrix for matrix in inner)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay)
    ]
    if inner:
        optimizers.append(Muon(inner, lr=config.muon_lr, weight_decay=config.weight_decay))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def rate_factor(config: SftConfig, step: int, progress: float) -> float:
    """Share of the peak rate at this step: linear warm-up, flat, linear decay over the last ``decay_share`` of the budget."""
    warm = min(1.0, (step + 1) / max(1, config.warmup_steps))
    if config.decay_share == 0 or progress <= 1 - config.decay_share:
        return warm
    remaining = max(0.0, 1 - progress) / config.decay_share
    return warm * (config.floor + (1 - config.floor) * remaining)


def train_sft(
    model: nn.Module,
    batch_at: Callable[[int], SftBatch | SeenBatch],
    config: SftConfig,
    *,
    budget: Budget,
    log: RunLog,
    folder: Path,
    reference: nn.Module | None = None,
    evaluate: Callable[[int, int], None] | None = None,
    evaluate_every_flops: float | None = None,
    checkpoint_every: int = 200,
    log_every: int = 10,
) -> Meter:
    """Minimise the mean negative log-likelihood of the target tokens until the budget is used; returns the compute meter.

    ``batch_at(step)`` gives the batch of a step. ``evaluate(step, flops)`` is called whenever another ``evaluate_every_flops``
    are used. State lives in ``folder/state.pt``; the same call goes on from it. ``reference``: frozen model for the
    variants that compare with one; None takes the policy as it is given here (adapter off, or a copy).
    """
    reference = make_reference(model, reference, needed=config.variant in ("importance", "kl", "entropy_kl"))
    meter = meter_for(model)
    optimizers = make_optimizers(model, config)
    step, evaluations = _resume(folder / "state.pt", model, optimizers, meter, log)
    model.train()
    while not meter.exhausted(budget, step):
        started = time.perf_counter()
        device = next(model.parameters()).device
        *tensors, images = images_apart(batch_at(step))
        ids_BT, attention_BT, mask_BT = (tensor.to(device) for tensor in tensors)
        factor = rate_factor(config, step, meter.used(budget, step))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
            optimizer.zero_grad(set_to_none=True)
        batch = ids_BT, attention_BT, mask_BT, None if images is None else images.to(device)
        values = accumulate(model, reference, batch, config, meter)
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        tokens = int(attention_BT.sum())
        meter.add_train(tokens)
        if step % log_every == 0 or meter.exhausted(budget, step):
            rate = tokens / (time.perf_counter() - started)
            numbers = {name: value.item() for name, value in values.items()} | {"grad_norm": grad_norm.item()}
            numbers |= {"throughput/tokens_per_s": rate, "progress/step": step}
            log.metrics(step, numbers, progress=meter.used(budget, step))
        if evaluate is not None and evaluations_due(meter, evaluate_every_flops) > evaluations:
            evaluations = evaluations_due(meter, evaluate_every_flops)
            evaluate(step, meter.flops)
            model.train()
        if step % checkpoint_every == 0 or meter.exhausted(budget, step):
            _save(folder / "state.pt", model, optimizers, meter, step, evaluations)
            log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)
    model.eval()
    return meter


def accumulate(
    model: nn.Module, reference: nn.Module | None, batch: SftBatch | SeenBatch, config: SftConfig, meter: Meter
) -> dict[str, torch.Tensor]:
    """Adds the gradient of one batch, piece by piece; the loss, and for a variant the plain loss and the mean weight."""
    ids_BT, attention_BT, mask_BT, images = images_apart(batch)
    pieces = torch.arange(len(ids_BT), device=ids_BT.device).split(config.micro_batch or len(ids_BT))
    kept_BT, ref_logp_BT = mask_BT, None
    if config.variant not in ("nll", "dft"):
        kept_BT, ref_logp_BT = compare(model, reference, batch, pieces, config, meter)
    targets = kept_BT[:, 1:].sum()
    loss, plain, weight = torch.zeros(3, device=ids_BT.device)
    for part in pieces:
        seen = None if images is None else images.take(part)
        meter.add_images(0 if seen is None else len(seen.pixels_ICHW), train=True)
        logp_BT, _ = token_logprobs(model, ids_BT[part], attention_BT[part], mask_BT=kept_BT[part], images=seen)
        weight_BT = kept_BT[part]
        if config.variant == "dft":
            weight_BT = weight_BT * dft_weights(logp_BT)
        elif ref_logp_BT is not None:
            limits = config.ratio_level, config.ratio_low, config.ratio_high
            weight_BT = importance_weights(logp_BT, ref_logp_BT[part], weight_BT, *limits)
        part_loss = sft_loss(logp_BT, weight_BT, total_tokens=targets)
        part_loss.backward()
        loss += part_loss.detach()
        if config.variant != "nll":
            plain += sft_loss(logp_BT.detach(), kept_BT[part], total_tokens=targets)
            weight += weight_BT[:, 1:].sum() / mask_BT[:, 1:].sum()
    return {"loss/policy": loss} | ({} if config.variant == "nll" else {"loss/sft": plain, "sft/weight": weight})


def images_apart(batch: SftBatch | SeenBatch) -> SeenBatch:
    """(ids_BT, attention_BT, mask_BT, images), the last None where the rows show none."""
    return batch if len(batch) == 4 else (*batch, None)


@torch.no_grad()
def compare(
    model: nn.Module,
    reference: nn.Module | None,
    batch: SftBatch | SeenBatch,
    pieces: Sequence[torch.Tensor],
    config: SftConfig,
    meter: Meter,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The targets that stay (B, T) and, for importance weights alone, their log-probabilities under the reference (B, T).

    One pass of the policy, of the reference, or of both, which the meter counts.
    """
    ids_BT, attention_BT, mask_BT, images = images_apart(batch)
    mask_BT = mask_BT.bool() & attention_BT.bool()
    mask_BT[:, 0] = False
    ref_logp_BT, entropy_BT, kl_BT = torch.zeros(3, *ids_BT.shape, device=ids_BT.device)
    for part in pieces:
        ids, mask = ids_BT[part], mask_BT[part]
        seen = None if images is None else images.take(part)
        encoded = 0 if seen is None else len(seen.pixels_ICHW)
        if reference is not None:
            with reference_mode(model, reference):
                ref_NV, _ = token_distributions(reference, ids, mask, 1.0, seen)
            meter.add_forward(int(attention_BT[part].sum()))
            meter.add_images(encoded)
        if config.variant == "importance":
            ref_logp_BT[part] = ref_logp_BT[part].masked_scatter(mask, ref_NV.gather(1, ids[mask][:, None]))
            continue
        logp_NV, _ = token_distributions(model, ids, mask, 1.0, seen)
        meter.add_forward(int(attention_BT[part].sum()))
        meter.add_images(encoded)
        entropy_BT[part] = entropy_BT[part].masked_scatter(mask, entropy_from_logprobs(logp_NV))
        if reference is not None:
            kl_BT[part] = kl_BT[part].masked_scatter(mask, kl_divergence(logp_NV, ref_NV))
    if config.variant == "importance":
        return mask_BT, ref_logp_BT
    kept_BT = mask_BT
    for name, value_BT in {"entropy": entropy_BT, "kl": kl_BT}.items():
        if name in config.variant:
            kept_BT = kept_BT & keep_lowest(value_BT, mask_BT, config.drop_share)
    return kept_BT, None


def _save(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], meter: Meter, step: int, evaluations: int
) -> None:
    state = {
        "weights": {name: p.detach() for name, p in trainable(model).items()},
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "meter": meter.state_dict(),
    }
    save_state(path, {**state, "step": step, "evaluations": evaluations})


def _resume(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], meter: Meter, log: RunLog
) -> tuple[int, int]:
    """(finished steps, evaluations done) of the saved state, which is loaded; (0, 0) where there is none."""
    state = load_state(path)
    if state is None:
        log.resume(0)
        return 0, 0
    parameters = trainable(model)
    if parameters.keys() != state["weights"].keys():
        raise ValueError(f"{path} holds other parameters than the model; delete it or restore the settings")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state["weights"][name])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    meter.load_state_dict(state["meter"])
    log.resume(state["step"])
    return state["step"], state["evaluations"]
