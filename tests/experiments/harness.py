"""An experiment's public command run in a folder of its own, its records, and a SIGKILL in the middle of it."""

import glob
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 900  # seconds: a run at smoke scale takes under 60 on a free machine


def command(experiment: str, folder: Path, *changes: str, scale: str = "smoke") -> list[str]:
    """The plain line behind `make`, with scratch and results below `folder`."""
    folders = [f"runs_dir={folder / 'runs'}", f"results_dir={folder / 'results'}"]
    return [sys.executable, "-m", f"experiments.{experiment}.run", f"scale={scale}", *folders, *changes]


def run(line: list[str], cwd: Path | str = ROOT) -> str:
    """Runs `line` to its end and gives what it printed; a failed run shows its words."""
    done = subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refusal(line: list[str]) -> str:
    """What a run says that must fail."""
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode != 0, done.stdout
    return done.stdout + done.stderr


def records(folder: Path) -> bytes:
    """The one records.jsonl below `folder`, when its run has ended."""
    (file,) = (folder / "results").rglob("records.jsonl")
    return file.read_bytes()


def kill_when(line: list[str], pattern: str) -> None:
    """Starts `line` and kills its whole process group the moment a file with something in it matches `pattern`.

    glob.glob, because folders of a live run come and go, and pathlib's own glob raises when one vanishes under it.
    """
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(line, cwd=ROOT, start_new_session=True, **quiet)
    deadline = time.monotonic() + PATIENCE
    while not any(_filled(path) for path in glob.glob(pattern, recursive=True)):
        assert process.poll() is None and time.monotonic() < deadline, f"nothing matched {pattern}"
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _filled(path: str) -> bool:
    try:
        return os.stat(path).st_size > 0
    except FileNotFoundError:
        return False
