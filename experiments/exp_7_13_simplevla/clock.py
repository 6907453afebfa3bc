"""How long a decision takes beside the control period: `python -m experiments.exp_7_13_simplevla.clock [key=value ...]`.

A robot that decides slower than its control period stands still in between; with chunks it need not, because a decision is
good for several control steps. Times are of this machine, one decision at a time, and stand in no record.
"""

import sys
import time

import torch

from common.config import compose
from common.seeding import generator
from experiments.exp_7_13_simplevla import tasks
from experiments.exp_7_13_simplevla.episodes import to_inputs
from experiments.exp_7_13_simplevla.physics import PERIOD
from experiments.exp_7_13_simplevla.policy import build_policy, choose
from experiments.exp_7_13_simplevla.settings import Settings
from experiments.exp_7_13_simplevla.world import World

TRIES = 50


def milliseconds(settings: Settings, start: str) -> float:
    """Mean time of one decision, picture included where the policy sees one."""
    policy = build_policy(settings.policy_config(start), 0)
    world, stream = World(tasks.draw("train", tasks.SEEN[:1], "clock")), generator(0, "clock")
    began = 0.0
    for turn in range(TRIES + 5):
        if turn == 5:  # the first ones warm up
            began = time.perf_counter()
        choose(policy, to_inputs(world.see(), policy, world, [0]), 1.0, stream)
    return 1000 * (time.perf_counter() - began) / TRIES


def main(changes: list[str]) -> None:
    """A line per start."""
    torch.set_num_threads(1)
    settings = compose("7-13", Settings, changes)
    print(f"control period {1000 * PERIOD:.0f} ms")
    for name, start in settings.starts.items():
        took = milliseconds(settings, name)
        share = took / (1000 * PERIOD * start.chunk)
        print(
            f"{name}: {took:.1f} ms for {start.chunk} control steps, {took / start.chunk:.2f} ms each, {share:.1%} of the time"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
