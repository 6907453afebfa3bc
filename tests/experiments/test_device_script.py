"""scripts/device_check.sh from end to end on the CPU, with a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_device_script_runs_on_a_cpu(tmp_path: Path) -> None:
    words = ["scripts/device_check.sh", str(tmp_path), "device=cpu", "size=tiny"]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "device.json").read_text())
    assert [(row["what"], row["side"]) for row in result["rows"]] == [
        *[("sample", side) for _ in range(2) for side in ("ours", "ours, CUDA graph", "generate")],
        ("GRPO step", "ours"),
        ("GRPO step", "TRL"),
    ]
    assert all(row["tokens_per_s"] > 0 for row in result["rows"])
    assert (tmp_path / "device.md").read_text().count("\n| tiny |") == 8
