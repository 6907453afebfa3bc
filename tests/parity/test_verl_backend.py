"""Our keys, reward and estimators against the installed verl (extra `verl` only; nothing here starts Ray)."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common import advantages
from common.algo import load_algo
from common.backends import verl as backend
from common.backends import verl_plan
from common.backends.verl_distill import OBJECTIVES, Teacher, distill_keys
from common.backends.verl_worker import task_row
from common.cards.env import GeneralPoints
from common.checkpoints import save_model
from common.config import compose
from common.distill import DistillConfig
from common.models import DecoderConfig, build_decoder
from common.schema import ConfigError
from experiments.exp_7_11_general_points import cluster, data
from experiments.exp_7_11_general_points.settings import Settings

pytest.importorskip("verl")
core = pytest.importorskip("verl.trainer.ppo.core_algos")

JOB = backend.Job("7-11", "grpo-seed0", "/models/start", Path("/runs/cell=1"), 3, 7, prompt_tokens=32, feedback_tokens=8)
PRESETS = {
    "grpo": {"kl_coef": 0.1},
    "dr_grpo": {},
    "dapo": {},
    "rloo": {"max_turns": 3},
    "reinforce": {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
    "ppo": {"prompts_per_step": 32, "minibatches": 4, "adam_eps": 1e-5, "lr_decay": "cosine", "warmup_steps": 3},
    "reinforce_pp": {},
    "reinforce_pp_baseline": {},
    "gspo": {},
    "cispo": {},
}


@pytest.fixture(scope="module")
def schema():
    return backend.compose()


@pytest.fixture(scope="module")
def model_paths(tmp_path_factory):
    """Keys that point to a tiny model: verl reads the configuration of a critic while it validates."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = data.build_tokenizer()
    shape = DecoderConfig(hidden=16, layers=1, heads=2, kv_heads=2, feedforward=16)
    save_model(build_decoder(shape, tokenizer, 0), tokenizer, folder / "tiny")
    return {"actor_rollout_ref.model.path": str(folder / "tiny"), "critic.model.path": str(folder / "tiny")}


def keys_of(preset: str) -> dict:
    algo = load_algo(preset, PRESETS[preset])
    return backend.algorithm_keys(algo, JOB) | backend.job_keys(JOB, algo) | backend.cpu_keys(algo)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_key_stands_in_verls_schema_and_arrives(preset, schema):
    keys = keys_of(preset)
    backend.check_keys(keys, schema)
    composed = backend.compose(keys)
    for key, value in keys.items():
        if key == backend.HYDRA_FOLDER:
            continue
        node = composed
        for part in key.split("."):
            node = node[part]
        assert node == value, key


@pytest.mark.parametrize("folder", ["exp_7_16_aworld", "exp_7_opd_distillation"])
def test_the_jobs_that_an_experiment_plans_fit_the_schema(folder, schema):
    planned, own = (importlib.import_module(f"experiments.{folder}.{name}") for name in ("cluster", "settings"))
    settings = compose(importlib.import_module(f"experiments.{folder}.run").NUMBER, own.Settings, ["scale=cluster"])
    for arm in settings.chosen():
        backend.check_keys(planned.plan(settings, arm, 100).keys, schema)


@pytest.mark.parametrize("preset", PRESETS)
def test_verls_own_validation_accepts_the_keys(preset, model_paths):
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    config = backend.compose(keys_of(preset) | model_paths)
    assert need_critic(config) == (preset == "ppo")
    assert need_reference_policy(config) == (load_algo(preset, PRESETS[preset]).kl_coef > 0)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))


