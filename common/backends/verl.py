"""verl 0.9.1 (HybridFlow, Sheng et al. 2024) as a backend: our tasks as parquet, our algorithm as its keys, its weights back.

    rows = [task_row("7-11", "train", i, task, env, env_kwargs) for i, task in enumerate(tasks)]
    write_tasks(folder / "train.parquet", rows)
    keys = algorithm_keys(algo, job) | job_keys(job, algo) | cpu_keys(algo)   # or verl_plan.gpu_keys
    check_keys(keys, compose())
    subprocess.run(command(keys), env=environment(...))
    to_hf_folder(folder / "checkpoints/global_step_5/actor", folder / "model")

The rewards are the environment's own (common.backends.verl_worker): a one-turn task goes through verl's custom reward
function, a task of many turns through an agent loop of ours.

Where verl computes something else than common.grpo and common.ppo, and it stands:
- It adds 1e-6 to a group's standard deviation, not std_eps (refused above 1e-3, where it would show).
- It takes the policy's own log-probabilities for the old ones; ours are the sampler's. At one update per step both are 1.
- Its critic is a model of its own and not a head on the policy: value_coef has no counterpart, value_warmup_steps has.
- The reward of an episode of many turns stands on its last token; ours stands behind each turn. Equal for one turn.
- Its warm-up starts at learning rate 0, ours at 1 / warmup_steps of the rate.
- Dynamic sampling (refill_rounds > 0) goes on until the batch is full; refill_rounds only sizes the exported tasks.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.algo import CONF, PREFERENCE_NAMES, AlgoConfig
from common.backends.verl_worker import AGENT
from common.files import read_json
from common.schema import ConfigError, suggest

ROOT = CONF.parent
PLUGIN = "common.backends.verl_plugin"
WORKER = "common.backends.verl_worker"
AGGREGATIONS = {"token_mean": "token-mean", "seq_mean": "seq-mean-token-mean", "seq_sum_const": "seq-mean-token-sum-norm"}
KL_NAMES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
SCHEDULES = {"none": "constant", "cosine": "cosine"}
ESTIMATORS = {  # (advantage, whiten) -> verl's name, divided by the group's standard deviation
    ("group_norm", False): ("grpo", True),
    ("group_centre", False): ("grpo", False),
    ("group_centre", True): ("reinforce_plus_plus_baseline", False),
    ("rloo", False): ("rloo", False),
    ("reward_to_go", True): ("reinforce_plus_plus", False),
    ("gae", True): ("gae", False),
}
SURROGATES = {"ppo_clip": "vanilla", "gspo": "gspo", "cispo": "cispo"}
OUT_OF_REACH = 1e6  # a bound that never binds: dual clipping and value clipping when ours have none
LARGEST_EPS = 1e-3
FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
HYDRA_FOLDER = "hydra.run.dir"  # a key of Hydra itself, which else leaves outputs/ in the launch folder
FSDP = ("actor_rollout_ref.actor.fsdp_config.", "actor_rollout_ref.ref.fsdp_config.", "critic.fsdp.")
# Mappings of verl that take any key, and keys that its YAML leaves out; everything else must stand in its schema.
OPEN_KEYS = (
    *("ray_kwargs.ray_init.", "reward.reward_kwargs.", *(part + "mixed_precision" for part in FSDP)),
    *("actor_rollout_ref.model.override_config.", "critic.model.override_config."),
)


@dataclass(frozen=True)
class Job:
    """One training run of verl. Paths are absolute; ``folder`` takes checkpoints, rollouts and metrics.

    ``feedback_tokens``: longest reply between two answers. ``save_every``, ``test_every``: steps between (0: never).
    """

    name: str
    arm: str
    model: str
    folder: Path
    steps: int
    seed: int
    prompt_tokens: int
    feedback_tokens: int = 0
    save_every: int = 0
    test_every: int = 0

    @property
    def train_file(self) -> Path:
        return self.folder / "train.parquet"

    @property
    def test_file(self) -> Path:
        return self.folder / "test.parquet"

    def response_tokens(self, algo: AlgoConfig) -> int:
        """Longest episode behind the prompt: all answers and the replies between them."""
        return algo.max_turns * algo.max_new_tokens + (algo.max_turns - 1) * self.feedback_tokens


def algorithm_keys(algo: AlgoConfig, job: Job) -> dict[str, Any]:
    """The algorithm as verl's keys (dotted name -> value). ConfigError where verl cannot do what is asked."""
    _refuse(algo)
    if algo.max_turns > 1 and job.feedback_tokens < 1:
        raise ConfigError(
            f"feedback_tokens={job.feedback_tokens} with algo.max_turns={algo.max_turns}: the environment's replies need "
            "room; give the longest one in tokens."
        )
    advantage, divide = _estimator(algo)
    mini = algo.prompts_per_step // algo.minibatches
    actor, critic = "actor_rollout_ref.actor.", "critic."
    keys: dict[str, Any] = {
        "algorithm.adv_estimator": advantage,
        "algorithm.norm_adv_by_std_in_grpo": divide,
        "algorithm.gamma": algo.gamma,
        "algorithm.lam": algo.lam,
        "algorithm.filter_groups.enable": algo.refill_rounds > 0,
        "algorithm.filter_groups.metric": "reward",
        "algorithm.use_kl_in_reward": algo.kl_coef > 0 and algo.kl_in == "reward",
        "algorithm.kl_penalty": KL_NAMES[algo.kl_estimator],
        "algorithm.kl_ctrl.type": "fixed",
        "algorithm.kl_ctrl.kl_coef": algo.kl_coef,
        "data.train_batch_size": algo.prompts_per_step,
        "data.max_prompt_length": job.prompt_tokens,
        "data.max_response_length": job.response_tokens(algo),
        "actor_rollout_ref.rollout.n": algo.group_size,
        "actor_rollout_ref.rollout.temperature": algo.temperature,  # top-p and top-k are off by verl's default
        actor + "policy_loss.loss_mode": SURROGATES[algo.policy_loss],
        actor + "clip_ratio_low": algo.clip_low,
        actor + "clip_ratio_high": algo.clip_high,
        actor + "clip_ratio_c": OUT_OF_REACH,
        actor + "loss_agg_mode": AGGREGATIONS[algo.loss_agg],
        actor + "loss_scale_factor": algo.max_new_tokens * algo.max_turns if algo.loss_agg == "seq_sum_const" else None,
        actor + "entropy_coeff": algo.entropy_coef,
        actor + "use_kl_loss": algo.kl_coef > 0 and algo.kl_in == "loss",
        actor + "kl_loss_coef": algo.kl_coef,
        actor + "kl_loss_type": KL_NAMES[algo.kl_estimator],
        actor + "ppo_epochs": algo.epochs,
        actor + "ppo_mini_batch_size": mini,
        actor + "shuffle": algo.minibatches > 1,
        **_optimizer(actor, algo, algo.lr),
    }
    if algo.name == "ppo":
        keys |= {
            critic + "cliprange_value": algo.value_clip or OUT_OF_REACH,
            critic + "loss_agg_mode": "token-mean",
            critic + "ppo_mini_batch_size": mini,
            critic + "ppo_epochs": algo.epochs,
            **_optimizer(critic, algo, algo.value_lr),
            "trainer.critic_warmup": algo.value_warmup_steps,
        }
    return keys | _overlong(algo)


