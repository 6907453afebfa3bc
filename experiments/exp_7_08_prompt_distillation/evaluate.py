"""What is measured: accuracy apart from fidelity to the teacher, inherited errors, tokens, and time on the clock.

Splits: ``test`` (new texts; validation texts for seeds below 100), ``trained`` (the student's own training texts),
``changed`` (the test's texts under the changed rules), and parts of the test: ``tail`` (with a rare word), ``affected``
(the change of rules gave them another gold label), ``teacher_wrong``, ``kind/...`` and ``label/...``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.runlog import RunLog
from common.seeding import rng
from experiments.exp_7_08_prompt_distillation import rules
from experiments.exp_7_08_prompt_distillation.ask import Mode, Reply, ask, complete
from experiments.exp_7_08_prompt_distillation.settings import EvaluationConfig, SamplingConfig
from experiments.exp_7_08_prompt_distillation.source import Item, Source

ROLLOUTS = 20  # kept of each split, spread over its texts


class Evaluator:
    """Writes the records of a cell: `evaluate(split, items, replies, teacher)` for each split it was asked about."""

    def __init__(self, log: RunLog, config: EvaluationConfig) -> None:
        self.log, self.config = log, config

    def record(self, split: str, metric: str, values: Sequence[float]) -> None:
        """The mean as a final record; undefined over nothing."""
        value = sum(values) / len(values) if values else None
        reason = None if values else f"no text in {split}"
        self.log.record(split=split, metric=metric, value=value, n=len(values), step=100, final=True, reason=reason)

    def split(self, split: str, items: Sequence[Item], replies: Sequence[Reply], teacher: Sequence[Reply]) -> None:
        """Accuracy, fidelity, answers without a label, and tokens, on one split."""
        if all(item.gold is not None for item in items):
            self.record(split, "success", [float(reply.success) for reply in replies])
        self.record(split, "fidelity", agreement(replies, teacher))
        self.record(split, "no_label", [float(reply.label is None) for reply in replies])
        self.record(split, "tokens_in", [float(reply.tokens_in) for reply in replies])
        self.record(split, "tokens_out", [float(reply.tokens_out) for reply in replies])
        theirs = sum(reply.tokens_in for reply in teacher) / max(1, len(teacher))
        self.record(split, "tokens_saved", [1 - reply.tokens_in / theirs for reply in replies] if theirs else [])
        own, told = (sum(reply.tokens for reply in some) for some in (replies, teacher))
        self.log.record(
            split=split, metric="tokens_ratio", value=told / own if own else None, n=len(replies), step=100, final=True,
            reason=None if own else "no token was counted",
        )  # fmt: skip

    def parts(self, items: Sequence[Item], replies: Sequence[Reply], teacher: Sequence[Reply], seed: int) -> None:
        """The test in parts: rare words, rules, labels, what the teacher gets wrong, and what of that is inherited."""
        if any(item.gold is None for item in items):
            return
        success = [float(reply.success) for reply in replies]
        groups = {"tail": [item.tail for item in items], "common": [not item.tail for item in items]}
        groups |= {f"kind/{kind}": [item.kind == kind for item in items] for kind in rules.KINDS}
        groups |= {f"label/{label}": [item.gold == label for item in items] for label in rules.LABELS}
        wrong = [not reply.success for reply in teacher]
        groups |= {"teacher_wrong": wrong, "teacher_right": [not flag for flag in wrong]}
        for split, chosen in groups.items():
            self.record(split, "success", [value for value, flag in zip(success, chosen, strict=True) if flag])
        same = agreement(replies, teacher)
        for split in ("tail", "common", "teacher_wrong"):
            self.record(split, "fidelity", [value for value, flag in zip(same, groups[split], strict=True) if flag])
        strata = [f"{item.kind} {item.tail}" for item in items]
        for split, chosen in {"test": [True] * len(items), "tail": groups["tail"]}.items():
            rows = [row for row, flag in zip(zip(replies, teacher, strata, strict=True), chosen, strict=True) if flag]
            found = (
                inheritance(*(list(part) for part in zip(*rows, strict=True)), self.config.permutations, seed) if rows else {}
            )
            for metric, value in found.items():
                errors = sum(not row[0].success for row in rows)
                reason = None if value is not None else "no error to look at"
                self.log.record(split=split, metric=metric, value=value, n=errors, step=100, final=True, reason=reason)

    def keep_rollouts(self, split: str, source: Source, mode: Mode, items: Sequence[Item], replies: Sequence[Reply]) -> None:
        """Some answers to read, spread over the split; errors of a label count as surprising."""
        for i in range(0, len(items), max(1, len(items) // ROLLOUTS)):
            reply = replies[i]
            row = {"split": split, "prompt": source.prompt(items[i], *mode), "segments": [{"text": reply.text, "mask": 1}]}
            row |= {"reward": float(reply.success), "reason": reply.reason, "success": reply.success, "parts": {}}
            self.log.rollouts([{**row, "surprise": float(reply.kind == "wrong")}])


def agrees(reply: Reply, teacher: Reply) -> bool:
    """Both gave a label, and the same one."""
    return reply.label is not None and reply.label == teacher.label


def agreement(replies: Sequence[Reply], teacher: Sequence[Reply]) -> list[float]:
    """1.0 for each text on which they agree."""
    return [float(agrees(*pair)) for pair in zip(replies, teacher, strict=True)]


def inheritance(
    replies: Sequence[Reply], teacher: Sequence[Reply], strata: Sequence[str], permutations: int, seed: int
) -> dict[str, float | None]:
    """How much of a student's errors is the teacher's too, against what chance would give.

    ``inherited``: share of the student's errors on texts that the teacher gets wrong too. ``inherited_same``: the same with
    the teacher's very label. ``inherited_chance``: mean of ``inherited`` over permutations of the teacher's right and
    wrong among texts of the same stratum (rule and rarity), so that errors that meet only because some texts are hard for
    both do not count. ``inherited_p``: share of permutations that reach ``inherited``, one of them counted as observed
    (Phipson and Smyth 2010). All None without an error of the student.
    """
    wrong_N = np.array([not reply.success for reply in replies])
    theirs_N = np.array([not reply.success for reply in teacher])
    names = ("inherited", "inherited_same", "inherited_chance", "inherited_p")
    if not wrong_N.any():
        return dict.fromkeys(names)
    same_N = np.array(agreement(replies, teacher)) == 1
    both = int((wrong_N & theirs_N).sum())
    stream, counts = rng(seed, "permutations"), np.zeros(permutations)
    for stratum in sorted(set(strata)):
        inside_N = np.array([name == stratum for name in strata])
        ours, total, hits = int(wrong_N[inside_N].sum()), int(inside_N.sum()), int(theirs_N[inside_N].sum())
        # A permutation inside a stratum hits its `ours` errors as a hypergeometric draw does.
        counts += stream.hypergeometric(hits, total - hits, ours, size=permutations) if ours else 0
    errors = int(wrong_N.sum())
    values = (
        both / errors,
        float((wrong_N & theirs_N & same_N).sum() / errors),
        float(counts.mean() / errors),
        float((1 + (counts >= both).sum()) / (1 + permutations)),
    )
    return dict(zip(names, values, strict=True))


def time_pair(
    sides: dict[str, tuple[Any, Any, Source, Mode]], items: Sequence[Item], sampling: SamplingConfig, config: EvaluationConfig
) -> dict[str, float]:
    """Seconds per answer of each side at batch 1 (``<side>_one``) and in a batch (``<side>_batch``).

    sides: name -> (model, tokenizer, source, mode). They take turns, so that a slow spell of the machine hits all; of
    `repeats` rounds the fastest counts, and of single answers their mean within a round. Encoding the prompt is not timed.
    """
    prompts = {
        name: [source.encoder(tokenizer)(item, *mode) for item in items] for name, (_, tokenizer, source, mode) in sides.items()
    }
    best: dict[str, float] = {}
    for _ in range(config.repeats + 1):  # the first round warms up
        for name, (model, tokenizer, _, _) in sides.items():

            def seconds(chosen: list[list[int]], model: Any = model, tokenizer: Any = tokenizer) -> float:
                start = time.perf_counter()
                complete(model, tokenizer, chosen, sampling, 0, "time")
                return time.perf_counter() - start

            single, batch = prompts[name][: config.timed], prompts[name][: config.timed_batch]
            one = sum(seconds([prompt]) for prompt in single) / len(single)
            for key, value in {f"{name}_one": one, f"{name}_batch": seconds(batch) / len(batch)}.items():
                best[key] = min(best.get(key, value), value)
    return best


def judge(
    model: Any,
    tokenizer: Any,
    source: Source,
    mode: Mode,
    items: Sequence[Item],
    sampling: SamplingConfig,
    seed: int,
    split: str,
) -> list[Reply]:
    """Replies to a split; every arm of a seed sees the same texts and random numbers."""
    return ask(model, tokenizer, source, items, mode, sampling, seed, "evaluation", split)
