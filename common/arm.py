"""An arm of an experiment at work under one seed: what its training loop is called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.compute import Budget, Meter
from common.models import parameter_count
from common.runlog import RunLog


@dataclass
class Arm:
    """What is trained, and where its files and numbers go; experiments add what else their loops need.

    ``settings`` has ``branches``, arm -> how it trains, and ``arm_config(arm)``, the configuration of its loop.
    """

    name: str
    settings: Any
    model: Any
    tokenizer: Any
    seed: int
    folder: Path
    log: RunLog

    @property
    def branch(self) -> Any:
        return self.settings.branches[self.name]

    @property
    def config(self) -> Any:
        return self.settings.arm_config(self.name)

    def loop(self, flops: float, evaluate: Callable[[int, int], None] | None = None, every: float = 1.0) -> dict[str, Any]:
        """The keywords that every loop takes: budget, files, and (step, FLOPs used) -> an evaluation every so many FLOPs.

        The smallest interval, one FLOP, asks after every step.
        """
        keys = {"budget": Budget(flops=max(0.0, flops)), "log": self.log, "folder": self.folder}
        return keys if evaluate is None else keys | {"evaluate": evaluate, "evaluate_every_flops": every}

    def curve(self, flops: float, measure: Callable[[Any, int], None], points: int) -> dict[str, Any]:
        """`loop` with a learning curve: measure(model, percent of the budget) at each of so many points."""
        whole = max(flops, 1.0)

        def evaluate(step: int, used: int) -> None:
            measure(self.model, 100 * min(points, int(points * used / whole)) // points)

        return self.loop(flops, evaluate, whole / points)


def stay(arm: Arm) -> Meter:
    """The method of an arm that does not train."""
    return Meter(parameter_count(arm.model))