def _refuse(algo: AlgoConfig) -> None:
    """ConfigError for what verl has no key for."""
    native = "run it natively"
    cases = [
        (algo.name in PREFERENCE_NAMES, f"algo.name={algo.name}", "preference learning runs natively and through TRL"),
        (algo.lr_decay not in SCHEDULES, f"algo.lr_decay={algo.lr_decay}", f"allowed are {', '.join(SCHEDULES)}"),
        (algo.mask_truncated, "algo.mask_truncated=true", "allowed is false"),
        (algo.name == "ppo" and algo.gae_level == "turn", "algo.gae_level=turn", "allowed is token"),
        (algo.refill_with == "answers", "algo.refill_with=answers", "allowed is prompts"),
        (algo.overlong_buffer > 0 and algo.max_turns > 1, "algo.overlong_buffer over several turns", native),
        (
            algo.drop_zero_variance and not algo.refill_rounds,
            "algo.drop_zero_variance=true with algo.refill_rounds=0",
            "it drops a group only to sample another; allowed are drop_zero_variance=false, or refill_rounds of at least 1",
        ),
    ]
    for hit, text, remedy in cases:
        if hit:
            raise ConfigError(f"{text}: verl cannot do it; {remedy}.")
    if algo.advantage == "group_norm" and (algo.std_ddof != 1 or algo.std_eps > LARGEST_EPS):
        raise ConfigError(
            f"algo.std_ddof={algo.std_ddof} algo.std_eps={algo.std_eps}: verl divides by the sample standard deviation plus "
            f"1e-6; allowed are std_ddof=1 and std_eps of at most {LARGEST_EPS}."
        )
    if algo.prompts_per_step % algo.minibatches:
        raise ConfigError(
            f"algo.minibatches={algo.minibatches}: verl cuts a step by prompts; must divide "
            f"prompts_per_step={algo.prompts_per_step}."
        )


