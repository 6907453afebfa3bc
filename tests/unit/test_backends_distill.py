"""On-policy distillation as verl's keys, without verl itself."""

from pathlib import Path

import pytest

from common.backends import verl
from common.backends.verl_distill import Teacher, distill_keys
from common.distill import DistillConfig
from common.schema import ConfigError

JOB = verl.Job("7-11", "distill-seed0", "/models/start", Path("/runs/cell"), steps=3, seed=7, prompt_tokens=32)
TEACHER = Teacher("/models/teacher", nodes=1, gpus_per_node=4, tensor_parallel=2, topk=16)
LOSS = "distillation.distillation_loss."


@pytest.mark.parametrize(
    ("objective", "mode", "as_policy_gradient"), [("sampled", "k1", True), ("forward_kl", "forward_kl_topk", False)]
)
def test_objectives_as_keys(objective, mode, as_policy_gradient):
    keys = distill_keys(DistillConfig(objective, lr=1e-5, prompts_per_step=16, group_size=4), JOB, TEACHER)
    assert keys["distillation.enabled"] is True
    assert (keys[LOSS + "loss_mode"], keys[LOSS + "use_policy_gradient"]) == (mode, as_policy_gradient)
    assert keys[LOSS + "use_task_rewards"] is False and keys[LOSS + "topk"] == 16
    assert keys[LOSS + "loss_max_clamp"] is None and keys[LOSS + "log_prob_min_clamp"] is None
    assert keys["distillation.teacher_models.teacher_model.model_path"] == "/models/teacher"
    assert keys["distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size"] == 2
    assert keys["data.train_batch_size"] == keys["actor_rollout_ref.actor.ppo_mini_batch_size"] == 16
    assert keys["actor_rollout_ref.rollout.n"] == 4 and keys["actor_rollout_ref.actor.optim.lr"] == 1e-5
    assert keys["actor_rollout_ref.actor.ppo_epochs"] == 1 and keys["actor_rollout_ref.actor.use_kl_loss"] is False


def test_one_answer_per_prompt_has_keys_too():
    keys = distill_keys(DistillConfig("sampled", group_size=1), JOB, TEACHER)
    assert keys["actor_rollout_ref.rollout.n"] == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"objective": "reverse_kl"}, "distill.objective=reverse_kl: verl cannot do it; allowed are sampled, forward_kl"),
        ({"objective": "jsd"}, "distill.objective=jsd: verl cannot do it"),
        ({"objective": "forward_kl", "environment_tokens": "learned"}, "distill.environment_tokens=learned: verl masks"),
        ({"temperature": 0.7}, "distill.temperature=0.7: verl's teacher judges at temperature 1"),
        ({"lr_decay": "linear"}, "algo.lr_decay=linear: verl cannot do it"),
    ],
)
def test_what_verl_cannot_distill_is_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        distill_keys(DistillConfig(**{"objective": "sampled", **change}), JOB, TEACHER)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensor_parallel": 3}, "teacher.tensor_parallel=3: must divide the teacher's 1 GPUs"),
        ({"nodes": 0}, "teacher.nodes=0"),
        ({"memory": 0.0}, "teacher.memory=0.0"),
    ],
)
def test_values_of_a_teacher(change, words):
    with pytest.raises(ConfigError, match=words):
        Teacher("/models/teacher", **change)
