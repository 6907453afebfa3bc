"""The log of one cell (arm × seed): metrics, records, rollouts and costs as strict JSON that survives a kill.

Four files in the cell's folder. `metrics.jsonl` holds one line a step for curves and the live line; `records.jsonl`
holds the numbers that reports are made of, without times, so that two runs write the same bytes; `rollouts.jsonl` holds
episodes to read; `cost.json` holds seconds, memory, tokens and FLOPs, summed over the sessions of a resumed run.
"""

import fcntl
import math
import resource
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from common.files import json_line, read_json, read_json_lines, strict_json, write_json, write_json_lines
from common.live import LiveLine, describe
from common.trackers import Mirror

LABELS = ("experiment", "scale", "variant", "arm", "seed")
COST_EVERY_S = 20.0
Row = dict[str, Any]


class Listener:
    """Where the metrics and warnings of this process also go: a worker process sets it to reach its parent."""

    metrics: Callable[[int, dict[str, float], float | None], None] | None = None
    warning: Callable[[str], None] | None = None


def warn(text: str) -> None:
    """Tell the user once: through the parent process where there is one, else as a Python warning."""
    if Listener.warning is not None:
        Listener.warning(text)
    else:
        warnings.warn(text, stacklevel=3)


def undefined(value: float) -> str | None:
    """Why a number cannot stand in JSON ("nan", "inf", "-inf"), or None if it can."""
    return None if math.isfinite(value) else str(value)


def compact_number(value: float) -> float | int | None:
    """An item as a short JSON number: whole numbers without a point, others to 6 decimals, undefined as None."""
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() else round(number, 6)


def record_key(row: Row) -> tuple[Any, ...]:
    """What a record speaks of: the newest record of a key replaces the older one."""
    return tuple(row[key] for key in (*LABELS, "split", "metric", "step", "final"))


def newest_records(rows: list[Row]) -> list[Row]:
    """One record a key, the newest, in the order in which the keys first came."""
    kept: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        kept[record_key(row)] = row
    return list(kept.values())


def newest_metrics(rows: list[Row]) -> list[Row]:
    """One line a step, in rising steps; a name logged twice at a step keeps its newest value."""
    kept: dict[int, Row] = {}
    for row in rows:
        kept[row["step"]] = {**kept.get(row["step"], {}), **row}
    return [kept[step] for step in sorted(kept)]


def distinct_rows(rows: list[Row]) -> list[Row]:
    """The rows without exact repeats."""
    return list({strict_json(row, sort_keys=True): row for row in rows}.values())


COMPACT = {"metrics": newest_metrics, "records": newest_records, "rollouts": distinct_rows}


