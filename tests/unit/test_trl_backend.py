"""TRL as a backend: which keys it gets, what is refused, and the loop around its trainer (budget, resume, SFT)."""

import math
from dataclasses import replace

import gymnasium
import pytest
import torch
from gymnasium.spaces import Text

from common.algo import AlgoConfig, load_algo
from common.backends import trl as backend
from common.backends import trl_sft
from common.checkpoints import load_state
from common.compute import Budget
from common.config import compose
from common.episodes import run_episodes
from common.files import read_json_lines
from common.models import DecoderConfig, build_decoder
from common.runlog import RunLog
from common.schema import ConfigError
from common.seeding import generator
from common.sft import SftConfig, pad_rows, train_sft
from common.tokenizers import build_phrase_tokenizer
from experiments.exp_7_11_general_points.settings import Settings

WORDS = ["a", "b", "c", "d"]
TOKENIZER = build_phrase_tokenizer([*WORDS, "?", " more"])
SHAPE = DecoderConfig(hidden=16, layers=1, heads=2, kv_heads=1, feedforward=32, max_length=64)
LABELS = {"experiment": "test", "scale": "smoke", "variant": None, "arm": "arm", "seed": 0}
TIMES = ("time/rollout", "time/update", "throughput/tokens_per_s", "progress/eta_s")
GRPO = AlgoConfig(name="grpo", prompts_per_step=4, group_size=4, max_new_tokens=4, lr=3e-3)


class Game(gymnasium.Env):
    """Pays for the shown letter; a task with `always` pays that much whatever is said."""

    observation_space = action_space = Text(32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.task = options
        return WORDS[options["word"]] + "?", {}

    def step(self, action):
        right = WORDS[self.task["word"]] in action
        return " more?", self.task.get("always", float(right)), right, False, {"success": right, "reason": "letter"}


def task_at(step, n):
    return [{"word": (step + i) % 4} for i in range(n)]


def train(algo, folder, steps, tasks=task_at, flops=None, **kwargs):
    model = build_decoder(SHAPE, TOKENIZER, 0)
    with RunLog(folder, LABELS, quiet=True) as log:
        budget = Budget(steps=steps, flops=flops)
        run = {"seed": 0, "budget": budget, "log": log, "folder": folder}
        meter = backend.train_grpo(model, TOKENIZER, Game, tasks, algo, **run, **kwargs)
    rows = read_json_lines(folder / "metrics.jsonl")
    return model, meter, [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# Keys and refusals ----------------------------------------------------------------------------------------------------


def test_the_keys_of_a_preset():
    keys = backend.algorithm_keys(load_algo("grpo", {"prompts_per_step": 16, "max_new_tokens": 48, "max_turns": 3}))
    assert keys == {
        "num_generations": 8,
        "per_device_train_batch_size": 128,
        "steps_per_generation": 1,
        "num_iterations": 1,
        "scale_rewards": "group",
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "max_completion_length": 144,
        "temperature": 1.0,
        "entropy_coef": 0.0,
        "use_bias_correction_kl": False,
        "max_grad_norm": 1.0,
    }


@pytest.mark.parametrize(
    ("preset", "changes", "expected"),
    [
        ("dr_grpo", {}, {"scale_rewards": "none", "loss_type": "dr_grpo"}),
        ("rloo", {}, {"scale_rewards": "none"}),
        ("gspo", {}, {"importance_sampling_level": "sequence", "loss_type": "grpo", "steps_per_generation": 4}),
        ("cispo", {}, {"loss_type": "cispo", "epsilon_high": 5.0}),
        ("grpo", {"loss_agg": "token_mean", "entropy_coef": 0.1}, {"loss_type": "bnpo", "entropy_coef": 0.1}),
        ("grpo", {"minibatches": 2, "epochs": 3}, {"num_iterations": 3, "per_device_train_batch_size": 256}),
    ],
)
def test_what_the_other_algorithms_change(preset, changes, expected):
    keys = backend.algorithm_keys(load_algo(preset, changes))
    assert {key: keys[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("preset", "changes", "message"),
    [
        ("ppo", {}, "algo.name=ppo with backend=trl"),
        ("reinforce", {}, "algo.advantage=reward with backend=trl"),
        ("reinforce_pp_baseline", {}, "with backend=trl"),
        ("dapo", {}, "algo.refill_rounds=3"),
        ("grpo", {"std_eps": 1e-6}, "algo.std_eps=1e-06"),
        ("grpo", {"std_ddof": 0}, "algo.std_ddof=0"),
        ("grpo", {"whiten": True}, "algo.whiten=true"),
        ("grpo", {"kl_coef": 0.1, "kl_estimator": "k2"}, "algo.kl_estimator=k2"),
        ("grpo", {"kl_coef": 0.1, "kl_in": "reward"}, "algo.kl_in=reward"),
        ("grpo", {"entropy_coef": 0.1}, "algo.loss_agg=seq_mean"),
        ("cispo", {"loss_agg": "seq_mean"}, "algo.loss_agg=seq_mean"),
        ("cispo", {"clip_low": 0.5}, "algo.clip_low=0.5"),
        ("grpo", {"minibatches": 2, "drop_zero_variance": True}, "algo.drop_zero_variance=true"),
        ("grpo", {"minibatches": 2, "mask_truncated": True}, "algo.mask_truncated=true"),
    ],
)
def test_what_trl_cannot_do_is_refused_with_a_remedy(preset, changes, message):
    with pytest.raises(ConfigError, match=r"backend=trl.*allowed is .*, or backend=native") as error:
        backend.algorithm_keys(load_algo(preset, changes))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "muon"}, "sft.optimizer=muon"),
        ({"variant": "kl"}, "sft.variant=kl"),
        ({"micro_batch": 8}, "sft.micro_batch=8"),
    ],
)
def test_sft_refuses_what_trl_cannot_do(changes, message):
    with pytest.raises(ConfigError, match=message):
        trl_sft.check_config(SftConfig(**changes))


