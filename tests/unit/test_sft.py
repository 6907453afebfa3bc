"""The supervised loop: masks, batches, rates, variants of the loss, and going on after a kill."""

import dataclasses
import math

import pytest
import torch

from common import sft, target_losses
from common.compute import Budget, Meter
from common.config import ConfigError
from common.files import read_json_lines
from common.lora import LoraSettings, add_adapter
from common.models import DecoderConfig, build_decoder, parameter_count
from common.runlog import RunLog
from common.seeding import generator
from common.sft import SftConfig, make_optimizers, pad_rows, rate_factor, train_sft
from common.tokenizers import build_phrase_tokenizer

TINY = DecoderConfig(hidden=16, layers=1, heads=2, kv_heads=2, feedforward=32, max_length=64)
LABELS = {"experiment": "t", "scale": "smoke", "variant": None, "arm": "a", "seed": 0}


VARIANTS = target_losses.SFT_VARIANTS


def build_model(seed=0):
    return build_decoder(TINY, build_phrase_tokenizer([str(n) for n in range(12)]), seed)


@pytest.fixture
def model():
    return build_model()


def copy_batch(step):
    """Rows `a b a b`: the second half is the target."""
    pairs = torch.randint(4, 16, (8, 2), generator=generator(0, "copy", step)).tolist()
    return pad_rows([([1, a, b, a, b], [0, 0, 0, 1, 1]) for a, b in pairs], pad_id=0)


def train(model, folder, steps, config=None):
    with RunLog(folder, LABELS, quiet=True) as log:
        return train_sft(
            model, copy_batch, config or SftConfig(lr=1e-2), budget=Budget(steps=steps), log=log, folder=folder,
            checkpoint_every=5, log_every=1,
        )  # fmt: skip


def test_T03_masks_come_from_lengths_not_from_ids():
    ids, attention, mask = pad_rows([([5, 6, 0], [0, 1, 1]), ([7, 0], [0, 1])], pad_id=0)
    assert attention.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert mask.tolist() == [[0, 1, 1], [0, 1, 0]]
    assert ids.tolist() == [[5, 6, 0], [7, 0, 0]]


@pytest.mark.parametrize("row", [([1, 2], [0, 0]), ([1, 2], [1, 0]), ([1], [0, 1])])
def test_T06_a_row_without_a_target_is_refused(row):
    with pytest.raises(ValueError, match="row 0"):
        pad_rows([row], pad_id=0)


def test_L09_L11_the_gradient_does_not_depend_on_micro_batches(tmp_path, model):
    weights = []
    for index, micro in enumerate((None, 1, 3, 8)):
        fresh = build_decoder(TINY, build_phrase_tokenizer([str(n) for n in range(12)]), 0)
        rows = [([1, 5, 6, 7], [0, 1, 1, 1]), ([1, 8], [0, 1]), *[([1, 9, 4], [0, 0, 1])] * 6]
        with RunLog(tmp_path / str(index), LABELS, quiet=True) as log:
            train_sft(
                fresh, lambda _, rows=rows: pad_rows(rows, 0), SftConfig(lr=0.0, micro_batch=micro, grad_clip=1e9),
                budget=Budget(steps=1), log=log, folder=tmp_path / str(index),
            )  # fmt: skip
        weights.append(torch.cat([p.grad.flatten() for p in fresh.parameters()]))
    for other in weights[1:]:
        assert torch.allclose(weights[0], other, atol=1e-6)
    assert weights[0].abs().max() > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_learns_to_copy(variant, tmp_path, model):
    # Twelve numbers: chance is below 0.09. A fifth of the targets less each step (entropy_kl: two) slows it a little.
    train(model, tmp_path, 150, SftConfig(lr=1e-2, variant=variant))
    ids, _, _ = copy_batch(10_000)
    with torch.no_grad():
        guess = model(ids).logits[:, 2:4].argmax(-1)
    assert (guess == ids[:, 3:]).float().mean() > 0.9


