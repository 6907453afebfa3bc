"""SFT through TRL 1.16's SFTTrainer on our token ids and masks.

`train_sft` takes what common.sft.train_sft takes. TRL's are the forward pass, the mean over target tokens (or dft), backward
pass, clipping and the update; batches, optimizer, rate, budget, logs and state are ours.

What differs from common.sft: no Muon, no micro-batches (memory grows with the batch), and of the variants only dft.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common.backends.trl import ENDLESS, Books, Run, constant, refuse, shared_keys, train
from common.compute import Budget, Meter
from common.runlog import RunLog
from common.sft import SftBatch, SftConfig, make_optimizers, rate_factor
from common.trl_adapter import token_trainer


def check_config(config: SftConfig, key: str = "sft") -> None:
    """Raises ConfigError where TRL's SFTTrainer, as it is used here, cannot do what `config` asks for."""
    if config.optimizer != "adamw":
        refuse(f"{key}.optimizer", config.optimizer, "TRL's trainer has one optimizer", "adamw")
    if config.variant not in ("nll", "dft"):
        refuse(f"{key}.variant", config.variant, "TRL has no such loss", "nll or dft")
    if config.micro_batch is not None:
        refuse(f"{key}.micro_batch", config.micro_batch, "a step is one forward pass", "null")


class SftRecorder(Books):
    """A step of SFT around TRL's update."""

    def __init__(self, run: Run, batch_at: Callable[[int], SftBatch], config: SftConfig, log_every: int) -> None:
        super().__init__(run, make_optimizers(run.model, config)[0])
        self.batch_at, self.config, self.log_every = batch_at, config, log_every

    def collate(self, _: Any) -> dict[str, torch.Tensor]:
        """The batch of the step, whatever rows TRL has drawn."""
        ids_BT, attention_BT, mask_BT = self.batch_at(self.step)
        self.tokens = int(attention_BT.sum())
        return {"input_ids": ids_BT, "attention_mask": attention_BT, "labels": ids_BT.masked_fill(mask_BT == 0, -100)}

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()
        factor = rate_factor(self.config, self.step, self.used)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs is None or "loss" not in logs:  # the trainer's summary at its end
            return
        self.meter.add_train(self.tokens)
        last = self.meter.exhausted(self.run.budget, self.step + 1)
        metrics = {"loss/policy": logs["loss"], "grad_norm": logs["grad_norm"]}
        metrics["throughput/tokens_per_s"] = self.tokens / (time.perf_counter() - self.start)
        due = last or (self.step + 1) % self.log_every == 0
        control.should_training_stop = self.finish_step(metrics if due else None)


def train_sft(
    model: Any,
    batch_at: Callable[[int], SftBatch],
    config: SftConfig,
    *,
    tokenizer: Any,
    budget: Budget,
    log: RunLog,
    folder: Path,
    evaluate: Callable[[int, int], None] | None = None,
    evaluate_every_flops: float | None = None,
    checkpoint_every: int = 200,
    log_every: int = 10,
) -> Meter:
    """`common.sft.train_sft` with TRL's SFTTrainer as its update; `tokenizer` only satisfies TRL, no text is encoded.

    Raises ConfigError where TRL cannot do what `config` asks for (see `check_config`).
    """
    import trl
    from datasets import Dataset

    check_config(config)
    run = Run(model, budget, log, folder, evaluate, evaluate_every_flops, checkpoint_every)
    recorder = SftRecorder(run, batch_at, config, log_every)
    if recorder.used >= 1:
        return recorder.meter
    arguments = trl.SFTConfig(
        **shared_keys(model, folder, 0),
        per_device_train_batch_size=1,
        max_steps=ENDLESS,
        max_length=None,
        max_grad_norm=config.grad_clip,
        loss_type=config.variant,
    )
    trainer = token_trainer(trl.SFTTrainer)(
        model=model,
        args=arguments,
        data_collator=recorder.collate,
        train_dataset=Dataset.from_dict({"step": [0]}),  # an epoch is a step, so that a batch is made when it is needed
        processing_class=copy.deepcopy(tokenizer),
        callbacks=[recorder],
        optimizers=constant(recorder.optimizer),
    )
    train(trainer, model)
    return recorder.meter
