"""Our tasks, rewards, algorithms and plans on their way to verl, without verl itself."""

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM

from common.algo import load_algo
from common.backends import verl, verl_plan
from common.backends.verl_worker import compute_score, play, task_row, write_agent, write_tasks
from common.cards import hands
from common.cards.env import GeneralPoints
from common.config import compose
from common.episodes import run_episodes
from common.files import read_json, write_json
from common.models import DecoderConfig, build_decoder
from common.rollout import sample
from common.schema import ConfigError
from experiments.exp_7_11_general_points import cluster, data
from experiments.exp_7_11_general_points.settings import Settings

ONE_TURN = {"verify_iter": 1, "trace": False}
TASK = {"cards": ["4", "3", "2", "K"], "face_values": [10, 10, 10]}
OPENING = '{"cards": ["4", "3", "2", "K"], "number": [4, 3, 2, 10], "formula": '
ANSWERS = {
    OPENING + '"4*3+2+10=24"}': 5.0,
    OPENING + '"4+3+2+10=24"}': -1.0,
    OPENING + '"4*3+2=24"}': -2.0,
    OPENING + '"4**3"}': -3.0,
}
JOB = verl.Job("7-11", "grpo-seed0", "/models/start", Path("/runs/cell"), steps=3, seed=7, prompt_tokens=32)
SHAPE = verl_plan.ModelShape(
    1e9, layers=10, hidden=1000, feedforward=4000, heads=10, kv_heads=2, head_dim=100, vocabulary=10_000
)
FOUR = verl_plan.Cluster("small", {"small": SHAPE}, gpus_per_node=4, micro_batch=2)
SMALL = load_algo("grpo", {"prompts_per_step": 4, "group_size": 2, "max_new_tokens": 50})


@pytest.fixture(scope="module")
def tokenizer():
    return data.build_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    shape = DecoderConfig(hidden=32, layers=2, heads=2, kv_heads=2, feedforward=64, max_length=512)
    return build_decoder(shape, tokenizer, 0).eval()


# Tasks and rewards ----------------------------------------------------------------------------------------------------


def test_a_row_holds_the_task_and_the_environments_own_prompt(tmp_path):
    row = task_row("7-11-train", "train", 3, TASK, cluster.ENV, ONE_TURN)
    prompt, _ = GeneralPoints(**ONE_TURN).reset(options=TASK)
    assert row["prompt"] == [{"role": "user", "content": prompt}]
    assert json.loads(row["reward_model"]["ground_truth"]) == TASK
    assert row["data_source"] == "7-11-train" and row["extra_info"]["index"] == 3
    write_tasks(tmp_path / "train.parquet", [row, {**row, "data_source": "b"}])
    read = pyarrow.parquet.read_table(tmp_path / "train.parquet").to_pylist()
    assert read == [row, {**row, "data_source": "b"}]
    with pytest.raises(ValueError, match="no task"):
        write_tasks(tmp_path / "none.parquet", [])


@pytest.mark.parametrize("answer", [*ANSWERS, "no idea", ""])
def test_the_reward_function_scores_as_the_environment_does(answer):
    row = task_row("7-11", "train", 0, TASK, cluster.ENV, ONE_TURN)
    result = compute_score(
        row["data_source"], answer, row["reward_model"]["ground_truth"], {**row["extra_info"], "num_turns": 2}
    )
    env = GeneralPoints(**ONE_TURN)
    env.reset(options=TASK)
    _, reward, _, _, info = env.step(answer)
    assert result == {"score": reward, "acc": float(info["success"])}
    assert result["score"] == ANSWERS.get(answer, result["score"])


def test_the_reward_function_refuses_a_task_of_several_answers():
    row = task_row("7-11", "train", 0, TASK, cluster.ENV, {"verify_iter": 2})
    with pytest.raises(ValueError, match=r"goes on after one answer .* algo.max_turns above 1"):
        compute_score("7-11", "no idea", row["reward_model"]["ground_truth"], row["extra_info"])


def played(model, tokenizer, limit: int):
    env = GeneralPoints(3)
    observation, _ = env.reset(options=TASK)

    async def generate(ids):
        (done,) = sample(model, [ids], max_new_tokens=12, stop_ids=[tokenizer.eos_token_id], temperature=0.0)
        return done.ids, done.logps

    return asyncio.run(play(generate, tokenizer, env, observation, max_turns=3, max_new_tokens=12, limit=limit))


