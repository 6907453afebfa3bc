"""Figures and tables of the report, from records alone."""

from __future__ import annotations

from pathlib import Path

from common.adaptthink import AdaptThinkConfig, bounds
from common.claims import load_claims
from common.records import Point, Record, ordered, sample_at
from common.report.figures import COLOURS, LINES, MARKERS, canvas, curve, series
from common.report.text import NOT_AVAILABLE, interval, number
from common.statistics import Estimate, Sample, difference, estimate
from experiments.exp_7_10_adaptthink import chains

CLAIMS = load_claims(Path(__file__).with_name("claims.yaml"))
LABELS = CLAIMS.labels
LEVELS = {f"level{level}": f"{level} steps" if level > 1 else "1 step" for level in chains.LEVELS} | {
    "ood": f"{chains.OOD_LEVEL} steps, never trained on"
}
AXIS = "compute of the arm's own training, percent"
RATIO_ARMS = ("adaptthink", "token", "uncorrected", "no_forcing")
DELTA_ARMS = ("delta_0", "adaptthink", "delta_01", "delta_02")
DELTAS = {
    "delta_0": 0.0, "adaptthink": 0.05, "delta_01": 0.1, "delta_02": 0.2, "token": 0.05, "routed_0": 0.0, "routed": 0.05,
    "routed_02": 0.2,
}  # fmt: skip
# Arms trained on one level, where the clip alone decides where P(</think>) comes to rest: arm -> (ratio, tokens of a NoThinking
# answer, which end).
BOUNDED = {
    "floor_token": ("token", 8, "floor"),
    "floor_t3": ("sequence", 3, "floor"),
    "floor_t8": ("sequence", 8, "floor"),
    "ceiling_token": ("token", 8, "ceiling"),
    "ceiling_t3": ("sequence", 3, "ceiling"),
    "ceiling_t8": ("sequence", 8, "ceiling"),
}
BOUND_SPLITS = {"floor": "level6", "ceiling": "level1"}  # the level that they train on: NoThinking does not pay, or pays


def found(records: list[Record], arm: str, metric: str, split: str) -> Estimate | None:
    """An arm's final number over seeds."""
    return estimate(sample_at(records, Point(arm, metric, split)), rate=CLAIMS.metric(metric).unit == "rate")


def figures(records: list[Record], folder: Path) -> list[str]:
    """Cost against accuracy, share over training, forced modes per level, predicted bounds."""
    arms = ordered(records, "arm")
    names = [frontier(records, arms, folder / "frontier.svg"), modes(records, folder / "modes.svg")]
    families = {"ratio": RATIO_ARMS, "delta": DELTA_ARMS}
    for name, members in families.items():
        some = [arm for arm in members if arm in arms]
        title = f"Probability of NoThinking along training, all trained levels: arms by {name}"
        path = folder / f"share-{name}.svg"
        names.append(
            curve(records, "id", "nothink_p", some, path, title=title, labels=LABELS, unit="rate", x_label=AXIS, y_label="P")
        )
    names.append(share_by_level(records, "adaptthink", folder / "share-levels.svg"))
    if any(arm in arms for arm in BOUNDED):
        names.append(bound_curves(records, [arm for arm in BOUNDED if arm in arms], folder / "bounds.svg"))
    return names


