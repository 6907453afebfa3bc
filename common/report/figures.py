"""Figures as deterministic SVG: the same records give the same bytes on the same package versions.

Colours are Okabe and Ito's (safe for colour-blind readers); every arm also has its own line style and marker, so a
figure still reads in grey print. The title is kept inside the file and becomes the caption and alternative text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.sax.saxutils import unescape

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from common.metrics import find
from common.records import Point, Record, ordered, sample_at, sample_of
from common.report.text import number
from common.statistics import Estimate, estimate

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F7F7F")
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "figures",  # element ids would otherwise be random
    "svg.fonttype": "none",  # text stays text: small, searchable, readable by a screen reader
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "path.simplify": False,
}


@contextmanager
def canvas(path: Path, title: str, width: float = 7.0, height: float = 3.6) -> Iterator[tuple[Figure, Axes]]:
    """Draw in the suite's style (inches), whatever the reader's matplotlibrc says, and save on leaving the block.

    The SVG holds no date and no random id; `title` becomes the caption and the alternative text.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure, figure.subplots()
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None, "Title": title})


def title_of(svg: str) -> str:
    """The title that `save` put into an SVG."""
    found = re.search(r"<dc:title>(.*?)</dc:title>", svg, re.DOTALL)
    return unescape(found.group(1)) if found else ""


