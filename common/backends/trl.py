"""GRPO, Dr. GRPO, GSPO, CISPO and RLOO through TRL 1.16's GRPOTrainer, on our environments.

`train_grpo` takes what common.grpo.train_grpo takes (for SFT see common.backends.trl_sft). Ours are the episodes (played by
common.episodes, any number of turns, and handed over as token ids with masks and log-probabilities, so that nothing is
encoded again), the rewards, the tasks, which episodes count, the optimizer, its rate, the budget, the logs and the state on
disk. TRL's are advantages, log-probabilities, loss, backward pass, clipping and the update.

What TRL computes otherwise than common.grpo, and it stands:
- RLOOTrainer and KL in the reward take no rollouts of ours. RLOO is GRPOTrainer without scaling, on rewards times
  n / (n - 1) for n scored answers of a group: the same advantage.
- An update is one pass over all its episodes, prompts padded on the left, without shared prompts or micro-batches: slower,
  and memory grows with the batch. Positions count from the padding on, so rotary positions are right and learned ones not.
- Rewards and advantages are single precision (ours: double), so weights agree to rounding and not bit for bit.
- With several updates on a batch, the old log-probabilities are the trainer's (ours: the sampler's), TRL cuts the batch in
  one random order for all epochs (ours: one per epoch), and CISPO divides by the mean tokens of an update (ours: its own).
- A group of which one answer is scored, or with equal rewards, has an advantage of about 0 (ours: 0 exactly).
- Metrics: loss/policy holds the KL and entropy terms where there are any; entropy and ratio/ are means over the updates
  and over all answers that count (ours: over tokens, without answers whose advantage is 0); there is no kl/old.
- The pad token's embedding gets no gradient. It only shows where an untrained policy writes that token.

Not here: DPO and KTO train through TRL under every backend (common.preference). PPO left TRL before 1.16. On-policy
distillation: TRL's DistillationTrainer and GKDTrainer sample by themselves from text and take no rollouts, so they cannot
play episodes; distillation is common.distill's, and its divergences are tested against TRL's.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback

from common import advantages
from common.algo import AlgoConfig
from common.compute import Budget, Meter
from common.episodes import Batch, Episode
from common.loop import (
    TaskAt,
    episode_metrics,
    evaluations_due,
    learnable,
    make_optimizer,
    overlong_penalties,
    resume,
    sample_step,
    save,
    set_learning_rate,
    speed_metrics,
    to_batch,
    trainable,
)
from common.models import parameter_count
from common.policy import check_head, make_reference, network, tokens_to_forward
from common.runlog import RunLog
from common.schema import ConfigError
from common.seeding import stream_seed

SCALING = {"group_norm": "group", "group_centre": "none", "rloo": "none"}  # advantage -> scale_rewards
LOSSES = {"token_mean": "bnpo", "seq_mean": "grpo", "seq_sum_const": "dr_grpo"}  # loss_agg -> loss_type
METRICS = {
    "loss": "loss/policy",
    "grad_norm": "grad_norm",
    "entropy": "entropy",
    "kl": "kl/ref",
    "clip_ratio/low_mean": "ratio/clip_low_frac",
    "clip_ratio/high_mean": "ratio/clip_high_frac",
}
ENDLESS = 10**9  # TRL counts steps; our budget ends the run


def refuse(key: str, value: Any, why: str, remedy: str) -> None:
    """Raises the ConfigError of a key that TRL cannot follow."""
    raise ConfigError(f"{key}={value} with backend=trl: {why}; allowed is {remedy}, or backend=native.")


def check_algorithm(algo: AlgoConfig) -> None:
    """Raises ConfigError where TRL's GRPOTrainer cannot do what `algo` asks for."""
    if algo.name == "ppo":
        refuse("algo.name", "ppo", "TRL 1.16 has no PPO", "grpo, dr_grpo, gspo, cispo or rloo")
    if algo.advantage not in SCALING:
        refuse("algo.advantage", algo.advantage, "TRL has no such advantage", ", ".join(SCALING))
    if algo.advantage == "group_norm" and (algo.std_ddof, algo.std_eps) != (1, 1e-4):
        found = f"{algo.std_ddof} algo.std_eps={algo.std_eps}"
        refuse("algo.std_ddof", found, "TRL's are 1 and 1e-4", "algo.std_ddof=1 algo.std_eps=1e-4")
    if algo.whiten:
        refuse("algo.whiten", "true", "TRL does not whiten advantages", "false")
    if algo.refill_rounds:
        refuse("algo.refill_rounds", algo.refill_rounds, "TRL samples a step once", "0")
    if algo.kl_coef and (algo.kl_in, algo.kl_estimator) != ("loss", "k3"):
        found = f"{algo.kl_in} algo.kl_estimator={algo.kl_estimator}"
        refuse("algo.kl_in", found, "TRL puts k3 into the loss", "algo.kl_in=loss algo.kl_estimator=k3")
    if algo.entropy_coef and algo.loss_agg != "token_mean":
        refuse("algo.loss_agg", algo.loss_agg, "TRL's entropy bonus is a mean over tokens", "token_mean")
    if algo.policy_loss == "cispo" and algo.loss_agg != "token_mean":
        refuse("algo.loss_agg", algo.loss_agg, "TRL's CISPO is a mean over tokens", "token_mean")
    if algo.policy_loss == "cispo" and algo.clip_low < 1:
        refuse("algo.clip_low", algo.clip_low, "TRL's CISPO has no lower bound", "1.0")
    for key in ("drop_zero_variance", "mask_truncated"):
        if algo.minibatches > 1 and getattr(algo, key):
            refuse(f"algo.{key}", "true", f"TRL cuts a step into {algo.minibatches} equal parts and leaves none out", "false")


