"""Fused weights against the models' own forward: same hidden states, same gradients."""

import copy

import peft
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from common.fused import can_fuse, pack, states_before

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def qwen3(**changes):
    return scatter(Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"num_key_value_heads": 2, "head_dim": 12} | changes)))


def llama(**changes):
    return scatter(LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_key_value_heads": 4} | changes)))


def lora(dropout=0.0):
    config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout, task_type="CAUSAL_LM")
    return scatter(peft.get_peft_model(qwen3(), config)).get_base_model()


def scatter(model):
    """Random parameters of a size that makes attention sharp, norms included."""
    stream = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=stream)
            parameter.copy_(0.3 * noise if parameter.ndim == 2 else 1 + 0.3 * noise)
    return model.eval()


def batch(prompts, group, lengths, layout=lambda length, prompt: [0] * prompt + [1] * (length - prompt)):
    """Right-padded rows: `group` rows of each prompt length in turn, and their masks."""
    stream = torch.Generator().manual_seed(5)
    width = max(lengths)
    ids, masks = [], []
    starts = [torch.randint(40, (prompt,), generator=stream).tolist() for prompt in prompts]
    for row, length in enumerate(lengths):
        start = starts[row // group]
        rest = torch.randint(40, (length - len(start),), generator=stream).tolist()
        ids.append([*start, *rest] + [0] * (width - length))
        masks.append(layout(length, len(start)) + [0] * (width - length))
    return torch.tensor(ids), torch.tensor(masks)


def with_replies(length, prompt):
    """Two answers with a reply between them and one behind: the mask of a many-turn episode."""
    return [0] * prompt + [1, 1] + [0, 0, 0] + [1] * (length - prompt - 7) + [0, 0]


CASES = {
    "one prompt length": batch([6, 6], 4, [9, 12, 10, 12, 7, 12, 9, 8]),
    "ragged prompts": batch([2, 9, 5], 4, [6, 4, 5, 3, 12, 13, 10, 10, 9, 9, 6, 8]),
    "nothing shared": batch([3, 8, 5, 1], 1, [9, 12, 6, 7]),
    "one long row": batch([5], 1, [12]),
    "prompts of one token": batch([1], 6, [9, 8, 3, 2, 9, 9]),
    "many turns": batch([4, 6], 3, [14, 13, 16, 15, 14, 16], with_replies),
    "a row without answer": batch([5, 5], 2, [9, 9, 9, 5]),
    "all tokens": batch([3, 4], 2, [9, 7, 8, 6], lambda length, prompt: [1] * length),
}


def states_and_gradients(model, compute):
    model.zero_grad()
    hidden_ND = compute()
    weight_D = torch.linspace(0.5, 1.5, hidden_ND.shape[1])
    (hidden_ND * weight_D).sin().sum().backward()
    return hidden_ND.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("build", [qwen3, llama, lora])
@pytest.mark.parametrize("case", CASES)
def test_states_and_gradients_are_those_of_the_own_forward(build, case):
    model, (ids_BT, mask_BT) = build(), CASES[case]
    own = copy.deepcopy(model)
    own.model.layers[0].register_forward_hook(lambda *args: None)
    assert can_fuse(model) and not can_fuse(own)
    ours, our_gradients = states_and_gradients(model, lambda: states_before(model, ids_BT, mask_BT))
    theirs, their_gradients = states_and_gradients(own, lambda: states_before(own, ids_BT, mask_BT))
    full = own.model(ids_BT).last_hidden_state[:, :-1][mask_BT[:, 1:].bool()]
    assert ours.shape == (int(mask_BT[:, 1:].sum()), 32)
    assert torch.allclose(ours, theirs, atol=2e-5) and torch.allclose(theirs, full, atol=2e-5)
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in their_gradients.items():
        if gradient is None:
            assert our_gradients[name] is None, name
        else:
            assert torch.allclose(our_gradients[name], gradient, atol=1e-4 * float(gradient.abs().max())), name


def test_tokens_behind_the_last_masked_one_change_nothing():
    model, (ids_BT, mask_BT) = qwen3(), CASES["many turns"]
    before = states_before(model, ids_BT, mask_BT)
    last_B = (mask_BT * torch.arange(mask_BT.shape[1])).amax(1)
    changed_BT = torch.where(torch.arange(ids_BT.shape[1]) >= last_B[:, None], 39 - ids_BT, ids_BT)
    assert torch.equal(states_before(model, changed_BT, mask_BT), before)


def test_equal_prefixes_are_packed_once():
    rows = pack([[1, 2, 3, 7, 8], [1, 2, 3, 9], [4, 5, 6], [4, 5, 6, 7], [4]], [3, 3, 1, 2, 1])
    assert rows.ids_N.tolist() == [1, 2, 3, 7, 8, 9, 4, 5, 6, 4, 5, 6, 7]
    assert rows.position_N.tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 2, 0, 1, 2, 3]
    assert rows.segment_S4.tolist() == [
        [0, 3, 0, 0],
        [3, 2, 0, 3],
        [5, 1, 0, 3],
        [6, 1, 0, 0],
        [7, 2, 6, 1],
        [9, 2, 0, 0],
        [11, 2, 9, 2],
    ]
    assert rows.prefix_B.tolist() == [0, 0, 6, 9, 6]
    assert rows.prefix_length_B.tolist() == [3, 3, 1, 2, 1]
    assert rows.rest_B.tolist() == [3, 5, 7, 11, 13]


def test_a_diverged_model_says_so():
    """NaN in the weights must come out as NaN, whatever the compiled loops reorder."""
    model, (ids_BT, mask_BT) = qwen3(), CASES["ragged prompts"]
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[3, 5] = float("nan")
    assert states_before(model, ids_BT, mask_BT).isnan().all(1).any()
    assert can_fuse(model)


def test_what_is_left_to_the_own_forward():
    def hooked():
        model = qwen3()
        model.lm_head.register_forward_pre_hook(lambda *args: None)
        return model

    dora = peft.get_peft_model(qwen3(), peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)).get_base_model()
    others = {
        "bias": llama(attention_bias=True),
        "gelu": llama(hidden_act="gelu"),
        "bfloat16": qwen3().bfloat16(),
        "window": qwen3(use_sliding_window=True, sliding_window=8, max_window_layers=0),
        "dora": dora,
        "hook": hooked(),
        "dropout": lora(dropout=0.1).train(),
        "attention dropout": qwen3(attention_dropout=0.1).train(),
        "another kind": nn.Linear(2, 2),
    }
    assert {name for name, model in others.items() if can_fuse(model)} == set()
    assert can_fuse(lora(dropout=0.1)) and can_fuse(qwen3(attention_dropout=0.1)) and can_fuse(qwen3().train())
