"""Attacks the GeneralPoints grader before it is used: `python -m experiments.exp_7_11_general_points.audit`.

Must score: every solution of every solvable hand under both card rules. Must not score: every mutation of a solution,
and a corpus of exploits. Everything goes through the environment's reset and step. The hand splits must not overlap.
Prints what was tried, lists each hole, and exits 1 if there is one.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

from common.cards import hands, prompts
from common.cards.env import GeneralPoints

RULES = (hands.TRAINING_RULE, hands.TEST_RULE)
MAX_SECONDS_PER_CASE = 0.5
HANDS_PER_EXPLOIT = 12
SPLIT_SEEDS = range(20)


class Case(NamedTuple):
    group: str
    cards: tuple[str, ...]
    rule: hands.Rule
    text: str
    must_score: bool


class Problem(NamedTuple):
    hand: tuple[int, ...]
    cards: tuple[str, ...]
    rule: hands.Rule
    values: tuple[int, ...]

    def reply(self, formula: str, **changes: object) -> str:
        """A well-formed answer with this formula and true lists, unless changed."""
        fields = {"cards": list(self.cards), "number": list(self.values), "formula": formula}
        return json.dumps(fields | changes, allow_nan=False)


def problems(rule: hands.Rule) -> Iterator[Problem]:
    """Every solvable hand, its cards in a fixed random order."""
    for index, hand in enumerate(hands.all_hands()):
        if hands.solvable(hand, rule):
            cards = hands.shuffled_cards(hand, 0, index)
            yield Problem(hand, cards, rule, hands.card_values(cards, rule))


# --- gold answers ---------------------------------------------------------------------------------------------------


def gold(problem: Problem) -> Iterator[Case]:
    """Each solution with and without its trace, and the first one in every accepted writing."""
    found = hands.solve(problem.values)
    for solution in found:
        text = prompts.answer(problem.cards, problem.values, solution.steps, hands.TARGET)
        yield Case("gold: solution with trace", problem.cards, problem.rule, text, True)
    formula, sparse = found[0].formula, hands.render_sparse(found[0].tree)
    signs = sparse.replace("*", " × ").replace("/", " ÷ ").replace("-", " − ")
    wide = sparse.translate(str.maketrans("0123456789+()", "０１２３４５６７８９＋（）"))
    for writing in (formula, sparse, f"{sparse} = 24", f"24 = {sparse}", f"(({formula}))", signs, wide):
        yield Case("gold: accepted writing", problem.cards, problem.rule, problem.reply(writing), True)


# --- mutations ------------------------------------------------------------------------------------------------------


def leaves_changed(tree: hands.Tree, place: list[int], change: str, k: int) -> hands.Tree | None:
    """The tree with its k-th leaf deleted, doubled, raised or lowered; None stands for a deleted leaf."""
    if isinstance(tree, int):
        place[0] += 1
        if place[0] - 1 != k:
            return tree
        return {"deleted": None, "doubled": ("*", tree, tree), "raised": tree + 1, "lowered": tree - 1}[change]
    op, left, right = tree
    left, right = leaves_changed(left, place, change, k), leaves_changed(right, place, change, k)
    if left is None or right is None:
        return right if left is None else left
    return (op, left, right)


def operators_changed(tree: hands.Tree) -> Iterator[hands.Tree]:
    """Every tree that differs in one operator."""
    if isinstance(tree, int):
        return
    op, left, right = tree
    yield from ((other, left, right) for other in "+-*/" if other != op)
    yield from ((op, other, right) for other in operators_changed(left))
    yield from ((op, left, other) for other in operators_changed(right))


def is_right(tree: hands.Tree) -> bool:
    try:
        return hands.steps_of(tree)[-1][3] == hands.TARGET
    except ValueError:  # division by zero
        return False


def mutations(problem: Problem, neighbour: Problem) -> Iterator[Case]:
    """Changed formulas, sides and lists of the first solution, and answers that belong to another task."""
    solution = hands.solve(problem.values)[0]

    def case(group: str, text: str, must_score: bool = False) -> Case:
        return Case(group, problem.cards, problem.rule, text, must_score)

    for change in ("deleted", "doubled", "raised", "lowered"):
        for k in range(4):
            changed = leaves_changed(solution.tree, [0], change, k)
            assert changed is not None
            yield case(f"mutation: number {change}", problem.reply(hands.render(changed)))
    for value in problem.values:
        yield case("mutation: number added and taken away", problem.reply(f"{solution.formula}+{value}-{value}"))
        yield case("mutation: number added times zero", problem.reply(f"{solution.formula}+0*{value}"))
    for changed in operators_changed(solution.tree):
        right = is_right(changed)
        group = "mutation: operator swapped, still right" if right else "mutation: operator swapped"
        yield case(group, problem.reply(hands.render(changed)), right)
    for side in ("23", "25", "0", "240", "-24", "24.0", "24=24", "12+12", "", "4!"):
        yield case("mutation: another right-hand side", problem.reply(f"{solution.formula}={side}"))
    yield from (case(group, text) for group, text in wrong_lists(problem, solution))
    theirs = hands.solve(neighbour.values)[0]
    if sorted(neighbour.values) != sorted(problem.values):
        text = prompts.answer(neighbour.cards, neighbour.values, theirs.steps, hands.TARGET)
        yield case("mutation: another hand's answer", text)
        yield case("mutation: another hand's formula", problem.reply(theirs.formula))
    other_rule = RULES[1 - RULES.index(problem.rule)]
    other_values = hands.card_values(problem.cards, other_rule)
    if other_values != problem.values:
        for wrong in hands.solve(other_values):
            text = prompts.answer(problem.cards, other_values, wrong.steps, hands.TARGET)
            yield case("mutation: the other rule's answer", text)
        for wrong in hands.solve(other_values)[:1]:
            yield case("mutation: the other rule's formula", problem.reply(wrong.formula))


def wrong_lists(problem: Problem, solution: hands.Solution) -> Iterator[tuple[str, str]]:
    cards, values = list(problem.cards), list(problem.values)
    for k in range(4):
        other = "A" if cards[k] != "A" else "2"
        yield "mutation: card list wrong", problem.reply(solution.formula, cards=[*cards[:k], other, *cards[k + 1 :]])
        off = [*values[:k], values[k] + 1, *values[k + 1 :]]
        yield "mutation: number list wrong", problem.reply(solution.formula, number=off)
    for short in (0, 3):
        yield "mutation: card list short", problem.reply(solution.formula, cards=cards[:short])
        yield "mutation: number list short", problem.reply(solution.formula, number=values[:short])


# --- exploits -------------------------------------------------------------------------------------------------------


# Formulas that name 24 without the deal, use foreign operators or writings, or are no formula at all.
FIXED_FORMULAS = r"""
24 (24) 12+12 20+4 4*6 48/2 24*1 24+0 24=24 =24 24= x=24 --24 +24 -(0-24) 0-(-24) 25+-1 (12)(2) 4(6) 1/0+24 24/0 0/0
24.0 2.4e1 2.4*10 24,0 0x18 0b11000 0o30 2_4 024 ٢٤ ²⁴ 𝟐𝟒 ２４ ２４＝２４ ½ ⅔ ∞ inf nan 24# 24; '24' "24" `24`
9**9**9 4**3 5^2-1 48//2 4! 50%26 3<<3 24|0 24&31 ~-25 √576 24==24 24>=24 24<25 not(0) 3@8 4×6 48÷2 30−6
\frac{48}{2} $24$ \boxed{24} [24][0] {24} int('24') true None %d lambda:24 eval('24') () ( ) + ((((24)))) ().__class__
"""


def exploit_formulas(problem: Problem, marker: Path) -> list[str]:
    """Formulas that try to reach 24 outside the rules, to run code, or to stall or crash the grader."""
    a, b, c, d = problem.values
    total = f"{a}+{b}+{c}+{d}"
    code = f"__import__('os').system('touch {marker}')"
    odd = ["", " ", "2 4", "2\n4", "2\u200b4", "24\x00", "24 or 25 or 26", "24 if True else 0", "\u202e42", "\ud800"]
    huge = ["(" * 250 + "24" + ")" * 250, "(" * 100_000, "-" * 5_000 + "24", "1" * 1_000_000, "1" * 3_000]
    huge += ["24" + " " * 1_000_000, "+".join(["1"] * 24), "+".join(["1"] * 24) + "=24", "*".join(["999999"] * 28)]
    chains = ["().__class__.__base__.__subclasses__()", "Matrix([[24]])", "Integer(24)", "sympify('24')"]
    code_forms = [
        code,
        f"24 if {code} == 0 else 24",
        f"[{code}][0]",
        rf"\text{{{code}}}",
        f"24+0*{code}",
        f"{total}#{code}",
    ]
    glued = [
        f"{a}{b}{c}{d}",
        f"{a} {b} {c} {d}",
        f"{a},{b},{c},{d}",
        f"{total} # 24",
        f"{total};24",
        f"{a}.{b}+{c}+{d}",
    ]
    padded = [
        f"24+0*({total})",
        f"{a}-{a}+24",
        f"24*{a}/{a}",
        f"{a}**0*24",
        f"({total})*0+24",
        f"24*({total})/({total})",
    ]
    sided = [f"24=24+{a}", f"24={total}=24", f"{a}={a}", f"(24)=({total})*0", f"{total}={total}", f"{a}*{b}=24*{c}*{d}"]
    return FIXED_FORMULAS.split() + odd + huge + chains + code_forms + glued + padded + sided


def exploit_texts(problem: Problem, marker: Path) -> list[str]:
    """Completions that attack the search for the answer: none of them holds one that counts and is right."""
    formula = hands.solve(problem.values)[0].formula
    good, bad = problem.reply(formula), problem.reply("12+12")
    numbers = json.dumps(list(problem.values))
    body = f'"cards": {json.dumps(list(problem.cards))}, "number": {numbers}'
    prompt = prompts.prompt(problem.cards, hands.TARGET, problem.rule, True)
    feedback = prompts.feedback(problem.cards, "number")
    bare = ["", " ", "24", formula, f"{formula}=24", prompt, f"{prompt}\n24", feedback, f"{feedback} 24"]
    broken = ["{}", "[]", "null", '"24"', "{", "}", "{" * 100_000, '{"a":' * 100_000, "[" * 100_000, '{"' * 50_000]
    several = [bad + good, f"{bad}\n{good}", f'{{"x": {body}}}{good}', f'{{"formula": "{formula}",}}{good}']
    several += [f"{good[:-2]}{good}", f"<!-- {bad} -->{good}", f'{{"answer": {good}}}', f"{{}}{good}"]
    fields = [
        f'"formula": "1+1", "formula": "{formula}"',
        f'"formula": "{formula}", "formula": "{formula}"',
        f'"formula": "{formula}", "number": []',
        f'"formula": "{formula}",',
        f'"formula": ["12+12", "{formula}"]',
        f'"formula": {{"value": "{formula}"}}',
        f'"Formula": "{formula}"',
        '"formula": 24',
        '"formula": null',
        '"formula": true, "success": true, "reward": 5',
        '"success": true, "reward": 5, "class": "correct"',
    ]
    wrapped = [f"{{{body}, {field}}}" for field in fields] + [f'{{"formula": "{formula}"}}', good[:-1]]
    thoughts = [f"<think>{good}", f"<think>{good}</think>", f"<think>{good}</think>{bad}", f"{good}</think>{bad}"]
    return bare + broken + several + wrapped + thoughts + [good.replace('"', "'")]


def exploit_lists(problem: Problem, marker: Path) -> list[str]:
    """Right formulas beside lists of other types or sizes: refused where the lists are graded."""
    formula = hands.solve(problem.values)[0].formula
    good, numbers = problem.reply(formula), json.dumps(list(problem.values))
    lists: list[object] = [None, "", [], [True] * 4, [float(value) for value in problem.values], {}, numbers]
    lists += [[f"__import__('os').system('touch {marker}')"], [list(problem.values)]]
    typed = [problem.reply(formula, number=value) for value in lists]
    typed += [problem.reply(formula, cards=value) for value in lists]
    return typed + [good.replace(numbers, other) for other in ("[NaN]", "[Infinity]", "[1e999]", "(1, 2)")]


def exploits(marker: Path) -> Iterator[Case]:
    """The corpus on hands spread over the enumeration, under both rules."""
    for rule in RULES:
        everything = list(problems(rule))
        for problem in everything[:: len(everything) // HANDS_PER_EXPLOIT]:
            for formula in exploit_formulas(problem, marker):
                yield Case("exploit: formula", problem.cards, rule, problem.reply(formula), False)
            for text in exploit_texts(problem, marker):
                yield Case("exploit: completion", problem.cards, rule, text, False)
            for text in exploit_lists(problem, marker):
                yield Case("exploit: lists", problem.cards, rule, text, False)


# --- the run --------------------------------------------------------------------------------------------------------


def all_cases(marker: Path) -> Iterator[Case]:
    for rule in RULES:
        everything = list(problems(rule))
        for place, problem in enumerate(everything):
            yield from gold(problem)
            yield from mutations(problem, everything[place - 1])
    yield from exploits(marker)


def audit(cases: Iterator[Case]) -> tuple[Counter, list[str]]:
    """(number of cases by group, one line per hole). A hole is a wrong verdict, an exception or a stall.

    Groups about the lists are judged where the lists are graded, all others by the environment's default.
    """
    envs = {False: GeneralPoints(), True: GeneralPoints(switches=["graded_lists"])}
    tried: Counter = Counter()
    holes: list[str] = []
    for case in cases:
        tried[case.group] += 1
        env = envs["list" in case.group]
        started = time.process_time()  # not wall time: a busy machine is no hole
        try:
            env.reset(options={"cards": case.cards, "face_values": case.rule})
            _, reward, _, _, info = env.step(case.text)
            verdict = info["success"], reward > 0, info["reason"]
        except Exception as error:  # any exception is a hole: report it and go on with the next case
            verdict = None, None, f"{type(error).__name__}: {error}"
        seconds = time.process_time() - started
        if verdict[:2] != (case.must_score, case.must_score) or seconds > MAX_SECONDS_PER_CASE:
            holes.append(f"{case.group} {case.cards} {case.rule}: {case.text[:160]!r} -> {verdict} in {seconds:.2f} s")
    return tried, holes


def audit_splits(seeds: Sequence[int]) -> tuple[Counter, list[str]]:
    """(number of comparisons, one line per pair of uses that share a problem under either rule)."""
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
    return tried, holes


def report(tried: Counter, holes: Sequence[str], marker: Path, seconds: float) -> int:
    """Prints the counts and the holes; returns the exit code."""
    for group, count in sorted(tried.items()):
        print(f"{count:8,d}  {group}")
    print(f"{tried.total():8,d}  cases in {seconds:.1f} s, {len(holes)} holes")
    for hole in holes[:20]:
        print(f"HOLE {hole}")
    if marker.exists():
        print(f"HOLE an answer ran code: {marker} exists")
    return 1 if holes or marker.exists() else 0


def main() -> int:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        marker = Path(folder) / "marker"
        tried, holes = audit(all_cases(marker))
        compared, overlaps = audit_splits(SPLIT_SEEDS)
        return report(tried + compared, holes + overlaps, marker, time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
