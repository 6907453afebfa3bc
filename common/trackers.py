"""Optional mirrors of the metrics: Weights & Biases (offline unless WANDB_MODE says otherwise), Trackio, TensorBoard.

The local JSON lines are the truth. A client is imported when its mirror is first written to, and whatever fails in it
ends the mirror with one warning, never the run.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

TRACKERS = ("none", "wandb", "trackio", "tensorboard")


class Client(Protocol):
    """What a tracking service must do."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def finish(self) -> None: ...


def names(labels: dict[str, Any]) -> tuple[str, str, str]:
    """Project, group and run name: all sessions and seeds of a cell's experiment stand together."""
    group = f"{labels['experiment']}/{labels['scale']}/{labels['variant'] or 'base'}"
    return f"exp-{labels['experiment']}", group, f"{labels['arm']}-seed{labels['seed']}"


class Wandb:
    """Weights & Biases; the step is a metric of its own, so that points of a resumed run are never dropped."""

    def __init__(self, folder: Path, labels: dict[str, Any], first_step: int) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        project, group, name = names(labels)
        self.run = wandb.init(
            project=project,
            group=group,
            name=name,
            config=dict(labels) | {"resumed_at": first_step},
            dir=str(folder),
            mode=mode,
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.run.define_metric("*", step_metric="progress/step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log({**values, "progress/step": step})

    def finish(self) -> None:
        self.run.finish()


class Trackio:
    """Trackio's local store."""

    def __init__(self, folder: Path, labels: dict[str, Any], first_step: int) -> None:
        import trackio

        project, group, name = names(labels)
        self.run = trackio.init(
            project=project, group=group, name=name, config=dict(labels) | {"resumed_at": first_step}, resume="allow"
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log({**values, "progress/step": step}, step=step)

    def finish(self) -> None:
        self.run.finish()


class TensorBoard:
    """TensorBoard event files below the run folder; points of dropped later steps are purged."""

    def __init__(self, folder: Path, labels: dict[str, Any], first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, global_step=step)

    def finish(self) -> None:
        self.writer.close()


CLIENTS: dict[str, Callable[[Path, dict[str, Any], int], Client]] = {
    "wandb": Wandb,
    "trackio": Trackio,
    "tensorboard": TensorBoard,
}


class Mirror:
    """A tracker that cannot hurt: opened at the first point, closed with one warning at the first failure."""

    def __init__(self, kind: str, folder: Path, labels: dict[str, Any], warn: Callable[[str], None]) -> None:
        if kind not in TRACKERS:
            raise ValueError(f"tracker={kind!r} is unknown; allowed: {', '.join(TRACKERS)}.")
        self.kind = kind
        self.folder = folder
        self.labels = labels
        self.warn = warn
        self.client: Client | None = None
        self.off = kind == "none"

    def guarded(self, deed: str, act: Callable[[], None]) -> None:
        if self.off:
            return
        try:
            act()
        except Exception as error:  # a third-party client may raise anything; the run goes on without it
            self.off = True
            self.warn(
                f"tracker={self.kind} failed in {deed} ({type(error).__name__}: {error}); "
                "the run goes on with its local logs alone."
            )

    def open(self, step: int) -> None:
        if self.client is None:
            self.client = CLIENTS[self.kind](self.folder, self.labels, step)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Mirror one step's finite values."""
        self.guarded("init", lambda: self.open(step))
        self.guarded("log", lambda: self.client.log(step, values) if self.client else None)

    def finish(self) -> None:
        """Close the client, if one was opened."""
        if self.client is not None:
            self.guarded("finish", self.client.finish)
            self.client = None
