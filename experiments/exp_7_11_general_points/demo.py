"""LoRA on a pre-trained model, about ten steps each of SFT and GRPO: what it costs, and that the adapter is plain PEFT.

    python -m experiments.exp_7_11_general_points.demo model_path=smollm2 [key=value ...]

Takes scale=gpu's configuration on the CPU with the keys in DEMO. Each phase runs in a process of its own, so that its peak
memory is its own. The record goes to results/smollm2/7-11.json; `make report` writes it into the README.
"""

import json
import multiprocessing
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from common import smollm2
from common.checkpoints import load_model, save_model
from common.compute import Budget
from common.config import compose, load_algo
from common.files import read_json_lines, write_json
from common.grpo import train_grpo
from common.lora import add_adapter, learning_rate
from common.models import parameter_count
from common.policy import network
from common.provenance import machine, packages
from common.runlog import RunLog
from common.schema import ConfigError
from common.sft import train_sft
from experiments.exp_7_11_general_points import branches, data
from experiments.exp_7_11_general_points.evaluate import Evaluator
from experiments.exp_7_11_general_points.pages import ROOT, SMOLLM2_FILE
from experiments.exp_7_11_general_points.settings import Settings

SEED = 0  # a tuning seed: nothing here is a result of the experiment
STEPS = 10
LARGEST_GAP = 0.05  # of a logit of about 20, between two processes with the same weights
# Short answers without a trace, few of them: ten steps in minutes on one core. Rates are those of full fine-tuning.
# float32: a backward pass in bfloat16 took nine times as long on the CPU where this was written.
DEMO = [
    "scale=gpu", "device=cpu", "dtype=float32", "seeds=1", f"first_seed={SEED}", "trace=false", "max_new_tokens=72",
    "arms=[sft_one,grpo]", "sft.lr=1e-4", "sft.batch_size=4",
    "branches.grpo.lr=1e-5", "branches.grpo.changes.prompts_per_step=2",
    "algo.group_size=4", "algo.drop_zero_variance=true",
]  # fmt: skip
WHOSE = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
COLUMNS = {
    "phase": "phase",
    "steps": "steps",
    "minutes": "minutes",
    "cpu_minutes": "CPU minutes",
    "memory_gib": "peak memory, GiB",
    "trained": "trained parameters, million",
    "tokens": "tokens sampled or scored, and trained",
    "first": "first step",
    "last": "last step",
}


