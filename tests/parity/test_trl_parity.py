"""Our advantages, losses and gradients against TRL 1.16's own code on the same tensors.

TRL computes losses in methods of its trainers; they run here on a stand-in trainer that supplies the log-probabilities.
Its advantages are a stretch of a long method: those lines are cut out of the installed source and run as they are.
"""

import importlib.util
import inspect
import math
import textwrap
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from trl.trainer import grpo_trainer, rloo_trainer

from common import advantages, losses

ROWS, PROMPT, TOKENS, GROUP, LIMIT = 8, 3, 6, 4, 10
STREAM = torch.Generator().manual_seed(0)
MASK = (torch.arange(TOKENS) < torch.tensor([6, 1, 3, 6, 2, 5, 4, 6])[:, None]).int()
TOOLS = torch.ones_like(MASK).index_fill(1, torch.tensor([1, 2]), 0).index_fill(0, torch.tensor([1, 2, 4]), 1)
LOGP = -3 * torch.rand(ROWS, TOKENS, generator=STREAM)
OLD = LOGP + 0.4 * torch.randn(ROWS, TOKENS, generator=STREAM)
REFERENCE = LOGP + 0.4 * torch.randn(ROWS, TOKENS, generator=STREAM)
ENTROPY = torch.rand(ROWS, TOKENS, generator=STREAM)
ADVANTAGES = torch.randn(ROWS, generator=STREAM)


class Accelerator:
    num_processes = 1
    sync_gradients = False

    def gather(self, tensor):
        return tensor

    def reduce(self, tensor, reduction):
        return tensor


def stand_in(**settings):
    """What the loss methods read from a trainer: one process, no accumulation, no vLLM, everything optional off."""
    args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    base = {
        "args": args,
        "accelerator": Accelerator(),
        "model": SimpleNamespace(training=True),
        "_metrics": {"train": defaultdict(list)},
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "use_vllm": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": LIMIT,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "entropy_coef": 0.0,
    }
    return SimpleNamespace(**base | settings)


def trl_loss(module, mask, **settings):
    """TRL's loss and its gradient on the token log-probabilities."""
    trainer = stand_in(**settings)
    logp = LOGP.clone().requires_grad_()
    entropy = ENTROPY.clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logp, entropy, None)
    inputs = {
        "prompt_ids": torch.zeros(ROWS, PROMPT, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, PROMPT),
        "completion_ids": torch.zeros(ROWS, TOKENS, dtype=torch.long),
        "completion_mask": MASK,
        "tool_mask": mask,
        "advantages": ADVANTAGES,
        "old_per_token_logps": OLD,
        "old_logps": (OLD * MASK).sum(1),
        "ref_per_token_logps": REFERENCE,
        "num_items_in_batch": (MASK * mask).sum(),
    }
    cls = module.GRPOTrainer if module is grpo_trainer else module.RLOOTrainer
    loss = cls._compute_loss(trainer, trainer.model, inputs)
    return loss.item(), torch.autograd.grad(loss, logp)[0], trainer._metrics["train"]


def average(loss_BT, mask, aggregation, constant=None):
    weights = mask * losses.sequence_weights(mask.sum(1), aggregation, constant=constant)[:, None]
    return losses.weighted_sum(loss_BT, weights)


def our_loss(mask, aggregation, kl_coef=0.0, entropy_coef=0.0):
    """The same from common.losses, on padded tensors."""
    mask = MASK * mask
    logp = LOGP.clone().requires_grad_()
    loss, ratio = losses.ppo_clip(logp, OLD, ADVANTAGES[:, None], 0.2, 0.28)
    if kl_coef:
        loss = loss + kl_coef * losses.kl(logp, REFERENCE, "k3")
    total = average(loss, mask, aggregation, constant=LIMIT)
    if entropy_coef:
        total = total - entropy_coef * average(ENTROPY, mask, "token_mean")
    low, high = losses.clip_fractions(ratio, ADVANTAGES[:, None], 0.2, 0.28)
    fractions = [average(x.float(), mask, "token_mean").item() for x in (low, high)]
    return total.item(), torch.autograd.grad(total, logp)[0], fractions


