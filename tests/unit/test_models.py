"""Tiny decoders, LoRA and Muon."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.checkpoints import load_model, save_model
from common.lora import LoraSettings, add_adapter, learning_rate
from common.models import DecoderConfig, build_decoder, parameter_count
from common.muon import Muon, orthogonalise
from common.schema import ConfigError
from common.tokenizers import build_phrase_tokenizer

TINY = DecoderConfig(hidden=16, layers=1, heads=2, kv_heads=2, feedforward=32, max_length=64)


@pytest.fixture
def tokenizer():
    return build_phrase_tokenizer([str(number) for number in range(20)])


@pytest.fixture
def ids():
    return torch.arange(4, 20).reshape(2, 8)


def test_weights_depend_on_the_seed_alone(tokenizer):
    first, again, other = (build_decoder(TINY, tokenizer, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_number_tokens_start_with_equal_features_where_the_number_is_equal(tokenizer):
    model = build_decoder(DecoderConfig(hidden=32, layers=1, heads=2, kv_heads=2), tokenizer, 0, {5: 7, 6: 7, 7: 8})
    rows = model.get_input_embeddings().weight[:, :22]
    assert torch.equal(rows[5], rows[6]) and not torch.equal(rows[5], rows[7])
    assert rows[5].norm().item() == pytest.approx(22**0.5 / 2 / 11**0.5, rel=1e-5)


def test_an_impossible_width_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"model\.hidden=15"):
        build_decoder(DecoderConfig(hidden=15, heads=2), tokenizer, 0)


def test_parameter_count_counts_every_weight(tokenizer):
    model = build_decoder(TINY, tokenizer, 0)
    assert parameter_count(model) == 2 * len(tokenizer) * 16 + 4 * 16 * 16 + 3 * 16 * 32 + 3 * 16 + 2 * 8


def test_a_saved_model_loads_in_plain_transformers(tokenizer, tmp_path, ids):
    model = build_decoder(TINY, tokenizer, 0).eval()
    save_model(model, tokenizer, tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(model(ids).logits, again(ids).logits)


def test_A01_an_adapter_changes_nothing_at_first_and_survives_merging(tokenizer, tmp_path, ids):
    base = build_decoder(TINY, tokenizer, 0).eval()
    before = base(ids).logits.detach()
    save_model(base, tokenizer, tmp_path / "base")
    base, _ = load_model(tmp_path / "base")
    model = add_adapter(base, LoraSettings(enabled=True, rl_rank=4), "rl", seed=3)
    assert torch.allclose(model(ids).logits, before)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)
    adapted = model(ids).logits.detach()
    save_model(model, tokenizer, tmp_path / "adapter")
    loaded, _ = load_model(tmp_path / "adapter")
    assert torch.allclose(loaded(ids).logits, adapted, atol=1e-6)
    merged = model.merge_and_unload()
    assert torch.allclose(merged(ids).logits, adapted, atol=1e-5)
    assert not torch.allclose(merged(ids).logits, before, atol=1e-3)


def test_adapter_start_depends_on_the_seed_alone(tokenizer):
    def a_matrices(seed):
        model = add_adapter(build_decoder(TINY, tokenizer, 0), LoraSettings(enabled=True), "sft", seed)
        return [p for name, p in sorted(model.named_parameters()) if "lora_A" in name]

    assert all(torch.equal(a, b) for a, b in zip(a_matrices(1), a_matrices(1), strict=True))
    assert not torch.equal(a_matrices(1)[0], a_matrices(2)[0])
    assert a_matrices(1)[0].shape[0] == 64  # the SFT rank


def test_A04_a_target_that_matches_nothing_is_named(tokenizer):
    settings = LoraSettings(enabled=True, targets=["q_proj", "gate_projx"])
    with pytest.raises(ConfigError, match="gate_projx"):
        add_adapter(build_decoder(TINY, tokenizer, 0), settings, "rl", 0)


def test_lora_is_off_by_default_and_ten_times_faster_when_on(tokenizer):
    model = build_decoder(TINY, tokenizer, 0)
    assert add_adapter(model, LoraSettings(), "rl", 0) is model
    assert learning_rate(1e-4, LoraSettings()) == 1e-4
    assert learning_rate(1e-4, LoraSettings(enabled=True)) == pytest.approx(1e-3)


def test_newton_schulz_brings_singular_values_near_one():
    stack = torch.randn(3, 24, 48, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(stack))
    assert values.min() > 0.6 and values.max() < 1.25
    assert torch.allclose(orthogonalise(stack.mT), orthogonalise(stack).mT, atol=1e-5)


def test_muon_agrees_with_torch_up_to_its_bfloat16():
    start = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    first, second = Muon([ours], lr=0.02), torch.optim.Muon([theirs], lr=0.02, weight_decay=0.0)
    for step in range(3):
        gradient = torch.randn(16, 32, generator=torch.Generator().manual_seed(10 + step))
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        first.step()
        second.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.05 * moved


def test_muon_refuses_vectors():
    with pytest.raises(ValueError, match="matrices only"):
        Muon([torch.nn.Parameter(torch.zeros(3))])