def algorithm_keys(algo: AlgoConfig) -> dict[str, Any]:
    """The keys of TRL's GRPOConfig that make it compute `algo`; KL's weight is set on the trainer. Raises ConfigError."""
    check_algorithm(algo)
    cispo = algo.policy_loss == "cispo"
    return {
        "num_generations": algo.group_size,
        "per_device_train_batch_size": algo.prompts_per_step * algo.group_size // algo.minibatches,
        "steps_per_generation": algo.minibatches,
        "num_iterations": algo.epochs,
        "scale_rewards": SCALING[algo.advantage],
        "loss_type": "cispo" if cispo else LOSSES[algo.loss_agg],
        "importance_sampling_level": "sequence" if algo.policy_loss == "gspo" else "token",
        "epsilon": algo.clip_low,
        "epsilon_high": 1 + algo.clip_high if cispo else algo.clip_high,  # TRL bounds CISPO's weight itself
        "max_completion_length": algo.max_new_tokens * algo.max_turns,  # only the constant of dr_grpo
        "temperature": algo.temperature,
        "entropy_coef": algo.entropy_coef,
        "use_bias_correction_kl": False,
        "max_grad_norm": algo.grad_clip,
    }


def shared_keys(model: Any, folder: Path, seed: int) -> dict[str, Any]:
    """The keys that every TRL trainer gets here: no schedule, checkpoints, reports or casts of its own."""
    return {
        "output_dir": str(folder),
        "seed": seed,
        "use_cpu": network(model).device.type == "cpu",
        "bf16": False,
        "gradient_checkpointing": False,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def constant(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer with a schedule that changes nothing: the callbacks set the rate."""
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def train(trainer: Any, *models: Any) -> None:
    """Runs a TRL trainer to its end, quietly; takes its own forward, which it leaves behind, off the models again."""
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    for model in models:
        if model is not None:
            network(model).__dict__.pop("forward", None)
            model.eval()


@dataclass
class Run:
    """What every trainer here gets; the fields are those of common.grpo.train_grpo."""

    model: Any
    budget: Budget
    log: RunLog
    folder: Path
    evaluate: Callable[[int, int], None] | None
    evaluate_every_flops: float | None
    checkpoint_every: int


class Books(TrainerCallback):
    """What ends a step of ours: counting, logs, evaluation and the state on disk, as the native loops do it."""

    def __init__(self, run: Run, optimizer: torch.optim.Optimizer) -> None:
        self.run, self.optimizer = run, optimizer
        self.meter = Meter(parameter_count(run.model))
        state = run.folder / "state.pt"
        self.step, self.evaluations = resume(state, {"policy": run.model}, optimizer, self.meter, run.log)

    @property
    def used(self) -> float:
        return self.meter.used(self.run.budget, self.step)

    def finish_step(self, metrics: dict[str, float] | None) -> bool:
        """Logs `metrics` (None: nothing), evaluates and saves where that is due; True when the budget is used."""
        run, meter = self.run, self.meter
        self.step += 1
        if metrics is not None:
            run.log.metrics(self.step, metrics | {"progress/step": self.step}, progress=self.used)
        due = evaluations_due(meter, run.evaluate_every_flops)
        if run.evaluate is not None and due > self.evaluations:
            self.evaluations = due
            run.model.eval()
            run.evaluate(self.step, meter.flops)
            run.model.train()
        if self.step % run.checkpoint_every == 0 or self.used >= 1:
            save(run.folder / "state.pt", {"policy": run.model}, self.optimizer, meter, self.step, self.evaluations)
            run.log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)
        return self.used >= 1


class Recorder(Books):
    """A step of GRPO around TRL's updates: rate, samples and rewards before them, the books after them."""

    def __init__(self, run: Run, tokenizer: Any, make_env: Callable, task_at: TaskAt, algo: AlgoConfig, seed: int) -> None:
        super().__init__(run, make_optimizer(list(trainable(run.model).values()), [], algo))
        self.tokenizer, self.make_env, self.task_at, self.algo, self.seed = tokenizer, make_env, task_at, algo, seed
        self.updates = 0
        self.logged: list[dict[str, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.updates == 0:
            self.used_before, self.start = self.used, time.perf_counter()
        set_learning_rate(self.optimizer, self.algo, self.step, self.used_before)

    def rollout(self, *_: Any) -> dict[str, Any]:
        """A step's episodes as TRL's rollout_func returns them; TRL's own random order becomes one of (seed, step)."""
        algo = self.algo
        self.run.model.eval()
        tasks = self.task_at(self.step, algo.prompts_per_step)
        episodes = sample_step(self.run.model, self.tokenizer, self.make_env, tasks, algo, self.seed, self.step)
        self.sampled = time.perf_counter()
        self.meter.add_forward(sum(episode.tokens_forward for episode in episodes))
        self.batch = to_batch(episodes, self.tokenizer, self.run.model)
        rewards = self.judge(episodes, self.batch)
        self.run.model.train()
        torch.manual_seed(stream_seed(self.seed, "trl order", self.step) % 2**32)
        cuts = [(episode, episode.prompt_length) for episode in episodes]
        return {
            "prompt_ids": [episode.ids[:cut] for episode, cut in cuts],
            "completion_ids": [episode.ids[cut:] for episode, cut in cuts],
            "logprobs": [episode.logps[cut:] for episode, cut in cuts],
            "env_mask": [episode.mask[cut:] for episode, cut in cuts],
            "reward": rewards,
        }

    def judge(self, episodes: list[Episode], batch: Batch) -> list[float | None]:
        """Rewards for TRL, None where an episode does not count; notes which take part, their cost and the metrics."""
        algo = self.algo
        rewards_B = advantages.rewards_tensor([e.reward for e in episodes], len(episodes)) + overlong_penalties(episodes, algo)
        group_B = torch.tensor([episode.group for episode in episodes])
        valid_B = advantages.scored(rewards_B, learnable(episodes, algo))
        flat_B = advantages.zero_spread(rewards_B, group_B, valid_B)
        self.keep_B = valid_B & ~flat_B if algo.drop_zero_variance else valid_B
        self.metrics = episode_metrics(episodes, rewards_B) | {"reward/zero_std_frac": float(flat_B.double().mean())}
        advantages_B = advantages.outcome_advantages(algo.advantage, rewards_B, group_B, valid_B)
        everything = algo.kl_coef > 0 or algo.entropy_coef > 0
        trained_B = self.keep_B if everything else self.keep_B & (advantages_B != 0)  # what costs FLOPs in common.grpo
        self.meter.add_train(algo.epochs * tokens_to_forward(batch, trained_B.nonzero()[:, 0].to(batch.ids_BT.device)))
        if algo.kl_coef > 0 and bool(self.keep_B.any()):
            self.meter.add_forward(int(batch.attention_BT.sum()))
        if algo.advantage == "rloo":
            count_B = valid_B.double().view(-1, algo.group_size).sum(1).repeat_interleave(algo.group_size)
            rewards_B = rewards_B * count_B / (count_B - 1).clamp(min=1)
        return [reward if valid else None for reward, valid in zip(rewards_B.tolist(), valid_B.tolist())]

    def select(self, output: dict[str, Any]) -> dict[str, Any]:
        """TRL's batch without the episodes that do not count; if none does, one without a token to learn from."""
        if self.algo.minibatches > 1:
            return output
        rows = self.keep_B.nonzero()[:, 0].to(output["advantages"].device)
        if len(rows) == 0:
            rows = torch.zeros(1, dtype=torch.long, device=rows.device)
            output["tool_mask"] = torch.zeros_like(output["tool_mask"])
        kept = {key: value[rows] if value.ndim else value for key, value in output.items()}
        kept["num_items_in_batch"] = (kept["completion_mask"] * kept["tool_mask"]).sum()
        return kept

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Nothing to learn from is no update: with a gradient of 0 AdamW would still move by its momentum."""
        parameters = self.optimizer.param_groups[0]["params"]
        self.empty = not any(p.grad is not None and bool(p.grad.any()) for p in parameters)
        if self.empty:
            self.optimizer.zero_grad(set_to_none=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs is None or "loss" not in logs:  # the trainer's summary at its end
            return
        self.updates += 1
        if not self.empty:
            self.logged.append({ours: logs[theirs] for theirs, ours in METRICS.items() if theirs in logs})
        if self.updates == self.algo.epochs * self.algo.minibatches:
            rows, self.updates, self.logged = self.logged, 0, []
            means = {name: sum(row[name] for row in rows) / len(rows) for name in (rows or [{}])[0]}
            metrics = self.metrics | means | speed_metrics(self.start, self.sampled, self.batch)
            control.should_training_stop = self.finish_step(metrics)


def trainer_of(recorder: Recorder) -> type:
    """TRL's GRPOTrainer on the episodes that count, and without its usage report."""
    import trl

    def generate(self: Any, inputs: Any) -> dict[str, Any]:
        return recorder.select(trl.GRPOTrainer._generate_and_score_completions(self, inputs))

    changes = {"_generate_and_score_completions": generate, "_send_telemetry": lambda self: None}
    return type("GRPOTrainer", (trl.GRPOTrainer,), changes)


def environment_reward(reward: list[float | None], **_: Any) -> list[float | None]:
    """TRL's reward function: what the environment said, which came with the rollouts."""
    return reward


def train_grpo(
    model: Any,
    tokenizer: Any,
    make_env: Callable,
    task_at: TaskAt,
    algo: AlgoConfig,
    *,
    seed: int,
    budget: Budget,
    log: RunLog,
    folder: Path,
    reference: Any | None = None,
    evaluate: Callable[[int, int], None] | None = None,
    evaluate_every_flops: float | None = None,
    checkpoint_every: int = 10,
) -> Meter:
    """`common.grpo.train_grpo` with TRL's GRPOTrainer as its update: same arguments, state, logs, budget and meter.

    Raises ConfigError where TRL cannot do what `algo` asks for (see `check_algorithm`).
    """
    import trl
    from datasets import Dataset

    keys = algorithm_keys(algo)
    check_head(model)
    reference = make_reference(model, reference, needed=algo.kl_coef > 0)
    run = Run(model, budget, log, folder, evaluate, evaluate_every_flops, checkpoint_every)
    recorder = Recorder(run, tokenizer, make_env, task_at, algo, seed)
    if recorder.used >= 1:
        return recorder.meter
    shared = shared_keys(model, folder, stream_seed(seed, "trl") % 2**32)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*'rollout_func'")
        trainer: Any = trainer_of(recorder)(
            model=model,
            reward_funcs=environment_reward,
            args=trl.GRPOConfig(**shared, **keys, max_steps=ENDLESS, shuffle_dataset=False),
            train_dataset=Dataset.from_dict({"prompt": [""] * algo.prompts_per_step}),
            processing_class=copy.deepcopy(tokenizer),
            rollout_func=recorder.rollout,
            callbacks=[recorder],
            optimizers=constant(recorder.optimizer),
        )
    if reference is not None:
        add_reference(trainer, model, reference, algo)
    train(trainer, model, reference)
    return recorder.meter


def add_reference(trainer: Any, model: Any, reference: Any, algo: AlgoConfig) -> None:
    """Sets KL's weight and model. TRL would load the start from the model's path; an adapter it switches off by itself."""
    from trl.trainer.utils import add_fused_lm_head

    trainer.beta = algo.kl_coef
    if reference is not model:
        add_fused_lm_head(network(reference), temperature=algo.temperature)
        trainer.ref_model = reference
