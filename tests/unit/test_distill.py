"""Distillation: divergences against hand-computed values, what an update may touch, teachers, resuming, costs."""

import dataclasses
import math

import gymnasium
import pytest
import torch
from gymnasium.spaces import Text
from peft import LoraConfig, get_peft_model

from common import distill, target_losses
from common.checkpoints import load_state
from common.compute import Budget, Meter
from common.distill import DistillConfig, train_distill
from common.episodes import Episode, collate
from common.files import read_json_lines
from common.models import DecoderConfig, build_decoder, parameter_count
from common.runlog import RunLog
from common.schema import ConfigError
from common.tokenizers import build_phrase_tokenizer, encode_prompt

WORDS = [f"w{i}" for i in range(8)]
TOKENIZER = build_phrase_tokenizer([*WORDS, "?"])
SHAPE = DecoderConfig(hidden=16, layers=2, heads=2, kv_heads=1, feedforward=32, max_length=48)
LARGER = dataclasses.replace(SHAPE, hidden=32, feedforward=48)
LABELS = {"experiment": "test", "scale": "smoke", "variant": None, "arm": "arm", "seed": 0}
TIMES = ("time/rollout", "time/update", "throughput/tokens_per_s", "progress/eta_s")
CONFIG = DistillConfig(prompts_per_step=3, group_size=2, max_new_tokens=4, max_turns=2, lr=3e-3)
# P = prompt, A = policy's answer, E = environment.
LAYOUTS = ["PPPAAEEAA", "PPAAA", "PPPPAEEEEAAAEE", "PAAAAEA"]
# Student and teacher over three words: all values below were worked out by hand from these.
P, Q = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.1, 0.6, 0.3]).log()