def test_an_episode_of_the_agent_loop_is_the_native_one(model, tokenizer):
    (native,) = run_episodes(
        model, tokenizer, lambda: GeneralPoints(3), [TASK], max_turns=3, max_new_tokens=12, temperature=0.0
    )
    episode = played(model, tokenizer, limit=200)
    assert len(native.texts) == 3 and 0 in episode.mask and 1 in episode.mask
    assert episode.prompt_ids + episode.response_ids == native.ids
    assert [0] * len(episode.prompt_ids) + episode.mask == native.mask
    assert [0.0] * len(episode.prompt_ids) + episode.logps == pytest.approx(native.logps, abs=1e-5)
    assert (episode.texts, episode.rewards, episode.success) == (native.texts, native.turn_rewards, native.success)


def test_an_episode_ends_before_it_outgrows_its_limit(model, tokenizer):
    whole = played(model, tokenizer, limit=200)
    first_reply = whole.mask.index(0)
    second_answer = whole.mask.index(1, first_reply)
    enough = second_answer + 12
    assert len(played(model, tokenizer, limit=enough).texts) == 2
    cut = played(model, tokenizer, limit=enough - 1)
    assert len(cut.texts) == 1 and cut.mask == [1] * first_reply


def test_the_agent_file_names_the_loop(tmp_path):
    write_agent(tmp_path / "agent.yaml", replace(SMALL, max_turns=4), tmp_path / "episodes")
    (loop,) = read_json(tmp_path / "agent.yaml")
    assert loop["name"] == "text_env" and loop["_target_"] == "common.backends.verl_worker.TextEnvLoop"
    assert (loop["max_turns"], loop["max_new_tokens"], loop["rollouts"]) == (4, 50, str(tmp_path / "episodes"))


# Algorithms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "estimator", "divides", "aggregation", "factor"),
    [
        ("grpo", "grpo", True, "seq-mean-token-mean", None),
        ("dr_grpo", "grpo", False, "seq-mean-token-sum-norm", 64),
        ("dapo", "grpo", True, "token-mean", None),
        ("rloo", "rloo", False, "seq-mean-token-sum-norm", 64),
        ("reinforce", "grpo", False, "seq-mean-token-sum-norm", 64),
        ("ppo", "gae", False, "token-mean", None),
        ("reinforce_pp", "reinforce_plus_plus", False, "token-mean", None),
        ("reinforce_pp_baseline", "reinforce_plus_plus_baseline", False, "token-mean", None),
        ("gspo", "grpo", True, "seq-mean-token-mean", None),
    ],
)
def test_presets_as_keys(preset, estimator, divides, aggregation, factor):
    keys = verl.algorithm_keys(load_algo(preset), JOB)
    assert keys["algorithm.adv_estimator"] == estimator and keys["algorithm.norm_adv_by_std_in_grpo"] is divides
    assert keys["actor_rollout_ref.actor.loss_agg_mode"] == aggregation
    assert keys["actor_rollout_ref.actor.loss_scale_factor"] == factor
    assert keys["data.train_batch_size"] * keys["actor_rollout_ref.rollout.n"] == 512
    assert any(key.startswith("critic.") for key in keys) == (preset == "ppo")


def test_dapo_takes_its_four_changes_along():
    keys = verl.algorithm_keys(load_algo("dapo"), JOB)
    actor = "actor_rollout_ref.actor."
    assert (keys[actor + "clip_ratio_low"], keys[actor + "clip_ratio_high"]) == (0.2, 0.28)
    assert keys[actor + "clip_ratio_c"] >= 1e6  # no dual clipping, which the paper does not have either
    assert keys["algorithm.filter_groups.enable"] is True and keys["algorithm.filter_groups.metric"] == "reward"
    assert keys["reward.reward_manager.name"] == "dapo" and keys["reward.reward_kwargs.max_resp_len"] == 64
    assert keys["reward.reward_kwargs.overlong_buffer_cfg.len"] == 16
    assert "reward.reward_manager.name" not in verl.algorithm_keys(load_algo("grpo"), JOB)


@pytest.mark.parametrize(
    ("change", "loss", "reward", "name"),
    [
        ({}, False, False, "low_var_kl"),
        ({"kl_coef": 0.1}, True, False, "low_var_kl"),
        ({"kl_coef": 0.1, "kl_estimator": "k2"}, True, False, "mse"),
        ({"kl_coef": 0.1, "kl_estimator": "k1", "kl_in": "reward"}, False, True, "kl"),
    ],
)
def test_kl_stands_in_the_loss_or_in_the_reward(change, loss, reward, name):
    keys = verl.algorithm_keys(load_algo("grpo", change), JOB)
    actor = "actor_rollout_ref.actor."
    assert (keys[actor + "use_kl_loss"], keys["algorithm.use_kl_in_reward"]) == (loss, reward)
    assert keys[actor + "kl_loss_coef"] == keys["algorithm.kl_ctrl.kl_coef"] == change.get("kl_coef", 0.0)
    assert keys[actor + "kl_loss_type"] == keys["algorithm.kl_penalty"] == name