def test_the_experiment_refuses_before_anything_starts():
    settings = compose("7-11", Settings, ["scale=smoke", "backend=trl", "arms=[start,sft_one,rft,grpo]"])
    assert settings.variant == "backend=trl" and settings.backend == "trl"
    for arguments, message in (
        (["backend=trl"], "algo.name=ppo with backend=trl"),
        (["backend=trl", "arms=[grpo]", "algo.whiten=true"], "algo.whiten=true"),
        (["backend=trl", "arms=[sft_one]", "sft.optimizer=muon"], "sft.optimizer=muon"),
        (["backend=trll"], "backend"),
    ):
        with pytest.raises(ConfigError, match=message):
            compose("7-11", Settings, ["scale=smoke", *arguments])


# The loop around TRL --------------------------------------------------------------------------------------------------


def test_tokens_masks_and_logprobs_reach_trl_as_they_were_sampled(tmp_path):
    """Three turns: TRL is given the very ids of the episodes, with environment tokens masked."""
    seen = {}
    algo = replace(GRPO, max_turns=3)

    def rollout(self, *args):
        seen["given"] = original(self, *args)
        return seen["given"]

    def select(self, output):
        seen["output"] = output
        return original_select(self, output)

    original, original_select = backend.Recorder.rollout, backend.Recorder.select
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend.Recorder, "rollout", rollout)
        patch.setattr(backend.Recorder, "select", select)
        train(algo, tmp_path, 1)
    episodes = run_episodes(
        build_decoder(SHAPE, TOKENIZER, 0).eval(),
        TOKENIZER,
        Game,
        task_at(0, 4),
        group_size=4,
        max_turns=3,
        max_new_tokens=4,
        generator=generator(0, "rollout", 0, 0),
    )
    assert any(0 in episode.mask[episode.prompt_length :] for episode in episodes)
    for row, episode in enumerate(episodes):
        cut, length = episode.prompt_length, len(episode.ids) - episode.prompt_length
        assert seen["given"]["prompt_ids"][row] == episode.ids[:cut]
        output = {key: value[row][:length].tolist() for key, value in seen["output"].items() if value.ndim == 2}
        assert output["completion_ids"] == episode.ids[cut:]
        assert output["tool_mask"] == episode.mask[cut:]
        assert output["sampling_per_token_logps"] == pytest.approx(episode.logps[cut:])
        assert sum(seen["output"]["completion_mask"][row]) == length


def test_a_stopped_run_ends_as_a_whole_one(tmp_path):
    algo = replace(GRPO, minibatches=2, epochs=2, drop_zero_variance=False)
    whole, meter, rows = train(algo, tmp_path / "whole", 4)

    class Stop(Exception):
        pass

    def stop(step, n):
        if step == 3:
            raise Stop
        return task_at(step, n)

    with pytest.raises(Stop):
        train(algo, tmp_path / "stopped", 4, tasks=stop, checkpoint_every=2)
    assert load_state(tmp_path / "stopped" / "state.pt")["step"] == 2
    resumed, resumed_meter, resumed_rows = train(algo, tmp_path / "stopped", 4)
    assert torch.equal(weights(whole), weights(resumed))
    assert resumed_rows == rows and len(rows) == 4
    assert resumed_meter.flops == meter.flops
    finished, _, _ = train(algo, tmp_path / "stopped", 4)
    assert torch.equal(weights(finished), weights(whole))


