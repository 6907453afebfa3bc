"""What a verl run on GPUs will take, before it starts: batch arithmetic, memory per GPU, tokens, FLOPs and hours.

FLOPs follow the suite's one cost model (common.compute): 2N per token of sampling, scoring or prefilling, 6N per trained
token. Memory follows from how verl's FSDP2 holds a model: float32 weights, gradients and Adam states sharded over all GPUs,
bfloat16 copies of one layer at a time, activations recomputed layer by layer (about 34 bytes per token and hidden unit in
the layer at work: Korthikanti et al. 2022, Reducing activation recomputation, section 4.1, less the attention scores that
flash attention never stores), and logits of the rows at work. vLLM has its share of the card while it samples and sleeps
while the policy trains. Shares of the peak rate are assumptions that stand in the configuration; nothing here was measured.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.algo import AlgoConfig
from common.backends.verl import ROOT, Job, command
from common.compute import FORWARD_FLOPS, TRAIN_FLOPS
from common.schema import ConfigError, one_of, within

GIB = 2**30
STATE_BYTES = 16  # float32 weight, gradient and Adam's two moments
FROZEN_BYTES = 4  # a float32 weight that is not trained
ACTIVATION_BYTES = 34  # per token and hidden unit inside the layer at work
LOGIT_BYTES = 10  # per token and word: bfloat16 logits, their float32 copy and its gradient
FIXED_GIB = 6.0  # CUDA context, NCCL buffers, fragmentation
USABLE = 0.95  # share of a card that may be planned for
RECOMPUTE = 4 / 3  # a trained token costs one more forward pass when activations are recomputed
UPLOAD_EXCLUDES = [".git", ".venv", "runs", "results", "wandb"]


@dataclass(frozen=True)
class ModelShape:
    """What the arithmetic needs to know of a model; ``parameters`` counts all of it, embeddings and towers included."""

    parameters: float
    layers: int
    hidden: int
    feedforward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


@dataclass(frozen=True)
class Cluster:
    """Machines and layout of a run.

    ``model``: name of one of ``models``. ``tensor_parallel``: GPUs that share one copy of the sampler's weights.
    ``micro_batch``: episodes of a pass per GPU. ``sampler_memory``: share of a card for vLLM. ``offload``: weights and
    Adam states wait in host memory while the sampler works. ``train_use``, ``sample_use``: share of the peak rate reached.
    """

    model: str
    models: dict[str, ModelShape]
    nodes: int = 1
    gpus_per_node: int = 8
    gpu_memory_gib: float = 80.0
    tensor_parallel: int = 2
    micro_batch: int = 8
    sampler_memory: float = 0.5
    offload: bool = False
    lora_rank: int = 0
    prompt_tokens: int = 512
    feedback_tokens: int = 128
    save_every: int = 20
    test_every: int = 10
    peak_tflops: float = 989.0
    train_use: float = 0.35
    sample_use: float = 0.05
    overhead_s: float = 30.0
    address: str = "http://127.0.0.1:8265"

    def __post_init__(self) -> None:
        one_of("cluster.model", self.model, self.models)
        for key in ("nodes", "gpus_per_node", "tensor_parallel", "micro_batch", "prompt_tokens"):
            within(f"cluster.{key}", getattr(self, key), 1)
        for key in ("lora_rank", "feedback_tokens", "save_every", "test_every", "overhead_s"):
            within(f"cluster.{key}", getattr(self, key), 0)
        for key in ("sampler_memory", "train_use", "sample_use"):
            within(f"cluster.{key}", getattr(self, key), 0, 1, above=True)
        for key in ("gpu_memory_gib", "peak_tflops"):
            within(f"cluster.{key}", getattr(self, key), 0, above=True)

    @property
    def shape(self) -> ModelShape:
        return self.models[self.model]

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Plan:
    """One arm's run in numbers: per step (tokens, FLOPs, seconds), per GPU (GiB by part), and the steps of the budget."""

    steps: int
    tokens: dict[str, int]
    flops: float
    seconds: dict[str, float]
    training_gib: dict[str, float]
    sampling_gib: dict[str, float]
    cached_tokens: int

    @property
    def hours(self) -> float:
        return self.steps * sum(self.seconds.values()) / 3600


