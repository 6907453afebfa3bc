"""What the processes below a worker use, read from /proc. Linux; the worker alone imports it."""

import contextlib
import os
import resource


def own_children() -> list[int]:
    """Children of this process, adopted ones too; on macOS the list cannot be had."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return [int(pid) for pid in file.read().split()]
    return []


def usage_of_all(enough: float) -> tuple[int, float, float]:
    """(number, CPU seconds, bytes of memory) of all processes below this one; shared pages count once if it matters."""
    ticks, pages, pids = 0, 0, [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    page, tick = resource.getpagesize(), os.sysconf("SC_CLK_TCK")
    for pid in pids:
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/stat", "rb") as file:
                ticks += sum(int(value) for value in file.read().rpartition(b")")[2].split()[11:15])
            with open(f"/proc/{pid}/statm", "rb") as file:
                pages += int(file.read().split()[1])
    memory = float(pages * page)
    if memory > enough:
        memory = sum(proportional(pid, page) for pid in pids)
    return len(pids), ticks / tick, memory


def proportional(pid: str, page: int) -> float:
    """A process's memory with its part of shared pages; where it hides that, all that is resident."""
    with contextlib.suppress(OSError, StopIteration), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        return 1024.0 * int(next(line for line in file if line.startswith(b"Pss:")).split()[1])
    with contextlib.suppress(OSError), open(f"/proc/{pid}/statm", "rb") as file:
        return float(int(file.read().split()[1]) * page)
    return 0.0