def measured(name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `run` returns, with the wall and CPU minutes and the peak memory of this process or of the one that it waits for."""
    start, before = time.perf_counter(), cpu_seconds()
    row = run()
    row |= {"phase": name, "minutes": f"{(time.perf_counter() - start) / 60:.1f}"}
    row["cpu_minutes"] = f"{(cpu_seconds() - before) / 60:.1f}"
    peak = max(resource.getrusage(who).ru_maxrss for who in WHOSE) / (2**30 if sys.platform == "darwin" else 2**20)
    return row | {"memory_gib": f"{peak:.1f}"}


def cpu_seconds() -> float:
    """Of this process and of those it has waited for."""
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, WHOSE))


def summary(folder: Path, model: Any, meter: Any, metric: str, unit: str) -> dict[str, Any]:
    """The columns that a training phase fills from its log and its meter."""
    rows = read_json_lines(folder / "metrics.jsonl")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "steps": len(rows),
        "trained": f"{trained / 1e6:.2f} of {parameter_count(model) / 1e6:.0f}",
        "tokens": f"{meter.tokens_forward:,}, {meter.tokens_trained:,}",
        "first": f"{unit} {rows[0][metric]:.2f}",
        "last": f"{unit} {rows[-1][metric]:.2f}",
    }


def labels(arm: str) -> dict[str, Any]:
    return {"experiment": "7-11", "scale": "gpu", "variant": "demo", "arm": arm, "seed": SEED}


def sft(settings: Settings, root: Path) -> dict[str, Any]:
    """Phase 1: SFT of an adapter on one solution per hand; leaves root/sft (adapter), root/probe.pt and root/start (merged)."""
    torch.set_num_threads(settings.threads)
    model, tokenizer = load_model(smollm2.resolve(str(settings.model_path)), settings.device, settings.dtype)
    model = add_adapter(model, settings.lora, "sft", SEED)
    config = replace(settings.sft, lr=learning_rate(settings.sft.lr, settings.lora), warmup_steps=2)
    batch_at = branches.demonstration_batches(settings, tokenizer, SEED, "one", SEED, config.batch_size)
    with RunLog(root / "sft-log", labels("sft"), quiet=True) as log:
        run = {"budget": Budget(steps=STEPS), "log": log, "folder": root / "sft-log", "log_every": 1}
        meter = train_sft(model, batch_at, config, **run)
    row = summary(root / "sft-log", model, meter, "loss/policy", "loss")
    save_model(model, tokenizer, root / "sft")
    write_probe(model, batch_at(STEPS), settings.dtype, root / "probe.pt")
    save_model(model.merge_and_unload(), tokenizer, root / "start")
    return row


def write_probe(model: Any, batch: tuple[torch.Tensor, ...], dtype: str, file: Path) -> None:
    """One row of a batch and the logits behind it, for plain_peft.py."""
    ids_BT, attention_BT, mask_BT = batch
    length = int(attention_BT[0].sum())
    ids, mask = ids_BT[:1, :length], mask_BT[:1, :length].bool()
    with torch.no_grad():
        logits = network(model)(input_ids=ids, use_cache=False).logits[0, -1].float()
    torch.save({"ids": ids, "mask": mask, "logits": logits, "dtype": dtype}, file)


def grpo(settings: Settings, root: Path) -> dict[str, Any]:
    """Phase 2: GRPO of a fresh adapter on root/start, which holds the SFT; leaves root/grpo."""
    torch.set_num_threads(settings.threads)
    model, tokenizer = load_model(root / "start", settings.device, settings.dtype)
    model = add_adapter(model, settings.lora, "rl", SEED)
    branch = settings.branches["grpo"]
    own = {"max_new_tokens": settings.max_new_tokens, "lr": learning_rate(branch.lr or 1e-6, settings.lora), **branch.changes}
    algo = load_algo(branch.algo, own, settings.algo)
    train = branches.train_hands(settings, SEED)
    with RunLog(root / "grpo-log", labels("grpo"), quiet=True) as log:
        evaluator = Evaluator(settings, tokenizer, log, SEED, SEED, 1, False)
        run = {"seed": SEED, "budget": Budget(steps=STEPS), "log": log, "folder": root / "grpo-log"}
        tasks = lambda step, count: data.training_tasks(train, SEED, step, count)  # noqa: E731
        meter = train_grpo(model, tokenizer, evaluator.make_env, tasks, algo, **run)
    save_model(model, tokenizer, root / "grpo")
    return summary(root / "grpo-log", model, meter, "score/mean", "reward")


def plain_peft(settings: Settings, root: Path) -> dict[str, Any]:
    """Phase 3: the SFT adapter in a process that knows transformers and PEFT alone."""
    script = Path(__file__).with_name("plain_peft.py")
    command = [sys.executable, "-I", str(script), str(root / "sft"), str(root / "probe.pt")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seen = json.loads(done.stdout.splitlines()[-1])
    if seen["logit_gap"] > LARGEST_GAP or seen["loss_after"] >= seen["loss_before"]:
        raise ValueError(f"the adapter does not go on in plain PEFT: {seen}")
    first = f"loss {seen['loss_before']:.3f}, logits off by {seen['logit_gap']:.1e} at most"
    return {"steps": 2, "first": first, "last": f"loss {seen['loss_after']:.3f}"}


def phase(name: str, arguments: list[str], root: Path) -> dict[str, Any]:
    """One phase in a fresh process; its row of the record."""
    settings = compose("7-11", Settings, [*DEMO, *arguments])
    run = {"SFT": sft, "GRPO": grpo, "plain PEFT, two more steps of SFT": plain_peft}[name]
    return measured(name, lambda: run(settings, root))


def main(arguments: list[str]) -> int:
    """Runs the phases and writes the record; 2 with one sentence for a bad key or a missing model."""
    try:
        settings = compose("7-11", Settings, [*DEMO, *arguments])
        smollm2.resolve(str(settings.model_path))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    root = ROOT / settings.runs_dir / "7-11" / "demo"
    rows = []
    for name in ("SFT", "GRPO", "plain PEFT, two more steps of SFT"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(phase, (name, arguments, root)))
        print(", ".join(f"{COLUMNS[key]}: {rows[-1][key]}" for key in COLUMNS if key in rows[-1]), flush=True)
    host = machine()
    keys = " ".join([*DEMO, *arguments])
    note = (
        f"`python -m experiments.exp_7_11_general_points.demo {' '.join(arguments)}`: {keys}. {host['cpu']}, one thread each."
    )
    record = {"note": note, "columns": COLUMNS, "phases": rows, "machine": host, "packages": packages()}
    write_json(ROOT / settings.results_dir / SMOLLM2_FILE, record)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