def peak_memory_mb() -> float:
    """Largest resident memory of this process so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


class RunLog:
    """Context manager for one cell's folder. Labels: experiment, scale, variant (None: unchanged), arm, seed.

    Raises ValueError when the folder already holds another cell's log, and RuntimeError while another process
    writes it: a log is never overwritten by a different run.
    """

    def __init__(self, folder: Path, labels: Row, *, tracker: str = "none", quiet: bool = False) -> None:
        if set(labels) != set(LABELS):
            raise ValueError(f"RunLog labels {sorted(labels)} must be exactly {', '.join(LABELS)}.")
        self.folder = Path(folder)
        self.labels = {key: labels[key] for key in LABELS}
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.folder / ".log.lock", "ab")  # noqa: SIM115 (held until close)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.close()
            raise RuntimeError(f"{self.folder} is being written by another process; wait for it to end.") from None
        self.check_owner()
        for kind in COMPACT:
            self.rewrite(kind)
        self.files = {kind: open(self.path(kind), "ab") for kind in COMPACT}  # noqa: SIM115
        self.mirror = Mirror(tracker, self.folder, self.labels, warn)
        self.live = LiveLine(quiet=quiet or Listener.metrics is not None)
        self.origin: tuple[float, float] | None = None
        self.costs, self.start = self.read_costs(), (time.perf_counter(), time.process_time())
        self.cost_written = time.perf_counter()

    def path(self, kind: str) -> Path:
        return self.folder / f"{kind}.jsonl"

    def check_owner(self) -> None:
        owner = self.folder / "labels.json"
        found = read_json(owner)
        if found is None:
            write_json(owner, self.labels)
        elif found != self.labels:
            self.lock.close()
            raise ValueError(
                f"{self.folder} holds the log of {found}, not of {self.labels}; choose another folder or remove the old one."
            )

    def read_costs(self) -> Row:
        return read_json(self.folder / "cost.json") or {"wall_s": 0.0, "cpu_s": 0.0, "peak_memory_mb": 0.0}

    def rewrite(self, kind: str, keep: Callable[[Row], bool] = lambda row: True) -> None:
        """Write a file anew without cut lines, repeats and rows that are not kept."""
        if self.path(kind).exists():
            rows = [row for row in read_json_lines(self.path(kind)) if keep(row)]
            write_json_lines(self.path(kind), COMPACT[kind](rows))

    def append(self, kind: str, row: Row) -> None:
        self.files[kind].write(json_line(row).encode())
        self.files[kind].flush()

    def resume(self, step: int) -> None:
        """Drop metrics and rollouts of later steps than `step`, the last step that the loaded checkpoint has finished.

        Records stay: their steps may count other things than the loop does (percent of a budget), and a run that goes
        on writes the same ones again, of which the newest counts.
        """
        for kind in ("metrics", "rollouts"):
            self.files[kind].close()
            self.rewrite(kind, lambda row: row.get("step", step) <= step)
            self.files[kind] = open(self.path(kind), "ab")  # noqa: SIM115

    def metrics(self, step: int, values: dict[str, float], progress: float | None = None) -> None:
        """Log one step's metrics by their registry names; `progress` is the share of the run that is done, 0 to 1.

        An undefined value becomes null with its reason under "reasons"; a step logged twice keeps its newest values.
        """
        numbers = {name: float(value) for name, value in values.items()}
        if progress is not None:
            eta = self.time_left(progress)
            if eta is not None:
                numbers["progress/eta_s"] = eta
        reasons = {name: reason for name, value in numbers.items() if (reason := undefined(value))}
        row: Row = {"step": step} | {name: None if name in reasons else value for name, value in numbers.items()}
        self.append("metrics", row | ({"reasons": reasons} if reasons else {}))
        self.mirror.log(step, {name: value for name, value in numbers.items() if name not in reasons})
        if Listener.metrics is not None:
            Listener.metrics(step, numbers, progress)
        if self.live.due():
            self.live.show([f"{self.labels['arm']}-seed{self.labels['seed']} {describe(step, numbers)}"])
        if time.perf_counter() - self.cost_written > COST_EVERY_S:
            self.cost()

    def time_left(self, progress: float) -> float | None:
        """Seconds left at the pace of this session, rounded to 0.1; None at its first step."""
        now = time.perf_counter()
        if self.origin is None:
            self.origin = (now, progress)
        began, share = self.origin
        if progress <= share:
            return None
        return round((now - began) * (1.0 - progress) / (progress - share), 1)

    def record(
        self,
        *,
        split: str,
        metric: str,
        value: float | None,
        n: int,
        step: int,
        final: bool = False,
        items: list[float] | None = None,
        reason: str | None = None,
    ) -> None:
        """Write one number of evidence: `value` over `n` samples of a split at a step.

        An undefined value (None, NaN, infinite) is null and carries a reason. `items`: per-item means in an order
        shared by all arms and seeds, for paired statistics; kept to 6 decimals.
        """
        number = None if value is None else float(value)
        if number is not None and not math.isfinite(number):
            reason, number = reason or str(number), None
        if number is None and reason is None:
            raise ValueError(f"Record {split}/{metric} at step {step} has no value; give a reason for it.")
        row: Row = {**self.labels, "split": split, "metric": metric, "value": number, "n": int(n), "step": int(step)}
        row["final"] = bool(final)
        if reason is not None:
            row["reason"] = reason
        if items is not None:
            row["items"] = [compact_number(item) for item in items]
        self.append("records", row)

    def rollouts(self, rows: list[Row]) -> None:
        """Keep episodes to read; a row's "step" (if any) lets a resumed run drop it, exact repeats are kept once."""
        for row in rows:
            self.append("rollouts", row)

    def cost(self, **values: float) -> None:
        """Set totals such as tokens_forward, tokens_trained or flops, and write them with the seconds used so far."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.costs |= values
        self.costs["wall_s"] = round(self.costs["wall_s"] + wall - self.start[0], 3)
        self.costs["cpu_s"] = round(self.costs["cpu_s"] + cpu - self.start[1], 3)
        self.costs["peak_memory_mb"] = round(max(self.costs["peak_memory_mb"], peak_memory_mb()), 1)
        self.start, self.cost_written = (wall, cpu), wall
        write_json(self.folder / "cost.json", self.costs)

    def close(self) -> None:
        """Finish the tracker, write the costs and leave every file without repeats."""
        self.mirror.finish()
        self.live.close()
        self.cost()
        for kind in COMPACT:
            self.files[kind].close()
            self.rewrite(kind)
        fcntl.flock(self.lock, fcntl.LOCK_UN)
        self.lock.close()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