def test_the_budget_in_flops_ends_the_run_and_times_the_evaluations(tmp_path):
    _, meter, _ = train(GRPO, tmp_path / "a", 4)
    seen = []
    every = meter.flops / 4
    note = {"evaluate": lambda step, used: seen.append((step, used)), "evaluate_every_flops": every}
    _, second, rows = train(GRPO, tmp_path / "b", None, flops=meter.flops, **note)
    assert second.flops == meter.flops and len(rows) == 4
    assert seen[-1] == (4, meter.flops)
    assert all(used >= (i + 1) * every for i, (_, used) in enumerate(seen))


def test_a_step_without_spread_changes_nothing_and_the_next_one_learns(tmp_path):
    """Adam's momentum must not move the policy where every group agrees."""

    def tasks(step, n):
        return [{**task, **({"always": 1.0} if step == 1 else {})} for task in task_at(step, n)]

    after_one, _, _ = train(GRPO, tmp_path / "one", 1, tasks=tasks)
    after_two, _, rows = train(GRPO, tmp_path / "two", 2, tasks=tasks)
    after_three, _, _ = train(GRPO, tmp_path / "three", 3, tasks=tasks)
    assert torch.equal(weights(after_one), weights(after_two))
    assert not torch.equal(weights(after_two), weights(after_three))
    assert rows[1]["reward/zero_std_frac"] == 1.0 and "grad_norm" not in rows[1]


def test_the_model_keeps_no_trace_of_trl(tmp_path):
    reference = build_decoder(SHAPE, TOKENIZER, 1).eval()
    before = weights(reference).clone()
    model, _, rows = train(replace(GRPO, kl_coef=0.1), tmp_path, 2, reference=reference)
    assert "forward" not in model.__dict__ and "forward" not in reference.__dict__
    assert torch.equal(weights(reference), before)
    assert not model.training and rows[0]["kl/ref"] > 1e-4  # the reference is another model
    assert math.isfinite(rows[1]["loss/policy"])


# SFT ------------------------------------------------------------------------------------------------------------------


def sft_batch(step):
    rows = [([1, 4 + (step + i) % 4, 8, 4 + (step + i) % 4, 2], [0, 0, 0, 1, 1]) for i in range(3)]
    return pad_rows([*rows, ([1, 5, 8, 5, 5, 5, 2], [0, 0, 0, 1, 0, 1, 1])], TOKENIZER.pad_token_id)


@pytest.mark.parametrize("variant", ["nll", "dft"])
def test_sft_through_trl_is_the_native_sft(variant, tmp_path):
    """Ten steps: weights to 1e-5, counted tokens exactly, the logged loss to 1e-4."""
    config = SftConfig(lr=3e-3, warmup_steps=3, decay_share=0.5, variant=variant)
    made = {}
    for name in ("native", "trl"):
        model = build_decoder(SHAPE, TOKENIZER, 0)
        with RunLog(tmp_path / name, LABELS, quiet=True) as log:
            run = {"budget": Budget(steps=10), "log": log, "folder": tmp_path / name, "log_every": 2}
            if name == "trl":
                meter = trl_sft.train_sft(model, sft_batch, config, tokenizer=TOKENIZER, **run)
            else:
                meter = train_sft(model, sft_batch, config, **run)
        made[name] = model, meter, read_json_lines(tmp_path / name / "metrics.jsonl")
    (ours, our_meter, our_rows), (theirs, their_meter, their_rows) = made["native"], made["trl"]
    assert (weights(ours) - weights(theirs)).abs().max() < 1e-5
    assert (weights(ours) - weights(build_decoder(SHAPE, TOKENIZER, 0))).abs().max() > 1e-3
    assert our_meter.state_dict() == their_meter.state_dict()
    assert [row["step"] for row in their_rows] == [row["step"] for row in our_rows] == [2, 4, 6, 8, 10]
    for our_row, their_row in zip(our_rows, their_rows, strict=True):
        assert their_row["loss/policy"] == pytest.approx(our_row["loss/policy"], rel=1e-4)
        assert their_row["grad_norm"] == pytest.approx(our_row["grad_norm"], rel=1e-4)


def test_a_stopped_sft_ends_as_a_whole_one(tmp_path):
    def run(folder, steps):
        model = build_decoder(SHAPE, TOKENIZER, 0)
        with RunLog(folder, LABELS, quiet=True) as log:
            budget = Budget(steps=steps)
            trl_sft.train_sft(model, sft_batch, SftConfig(), tokenizer=TOKENIZER, budget=budget, log=log, folder=folder)
        return weights(model)

    run(tmp_path / "parts", 3)
    assert torch.equal(run(tmp_path / "parts", 6), run(tmp_path / "whole", 6))