def inline(svg: str, prefix: str) -> str:
    """An SVG as part of an HTML page: no prologue, no metadata, ids made unique by `prefix`, tied to its caption."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', body)
    body = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", body)
    return body.replace("<svg", f'<svg role="img" aria-labelledby="{prefix}-caption"', 1)


def _unit(metric: str, unit: str | None) -> str:
    known = find(metric)
    return unit or (known.unit if known else "number")


def _label(axis: Axis, unit: str, text: str) -> None:
    """Label an axis; shares are ticked in percent, counts with thousands separators."""
    if unit == "rate":
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(100 * value, 6):g} %"))
    elif unit == "count":
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(value, 6):,g}"))
    axis.set_label_text(text)


def _legend(figure: Figure, axes: Axes) -> None:
    """A legend below the plot, in as many columns as the names leave room for; the figure grows by its rows."""
    handles, names = axes.get_legend_handles_labels()
    if names:
        columns = max(1, min(4, len(names), round(84 / (max(map(len, names)) + 9))))
        figure.set_figheight(figure.get_figheight() + 0.22 * -(-len(names) // columns))
        figure.legend(handles, names, loc="outside lower center", ncols=columns, handlelength=3)


def series(
    records: Sequence[Record], arm: str, split: str, metric: str, x: str = "step", unit: str | None = None
) -> tuple[list[float], list[Estimate]]:
    """An arm's curve: x positions and the estimate over seeds at each step.

    Where a step has both, the evaluation while training is shown and not the final one, which may use more items.
    `x` is "step" or a metric recorded at the same arm, seed and step; its mean over seeds is the position.
    """
    by_step: dict[int, dict[int, Record]] = {}
    position: dict[int, dict[int, float]] = {}
    for row in records:
        if row["arm"] == arm and row["value"] is not None:
            if (row["split"], row["metric"]) == (split, metric):
                at = by_step.setdefault(row["step"], {})
                if not row["final"] or row["seed"] not in at:
                    at[row["seed"]] = row
            elif row["metric"] == x:
                position.setdefault(row["step"], {})[row["seed"]] = row["value"]
    xs, estimates = [], []
    for step in sorted(by_step):
        found = estimate(sample_of(by_step[step].values()), rate=_unit(metric, unit) == "rate")
        places = position.get(step, {})
        if found is not None and (x == "step" or places):
            xs.append(float(step) if x == "step" else sum(places.values()) / len(places))
            estimates.append(found)
    return xs, estimates


def curve(
    records: Sequence[Record],
    split: str,
    metric: str,
    arms: Sequence[str],
    path: Path,
    book_lines: Mapping[str, float] | None = None,
    *,
    x: str = "step",
    title: str | None = None,
    labels: Mapping[str, str] | None = None,
    unit: str | None = None,
    x_label: str | None = None,
    y_label: str | None = None,
) -> str:
    """Mean with its 95 % band over seeds along training, one line per arm; returns the file's name.

    `book_lines` are horizontal marks, text -> value. Arms without a curve are left out; `unit` None is the registry's.
    """
    title = title or f"{metric} on {split} while training (mean and 95 % interval over seeds)"
    with canvas(path, title) as (figure, axes):
        for index, arm in enumerate(arms):
            xs, estimates = series(records, arm, split, metric, x, unit)
            if not xs:
                continue
            # From the ninth arm on colours repeat, with another line and marker.
            colour, look = COLOURS[index % len(COLOURS)], index + index // len(COLOURS)
            axes.plot(
                xs,
                [e.mean for e in estimates],
                color=colour,
                linestyle=LINES[look % len(LINES)],
                marker=MARKERS[look % len(MARKERS)],
                markevery=max(1, len(xs) // 8),
                label=(labels or {}).get(arm, arm),
            )
            if len(xs) > 1 and max(e.seeds for e in estimates) > 1:
                lows, highs = [e.low for e in estimates], [e.high for e in estimates]
                axes.fill_between(xs, lows, highs, color=colour, alpha=0.15, linewidth=0)
        for text, value in (book_lines or {}).items():
            axes.axhline(value, color="#555555", linewidth=1.0, linestyle=(0, (1, 2)))
            place: dict[str, Any] = {
                "xycoords": ("axes fraction", "data"),
                "xytext": (4, 2),
                "textcoords": "offset points",
            }
            axes.annotate(text, (1.0, value), fontsize=8, **place)
        if _unit(metric, unit) == "rate":
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, -0.02), min(high, 1.02))
        _label(axes.xaxis, "count" if x == "step" else _unit(x, None), x_label or x)
        _label(axes.yaxis, _unit(metric, unit), y_label or metric)
        _legend(figure, axes)
    return path.name


def bars(
    records: Sequence[Record],
    split: str,
    metric: str,
    arms: Sequence[str],
    path: Path,
    book: Mapping[str, float] | None = None,
    source: Mapping[str, float] | None = None,
    *,
    step: int | None = None,
    title: str | None = None,
    labels: Mapping[str, str] | None = None,
    unit: str | None = None,
    x_label: str | None = None,
) -> str:
    """Final values (or those of `step`) with 95 % intervals, one bar per arm, and the book's and the source's marks.

    `book` and `source` map an arm to its published value. Arms without a value keep their row and say so.
    """
    unit = _unit(metric, unit)
    title = title or f"{metric} on {split}, final (bars: mean, whiskers: 95 % interval)"
    with canvas(path, title, height=1.1 + 0.42 * len(arms)) as (figure, axes):
        for row, arm in enumerate(arms):
            _bar(axes, row, estimate(sample_at(records, Point(arm, metric, split, step)), rate=unit == "rate"), unit)
        for marks, marker, name in ((book or {}, "D", "book"), (source or {}, "^", "source")):
            rows = [row for row, arm in enumerate(arms) if arm in marks]
            if rows:
                values = [marks[arms[row]] for row in rows]
                axes.plot(values, rows, marker, label=name, markersize=7, mfc="#FFFFFF", mec=COLOURS[1], mew=1.6)
        axes.set_yticks(range(len(arms)), [(labels or {}).get(arm, arm) for arm in arms])
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.margins(x=0.05)
        axes.grid(axis="y", visible=False)
        _label(axes.xaxis, unit, x_label or metric)
        _legend(figure, axes)
    return path.name


def _bar(axes: Axes, row: int, found: Estimate | None, unit: str) -> None:
    """One bar with its whisker; the number stands in a column at the right, clear of the published marks."""
    text = number(found.mean, unit) if found else "no value"
    place = axes.get_yaxis_transform()
    axes.annotate(text, (1.0, row), xycoords=place, xytext=(4, -3), textcoords="offset points", fontsize=9)
    if found:
        axes.barh(row, found.mean, height=0.62, color=COLOURS[4], edgecolor="#000000", linewidth=0.6)
        ends = [[max(0.0, found.mean - found.low)], [max(0.0, found.high - found.mean)]]
        axes.errorbar(found.mean, row, xerr=ends, color="#000000", capsize=3, linewidth=1.2)


def default_figures(
    records: Sequence[Record], folder: Path, labels: Mapping[str, str] | None, unit_of: Callable[[str], str]
) -> list[str]:
    """One bar figure per split and final metric, and a curve where there are steps before the final one."""
    names = []
    for split, metric in dict.fromkeys((row["split"], row["metric"]) for row in records if row["final"]):
        rows = [row for row in records if (row["split"], row["metric"]) == (split, metric)]
        stem = re.sub(r"[^a-z0-9]+", "-", f"{metric}-{split}".lower())
        arms, unit = ordered(rows, "arm"), unit_of(metric)
        names.append(bars(records, split, metric, arms, folder / f"{stem}.svg", labels=labels, unit=unit))
        if any(not row["final"] for row in rows):
            curve(records, split, metric, arms, folder / f"{stem}-curve.svg", labels=labels, unit=unit)
            names.append(f"{stem}-curve.svg")
    return names
