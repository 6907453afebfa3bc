"""What the updates of GRPO and PPO may touch: policy tokens, and nothing else. Measured by gradient."""

import dataclasses
import math
from collections import defaultdict

import pytest
import torch
from torch import nn

from common import advantages, grpo, loop, policy, ppo
from common.algo import AlgoConfig
from common.compute import Meter
from common.episodes import Episode, collate
from common.fused import can_fuse
from common.models import DecoderConfig, build_decoder, parameter_count
from common.tokenizers import build_phrase_tokenizer

TOKENIZER = build_phrase_tokenizer([f"w{i}" for i in range(20)])
SHAPE = DecoderConfig(hidden=16, layers=2, heads=2, kv_heads=1, feedforward=32, max_length=64)
# Prompt, answer, reply of the environment, answer, reply: P = prompt, A = policy's answer, E = environment.
LAYOUTS = ["PPPAAEEAA", "PPAAA", "PPPPAEEEEAAAEE", "PAAAAEA", "PPPAEA", "PPAAAAAA"]


def build_model(seed=0):
    return build_decoder(SHAPE, TOKENIZER, seed)


def episode(layout, group, reward, seed=0):
    stream = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 24, (len(layout),), generator=stream).tolist()
    mask = [int(kind == "A") for kind in layout]
    starts = [t for t in range(len(layout)) if mask[t] and not mask[t - 1]]
    turns = [sum(s <= t for s in starts) - 1 if mask[t] else -1 for t in range(len(layout))]
    made = Episode(ids, mask, [-2.0 * m for m in mask], turns, layout.index("A"), {}, group, reward=reward)
    made.turn_rewards = [0.0] * (len(starts) - 1) + [reward]
    made.terminated = True
    return made