def check_batches(cluster: Cluster, algo: AlgoConfig) -> None:
    """ConfigError unless batches and parallel groups divide as verl needs them."""
    gpus, shape = cluster.gpus, cluster.shape
    if cluster.gpus_per_node % cluster.tensor_parallel or shape.heads % cluster.tensor_parallel:
        raise ConfigError(
            f"cluster.tensor_parallel={cluster.tensor_parallel}: must divide cluster.gpus_per_node={cluster.gpus_per_node} "
            f"and the {shape.heads} attention heads of {cluster.model}."
        )
    mini = algo.prompts_per_step // algo.minibatches * algo.group_size
    if mini % gpus:
        raise ConfigError(
            f"algo.prompts_per_step={algo.prompts_per_step} algo.group_size={algo.group_size} "
            f"algo.minibatches={algo.minibatches}: an update takes {mini} episodes, which must be a multiple of the "
            f"{gpus} GPUs (cluster.nodes times cluster.gpus_per_node)."
        )
    if mini // gpus % cluster.micro_batch:
        raise ConfigError(
            f"cluster.micro_batch={cluster.micro_batch}: must divide the {mini // gpus} episodes of an update on one GPU."
        )


def training_memory(cluster: Cluster, algo: AlgoConfig, row_tokens: int) -> dict[str, float]:
    """GiB per GPU while policy or critic train, by part; row_tokens: longest prompt and response together."""
    shape, gpus = cluster.shape, cluster.gpus
    tokens = cluster.micro_batch * row_tokens
    embedding = shape.vocabulary * shape.hidden
    largest = max((shape.parameters - 2 * embedding) / shape.layers, embedding)
    parts = {"policy: weights, gradients, Adam": state_bytes(cluster) / gpus}
    if algo.name == "ppo":
        parts["critic: the same"] = state_bytes(cluster) / gpus
    parts |= {
        "two layers in bfloat16": 2 * 2 * largest,
        "activations": tokens * shape.hidden * (2 * shape.layers + ACTIVATION_BYTES),
        "logits": tokens * shape.vocabulary * LOGIT_BYTES,
    }
    return {name: value / GIB for name, value in parts.items()} | {"context and buffers": FIXED_GIB}


def state_bytes(cluster: Cluster) -> float:
    """Bytes of one trained model over all GPUs: everything trained, or a frozen base and adapters on all linear layers."""
    shape = cluster.shape
    if cluster.lora_rank == 0:
        return STATE_BYTES * shape.parameters
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ends = 2 * (shape.hidden + query) + 2 * (shape.hidden + key) + 3 * (shape.hidden + shape.feedforward)
    return FROZEN_BYTES * shape.parameters + STATE_BYTES * cluster.lora_rank * shape.layers * ends


def sampling_memory(cluster: Cluster, algo: AlgoConfig) -> dict[str, float]:
    """GiB per GPU while vLLM samples, by part."""
    models = ["policy", "critic"] if algo.name == "ppo" else ["policy"]
    waiting = 0.0 if cluster.offload else len(models) * state_bytes(cluster) / cluster.gpus / GIB
    vllm = cluster.sampler_memory * cluster.gpu_memory_gib
    return {f"{' and '.join(models)}, waiting": waiting, "vLLM: weights and cache": vllm, "context and buffers": FIXED_GIB}


def cached_tokens(cluster: Cluster) -> int:
    """Tokens whose keys and values fit beside the weights of one sampler copy, over its GPUs."""
    shape = cluster.shape
    per_token = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim  # keys and values, bfloat16
    room = cluster.sampler_memory * cluster.gpu_memory_gib * GIB * cluster.tensor_parallel - 2 * shape.parameters
    return math.floor(room / per_token)


def step_tokens(algo: AlgoConfig, prompt_tokens: int, response_tokens: int) -> dict[str, int]:
    """Tokens of one step at their upper bound: every prompt and answer at its limit.

    A group's prompt is prefilled once. Passes: the policy's own log-probabilities, the reference's with KL, the critic's.
    """
    episodes = algo.prompts_per_step * algo.group_size
    row = prompt_tokens + response_tokens
    passes = 1 + (algo.kl_coef > 0) + (algo.name == "ppo")
    sampled = algo.prompts_per_step * prompt_tokens + episodes * response_tokens
    trained = episodes * row * algo.epochs * (2 if algo.name == "ppo" else 1)
    return {"sampled": sampled, "scored": passes * episodes * row, "trained": trained}


