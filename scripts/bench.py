"""Measure our GRPO step against TRL's trainer and our sampler against transformers.generate: results/bench/bench.json.

    python -m scripts.bench [rounds=3] [sizes=all] [folder=results/bench]

One thread, one process, the same models, prompts and numbers of tokens on both sides, which take turns. Times are CPU
seconds of this process (minimum and median over the rounds), ratios are of minima. FLOPs follow the suite's cost model (2 N
per token forward, 6 N per trained token); the roofline is what this model's own matrix products reach on this thread, at
the same number of rows. `python -m scripts.report` turns bench.json into docs/performance.md. ``sizes``: all, or some of
the names, joined with commas and without spaces (0.6M,10M).
"""

import contextlib
import ctypes
import gc
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from common.compute import FORWARD_FLOPS
from common.files import strict_json
from common.models import parameter_count
from common.provenance import machine, packages
from common.report import performance
from scripts.bench_cases import (
    SIZES,
    Case,
    Run,
    Size,
    build_case,
    grpo_ours,
    grpo_trl,
    product_rate,
    sampler_generate,
    sampler_ours,
    split_step,
)

GROUP = 8
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory(work: Callable[..., Any], *arguments: Any) -> tuple[Any, float | None]:
    """What `work` returns, and by how many MiB it raised this process's resident memory at its peak (None: unknown)."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc: what earlier work left free goes back, or the peak would hide in it
    try:
        RESET.write_text("5")  # Linux: the peak starts anew
        before = resident("VmRSS")
    except OSError:
        return work(*arguments), None
    done = work(*arguments)
    return done, max(0.0, resident("VmHWM") - before)


def resident(name: str) -> float:
    """A memory figure of this process in MiB."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def measure_grpo(case: Case, size: Size, rounds: int) -> dict[str, Any]:
    """Seconds per step of the three trainers by turns, their memory, our share of the roofline, and where it goes."""
    sides: dict[str, Callable[[], tuple[list[float], float]]] = {
        "ours": lambda: grpo_ours(case, size),
        "trl": lambda: grpo_trl(case, size, checkpointing=True),
        "trl_no_checkpointing": lambda: grpo_trl(case, size, checkpointing=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    memory: dict[str, float | None] = {}
    splits, flops = [], 0.0
    for _ in range(rounds):
        for name, run in sides.items():
            (times, step_flops), grown = peak_memory(run)
            seconds[name] += times
            memory.setdefault(name, grown)  # of the first round: later ones find memory that was not given back
            flops = max(flops, step_flops)
        splits.append(split_step(case, size))
    prompts, group, new_tokens = size.grpo
    tokens = prompts * group * new_tokens
    decode_flops = FORWARD_FLOPS * parameter_count(case.model) * tokens
    floor = decode_flops / product_rate(case.model, prompts * group)
    floor += (flops - decode_flops) / product_rate(case.model, min(tokens, 2048))
    ours = min(seconds["ours"])
    return {
        "prompts": prompts,
        "group": group,
        "new_tokens": new_tokens,
        "sides": {
            name: {
                "min_cpu_s": round(min(times), 4),
                "median_cpu_s": round(statistics.median(times), 4),
                "n": len(times),
                "tokens_per_s": round(tokens / min(times)),
                "ratio": round(min(times) / ours, 2),
                "peak_mib": None if memory[name] is None else round(memory[name]),
            }
            for name, times in seconds.items()
        },
        "gflop": round(flops / 1e9, 2),
        "share_of_roofline": round(floor / ours, 3),
        "split_cpu_s": {name: round(min(split[name] for split in splits), 4) for name in splits[0]},
    }


def measure_sampler(case: Case, size: Size, rounds: int) -> list[dict[str, Any]]:
    """Tokens per second of both samplers by turns, their memory, and our share of the roofline at fixed length."""
    cases = [(rows, 1, []) for rows in size.batches] + [(groups * GROUP, GROUP, case.stops) for groups in size.groups]
    found = []
    for rows, group, stops in cases:
        runs: dict[str, list[Run]] = {"ours": [], "generate": []}
        memory: dict[str, float | None] = {}
        for _ in range(rounds):
            for name, sampler in (("ours", sampler_ours), ("generate", sampler_generate)):
                run, grown = peak_memory(sampler, case, rows, group, stops, size.new_tokens)
                runs[name].append(run)
                memory.setdefault(name, grown)
        row: dict[str, Any] = {"rows": rows, "group": group, "ragged": bool(stops), "new_tokens": size.new_tokens}
        for name, both in runs.items():
            speeds = [tokens / seconds for seconds, tokens in both]
            row[f"{name}_tokens_per_s"] = round(max(speeds), 1)
            row[f"{name}_median"] = round(statistics.median(speeds), 1)
            row[f"{name}_peak_mib"] = None if memory[name] is None else round(memory[name])
        row["ratio"] = round(row["ours_tokens_per_s"] / row["generate_tokens_per_s"], 2)
        if not stops:
            reached = row["ours_tokens_per_s"] * FORWARD_FLOPS * parameter_count(case.model)
            row["share_of_roofline"] = round(reached / product_rate(case.model, rows), 3)
        found.append(row)
    return found


def measure_size(size: Size, rounds: int) -> dict[str, Any]:
    """Everything about one model."""
    case = build_case(size.shape)
    sampler_ours(case, 8, 1, [], 2)  # compiles what is compiled at first use
    return {
        "name": size.name,
        "parameters": parameter_count(case.model),
        "rounds": min(rounds, size.rounds),
        "gflops_at_64": round(product_rate(case.model, 64) / 1e9, 1),
        "grpo_step": measure_grpo(case, size, min(rounds, size.rounds)),
        "sampler": measure_sampler(case, size, min(rounds, size.rounds)),
    }


def load() -> float | None:
    """Processes that wanted to run during the last minute, where the system tells."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None


def parse(arguments: Sequence[str]) -> tuple[int, list[Size], Path]:
    """Rounds, sizes and folder; ValueError says what is not understood."""
    options = {"rounds": "3", "sizes": "all", "folder": "results/bench"}
    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    unknown = [argument for argument in arguments if argument.split("=", 1)[0] not in options or "=" not in argument]
    options |= given
    names = {size.name.replace(" ", ""): size for size in SIZES}
    wanted = list(names) if options["sizes"] == "all" else options["sizes"].split(",")
    strange = [name for name in wanted if name not in names]
    if unknown or strange or not options["rounds"].isdigit() or int(options["rounds"]) < 1:
        wrong = unknown or [f"sizes={name}" for name in strange] or [f"rounds={options['rounds']}"]
        raise ValueError(f"{', '.join(wrong)}: give rounds=<at least 1>, sizes=all or {','.join(names)}, folder=<path>")
    return int(options["rounds"]), [names[name] for name in wanted], Path(options["folder"])


def main(arguments: Sequence[str]) -> int:
    """0 when measured and written, 2 on bad arguments."""
    try:
        rounds, sizes, folder = parse(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    result: dict[str, Any] = {"machine": machine(), "packages": packages(), "load_before": load(), "sizes": []}
    for size in sizes:
        result["sizes"].append(measure_size(size, rounds))
        step = result["sizes"][-1]["grpo_step"]["sides"]
        print(f"{size.name}: GRPO step {step['ours']['min_cpu_s']} s, TRL {step['trl']['min_cpu_s']} s", flush=True)
    result["load_after"] = load()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(strict_json(result, indent=2) + "\n", encoding="utf-8")
    print(performance.page(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