@pytest.mark.parametrize(("preset", "mode"), [("grpo", "vanilla"), ("gspo", "gspo"), ("cispo", "cispo")])
def test_surrogates(preset, mode):
    keys = verl.algorithm_keys(load_algo(preset), JOB)
    assert keys["actor_rollout_ref.actor.policy_loss.loss_mode"] == mode


def test_ppo_cuts_a_step_into_minibatches_of_prompts():
    change = {"prompts_per_step": 32, "minibatches": 4, "epochs": 3, "whiten": True, "value_warmup_steps": 2, "lr": 1e-5}
    keys = verl.algorithm_keys(load_algo("ppo", change), JOB)
    actor, critic = "actor_rollout_ref.actor.", "critic."
    assert keys[actor + "ppo_mini_batch_size"] == keys[critic + "ppo_mini_batch_size"] == 8
    assert keys[actor + "ppo_epochs"] == keys[critic + "ppo_epochs"] == 3
    assert (keys[actor + "optim.lr"], keys[critic + "optim.lr"]) == (1e-5, 1e-3)
    assert keys["trainer.critic_warmup"] == 2 and keys[critic + "cliprange_value"] == 0.2


def test_many_turns_take_the_agent_loop_and_room_for_replies():
    algo = load_algo("grpo", {"max_turns": 3, "max_new_tokens": 40})
    job = replace(JOB, feedback_tokens=10)
    keys = verl.algorithm_keys(algo, job) | verl.job_keys(job, algo)
    assert keys["data.max_response_length"] == 3 * 40 + 2 * 10
    assert keys["actor_rollout_ref.rollout.agent.default_agent_loop"] == "text_env"
    assert keys["actor_rollout_ref.rollout.agent.agent_loop_config_path"] == "/runs/cell/agent.yaml"
    with pytest.raises(ConfigError, match=r"feedback_tokens=0 with algo.max_turns=3"):
        verl.algorithm_keys(algo, JOB)
    one = verl.job_keys(JOB, load_algo("grpo"))
    assert one["actor_rollout_ref.rollout.agent.default_agent_loop"] == "single_turn_agent"
    assert one["reward.custom_reward_function.path"] == "pkg://common.backends.verl_worker"


@pytest.mark.parametrize(
    ("preset", "change", "words"),
    [
        ("grpo", {"lr_decay": "linear"}, "algo.lr_decay=linear: verl cannot do it; allowed are none, cosine"),
        ("grpo", {"mask_truncated": True}, "algo.mask_truncated=true: verl cannot do it"),
        ("grpo", {"std_ddof": 0}, "algo.std_ddof=0 .* sample standard deviation"),
        ("grpo", {"std_eps": 0.1}, "std_eps=0.1.* at most 0.001"),
        ("grpo", {"drop_zero_variance": True}, "drop_zero_variance=true with algo.refill_rounds=0"),
        ("ppo", {"gae_level": "turn"}, "algo.gae_level=turn: verl cannot do it; allowed is token"),
        ("ppo", {"whiten": False}, "algo.advantage=gae algo.whiten=false .* gae with whiten=true"),
        ("grpo", {"whiten": True}, "algo.advantage=group_norm algo.whiten=true"),
        ("reinforce_pp", {"whiten": False}, "algo.advantage=reward_to_go algo.whiten=false"),
        ("dapo", {"refill_with": "answers"}, "algo.refill_with=answers: verl cannot do it; allowed is prompts"),
        ("ppo", {"prompts_per_step": 3, "minibatches": 2, "group_size": 2}, "algo.minibatches=2: verl cuts a step by prompts"),
        ("reinforce_baseline", {}, "algo.advantage=batch_centre algo.whiten=false algo.group_size=1: verl cannot do it"),
        ("reinforce", {"group_size": 2}, "algo.advantage=reward algo.whiten=false algo.group_size=2"),
        ("dapo", {"max_turns": 2}, "algo.overlong_buffer over several turns"),
    ],
)
def test_what_verl_cannot_do_is_refused(preset, change, words):
    with pytest.raises(ConfigError, match=words):
        verl.algorithm_keys(load_algo(preset, change), replace(JOB, feedback_tokens=8))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1e-6, "1e-06"),
        ("/a/b.parquet", "/a/b.parquet"),
        ("pkg://a.b", "pkg://a.b"),
        ("/runs/lr=1,b+c", "'/runs/lr=1,b+c'"),
        ("it's", "'it\\'s'"),
        ([0.9, 0.999], "[0.9,0.999]"),
        ({"eps": 1e-8}, "{eps:1e-08}"),
        ("", "''"),
    ],
)
def test_values_in_hydras_grammar(value, text):
    assert verl.hydra_text(value) == text