def make_plan(cluster: Cluster, algo: AlgoConfig, job_tokens: tuple[int, int], budget_flops: float) -> Plan:
    """The run of one algorithm within budget_flops; job_tokens: longest prompt, longest response.

    ConfigError when the batches do not divide, memory does not suffice or the budget holds no step.
    """
    check_batches(cluster, algo)
    prompt, response = job_tokens
    tokens = step_tokens(algo, prompt, response)
    size = cluster.shape.parameters
    sampling = FORWARD_FLOPS * size * tokens["sampled"]
    scoring, training = FORWARD_FLOPS * size * tokens["scored"], TRAIN_FLOPS * size * tokens["trained"]
    flops = sampling + scoring + training
    steps = math.floor(budget_flops / flops)
    if steps < 1:
        raise ConfigError(f"branch_flops={budget_flops:g}: one step takes {flops:.3g} FLOPs; give at least that.")
    peak = cluster.gpus * cluster.peak_tflops * 1e12
    seconds = {
        "sampling": sampling / (peak * cluster.sample_use),
        "scoring": scoring / (peak * cluster.train_use),
        "training": RECOMPUTE * training / (peak * cluster.train_use),
        "weights, waking, checkpoints": cluster.overhead_s,
    }
    plan = Plan(
        steps,
        tokens,
        flops,
        seconds,
        training_memory(cluster, algo, prompt + response),
        sampling_memory(cluster, algo),
        cached_tokens(cluster),
    )
    _check_memory(cluster, plan, prompt + response)
    return plan


def _check_memory(cluster: Cluster, plan: Plan, row_tokens: int) -> None:
    limit = USABLE * cluster.gpu_memory_gib
    where = f"{cluster.model} on {cluster.gpus} GPUs of {cluster.gpu_memory_gib:g} GiB"
    for phase, parts, remedy in (
        ("training", plan.training_gib, "more GPUs, a smaller cluster.micro_batch or cluster.lora_rank"),
        ("sampling", plan.sampling_gib, "more GPUs, a smaller cluster.sampler_memory or cluster.offload=true"),
    ):
        total = sum(parts.values())
        if total > limit:
            largest = max(parts, key=lambda name: parts[name])
            raise ConfigError(
                f"{where}: {phase} needs {total:.1f} GiB per GPU, above {limit:.1f} GiB ({USABLE:.0%} of a card); the largest "
                f"part is {largest} with {parts[largest]:.1f} GiB. It takes {remedy}."
            )
    if plan.cached_tokens < row_tokens:
        raise ConfigError(
            f"cluster.sampler_memory={cluster.sampler_memory:g} cluster.tensor_parallel={cluster.tensor_parallel}: beside the "
            f"sampler's weights there is room for {max(0, plan.cached_tokens)} tokens, and one episode has up to {row_tokens}; "
            "raise one of the two."
        )


def gpu_keys(cluster: Cluster, algo: AlgoConfig) -> dict[str, Any]:
    """verl's keys of the layout: FSDP2 for training, vLLM for sampling on the same cards."""
    actor, ref, rollout = (f"actor_rollout_ref.{part}." for part in ("actor", "ref", "rollout"))
    micro, offload = cluster.micro_batch, cluster.offload
    keys: dict[str, Any] = {
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        actor + "strategy": "fsdp2",
        actor + "ppo_micro_batch_size_per_gpu": micro,
        actor + "fsdp_config.param_offload": offload,
        actor + "fsdp_config.optimizer_offload": offload,
        ref + "log_prob_micro_batch_size_per_gpu": micro,
        rollout + "name": "vllm",
        rollout + "tensor_model_parallel_size": cluster.tensor_parallel,
        rollout + "gpu_memory_utilization": cluster.sampler_memory,
        rollout + "log_prob_micro_batch_size_per_gpu": micro,
        "trainer.nnodes": cluster.nodes,
        "trainer.n_gpus_per_node": cluster.gpus_per_node,
        "trainer.device": "cuda",
        "trainer.resume_mode": "auto",
    }
    lora = {"lora_rank": cluster.lora_rank, "lora_alpha": 2 * cluster.lora_rank, "target_modules": "all-linear"}
    if cluster.lora_rank:
        keys |= {f"actor_rollout_ref.model.{name}": value for name, value in lora.items()}
        keys[rollout + "load_format"] = "safetensors"  # the frozen base is loaded once, only the adapter is sent
    if algo.name == "ppo":
        keys |= {
            "critic.strategy": "fsdp2",
            "critic.ppo_micro_batch_size_per_gpu": micro,
            "critic.fsdp.param_offload": offload,
            "critic.fsdp.optimizer_offload": offload,
            "critic.model.use_remove_padding": True,
            "critic.model.enable_gradient_checkpointing": True,
        }
        keys |= {f"critic.model.{name}": value for name, value in lora.items()} if cluster.lora_rank else {}
    return keys


