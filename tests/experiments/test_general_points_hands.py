"""GeneralPoints hands: enumeration, solver, splits; and the texts of prompt, answer and feedback."""

import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import permutations, product

import pytest

from common.cards import hands, prompts
from common.verifiers import expressions
from experiments.exp_7_11_general_points import audit

CARDS = ("4", "3", "2", "K")


@pytest.mark.parametrize(
    ("rule", "solvable", "distinct", "faces", "share"),
    [((10, 10, 10), 1236, 566, 670, 0.7309), ((11, 12, 13), 1362, 1362, 796, 0.7918)],
)
def test_solvable_counts(rule, solvable, distinct, faces, share):
    assert len(hands.all_hands()) == 1820
    found = [hand for hand in hands.all_hands() if hands.solvable(hand, rule)]
    assert len(found) == solvable
    assert len({hands.value_key(hand, rule) for hand in found}) == distinct
    assert sum(map(hands.has_face, found)) == faces
    assert sum(map(hands.deal_probability, hands.all_hands())) == 1
    assert round(float(sum(map(hands.deal_probability, found))), 4) == share


@cache
def every_value(numbers):
    """All values of all trees over the numbers, by plain recursion: an independent check of the solver."""
    if len(numbers) == 1:
        return frozenset(numbers)
    values = set()
    for i, j in permutations(range(len(numbers)), 2):
        rest = [numbers[k] for k in range(len(numbers)) if k not in (i, j)]
        a, b = numbers[i], numbers[j]
        for joined in {a + b, a - b, a * b} | ({a / b} if b else set()):
            values |= every_value(tuple(sorted([joined, *rest])))
    return frozenset(values)


def test_solver_agrees_with_a_plain_search():
    stream = random.Random(0)
    for _ in range(8):
        values = tuple(sorted(stream.randint(1, 13) for _ in range(4)))
        reached = every_value(tuple(map(Fraction, values)))
        for target in range(1, 40):
            assert (target in reached) == bool(hands.solve(values, target))


def commuted(tree):
    """One name for all orders of the operands of + and *."""
    if isinstance(tree, int):
        return str(tree)
    op, left, right = tree
    sides = [commuted(left), commuted(right)]
    return f"({op.join(sorted(sides) if op in '+*' else sides)})"


def test_solutions_are_complete_and_distinct():
    # Every tree over 2, 3, 4, 10, enumerated with all orders and shapes, then named up to commutation.
    expected = set()
    for a, b, c, d in permutations((2, 3, 4, 10)):
        for p, q, r in product("+-*/", repeat=3):
            shapes = [(p, (q, (r, a, b), c), d), (p, (q, a, b), (r, c, d)), (p, a, (q, (r, b, c), d))]
            shapes += [(p, (q, a, (r, b, c)), d), (p, a, (q, b, (r, c, d)))]
            expected |= {commuted(tree) for tree in shapes if audit.is_right(tree)}
    found = [commuted(solution.tree) for solution in hands.solve((4, 3, 2, 10))]
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_solutions_replay_and_plain_ones_come_first():
    for values in ((3, 3, 8, 8), (1, 5, 5, 5), (4, 3, 2, 10), (11, 12, 13, 1), (13, 13, 13, 12)):
        found = hands.solve(values)
        assert [not solution.plain for solution in found] == sorted(not solution.plain for solution in found)
        for solution in found:
            formula = expressions.parse_formula(solution.formula)
            assert formula.value == 24 and sorted(formula.leaves) == sorted(values)
            assert expressions.parse_formula(hands.render_sparse(solution.tree)).value == 24
            for a, op, b, result in solution.steps:
                assert hands.apply(a, op, b) == result
                assert isinstance(result, int) == (Fraction(result).denominator == 1)
    assert [solution.formula for solution in hands.solve((3, 3, 8, 8))] == ["8/(3-(8/3))"]
    assert hands.solve((1, 1, 1, 1)) == ()
    with pytest.raises(ValueError, match="four positive numbers"):
        hands.solve((0, 1, 2, 3))


def test_e05_no_use_shares_a_problem_with_another_under_either_rule():
    tried, holes = audit.audit_splits(range(12))
    assert holes == [] and tried.total() == 12 * 2 * 3


def test_e05_a_planted_duplicate_is_found_and_counted(monkeypatch):
    train, test = ((1, 2, 3, 4), (2, 3, 4, 11)), ((4, 3, 2, 1), (2, 3, 4, 13))
    assert hands.overlap(train, test, hands.TRAINING_RULE) == 2  # J and K are one problem when both count as 10
    assert hands.overlap(train, test, hands.TEST_RULE) == 1
    planted = replace(hands.splits(0), train=hands.splits(0).test_ood[:3])
    monkeypatch.setattr(hands, "splits", lambda seed: planted)
    _, holes = audit.audit_splits([0])
    assert len(holes) == 2 and "train and test share 3 problems under (11, 12, 13)" in holes[1]