@pytest.mark.parametrize("arm", ["ppo", "grpo", "iterations_5"])
@pytest.mark.parametrize("lora", [0, 16])
def test_the_cluster_configuration_is_valid_for_verl(arm, lora, schema, model_paths):
    from verl.trainer.ppo.utils import need_critic
    from verl.utils.config import validate_config

    settings = compose("7-11", Settings, ["scale=cluster", f"cluster.lora_rank={lora}", "branch_flops=1e19"])
    *_, keys = cluster.plan(settings, arm, 100)
    backend.check_keys(keys, schema)
    config = backend.compose(
        {**keys, **model_paths, "actor_rollout_ref.rollout.name": "hf"}
    )  # vllm itself is not installed here
    validate_config(config, use_reference_policy=False, use_critic=need_critic(config))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_distillation_is_valid_for_verl(objective, schema, model_paths):
    from verl.trainer.distillation.losses import get_distillation_loss_settings
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config, teacher = DistillConfig(objective), Teacher("/models/teacher", gpus_per_node=4, tensor_parallel=2, topk=16)
    keys = distill_keys(config, JOB, teacher) | backend.job_keys(JOB, config.algo) | backend.cpu_keys(config.algo)
    backend.check_keys(keys, schema)
    engine = {"actor_rollout_ref.rollout.name": "vllm"}  # its sampler on GPUs is the one that knows top words
    composed = backend.compose({**keys, **model_paths, **engine})
    checked = omega_conf_to_dataclass(composed.distillation)
    (judge,) = checked.teacher_models.values()
    assert (judge.model_path, judge.num_replicas, judge.world_size) == ("/models/teacher", 2, 4)
    assert get_distillation_loss_settings(checked.distillation_loss.loss_mode).use_topk == (objective == "forward_kl")
    sampler = {"actor_rollout_ref.rollout.name": "hf"}  # vllm itself is not installed here
    composed = backend.compose({**keys, **model_paths, **sampler})
    validate_config(composed, use_reference_policy=False, use_critic=False)


def test_verls_losses_on_a_teachers_words_are_ours():
    from types import SimpleNamespace

    from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk

    from common.target_losses import distillation_loss

    keys = distill_keys(DistillConfig("forward_kl"), JOB, Teacher("/models/teacher", topk=6))
    generator = torch.Generator().manual_seed(0)
    student_NV, teacher_NV = (torch.randn(4, 6, generator=generator) for _ in range(2))
    teacher_NV = teacher_NV.log_softmax(-1)
    values, ids = teacher_NV.topk(keys["distillation.distillation_loss.topk"])
    nested = [torch.nested.nested_tensor([part], layout=torch.jagged) for part in (values, ids)]
    loss = SimpleNamespace(log_prob_min_clamp=keys["distillation.distillation_loss.log_prob_min_clamp"])
    config = SimpleNamespace(distillation_loss=loss)
    theirs = compute_forward_kl_topk(student_NV[None], *nested, config, "thd")["distillation_losses"][0]
    ours = distillation_loss("forward_kl", student_NV.log_softmax(-1), teacher_NV, ids[:, 0])
    assert torch.allclose(theirs, ours, atol=1e-6)


def test_a_key_that_verl_does_not_know(schema):
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.actor.clip_ratio_hi: verl's configuration has no such key"):
        backend.check_keys(["actor_rollout_ref.actor.clip_ratio_hi"], schema)


ROWS, GROUP, TOKENS = 8, 4, 5
MASK = (torch.arange(TOKENS) < torch.tensor([5, 1, 3, 4, 2, 5, 4, 5])[:, None]).float()
REWARDS = torch.tensor([1.0, 0, 0, 0.5, 3, -1, 1, 2], dtype=torch.float64)


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "rloo", "reinforce"])
def test_the_estimator_that_a_preset_names_computes_our_advantages(preset):
    algo = load_algo(preset)
    keys = backend.algorithm_keys(algo, JOB)
    group = np.arange(ROWS) // GROUP if algo.group_size > 1 else np.arange(ROWS)
    rewards_BT = torch.zeros(ROWS, TOKENS, dtype=torch.float64)
    rewards_BT[torch.arange(ROWS), MASK.sum(1).long() - 1] = REWARDS
    estimator = core.get_adv_estimator_fn(keys["algorithm.adv_estimator"])
    divides = {} if preset == "rloo" else {"norm_adv_by_std_in_grpo": keys["algorithm.norm_adv_by_std_in_grpo"]}
    theirs, _ = estimator(token_level_rewards=rewards_BT, response_mask=MASK.double(), index=group, **divides)
    ours = advantages.outcome_advantages(algo.advantage, REWARDS, torch.tensor(group))
    assert torch.allclose(theirs, ours[:, None].double() * MASK, atol=1e-3)


