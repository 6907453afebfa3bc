"""Hands of the 24-points card game: enumeration, exact solver, card rules and leakage-free splits.

A *hand* is a sorted tuple of four ranks 1..13 (1 = ace, 11..13 = J, Q, K). A *rule* is the triple of numbers that
J, Q and K count as; an ace counts as 1 and the other cards as themselves. All arithmetic is exact.

Source of the game and of the two rules: Chu et al. 2025, "SFT Memorizes, RL Generalizes", section 4.1.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations_with_replacement, product
from math import factorial, prod

Number = int | Fraction
Tree = int | tuple  # a leaf, or (operator, left tree, right tree)
Step = tuple[Number, str, Number, Number]  # a, operator, b, result
Rule = tuple[int, int, int]

RANKS = ("A", "2", "3", "4", "5", "6", "7", "8", "9", "10", "J", "Q", "K")
SUITS = ("H", "S", "D", "C")
TRAINING_RULE: Rule = (10, 10, 10)
TEST_RULE: Rule = (11, 12, 13)
TARGET = 24
_RANK_OF = {name: rank for rank, name in enumerate(RANKS, start=1)}
# Share of the hands-with-a-ten groups that goes to test and to validation; the rest trains.
_TEST_SHARE, _VALIDATION_SHARE = 0.42, 0.11


def cards_of(hand: Sequence[int]) -> tuple[str, ...]:
    """Card names of ranks 1..13, in the given order."""
    return tuple(RANKS[rank - 1] for rank in hand)


def card_values(cards: Sequence[str], rule: Sequence[int]) -> tuple[int, ...]:
    """Numbers that the named cards count as under a rule, in the given order. Unknown names raise KeyError."""
    ranks = [_RANK_OF[card] for card in cards]
    return tuple(rank if rank <= 10 else rule[rank - 11] for rank in ranks)


def value_key(hand: Sequence[int], rule: Sequence[int]) -> tuple[int, ...]:
    """The multiset of numbers of a hand under a rule, as a sorted tuple: two hands with one key are one problem."""
    return tuple(sorted(card_values(cards_of(hand), rule)))


def has_face(hand: Sequence[int]) -> bool:
    return max(hand) > 10


@lru_cache(maxsize=1)
def all_hands() -> tuple[tuple[int, ...], ...]:
    """The 1,820 multisets of four ranks."""
    return tuple(combinations_with_replacement(range(1, 14), 4))


# --- solver ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Solution:
    """One way to the target. `plain`: every intermediate result is a non-negative integer."""

    tree: Tree
    steps: tuple[Step, Step, Step]
    plain: bool

    @property
    def formula(self) -> str:
        """Infix text, inner expressions in brackets, no right-hand side: `((4*3)+2)+10`."""
        return render(self.tree)


def render(tree: Tree, brackets: bool = False) -> str:
    """Infix text of a tree with every inner expression in brackets; the outermost has them only if asked."""
    if isinstance(tree, int):
        return str(tree)
    op, left, right = tree
    text = f"{render(left, True)}{op}{render(right, True)}"
    return f"({text})" if brackets else text


def render_sparse(tree: Tree) -> str:
    """Infix text of a tree with only the brackets that precedence demands."""
    return _sparse(tree)[0]


def _sparse(tree: Tree) -> tuple[str, int]:
    if isinstance(tree, int):
        return str(tree), 3
    op, left, right = tree
    level = 1 if op in "+-" else 2
    left_text, left_level = _sparse(left)
    right_text, right_level = _sparse(right)
    if left_level < level:
        left_text = f"({left_text})"
    if right_level < level or (right_level == level and op in "-/"):
        right_text = f"({right_text})"
    return f"{left_text}{op}{right_text}", level


def apply(a: Number, op: str, b: Number) -> Number | None:
    """Exact a op b, as an int where it is whole; None for a division by zero."""
    result: Number
    if op == "+":
        result = a + b
    elif op == "-":
        result = a - b
    elif op == "*":
        result = a * b
    elif b == 0:
        return None
    else:
        result = Fraction(a) / b
    return int(result) if result.denominator == 1 else result


def steps_of(tree: Tree) -> list[Step]:
    """The steps of a tree in writing order: left operand first, then right, then the joining step."""
    steps: list[Step] = []
    _walk(tree, steps)
    return steps


def _walk(tree: Tree, steps: list[Step]) -> Number:
    if isinstance(tree, int):
        return tree
    op, left, right = tree
    a, b = _walk(left, steps), _walk(right, steps)
    result = apply(a, op, b)
    if result is None:
        raise ValueError(f"division by zero in {render(tree)}")
    steps.append((a, op, b, result))
    return result


def orders(tree: Tree) -> Iterator[Tree]:
    """The tree with the operands of every + and * in both orders (equal trees once)."""
    if isinstance(tree, int):
        yield tree
        return
    op, left, right = tree
    for a, b in product(list(orders(left)), list(orders(right))):
        yield (op, a, b)
        if op in "+*" and a != b:
            yield (op, b, a)


def _join(op: str, x: Number, left: Tree, y: Number, right: Tree) -> Tree:
    # One canonical order for + and *, so that a+b and b+a count once: larger value first, ties by text.
    if op in "+*" and (y > x or (y == x and render(right) > render(left))):
        left, right = right, left
    return (op, left, right)


def _reach(first: dict[Number, dict], second: dict[Number, dict], into: dict[Number, dict]) -> None:
    for x, lefts in first.items():
        for y, rights in second.items():
            options = [("+", x, lefts, y, rights), ("*", x, lefts, y, rights), ("-", x, lefts, y, rights)]
            options += [("-", y, rights, x, lefts), ("/", x, lefts, y, rights), ("/", y, rights, x, lefts)]
            for op, a, trees_a, b, trees_b in options:
                result = apply(a, op, b)
                if result is not None:
                    trees = into.setdefault(result, {})
                    for tree_a, tree_b in product(trees_a, trees_b):
                        trees[_join(op, a, tree_a, b, tree_b)] = None


@lru_cache(maxsize=4096)
def _reachable(values: tuple[int, ...]) -> dict[Number, dict]:
    """value -> trees (an ordered set) over one to three numbers; values is sorted."""
    if len(values) == 1:
        return {values[0]: {values[0]: None}}
    table: dict[Number, dict] = {}
    singles = range(1) if len(values) == 2 else range(len(values))
    for i in singles:
        _reach(_reachable((values[i],)), _reachable(values[:i] + values[i + 1 :]), table)
    return table


def _meet(first: dict[Number, dict], second: dict[Number, dict], target: int) -> dict[Tree, None]:
    """Trees of value target that join one tree of each table: the partner's value is looked up, not searched."""
    found: dict[Tree, None] = {}
    for x, lefts in first.items():
        wanted = [("+", target - x, False), ("-", x - target, False), ("-", x + target, True)]
        if x != 0:
            wanted += [("*", Fraction(target) / x, False), ("/", Fraction(x) / target, False), ("/", x * target, True)]
        for op, y, swapped in wanted:
            for left, right in product(lefts, second.get(y, ())):
                if swapped:
                    found[_join(op, y, right, x, left)] = None
                else:
                    found[_join(op, x, left, y, right)] = None
    return found


