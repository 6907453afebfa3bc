"""Pairs, DPO, KTO, step-level and online DPO: values by hand, masks by gradient, token ids untouched, resume."""

import math

import pytest
import torch

from common import pairs, preference, trl_adapter
from common.algo import AlgoConfig, load_algo
from common.compute import Budget, Meter
from common.episodes import Episode, collate
from common.files import read_json_lines
from common.grpo import train_grpo
from common.loop import make_optimizer
from common.lora import LoraSettings, add_adapter
from common.models import DecoderConfig, build_decoder, parameter_count
from common.pairs import Answer, Pair
from common.policy import score_tokens, select
from common.preference import dpo_loss, dpo_step, train_dpo, train_kto
from common.runlog import RunLog
from common.schema import ConfigError
from common.tokenizers import build_phrase_tokenizer

TOKENIZER = build_phrase_tokenizer([f"w{i}" for i in range(20)])
SHAPE = DecoderConfig(hidden=16, layers=2, heads=2, kv_heads=1, feedforward=32, max_length=64)
LABELS = {"experiment": "unit", "scale": "smoke", "variant": None, "arm": "arm", "seed": 0}


def build_model(seed=0):
    return build_decoder(SHAPE, TOKENIZER, seed)


def episode(ids, layout, reward, group=0, success=False):
    """One token per letter of the layout: P prompt, A, B, C the policy's turns, E environment."""
    turns = ["ABC".find(kind) for kind in layout]
    mask = [int(turn >= 0) for turn in turns]
    made = Episode(list(ids), mask, [0.0] * len(ids), turns, mask.index(1), {}, group, reward=reward, success=success)
    made.infos = [{"success": success, "reason": ""}]
    return made


def row(text):
    """(ids, mask) from e.g. "5 6 7* 8*": the starred tokens are under the mask."""
    words = text.split()
    return [int(word.strip("*")) for word in words], [int(word.endswith("*")) for word in words]


# Three turns of context and answers; environment tokens (9) inside the answer are never counted.
PAIRS = [
    Pair(row("4 5 10* 11* 2*"), row("4 5 12* 2*")),
    Pair(row("6 13* 14* 9 9 15* 2*"), row("6 16* 9 9 9 17* 18* 2*")),
    Pair(row("7 8 8 19* 2*"), row("7 8 8 20* 21* 22* 23*")),
    Pair(row("4 8 10* 2*"), row("4 8 11* 9 10* 2*")),
]
ANSWERS = [Answer(rows[0], True) for rows in PAIRS] + [Answer(rows[1], False) for rows in PAIRS]
DPO = AlgoConfig(name="dpo", kl_coef=0.2, prompts_per_step=2, lr=1e-2)
KTO = AlgoConfig(name="kto", kl_coef=0.2, prompts_per_step=4, lr=1e-2)


# Pairs ----------------------------------------------------------------------------------------------------------------


def group_of(rewards, group=0):
    return [episode([4, 5, 10 + i, 2], "PPAA", r, group, success=r == 1) for i, r in enumerate(rewards)]


def named(made):
    """Which answers met, by their third token."""
    return [(pair.chosen[0][2] - 10, pair.rejected[0][2] - 10) for pair in made]


def test_best_meets_worst_second_best_second_worst():
    group = group_of([0.25, 1.0, 0.0, 0.5])
    assert named(pairs.pairs_from_episodes(group, "best_worst")) == [(1, 2)]
    assert named(pairs.pairs_from_episodes(group, "best_worst", per_prompt=5)) == [(1, 2), (3, 0)]


def test_an_odd_one_out_and_ties_make_no_pair():
    assert named(pairs.pairs_from_episodes(group_of([1.0, 0.5, 0.0]), "best_worst", per_prompt=5)) == [(0, 2)]
    assert pairs.pairs_from_episodes(group_of([0.5, 0.5, 0.5]), "best_worst") == []
    assert named(pairs.pairs_from_episodes(group_of([1.0, 1.0, 0.0, 0.0]), "best_worst", per_prompt=5)) == [(0, 3), (1, 2)]
    assert len(pairs.pairs_from_episodes(group_of([1.0, 1.0, 0.0]), "all", per_prompt=9)) == 2