@pytest.mark.parametrize("variant", ["nll", "importance", "entropy_kl"])
def test_a_resumed_run_ends_with_the_same_weights(variant, tmp_path):
    config = SftConfig(lr=1e-2, optimizer="muon", decay_share=0.5, variant=variant)
    whole, first, second = build_model(), build_model(), build_model()
    train(whole, tmp_path / "whole", 12, config)

    class Killed(Exception):
        pass

    def killing_batch(step):
        if step == 8:
            raise Killed
        return copy_batch(step)

    with pytest.raises(Killed), RunLog(tmp_path / "part", LABELS, quiet=True) as log:
        train_sft(
            first, killing_batch, config, budget=Budget(steps=12), log=log, folder=tmp_path / "part",
            checkpoint_every=5, log_every=1,
        )  # fmt: skip
    train(second, tmp_path / "part", 12, config)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


def test_A06_nothing_to_train_is_an_error(model):
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="requires a gradient"):
        make_optimizers(model, SftConfig())


def test_the_rate_warms_up_stays_and_decays():
    config = SftConfig(warmup_steps=4, decay_share=0.5, floor=0.2)
    assert rate_factor(config, 0, 0.0) == 0.25
    assert rate_factor(config, 10, 0.5) == 1.0
    assert rate_factor(config, 10, 0.75) == pytest.approx(0.6)
    assert rate_factor(config, 10, 1.0) == pytest.approx(0.2)


def test_unknown_optimizer_names_what_is_allowed():
    with pytest.raises(ConfigError, match="adamw, muon"):
        SftConfig(optimizer="sgd")


def test_weights_of_targets_equal_the_values_worked_out_by_hand():
    logp = torch.tensor([[0.5, 0.25, 0.1], [0.2, 0.9, 0.9]]).log().requires_grad_()
    ref = torch.tensor([[0.25, 0.25, 0.9], [0.1, 0.9, 0.9]]).log()
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    dft = target_losses.dft_weights(logp)
    assert not dft.requires_grad
    assert torch.allclose(dft, torch.tensor([[0.5, 0.25, 0.1], [0.2, 0.9, 0.9]]))
    token = target_losses.importance_weights(logp, ref, mask, "token", 0.2, 1.8)
    assert not token.requires_grad
    assert torch.allclose(token, torch.tensor([[1.8, 1.0, 0], [1.8, 0, 0]]))
    sequence = target_losses.importance_weights(logp, ref, mask)
    assert torch.allclose(sequence, torch.tensor([[math.sqrt(2), math.sqrt(2), 0], [2.0, 0, 0]]))
    clipped = target_losses.importance_weights(logp, ref, mask, "sequence", 1.5, 1.8)
    assert torch.allclose(clipped, torch.tensor([[1.5, 1.5, 0], [1.8, 0, 0]]))
    with pytest.raises(ValueError, match="ratio_level='word'"):
        target_losses.importance_weights(logp, ref, mask, "word")


def test_the_highest_share_is_dropped_and_ties_stay():
    value = torch.tensor([[3.0, 0.0, 1.0], [2.0, 5.0, 4.0]])
    mask = torch.tensor([[1, 0, 1], [1, 1, 1]])
    assert target_losses.keep_lowest(value, mask, 0.4).int().tolist() == [[1, 0, 1], [1, 0, 0]]
    assert target_losses.keep_lowest(value, mask, 0.39).int().tolist() == [[1, 0, 1], [1, 0, 1]]
    assert target_losses.keep_lowest(value, mask, 0.0).int().tolist() == mask.tolist()
    assert target_losses.keep_lowest(torch.zeros(2, 3), mask, 0.6).int().tolist() == mask.tolist()


