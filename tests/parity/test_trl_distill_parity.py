"""Our divergences and supervised weights against TRL 1.16's own code on the same tensors: values and gradients."""

import inspect

import pytest
import torch
from trl.experimental.gkd import GKDTrainer
from trl.trainer import sft_trainer

from common import losses, target_losses

ROWS, TOKENS, VOCABULARY = 3, 5, 7
STREAM = torch.Generator().manual_seed(0)
STUDENT = torch.randn(ROWS, TOKENS, VOCABULARY, generator=STREAM).double()
TEACHER = 2 * torch.randn(ROWS, TOKENS, VOCABULARY, generator=STREAM).double()
IDS = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=STREAM)
MASK = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 1, 1, 0], [1, 1, 0, 0, 1]])
# TRL's beta 0 and 1 stand for the two KL divergences.
CASES = [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.1), ("jsd", 0.5), ("jsd", 0.9)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("objective", "beta"), CASES)
def test_divergences_equal_trl(objective, beta, temperature):
    labels = torch.where(MASK.bool(), IDS, -100)
    theirs, ours = STUDENT.clone().requires_grad_(), STUDENT.clone().requires_grad_()
    their_loss = GKDTrainer.generalized_jsd_loss(theirs, TEACHER, labels, beta=beta, temperature=temperature)
    packed = [(logits / temperature).log_softmax(-1)[MASK.bool()] for logits in (ours, TEACHER)]
    loss_N = target_losses.distillation_loss(objective, *packed, IDS[MASK.bool()], beta)
    weight_BT = MASK / MASK.sum()
    our_loss = losses.weighted_sum(loss_N, weight_BT[MASK.bool()])
    assert our_loss.item() == pytest.approx(their_loss.item(), rel=1e-6)  # our weights are single precision
    gradients = [torch.autograd.grad(loss, logits)[0] for loss, logits in ((their_loss, theirs), (our_loss, ours))]
    assert torch.allclose(*gradients, atol=1e-7)
    assert gradients[0].abs().max() > 1e-3


def test_dft_equals_trl():
    """TRL weights the token losses in one line of a long method: it runs here as it stands in the installed source."""
    lines = inspect.getsource(sft_trainer.SFTTrainer).splitlines()
    (line,) = [line.strip() for line in lines if line.strip().startswith("per_token_loss = per_token_loss * outputs.log_probs")]
    assert line == "per_token_loss = per_token_loss * outputs.log_probs.exp().detach()"
    theirs, ours = STUDENT.clone().requires_grad_(), STUDENT.clone().requires_grad_()
    logp_BT = theirs.log_softmax(-1).gather(-1, IDS[..., None])[..., 0]
    per_token_loss = torch.where(MASK.bool(), -logp_BT, 0.0)
    their_loss = (per_token_loss * logp_BT.exp().detach()).sum() / MASK.sum()
    logp_BT = ours.log_softmax(-1).gather(-1, IDS[..., None])[..., 0]
    our_loss = losses.sft_loss(logp_BT, MASK * target_losses.dft_weights(logp_BT), total_tokens=MASK.sum())
    assert our_loss.item() == pytest.approx(their_loss.item(), abs=1e-6)
    gradients = [torch.autograd.grad(loss, logits)[0] for loss, logits in ((their_loss, theirs), (our_loss, ours))]
    assert torch.allclose(*gradients, atol=1e-6)