def test_right_against_wrong_uses_each_answer_once():
    made = named(pairs.pairs_from_episodes(group_of([1, 0, 1, 0.5, 0]), "right_wrong", per_prompt=9))
    assert len(made) == 2
    assert {a for a, _ in made} == {0, 2}
    assert len({b for _, b in made}) == 2 and {b for _, b in made} <= {1, 3, 4}
    again = named(pairs.pairs_from_episodes(group_of([1, 0, 1, 0.5, 0]), "right_wrong", per_prompt=9))
    assert again == made
    seen = {tuple(named(pairs.pairs_from_episodes(group_of([1, 0, 1, 0.5, 0]), "right_wrong", seed=s))) for s in range(20)}
    assert len(seen) > 2


def test_all_pairs_are_those_with_a_higher_reward():
    made = named(pairs.pairs_from_episodes(group_of([0.25, 1.0, 0.0, 0.25]), "all", per_prompt=99))
    assert sorted(made) == [(0, 2), (1, 0), (1, 2), (1, 3), (3, 2)]
    assert len(pairs.pairs_from_episodes(group_of([0.25, 1.0, 0.0, 0.25]), "all", per_prompt=3)) == 3


def test_pairs_never_cross_prompts_or_groups_and_skip_the_unscored():
    mixed = [*group_of([1.0, 1.0], group=0), *group_of([0.0, 0.0], group=1)]
    assert pairs.pairs_from_episodes(mixed, "best_worst") == []
    other_prompt = group_of([1.0, 0.0])
    other_prompt[1].ids[0] = 7
    assert pairs.pairs_from_episodes(other_prompt, "best_worst") == []
    assert named(pairs.pairs_from_episodes(group_of([math.nan, 1.0, 0.0]), "best_worst")) == [(1, 2)]


def test_the_same_tokens_make_no_pair():
    twins = group_of([1.0, 0.0])
    twins[1].ids = list(twins[0].ids)
    assert pairs.pairs_from_episodes(twins, "best_worst") == []


def test_rows_end_with_the_policys_last_token():
    cut = episode([4, 5, 10, 9, 11, 9, 9], "PPAEBEE", 1.0)
    assert pairs.answer_row(cut) == row("4 5 10* 9 11*")


def test_unknown_rule_is_named():
    with pytest.raises(ConfigError, match="rule=best: allowed are best_worst, right_wrong, all"):
        pairs.pairs_from_episodes([], "best")


def test_labelled_answers_carry_the_verdict():
    made = pairs.answers_from_episodes([*group_of([1.0, 0.5]), episode([6, 7], "PA", math.nan)])
    assert made == [Answer(row("4 5 10* 2*"), True), Answer(row("4 5 11* 2*"), False)]


# Steps ----------------------------------------------------------------------------------------------------------------

TREE = [  # two turns each: the first step is 10 or 11, behind 10 comes 12, 13 or 14
    episode([4, 10, 9, 12], "PAEB", 1.0),
    episode([4, 10, 9, 13], "PAEB", 0.0),
    episode([4, 10, 9, 14], "PAEB", 0.5),
    episode([4, 11, 9, 12], "PAEB", 0.25),
]


def test_step_pairs_share_a_prefix_and_differ_in_the_next_step():
    # First step: 10 earned (1 + 0 + 0.5) / 3 = 0.5 and 11 earned 0.25. Behind 4 10 9: 12 earned 1, 13 nothing, 14 0.5.
    deep = [Pair(row("4 10 9 12*"), row("4 10 9 13*")), Pair(row("4 10 9 12*"), row("4 10 9 14*"))]
    first = Pair(row("4 10*"), row("4 11*"))
    assert pairs.step_pairs(TREE, per_prompt=9) == [*deep, first]  # by gap: 1, 0.5, 0.25
    assert pairs.step_pairs(TREE, per_prompt=1) == deep[:1]


def test_steps_with_equal_means_make_no_pair():
    even = [episode([4, 10, 9, 12], "PAEB", 1.0), episode([4, 10, 9, 13], "PAEB", 0.0), episode([4, 11, 9, 12], "PAEB", 0.5)]
    assert pairs.step_pairs(even, per_prompt=9) == [Pair(row("4 10 9 12*"), row("4 10 9 13*"))]


def test_another_reply_of_the_environment_is_another_prefix():
    apart = [episode([4, 10, 8, 12], "PAEB", 1.0), episode([4, 10, 9, 13], "PAEB", 0.0)]
    assert pairs.step_pairs(apart, per_prompt=9) == []


