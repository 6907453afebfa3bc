"""Attacks the grader of prompt distillation: `python -m experiments.exp_7_08_prompt_distillation.audit`.

Must score: the gold answer to texts of several seeds, with its thinking and bare. Must not score: every other label, and a
corpus of exploits (two labels, a label outside the list, text around it, a label inside the thinking alone, broken tags).
Everything goes through the environment's reset and step. Training, validation and test texts must not overlap.
Prints what was tried, lists each hole, and exits 1 if there is one.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from common.statistics import overlaps
from common.verifiers.thinking import END_THINK, THINK
from experiments.exp_7_08_prompt_distillation import data, rules
from experiments.exp_7_08_prompt_distillation.env import PromptedLabels
from experiments.exp_7_08_prompt_distillation.rules import Table, Text

SEEDS = range(100, 103)
TEXTS = 200  # of each seed
EXPLOIT_TEXTS = 20
MAX_SECONDS_PER_CASE = 0.5


class Case(NamedTuple):
    group: str
    prompt: str
    gold: str
    text: str
    must_score: bool


def problems(seed: int, count: int) -> Iterator[tuple[Table, Text]]:
    """Texts of the test with their table."""
    for text in data.texts(seed, "test", count):
        yield data.world(seed), text


def answers(table: Table, text: Text) -> Iterator[Case]:
    """The gold answer in each form, and the same forms around every other label."""
    gold, prompt = rules.decide(table, text)[0], rules.prompt(text, table, think=True)
    thought = "".join(rules.answer_pieces(table, text, think=True)[:-1])
    for label in rules.LABELS:
        for group, answer in {"bare": label, "thinking": thought + label, "empty thinking": f"{THINK}{END_THINK}{label}",
                              "white space": f"\n {label} \n"}.items():  # fmt: skip
            yield Case(group if label == gold else f"{group}, another label", prompt, gold, answer, label == gold)


def exploits(table: Table, text: Text) -> Iterator[Case]:
    """Answers that hold the gold label and are no answer."""
    gold, prompt = rules.decide(table, text)[0], rules.prompt(text, table, think=True)
    other = next(label for label in rules.LABELS if label != gold)
    thought = "".join(rules.rule(word, table.rules[word]) for word in text.words)
    groups = {
        "several labels": [f"{gold} {other}", f"{other} {gold}", f"{gold},{other}", f"{gold}\n{gold}", f"{gold}{gold}",
                           " ".join(rules.LABELS), f"{gold} or {other}", f"{gold}/{other}"],
        "not in the list": ["", " ", "xx", gold.upper(), gold.title(), f"{gold}!", f"{gold},", f"= {gold}", gold[:1],
                            f"{gold}\x00",
                            "".join(chr(ord(letter) + 0xFEE0) for letter in gold), f"\u200b{gold}", f'"{gold}"', f"`{gold}`"],
        "text around it": [f"{gold}.", f"The label is {gold}", f"{gold} because of the mark", f"Final Answer: {gold}",
                           f"{gold}\nText: {' '.join(text.words)}", f"\\boxed{{{gold}}}", f"{gold}</s>", f"{gold}<eos>"],
        "label inside the thinking": [f"{THINK}{gold}", f"{THINK}{gold}{END_THINK}", f"{THINK}{thought}{gold}{END_THINK}\n",
                                      f"{THINK}{gold}{END_THINK}{other}", f"{gold}{END_THINK}", f"{THINK}{thought} {gold}"],
        "broken tags": [f"{THINK}{END_THINK}{THINK}{END_THINK}{gold}", f"{THINK}{THINK}{END_THINK}{gold}", f"{END_THINK}{gold}",
                        f"{gold}{THINK}{END_THINK}", f"{THINK}{END_THINK}{END_THINK}{gold}", f"{gold}{END_THINK}{gold}",
                        f"{other}{THINK}{END_THINK}{gold}", f"<THINK>{END_THINK}{gold}", f"<think >{END_THINK}{gold}"],
        "the prompt again": [prompt, f"{prompt}{gold}", ''.join(rules.table_pieces(table)), thought, f"{thought}{gold}"],
        "oversized": [f"{gold} " * 20_000, THINK * 5_000 + gold, (THINK + END_THINK) * 5_000 + gold, "x" * 1_000_000 + gold],
    }  # fmt: skip
    for group, texts in groups.items():
        for answer in texts:
            yield Case(group, prompt, gold, answer, must_score=False)


def all_cases() -> Iterator[Case]:
    """Every case, seed by seed."""
    for seed in SEEDS:
        for index, (table, text) in enumerate(problems(seed, TEXTS)):
            yield from answers(table, text)
            if index < EXPLOIT_TEXTS:
                yield from exploits(table, text)


def audit(cases: Iterator[Case]) -> tuple[Counter, list[str]]:
    """(how many of each group were tried, one line per hole)."""
    tried, holes, env = Counter[str](), list[str](), PromptedLabels()
    for case in cases:
        env.reset(options={"prompt": case.prompt, "gold": case.gold})
        start = time.perf_counter()
        _, reward, terminated, _, info = env.step(case.text)
        spent = time.perf_counter() - start
        tried[case.group] += 1
        if reward != float(case.must_score) or info["success"] != case.must_score or not terminated:
            holes.append(f"{case.group}: {case.text[:80]!r} for gold {case.gold} has reward {reward}: {info['reason']}")
        elif spent > MAX_SECONDS_PER_CASE:
            holes.append(f"{case.group}: {case.text[:80]!r} took {spent:.2f} s")
    return tried, holes


def audit_splits() -> tuple[Counter, list[str]]:
    """The roles' texts must not overlap, whatever the order of their words."""
    tried, holes = Counter[str](), list[str]()
    for seed in SEEDS:
        roles = {role: [tuple(sorted(text.words)) for text in data.texts(seed, role, 500)] for role in rules.ROLES}
        tried["texts of four roles compared"] += sum(map(len, roles.values()))
        holes += [f"seed {seed}: {a} and {b} share {n} texts" for (a, b), n in overlaps(roles).items() if n]
    return tried, holes


def main() -> int:
    """Runs everything and prints it; the exit status."""
    start = time.perf_counter()
    tried, holes = audit(all_cases())
    more, shared = audit_splits()
    for group, count in (tried + more).items():
        print(f"{count:7,}  {group}")
    for hole in [*holes, *shared]:
        print(f"HOLE {hole}")
    print(f"{len(holes) + len(shared)} holes, {time.perf_counter() - start:.0f} s")
    return 1 if holes or shared else 0


if __name__ == "__main__":
    sys.exit(main())
