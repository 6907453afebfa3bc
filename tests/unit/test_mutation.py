"""The value tests of losses and advantages are themselves tested: a changed sign, mask or bound must turn a check red.

Each mutation replaces a piece of the source, the changed module is loaded from a temporary file, and a short list of
reference values is computed with it. A mutation that survives them all fails the test.
"""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

import common.advantages
import common.losses


def load(module, folder, old=None, new=None):
    """A copy of `module`, with every occurrence of `old` replaced by `new`."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    if old is not None:
        assert old in source, f"nothing to mutate: {old!r} is not in {module.__file__}; update this list"
        source = source.replace(old, new)
    path = folder / f"{module.__name__.rsplit('.', maxsplit=1)[-1]}_copy.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def average(m, loss, mask, aggregation, constant=None):
    weights = mask * m.sequence_weights(mask.sum(1), aggregation, constant=constant)[:, None]
    return m.weighted_sum(loss, weights).item()


def losses_values(m):
    """name -> numbers computed with the module `m`, one entry per rule that must hold."""
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [1] * 6])
    loss = torch.tensor([[0.9, 0.3, 7, 7, 7, 7], [0.2] * 6])
    ratio, signs = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.25]), torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    clipped, seen = m.ppo_clip(ratio.log(), torch.zeros(5), signs, 0.2, 0.28)
    low, high = m.clip_fractions(seen, signs, 0.2, 0.28)
    broken, absent = torch.tensor([[0.2, math.nan]]), torch.log_softmax(torch.tensor([1.0, -math.inf, 3.0]), 0)
    ratios, lengths = torch.tensor([1.2, 0.9, 0.5, 1.0, 1.6]), torch.tensor([2, 3])
    leaf, weighted = ratios.log().requires_grad_(), torch.full((3,), -0.5, requires_grad=True)
    sequence, s = m.gspo(leaf, torch.zeros(5), torch.tensor([1.0, 1, -1, -1, -1]), lengths, 0.04, 0.05)
    bounded, _ = m.cispo(weighted, -0.5 - torch.tensor([1.5, 0.5, 1.1]).log(), torch.tensor([1.0, -1.0, 2.0]), 0.2, 0.3)
    (sequence.sum() + bounded.sum()).backward()
    names = [m.surrogate(name, weighted, torch.zeros(3), seen[:3], lengths[1:], 0.2, 0.3)[0] for name in m.SURROGATES]
    v, old, target = torch.tensor([0.9, 0.9, 0.1]), torch.tensor([0.5, 0.5, 0.0]), torch.tensor([1.0, 0.0, 1.0])
    pair = torch.tensor([-0.5]), torch.tensor([-2.0])
    return {
        "token_mean": [average(m, loss, mask, "token_mean"), 0.3],
        "seq_mean": [average(m, loss, mask, "seq_mean"), 0.4],
        "seq_sum_const": [average(m, loss, mask, "seq_sum_const", constant=8), 0.15],
        "empty row": [average(m, loss, mask * torch.tensor([[0], [1]]), "seq_mean"), 0.2],
        "broken padding": [average(m, broken, torch.tensor([[1, 0]]), "seq_mean"), 0.2],
        "clip": [*clipped.tolist(), -1.28, 1.5, -0.5, 0.8, -1.25],
        "clip low": [*low.float().tolist(), 0, 0, 0, 1, 0],
        "clip high": [*high.float().tolist(), 1, 0, 0, 0, 0],
        "gspo": [*sequence.tolist(), -1.03923048, -1.03923048, 0.96, 0.96, 0.96],
        "gspo slope": [*leaf.grad.tolist(), -1.03923048, -1.03923048, 0, 0, 0],
        "gspo ratio": [*s.tolist(), *[1.03923048] * 2, *[0.92831777] * 3],
        "gspo default": [m.gspo(torch.tensor([0.1]), torch.zeros(1), torch.ones(1), lengths[:1] - 1)[0].item(), -1.0004],
        "cispo": [*bounded.tolist(), 0.65, -0.4, 1.1],
        "cispo slope": [*weighted.grad.tolist(), -1.3, 0.8, -2.2],
        "cispo default": [m.cispo(torch.tensor([0.1]), torch.tensor([-3.0]), torch.ones(1))[0].item(), -0.5],
        "by name": [*[x[2].item() for x in names], -0.30326533, -0.30326533, 0.2],
        "k1": [m.kl(*pair, "k1").item(), 1.5],
        "k2": [m.kl(*pair, "k2").item(), 1.125],
        "k3": [m.kl(*pair, "k3").item(), 0.72313016],
        "entropy": [m.entropy_from_logprobs(absent).item(), 0.36533386],
        "value": [*m.value_loss(v, old, target, 0.2).tolist(), 0.045, 0.405, 0.405],
        "plain value": [*m.value_loss(v, old, target).tolist(), 0.005, 0.405, 0.405],
        "sft": [m.sft_loss(loss, mask).item(), -0.3],
        "sft part": [m.sft_loss(loss[:1], mask[:1], 8).item(), -0.15],
        "overlong": [*m.overlong_penalty(torch.tensor([40, 52, 70]), 64, 16, 0.5).tolist(), 0, -0.125, -0.5],
    }


def advantages_values(m):
    one, nan = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64), math.nan
    two = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0], dtype=torch.float64)
    flat, group = torch.tensor([0.3] * 4, dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    holes, valid = torch.tensor([1.0, nan, 0, 50], dtype=torch.float64), torch.tensor([True, True, True, False])
    mask, turn = torch.tensor([[1, 1, 0, 0, 1, 1]]), torch.tensor([[0, 0, -1, -1, 1, 1]])
    end, zeros = torch.tensor([[0.0, 0, 0, 0, 0, 1]]), torch.zeros(1, 6)
    r, v, all3 = torch.ones(1, 3), 2 * torch.ones(1, 3), torch.ones(1, 3)
    flags = torch.tensor([False, True, True]), torch.tensor([True, False, True])
    steps = torch.tensor([[-0.1, -0.2, 0.0, 0.7]])
    cut = m.gae(r, v, all3, gamma=0.9, lam=0.95, bootstrap_B=torch.tensor([3.0]))
    turns = m.gae(end, zeros + 0.5, mask, gamma=0.9, lam=0.8, turn_BT=turn)
    return {
        "group_norm": [*m.group_norm(one, group).tolist(), 1.49970006, *[-0.49990002] * 3],
        "ddof 0": [*m.group_norm(one, group, ddof=0, eps=0.0).tolist(), 1.73205081, *[-0.57735027] * 3],
        "two groups": [m.group_norm(two, torch.arange(8) // 4, eps=0.0)[4].item(), 0.5],
        "centre": [*m.group_centre(one, group).tolist(), 0.75, -0.25, -0.25, -0.25],
        "rloo": [*m.rloo(one, group).tolist(), 1, *[-1 / 3] * 3],
        "batch": [m.batch_centre(two)[0].item(), 0.5],
        "reward": [*m.reward(holes, valid).tolist(), 1, 0, 0, 0],
        "flat": [m.group_norm(flat, group, eps=0.0).abs().max().item(), 0],
        "flat flag": [float(m.zero_spread(flat, group).all()), 1],
        "holes": [*m.group_centre(holes, group, valid).tolist(), 0.5, 0, -0.5, 0],
        "gae mask": [
            *m.gae(end, zeros, mask, gamma=0.9, lam=0.95)[0][0, [0, 1, 4]].tolist(),
            0.62502637,
            0.731025,
            0.855,
        ],
        "gae off mask": [m.gae(end, zeros, mask, gamma=0.9, lam=0.95)[0][0, 2:4].abs().sum().item(), 0],
        "truncated": [*cut[0][0].tolist(), 2.7267425, 2.2535, 1.7],
        "returns": [*cut[1][0].tolist(), 4.7267425, 4.2535, 3.7],
        "terminated": [*m.gae(r, v, all3, gamma=0.9, lam=0.95)[0][0].tolist(), 0.752975, -0.055, -1],
        "bootstrap": [*m.bootstrap_values(torch.full((3,), 3.0), *flags).tolist(), 3, 0, 0],
        "turns": [*turns[0][0, [1, 4, 5]].tolist(), 0.31, 0.5, 0.5],
        "turn actions": [*turns[2][0].float().tolist(), 1, 0, 0, 0, 1, 0],
        "reward to go": [*m.reward_to_go(steps, steps != 0).flatten().tolist(), 0.4, 0.5, 0, 0.7],
        "discounted": [*m.reward_to_go(steps, steps != 0, 0.5).flatten().tolist(), -0.025, 0.15, 0, 0.7],
        "whiten": [*m.masked_whiten(torch.tensor([1.0, 3, 5, 99]), torch.tensor([1, 1, 1, 0])).tolist(), -1, 0, 1, 0],
    }


def red(values, module):
    """Names of the checks that fail: the first half of an entry is computed, the second half expected."""
    failed = []
    for name, numbers in values(module).items():
        half = len(numbers) // 2
        if numbers[:half] != pytest.approx(numbers[half:], abs=1e-6):
            failed.append(name)
    return failed


LOSSES = [
    ("return -torch.minimum(ratio * advantages", "return torch.minimum(ratio * advantages"),
    ("-torch.minimum(ratio", "-torch.maximum(ratio"),
    ("clamp(1 - clip_low, 1 + clip_high)", "clamp(1 - clip_high, 1 + clip_low)"),
    ("clamp(1 - clip_low, 1 + clip_high)", "clamp(1 - clip_low, 1 + clip_low)"),
    ("(logp - old_logp).exp()", "(old_logp - logp).exp()"),
    ("(ratio < 1 - clip_low) & (advantages < 0)", "(ratio < 1 - clip_low) & (advantages > 0)"),
    ("(ratio > 1 + clip_high) & (advantages > 0)", "(ratio > 1 + clip_low) & (advantages > 0)"),
    ("/ length_B.sum().clamp(min=1)", "/ length_B.numel()"),
    ("1 / (sequences * length_B.clamp(min=1))", "1 / length_B.clamp(min=1)"),
    ("/ (sequences * constant)", "/ constant"),
    ("(length_B > 0).sum()", "(length_B >= 0).sum()"),
    ("torch.where(weights != 0, x * weights, 0.0)", "(x * weights)"),
    ("(logp_N - old_logp_N).detach()", "(old_logp_N - logp_N).detach()"),
    ("total_B / length_B.clamp(min=1)", "total_B"),
    ("(mean_N + logp_N - logp_N.detach()", "(mean_N + logp_N.detach() - logp_N"),
    ("(mean_N + logp_N - logp_N.detach()", "(logp_N"),
    (
        "torch.zeros_like(mean_N), advantages_N, clip_low, clip_high",
        "torch.zeros_like(mean_N), advantages_N, clip_high, clip_low",
    ),
    ("clip_high: float = 4e-4", "clip_high: float = 0.2"),
    ("(logp - old_logp).exp().detach()", "(logp - old_logp).exp()"),
    ("return -ratio.clamp(1 - clip_low, 1 + clip_high)", "return ratio.clamp(1 - clip_low, 1 + clip_high)"),
    ("-ratio.clamp(1 - clip_low, 1 + clip_high)", "-ratio.clamp(1 - clip_high, 1 + clip_low)"),
    ("-ratio.clamp(1 - clip_low, 1 + clip_high)", "-ratio.clamp(max=1 + clip_high)"),
    ("-ratio.clamp(1 - clip_low, 1 + clip_high)", "-ratio"),
    ("clip_high: float = 4.0", "clip_high: float = 5.0"),
    ("return cispo(", "return ppo_clip("),
    ("difference = logp - ref_logp", "difference = ref_logp - logp"),
    ("(-difference).exp() - 1 + difference", "difference.exp() - 1 - difference"),
    ("0.5 * difference**2", "difference**2"),
    (".clamp(min=torch.finfo(logp_V.dtype).min)", ""),
    ("return -(logp_V.exp()", "return (logp_V.exp()"),
    ("torch.maximum(squared", "torch.minimum(squared"),
    ("old_values + (values - old_values).clamp(-clip, clip)", "values"),
    ("weighted_sum(-logp_BT", "weighted_sum(logp_BT"),
    ("mask_BT.float() / total", "1 / total"),
    ("-penalty * excess_B", "penalty * excess_B"),
    ("(max_length - buffer)", "max_length"),
]
ADVANTAGES = [
    ("clean_B - mean_P[index_B]", "mean_P[index_B] - clean_B"),
    ("clean_B - mean_P[index_B]", "clean_B - clean_B.mean()"),
    ("present_B & valid_B.bool()", "present_B"),
    ("~torch.isnan(rewards_B)", "torch.ones_like(rewards_B, dtype=torch.bool)"),
    ("(count_B - ddof)", "count_B"),
    ("centred_B / (std_B + eps)", "centred_B / (std_B + 0)"),
    ("(centred_B * count_B / (count_B - 1)", "(centred_B * (count_B - 1) / (count_B - 1)"),
    ("high_P - low_P <= EQUAL_SPREAD * scale_P", "high_P - low_P < 0"),
    ("truncated_B.bool() & ~terminated_B.bool()", "truncated_B.bool()"),
    ("truncated_B.bool() & ~terminated_B.bool()", "terminated_B.bool()"),
    ("rewards_BN + gamma * next_BN - values_BN", "rewards_BN + gamma * next_BN + values_BN"),
    ("rewards_BN + gamma * next_BN - values_BN", "rewards_BN + next_BN - values_BN"),
    ("_discounted_suffix_sum(delta_BN, gamma * lam)", "_discounted_suffix_sum(delta_BN, gamma)"),
    ("torch.where(mask_BT, advantages_BN", "torch.where(mask_BT | True, advantages_BN"),
    ("    mask_BT = mask_BT.bool()\n    action_BT", "    mask_BT = torch.ones_like(mask_BT).bool()\n    action_BT"),
    ("bootstrap_B.double()[:, None]", "0.0"),
    ("advantages_BT + values_BT", "advantages_BT"),
    ("mask_BT & (turn_BT != before_BT)", "mask_BT"),
    ("mask_BT, gamma=gamma, lam=1.0)", "mask_BT, gamma=1.0, lam=1.0)"),
    ("mask_BT, gamma=gamma, lam=1.0)", "mask_BT, gamma=gamma, lam=0.95)"),
    ("gae(rewards_BT, torch.zeros_like(rewards_BT), mask_BT", "gae(rewards_BT, rewards_BT, mask_BT"),
    ("values_N = x_BT[mask_BT]", "values_N = x_BT.flatten()"),
    ("(x_BT - values_N.mean())", "x_BT"),
]
CASES = [(common.losses, losses_values, *case) for case in LOSSES]
CASES += [(common.advantages, advantages_values, *case) for case in ADVANTAGES]


@pytest.mark.parametrize(("module", "values"), [(common.losses, losses_values), (common.advantages, advantages_values)])
def test_the_unchanged_module_passes_every_check(module, values, tmp_path):
    assert red(values, load(module, tmp_path)) == []


@pytest.mark.parametrize(("module", "values", "old", "new"), CASES, ids=[f"{c[2]} -> {c[3]}"[:70] for c in CASES])
def test_every_mutation_is_noticed(module, values, old, new, tmp_path):
    assert red(values, load(module, tmp_path, old, new))