def test_separators_cut_a_turn_into_steps():
    answer = episode([4, 10, 7, 11, 7, 12, 9, 13], "PAAAAAEB", 1.0)
    assert pairs.steps(answer) == [(1, 6), (7, 8)]
    assert pairs.steps(answer, frozenset({7})) == [(1, 3), (3, 5), (5, 6), (7, 8)]
    reasoning = [episode([4, 10, 7, 11, 2], "PAAAA", 1.0), episode([4, 10, 7, 12, 2], "PAAAA", 0.0)]
    assert pairs.step_pairs(reasoning, separators=frozenset({7})) == [Pair(row("4 10 7 11* 2*"), row("4 10 7 12* 2*"))]


# Losses ---------------------------------------------------------------------------------------------------------------


def test_dpo_loss_by_hand():
    """Log-ratios 1 and -1 at beta 0.5: rewards 0.5 and -0.5, loss log(1 + e^-1); equal ratios: log 2."""
    policy = torch.tensor([-2.0, -4.0]), torch.tensor([-6.0, -5.0])
    reference = torch.tensor([-3.0, -3.0]), torch.tensor([-5.0, -4.0])
    loss, chosen, rejected = dpo_loss(*policy, *reference, 0.5)
    assert loss.tolist() == pytest.approx([math.log(1 + math.exp(-1)), math.log(2)], abs=1e-6)
    assert chosen.tolist() == [0.5, -0.5]
    assert rejected.tolist() == [-0.5, -0.5]


def test_dpo_gradient_by_hand():
    """d loss / d chosen = -beta * sigmoid(-margin), and the opposite for rejected (Rafailov et al. 2023, section 4)."""
    chosen, rejected = (torch.tensor([x], requires_grad=True) for x in (-2.0, -6.0))
    loss, _, _ = dpo_loss(chosen, rejected, torch.tensor([-3.0]), torch.tensor([-5.0]), 0.5)
    loss.sum().backward()
    assert chosen.grad.item() == pytest.approx(-0.5 / (1 + math.e), abs=1e-6)
    assert rejected.grad.item() == pytest.approx(0.5 / (1 + math.e), abs=1e-6)


# One step of ours -----------------------------------------------------------------------------------------------------


def plain_loss(model, reference, made, beta):
    """The mean DPO loss written out: one row at a time, from the model's own logits."""

    def total(which, ids, mask):
        logp = torch.log_softmax(which(input_ids=torch.tensor([ids])).logits[0], -1)
        return sum(logp[t - 1, ids[t]] for t in range(1, len(ids)) if mask[t])

    losses = []
    for chosen, rejected in made:
        margin = total(model, *chosen) - total(model, *rejected)
        with torch.no_grad():
            start = total(reference, *chosen) - total(reference, *rejected)
        losses.append(torch.log1p(torch.exp(-beta * (margin - start))))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("micro_tokens", [1, 20, 4096])
def test_dpo_step_has_the_gradient_of_the_written_out_loss(micro_tokens):
    model, reference = build_model(0), build_model(1)
    expected = plain_loss(model, reference, PAIRS, 0.2)
    expected.backward()
    gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    meter = Meter(1)
    algo = AlgoConfig(name="online_dpo", kl_coef=0.2, grad_clip=1e9)
    metrics = dpo_step(model, reference, optimizer, PAIRS, TOKENIZER.pad_token_id, algo, meter, micro_tokens)
    assert metrics["loss/policy"] == pytest.approx(expected.item(), abs=1e-6)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, gradient[name], atol=1e-6), name
    tokens = sum(len(ids) for pair in PAIRS for ids, _ in pair)
    assert (meter.tokens_forward, meter.tokens_trained) == (tokens, tokens - 2 * len(PAIRS))


def watch(module, store):
    def keep(_module, args, kwargs, output):
        tensor = output if isinstance(output, torch.Tensor) else output.last_hidden_state
        if tensor.requires_grad:
            tensor.retain_grad()
            store.append((kwargs["input_ids"] if "input_ids" in kwargs else args[0], tensor))

    return module.register_forward_hook(keep, with_kwargs=True)