def _estimator(algo: AlgoConfig) -> tuple[str, bool]:
    """verl's name of the advantage, and whether it divides by the group's standard deviation."""
    if (algo.advantage, algo.whiten, algo.group_size) == ("reward", False, 1):
        return "grpo", False  # its group of one has mean 0: the plain reward is left
    if (algo.advantage, algo.whiten) not in ESTIMATORS:
        pairs = ", ".join(f"{advantage} with whiten={str(whiten).lower()}" for advantage, whiten in ESTIMATORS)
        raise ConfigError(
            f"algo.advantage={algo.advantage} algo.whiten={str(algo.whiten).lower()} algo.group_size={algo.group_size}: verl "
            f"cannot do it; allowed are {pairs}, and reward without whitening at group_size=1."
        )
    return ESTIMATORS[algo.advantage, algo.whiten]


def _optimizer(where: str, algo: AlgoConfig, lr: float) -> dict[str, Any]:
    optim = where + "optim."
    return {
        where + "grad_clip": algo.grad_clip,
        optim + "clip_grad": algo.grad_clip,
        optim + "lr": lr,
        optim + "weight_decay": algo.weight_decay,
        optim + "betas": list(algo.betas),
        optim + "lr_warmup_steps": algo.warmup_steps or -1,
        optim + "lr_scheduler_type": SCHEDULES[algo.lr_decay],
        optim + "override_optimizer_config": {"eps": algo.adam_eps},
    }


def _overlong(algo: AlgoConfig) -> dict[str, Any]:
    if algo.overlong_buffer == 0:
        return {}
    buffer = "reward.reward_kwargs.overlong_buffer_cfg."
    return {
        "reward.reward_manager.name": "dapo",
        "reward.reward_kwargs.max_resp_len": algo.max_new_tokens,
        buffer + "enable": True,
        buffer + "len": algo.overlong_buffer,
        buffer + "penalty_factor": algo.overlong_penalty,
        buffer + "log": False,
    }


