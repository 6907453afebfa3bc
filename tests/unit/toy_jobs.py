"""Small jobs for the tests of stages, cells, logs and worker processes. torch is imported only where it is used."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from common.files import write_text
from common.jobs import Cell, cell_folder, complete_cell
from common.provenance import collect
from common.runlog import RunLog
from common.stages import fingerprint, stage

STEPS = 7
LABELS = {"experiment": "toy", "scale": "smoke", "variant": None}
CELLS = [Cell("adam", 100), Cell("adam", 101)]


def die_at(point: str, kill_at: str | None) -> None:
    """Leave as a machine does whose power is cut."""
    if point == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, log: RunLog, seed: int, start: list[float], kill_at: str | None, name: str) -> list[float]:
    """Follow seeded targets with Adam, logging every step and saving every second one; goes on from a saved state."""
    import torch

    from common.checkpoints import load_state, save_state
    from common.seeding import rng

    weights = torch.tensor(start, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.1)
    state, step = load_state(folder / "state.pt"), 0
    if state is not None:
        step = state["step"]
        with torch.no_grad():
            weights.copy_(state["weights"])
        optimizer.load_state_dict(state["optimizer"])
    log.resume(step)
    while step < STEPS:
        target = torch.tensor(rng(seed, "target", step).normal(size=len(start)), dtype=torch.float32)
        gap = weights.detach() - target
        weights.grad = 2 * gap
        optimizer.step()
        step += 1
        log.metrics(step, {"loss/sft": gap.square().sum().item()}, progress=step / STEPS)
        items = gap.abs().tolist()
        log.record(split="validation", metric="gap", value=sum(items) / 3, n=3, step=step, items=items)
        log.rollouts([{"step": step, "text": f"seed {seed} step {step} é\n", "reward": -items[0], "success": step > 3}])
        die_at(f"{name} step {step}", kill_at)
        if step % 2 == 0 or step == STEPS:
            die_in_save(f"{name} save {step}", kill_at)
            save_state(folder / "state.pt", {"step": step, "weights": weights, "optimizer": optimizer.state_dict()})
    return weights.tolist()


def die_in_save(point: str, kill_at: str | None) -> None:
    """Make the next save write half a file and then die."""
    if point != kill_at:
        return
    import torch

    def half(state: object, handle: object) -> None:
        handle.write(b"PK\x03\x04 half a checkpoint")
        handle.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half


def build_start(folder: Path, kill_at: str | None) -> None:
    """The stage that both cells share."""
    with RunLog(folder, {**LABELS, "arm": "start", "seed": 0}, quiet=True) as log:
        weights = train(folder, log, 0, [0.0, 0.0, 0.0], kill_at, "start")
    write_text(folder / "weights.txt", " ".join(map(str, weights)))
    die_at("start written", kill_at)


def run_cell(folder: Path, cell: Cell, start: Path, kill_at: str | None) -> None:
    """One cell of the toy experiment."""
    weights = [float(word) for word in (start / "weights.txt").read_text().split()]
    with RunLog(folder, {**LABELS, "arm": cell.arm, "seed": cell.seed}, quiet=True) as log:
        weights = train(folder, log, cell.seed, weights, kill_at, cell.name)
        log.record(split="test", metric="weight", value=weights[0], n=1, step=STEPS, final=True)
        die_at(f"{cell.name} final", kill_at)


def experiment(root: Path, kill_at: str | None = None) -> None:
    """A shared stage, two cells and their gathering, killed at a named point."""
    runs = root / "runs"
    start = stage("start", lambda f: build_start(f, kill_at), config={"steps": STEPS}, modules=["toy_jobs"], root=runs)
    die_at("stage boundary", kill_at)
    for cell in CELLS:
        folder = cell_folder(runs, cell)
        key = fingerprint({"cell": cell, "steps": STEPS}, ["toy_jobs"], [start])
        complete_cell(folder, key, lambda cell=cell, folder=folder: run_cell(folder, cell, start, kill_at))
        die_at(f"{cell.name} done", kill_at)
    collect(runs, CELLS, root / "results", stages=[start])


def good(value: int) -> dict:
    print("a word from the job")
    return {"value": value, "pid": os.getpid(), "threads": os.environ["OMP_NUM_THREADS"], "random": random.random()}


def raises() -> None:
    raise ValueError("the reward of hand 7 é is undefined")


def wrong_type() -> int:
    return 3


def not_a_number() -> dict:
    return {"loss": float("nan")}


def calls_exit() -> None:
    print("last words")
    os._exit(3)


def sys_exit() -> None:
    sys.exit(5)


def killed_with_child(folder: str) -> None:
    """Starts a child that would live on, then is killed."""
    child = subprocess.Popen(["sleep", "600"])
    write_text(Path(folder) / "child", str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def killed_once(folder: str) -> dict:
    """Is killed the first time it runs, and ends well the second time."""
    before = Path(folder) / "killed"
    if not before.exists():
        write_text(before, "once")
        os.kill(os.getpid(), signal.SIGKILL)
    return {"value": 0}


def sleeps(folder: str, name: str) -> None:
    """Starts a child, leaves both pids and sleeps."""
    child = subprocess.Popen(["sleep", "600"])
    write_text(Path(folder) / name, f"{os.getpid()} {child.pid}")
    time.sleep(600)


def logs_metrics(folder: str) -> None:
    """Logs three steps under a tracker that cannot be imported."""
    sys.modules["trackio"] = None
    with RunLog(Path(folder), {**LABELS, "arm": Path(folder).name, "seed": 100}, tracker="trackio") as log:
        for step in range(1, 4):
            log.metrics(step, {"reward/mean": 0.25, "success/mean": 0.5, "kl/ref": 0.01}, progress=step / 4)
            time.sleep(0.6)