NAMES = {"grpo": "seq_mean", "dapo": "token_mean", "bnpo": "token_mean", "dr_grpo": "seq_sum_const"}


@pytest.mark.parametrize("tools", [False, True], ids=["answers", "tool-spans"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", NAMES)
def test_grpo_losses_equal_trl(loss_type, beta, tools):
    mask = TOOLS if tools else torch.ones_like(MASK)
    value, gradient, metrics = trl_loss(grpo_trainer, mask, loss_type=loss_type, beta=beta)
    ours, our_gradient, fractions = our_loss(mask, NAMES[loss_type], kl_coef=beta)
    assert ours == pytest.approx(value, abs=1e-6)
    assert torch.allclose(our_gradient, gradient, atol=1e-6)
    assert gradient.abs().max() > 1e-2
    assert fractions == pytest.approx([metrics["clip_ratio/low_mean"][0], metrics["clip_ratio/high_mean"][0]], abs=1e-6)
    assert min(fractions) > 0


def our_surrogate(name, mask, aggregation, clip_low, clip_high):
    """Loss, gradient and ratio of common.losses.surrogate on the packed tokens, as the loops call it."""
    mask = (MASK * mask).bool()
    logp, lengths = LOGP.clone().requires_grad_(), mask.sum(1)
    pushed = ADVANTAGES.repeat_interleave(lengths)
    loss_N, ratio_N = losses.surrogate(name, logp[mask], OLD[mask], pushed, lengths, clip_low, clip_high)
    weights = losses.sequence_weights(lengths, aggregation, constant=LIMIT).repeat_interleave(lengths)
    total = losses.weighted_sum(loss_N, weights)
    cut = losses.clip_fractions(ratio_N, pushed, clip_low, clip_high)
    return total.item(), torch.autograd.grad(total, logp)[0], cut, losses.sequence_weights(lengths, "seq_mean"), lengths


@pytest.mark.parametrize("tools", [False, True], ids=["answers", "tool-spans"])
@pytest.mark.parametrize("loss_type", NAMES)
def test_gspo_equals_trl(loss_type, tools):
    mask = TOOLS if tools else torch.ones_like(MASK)
    settings = {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15}
    value, gradient, metrics = trl_loss(grpo_trainer, mask, loss_type=loss_type, **settings)
    ours, our_gradient, cut, share, lengths = our_surrogate("gspo", mask, NAMES[loss_type], 0.1, 0.15)
    assert ours == pytest.approx(value, abs=1e-6)
    assert torch.allclose(our_gradient, gradient, atol=1e-6)
    assert gradient.abs().max() > 1e-2
    fractions = [float((x * share.repeat_interleave(lengths)).sum()) for x in cut]  # TRL counts sequences
    assert fractions == pytest.approx([metrics["clip_ratio/low_mean"][0], metrics["clip_ratio/high_mean"][0]], abs=1e-6)
    assert sum(fractions) > 0


@pytest.mark.parametrize("tools", [False, True], ids=["answers", "tool-spans"])
@pytest.mark.parametrize("bound", [1.1, 5.0])
def test_cispo_equals_trl(bound, tools):
    """TRL's epsilon_high is the bound itself and not its distance from 1; it has no lower bound."""
    mask = TOOLS if tools else torch.ones_like(MASK)
    value, gradient, metrics = trl_loss(grpo_trainer, mask, loss_type="cispo", epsilon_high=bound)
    ours, our_gradient, (low, high), _, _ = our_surrogate("cispo", mask, "token_mean", 1.0, bound - 1)
    assert ours == pytest.approx(value, abs=1e-6)
    assert torch.allclose(our_gradient, gradient, atol=1e-6)
    assert (our_gradient[(MASK * mask).bool()] != 0).all()
    assert high.float().mean().item() == pytest.approx(metrics["cispo_clip_ratio"][0], abs=1e-6)
    assert not low.any()
    assert high.any() == (bound < 2)


def test_entropy_bonus_equals_trl():
    settings = {"loss_type": "dapo", "_entropy_bonus_enabled": True, "entropy_coef": 0.05}
    value, _, _ = trl_loss(grpo_trainer, torch.ones_like(MASK), **settings)
    assert our_loss(torch.ones_like(MASK), "token_mean", entropy_coef=0.05)[0] == pytest.approx(value, abs=1e-6)


def test_rloo_gradient_equals_trl_on_policy():
    """TRL clips one ratio per completion, we clip token ratios; before any update both are REINFORCE, up to scale."""
    trainer = stand_in()
    logp = LOGP.clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logp, ENTROPY, None)
    zeros = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    inputs = {
        "prompt_ids": zeros,
        "prompt_mask": zeros,
        "completion_ids": zeros,
        "completion_mask": MASK,
        "advantages": ADVANTAGES,
        "old_logps": (LOGP * MASK).sum(1),
    }
    theirs = torch.autograd.grad(rloo_trainer.RLOOTrainer._compute_loss(trainer, trainer.model, inputs), logp)[0]
    ours = LOGP.clone().requires_grad_()
    loss, _ = losses.ppo_clip(ours, ours.detach(), ADVANTAGES[:, None])
    average(loss, MASK, "seq_sum_const", constant=1.0).backward()
    assert torch.allclose(ours.grad, theirs, atol=1e-6)


def trl_lines(module, first, last, arguments, folder):
    """The installed source from the line that starts with `first` to the one that starts with `last`, as a function."""
    lines = inspect.getsource(module).splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith(first))
    stop = next(i for i in range(start, len(lines)) if lines[i].strip().startswith(last))
    body = textwrap.indent(textwrap.dedent("\n".join(lines[start : stop + 1])), "    ")
    path = folder / "trl_excerpt.py"
    head = f"import torch\nfrom trl.trainer.utils import nanstd\n\n\ndef run({arguments}):\n"
    path.write_text(f"{head}{body}\n    return advantages\n")
    spec = importlib.util.spec_from_file_location("trl_excerpt", path)
    excerpt = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(excerpt)
    return excerpt.run