def frontier(records: list[Record], arms: list[str], path: Path) -> str:
    """Success against mean length, one mark per arm; arms that no other one beats in both are joined."""
    points = {arm: (found(records, arm, "length", "id"), found(records, arm, "success", "id")) for arm in arms}
    shown = [arm for arm in arms if arm not in BOUNDED]
    known = {arm: (x.mean, y.mean) for arm in shown if (x := points[arm][0]) and (y := points[arm][1])}
    best = [
        place for arm, place in sorted(known.items(), key=lambda item: item[1])
        if not any(x <= place[0] and y >= place[1] and (x, y) != place for x, y in known.values())
    ]  # fmt: skip
    with canvas(path, "Success against length on the trained levels (mean over seeds); the line joins arms that no other beats",
                height=4.2) as (figure, axes):  # fmt: skip
        axes.plot([x for x, _ in best], [100 * y for _, y in best], color="#999999", linewidth=1.0)
        for index, (arm, (x, y)) in enumerate(known.items()):
            # another marker when the colours begin again, so that no two arms look the same
            marker, colour = MARKERS[(index + index // len(COLOURS)) % len(MARKERS)], COLOURS[index % len(COLOURS)]
            axes.plot(x, 100 * y, marker, color=colour, markersize=8, label=LABELS.get(arm, arm), linestyle="none")
        axes.set_xlabel("mean tokens of an answer")
        axes.set_ylabel("success, percent")
        figure.legend(loc="outside right upper", fontsize=8)
    return path.name


def modes(records: list[Record], path: Path) -> str:
    """The start made to think and made not to, per level."""
    with canvas(path, "The start made to think and made not to: success per level") as (figure, axes):
        for index, (metric, label) in enumerate((("success_think", "Thinking"), ("success_nothink", "NoThinking"))):
            marks = [(i, e) for i, split in enumerate(LEVELS) if (e := found(records, "start", metric, split))]
            axes.errorbar(
                [i for i, _ in marks], [100 * e.mean for _, e in marks], color=COLOURS[index], marker=MARKERS[index], capsize=3,
                yerr=[[100 * (e.mean - e.low) for _, e in marks], [100 * (e.high - e.mean) for _, e in marks]], label=label,
            )  # fmt: skip
        axes.set_xticks(range(len(LEVELS)), [split.removeprefix("level") for split in LEVELS])
        axes.set_xlabel("steps of the chain (ood: 7)")
        axes.set_ylabel("success, percent")
        figure.legend(loc="outside lower center", ncols=2)
    return path.name


def share_by_level(records: list[Record], arm: str, path: Path) -> str:
    """P(</think>) along training, one line per level."""
    with canvas(path, "Probability of NoThinking along training of the full method, by level") as (figure, axes):
        for index, (split, label) in enumerate(LEVELS.items()):
            xs, estimates = series(records, arm, split, "nothink_p", unit="rate")
            axes.plot(xs, [100 * e.mean for e in estimates], color=COLOURS[index], linestyle=LINES[index % 4], label=label)
        axes.set_xlabel(AXIS)
        axes.set_ylabel("P(</think>), percent")
        figure.legend(loc="outside lower center", ncols=4)
    return path.name


def predicted(arm: str) -> float:
    """The bound that an arm of BOUNDED is predicted to come to rest at."""
    ratio, tokens, end = BOUNDED[arm]
    low, high = bounds(AdaptThinkConfig(ratio=ratio), tokens)
    return low if end == "floor" else high


def bound_curves(records: list[Record], arms: list[str], path: Path) -> str:
    """P(</think>) along training against the predicted bounds (dotted, in the arm's colour)."""
    with canvas(path, "Probability of NoThinking where the advantage has one sign; dotted: predicted bounds",
                height=4.0) as (figure, axes):  # fmt: skip
        for index, arm in enumerate(arms):
            xs, estimates = series(records, arm, BOUND_SPLITS[BOUNDED[arm][2]], "nothink_p", unit="rate")
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(xs, [100 * e.mean for e in estimates], color=colour, label=LABELS.get(arm, arm))
            axes.axhline(100 * predicted(arm), color=colour, linestyle=":", linewidth=1.0)
        axes.set_xlabel(AXIS)
        axes.set_ylabel("P(</think>), percent")
        figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return path.name


def sections(records: list[Record]) -> dict[str, str]:
    """Heading -> Markdown."""
    return {
        "Thinking against NoThinking": forced_table(records),
        "By level after training": level_table(records),
        "Where the change of success comes from": change_table(records),
        "Where the clip holds the share": bound_table(records),
        "History of the published run": HISTORY,
    }


def text(estimated: Estimate | None, unit: str) -> str:
    """A mean for a cell."""
    return number(estimated.mean, unit) if estimated else NOT_AVAILABLE


def forced_table(records: list[Record]) -> str:
    """The start in both modes: the chapter's first claim."""
    lines = [
        "| level | Thinking: success | NoThinking: success | Thinking: tokens | NoThinking: tokens |",
        "| --- |" + " --- |" * 4,
    ]
    for split, label in LEVELS.items():
        shown = [
            interval(e, "rate") if (e := found(records, "start", metric, split)) else NOT_AVAILABLE
            for metric in ("success_think", "success_nothink")
        ]
        shown += [text(found(records, "start", metric, split), "tokens") for metric in ("length_think", "length_nothink")]
        lines.append(f"| {label} | {' | '.join(shown)} |")
    return "\n".join(lines)


def level_table(records: list[Record]) -> str:
    """Per arm and level: success, and in brackets the probability of NoThinking."""
    lines = [
        f"Success (probability of NoThinking).\n\n| arm | {' | '.join(LEVELS.values())} |",
        "| --- |" + " --- |" * len(LEVELS),
    ]
    for arm in ordered(records, "arm"):
        cells = [
            f"{text(found(records, arm, 'success', split), 'rate')} ({text(found(records, arm, 'nothink_p', split), 'rate')})"
            for split in LEVELS
        ]
        lines.append(f"| {LABELS.get(arm, arm)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def change_table(records: list[Record]) -> str:
    """Success less the start's, split into what skipping costs and what each mode gained."""
    lines = [f"{CHANGE_TEXT}\n\n| arm | {' | '.join([*PARTS, 'sum', 'measured'])} |", "| --- |" + " --- |" * (len(PARTS) + 2)]
    for arm in (arm for arm in DELTAS if arm in ordered(records, "arm")):
        parts = change_parts(records, arm)
        whole = difference(*(sample_at(records, Point(name, "success", "id")) for name in (arm, "start")))
        if not parts or whole is None:
            continue
        sums = {seed: sum(part[seed] for part in parts.values()) for seed in parts[next(iter(parts))]}
        cells = [estimate(Sample(part)) for part in [*parts.values(), sums]]
        shown = [interval(e, "rate", difference=True) if e else NOT_AVAILABLE for e in [*cells, whole]]
        lines.append(f"| {LABELS.get(arm, arm)} | {' | '.join(shown)} |")
    return "\n".join(lines)


def change_parts(records: list[Record], arm: str) -> dict[str, dict[int, float]]:
    """Part -> seed -> its share of the change, mean over levels.

    With p the probability of NoThinking, t and n the success of either mode, of the start t0 and n0, the change is
    p n + (1-p) t - t0 = p (n0 - t0) + (1-p) (t - t0) + p (n - n0) on each level.
    """

    def values(of: str, metric: str, level: int) -> dict[int, float]:
        return dict(sample_at(records, Point(of, metric, f"level{level}")).values)

    parts: dict[str, dict[int, float]] = {name: {} for name in PARTS}
    for level in chains.LEVELS:
        p, t, n = (values(arm, metric, level) for metric in ("nothink_p", "success_think", "success_nothink"))
        t0, n0 = (values("start", metric, level) for metric in ("success_think", "success_nothink"))
        for seed in sorted(p.keys() & t.keys() & n.keys() & t0.keys() & n0.keys()):
            costs = t0[seed] - n0[seed]
            cheap = costs < DELTAS[arm]
            for name, part in zip(PARTS, (
                -p[seed] * costs * cheap, -p[seed] * costs * (not cheap), (1 - p[seed]) * (t[seed] - t0[seed]),
                p[seed] * (n[seed] - n0[seed]),
            ), strict=True):  # fmt: skip
                parts[name][seed] = parts[name].get(seed, 0.0) + part / len(chains.LEVELS)
    return parts if parts[PARTS[0]] else {}


def bound_table(records: list[Record]) -> str:
    """Predicted and measured resting places of P(</think>)."""
    lines = ["| arm | trained on | bound | predicted | at the start | at the end |", "| --- |" + " --- |" * 5]
    for arm, (_, _, end) in BOUNDED.items():
        split = BOUND_SPLITS[end]
        begin = estimate(sample_at(records, Point(arm, "nothink_p", split, 0)), rate=True)
        shown = [interval(e, "rate") if e else NOT_AVAILABLE for e in (begin, found(records, arm, "nothink_p", split))]
        lines.append(
            f"| {LABELS.get(arm, arm)} | {LEVELS[split]} | {end} | {number(predicted(arm), 'rate')} | {' | '.join(shown)} |"
        )
    return "\n".join([*lines, "", BOUNDS_TEXT])


PARTS = ("skipping where it costs less than delta", "skipping elsewhere", "better thinking", "better NoThinking")
CHANGE_TEXT = """\
Success less the start's, on the trained levels. On each level an answer skips thinking with probability p; the start then
loses what NoThinking costs it there, which delta pays for where that is less than delta (first column) and does not
elsewhere (second); the rest is what training made of either mode. Costs are those of the start on the test tasks."""
BOUNDS_TEXT = """\
P(NoThinking). With one update per batch, all ratios are 1 but that of the first token. Below `0.5 * 0.8^T` a NoThinking answer
of T tokens with a negative advantage is clipped away and one with a positive advantage is not, so the share rises whatever
NoThinking is worth; above `0.5 * 1.2^T` it is the other way round (T = 1 for one ratio per token). The floor arms train on the
longest chains alone with a bonus of 0.1, the ceiling arms on single steps alone with one of 0.5, all from a start that skips
thinking in some 30 % of its answers."""
HISTORY = """\
The chapter's figures are those of one run at step 300 of 3,140 planned ones: MATH500 81.0 to 81.8 % accuracy and 4,911 to
1,577 tokens, GSM8K 79.7 to 81.9 % and 1,025 to 477, AIME (mean of 16) 31.5 to 31.0 % and 12,120 to 6,402; NoThinking shares
83.80, 84.15 and 56.25 %. It reached step 300 after 28.4 hours on eight H100 and crashed at step 410 after 36.9 hours; its
checkpoint was not released. For the same model the paper reports -50.9 % length and +4.1 points of accuracy on GSM8K, -63.5 %
and +1.4 on MATH500, -44.7 % and +1.6 on AIME24. In an independent evaluation (DLER paper) the MATH accuracy falls from 84.31 to
82.26 %. Users of the unmodified script report a share of 0.0 after 50 to 60 steps (issues 5 and 6 of THU-KEG/AdaptThink),
without a cause."""
