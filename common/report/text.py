"""Numbers and cells as text: the one place that decides how a value, a difference and an interval are written."""

from __future__ import annotations

import re

from common.statistics import Estimate

NOT_AVAILABLE = "n/a"


def _decimals(value: float, unit: str) -> int:
    """Percentages get one decimal, whole counts none, anything else three significant digits."""
    if unit == "rate":
        return 1
    if unit == "count":
        return 0 if value == int(value) else 1
    size = abs(value)
    return 3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0


def _bare(value: float, unit: str, decimals: int, signed: bool = False) -> str:
    rounded = round(value * 100 if unit == "rate" else value, decimals) + 0.0  # + 0.0 turns -0.0 into 0.0
    return f"{rounded:{'+' if signed else ''},.{decimals}f}"


def _suffix(unit: str, difference: bool) -> str:
    if unit == "rate":
        return " points" if difference else " %"
    return {"seconds": " s", "nats": " nats", "tokens/s": " tokens/s"}.get(unit, "")


def number(value: float | None, unit: str = "number", difference: bool = False) -> str:
    """A value (20.1 %), or a difference with its sign (+4.9 points); n/a for None."""
    if value is None:
        return NOT_AVAILABLE
    return _bare(value, unit, _decimals(value, unit), difference) + _suffix(unit, difference)


def interval(estimate: Estimate, unit: str = "number", difference: bool = False) -> str:
    """A mean with its 95 % interval, 20.1 % [18.9, 21.3]; without brackets where a single seed gives no interval.

    An end that would round to zero gets up to two more decimals: on which side of zero it lies decides a verdict.
    """
    text = number(estimate.mean, unit, difference)
    if estimate.seeds == 1 and not estimate.items:
        return text
    decimals = max(_decimals(end, unit) for end in (estimate.mean, estimate.low, estimate.high))
    ends = []
    for end in (estimate.low, estimate.high):
        written = (_bare(end, unit, decimals + more, difference) for more in range(3))
        ends.append(next((text for text in written if end == 0 or float(text.replace(",", "")) != 0), "0"))
    return f"{_bare(estimate.mean, unit, decimals, difference)}{_suffix(unit, difference)} [{ends[0]}, {ends[1]}]"


def plural(count: int, word: str) -> str:
    """1 seed, 5 seeds."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def basis(estimate: Estimate) -> str:
    """What an interval rests on: 5 seeds, 399 items."""
    items = f", {plural(estimate.items, 'item')}" if estimate.items else ""
    return plural(estimate.seeds, "seed") + items


def cell(text: str) -> str:
    """Text for one Markdown table cell: one line, no column breaks, no raw HTML."""
    flat = re.sub(r"\s*[\r\n\u2028\u2029]+\s*", " ", text)
    return flat.replace("|", "\\|").replace("<", "&lt;")


def visible(text: str) -> str:
    """Untrusted text with control and direction-changing characters spelt out, so that nothing hides."""
    hidden = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
    return re.sub(hidden, lambda match: f"\\u{ord(match.group()):04x}", text)