def test_the_command_adds_only_to_free_mappings():
    keys = {"b.c": 1, "ray_kwargs.ray_init.num_gpus": 2, "a": "x y"}
    assert verl.command(keys, "python") == [
        "python", "-m", "verl.trainer.main_ppo", "a='x y'", "b.c=1", "++ray_kwargs.ray_init.num_gpus=2"
    ]  # fmt: skip


# Weights --------------------------------------------------------------------------------------------------------------


def checkpoint(folder: Path, model, tokenizer, **changes) -> Path:
    """A checkpoint as verl writes it on one rank."""
    model.config.save_pretrained(folder / "huggingface")
    tokenizer.save_pretrained(folder / "huggingface")
    write_json(folder / "fsdp_config.json", {"FSDP_version": 2, "world_size": 1})
    torch.save({**model.state_dict(), **changes}, folder / "model_world_size_1_rank_0.pt")
    return folder


def test_a_checkpoint_becomes_a_folder_for_plain_transformers(tmp_path, model, tokenizer):
    verl.to_hf_folder(checkpoint(tmp_path / "actor", model, tokenizer), tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_a_checkpoint_of_another_model_is_refused(tmp_path, model, tokenizer):
    source = checkpoint(tmp_path / "actor", model, tokenizer, stranger=torch.zeros(1))
    with pytest.raises(ValueError, match=r"does not fit its model: \[\] missing, \['stranger'\] unknown"):
        verl.to_hf_folder(source, tmp_path / "model")
    assert not (tmp_path / "model").exists()


# Plans ----------------------------------------------------------------------------------------------------------------


def test_tokens_flops_and_steps_of_a_small_plan():
    plan = verl_plan.make_plan(FOUR, SMALL, (100, 50), budget_flops=3.4e13)
    # 4 prompts of 100 prefilled once and 8 answers of 50; rows of 150 scored once by the policy and trained once
    assert plan.tokens == {"sampled": 800, "scored": 1200, "trained": 1200}
    assert plan.flops == pytest.approx(2e9 * (800 + 1200) + 6e9 * 1200)
    assert plan.steps == 3  # 3.4e13 / 1.12e13
    peak = 4 * 989e12
    assert plan.seconds["sampling"] == pytest.approx(2e9 * 800 / (peak * 0.05))
    assert plan.seconds["training"] == pytest.approx(6e9 * 1200 * 4 / 3 / (peak * 0.35))


def test_kl_and_a_critic_cost_passes():
    row, episodes = 150, 8
    with_kl = verl_plan.step_tokens(replace(SMALL, kl_coef=0.1), 100, 50)
    assert with_kl == {"sampled": 800, "scored": 2 * episodes * row, "trained": episodes * row}
    ppo = load_algo("ppo", {"prompts_per_step": 8, "epochs": 2, "minibatches": 1})
    assert verl_plan.step_tokens(ppo, 100, 50) == {"sampled": 1200, "scored": 2400, "trained": 4800}


def test_memory_per_gpu_by_hand():
    parts = verl_plan.training_memory(FOUR, SMALL, 150)
    gib = 2**30
    assert parts["policy: weights, gradients, Adam"] == pytest.approx(16e9 / 4 / gib)
    assert parts["two layers in bfloat16"] == pytest.approx(4 * (1e9 - 2e7) / 10 / gib)
    assert parts["activations"] == pytest.approx(300 * 1000 * (2 * 10 + 34) / gib)
    assert parts["logits"] == pytest.approx(300 * 10_000 * 10 / gib)
    assert "critic: the same" not in parts
    assert verl_plan.cached_tokens(FOUR) == math.floor((0.5 * 80 * gib * 2 - 2e9) / 8000)
    # adapters of rank 8: 10 layers x 21,400 inputs and outputs of the seven linear layers
    assert verl_plan.state_bytes(replace(FOUR, lora_rank=8)) == pytest.approx(4e9 + 16 * 8 * 10 * 21_400)


@pytest.mark.parametrize(
    ("layout", "algo", "words"),
    [
        ({"tensor_parallel": 3}, {}, "cluster.tensor_parallel=3: must divide cluster.gpus_per_node=4"),
        ({}, {"prompts_per_step": 3}, "an update takes 6 episodes, which must be a multiple of the 4 GPUs"),
        ({"micro_batch": 3}, {}, "cluster.micro_batch=3: must divide the 2 episodes"),
        ({"gpu_memory_gib": 8.0}, {}, "training needs .* GiB per GPU, above 7.6 GiB .* more GPUs"),
        ({"sampler_memory": 0.95}, {}, "sampling needs .* GiB per GPU, above 76.0 GiB"),
        ({"sampler_memory": 0.01, "tensor_parallel": 1}, {}, "there is room for 0 tokens, and one episode has up to 150"),
    ],
)
def test_an_impossible_layout_is_refused(layout, algo, words):
    with pytest.raises(ConfigError, match=words):
        verl_plan.make_plan(replace(FOUR, **layout), replace(SMALL, **algo), (100, 50), 1e15)


def test_a_budget_below_one_step_is_refused():
    with pytest.raises(ConfigError, match=r"branch_flops=1e\+12: one step takes 1.12e\+13 FLOPs"):
        verl_plan.make_plan(FOUR, SMALL, (100, 50), 1e12)


@pytest.mark.parametrize(("key", "value"), [("model", "big"), ("nodes", 0), ("sampler_memory", 1.5), ("peak_tflops", 0.0)])
def test_values_of_a_layout(key, value):
    with pytest.raises(ConfigError, match=f"cluster.{key}={value}"):
        replace(FOUR, **{key: value})


# 7-11 -----------------------------------------------------------------------------------------------------------------


def test_the_dry_run_prints_plan_and_submission_and_starts_nothing(tmp_path, capsys):
    settings = compose("7-11", Settings, ["scale=cluster", "dry=true", f"runs_dir={tmp_path}"])
    assert settings.variant is None and cluster.main(settings) == 0
    shown = capsys.readouterr().out
    assert shown.count("ray job submit --address http://127.0.0.1:8265") == 2
    assert "2048 prompts x 1 answers = 2048 episodes a step" in shown and "128 prompts x 8 answers" in shown
    assert "data.train_batch_size=128" in shown and "GPU hours" in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("cluster.gpus_per_node=2", "training needs .* GiB per GPU"),
        ("cluster.model=llama-3.2-12b", "cluster.model=llama-3.2-12b: allowed are qwen2.5-7b, llama-3.2-11b"),
        ("arms=[sft_one]", "scale=cluster trains by RL alone"),
        ("algo.mask_truncated=true", "verl cannot do it"),
    ],
)
def test_the_cluster_refuses_before_anything_starts(change, words):
    with pytest.raises(ConfigError, match=words):
        cluster.main(compose("7-11", Settings, ["scale=cluster", "dry=true", change]))