def job_keys(job: Job, algo: AlgoConfig) -> dict[str, Any]:
    """Files, lengths, seeds and logs of a run, whatever machine it is on."""
    many = algo.max_turns > 1
    return {
        "data.train_files": str(job.train_file),
        "data.val_files": str(job.test_file),
        "data.shuffle": False,  # the rows stand in the order of the steps
        "data.seed": job.seed,
        "actor_rollout_ref.model.path": job.model,
        "actor_rollout_ref.actor.data_loader_seed": job.seed,
        "actor_rollout_ref.rollout.seed": job.seed,
        "actor_rollout_ref.rollout.agent.default_agent_loop": AGENT if many else "single_turn_agent",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": str(job.folder / "agent.yaml") if many else None,
        "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
        "actor_rollout_ref.rollout.val_kwargs.temperature": algo.temperature,
        "reward.custom_reward_function.path": f"pkg://{WORKER}",
        **({"critic.model.path": job.model} if algo.name == "ppo" else {}),
        "trainer.project_name": job.name,
        "trainer.experiment_name": job.arm,
        "trainer.logger": ["console", "file"],
        "trainer.total_epochs": algo.refill_rounds + 1,
        "trainer.total_training_steps": job.steps,
        "trainer.val_before_train": False,
        "trainer.save_freq": job.save_every or -1,
        "trainer.test_freq": job.test_every or -1,
        "trainer.default_local_dir": str(job.folder / "checkpoints"),
        "trainer.rollout_data_dir": str(job.folder / "rollouts"),
        HYDRA_FOLDER: str(job.folder / "hydra"),
    }


def cpu_keys(algo: AlgoConfig) -> dict[str, Any]:
    """Keys of a run on one process without an accelerator, for a tiny model (see verl_plugin)."""
    actor, ref, rollout = (f"actor_rollout_ref.{part}." for part in ("actor", "ref", "rollout"))
    batch = algo.prompts_per_step * algo.group_size // algo.minibatches
    parts = FSDP if algo.name == "ppo" else FSDP[:2]
    keys: dict[str, Any] = {
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.model.override_config.attn_implementation": "eager",
        actor + "strategy": "fsdp2",
        actor + "use_torch_compile": False,
        **{part + "use_torch_compile": False for part in parts},
        **{part + "mixed_precision": FLOAT32 for part in parts},  # it computes in bfloat16 otherwise
        actor + "ppo_micro_batch_size_per_gpu": batch,
        ref + "log_prob_micro_batch_size_per_gpu": batch,
        rollout + "name": "sampler_cpu",
        rollout + "tensor_model_parallel_size": 1,
        rollout + "log_prob_micro_batch_size_per_gpu": batch,
        rollout + "agent.num_workers": 1,
        "reward.num_workers": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.device": "cpu",
        "trainer.resume_mode": "disable",
        "ray_kwargs.ray_init.num_cpus": 16,  # a number Ray counts with; verl's actors ask for one each
        "ray_kwargs.ray_init.num_gpus": 1,
        "ray_kwargs.ray_init.include_dashboard": False,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }
    if algo.name == "ppo":
        keys |= {
            "critic.strategy": "fsdp2",
            "critic.ppo_micro_batch_size_per_gpu": batch,
            "critic.model.use_remove_padding": False,
            "critic.model.enable_gradient_checkpointing": False,
            "critic.model.override_config.attn_implementation": "eager",
        }
    return keys


def verl_config_folder() -> Path | None:
    """verl's own configuration files, found without importing it; None where it is not installed."""
    spec = importlib.util.find_spec("verl")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return Path(places[0]) / "trainer" / "config" if places else None


def compose(keys: Mapping[str, Any] | None = None) -> Any:
    """verl's composed configuration (OmegaConf) with our keys on top. ConfigError where verl is not installed."""
    import hydra

    folder = verl_config_folder()
    if folder is None:
        raise ConfigError("verl is not installed here; run `.venv/bin/pip install -c constraints.txt -e '.[verl]'`.")
    with hydra.initialize_config_dir(str(folder), version_base=None):
        chosen = {key: value for key, value in (keys or {}).items() if key != HYDRA_FOLDER}
        return hydra.compose("ppo_trainer", overrides(chosen))


