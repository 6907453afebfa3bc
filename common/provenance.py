"""Where a result comes from: command, commit, configuration, packages, machine and cost, and the gathering of cells.

`collect` turns the cells of a run folder into the committed files that a report is built from: records.jsonl (sorted,
without times, the same bytes from the same configuration), rollouts.jsonl, provenance.json and, where an experiment
measures time, times.jsonl.
"""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.files import read_json, read_json_lines, strict_json, write_json, write_json_lines
from common.jobs import Cell, Failure, cell_folder, headline
from common.records import NOT_FINISHED, is_time
from common.runlog import distinct_rows, newest_records, peak_memory_mb, warn
from common.stages import STAGE_FILE, plain

PACKAGES = [
    *("torch", "transformers", "tokenizers", "peft", "trl", "accelerate", "datasets"),
    *("hydra-core", "omegaconf", "gymnasium", "mujoco", "numpy", "scipy", "matplotlib"),
]
SUMMED = ("wall_s", "cpu_s", "tokens_forward", "tokens_trained", "flops")
SIZE_LIMIT_MB = 3.0
PICKS = (("best", 4), ("worst", 3), ("surprising", 3))
Row = dict[str, Any]
BEGAN = time.perf_counter()


def command() -> str:
    """The command line that started this process, as one would type it in the checkout."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = f"-m {spec.name.removesuffix('.__main__')}" if spec is not None else Path(sys.argv[0]).name
    return f"python {name} {shlex.join(sys.argv[1:])}".strip()


def git_state(folder: Path = Path(__file__).parent) -> Row:
    """Commit and whether tracked files outside results/ differ from it; both None outside a git checkout."""

    def git(*words: str) -> str | None:
        try:
            answer = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=30)
        except (OSError, subprocess.SubprocessError):
            return None
        return answer.stdout.strip()

    changes = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)results")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        query = ["sysctl", "-n", "machdep.cpu.brand_string"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False)
        return answer.stdout.strip() or platform.machine()
    return platform.processor() or platform.machine()


def machine() -> Row:
    """Processor, usable cores, memory in GiB, system, Python and, where torch is loaded and sees one, the GPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found: Row = {
        "cpu": cpu_model(),
        "cores": cores,
        "memory_gib": round(memory, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    return found


def packages() -> dict[str, str]:
    """Versions of the packages that results depend on, those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def mean_logp(row: Row) -> float:
    """Mean log-probability of the tokens that the policy wrote in a rollout row, 0.0 if the row has none."""
    pairs = zip(row.get("logps", []), row.get("mask", []), strict=False)
    written = [logp for logp, mask in pairs if mask]
    return sum(written) / len(written) if written else 0.0


def surprise(row: Row) -> float:
    """How far an outcome goes against the policy's confidence: a row's own "surprise", else from its tokens.

    A success counts as the more surprising the less probable its tokens were, a failure the more probable.
    """
    if "surprise" in row:
        return float(row["surprise"])
    return -mean_logp(row) if row.get("success") else mean_logp(row)


def pick_rollouts(rows: list[Row]) -> list[Row]:
    """At most ten of an arm's rollouts, each once: four best and three worst by reward, three most surprising.

    Ties go to the row that comes first in the order of its JSON text, so that the choice does not depend on timing.
    """
    left = sorted(rows, key=lambda row: strict_json(row, sort_keys=True))
    orders = {
        "best": lambda row: -float(row.get("reward", 0.0)),
        "worst": lambda row: float(row.get("reward", 0.0)),
        "surprising": lambda row: -surprise(row),
    }
    chosen = []
    for pick, count in PICKS:
        taken = sorted(left, key=orders[pick])[:count]
        left = [row for row in left if row not in taken]
        chosen += [{"pick": pick, **row} for row in taken]
    return chosen


def record_order(row: Row) -> tuple[Any, ...]:
    return (row["arm"], row["seed"], row["step"], row["final"], row["split"], row["metric"])


def check_same_run(target: Path, records: list[Row]) -> None:
    """ValueError if the result folder holds another experiment's, scale's or variant's records."""

    def owners(rows: list[Row]) -> set[tuple[Any, ...]]:
        return {(row["experiment"], row["scale"], row["variant"]) for row in rows}

    present, ours = owners(read_json_lines(target)), owners(records)
    if present - ours and ours:
        raise ValueError(
            f"{target} holds the records of {sorted(map(str, present - ours))}, not of {sorted(map(str, ours))}; "
            "choose another results_dir or remove the old records."
        )


def stage_cost(folder: Path) -> Row:
    """What building a shared stage cost, with the totals that its own log counted if it kept one."""
    cost = (read_json(Path(folder) / STAGE_FILE) or {}) | (read_json(Path(folder) / "cost.json") or {})
    return {key: cost[key] for key in ("name", "key", *SUMMED) if key in cost}


def session_wall(run_folder: Path, done: list[Path]) -> float:
    """Wall seconds of the sessions that computed these cells, this one included if it computed any.

    Kept in `sessions.json` of the run folder; a session that was killed before gathering is not in it.
    """
    log, pid = Path(run_folder) / "sessions.json", str(os.getpid())
    spent = time.perf_counter() - BEGAN
    fresh = [folder for folder in done if (folder / "DONE").stat().st_mtime >= time.time() - spent]
    sessions = {} if len(fresh) == len(done) else read_json(log) or {}
    if fresh or not sessions:
        sessions[pid] = round(spent, 1)
    write_json(log, sessions)
    return round(sum(sessions.values()), 1)


def totals(costs: list[Row]) -> Row:
    """Sums of seconds, tokens and FLOPs, and the largest memory peak, over cells or stages."""
    summed = {key: round(sum(cost[key] for cost in costs if key in cost), 3) for key in SUMMED}
    return summed | {"peak_memory_mb": max([cost.get("peak_memory_mb", 0.0) for cost in costs], default=0.0)}


def describe_run(settings: Any, cells: Sequence[Cell]) -> Row:
    """What was run, with what and on what: the part of a provenance that needs no result."""
    return {
        "command": command(),
        **git_state(),
        "configuration": plain(settings),
        "packages": packages(),
        "machine": machine(),
        "arms": list(dict.fromkeys(cell.arm for cell in cells)),
        "seeds": sorted({cell.seed for cell in cells}),
    }


def cell_rollouts(folder: Path, cell: Cell) -> list[Row]:
    rows = distinct_rows(read_json_lines(folder / "rollouts.jsonl"))
    return [{"arm": cell.arm, "seed": cell.seed, **row} for row in rows]


def collect(
    run_folder: Path,
    cells: Sequence[Cell],
    result_folder: Path,
    *,
    settings: Any = None,
    failures: Sequence[Failure] = (),
    stages: Sequence[Path] = (),
) -> Row:
    """Gather the finished cells into records.jsonl, rollouts.jsonl and provenance.json; returns the provenance.

    Cells without a DONE mark stand under "failed" with the text of the failure whose job has the cell's name.
    `stages`: folders of the shared stages, whose cost is listed apart. RuntimeError if no cell has finished, ValueError
    if the result folder holds the records of another run; both leave it untouched.
    """
    result_folder = Path(result_folder)
    folders = {cell: cell_folder(run_folder, cell) for cell in cells}
    done = [cell for cell in cells if (folders[cell] / "DONE").exists()]
    errors = {failure.name: headline(failure.error) for failure in failures}
    failed = [
        {"arm": cell.arm, "seed": cell.seed, "error": errors.get(cell.name, NOT_FINISHED)} for cell in cells if cell not in done
    ]
    if not done:
        raise RuntimeError(f"No cell of {run_folder} has finished, so no result was written: {failed[:3]}")
    lines = [row for cell in done for row in read_json_lines(folders[cell] / "records.jsonl")]
    records = sorted(newest_records(lines), key=record_order)
    check_same_run(result_folder / "records.jsonl", records)
    rollouts = []
    for arm in dict.fromkeys(cell.arm for cell in done):
        members = [cell for cell in done if cell.arm == arm]
        rollouts += pick_rollouts([row for cell in members for row in cell_rollouts(folders[cell], cell)])
    costs = [{"arm": cell.arm, "seed": cell.seed, **(read_json(folders[cell] / "cost.json") or {})} for cell in done]
    stage_costs = [stage_cost(folder) for folder in stages]
    provenance = describe_run(settings, cells) | {
        "wall_s": session_wall(run_folder, [folders[cell] for cell in done]),
        "totals": totals([*costs, *stage_costs, {"peak_memory_mb": round(peak_memory_mb(), 1)}]),
        "stages": stage_costs,
        "cells": costs,
        "failed": failed,
    }
    write_json_lines(result_folder / "records.jsonl", [row for row in records if not is_time(row)])
    (result_folder / "times.jsonl").unlink(missing_ok=True)
    if times := [row for row in records if is_time(row)]:
        write_json_lines(result_folder / "times.jsonl", times)
    write_json_lines(result_folder / "rollouts.jsonl", rollouts)
    write_json(result_folder / "provenance.json", provenance)
    size = sum(file.stat().st_size for file in result_folder.rglob("*") if file.is_file()) / 2**20
    if size > SIZE_LIMIT_MB:
        warn(f"{result_folder} holds {size:.1f} MB; a committed result stays under {SIZE_LIMIT_MB:g} MB.")
    return provenance
