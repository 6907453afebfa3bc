"""DPO, KTO and the Bradley-Terry loss against TRL 1.16's own loss methods on fixed tensors.

The methods run on a stand-in for their trainer, with a stand-in model that returns given log-probabilities or scores.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from common.models import DecoderConfig, build_decoder
from common.preference import TRL_INPUTS, dpo_loss, mismatched
from common.reward_model import bradley_terry_loss, build_reward_model, score_rows
from common.sft import pad_rows
from common.tokenizers import build_phrase_tokenizer

PAIRS, TOKENS = 4, 7
STREAM = torch.Generator().manual_seed(0)
# Prompts of 1 to 4 tokens, answers that end at different places, chosen first as TRL has it.
PROMPT = torch.tensor([1, 2, 3, 4] * 2)[:, None]
END = torch.tensor([7, 5, 6, 5, 3, 7, 7, 6])[:, None]
MASK = ((torch.arange(TOKENS) >= PROMPT) & (torch.arange(TOKENS) < END)).long()
LOGP = -3 * torch.rand(2 * PAIRS, TOKENS, generator=STREAM)
REFERENCE = LOGP + torch.randn(2 * PAIRS, TOKENS, generator=STREAM)


class Accelerator:
    device = torch.device("cpu")

    def gather_for_metrics(self, tensor):
        return tensor

    def gather(self, tensor):
        return tensor


def stand_in(**settings):
    """What the loss methods read from a trainer: one process, no adapter, everything optional off."""
    base = {
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None, center_rewards_coefficient=None),
        "accelerator": Accelerator(),
        "model": Returns(),
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "aux_loss_enabled": False,
        "precompute_ref_logps": False,
        "beta": 0.3,
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "loss_types": ["sigmoid"],
        "loss_weights": [1.0],
        "use_weighting": False,
        "loss_type": "kto",
        "calculate_KL": True,
        "desirable_weight": 1.5,
        "undesirable_weight": 0.5,
    }
    return SimpleNamespace(**base | settings)


class Returns(nn.Module):
    """Answers every call with the next of the given token log-probabilities [B, T], 0 off the labels, as TRL's head does."""

    is_gradient_checkpointing = False

    def __init__(self, *tables):
        super().__init__()
        self.tables = list(tables)

    def forward(self, labels=None, **_):
        logp = self.tables.pop(0)[:, 1:] * (labels[:, 1:] != -100)
        zeros = torch.zeros_like(logp)
        return SimpleNamespace(log_probs=logp, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def batch(mask):
    return {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}


def test_dpo_loss_rewards_and_gradient_equal_trl():
    theirs, ours = LOGP.clone().requires_grad_(), LOGP.clone().requires_grad_()
    trainer = stand_in(ref_model=Returns(REFERENCE))
    loss = DPOTrainer._compute_loss(trainer, Returns(theirs), batch(MASK), return_outputs=False)
    sums, ref_sums = ((table * MASK).sum(1).chunk(2) for table in (ours, REFERENCE))
    loss_P, chosen_P, rejected_P = dpo_loss(*sums, *ref_sums, 0.3)
    assert loss_P.mean().item() == pytest.approx(loss.item(), abs=1e-6)
    expected, gradient = torch.autograd.grad(loss, theirs)[0], torch.autograd.grad(loss_P.mean(), ours)[0]
    assert torch.allclose(gradient, expected, atol=1e-7)
    assert expected.abs().max() > 1e-2
    assert (expected[MASK == 0] == 0).all()
    metrics = trainer._metrics["train"]
    assert chosen_P.mean().item() == pytest.approx(metrics["rewards/chosen"][0], abs=1e-6)
    assert rejected_P.mean().item() == pytest.approx(metrics["rewards/rejected"][0], abs=1e-6)
    assert (chosen_P - rejected_P).mean().item() == pytest.approx(metrics["rewards/margins"][0], abs=1e-6)
    assert (chosen_P > rejected_P).float().mean().item() == metrics["rewards/accuracies"][0]


@pytest.mark.parametrize("raised", [0.0, 2.0], ids=["reference point 0", "reference point above 0"])
def test_kto_of_trl_is_the_formula_of_train_kto(raised):
    """The docstring of `train_kto` in plain tensors, and TRL's number for it; z is raised above 0 in the second case."""
    label = torch.tensor([True, False, True, True, False, False, True, False])
    other, ref_other = (LOGP.roll(1, 0), REFERENCE.roll(1, 0) - raised)
    policy = LOGP.clone().requires_grad_()
    inputs = batch(MASK) | {f"KL_{key}": value for key, value in batch(MASK).items()} | {"label": label}
    trainer = stand_in(ref_model=Returns(ref_other, REFERENCE))
    trainer._compute_kl_logps = lambda model, given: KTOTrainer._compute_kl_logps(trainer, model, given)
    loss = KTOTrainer._compute_loss(trainer, Returns(other, policy), inputs, return_outputs=False)
    r_B = 0.3 * ((LOGP - REFERENCE) * MASK).sum(1)
    z = 0.3 * ((other - ref_other) * MASK).sum(1).mean().clamp(min=0)
    assert (z > 0) == (raised > 0)
    weight_B = torch.where(label, 1.5, 0.5)
    value_B = torch.sigmoid(torch.where(label, r_B - z, z - r_B))
    assert loss.item() == pytest.approx((weight_B * (1 - value_B)).mean().item(), abs=1e-6)
    gradient = torch.autograd.grad(loss, policy)[0]
    slope_B = torch.where(label, -1.0, 1.0) * weight_B * value_B * (1 - value_B) * 0.3 / len(label)
    assert torch.allclose(gradient, slope_B[:, None] * MASK, atol=1e-7)


ROWS = [
    ([4, 5, 10, 11, 2], [0, 0, 1, 1, 1]),
    ([6, 12, 2], [0, 1, 1]),
    ([7, 8, 9, 13], [0, 0, 0, 1]),
    ([5, 4, 14, 15], [0, 0, 1, 1]),
]


def test_our_batches_equal_trls_collators_on_answers_of_one_piece():
    """TRL's collators know one run of answer tokens per row; on such rows ours builds the same tensors."""
    split = [(ids[: mask.index(1)], ids[mask.index(1) :]) for ids, mask in ROWS]
    examples = [{"prompt_ids": p, "completion_ids": c, "label": True} for p, c in split]
    for example, other in zip(examples, [examples[-1], *examples[:-1]]):
        example["KL_completion_ids"] = other["completion_ids"]
    theirs = DataCollatorForUnpairedPreference(pad_token_id=0)(examples)
    for name, ours, other in zip(TRL_INPUTS, pad_rows(ROWS, 0), pad_rows(mismatched(ROWS), 0)):
        assert torch.equal(theirs[name], ours)
        assert torch.equal(theirs[f"KL_{name}"], other)
    prompt = ([4, 5, 12, 2], [0, 0, 1, 1])
    paired = [{"prompt_ids": [4, 5], "chosen_ids": [10, 11, 2], "rejected_ids": [12, 2]}]
    theirs = DataCollatorForPreference(pad_token_id=0)(paired)
    for name, ours in zip(TRL_INPUTS, pad_rows([ROWS[0], prompt], 0)):
        assert torch.equal(theirs[name], ours)


def test_bradley_terry_loss_and_gradient_equal_trl():
    """The same sequence classifier, rows that end at different places: TRL's loss through transformers' own forward."""
    tokenizer = build_phrase_tokenizer([f"w{i}" for i in range(20)])
    shape = DecoderConfig(hidden=16, layers=2, heads=2, kv_heads=1, feedforward=32, max_length=64)
    model = build_reward_model(build_decoder(shape, tokenizer, 0))
    with torch.no_grad():
        model.score.weight.copy_(torch.linspace(-1, 1, 16))
    ids_BT, attention_BT, _ = pad_rows(ROWS, tokenizer.pad_token_id)
    trainer = stand_in(model=model.train())
    loss = RewardTrainer.compute_loss(trainer, model, {"input_ids": ids_BT, "attention_mask": attention_BT})
    expected = torch.autograd.grad(loss, list(model.parameters()))
    better_P, worse_P = score_rows(model, ids_BT, attention_BT).chunk(2)
    ours = bradley_terry_loss(better_P, worse_P).mean()
    gradient = torch.autograd.grad(ours, list(model.parameters()))
    assert ours.item() == pytest.approx(loss.item(), abs=1e-6)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(gradient, expected, strict=True))
    assert max(float(g.abs().max()) for g in expected) > 1e-2
    metrics = trainer._metrics["train"]
    assert (better_P > worse_P).float().mean().item() == metrics["accuracy"][0]
    assert (better_P - worse_P).mean().item() == pytest.approx(metrics["margin"][0], abs=1e-6)