def check_gradient_stays_on_the_masks(hidden, rows):
    """Only states that predict a token under the mask have a gradient: none on prompt, environment or padding."""
    seen = 0
    for ids_BT, states in hidden:
        for ids, gradient in zip(ids_BT.tolist(), states.grad.abs().amax(-1), strict=True):
            source = next(r for r in rows if r[0][:-1] == ids[: len(r[0]) - 1])  # a row's last token may not be forwarded
            predicts = torch.tensor((source[1][1:] + [0] * len(ids))[: len(ids)]).bool()
            assert (gradient[~predicts] == 0).all()
            assert (gradient[predicts] > 0).all()
            seen += 1
    assert seen == len(rows)


def test_online_dpo_gradient_is_zero_off_the_policys_tokens():
    model, hidden = build_model(0), []
    watch(model.model, hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    algo = AlgoConfig(name="online_dpo", kl_coef=0.2)
    dpo_step(model, build_model(1), optimizer, PAIRS, TOKENIZER.pad_token_id, algo, Meter(1))
    check_gradient_stays_on_the_masks(hidden, [r for pair in PAIRS for r in pair])
    assert model.model.embed_tokens.weight.grad[TOKENIZER.pad_token_id].abs().max() == 0


def test_L12_an_end_token_that_equals_the_pad_token_is_trained():
    """With the pad id in the place of the end token, the same positions count."""
    rows = preference.pair_batch(PAIRS, 2, "cpu")
    assert rows.mask_BT.sum().item() == sum(sum(mask) for pair in PAIRS for _, mask in pair)
    assert rows.attention_BT.sum(1).tolist() == [5, 4, 7, 8, 5, 7, 4, 6]


def test_pieces_keep_pairs_whole():
    batch = preference.pair_batch(PAIRS, 0, "cpu")
    pieces = [piece.tolist() for piece in preference.pair_pieces(batch, 28)]
    assert pieces == [[2, 3], [4, 5, 6, 7], [0, 1]]
    assert select(batch, torch.tensor(pieces[1])).ids_BT.shape == (4, 7)


# TRL ------------------------------------------------------------------------------------------------------------------


def run(train, model, data, algo, folder, **keys):
    with RunLog(folder, LABELS, quiet=True) as log:
        keys = {"seed": 0, "budget": Budget(steps=3), "log": log, "folder": folder} | keys
        meter = train(model, TOKENIZER, data, algo, **keys)
    return meter, read_json_lines(folder / "metrics.jsonl")


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_trl_sees_our_ids_and_masks_and_nothing_else(tmp_path, monkeypatch):
    """Whatever reaches TRL's loss is a row of ours, in the order of the plan, with the policy's tokens under the mask."""
    from trl import DPOTrainer

    seen, original = [], DPOTrainer._compute_loss

    def spy(self, model, inputs, return_outputs):
        seen.append({key: value.tolist() for key, value in inputs.items()})
        return original(self, model, inputs, return_outputs)

    monkeypatch.setattr(DPOTrainer, "_compute_loss", spy)
    monkeypatch.setattr(TOKENIZER.__class__, "__call__", None)
    monkeypatch.setattr(TOKENIZER.__class__, "decode", None)
    run(train_dpo, build_model(), PAIRS, DPO, tmp_path)
    pairs_seen = []
    for inputs in seen:
        real = [
            ([i for i, a in zip(ids, att) if a], [m for m, a in zip(mask, att) if a])
            for ids, att, mask in zip(inputs["input_ids"], inputs["attention_mask"], inputs["completion_mask"])
        ]
        pairs_seen += [Pair(chosen, rejected) for chosen, rejected in zip(real[:2], real[2:])]
    assert sorted(pairs_seen[:4]) == sorted(PAIRS)  # the first epoch
    assert pairs_seen[4:6] != pairs_seen[:2]  # the second has its own order
    assert all(pair in PAIRS for pair in pairs_seen)


def test_trl_dpo_takes_the_same_steps_as_ours(tmp_path):
    """Weights after three steps of AdamW: TRL's trainer against `dpo_step`, with learning rates that decay."""
    algo = AlgoConfig(name="dpo", kl_coef=0.2, prompts_per_step=2, lr=1e-2, lr_decay="linear", grad_clip=0.5)
    theirs, ours = build_model(), build_model()
    start = weights(ours)
    meter, rows = run(train_dpo, theirs, PAIRS, algo, tmp_path)
    reference, optimizer = trl_adapter.frozen_copy(ours), make_optimizer(list(ours.parameters()), [], algo)
    job = trl_adapter.TrlJob("DPO", PAIRS, None, None, {}, algo, 0, Budget(steps=3), None, tmp_path, None, None, 1)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 3)
        batch = [PAIRS[i] for i in job.batch_at(step)]
        metrics = dpo_step(ours, reference, optimizer, batch, TOKENIZER.pad_token_id, algo, Meter(1))
        for name, value in metrics.items():
            assert rows[step][name] == pytest.approx(value, abs=2e-5), name
    assert torch.allclose(weights(theirs), weights(ours), atol=2e-5)
    assert (weights(theirs) - start).abs().max() > 1e-2
    assert rows[0]["loss/policy"] == pytest.approx(math.log(2), abs=1e-6)
    assert meter.parameters == parameter_count(ours)