REWARDS = [
    [1.0, 0, 0, 0, 1, 1, 1, 0],
    [0.3] * 4 + [1.0, 0.5, 0.25, -1],
    [1.0, math.nan, 0, 1, 0, 0, 1, math.nan],
]


@pytest.mark.parametrize("rewards", REWARDS, ids=["binary", "one-flat-group", "unscored"])
@pytest.mark.parametrize(("scale", "name"), [("group", "group_norm"), ("none", "group_centre")])
def test_group_advantages_equal_trl(rewards, scale, name, tmp_path):
    run = trl_lines(
        grpo_trainer,
        "unscorable_mask = torch.isnan(rewards_per_func)",
        "advantages = torch.nan_to_num(advantages",
        "self, rewards_per_func, num_generations, device",
        tmp_path,
    )
    weights = torch.ones(1, dtype=torch.float64)
    trainer = SimpleNamespace(multi_objective_aggregation="sum_then_normalize", scale_rewards=scale, reward_weights=weights)
    reward_B = torch.tensor(rewards, dtype=torch.float64)
    theirs = run(trainer, reward_B[:, None].clone(), GROUP, "cpu")
    ours = advantages.outcome_advantages(name, reward_B, torch.arange(ROWS) // GROUP)
    assert ours.tolist() == pytest.approx(theirs.tolist(), abs=1e-6)


@pytest.mark.parametrize("rewards", REWARDS, ids=["binary", "one-flat-group", "unscored"])
def test_rloo_advantages_equal_trl(rewards, tmp_path):
    run = trl_lines(
        rloo_trainer,
        "grouped_rewards = rewards.view(-1, num_generations)",
        "advantages = torch.nan_to_num(advantages",
        "self, rewards, num_generations",
        tmp_path,
    )
    reward_B = torch.tensor(rewards, dtype=torch.float64)
    theirs = run(SimpleNamespace(normalize_advantages=False), reward_B, GROUP)
    ours = advantages.rloo(reward_B, torch.arange(ROWS) // GROUP)
    assert ours.tolist() == pytest.approx(theirs.tolist(), abs=1e-6)