def check_keys(keys: Iterable[str], schema: Any) -> None:
    """ConfigError for a key that verl's schema (`compose()`) does not hold; free mappings take any key."""
    known = set(_dotted(schema))
    for key in keys:
        if key not in known and key != HYDRA_FOLDER and not key.startswith(OPEN_KEYS):
            raise ConfigError(f"{key}: verl's configuration has no such key.{suggest(key, known)}")


def _dotted(node: Any, prefix: str = "") -> Iterable[str]:
    for key in node:
        yield f"{prefix}{key}"
        inner = node._get_node(key)  # not node[key], which would resolve references to what is not set yet
        if hasattr(inner, "keys") and not inner._is_none():
            yield from _dotted(inner, f"{prefix}{key}.")


def overrides(keys: Mapping[str, Any]) -> list[str]:
    """The keys as Hydra's command-line texts, sorted; ++ where verl's schema may lack the key."""
    return [f"{'++' if key.startswith(OPEN_KEYS) else ''}{key}={hydra_text(keys[key])}" for key in sorted(keys)]


def hydra_text(value: Any) -> str:
    """A value in Hydra's override grammar; text that is more than letters, digits and ./:_- is quoted."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(hydra_text, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{hydra_text(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9_./:-]+", value):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return str(value)


def command(keys: Mapping[str, Any], python: str = sys.executable) -> list[str]:
    """The command that trains."""
    return [python, "-m", "verl.trainer.main_ppo", *overrides(keys)]


def environment(job: Job, *, on_cpu: bool) -> dict[str, str]:
    """Variables that verl and its workers need beside those of the shell."""
    variables = {"VERL_USE_EXTERNAL_MODULES": PLUGIN, "VERL_FILE_LOGGER_PATH": str(job.folder / "metrics.jsonl")}
    if on_cpu:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        variables |= {"VERL_ON_CPU": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "0,1", "RAY_USAGE_STATS_ENABLED": "0"}
        variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        # Else Ray starts an idle process for each of the CPUs it is told of, and gives up on a busy machine.
        variables |= dict.fromkeys(("RAY_prestart_worker_first_driver", "RAY_enable_worker_prestart"), "0")
        variables |= dict.fromkeys(("RAY_worker_register_timeout_seconds", "RAY_gcs_server_request_timeout_seconds"), "300")
        variables |= {"RAY_health_check_failure_threshold": "60"}
    return variables


def to_hf_folder(checkpoint: Path, folder: Path) -> None:
    """Joins the shards of verl's FSDP checkpoint (global_step_N/actor) into an HF folder, in the precision they have.

    Raises ValueError when the shards do not hold exactly the model's tensors.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from common.checkpoints import save_model

    source = checkpoint / "huggingface"
    world = read_json(checkpoint / "fsdp_config.json")["world_size"]
    ranks = [checkpoint / f"model_world_size_{world}_rank_{rank}.pt" for rank in range(world)]
    shards = [torch.load(file, map_location="cpu", weights_only=True) for file in ranks]
    state = {name: _join([shard[name] for shard in shards]) for name in shards[0]}
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=next(iter(state.values())).dtype)
    result = model.load_state_dict(state, strict=False)
    missing = set(result.missing_keys) - set(model._tied_weights_keys or ())
    if missing or result.unexpected_keys:
        raise ValueError(f"{checkpoint} does not fit its model: {sorted(missing)} missing, {result.unexpected_keys} unknown")
    save_model(model, AutoTokenizer.from_pretrained(source), folder)


def _join(parts: list[Any]) -> Any:
    """One tensor from its shards, one per rank; a plain tensor is the same on each."""
    import torch

    if not hasattr(parts[0], "placements"):
        return parts[0]
    (placement,) = parts[0].placements
    local = [part.to_local() for part in parts]
    return torch.cat(local, dim=placement.dim) if placement.is_shard() else local[0]