def test_dpo_counts_the_reference_and_ends_with_the_flops(tmp_path):
    tokens = sum(len(ids) for pair in PAIRS for ids, _ in pair)  # of an epoch of two steps
    n = parameter_count(build_model())
    meter, rows = run(train_dpo, build_model(), PAIRS, DPO, tmp_path, budget=Budget(flops=n * 8 * tokens))
    assert (meter.tokens_trained, meter.tokens_forward, len(rows)) == (tokens, tokens, 2)


def kto_by_hand(model, reference, batch, beta, desirable=1.0, undesirable=1.0):
    """Ethayarajh et al. 2024: weight * (1 - sigmoid(+-(r - z))), from log-ratios of rows."""

    def ratios(rows):
        batch_BT = collate([Episode(i, m, [0.0] * len(i), [-1] * len(i), 1, {}, 0) for i, m in rows], 0)
        sums = []
        for which in (model, reference):
            with torch.no_grad():
                logp_N = score_tokens(which, batch_BT, 1.0).logp_N
            sums.append(torch.zeros(batch_BT.ids_BT.shape).masked_scatter(batch_BT.mask_BT, logp_N).sum(1))
        return sums[0] - sums[1]

    r = beta * ratios([answer.row for answer in batch])
    z = beta * ratios(preference.mismatched([answer.row for answer in batch])).mean().clamp(min=0)
    sign = torch.tensor([1.0 if answer.desirable else -1.0 for answer in batch])
    weight = torch.tensor([desirable if answer.desirable else undesirable for answer in batch])
    return float((weight * (1 - torch.sigmoid(sign * (r - z)))).mean()), float(z / beta)


def test_kto_logs_the_loss_of_the_paper(tmp_path):
    """At the start policy = reference: r = z = 0 and every answer costs half its weight. Later: the formula."""
    weighted = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    model, stopped = build_model(), build_model()
    meter, rows = run(train_kto, model, ANSWERS, KTO, tmp_path / "long", **weighted)
    run(train_kto, stopped, ANSWERS, KTO, tmp_path / "short", budget=Budget(steps=2), **weighted)
    job = trl_adapter.TrlJob("KTO", ANSWERS, None, None, {}, KTO, 0, Budget(steps=3), None, tmp_path, None, None, 1)
    first, third = ([ANSWERS[i] for i in job.batch_at(step)] for step in (0, 2))
    start = sum(0.75 if answer.desirable else 0.25 for answer in first) / 4
    assert rows[0]["loss/policy"] == pytest.approx(start, abs=1e-6)
    loss, z = kto_by_hand(stopped, build_model(), third, 0.2, 1.5, 0.5)
    assert rows[2]["loss/policy"] == pytest.approx(loss, abs=1e-5)
    assert rows[2]["preference/kl"] == pytest.approx(z, abs=1e-5)
    seen = [ANSWERS[i] for step in range(3) for i in job.batch_at(step)]
    own = sum(len(answer.row[0]) for answer in seen)
    other = sum(len(ids) for step in range(3) for ids, _ in preference.mismatched([ANSWERS[i].row for i in job.batch_at(step)]))
    assert (meter.tokens_trained, meter.tokens_forward) == (own, own + 2 * other)


def test_mismatched_answers_stand_behind_another_prompt():
    rows = [row("4 10* 2*"), row("4 11* 9 12*"), row("5 6 13*")]
    assert preference.mismatched(rows) == [row("4 13*"), row("4 13*"), row("5 6 11* 9 12*")]
    with pytest.raises(ValueError, match="all 2 answers have the same one"):
        preference.mismatched(rows[:2])


