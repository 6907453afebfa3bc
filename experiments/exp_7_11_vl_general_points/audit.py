"""Attacks the image variant before it is used: `python -m experiments.exp_7_11_vl_general_points.audit`.

The formula's grader is that of 7-11, whose own audit attacks it. Here: the picture must show what is graded and the text
must not name it; gold answers must score and misread ones must not, with and without the recognition penalty; the card
list is attacked where it decides; looks and splits must not leak. Prints what was tried, lists each hole, and exits 1 if
there is one.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np

from common.cards import grading, hands, prompts
from experiments.exp_7_11_vl_general_points import data, drawing
from experiments.exp_7_11_vl_general_points.env import VisualGeneralPoints

RULES = (hands.TRAINING_RULE, hands.TEST_RULE)
SWITCHES: tuple[tuple[str, ...], ...] = ((), ("cards_first",))
SPLIT_SEEDS = range(20)
MISREAD = grading.POINTS["lists"]


class Case(NamedTuple):
    """An answer to a task; ``reward`` with the recognition penalty off and on, None where it is not said."""

    group: str
    task: dict[str, Any]
    text: str
    reward: tuple[float | None, float | None]


def tasks(every: int) -> Iterator[tuple[dict[str, Any], tuple[int, ...]]]:
    """(task, numbers) of every n-th solvable hand under both rules, looks in turn."""
    for rule in RULES:
        solvable = [hand for hand in hands.all_hands() if hands.solvable(hand, rule)]
        for index, hand in enumerate(solvable[::every]):
            look = ("black", "red")[index % 2]
            (task,) = data.evaluation_tasks((hand,), rule, look, index, 1)
            yield task, hands.card_values(task["cards"], rule)


def reply(task: dict[str, Any], values: Sequence[int], formula: str, **changes: object) -> str:
    """A well-formed answer with this formula and true lists, unless changed."""
    fields = {"cards": task["cards"], "number": list(values), "formula": formula}
    return json.dumps(fields | changes)


def cases(task: dict[str, Any], values: tuple[int, ...]) -> Iterator[Case]:
    """Gold answers, misread cards and attacks on the card list."""
    cards, right = task["cards"], grading.POINTS["correct"]
    solutions = hands.solve(values)
    formula = solutions[0].formula
    for solution in solutions[:3]:
        text = prompts.answer(cards, values, solution.steps, hands.TARGET)
        yield Case("gold: solution with trace", task, text, (right, right))
    yield Case("gold: numbers not stated", task, reply(task, values, formula, number=[]), (right, right))
    for place in range(4):
        other = "A" if cards[place] != "A" else "2"
        wrong = [*cards[:place], other, *cards[place + 1 :]]
        yield Case("misread: one card", task, reply(task, values, formula, cards=wrong), (right, MISREAD))
        seen = hands.card_values(wrong, task["face_values"])
        theirs = hands.solve(seen)
        if theirs and sorted(seen) != sorted(values):
            text = prompts.answer(wrong, seen, theirs[0].steps, hands.TARGET)
            yield Case("misread: solved for the cards it read", task, text, (grading.POINTS["number"], MISREAD))
    turned = cards[1:] + cards[:1]
    if turned != cards:
        yield Case("misread: other order", task, reply(task, values, formula, cards=turned), (right, MISREAD))
    for listed in ([], cards[:3], [*cards, cards[0]], [card.lower() + " " for card in cards], [f"{cards[0]}S", *cards[1:]]):
        yield Case("attack: list of another shape", task, reply(task, values, formula, cards=listed), (right, MISREAD))
    for listed in ([[*cards]], ",".join(cards), None, {"0": cards[0]}, [True] * 4):
        yield Case("attack: list of another type", task, reply(task, values, formula, cards=listed), (None, None))
    yield Case("attack: cards without a formula", task, reply(task, values, ""), (-3.0, -3.0))
    yield Case("attack: target without the cards", task, reply(task, values, "12+12"), (-2.0, -2.0))
    yield Case("attack: the image token", task, reply(task, values, formula, cards=["<image>"] * 4), (right, MISREAD))


def audit(every: int) -> tuple[Counter, list[str]]:
    """(cases by group, one line per hole): each case under both switches, and each task's picture and text."""
    tried: Counter = Counter()
    holes: list[str] = []
    envs = [VisualGeneralPoints(switches=switches) for switches in SWITCHES]
    for task, values in tasks(every):
        observation, _ = envs[0].reset(options=task)
        shown = [f'"{card}"' for card in task["cards"]]
        tried["observation: the text names no card"] += 1
        if any(card in observation["text"] for card in shown):
            holes.append(f"the text names a card of {task}")
        other = {**task, "cards": task["cards"][1:] + task["cards"][:1]}
        tried["observation: the picture depends on the cards"] += 1
        if other["cards"] != task["cards"] and np.array_equal(envs[1].reset(options=other)[0]["image"], observation["image"]):
            holes.append(f"the picture of {task} does not depend on its cards")
        for case, (place, env) in product(cases(task, values), enumerate(envs)):
            tried[case.group] += 1
            env.reset(options=task)
            feedback, reward, _, _, info = env.step(case.text)
            wanted = case.reward[place]
            fair = reward < 0 if wanted is None else reward == wanted
            if not fair or info["success"] != (reward == grading.POINTS["correct"]) or feedback["text"]:
                holes.append(f"{case.group}: {case.text[:120]!r} -> {reward}, {info['reason']} (switches {SWITCHES[place]})")
    return tried, holes


def audit_looks(seeds: Sequence[int]) -> tuple[Counter, list[str]]:
    """No red pixel in training pictures; uses of a split share no problem under either rule; tasks keep to their use."""
    tried: Counter = Counter()
    holes: list[str] = []
    for seed in seeds:
        split = hands.splits(seed)
        uses = {
            "train": split.train,
            "validation": split.validation_id + split.validation_ood,
            "test": split.test_id + split.test_ood,
        }
        for rule, (one, other) in product(RULES, combinations(uses, 2)):
            tried["split: two uses under one rule"] += 1
            if shared := hands.overlap(uses[one], uses[other], rule):
                holes.append(f"split {seed}: {one} and {other} share {shared} problems under {rule}")
        for task in data.training_tasks(split.train, seed, 0, 64):
            tried["look: a training picture"] += 1
            inks = drawing.in_their_ink(tuple(task["suits"]))
            image = drawing.draw(tuple(task["cards"]), tuple(task["suits"]), inks, task["drawing"])
            if set(task["suits"]) & {"H", "D"} or is_red(image):
                holes.append(f"split {seed}: a training picture shows red suits: {task}")
    return tried, holes


def is_red(image: np.ndarray) -> bool:
    """Whether some pixel's red stands clearly above its green and blue, as in red ink and neither in table nor in paper."""
    parts = image.astype(int)
    return bool((parts[..., 0] > parts[..., 1:].max(-1) + 60).any())


def main(every: int = 5) -> int:
    started = time.perf_counter()
    tried, holes = audit(every)
    looked, leaks = audit_looks(SPLIT_SEEDS)
    tried, holes = tried + looked, holes + leaks
    for group, count in sorted(tried.items()):
        print(f"{count:8,d}  {group}")
    print(f"{tried.total():8,d}  cases in {time.perf_counter() - started:.1f} s, {len(holes)} holes")
    for hole in holes[:20]:
        print(f"HOLE {hole}")
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main())