def test_the_papers_model_and_five_answers_have_a_plan(capsys):
    changes = ["scale=cluster", "dry=true", "cluster.model=llama-3.2-11b", "arms=[iterations_5]", "branch_flops=1e19"]
    assert cluster.main(compose("7-11", Settings, changes)) == 0
    assert "(5 turns of 256)" in capsys.readouterr().out


def test_the_exported_tasks_are_those_of_the_native_steps(tmp_path):
    settings = compose("7-11", Settings, ["scale=smoke"])
    branch = settings.branches["grpo"]
    algo = load_algo("grpo", {"prompts_per_step": 4, "max_new_tokens": 48})
    job = replace(JOB, folder=tmp_path, steps=2)
    cluster.export(settings, branch, algo, job, split_seed=0)
    rows = pyarrow.parquet.read_table(job.train_file).to_pylist()
    tasks = [json.loads(row["reward_model"]["ground_truth"]) for row in rows]
    train = hands.splits(0).train[: settings.train_hands]
    assert tasks == [task for step in range(2) for task in data.training_tasks(train, job.seed, step, 4)]
    tests = pyarrow.parquet.read_table(job.test_file).to_pylist()
    assert {row["data_source"] for row in tests} == {"7-11-id", "7-11-ood"}
    known = {tuple(sorted(task["cards"])) for task in tasks}
    held_out = {tuple(sorted(json.loads(row["reward_model"]["ground_truth"])["cards"])) for row in tests}
    assert not known & held_out