@pytest.mark.parametrize(("train", "data", "algo"), [(train_dpo, PAIRS, DPO), (train_kto, ANSWERS, KTO)])
def test_trl_gradient_is_zero_off_the_policys_tokens(train, data, algo, tmp_path):
    model, hidden = build_model(), []
    handle = watch(model.model, hidden)
    everything = AlgoConfig(name=algo.name, kl_coef=0.2, prompts_per_step=len(data), lr=1e-2)
    run(train, model, data, everything, tmp_path, budget=Budget(steps=1), reference=build_model(1))
    handle.remove()
    check_gradient_stays_on_the_masks(hidden, [answer.row for answer in ANSWERS])


@pytest.mark.parametrize(("train", "data", "algo"), [(train_dpo, PAIRS, DPO), (train_kto, ANSWERS, KTO)])
def test_a_run_that_was_cut_goes_on_to_the_same_end(train, data, algo, tmp_path):
    """Stopped in its third step, after the state of step two was saved: same weights, same metrics, same tokens."""

    class Cut(Exception):
        pass

    def stop(step, flops):
        if step == 3:
            raise Cut

    keys = {"budget": Budget(steps=5), "checkpoint_every": 2}
    whole, cut, resumed = build_model(), build_model(), build_model()
    meter, rows = run(train, whole, data, algo, tmp_path / "whole", **keys)
    with pytest.raises(Cut):
        run(train, cut, data, algo, tmp_path / "cut", evaluate=stop, evaluate_every_flops=1.0, **keys)
    again, rows_again = run(train, resumed, data, algo, tmp_path / "cut", **keys)
    assert torch.equal(weights(whole), weights(resumed))
    assert meter.state_dict() == again.state_dict()
    times = ("progress/eta_s",)
    assert [{k: v for k, v in r.items() if k not in times} for r in rows] == [
        {k: v for k, v in r.items() if k not in times} for r in rows_again
    ]
    assert "forward" not in whole.__dict__ and not whole.training


def test_lora_trains_the_adapter_against_the_start_policy(tmp_path):
    """The reference is the start with its adapter, not the bare base: at the first step the loss is log 2."""
    model = add_adapter(build_model(), LoraSettings(enabled=True, rl_rank=2), "rl", seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    base = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    _, rows = run(train_dpo, model, PAIRS, DPO, tmp_path)
    assert rows[0]["loss/policy"] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(rows[2]["loss/policy"] - math.log(2)) > 1e-3
    assert list(model.peft_config) == ["default"]
    assert all(torch.equal(base[name], p) for name, p in model.named_parameters() if name in base)


def test_refusals_name_key_and_value(tmp_path):
    model, loud = build_model(), {"seed": 0, "budget": Budget(steps=1), "log": None, "folder": tmp_path}
    with pytest.raises(ConfigError, match=r"algo.kl_coef=0.0: .*above 0"):
        train_dpo(model, TOKENIZER, PAIRS, AlgoConfig(name="dpo"), **loud)
    with pytest.raises(ConfigError, match=r"algo.epochs=2: .*allowed is 1"):
        train_kto(model, TOKENIZER, ANSWERS, AlgoConfig(name="kto", kl_coef=0.1, epochs=2), **loud)
    with pytest.raises(ConfigError, match=r"algo.temperature=0.7"):
        train_dpo(model, TOKENIZER, PAIRS, AlgoConfig(name="dpo", kl_coef=0.1, temperature=0.7), **loud)
    with pytest.raises(ConfigError, match=r"algo.prompts_per_step=64: there are 4 examples"):
        train_dpo(model, TOKENIZER, PAIRS, AlgoConfig(name="dpo", kl_coef=0.1), **loud)
    single = AlgoConfig(name="online_dpo", kl_coef=0.1, group_size=1, advantage="reward", drop_zero_variance=False)
    with pytest.raises(ConfigError, match=r"algo.group_size=1"):
        preference.train_online_dpo(model, TOKENIZER, None, None, single, **loud)
    with pytest.raises(ConfigError, match=r"algo.name=dpo: train_grpo does not train by preference"):
        train_grpo(model, TOKENIZER, None, None, load_algo("dpo"), **loud)


@pytest.mark.parametrize("preset", ["dpo", "kto", "online_dpo"])
def test_presets(preset):
    algo = load_algo(preset)
    assert (algo.name, algo.kl_coef) == (preset, 0.1)
    preference.check_keys(algo)