def episodes():
    return [episode(layout, i // 3, float(i % 3), seed=i) for i, layout in enumerate(LAYOUTS)]


GRPO = AlgoConfig(name="grpo", drop_zero_variance=False, max_new_tokens=8, grad_clip=1e9)
PPO = AlgoConfig(name="ppo", advantage="gae", drop_zero_variance=False, group_size=1, max_new_tokens=8, grad_clip=1e9)
CASES = {
    "grpo": GRPO,
    "grpo-kl-entropy": dataclasses.replace(GRPO, kl_coef=0.1, entropy_coef=0.01, loss_agg="seq_mean"),
    "grpo-two-epochs": dataclasses.replace(GRPO, epochs=2, loss_agg="seq_sum_const"),
    "gspo": dataclasses.replace(GRPO, policy_loss="gspo", loss_agg="seq_mean", epochs=2, clip_low=0.9, clip_high=9.0),
    "cispo": dataclasses.replace(GRPO, policy_loss="cispo", epochs=2, clip_low=1.0, clip_high=0.1),
    "ppo-token": PPO,
    "ppo-turn": dataclasses.replace(PPO, gae_level="turn", entropy_coef=0.01),
    "ppo-kl": dataclasses.replace(PPO, kl_coef=0.1, kl_estimator="k2"),
}


def run_update(algo, model, batch, made, rewards=None):
    """One update of the named algorithm that leaves the weights where they are (learning rate 0)."""
    meter = Meter(parameter_count(model))
    reference = policy.make_reference(model, None, needed=algo.kl_coef > 0)
    if algo.name == "ppo":
        head = policy.build_value_head(model, 0)
        nn.init.constant_(head[2].weight, 0.1)
        optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": head.parameters()}], lr=0.0)
        targets, _ = ppo.make_targets(model, reference, head, made, batch, algo, meter)
        ppo.update(model, head, optimizer, batch, targets, torch.arange(len(made)), algo, 0, 0, meter)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        a = advantages.group_norm(torch.tensor([e.reward for e in made]), torch.tensor([e.group for e in made]))
        a = a[:, None] * batch.mask_BT
        grpo.update(model, reference, optimizer, batch, a, torch.ones(len(made), dtype=torch.bool), algo, 0, 0, meter)
    return meter


def watch(module, store):
    """Keeps (input ids, output) of a module, the output with its gradient, each time it runs with gradient."""

    def keep(_module, args, kwargs, output):
        tensor = output if isinstance(output, torch.Tensor) else output.last_hidden_state
        if tensor.requires_grad:
            tensor.retain_grad()
            store.append((kwargs["input_ids"] if "input_ids" in kwargs else args[0], tensor))

    return module.register_forward_hook(keep, with_kwargs=True)


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_exactly_zero_off_the_policys_tokens(name):
    made = episodes()
    batch = collate(made, TOKENIZER.pad_token_id)
    model = build_model()
    embedded, hidden = [], []
    watch(model.model.embed_tokens, embedded)
    watch(model.model, hidden)
    run_update(CASES[name], model, batch, made)
    assert hidden
    seen = 0
    for (ids_BT, states), (_, inputs) in zip(hidden, embedded, strict=True):
        for ids, state_gradient, input_gradient in zip(ids_BT.tolist(), states.grad, inputs.grad, strict=True):
            source = next(e for e in made if e.ids[:4] == ids[:4])
            predicts = torch.tensor((source.mask[1:] + [0] * len(ids))[: len(ids)]).bool()
            gradient_T = state_gradient.abs().amax(-1)
            assert (gradient_T[~predicts] == 0).all()
            assert (input_gradient[int(predicts.nonzero().max()) + 1 :] == 0).all()
            seen += int((gradient_T[predicts] > 0).any())
    assert seen >= 4


@pytest.mark.parametrize("name", CASES)
def test_fused_forward_has_the_gradient_of_the_models_own_forward(name):
    def gradient(plain):
        made = episodes()
        for e in made:
            e.ids = [max(i, 5) for i in e.ids]
        made[2].ids[-2:] = [4, 4]  # the reply that ends this row: no other token of the batch is a 4
        model = build_model()
        if plain:
            model.register_forward_hook(lambda *_: None)  # a model with hooks is run as it is
        assert can_fuse(model) is not plain
        run_update(CASES[name], model, collate(made, TOKENIZER.pad_token_id), made)
        return {key: parameter.grad for key, parameter in model.named_parameters()}

    fused, plain = gradient(False), gradient(True)
    for key, expected in plain.items():
        assert torch.allclose(fused[key], expected, atol=2e-6), key
    for gradients in (fused, plain):
        embedding = gradients["model.embed_tokens.weight"]
        assert embedding[TOKENIZER.pad_token_id].abs().max() == 0.0
        assert embedding[4].abs().max() == 0.0
        assert embedding.abs().max() > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_padding_and_trailing_environment_tokens_change_no_gradient(name):
    def gradient(pad_id, extra):
        made = episodes()
        for e in made:
            e.ids += [pad_id] * extra
            e.mask += [0] * extra
            e.logps += [0.0] * extra
            e.turns += [-1] * extra
        model = build_model()
        run_update(CASES[name], model, collate(made, pad_id), made)
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    plain = gradient(0, 0)
    assert plain.abs().max() > 1e-3
    assert torch.allclose(gradient(7, 0), plain, atol=1e-6)
    assert torch.allclose(gradient(2, 3), plain, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tokens", [1, 12])
def test_L09_micro_batches_give_the_same_gradient(name, tokens, monkeypatch):
    def gradient():
        made = episodes()
        model = build_model()
        meter = run_update(CASES[name], model, collate(made, 0), made)
        return torch.cat([p.grad.flatten() for p in model.parameters()]), meter.tokens_trained

    whole, whole_tokens = gradient()
    monkeypatch.setattr(policy.micro_batches, "__defaults__", (tokens,))
    pieces, pieces_tokens = gradient()
    assert torch.allclose(pieces, whole, atol=2e-6)
    assert pieces_tokens == whole_tokens


def test_L11_minibatches_share_no_denominator():
    """Five episodes in two minibatches: the second, shorter one is averaged over what it holds."""
    made = episodes()[:5]
    batch = collate(made, 0)
    algo = dataclasses.replace(GRPO, minibatches=2, prompts_per_step=2)
    gradients = []

    class Spy(torch.optim.SGD):
        def step(self):
            gradients.append([p.grad.clone() for g in self.param_groups for p in g["params"]])

    model = build_model()
    a = torch.tensor([1.0, -0.5, 2.0, -1.0, 0.7])
    optimizer, a_BT = Spy(model.parameters(), lr=0.0), a[:, None] * batch.mask_BT
    grpo.update(model, None, optimizer, batch, a_BT, torch.ones(5).bool(), algo, 3, 0, Meter(1))
    order = torch.from_numpy(grpo.rng(3, "minibatch", 0, 0).permutation(5))
    assert len(gradients) == 2
    for rows, seen in zip(order.tensor_split(2), gradients, strict=True):
        model.zero_grad()
        logp = policy.score_tokens(model, policy.select(batch, rows), 1.0).logp_N
        counts = batch.mask_BT[rows].sum(1)
        ratio = (logp + 2.0).exp()
        pushed = a[rows].repeat_interleave(counts)
        loss = -torch.minimum(ratio * pushed, ratio.clamp(0.8, 1.2) * pushed).mean()
        loss.backward()
        expected = [p.grad for p in model.parameters()]
        for mine, theirs in zip(seen, expected, strict=True):
            assert torch.allclose(mine, theirs, atol=1e-6)


def test_L12_end_token_that_equals_the_pad_token_stays_trainable():
    made = [episode("PPAAA", 0, 1.0), episode("PPA", 0, 0.0)]
    for e in made:
        e.ids[-1] = TOKENIZER.pad_token_id
    batch = collate(made, TOKENIZER.pad_token_id)
    logp_N = policy.score_tokens(build_model(), batch, 1.0).logp_N
    assert len(logp_N) == 4
    assert batch.mask_BT.sum(1).tolist() == [3, 1]


def test_L13_masked_truncated_episodes_stay_in_the_length_metrics():
    made = [episode("PAAAA", 0, 1.0), episode("PAAAAAAAA", 0, 0.0)]
    made[1].truncated = True
    algo = dataclasses.replace(GRPO, mask_truncated=True)
    assert loop.learnable(made, algo).tolist() == [True, False]
    metrics = loop.episode_metrics(made, torch.tensor([1.0, 0.0]))
    assert metrics["len/completion_mean"] == 6.0
    assert metrics["len/truncated_frac"] == 0.5


class Counting(nn.Module):
    """A stand-in for a language model: probability 0.9 on (token + 1) mod 10, the rest shared; hidden = one-hot."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(10, 10, bias=False)
        table = torch.full((10, 10), math.log(0.1 / 9))
        for token in range(10):
            table[token, (token + 1) % 10] = math.log(0.9)
        self.head.weight.data = table.T.clone()

    def base_model(self, input_ids, use_cache):
        return type("Output", (), {"last_hidden_state": nn.functional.one_hot(input_ids, 10).float()})

    def get_output_embeddings(self):
        return self.head


def test_L17_each_token_is_scored_by_the_position_before_it():
    made = [Episode([3, 4, 5, 6], [0, 0, 1, 1], [0.0] * 4, [-1, -1, 0, 0], 2, {}, 0)]
    logp_N = policy.score_tokens(Counting(), collate(made, 0), 1.0).logp_N
    assert logp_N.tolist() == pytest.approx([math.log(0.9)] * 2, abs=1e-6)


def test_L18_values_are_those_of_the_state_before_each_token():
    class Positions(nn.Module):
        """Hidden state = the position, so that a value tells where it was read."""

        def base_model(self, input_ids, use_cache):
            position_BTD = torch.arange(input_ids.shape[1]).float().expand(input_ids.shape)[..., None]
            return type("Output", (), {"last_hidden_state": position_BTD})

    made = [
        Episode([1] * 5, [0, 0, 1, 1, 1], [0.0] * 5, [-1, -1, 0, 0, 0], 2, {}, 0),
        Episode([1] * 4, [0, 1, 0, 1], [0.0] * 4, [-1, 0, -1, 1], 1, {}, 0),
    ]
    values_BT, final_B = ppo.predict_values(Positions(), nn.Identity(), collate(made, 0))
    assert values_BT.tolist() == [[0, 0, 1, 2, 3], [0, 0, 0, 2, 0]]
    assert final_B.tolist() == [4, 3]


def test_L26_ratio_of_an_on_policy_batch_with_tool_spans_is_one():
    made = episodes()
    model = build_model()
    batch = collate(made, 0)
    out = policy.score_tokens(model, batch, 1.0)
    batch.logp_BT[batch.mask_BT] = out.logp_N.detach()
    algo = dataclasses.replace(GRPO, epochs=2)
    sums = defaultdict(float)
    n = len(out.logp_N)
    sampler, ones, share, lengths = batch.logp_BT[batch.mask_BT], torch.ones(n), torch.full((n,), 1 / n), batch.mask_BT.sum(1)
    loss = loop.policy_loss(out, sampler, ones, share, lengths, None, algo, sums)
    assert loss.item() == pytest.approx(-1.0, abs=1e-6)
    assert sums["kl/old"] == 0.0
    assert sums["ratio/clip_low_frac"] == sums["ratio/clip_high_frac"] == 0


@pytest.mark.parametrize(("name", "low", "high"), [("ppo_clip", 0, 2), ("gspo", 0, 3), ("cispo", 1, 2)])
def test_clip_metrics_count_what_each_surrogate_cuts(name, low, high):
    """Two episodes of three and two tokens; A = 1 in the first, whose mean ratio is high, and -1 and 1 in the second."""
    ratio, pushed = torch.tensor([2.0, 1.0, 1.5, 0.5, 1.0]), torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0])
    out = policy.TokenOutputs(ratio.log(), torch.zeros(5), torch.zeros(5, 1))
    algo = dataclasses.replace(GRPO, policy_loss=name, epochs=2)
    sums = defaultdict(float)
    loop.policy_loss(out, torch.zeros(5), pushed, torch.full((5,), 0.2), torch.tensor([3, 2]), None, algo, sums)
    # The second episode's mean ratio, sqrt(0.5), is too low, and so it is for its token with A < 0 alone.
    assert (sums["ratio/clip_low_frac"], sums["ratio/clip_high_frac"]) == (low + (name == "gspo"), high)


def test_L20_turn_rewards_lie_on_the_last_token_of_their_turn():
    made = [episode("PPAAEAEE", 0, 1.0), episode("PAEEAA", 0, 0.5)]
    made[0].turn_rewards, made[1].turn_rewards = [0.25, 1.0], [0.1, 0.5]
    algo = dataclasses.replace(PPO, overlong_buffer=8, max_new_tokens=8)
    rewards_BT = loop.token_rewards(made, collate(made, 0), algo)
    assert rewards_BT[0].tolist() == pytest.approx([0, 0, 0, 0.25, 0, 1.0 - 0.25, 0, 0])
    assert rewards_BT[1].tolist() == pytest.approx([0, 0.1, 0, 0, 0, 0.5 - 0.25, 0, 0])


def test_zero_advantage_episodes_are_not_forwarded_but_counted():
    made = episodes()
    batch, model = collate(made, 0), build_model()
    a = torch.tensor([1.0, 0, 0, 0, 0, -1.0])

    def gradient(rows_forwarded):
        model.zero_grad()
        meter = Meter(1)
        optimizer, a_BT = torch.optim.SGD(model.parameters(), lr=0.0), a[:, None] * batch.mask_BT
        grpo.update(model, None, optimizer, batch, a_BT, torch.ones(6).bool(), GRPO, 0, 0, meter)
        assert meter.tokens_trained == sum(len(made[b].ids) - 1 for b in rows_forwarded)
        return model.model.layers[0].mlp.up_proj.weight.grad.clone()

    seen = gradient([0, 5])
    model.zero_grad()
    out = policy.score_tokens(model, batch, 1.0)
    loss = -(out.logp_N * a.repeat_interleave(batch.mask_BT.sum(1))).sum() / batch.mask_BT.sum()
    loss.backward()
    assert torch.allclose(seen, model.model.layers[0].mlp.up_proj.weight.grad, atol=1e-6)


@pytest.mark.parametrize(("temperature", "expected"), [(0.6, -0.2025731), (1.0, -0.40760596)])
def test_L15_logits_are_divided_not_logprobs(temperature, expected):
    """Logits 2, 1 and 0 for the one token that the policy wrote, the first of the three."""
    model = Counting()
    model.head.weight.data = torch.tensor([2.0, 1.0, 0.0] + [-1e9] * 7)[:, None].expand(10, 10)
    made = [Episode([5, 0], [0, 1], [0.0] * 2, [-1, 0], 1, {}, 0)]
    assert policy.score_tokens(model, collate(made, 0), temperature).logp_N.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_L15_scores_use_the_sampling_temperature(temperature):
    model, batch = build_model(), collate(episodes(), 0)
    out = policy.score_tokens(model, batch, temperature)
    logits = model(input_ids=batch.ids_BT).logits
    full = torch.log_softmax(logits / temperature, -1)[:, :-1].gather(-1, batch.ids_BT[:, 1:, None])[..., 0]
    assert torch.allclose(out.logp_N, full[batch.mask_BT[:, 1:]], atol=1e-5)
