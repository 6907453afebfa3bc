"""Print how many small programs a second the sandbox runs on this machine, and what one costs.

    python -m scripts.sandbox_bench [workers=2] [seconds=5] [callers=8]

A program prints a product; `callers` threads hand them in one by one, as rollouts do. CPU time is that of this process and
of the workers with their programs: on a machine that others use too it says more than the rate.
"""

import os
import sys
import threading
import time

from common.sandbox import Limits, Program, Result, Sandbox, SandboxError

GOAL = 200.0  # small executions per second on two cores
DEFAULTS = {"workers": 2, "seconds": 5, "callers": 8}


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measure(workers: int, seconds: float, callers: int) -> tuple[list[Result], float, float]:
    """(results, wall seconds, CPU seconds of all): programs of `callers` threads for so many seconds."""
    results: list[Result] = []

    def caller(number: int) -> None:
        step = 0
        while time.monotonic() < end:
            step += 1
            result = box.run([Program(f"print({number} * {step})")])[0]
            assert result.stdout == f"{number * step}\n", result
            results.append(result)

    before = cpu_seconds()
    with Sandbox(Limits(), workers=workers) as box:
        box.run([Program("print(0)")] * workers)
        start = time.monotonic()
        end = start + seconds
        threads = [threading.Thread(target=caller, args=(number,)) for number in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall = time.monotonic() - start
    return results, wall, cpu_seconds() - before


def main(arguments: list[str]) -> int:
    """Prints the figures; exit code 1 where this machine has no isolation."""
    given = dict(argument.split("=", 1) for argument in arguments)
    workers, seconds, callers = (int(given.get(key, value)) for key, value in DEFAULTS.items())
    try:
        results, wall, cpu = measure(workers, seconds, callers)
    except SandboxError as error:
        print(error)
        return 1
    walls = sorted(result.wall_s for result in results)
    rate = len(results) / wall
    print(f"{len(results)} programs in {wall:.2f} s: {rate:.0f} a second, goal {GOAL:.0f} on two cores")
    print(f"workers {workers}, callers {callers}, cores {os.cpu_count()}, load {os.getloadavg()[0]:.1f}")
    print(f"one program: {1000 * walls[len(walls) // 2]:.1f} ms median, {1000 * walls[int(len(walls) * 0.95)]:.1f} ms at 95 %")
    print(f"CPU: {1000 * cpu / len(results):.1f} ms a program, start of the workers included")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