@lru_cache(maxsize=8192)
def _solve_sorted(values: tuple[int, ...], target: int) -> tuple[Solution, ...]:
    found: dict[Tree, None] = {}
    for i in range(4):
        found |= _meet(_reachable((values[i],)), _reachable(values[:i] + values[i + 1 :]), target)
    for j in (1, 2, 3):
        pair = (values[0], values[j])
        rest = tuple(values[k] for k in (1, 2, 3) if k != j)
        found |= _meet(_reachable(pair), _reachable(rest), target)
    ranked = []
    for tree in found:
        steps = steps_of(tree)
        results = [step[3] for step in steps]
        plain = all(isinstance(result, int) and result >= 0 for result in results)
        solution = Solution(tree, (steps[0], steps[1], steps[2]), plain)
        ranked.append(((not plain, max(results), solution.formula), solution))
    ranked.sort(key=lambda pair: pair[0])
    return tuple(solution for _, solution in ranked)


def solve(values: Sequence[int], target: int = TARGET) -> tuple[Solution, ...]:
    """All solutions of four positive integers, the simplest first; () if there is none.

    Two solutions are the same if they differ only in the order of the operands of + and *, or in which of two equal
    numbers stands where. Plain solutions come first, then those with a smaller largest result, then by formula text.
    Raises ValueError unless there are four numbers, all positive, and a positive target.
    """
    if len(values) != 4 or min(values) < 1 or target < 1:
        raise ValueError(f"four positive numbers and a positive target are needed, got {list(values)}, {target}")
    return _solve_sorted(tuple(sorted(values)), target)


