"""Does the cluster scale work? Trains experiment 7-11 through the real verl on Ray, on this machine, and judges the result.

    python -m scripts.cluster_check                      # runs=grpo,ppo: GRPO with KL over three answers, PPO with a critic
    python -m scripts.cluster_check runs=grpo_once,distill limit_s=300

grpo plays through our agent loop, ppo through verl's custom reward function; grpo_once is GRPO of one answer, distill is
on-policy distillation from the base model.

Makes a tiny start model, trains it a few steps per run, turns verl's checkpoint back into an HF folder and evaluates that
with the experiment's own evaluator. Ends with a verdict: exit code 0 if every check passed, 1 if one failed, 2 if it cannot
run at all. Needs the extra [verl], no GPU; about two minutes a run on two free cores. Keeps its files in runs/cluster-check.
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from common.algo import load_algo
from common.backends import verl
from common.backends.verl_distill import Teacher, distill_keys
from common.config import compose
from common.distill import DistillConfig
from common.jobs import end_on_sigterm
from common.schema import ConfigError, one_of
from experiments.exp_7_11_general_points import cluster, run
from experiments.exp_7_11_general_points.settings import Settings
from scripts.cluster_judge import Verdict, judge

SEED = 0  # below 100: a tuning seed, so that nothing here can be taken for a result
LIMIT_CODE = 124
STARTS = 3
NOT_STARTED = "The current node timed out during startup"  # Ray waits 30 s for its own parts, and no setting changes that
MARK = "CLUSTER_CHECK"  # an environment variable that tells our processes from all others
# Enough pre-training that answers differ in reward, else the policy would have no gradient.
START = ["scale=smoke", "pretraining_steps=100", "start_steps=50", "start.batch_size=32", "seeds=1", f"first_seed={SEED}"]


@dataclass(frozen=True)
class Run:
    """One training run: a preset with changes, its steps and the answers an episode may have."""

    preset: str
    changes: dict[str, Any]
    steps: int
    turns: int = 1
    distill: bool = False


BATCH = {"prompts_per_step": 8, "group_size": 8, "lr": 3e-4}
RUNS = {
    "grpo": Run("grpo", {**BATCH, "group_size": 4, "kl_coef": 0.01, "clip_high": 0.28}, steps=3, turns=3),
    "ppo": Run("ppo", {"prompts_per_step": 32, "minibatches": 2, "epochs": 1, "lr": 3e-4, "value_warmup_steps": 0}, steps=2),
    "grpo_once": Run("grpo", {**BATCH, "kl_coef": 0.01}, steps=2),
    "distill": Run("reinforce", BATCH, steps=2, turns=2, distill=True),
}
DEFAULT = "grpo,ppo"


def main(arguments: list[str]) -> int:
    """Runs the named runs and prints the verdict; returns the exit code."""
    try:
        names, limit_s, folder = _options(arguments)
        schema = verl.compose()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    settings = compose(run.NUMBER, Settings, [*START, f"runs_dir={folder}"])
    began, verdict = time.perf_counter(), Verdict()
    try:
        models = [stage / "model" for stage in run.start_of(settings, "grpo", SEED)[1]]
        print(f"start model: {models[-1]} ({time.perf_counter() - began:.0f} s)", flush=True)
        for name in names:
            print(f"{name}:", flush=True)
            _one_run(name, settings, models, folder / name, schema, limit_s, verdict)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    if verdict.failed:
        print(f"FAILED: {len(verdict.failed)} of {verdict.count} checks: {', '.join(verdict.failed)}")
        return 1
    print(f"PASSED: all {verdict.count} checks in {time.perf_counter() - began:.0f} s")
    return 0


def _options(arguments: list[str]) -> tuple[list[str], float, Path]:
    values = {"runs": DEFAULT, "limit_s": "900", "folder": str(verl.ROOT / "runs" / "cluster-check")}
    for argument in arguments:
        key, _, value = argument.partition("=")
        one_of("argument", key, values)
        values[key] = value
    names = values["runs"].strip("[]").split(",")
    for name in names:
        one_of("runs", name, RUNS)
    try:
        limit_s = float(values["limit_s"])
    except ValueError:
        raise ConfigError(f"limit_s={values['limit_s']}: must be a number of seconds.") from None
    return names, limit_s, Path(values["folder"]).resolve()


def _one_run(
    name: str, settings: Settings, models: list[Path], folder: Path, schema: Any, limit_s: float, verdict: Verdict
) -> None:
    """Exports, trains and judges; models: the base and what it became, the start of the run."""
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier check; the models beside it are found again
    spec = RUNS[name]
    branch = replace(settings.branches["grpo"], iterations=spec.turns)
    own = {"max_new_tokens": settings.max_new_tokens, "max_turns": spec.turns}
    job = verl.Job(
        name=run.NUMBER,
        arm=name,
        model=str(models[-1]),
        folder=folder,
        steps=spec.steps,
        seed=SEED,
        prompt_tokens=32,
        feedback_tokens=16,
        save_every=spec.steps,
    )
    if spec.distill:
        config = DistillConfig("sampled", **own, **spec.changes)
        algo, teacher = config.algo, models[0]
        keys = distill_keys(config, job, Teacher(str(teacher)))
    else:
        algo, teacher = load_algo(spec.preset, {**own, "drop_zero_variance": False, **spec.changes}), None
        keys = verl.algorithm_keys(algo, job)
    cluster.export(settings, branch, algo, job, split_seed=SEED)
    keys |= verl.job_keys(job, algo) | verl.cpu_keys(algo)
    keys |= {"ray_kwargs.ray_init.num_gpus": 2 if spec.distill else 1}  # a teacher takes another of what Ray calls GPUs
    verl.check_keys(keys, schema)
    began = time.perf_counter()
    for _ in range(STARTS):
        code, left = train(keys, job, limit_s - (time.perf_counter() - began))
        text = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        if code in (0, LIMIT_CODE) or NOT_STARTED not in text:
            break
        print("  Ray gave up starting, as it does on a busy machine; once more", flush=True)
    seconds = time.perf_counter() - began
    verdict.check(f"{name} trains {spec.steps} steps", code == 0, f"exit code {code} after {seconds:.0f} s, log in {folder}")
    verdict.check(f"{name} leaves no process", not left, ", ".join(left))
    if code != 0:
        print("\n".join(text.splitlines()[-25:]))
        return
    judge(settings, job, algo, models[-1], teacher, verdict)


def train(keys: dict[str, Any], job: verl.Job, limit_s: float) -> tuple[int, list[str]]:
    """Runs verl to its end or for limit_s seconds: exit code (LIMIT_CODE after the limit), processes it left behind.

    However this function is left, no process of the run and nothing of it in /tmp stays.
    """
    mark = uuid.uuid4().hex
    scratch = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: Ray makes sockets below it, whose paths are limited
    keys = {**keys, "ray_kwargs.ray_init._temp_dir": scratch}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # else Ray writes one into the home folder
    variables = {**os.environ, **verl.environment(job, on_cpu=True), **token, MARK: mark, "TMPDIR": scratch}
    code, left = LIMIT_CODE, list[str]()
    with open(job.folder / "log.txt", "wb") as log, end_on_sigterm():
        process = subprocess.Popen(verl.command(keys), cwd=verl.ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT)
        try:
            code = process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            _keep_logs(Path(scratch), job.folder / "ray-logs")
        finally:
            left = _end_all(mark, grace_s=20 if process.poll() is not None else 0)
            process.wait()
            shutil.rmtree(scratch, ignore_errors=True)
    return code, left if code != LIMIT_CODE else []


def _keep_logs(scratch: Path, folder: Path) -> None:
    """Ray's own logs of a run that did not end: they say which part hangs."""
    for logs in scratch.glob("session_2*/logs"):
        shutil.copytree(logs, folder, ignore_dangling_symlinks=True, dirs_exist_ok=True)


def _end_all(mark: str, grace_s: float) -> list[str]:
    """Ends every process that carries our mark; the names of those that were still there after grace_s."""
    limit = time.perf_counter() + grace_s
    while (ours := _marked(mark)) and time.perf_counter() < limit:
        time.sleep(0.5)
    names = [f"{process.name()} ({process.pid})" for process in ours if process.is_running()]
    for process in ours:
        if process.is_running():
            process.kill()
    psutil.wait_procs(ours, timeout=10)
    return names


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
