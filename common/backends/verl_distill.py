"""On-policy distillation (common.distill) as verl's keys: `distillation.*`, with the teacher on cards of its own.

    keys = distill_keys(config, job, teacher) | job_keys(job, config.algo) | gpu_keys(cluster, config.algo)

verl 0.9.1 knows two of our four objectives:
- sampled: its policy gradient on k1, the log-ratio of the token written, without task rewards. One update per step keeps
  the ratio at 1, so that its clipping never acts, as in ours.
- forward_kl: KL of teacher to student on the teacher's `topk` most likely words; ours takes the whole vocabulary. Equal
  when topk holds it; the tail beyond it is left out, and a token's loss is cut at 0 from below.

What it cannot do is refused: reverse_kl and jsd on whole distributions (it sends top words, not distributions), a student
that teaches itself with privileged context (its teacher reads the student's own prompt), and a temperature other than 1 (its
teacher's log-probabilities are always those at 1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from common.backends.verl import Job, algorithm_keys
from common.distill import DistillConfig
from common.schema import ConfigError, within

OBJECTIVES = {"sampled": "k1", "forward_kl": "forward_kl_topk"}


@dataclass(frozen=True)
class Teacher:
    """The judging model and its cards. ``topk``: words per token that it sends for forward_kl.

    ``memory``: share of a card for it. ``tensor_parallel``: cards that share one copy of its weights.
    """

    model: str
    nodes: int = 1
    gpus_per_node: int = 1
    tensor_parallel: int = 1
    memory: float = 0.5
    topk: int = 64

    def __post_init__(self) -> None:
        for key in ("nodes", "gpus_per_node", "tensor_parallel", "topk"):
            within(f"teacher.{key}", getattr(self, key), 1)
        within("teacher.memory", self.memory, 0, 1, above=True)
        if self.nodes * self.gpus_per_node % self.tensor_parallel:
            raise ConfigError(
                f"teacher.tensor_parallel={self.tensor_parallel}: must divide the teacher's "
                f"{self.nodes * self.gpus_per_node} GPUs (teacher.nodes times teacher.gpus_per_node)."
            )


def distill_keys(config: DistillConfig, job: Job, teacher: Teacher) -> dict[str, Any]:
    """Sampling, optimizer and distillation as verl's keys (dotted name -> value). ConfigError where verl cannot do it."""
    if config.objective not in OBJECTIVES:
        raise ConfigError(f"distill.objective={config.objective}: verl cannot do it; allowed are {', '.join(OBJECTIVES)}.")
    if config.temperature != 1.0:
        raise ConfigError(f"distill.temperature={config.temperature}: verl's teacher judges at temperature 1; allowed is 1.")
    if config.environment_tokens != "masked":
        raise ConfigError("distill.environment_tokens=learned: verl masks what the environment says; allowed is masked.")
    # The advantage plays no part: task rewards are off. verl has no plain reward for several answers per prompt.
    algo = replace(config.algo, advantage="group_centre" if config.group_size > 1 else "reward")
    own, model = "distillation.", "distillation.teacher_models.teacher_model."
    loss = own + "distillation_loss."
    return algorithm_keys(algo, job) | {
        own + "enabled": True,
        own + "nnodes": teacher.nodes,
        own + "n_gpus_per_node": teacher.gpus_per_node,
        model + "model_path": teacher.model,
        model + "inference.tensor_model_parallel_size": teacher.tensor_parallel,
        model + "inference.gpu_memory_utilization": teacher.memory,
        loss + "loss_mode": OBJECTIVES[config.objective],
        loss + "use_policy_gradient": config.objective == "sampled",
        loss + "use_task_rewards": False,
        loss + "topk": teacher.topk,
        loss + "loss_max_clamp": None,
        loss + "log_prob_min_clamp": None,
    }