@pytest.mark.parametrize("split_seed", range(12))
def test_e05_splits_hold_the_hands_they_promise(split_seed):
    split = hands.splits(split_seed)
    # Not even across the rules: no problem met in training (J = Q = K = 10) is a problem of a test under any rule.
    trained = {hands.value_key(hand, hands.TRAINING_RULE) for hand in split.train}
    assert not trained & {hands.value_key(hand, hands.TEST_RULE) for hand in split.test_ood + split.validation_ood}
    assert all(hands.solvable(hand, hands.TRAINING_RULE) for hand in split.train)
    for hand in split.test_id + split.validation_id:
        assert hands.has_face(hand) and hands.solvable(hand, hands.TRAINING_RULE)
    for hand in split.test_ood + split.validation_ood:
        assert hands.has_face(hand) and hands.solvable(hand, hands.TEST_RULE)
    assert len(split.test_ood) >= 300 and len(split.test_id) >= 230 and len(split.train) >= 740
    assert len(split.validation_ood) >= 60 and len(split.validation_id) >= 50


def test_splits_and_orders_are_functions_of_their_seeds():
    assert hands.splits(3) == hands.splits.__wrapped__(3)
    assert hands.splits(3) != hands.splits(4)
    assert [hands.shuffled_cards((1, 2, 11, 13), 5, i) for i in range(3)] == [
        hands.shuffled_cards((1, 2, 11, 13), 5, i) for i in range(3)
    ]
    orders = Counter(hands.shuffled_cards((1, 2, 11, 13), 5, i) for i in range(2_400))
    assert len(orders) == 24 and min(orders.values()) > 60
    assert hands.suits(0, 1) == hands.suits(0, 1) and {len(hands.suits(0, i)) for i in range(9)} == {4}
    assert set().union(*(hands.suits(0, i) for i in range(40))) == set(hands.SUITS)


def test_answer_layout():
    steps = [(4, "*", 3, 12), (12, "+", 2, 14), (14, "+", 10, 24)]
    assert prompts.answer(CARDS, (4, 3, 2, 10), steps, 24) == (
        '{"cards": ["4", "3", "2", "K"], "number": [4, 3, 2, 10], '
        '"trace": "4*3=12, 2, 10; 12+2=14, 10; 14+10=24", "formula": "((4*3)+2)+10=24"}'
    )
    assert prompts.answer(CARDS, (4, 3, 2, 10), steps, 24, trace=False) == (
        '{"cards": ["4", "3", "2", "K"], "number": [4, 3, 2, 10], "formula": "((4*3)+2)+10=24"}'
    )
    pairs = [(4, "*", 3, 12), (2, "+", 10, 12), (12, "+", 12, 24)]
    assert prompts.trace_text((4, 3, 2, 10), pairs) == "4*3=12, 2, 10; 2+10=12, 12; 12+12=24"
    assert prompts.compose((4, 3, 2, 10), pairs) in ("(4*3)+(2+10)", "(2+10)+(4*3)")
    eights = hands.solve((3, 3, 8, 8))[0].steps
    assert prompts.trace_text((3, 8, 3, 8), eights) == "8/3=(8/3), 3, 8; 3-(8/3)=(1/3), 8; 8/(1/3)=24"
    with pytest.raises(ValueError):
        prompts.trace_text((4, 3, 2, 10), [(5, "*", 3, 15)])


def test_prompt_states_cards_target_and_rule():
    ten = prompts.prompt(CARDS, 24, (10, 10, 10), trace=False)
    assert "'J', 'Q', and 'K' count as '10'." in ten and "equals 24." in ten
    assert 'Cards: ["4", "3", "2", "K"]' in ten and "respectively" not in ten and "trace" not in ten
    faces = prompts.prompt(CARDS, 30, (11, 12, 13), trace=True)
    assert "'J', 'Q', and 'K' count as '11', '12', and '13' respectively." in faces and "equals 30." in faces
    assert '"trace"' in faces
    for section in ("[Task Description]", "[Input]", "[Output]"):
        assert section in ten


def test_every_text_is_phrases_cards_numbers_and_signs():
    phrases = sorted(prompts.PHRASES, key=len, reverse=True)
    texts = [prompts.prompt(CARDS, 24, rule, trace) for rule in ((10,) * 3, (11, 12, 13)) for trace in (True, False)]
    steps = hands.solve((4, 3, 2, 10))[0].steps
    texts += [prompts.answer(CARDS, (4, 3, 2, 10), steps, 24, trace) for trace in (True, False)]
    texts += [prompts.feedback(CARDS, failure) for failure in prompts.REASONS]
    texts += [prompts.feedback(CARDS, "no_solution", "4*3+")]
    for text in texts:
        for phrase in phrases:
            text = text.replace(phrase, " ")
        assert set(text) <= set('0123456789+-*/()="AJQK '), text
