"""The supervised loop: masks, batches, rates, and going on after a kill."""

import pytest
import torch

from common.compute import Budget
from common.config import ConfigError
from common.models import DecoderConfig, build_decoder
from common.runlog import RunLog
from common.seeding import generator
from common.sft import SftConfig, make_optimizers, pad_rows, rate_factor, train_sft
from common.tokenizers import build_phrase_tokenizer

TINY = DecoderConfig(hidden=16, layers=1, heads=2, kv_heads=2, feedforward=32, max_length=64)
LABELS = {"experiment": "t", "scale": "smoke", "variant": None, "arm": "a", "seed": 0}


@pytest.fixture
def model():
    return build_decoder(TINY, build_phrase_tokenizer([str(n) for n in range(12)]), 0)


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


def test_it_learns_to_copy(tmp_path, model):
    train(model, tmp_path, 150)
    ids, _, _ = copy_batch(10_000)
    with torch.no_grad():
        guess = model(ids).logits[:, 2:4].argmax(-1)
    assert (guess == ids[:, 3:]).float().mean() > 0.9


def test_a_resumed_run_ends_with_the_same_weights(tmp_path):
    def fresh():
        return build_decoder(TINY, build_phrase_tokenizer([str(n) for n in range(12)]), 0)

    config = SftConfig(lr=1e-2, optimizer="muon", decay_share=0.5)
    whole, first, second = fresh(), fresh(), fresh()
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
