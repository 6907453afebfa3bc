"""The GRPO and PPO loops as programs: resume, determinism, sampling rounds, references, schedules, compute counts."""

import dataclasses
import math

import gymnasium
import pytest
import torch
from gymnasium.spaces import Text
from peft import LoraConfig, get_peft_model

from common import grpo, loop, losses, policy
from common.algo import AlgoConfig, load_algo
from common.checkpoints import load_state
from common.compute import Budget, Meter
from common.episodes import collate, run_episodes
from common.files import read_json_lines
from common.models import DecoderConfig, build_decoder, parameter_count
from common.ppo import train_ppo
from common.runlog import RunLog
from common.schema import ConfigError
from common.seeding import generator
from common.tokenizers import build_phrase_tokenizer

WORDS = ["a", "b", "c", "d"]
TOKENIZER = build_phrase_tokenizer([*WORDS, "?"])
SHAPE = DecoderConfig(hidden=16, layers=2, heads=2, kv_heads=1, feedforward=32, max_length=48)
LABELS = {"experiment": "test", "scale": "smoke", "variant": None, "arm": "arm", "seed": 0}
TIMES = ("time/rollout", "time/update", "throughput/tokens_per_s", "progress/eta_s")


class Game(gymnasium.Env):
    """Scores 1 when the answer holds the shown letter; a task with `always` pays that much whatever is said."""

    observation_space = action_space = Text(32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.task = options
        return WORDS[options["word"]] + "?", {}

    def step(self, action):
        score = self.task.get("always", float(WORDS[self.task["word"]] in action))
        reward = math.nan if self.task.get("unscored") else score
        return "", reward, True, False, {"success": score > 0.5, "reason": "letter", "parts": {"letter": score}}


def task_at(step, n):
    return [{"word": (step + i) % 4} for i in range(n)]


GRPO = AlgoConfig(name="grpo", prompts_per_step=4, group_size=4, max_new_tokens=4, lr=3e-3)
PPO = AlgoConfig(
    name="ppo",
    advantage="gae",
    drop_zero_variance=False,
    prompts_per_step=16,
    group_size=1,
    epochs=2,
    minibatches=2,
    value_warmup_steps=1,
    max_new_tokens=4,
)


def build_model():
    return build_decoder(SHAPE, TOKENIZER, 0)


def train(algo, folder, steps, model=None, tasks=task_at, flops=None, **kwargs):
    model = model or build_model()
    run = train_ppo if algo.name == "ppo" else grpo.train_grpo
    with RunLog(folder, LABELS, quiet=True) as log:
        budget = Budget(steps=steps, flops=flops)
        meter = run(model, TOKENIZER, Game, tasks, algo, seed=0, budget=budget, log=log, folder=folder, **kwargs)
    rows = read_json_lines(folder / "metrics.jsonl")
    return model, meter, [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("algo", [GRPO, PPO], ids=["grpo", "ppo"])
def test_two_runs_are_equal_and_a_stopped_run_ends_the_same(algo, tmp_path):
    whole, meter, rows = train(algo, tmp_path / "whole", 6)
    again, _, rows_again = train(algo, tmp_path / "again", 6)
    assert torch.equal(weights(whole), weights(again))
    assert rows == rows_again
    assert len(rows) == 6

    class Stop(Exception):
        pass

    def stop(step, n):
        if step == 5:
            raise Stop
        return task_at(step, n)

    with pytest.raises(Stop):
        train(algo, tmp_path / "stopped", 6, tasks=stop, checkpoint_every=3)
    assert load_state(tmp_path / "stopped" / "state.pt")["step"] == 3
    resumed, resumed_meter, resumed_rows = train(algo, tmp_path / "stopped", 6)
    assert torch.equal(weights(whole), weights(resumed))
    assert resumed_rows == rows
    assert resumed_meter.flops == meter.flops
    finished, _, _ = train(algo, tmp_path / "stopped", 6)
    assert torch.equal(weights(finished), weights(whole))


def test_flops_are_those_of_the_tokens_processed(tmp_path):
    algo = dataclasses.replace(GRPO, drop_zero_variance=False, kl_coef=0.1)
    _, meter, _ = train(algo, tmp_path, 1)
    episodes = run_episodes(
        build_model(), TOKENIZER, Game, task_at(0, 4), group_size=4, max_new_tokens=4, generator=generator(0, "rollout", 0, 0)
    )
    tokens = sum(len(e.ids) for e in episodes)
    assert meter.tokens_trained == tokens - len(episodes)
    assert meter.tokens_forward == sum(e.tokens_forward for e in episodes) + tokens
    assert meter.flops == parameter_count(build_model()) * (2 * meter.tokens_forward + 6 * meter.tokens_trained)


def test_budget_in_flops_ends_the_run_and_times_the_evaluations(tmp_path):
    _, meter, rows = train(GRPO, tmp_path / "a", 4)
    seen = []
    every = meter.flops / 4
    _, second, rows = train(
        GRPO,
        tmp_path / "b",
        None,
        flops=meter.flops,
        evaluate=lambda step, used: seen.append((step, used)),
        evaluate_every_flops=every,
    )
    assert second.flops == meter.flops
    assert len(rows) == 4
    assert seen[-1] == (4, meter.flops)
    assert len(seen) <= 4
    assert all(used >= (i + 1) * every for i, (_, used) in enumerate(seen))


def test_L01_groups_without_spread_move_nothing(tmp_path):
    same = lambda step, n: [{"word": 0, "always": 0.3}] * n  # noqa: E731
    start = weights(build_model())
    model, meter, rows = train(dataclasses.replace(GRPO, kl_coef=0.1), tmp_path / "drop", 2, tasks=same)
    assert torch.equal(weights(model), start)
    assert meter.tokens_trained == 0
    assert [row["reward/zero_std_frac"] for row in rows] == [1.0, 1.0]
    keep = dataclasses.replace(GRPO, drop_zero_variance=False)
    model, meter, _ = train(keep, tmp_path / "keep", 2, tasks=same)
    assert torch.equal(weights(model), start)
    assert meter.tokens_trained == 0


def test_L01_kl_acts_on_flat_groups_only_when_they_stay_in_the_batch():
    model, reference = build_model(), build_decoder(SHAPE, TOKENIZER, 1)
    episodes = run_episodes(model, TOKENIZER, Game, task_at(0, 2), group_size=2, max_new_tokens=4, generator=generator(0, "x"))
    batch = collate(episodes, TOKENIZER.pad_token_id)
    algo = dataclasses.replace(GRPO, kl_coef=0.1, drop_zero_variance=False, grad_clip=1e9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    a_BT = torch.zeros(batch.mask_BT.shape)
    grpo.update(model, reference, optimizer, batch, a_BT, torch.ones(4).bool(), algo, 0, 0, Meter(1))
    seen = model.lm_head.weight.grad.clone()
    model.zero_grad()
    logp_N = policy.score_tokens(model, batch, 1.0).logp_N
    with torch.no_grad():
        ref_N = policy.score_tokens(reference, batch, 1.0).logp_N
    (0.1 * losses.kl(logp_N, ref_N, "k3").mean()).backward()
    assert torch.allclose(seen, model.lm_head.weight.grad, atol=1e-6)
    assert seen.abs().max() > 1e-5


def test_refill_rounds_replace_groups_without_spread(tmp_path):
    def half_flat(step, n):
        flat = {"word": 0, "always": 0.3}
        return [flat if i < 4 else {"word": i % 4} for i in range(n)]

    plain = train(GRPO, tmp_path / "plain", 1, tasks=half_flat)[1]
    refilled = train(dataclasses.replace(GRPO, refill_rounds=2), tmp_path / "refill", 1, tasks=half_flat)
    assert plain.tokens_trained == 0
    assert refilled[1].tokens_trained > 0
    assert refilled[1].tokens_forward > plain.tokens_forward
    assert refilled[2][0]["reward/letter"] == pytest.approx(refilled[2][0]["score/mean"])


class Told:
    """An episode as far as `refill` looks at it."""

    def __init__(self, group, success):
        self.group, self.success = group, success


def told(*groups):
    """Four answers per group, the given number of them right; groups that are all right or all wrong are not kept."""
    made = [Told(group, answer < right) for group, right in enumerate(groups) for answer in range(4)]
    return made, torch.tensor([0 < right < 4 for right in groups]).repeat_interleave(4)


def test_refill_with_prompts_asks_for_new_prompts_until_enough_groups_are_kept():
    algo = dataclasses.replace(GRPO, refill_rounds=3)
    assert grpo.refill(*told(0, 4, 1, 2), 1, algo) == [4, 5, 6, 7]
    assert grpo.refill(*told(0, 4, 1, 2), 2, algo) == [8, 9, 10, 11]
    assert grpo.refill(*told(3, 3, 1, 2), 1, algo) == []


def test_refill_with_answers_asks_for_more_of_the_prompts_of_middling_difficulty():
    algo = dataclasses.replace(GRPO, refill_rounds=3, refill_with="answers")
    assert grpo.refill(*told(0, 4, 1, 2), 1, algo) == [3, 2]
    assert grpo.refill(*told(0, 3, 1, 2), 1, algo) == [3]
    assert grpo.refill(*told(3, 3, 1, 2), 1, algo) == []
    assert grpo.refill(*told(0, 4, 0, 4), 1, algo) == []
    made = [Told(0, answer < 1) for answer in range(8)]  # one in eight is below 20 %
    assert grpo.refill(made, torch.ones(8).bool(), 1, algo) == []


def test_refill_with_answers_makes_groups_larger_and_takes_no_further_prompt():
    algo = dataclasses.replace(GRPO, refill_rounds=2, refill_with="answers", prompts_per_step=6, max_new_tokens=6)
    asked = []

    def half_flat(step, n):
        asked.append(n)
        return [{"word": i % 4} | ({"always": 0.3} if i < 3 else {}) for i in range(n)]

    batch, a_BT, keep_B, _ = grpo.collect(build_model(), None, TOKENIZER, Game, half_flat, algo, 0, 1, Meter(1))
    assert len(asked) > 1
    assert max(asked) == 6
    assert (len(keep_B), int(keep_B.sum())) == (36, 24)
    sizes = []
    for word in (3, 0, 1):  # the tasks whose score depends on the answer
        shown = batch.ids_BT[:, 1] == TOKENIZER.convert_tokens_to_ids(WORDS[word])
        rows = keep_B & shown
        sizes.append(int(rows.sum()))
        first_B = a_BT[rows].gather(1, batch.mask_BT[rows].int().argmax(1, keepdim=True))[:, 0]
        assert float(first_B.sum()) == pytest.approx(0.0, abs=1e-4)
        assert first_B.abs().max() > 0.5
    assert sum(sizes) == 24
    assert max(sizes) > 4
    assert all(size % 4 == 0 for size in sizes)


def test_reinforce_pp_advantages_are_whitened_rewards_to_go_with_kl_at_each_token():
    model, reference = build_model(), build_decoder(SHAPE, TOKENIZER, 1)
    keys = {"prompts_per_step": 8, "group_size": 2, "max_new_tokens": 4, "kl_coef": 0.5, "minibatches": 2}
    algo = load_algo("reinforce_pp", keys)
    batch, a_BT, keep_B, metrics = grpo.collect(model, reference, TOKENIZER, Game, task_at, algo, 0, 0, Meter(1))
    assert keep_B.all()
    ref_BT = policy.reference_logprobs(model, reference, batch, 1.0)
    scores, returns = [], []
    for b, (ids, mask) in enumerate(zip(batch.ids_BT, batch.mask_BT, strict=True)):
        text = TOKENIZER.decode(ids[mask], skip_special_tokens=True)
        scores.append(float(WORDS[(b // 2) % 4] in text))
        penalties = (0.5 * (batch.logp_BT[b] - ref_BT[b]))[mask].tolist()
        returns.append([scores[-1] - sum(penalties[t:]) for t in range(len(penalties))])
    flat = torch.tensor([x for row in returns for x in row])
    assert torch.allclose(a_BT[batch.mask_BT], (flat - flat.mean()) / flat.std(), atol=1e-4)
    assert a_BT[~batch.mask_BT].abs().max() == 0.0
    assert metrics["score/mean"] == pytest.approx(sum(scores) / 16)
    assert metrics["success/mean"] == metrics["score/mean"]
    assert 0 < metrics["score/mean"] < 1


def test_reinforce_pp_baseline_whitens_what_the_group_mean_leaves():
    keys = {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 4}
    algo = load_algo("reinforce_pp_baseline", keys)
    batch, a_BT, _, _ = grpo.collect(build_model(), None, TOKENIZER, Game, task_at, algo, 0, 0, Meter(1))
    plain = load_algo("reinforce_pp_baseline", keys | {"whiten": False})
    _, centred_BT, _, _ = grpo.collect(build_model(), None, TOKENIZER, Game, task_at, plain, 0, 0, Meter(1))
    assert torch.allclose(centred_BT.sum(0)[batch.mask_BT.all(0)], torch.zeros(1), atol=1e-6)
    x_N = centred_BT[batch.mask_BT]
    assert torch.allclose(a_BT[batch.mask_BT], (x_N - x_N.mean()) / x_N.std(), atol=1e-5)
    assert x_N.std() > 0.1


@pytest.mark.parametrize("preset", ["grpo", "reinforce_pp", "ppo"])
def test_L23_an_unscored_episode_teaches_nothing(preset, tmp_path):
    def tasks(step, n):
        return [{"word": i % 4} | ({"unscored": True} if i < 4 else {}) for i in range(n)]

    keys = {"prompts_per_step": 8, "group_size": 2, "max_new_tokens": 4, "value_warmup_steps": 0, "minibatches": 2}
    model, meter, _ = train(load_algo(preset, keys), tmp_path, 2, tasks=tasks)
    assert weights(model).isfinite().all()
    assert not torch.equal(weights(model), weights(build_model()))
    assert meter.tokens_trained > 0


PPO_KEYS = {"gae_level": "turn", "lam": 0.5, "gamma": 0.9, "whiten": True, "value_clip": 1e-3, "value_coef": 5.0}


@pytest.mark.parametrize("key", PPO_KEYS)
def test_each_key_of_ppo_changes_the_run(key, tmp_path):
    base = dataclasses.replace(PPO, value_clip=0.0, value_warmup_steps=0)
    plain, _, rows = train(base, tmp_path / "plain", 2)
    other, _, other_rows = train(dataclasses.replace(base, **{key: PPO_KEYS[key]}), tmp_path / "other", 2)
    assert not torch.equal(weights(plain), weights(other))
    assert rows[0]["score/mean"] == other_rows[0]["score/mean"]


def test_a_value_clip_of_zero_is_none_and_a_wide_one_acts_the_same(tmp_path):
    off, _, _ = train(dataclasses.replace(PPO, value_clip=0.0), tmp_path / "off", 3)
    wide, _, _ = train(dataclasses.replace(PPO, value_clip=1e6), tmp_path / "wide", 3)
    assert torch.equal(weights(off), weights(wide))


def test_kl_in_the_reward_uses_the_start_policy_and_is_zero_before_the_first_update(tmp_path):
    algo = dataclasses.replace(GRPO, kl_coef=0.5, kl_in="reward", kl_estimator="k1")
    _, _, rows = train(algo, tmp_path, 4)
    assert rows[0]["reward/mean"] == pytest.approx(rows[0]["score/mean"], abs=1e-4)
    assert abs(rows[3]["reward/mean"] - rows[3]["score/mean"]) > 1e-4


def test_L15_first_update_has_ratio_one_at_any_temperature(tmp_path):
    for temperature in (0.6, 1.0, 1.3):
        algo = dataclasses.replace(GRPO, temperature=temperature, drop_zero_variance=False)
        _, _, rows = train(algo, tmp_path / str(temperature), 1)
        assert abs(rows[0]["kl/old"]) < 1e-8


def test_reference_is_the_adapter_off_or_a_frozen_copy():
    base = build_model()
    frozen = policy.make_reference(base, None, needed=True)
    assert frozen is not base
    assert not any(p.requires_grad for p in frozen.parameters())
    assert policy.make_reference(base, None, needed=False) is None
    adapted = get_peft_model(build_model(), LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.0))
    assert policy.make_reference(adapted, None, needed=True) is adapted
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    batch = collate(run_episodes(base, TOKENIZER, Game, task_at(0, 3), max_new_tokens=4, generator=generator(0, "x")), 0)
    off = policy.reference_logprobs(adapted, adapted, batch, 1.0)
    assert torch.allclose(off, policy.reference_logprobs(base, frozen, batch, 1.0), atol=1e-6)
    on = policy.score_tokens(adapted, batch, 1.0).logp_N
    assert (on - off[batch.mask_BT]).abs().max() > 1e-2
    assert off[~batch.mask_BT].abs().max() == 0.0


def test_an_adapter_trains_and_leaves_its_base_alone(tmp_path):
    adapted = get_peft_model(build_model(), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0))
    before = {n: p.detach().clone() for n, p in adapted.named_parameters()}
    algo = dataclasses.replace(GRPO, kl_coef=0.05, drop_zero_variance=False, lr=1e-2)
    train(algo, tmp_path, 3, model=adapted)
    changed = {n for n, p in adapted.named_parameters() if not torch.equal(p, before[n])}
    assert changed
    assert all("lora_" in name for name in changed)
    assert all("lora_" in name for name in load_state(tmp_path / "state.pt")["weights"]["policy"])


def test_value_warmup_trains_the_value_head_alone(tmp_path):
    algo = dataclasses.replace(PPO, value_warmup_steps=2)
    model, meter, rows = train(algo, tmp_path, 2)
    assert torch.equal(weights(model), weights(build_model()))
    assert meter.tokens_trained == 0
    assert any(p.abs().max() > 0 for n, p in load_state(tmp_path / "state.pt")["weights"]["value"].items() if n == "2.bias")
    assert rows[1]["loss/value"] != rows[0]["loss/value"]


def test_learning_rate_warms_up_and_decays():
    optimizer = loop.make_optimizer([torch.nn.Parameter(torch.zeros(1))], [torch.nn.Parameter(torch.zeros(1))], PPO)
    algo = dataclasses.replace(PPO, lr=1.0, value_lr=2.0, warmup_steps=4, lr_decay="cosine")
    expected = {(0, 0.0): 0.25, (3, 0.0): 1.0, (9, 0.5): 0.5, (9, 1.0): 0.0}
    for (step, used), factor in expected.items():
        loop.set_learning_rate(optimizer, algo, step, used)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([factor, 2 * factor])
    loop.set_learning_rate(optimizer, dataclasses.replace(algo, lr_decay="linear"), 9, 0.75)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.25)


def test_a_model_that_changes_its_logits_is_refused():
    model = build_model()
    policy.check_head(model)

    def soft_cap(module, args, output):
        output.logits = torch.tanh(output.logits)
        return output

    model.register_forward_hook(soft_cap)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM changes its logits"):
        policy.check_head(model)


def test_a_state_of_another_model_is_refused(tmp_path):
    train(GRPO, tmp_path, 1)
    other = get_peft_model(build_model(), LoraConfig(r=2, target_modules="all-linear"))
    with pytest.raises(ValueError, match="holds other parameters than the policy"):
        train(GRPO, tmp_path, 2, model=other)


@pytest.mark.parametrize("key", ["top_p", "top_k"])
def test_L16_training_cannot_sample_from_a_cut_off_distribution(key):
    """Ratios compare full distributions, so an algorithm has no nucleus or top-k key at all."""
    with pytest.raises(ConfigError, match=f"algo.{key}=0.8: unknown key"):
        load_algo("grpo", {key: 0.8})