@lru_cache(maxsize=8192)
def _solvable_values(values: tuple[int, ...], target: int) -> bool:
    return bool(_solve_sorted(values, target))


def solvable(hand: Sequence[int], rule: Sequence[int], target: int = TARGET) -> bool:
    return _solvable_values(value_key(hand, rule), target)


def deal_probability(hand: Sequence[int]) -> Fraction:
    """Probability of the hand when four ranks are drawn independently and uniformly."""
    repeats = prod(factorial(count) for count in Counter(hand).values())
    return Fraction(factorial(len(hand)) // repeats, 13 ** len(hand))


# --- splits and items -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Splits:
    """Hands by use. Train, validation and test share no value multiset under either rule.

    train: solvable under J = Q = K = 10. *_id: the same and with a face card. *_ood: with a face card and solvable
    under 11/12/13. A hand of one use may be in both its id and its ood list: it is then another problem in each.
    """

    train: tuple[tuple[int, ...], ...]
    validation_id: tuple[tuple[int, ...], ...]
    validation_ood: tuple[tuple[int, ...], ...]
    test_id: tuple[tuple[int, ...], ...]
    test_ood: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=64)
def splits(split_seed: int) -> Splits:
    """The hand split of a seed: about 790 train, 75 (id) + 80 (ood) validation and 285 + 320 test hands.

    Hands are grouped by their numbers under J = Q = K = 10; a whole group goes to one use, which separates the uses
    under both rules. Groups without a ten hold no face card and always train. The others are shuffled within strata of
    equal group size (the number of tens) so that the sizes hardly depend on the seed.
    """
    strata: dict[int, dict[tuple[int, ...], list]] = {}
    for hand in all_hands():
        key = value_key(hand, TRAINING_RULE)
        strata.setdefault(key.count(10), {}).setdefault(key, []).append(hand)
    uses: dict[str, list] = {"train": [], "validation": [], "test": []}
    for tens, groups in sorted(strata.items()):
        keys = sorted(groups)
        random.Random(f"splits/{split_seed}/{tens}").shuffle(keys)
        n_test = round(_TEST_SHARE * len(keys)) if tens else 0
        n_validation = round(_VALIDATION_SHARE * len(keys)) if tens else 0
        for place, key in enumerate(keys):
            use = "test" if place < n_test else "validation" if place < n_test + n_validation else "train"
            uses[use] += groups[key]
    named = {use: sorted(hands) for use, hands in uses.items()}

    def faced(use: str, rule: Rule) -> tuple[tuple[int, ...], ...]:
        return tuple(hand for hand in named[use] if has_face(hand) and solvable(hand, rule))

    return Splits(
        train=tuple(hand for hand in named["train"] if solvable(hand, TRAINING_RULE)),
        validation_id=faced("validation", TRAINING_RULE),
        validation_ood=faced("validation", TEST_RULE),
        test_id=faced("test", TRAINING_RULE),
        test_ood=faced("test", TEST_RULE),
    )


def overlap(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]], rule: Sequence[int]) -> int:
    """Number of problems (value multisets under a rule) that two lists of hands share, whatever their card order."""
    return len({value_key(hand, rule) for hand in first} & {value_key(hand, rule) for hand in second})


def shuffled_cards(hand: Sequence[int], seed: int, index: int) -> tuple[str, ...]:
    """Card names of a hand in the random order of item `index`: a function of its arguments alone."""
    cards = list(cards_of(hand))
    random.Random(f"order/{seed}/{index}").shuffle(cards)
    return tuple(cards)


def suits(seed: int, index: int) -> tuple[str, ...]:
    """Suits of the four cards of item `index` (drawn independently; the text of the game never shows them)."""
    return tuple(random.Random(f"suits/{seed}/{index}").choices(SUITS, k=4))