class TwoWords(gymnasium.Env):
    """Shows a word, then another; an answer scores when it holds the word just shown."""

    observation_space = action_space = Text(32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word, self.turn = options["word"], 0
        return f"{WORDS[self.word]}?", {}

    def step(self, action):
        right = WORDS[(self.word + self.turn) % 8] in action
        self.turn += 1
        info = {"success": right, "reason": "word"}
        return f"{WORDS[(self.word + 1) % 8]}?", float(right), self.turn == 2, False, info


def task_at(step, n):
    return [{"word": (step + i) % 8} for i in range(n)]


def build_model(seed=0, shape=SHAPE):
    return build_decoder(shape, TOKENIZER, seed)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(folder, steps, config=CONFIG, model=None, teacher=None, tasks=task_at, **kwargs):
    model = model or build_model()
    with RunLog(folder, LABELS, quiet=True) as log:
        meter = train_distill(
            model, teacher, TOKENIZER, TwoWords, tasks, config, seed=0, budget=Budget(steps=steps), log=log, folder=folder,
            **kwargs,
        )  # fmt: skip
    rows = read_json_lines(folder / "metrics.jsonl")
    return model, meter, [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def episode(layout, seed):
    ids = torch.randint(4, 12, (len(layout),), generator=torch.Generator().manual_seed(seed)).tolist()
    mask = [int(kind == "A") for kind in layout]
    return Episode(ids, mask, [-2.0 * m for m in mask], [m - 1 for m in mask], layout.index("A"), {"word": seed}, seed)


def episodes():
    return [episode(layout, seed) for seed, layout in enumerate(LAYOUTS)]


def run_update(config, model, teacher, batch, seen=None):
    """One update that leaves the weights where they are (learning rate 0); the gradient stays on the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    meter = Meter(parameter_count(model))
    values = distill.update(model, teacher, False, optimizer, batch, seen or batch, config, meter)
    return values, torch.cat([p.grad.flatten() for p in model.parameters()])


def test_divergences_equal_the_values_worked_out_by_hand():
    reverse = 0.7 * math.log(7) - 0.3 * math.log(3)
    forward = 0.9 * math.log(3) - 0.1 * math.log(7)
    assert target_losses.kl_divergence(P, Q).item() == pytest.approx(reverse, abs=1e-6) == pytest.approx(1.0325534, abs=1e-6)
    assert target_losses.kl_divergence(Q, P).item() == pytest.approx(forward, abs=1e-6) == pytest.approx(0.7941601, abs=1e-6)
    assert target_losses.generalized_jsd(P, Q, 0.5).item() == pytest.approx(0.2050380, abs=1e-6)
    assert target_losses.generalized_jsd(Q, P, 0.5).item() == pytest.approx(0.2050380, abs=1e-6)
    assert target_losses.generalized_jsd(P, Q, 0.25).item() == pytest.approx(0.1487199, abs=1e-6)
    near = [target_losses.generalized_jsd(P.double(), Q.double(), beta).item() for beta in (1e-5, 1 - 1e-5)]
    assert [value / 1e-5 for value in near] == pytest.approx([forward, reverse], rel=1e-3)


def test_divergences_equal_torch_distributions():
    stream = torch.Generator().manual_seed(1)
    student, teacher = (torch.randn(5, 7, generator=stream).double().log_softmax(-1) for _ in range(2))
    p, q = (torch.distributions.Categorical(logits=logits) for logits in (student, teacher))
    middle = torch.distributions.Categorical(probs=0.3 * q.probs + 0.7 * p.probs)
    kl = torch.distributions.kl_divergence
    expected = {
        "reverse_kl": kl(p, q),
        "forward_kl": kl(q, p),
        "jsd": 0.3 * kl(q, middle) + 0.7 * kl(p, middle),
        "sampled": (p.probs * (student - teacher))[:, 2] / p.probs[:, 2],
    }
    for objective, value in expected.items():
        loss = target_losses.distillation_loss(objective, student, teacher, torch.full((5,), 2), 0.3)
        assert torch.allclose(loss, value, atol=1e-12), objective


def test_words_of_probability_zero_add_nothing_and_give_a_finite_gradient():
    logits = torch.tensor([1.0, 2.0, -math.inf], requires_grad=True)
    other = torch.tensor([2.0, 1.0, -math.inf]).log_softmax(-1)
    value = target_losses.kl_divergence(logits.log_softmax(-1), other)
    assert value.item() == pytest.approx(math.tanh(0.5), abs=1e-6)
    assert torch.isfinite(torch.autograd.grad(value, logits)[0][:2]).all()


def test_L14_gradients_of_the_four_objectives():
    """On logits z: sampled A (onehot - p) times -1, reverse p (log p/q - KL), forward p - q; jsd by central differences."""
    logits = P.double().clone().requires_grad_()
    teacher, p, q = Q.double()[None], P.double().exp(), Q.double().exp()

    def gradient(objective, word=0, beta=0.5):
        loss = target_losses.distillation_loss(objective, logits.log_softmax(-1)[None], teacher, torch.tensor([word]), beta)
        return torch.autograd.grad(loss.sum(), logits)[0]

    ratio = (p / q).log()
    for word in range(3):
        assert torch.allclose(gradient("sampled", word), ratio[word] * (torch.eye(3)[word] - p))
    mean = sum(p[word] * gradient("sampled", word) for word in range(3))
    assert torch.allclose(gradient("reverse_kl"), p * (ratio - (p * ratio).sum()))
    assert torch.allclose(gradient("reverse_kl"), mean)
    assert torch.allclose(gradient("forward_kl"), p - q)
    for word in range(3):
        step = 1e-5 * torch.eye(3).double()[word]
        ends = [target_losses.generalized_jsd((P.double() + s).log_softmax(-1), Q.double(), 0.3) for s in (step, -step)]
        assert gradient("jsd", beta=0.3)[word].item() == pytest.approx(((ends[0] - ends[1]) / 2e-5).item(), abs=1e-8)


@pytest.mark.parametrize("objective", target_losses.OBJECTIVES)
def test_L01_gradient_reaches_the_states_before_policy_tokens_and_no_others(objective):
    model, teacher = build_model(), build_model(1)
    kept = []

    def keep(_module, args, kwargs, output):
        output.last_hidden_state.retain_grad()
        kept.append((kwargs["input_ids"], output.last_hidden_state))

    model.model.register_forward_hook(keep, with_kwargs=True)
    made = episodes()
    run_update(dataclasses.replace(CONFIG, objective=objective, micro_tokens=20), model, teacher, collate(made, 0))
    rows = [row for ids_BT, states in kept for row in zip(ids_BT.tolist(), states.grad.abs().sum(-1), strict=True)]
    assert len(rows) == len(made)
    for ids, strength_T in rows:
        own = next(e for e in made if e.ids[:-1] == ids[: len(e.ids) - 1])
        wanted_T = torch.zeros(len(ids)).bool()
        wanted_T[: len(own.ids) - 1] = torch.tensor(own.mask[1:]).bool()
        assert (strength_T[wanted_T] > 1e-6).all()
        assert (strength_T[~wanted_T] == 0).all()


def test_the_loss_is_the_mean_over_policy_tokens_of_the_divergence():
    model, teacher, batch = build_model(), build_model(1), collate(episodes(), 0)
    with torch.no_grad():
        student_BTV, teacher_BTV = (m(batch.ids_BT).logits.log_softmax(-1) for m in (model, teacher))
    p, q = (x[:, :-1][batch.mask_BT[:, 1:]] for x in (student_BTV, teacher_BTV))
    values, _ = run_update(CONFIG, model, teacher, batch)
    expected = (p.exp() * (p - q)).sum(-1).mean().item()
    assert values["loss/policy"] == pytest.approx(expected, rel=1e-5)
    assert values["kl/teacher"] == pytest.approx(expected, rel=1e-5)
    assert values["entropy"] == pytest.approx(-(p.exp() * p).sum(-1).mean().item(), rel=1e-5)
    sampled, _ = run_update(dataclasses.replace(CONFIG, objective="sampled"), model, teacher, batch)
    own = batch.ids_BT[:, 1:][batch.mask_BT[:, 1:]][:, None]
    assert sampled["loss/policy"] == pytest.approx((p - q).gather(1, own).mean().item(), rel=1e-4)


@pytest.mark.parametrize("loss_agg", ["token_mean", "seq_mean", "seq_sum_const"])
def test_L10_the_gradient_does_not_depend_on_micro_batches(loss_agg):
    model, teacher, batch = build_model(), build_model(1), collate(episodes(), 0)
    gradients = [
        run_update(dataclasses.replace(CONFIG, loss_agg=loss_agg, micro_tokens=tokens), model, teacher, batch)[1]
        for tokens in (1, 20, 4096)
    ]
    assert torch.allclose(gradients[0], gradients[2], atol=1e-6)
    assert torch.allclose(gradients[1], gradients[2], atol=1e-6)
    assert gradients[2].abs().max() > 1e-3


def test_temperature_divides_the_logits_of_both():
    model, teacher, batch = build_model(), build_model(1), collate(episodes(), 0)
    with torch.no_grad():
        p, q = ((m(batch.ids_BT).logits / 0.5).log_softmax(-1)[:, :-1][batch.mask_BT[:, 1:]] for m in (model, teacher))
    values, _ = run_update(dataclasses.replace(CONFIG, temperature=0.5), model, teacher, batch)
    assert values["loss/policy"] == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-5)


def test_the_privileged_teacher_scores_the_same_tokens_behind_another_prompt():
    model, made = build_model(), episodes()
    prompts = [[1, 5, 6, 7, 8, 9], "w1w2?", [1, 4], "w3?"]
    played = collate(made, 0)
    batch, seen = distill.make_batches(made, played, TOKENIZER, model, model, lambda task: prompts[task["word"]], None)
    assert batch is played
    assert torch.equal(seen.ids_BT[seen.mask_BT], batch.ids_BT[batch.mask_BT])
    assert torch.equal(seen.turn_BT[seen.mask_BT], batch.turn_BT[batch.mask_BT])
    got_NV = distill.teacher_distributions(model, model, True, seen, 1.0)
    expected = []
    for own, prompt in zip(made, prompts):
        prompt = encode_prompt(TOKENIZER, prompt) if isinstance(prompt, str) else prompt
        ids = prompt + own.ids[own.prompt_length :]
        mask = [0] * len(prompt) + own.mask[own.prompt_length :]
        with torch.no_grad():
            logp_TV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected += [logp_TV[t - 1] for t, m in enumerate(mask) if m]
    assert torch.allclose(got_NV, torch.stack(expected), atol=1e-5)
    with torch.no_grad():
        p = model(batch.ids_BT).logits.log_softmax(-1)[:, :-1][batch.mask_BT[:, 1:]]
    values, _ = run_update(dataclasses.replace(CONFIG, micro_tokens=20), model, build_model(), batch, seen)
    assert values["loss/policy"] == pytest.approx((p.exp() * (p - got_NV)).sum(-1).mean().item(), rel=1e-4)


def test_learn_from_narrows_the_mask_and_never_widens_it():
    model, teacher, made = build_model(), build_model(1), episodes()
    played = collate(made, 0)
    first = [[1] * (own.prompt_length + 1) + [0] * (len(own.ids) - own.prompt_length - 1) for own in made]
    batch, seen = distill.make_batches(
        made, played, TOKENIZER, model, teacher, lambda task: [1, 4, 5], lambda own: first[own.group]
    )
    assert batch.mask_BT.sum(1).tolist() == seen.mask_BT.sum(1).tolist() == [1, 1, 1, 1]
    assert batch.mask_BT.int().argmax(1).tolist() == [own.prompt_length for own in made]
    values, gradient = run_update(CONFIG, model, teacher, batch, seen)
    assert values["loss/policy"] > 0 and gradient.abs().max() > 0
    nothing, _ = distill.make_batches(made, played, TOKENIZER, model, teacher, None, lambda own: [0] * len(own.ids))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    assert distill.update(model, teacher, False, optimizer, nothing, nothing, CONFIG, Meter(1)) == {}


def test_the_environments_tokens_count_only_where_they_are_learned():
    model, teacher, made = build_model(), build_model(1), episodes()
    played = collate(made, 0)
    batch, seen = distill.make_batches(made, played, TOKENIZER, model, teacher, lambda task: [1, 4, 5], None, True)
    assert batch.mask_BT.sum(1).tolist() == seen.mask_BT.sum(1).tolist() == [6, 3, 10, 6]  # all behind the prompts
    assert torch.equal(seen.ids_BT[seen.mask_BT], batch.ids_BT[batch.mask_BT])
    assert batch.turn_BT.tolist() == played.turn_BT.tolist()
    with torch.no_grad():
        p, q = (m(batch.ids_BT).logits.log_softmax(-1)[:, :-1][batch.mask_BT[:, 1:]] for m in (model, teacher))
        own_N = played.mask_BT[:, 1:][batch.mask_BT[:, 1:]]
        log_ratio_N = (p.gather(1, batch.ids_BT[batch.mask_BT][:, None])[:, 0] + 2.0)[own_N]  # the sampler said -2
    values, gradient = run_update(CONFIG, model, teacher, batch)
    assert values["loss/policy"] == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-4)
    assert values["kl/old"] == pytest.approx((log_ratio_N.exp() - 1 - log_ratio_N).sum().item() / 25, rel=1e-4)
    masked = distill.make_batches(made, played, TOKENIZER, model, teacher, None, None)[0]
    model.zero_grad()
    assert (run_update(CONFIG, model, teacher, masked)[1] - gradient).abs().max() > 1e-3


def test_a_run_that_learns_the_environments_tokens_trains_on_them(tmp_path):
    config = dataclasses.replace(CONFIG, environment_tokens="learned")
    whole = train(tmp_path / "learned", 2, config, teacher=build_model(1))
    masked = train(tmp_path / "masked", 2, teacher=build_model(1))
    assert (weights(whole[0]) - weights(masked[0])).abs().max() > 1e-4
    assert [row["len/completion_mean"] for row in whole[2][:1]] == [row["len/completion_mean"] for row in masked[2][:1]]


@pytest.mark.parametrize("self_teacher", [None, "fixed", "moving"])
def test_two_runs_are_equal_and_a_stopped_run_ends_the_same(self_teacher, tmp_path):
    own = {"teacher": build_model(1)} if self_teacher is None else {"privileged": lambda task: f"{WORDS[task['word']]}w5?"}
    config = dataclasses.replace(CONFIG, self_teacher=self_teacher or "fixed", warmup_steps=2, lr_decay="linear")
    whole, meter, rows = train(tmp_path / "whole", 6, config, **own)
    assert len(rows) == 6
    assert (weights(whole) - weights(build_model())).abs().max() > 1e-3

    class Stop(Exception):
        pass

    def stop(step, n):
        if step == 5:
            raise Stop
        return task_at(step, n)

    with pytest.raises(Stop):
        train(tmp_path / "stopped", 6, config, tasks=stop, checkpoint_every=3, **own)
    assert load_state(tmp_path / "stopped" / "state.pt")["step"] == 3
    resumed, resumed_meter, resumed_rows = train(tmp_path / "stopped", 6, config, **own)
    assert torch.equal(weights(whole), weights(resumed))
    assert resumed_rows == rows
    assert resumed_meter.flops == meter.flops


def test_a_fixed_self_stays_and_a_moving_self_follows(tmp_path):
    """With its own prompt as the privileged one, a moving teacher always equals the student; a fixed one only at first."""
    same = {"privileged": lambda task: f"{WORDS[task['word']]}?"}
    for kind in ("fixed", "moving"):
        config = dataclasses.replace(CONFIG, self_teacher=kind)
        model = build_model()
        _, _, rows = train(tmp_path / kind, 1, config, model=model, **same)
        assert rows[0]["kl/teacher"] == pytest.approx(0.0, abs=1e-6)
        teacher = distill.choose_teacher(model, None, same["privileged"], kind == "moving")
        with torch.no_grad():
            next(iter(model.parameters())).mul_(1.5)
        moved = teacher is model
        assert moved == (kind == "moving")
        assert moved == torch.equal(weights(teacher), weights(model))


def test_a_fixed_self_with_an_adapter_is_its_base_and_a_moving_one_is_not(tmp_path):
    adapted = get_peft_model(build_model(), LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.5))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    batch = collate(episodes(), 0)
    base_NV = distill.teacher_distributions(build_model(1), build_model(), False, batch, 1.0)
    adapted.train()
    assert torch.allclose(distill.teacher_distributions(adapted, adapted, False, batch, 1.0), base_NV, atol=1e-5)
    moving_NV = distill.teacher_distributions(adapted, adapted, True, batch, 1.0)
    assert (moving_NV - base_NV).abs().max() > 1e-2
    assert torch.equal(moving_NV, distill.teacher_distributions(adapted, adapted, True, batch, 1.0))  # no dropout
    assert adapted.training
    adapted.eval()
    before = {n: p.detach().clone() for n, p in adapted.named_parameters()}
    train(tmp_path, 2, model=adapted, privileged=lambda task: "w5?")
    changed = {n for n, p in adapted.named_parameters() if not torch.equal(p, before[n])}
    assert changed and all("lora_" in name for name in changed)


def test_the_meter_counts_the_teachers_tokens_at_the_teachers_size(tmp_path):
    teacher = build_model(1, LARGER)
    model, meter, _ = train(tmp_path, 1, teacher=teacher)
    own, other = parameter_count(model), parameter_count(teacher)
    assert other > 1.5 * own
    scored = meter.tokens_trained  # without a privileged prompt the teacher reads what is trained on
    sampled = meter.tokens_forward - scored
    assert sampled > scored > 0
    assert meter.flops == 2 * own * sampled + 2 * other * scored + 6 * own * meter.tokens_trained
    copy = Meter(own)
    copy.load_state_dict(meter.state_dict())
    assert copy.flops == meter.flops
    _, longer, _ = train(tmp_path / "self", 1, privileged=lambda task: "w1w2w3w4w5w6?")
    assert longer.tokens_forward == sampled + scored + 6 * (8 - 3)  # six rows whose prompt has five tokens more


def test_impossible_settings_are_refused(tmp_path):
    for key, value in {"objective": "kl", "self_teacher": "ema", "lr": 0.0, "group_size": 0, "loss_agg": "mean"}.items():
        with pytest.raises(ConfigError, match=f"distill.{key}={value}"):
            DistillConfig(**{key: value})
    with pytest.raises(ConfigError, match=r"distill\.beta=1"):
        DistillConfig(objective="jsd", beta=1.0)
    with pytest.raises(ConfigError, match=r"distill\.environment_tokens=learned: .* no samples"):
        DistillConfig(objective="sampled", environment_tokens="learned")
    with pytest.raises(ConfigError, match="privileged"):
        train(tmp_path, 1)
    model = build_model()
    with pytest.raises(ConfigError, match="the teacher is the student"):
        train(tmp_path, 1, model=model, teacher=model)
    other = build_decoder(SHAPE, build_phrase_tokenizer(WORDS), 0)
    with pytest.raises(ValueError, match="12 entries, the student's 13"):
        train(tmp_path, 1, teacher=other)
    with pytest.raises(ValueError, match="context 48"):
        train(tmp_path, 1, privileged=lambda task: "w1" * 60)