def submission(cluster: Cluster, keys: Mapping[str, Any], variables: Mapping[str, str]) -> list[str]:
    """The command that hands the run to Ray's job server; the suite's code travels with it."""
    runtime = {"env_vars": dict(variables), "excludes": UPLOAD_EXCLUDES}
    head = ["ray", "job", "submit", "--address", cluster.address, "--working-dir", str(ROOT)]
    return [*head, "--runtime-env-json", json.dumps(runtime), "--", *command(keys, "python")]


def describe(cluster: Cluster, algo: AlgoConfig, job: Job, plan: Plan, submit: list[str]) -> str:
    """The plan as text to read, and at its end the submission to copy."""
    episodes = algo.prompts_per_step * algo.group_size
    update = episodes // algo.minibatches
    updates = algo.minibatches * algo.epochs
    trained = f"{update} episodes each, {update // cluster.gpus} per GPU in passes of {cluster.micro_batch}"
    lines = [
        f"{job.name} {job.arm}: verl on {cluster.nodes} x {cluster.gpus_per_node} GPUs of {cluster.gpu_memory_gib:g} GiB",
        f"Model {cluster.model} from {job.model}: {cluster.shape.parameters / 1e9:.2f} B parameters, "
        f"{'LoRA' if cluster.lora_rank else 'all trained'}",
        "",
        "Batch",
        f"  {algo.prompts_per_step} prompts x {algo.group_size} answers = {episodes} episodes a step",
        f"  {updates} updates a step ({algo.minibatches} minibatches x {algo.epochs} epochs), {trained}",
        f"  up to {job.prompt_tokens} prompt tokens and {job.response_tokens(algo)} response tokens "
        f"({algo.max_turns} turns of {algo.max_new_tokens})",
        f"  {cluster.gpus // cluster.tensor_parallel} samplers of {cluster.tensor_parallel} GPUs, each with room for "
        f"{plan.cached_tokens} tokens",
        "",
        f"Memory per GPU (at most {USABLE * cluster.gpu_memory_gib:.1f} GiB)",
        *_parts("while training", plan.training_gib, "GiB", 1),
        *_parts("while sampling", plan.sampling_gib, "GiB", 1),
        "",
        "Tokens a step, at most",
        *(f"  {name:10} {count:14,}" for name, count in plan.tokens.items()),
        "",
        f"Time (assumed: {cluster.peak_tflops:g} TFLOP/s a card, {cluster.train_use:.0%} of it in training, "
        f"{cluster.sample_use:.0%} in sampling)",
        f"  {plan.flops:.3g} FLOPs a step, {plan.steps} steps in the budget",
        *_parts("a step", plan.seconds, "s", 0),
        f"  {plan.hours:.1f} hours, {plan.hours * cluster.gpus:.0f} GPU hours",
        "",
        "Submission",
        f"  {shlex.join(submit)}",
    ]
    return "\n".join(lines)


def _parts(title: str, parts: Mapping[str, float], unit: str, digits: int) -> list[str]:
    total = sum(parts.values())
    return [f"  {title:34}{total:10.{digits}f} {unit}", *(f"    {name:32}{v:10.{digits}f}" for name, v in parts.items())]
