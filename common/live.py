"""The live line of a run: redrawn in place on a terminal, a plain line every few seconds elsewhere."""

import math
import sys
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

PLAIN_EVERY_S = 10.0
REDRAW_EVERY_S = 0.25
# Metric name, label and format of what the line shows, in order.
SHOWN = (
    ("reward/mean", "reward", "{:.3f}"),
    ("success/mean", "success", "{:.3f}"),
    ("loss/sft", "loss", "{:.3f}"),
    ("kl/ref", "KL", "{:.4f}"),
    ("throughput/tokens_per_s", "tok/s", "{:,.0f}"),
)


def duration(seconds: float) -> str:
    """Seconds as 42s, 3m05s or 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def describe(step: int, values: dict[str, float]) -> str:
    """One step's metrics as the live line shows them: step, reward, success, loss, KL, tokens/s, time left."""
    parts = [f"step {step}"]
    for metric, label, form in SHOWN:
        value = values.get(metric)
        if value is not None and math.isfinite(value):
            parts.append(f"{label} {form.format(value)}")
    eta = values.get("progress/eta_s")
    if eta is not None and math.isfinite(eta):
        parts.append(f"{duration(eta)} left")
    return " ".join(parts)


class LiveLine:
    """Shows the state of a run on standard output; `quiet` shows nothing but what is said."""

    def __init__(self, quiet: bool = False, every_s: float = PLAIN_EVERY_S) -> None:
        self.quiet = quiet
        self.every_s = every_s
        self.last = -math.inf
        self.live: Live | None = None
        if not quiet and sys.stdout.isatty():
            self.live = Live(Text(""), console=Console(), auto_refresh=False, transient=True)
            self.live.start()

    def due(self) -> bool:
        """True when the next `show` would draw, so that callers need not build lines in vain."""
        every = REDRAW_EVERY_S if self.live is not None else self.every_s
        return not self.quiet and time.monotonic() - self.last >= every

    def show(self, lines: list[str]) -> None:
        """Draw the state: all lines on a terminal, joined to one line elsewhere; too early a call draws nothing."""
        if not self.due():
            return
        self.last = time.monotonic()
        if self.live is not None:
            self.live.update(Text("\n".join(lines)), refresh=True)
        else:
            print(" | ".join(lines), flush=True)

    def say(self, text: str) -> None:
        """Print a line that stays, above the live one."""
        if self.live is not None:
            self.live.console.print(Text(text))
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Take the live line off the terminal."""
        if self.live is not None:
            self.live.stop()
            self.live = None
