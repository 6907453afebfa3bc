"""TRL trainers on our token ids: rows, masks, order of batches, learning rate, budget, metrics and state are ours.

A TRL trainer takes text, tokenizes it, loads its reference from a hub name and keeps its own checkpoints. Here it gets
row numbers as its data set and a collator that turns them into tensors, so nothing is encoded a second time; a frozen
copy of the policy as reference; and a callback that sets the learning rate, counts tokens, logs, and saves the same
folder/state.pt as our loops. What is left to it is the forward pass, the loss, backward and the optimizer step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback

from common.algo import AlgoConfig
from common.compute import Budget, Meter
from common.loop import evaluations_due, make_optimizer, resume, save, set_learning_rate, trainable
from common.models import parameter_count
from common.policy import network
from common.runlog import RunLog
from common.schema import ConfigError
from common.seeding import rng, stream_seed

# TRL's names of what it logs -> ours.
METRICS = {
    "loss": "loss/policy",
    "grad_norm": "grad_norm",
    "entropy": "entropy",
    "rewards/chosen": "preference/chosen",
    "rewards/rejected": "preference/rejected",
    "rewards/margins": "preference/margin",
    "rewards/accuracies": "preference/accuracy",
    "kl": "preference/kl",
}


def frozen_copy(model: Any) -> Any:
    """The policy as it is now, frozen; an adapter is merged into its base. Call before a checkpoint is loaded."""
    copied = copy.deepcopy(model)
    copied = copied.merge_and_unload() if hasattr(copied, "merge_and_unload") else copied
    return copied.requires_grad_(False).eval()


@dataclass
class TrlJob:
    """What a TRL trainer is to do.

    ``kind``: "DPO" or "KTO". ``collate``: a step's examples -> the trainer's tensors. ``count``: adds what a step on these
    examples costs to the meter. ``settings``: the trainer's own keys. ``evaluate`` and what follows: as
    `common.grpo.train_grpo`.
    """

    kind: str
    examples: Sequence[Any]
    collate: Callable[[Sequence[Any]], dict[str, Tensor]]
    count: Callable[[Sequence[Any], Meter], None]
    settings: dict[str, Any]
    algo: AlgoConfig
    seed: int
    budget: Budget
    log: RunLog
    folder: Path
    evaluate: Callable[[int, int], None] | None
    evaluate_every_flops: float | None
    checkpoint_every: int

    def batch_at(self, step: int) -> list[int]:
        """The numbers of a step's examples: a new order each epoch, a function of (seed, step) alone."""
        size = self.algo.prompts_per_step
        places = [divmod(i, len(self.examples)) for i in range(step * size, (step + 1) * size)]
        orders = {e: rng(self.seed, self.kind, e).permutation(len(self.examples)) for e in {epoch for epoch, _ in places}}
        return [int(orders[epoch][i]) for epoch, i in places]

    def plan(self, step: int, meter: Meter) -> list[list[int]]:
        """The examples of every step from `step` to the end of the budget."""
        ahead = copy.copy(meter)
        steps: list[list[int]] = []
        while not ahead.exhausted(self.budget, step + len(steps)):
            steps.append(self.batch_at(step + len(steps)))
            self.count([self.examples[i] for i in steps[-1]], ahead)
        return steps


class Recorder(TrainerCallback):
    """Sets the learning rate before each step; afterwards counts, logs, evaluates and saves, as the loops do."""

    def __init__(self, job: TrlJob, model: Any, optimizer: Any, meter: Meter, step: int, evaluations: int) -> None:
        self.job, self.model, self.optimizer, self.meter = job, model, optimizer, meter
        self.step, self.evaluations = step, evaluations

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        set_learning_rate(self.optimizer, self.job.algo, self.step, self.meter.used(self.job.budget, self.step))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs is None or "loss" not in logs:  # the trainer's summary at its end
            return
        job, meter = self.job, self.meter
        job.count([job.examples[i] for i in job.batch_at(self.step)], meter)
        self.step += 1
        metrics = {ours: logs[theirs] for theirs, ours in METRICS.items() if theirs in logs}
        used = meter.used(job.budget, self.step)
        job.log.metrics(self.step, metrics | {"progress/step": self.step}, progress=used)
        if job.evaluate is not None and evaluations_due(meter, job.evaluate_every_flops) > self.evaluations:
            self.evaluations = evaluations_due(meter, job.evaluate_every_flops)
            job.evaluate(self.step, meter.flops)
            self.model.train()
        if self.step % job.checkpoint_every == 0 or used >= 1:
            save(job.folder / "state.pt", {"policy": self.model}, self.optimizer, meter, self.step, self.evaluations)
            job.log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)


def token_trainer(trainer: type) -> type:
    """The TRL trainer without its text processing, for rows that are tokens already, and without its usage report."""
    changes = {"_prepare_dataset": lambda self, dataset, *_: dataset, "_send_telemetry": lambda self: None}
    return type(trainer.__name__, (trainer,), changes)


def train_with_trl(job: TrlJob, model: Any, tokenizer: Any, reference: Any | None) -> Meter:
    """Trains `model` in place until the budget is used, from folder/state.pt on if there is one; returns the meter.

    Raises ConfigError when there are fewer examples than a step takes.
    """
    import trl
    from datasets import Dataset

    size = job.algo.prompts_per_step
    if len(job.examples) < size:
        raise ConfigError(f"algo.prompts_per_step={size}: there are {len(job.examples)} examples; allowed is up to that many.")
    reference = frozen_copy(model) if reference is None else reference
    optimizer = make_optimizer(list(trainable(model).values()), [], job.algo)
    meter = Meter(parameter_count(model))
    step, evaluations = resume(job.folder / "state.pt", {"policy": model}, optimizer, meter, job.log)
    steps = job.plan(step, meter)
    if not steps:
        return meter
    settings = getattr(trl, f"{job.kind}Config")(
        output_dir=str(job.folder),
        beta=job.algo.kl_coef,
        max_length=None,
        per_device_train_batch_size=size,
        max_steps=len(steps),
        max_grad_norm=job.algo.grad_clip,
        train_sampling_strategy="sequential",
        seed=stream_seed(job.seed, job.kind) % 2**32,
        use_cpu=network(model).device.type == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **job.settings,
    )
    trainer: Any = token_trainer(getattr(trl, f"{job.kind}Trainer"))(
        model=model,
        ref_model=reference,
        args=settings,
        data_collator=lambda rows: job.collate([job.examples[row["example"]] for row in rows]),
        train_dataset=Dataset.from_dict({"example": [i for batch in steps for i in batch]}),
        processing_class=tokenizer,
        callbacks=[Recorder(job, model, optimizer, meter, step, evaluations)],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    for patched in (model, reference):  # TRL leaves its own forward on both
        network(patched).__dict__.pop("forward", None)
    model.eval()
    return meter