def expected_loss(variant, model, reference, ids, mask):
    """The variant's loss from full logits, written out with plain tensor operations."""
    logp, ref = (m(ids).logits.log_softmax(-1)[:, :-1] for m in (model, reference))
    p, wanted = logp.detach().exp(), mask[:, 1:].bool()
    own, own_ref = (x.gather(2, ids[:, 1:, None])[..., 0] for x in (logp, ref))
    entropy, kl = -(p * logp).sum(-1), (p * (logp - ref)).sum(-1)
    drop = int(0.3 * int(wanted.sum()))
    kept = wanted.clone()
    for name, value in {"entropy": entropy, "kl": kl}.items():
        if name in variant:
            highest = value.detach().masked_fill(~wanted, -1).flatten().topk(drop).indices
            kept.view(-1)[highest] = False
    weight = torch.ones_like(own)
    if variant == "dft":
        weight = own.detach().exp()
    if variant == "importance":
        ratio = torch.where(wanted, own.detach() - own_ref, 0.0).sum(1) / wanted.sum(1)
        weight = ratio.exp().clamp(0.9, 1.1)[:, None].expand_as(own)
    return -(weight * own)[kept].sum() / kept.sum(), -own[kept].mean(), (weight * kept).sum() / wanted.sum()


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_L01_L09_every_variant_has_the_gradient_of_its_formula_in_any_pieces(variant, micro_batch):
    model, reference = build_model(), build_model(3).requires_grad_(False)  # KL either way ranks the tokens differently
    rows = [([1, 5, 6, 7, 9], [0, 0, 1, 1, 1]), ([1, 8, 4], [0, 1, 1]), ([1, 9, 4, 5], [0, 0, 1, 1]), ([1, 6, 6], [0, 1, 1])]
    batch = pad_rows(rows, 0)
    config = SftConfig(variant=variant, micro_batch=micro_batch, drop_share=0.3, ratio_low=0.9, ratio_high=1.1)
    loss, plain, weight = expected_loss(variant, model, reference, batch[0], batch[2])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    meter = Meter(parameter_count(model))
    values = sft.accumulate(model, reference if "nll" not in variant else None, batch, config, meter)
    assert values["loss/policy"].item() == pytest.approx(loss.item(), abs=1e-5)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)
    if variant == "nll":
        assert values.keys() == {"loss/policy"}
    else:
        assert values["loss/sft"].item() == pytest.approx(plain.item(), abs=1e-5)
        assert values["sft/weight"].item() == pytest.approx(weight.item(), abs=1e-5)
    # Each extra pass, of the reference or of the policy, costs the batch's 15 tokens.
    passes = {"nll": 0, "dft": 0, "importance": 1, "entropy": 2, "kl": 2, "entropy_kl": 2}
    assert meter.tokens_forward == 15 * passes[variant]


def test_the_reference_is_the_policy_at_the_start(tmp_path):
    """So the first step of importance is that of nll, kl drops nothing then, and both change later."""
    finals = {}
    for variant in ("nll", "importance", "kl"):
        model = build_model()
        train(model, tmp_path / variant, 3, SftConfig(lr=1e-2, variant=variant, warmup_steps=1))
        rows = read_json_lines(tmp_path / variant / "metrics.jsonl")
        finals[variant] = rows
    assert finals["importance"][0]["loss/policy"] == pytest.approx(finals["nll"][0]["loss/policy"], abs=1e-6)
    assert finals["importance"][0]["sft/weight"] == pytest.approx(1.0, abs=1e-6)
    assert finals["importance"][2]["sft/weight"] > 1.05
    assert finals["kl"][0]["sft/weight"] == 1.0
    assert finals["kl"][2]["sft/weight"] == pytest.approx(13 / 16)
    adapted = add_adapter(build_model(), LoraSettings(enabled=True, sft_rank=2), "sft", seed=0)
    train(adapted, tmp_path / "adapter", 10, SftConfig(lr=1e-2, variant="importance", warmup_steps=1))
    rows = read_json_lines(tmp_path / "adapter" / "metrics.jsonl")
    assert rows[0]["sft/weight"] == pytest.approx(1.0, abs=1e-6) and rows[-1]["sft/weight"] > 1.05


@pytest.mark.parametrize(
    "change",
    [{"variant": "gft"}, {"ratio_level": "word"}, {"ratio_low": 2.0, "ratio_high": 1.0}, {"drop_share": 1.0},
     {"variant": "entropy_kl", "drop_share": 0.5}],
)  # fmt: skip
def test_impossible_variants_are_refused(change):
    with pytest.raises(ConfigError, match=f"sft.{list(change)[-1] if 'ratio_low' not in change else 'ratio_low'}="):
        dataclasses.replace(SftConfig(), **change)
