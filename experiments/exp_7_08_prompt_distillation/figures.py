"""The figures and tables of prompt distillation, from records alone."""

from __future__ import annotations

from pathlib import Path

from common.claims import load_claims
from common.records import Point, Record, ordered, sample_at
from common.report.figures import bars
from common.report.tables import Table
from common.report.text import NOT_AVAILABLE, interval
from common.statistics import difference, estimate
from experiments.exp_7_08_prompt_distillation import rules

CLAIMS = load_claims(Path(__file__).with_name("claims.yaml"))
LABELS = CLAIMS.labels


def figures(records: list[Record], folder: Path) -> list[str]:
    """Accuracy, fidelity, the long tail, inherited errors, changed rules, tokens and time."""
    arms = ordered(records, "arm")

    def draw(split: str, metric: str, name: str, title: str, chosen: list[str] | None = None) -> list[str]:
        """One bar per arm that has a value."""
        some = [arm for arm in chosen or arms if sample_at(records, Point(arm, metric, split)).values]
        unit = CLAIMS.metric(metric).unit
        return (
            [bars(records, split, metric, some, folder / f"{name}.svg", title=title, labels=LABELS, unit=unit)] if some else []
        )

    names = draw("test", "success", "success", "Accuracy on new texts: the gold label is given")
    names += draw("test", "fidelity", "fidelity", "Fidelity on new texts: the teacher's label is given")
    names += draw("trained", "fidelity", "fidelity-trained", "Fidelity on the very texts a student was trained on")
    names += draw("tail", "success", "success-tail", "Accuracy on texts with a rare word")
    names += draw("teacher_wrong", "success", "success-teacher-wrong", "Accuracy on texts that the teacher gets wrong")
    names += draw("test", "inherited", "inherited", "Share of an arm's errors that the teacher makes too")
    names += draw("affected", "success", "affected", "After the rules changed: accuracy on texts with another gold label")
    names += draw("test", "tokens_in", "tokens-in", "Tokens of the prompt")
    names += draw("test", "tokens_out", "tokens-out", "Tokens written for an answer")
    names += draw("test", "time/speedup_one", "speedup-one", "Times as fast as the teacher, one text at a time")
    return names + draw("test", "time/speedup_batch", "speedup-batch", "Times as fast as the teacher, in a batch")


def sections(records: list[Record]) -> dict[str, str]:
    """Heading -> Markdown: what is inherited, accuracy by rule and by label, cost per answer."""
    arms = ordered(records, "arm")
    return {
        "Errors, and how many of them the teacher makes too": inherited_table(records, arms),
        "Accuracy by the rule that decides": part_table(records, arms, "kind", rules.KINDS),
        "Accuracy by gold label": part_table(records, arms, "label", rules.LABELS),
        "Cost of an answer": cost_table(records, arms),
    }


def shown(records: list[Record], arm: str, metric: str, split: str) -> str:
    """A number with its interval."""
    found = estimate(sample_at(records, Point(arm, metric, split)), rate=CLAIMS.metric(metric).unit == "rate")
    return interval(found, CLAIMS.metric(metric).unit) if found else NOT_AVAILABLE


def inherited_table(records: list[Record], arms: list[str]) -> str:
    """One row per arm and part of the test: how its errors meet the teacher's."""
    header = ("arm", "texts", "accuracy", "errors the teacher makes too", "by chance", "above chance", "with the same label")
    rows = []
    for arm in arms:
        for split, name in (("test", "all"), ("tail", "with a rare word")):
            both = [sample_at(records, Point(arm, metric, split)) for metric in ("inherited", "inherited_chance")]
            if not both[0].values or arm == "teacher":
                continue
            gap = difference(both[0], both[1], rate=True)
            cells = [shown(records, arm, metric, split) for metric in ("success", "inherited", "inherited_chance")]
            above = interval(gap, "rate", difference=True) if gap else NOT_AVAILABLE
            rows.append((LABELS.get(arm, arm), name, *cells, above, shown(records, arm, "inherited_same", split)))
    return Table(header, rows).markdown


def part_table(records: list[Record], arms: list[str], part: str, names: tuple[str, ...]) -> str:
    """Accuracy of every arm on each part of the test: means over seeds."""
    rows = []
    for arm in arms:
        found = [estimate(sample_at(records, Point(arm, "success", f"{part}/{name}"))) for name in names]
        if any(found):
            cells = [f"{100 * one.mean:.0f} %" if one else NOT_AVAILABLE for one in found]
            rows.append((LABELS.get(arm, arm), *cells))
    return Table(("arm", *names), rows).markdown


def cost_table(records: list[Record], arms: list[str]) -> str:
    """Tokens and, where measured, milliseconds per answer and their ratio to the teacher's."""
    header = (
        "arm", "prompt tokens", "written tokens", "times fewer tokens than the teacher", "ms, one at a time", "teacher's ms",
        "times as fast", "ms, in a batch", "teacher's ms", "times as fast",
    )  # fmt: skip
    rows = []
    for arm in arms:
        counts = [shown(records, arm, metric, "test") for metric in ("tokens_in", "tokens_out", "tokens_ratio")]
        row = [LABELS.get(arm, arm), *counts]
        for how in ("one", "batch"):
            for side in ("own", "teacher"):
                found = estimate(sample_at(records, Point(arm, f"time/{side}_{how}", "test")))
                row.append(f"{1000 * found.mean:.3g}" if found else "")
            ratio = sample_at(records, Point(arm, f"time/speedup_{how}", "test"))
            row.append(shown(records, arm, f"time/speedup_{how}", "test") if ratio.values else "")
        rows.append(row)
    return Table(header, rows).markdown