@pytest.mark.parametrize("preset", ["reinforce_pp", "reinforce_pp_baseline"])
def test_the_whitened_estimators_compute_our_advantages(preset):
    algo = load_algo(preset, {"gamma": 0.9} if preset == "reinforce_pp" else {})
    keys = backend.algorithm_keys(algo, JOB)
    rewards_BT = torch.zeros(ROWS, TOKENS, dtype=torch.float64)
    rewards_BT[torch.arange(ROWS), MASK.sum(1).long() - 1] = REWARDS
    group = np.arange(ROWS) // GROUP
    estimator = core.get_adv_estimator_fn(keys["algorithm.adv_estimator"])
    config = SimpleNamespace(gamma=keys["algorithm.gamma"])
    theirs, _ = estimator(token_level_rewards=rewards_BT.clone(), response_mask=MASK.double(), index=group, config=config)
    if preset == "reinforce_pp":
        raw_BT = advantages.reward_to_go(rewards_BT, MASK, algo.gamma)
    else:
        raw_BT = advantages.outcome_advantages(algo.advantage, REWARDS, torch.tensor(group))[:, None] * MASK
    assert torch.allclose(theirs.float(), advantages.masked_whiten(raw_BT, MASK), atol=1e-5)


def test_verls_reward_manager_calls_our_environment():
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
    from verl.trainer.ppo.reward import get_custom_reward_fn

    config = backend.compose(keys_of("grpo"))
    tokenizer = data.build_tokenizer()
    task = {"cards": ["4", "3", "2", "K"], "face_values": [10, 10, 10]}
    kwargs = {"verify_iter": 1, "trace": False}
    row = task_row("7-11", "train", 0, task, cluster.ENV, kwargs)
    right = '{"cards": ["4", "3", "2", "K"], "number": [4, 3, 2, 10], "formula": "((4*3)+2)+10=24"}'
    for answer in (right, right.replace("=24", "=10"), '"}'):
        ids = torch.tensor([tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]])
        batch = {"responses": ids, "attention_mask": torch.ones_like(ids), "prompts": ids[:, :1]}
        other = {key: np.array([row[key]], dtype=object) for key in ("data_source", "reward_model", "extra_info")}
        manager = get_reward_manager_cls("naive")(config, tokenizer, get_custom_reward_fn(config))
        result = manager.loop.run_until_complete(manager.run_single(DataProto.from_dict(tensors=batch, non_tensors=other)))
        env = GeneralPoints(**kwargs)
        env.reset(options=task)
        _, reward, _, _, info = env.step(answer)
        assert result["reward_score"] == reward and result["reward_extra_info"]["acc"] == float(info["success"])


def test_verl_reads_the_exported_rows(tmp_path):
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    settings = compose("7-11", Settings, ["scale=smoke"])
    algo = load_algo("grpo", {"prompts_per_step": 4, "max_new_tokens": 48})
    job = replace(JOB, folder=tmp_path, steps=1)
    cluster.export(settings, settings.branches["grpo"], algo, job, split_seed=0)
    config = backend.compose({**backend.job_keys(job, algo), "data.dataloader_num_workers": 0}).data
    config = OmegaConf.merge(OmegaConf.create(OmegaConf.to_container(config, resolve=False)), {"cache_dir": str(tmp_path)})
    read = RLHFDataset(str(job.train_file), data.build_tokenizer(), config)
    assert len(read) == 4
    task = json.loads(read[0]["reward_model"]["ground_truth"])
    observation, _ = GeneralPoints().reset(options=task)
    assert read[0]["raw_prompt"] == [{"role": "user", "content": observation}]


def test_a_plan_counts_both_models_of_ppo():
    settings = compose("7-11", Settings, ["scale=cluster"])
    _, _, estimate, _ = cluster.plan(settings, "ppo", 100)
    assert isinstance(estimate, verl_plan.Plan)
    assert estimate.training_gib["critic: the same"] == estimate.training_gib["policy: weights, gradients, Adam"]
