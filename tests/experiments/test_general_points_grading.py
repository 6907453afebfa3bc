"""GeneralPoints grading: worked grades under the rule and under the source's switches, traces, hints, exploits."""

import ast
import json
from pathlib import Path

import pytest

from common.cards import grading, hands, prompts
from experiments.exp_7_11_general_points import audit

ROOT = Path(__file__).resolve().parents[2]
CARDS = ("4", "3", "2", "K")
TASK = grading.deal(CARDS, (10, 10, 10))
SOURCE = frozenset(grading.DEFECTS)
STRICT = {"graded_lists"}


def reply(formula, task=TASK, **changes):
    return json.dumps({"cards": list(task.cards), "number": list(task.values), "formula": formula} | changes)


def gold(task=TASK, trace=True, place=0):
    return prompts.answer(task.cards, task.values, hands.solve(task.values)[place].steps, task.target, trace)


@pytest.mark.parametrize(
    ("formula", "source", "kind", "reason"),
    [
        ("4*3+2+10", 5, "correct", "correct"),
        ("4*3+2", -2, "number", "a number left out"),
        ("4*3+2+11", -4, "number", "a number that no card has"),
        ("4*3+2+10+10", -2, "number", "a number used too often"),
        ("4**3", -5, "illegal_formula", "operator not allowed"),
        ("4×3+2+10", -3, "correct", "correct"),
        ("", -2, "illegal_formula", "empty"),
        ("4*3+2+10=25", 5, "illegal_formula", "another right-hand side"),
        ("4*3-2+10", -1, "no_solution", "the value is 20"),
        ("(4*3)+(2+10", 1, "illegal_formula", "unbalanced brackets"),
        ("(4-3)*(2+10", -1, "illegal_formula", "unbalanced brackets"),
        ("4*3+2)+10", -3, "illegal_formula", "unbalanced brackets"),
    ],
)
def test_worked_grades_of_the_source_and_of_the_rule(formula, source, kind, reason):
    assert sum(grading.grade(reply(formula), TASK, SOURCE).parts.values()) == source
    grade = grading.grade(reply(formula), TASK)
    assert (grade.kind, grade.reason) == (kind, reason)
    assert grade.parts == {kind: grading.POINTS[kind]}
    assert grade.success == (kind == "correct")


def test_each_source_switch_changes_one_thing():
    eights = grading.deal(("3", "3", "8", "8"), (10, 10, 10))
    assert grading.grade(gold(eights), eights).success  # V07
    assert grading.grade(gold(eights), eights, {"float_grading"}).reason == "the value is 23.99999999999999"
    assert grading.grade(reply("4*3+2+10=25"), TASK, {"cut_at_equals"}).success
    assert grading.grade(reply("4*3+2+10", number=[1]), TASK, STRICT).kind == "lists"
    assert grading.grade(reply("4*3+2+10", number=[1]), TASK).success
    loose = 'I say "formula": "4*3+2+10"'
    assert grading.grade(loose, TASK).kind == "no_answer"
    assert grading.grade(loose, TASK, {"loose_json"}).success
    piled = grading.grade(reply("4**3"), TASK, {"piled_penalties"})
    assert piled.parts == {"illegal_formula": -3.0, "number": -2.0}


def test_float_grading_misses_only_one_hand():
    # Of all hands, only 3, 3, 8, 8 has no solution that floats get right.
    missed = [
        hand
        for hand in hands.all_hands()
        if (found := hands.solve(hand)) and not any(grading._float_value(solution.formula) == 24 for solution in found)
    ]
    assert missed == [(3, 3, 8, 8)]


def test_the_worst_fault_counts_and_no_fault_is_cheaper_for_a_second_one():
    wrong_lists = {"number": [1, 1, 1, 1]}
    assert grading.grade(reply("4*", **wrong_lists), TASK, STRICT).kind == "illegal_formula"
    assert grading.grade(reply("4*3", **wrong_lists), TASK, STRICT).kind == "number"
    assert grading.grade(reply("4*3-2+10", **wrong_lists), TASK, STRICT).kind == "lists"
    assert grading.POINTS["illegal_formula"] < grading.POINTS["number"] < grading.POINTS["lists"]
    assert grading.POINTS["lists"] < grading.POINTS["no_solution"] < 0


def test_v01_v09_numbers_must_be_the_deal_as_a_multiset():
    ones = grading.deal(("9", "A", "9", "A"), (10, 10, 10), target=81)
    assert grading.grade(reply("9*9", ones), ones).kind == "number"
    assert grading.grade(reply("9*9*1*1", ones), ones).success
    jack = grading.deal(("J", "2", "3", "A"), (11, 12, 13))
    assert grading.grade(reply("(11+1)*(3-2)", jack), jack).kind == "no_solution"
    assert grading.grade(reply("11*2+3-1", jack), jack).success
    assert grading.grade(reply("(10-2)*3*1", jack), jack).kind == "number"
    for formula in ("24", "12+12", "20+4"):
        assert grading.grade(reply(formula), TASK).kind == "number"


def test_rule10_marks_an_answer_that_would_be_right_under_the_training_rule():
    faces = grading.deal(CARDS, (11, 12, 13))
    assert faces.values == (4, 3, 2, 13)
    grade = grading.grade(reply("4*3+2+10", faces, number=[4, 3, 2, 10]), faces)
    assert (grade.kind, grade.rule10, grade.recognised, grade.cards_correct) == ("number", True, False, True)
    grade = grading.grade(gold(faces), faces)
    assert (grade.kind, grade.rule10, grade.recognised, grade.cards_correct) == ("correct", False, True, True)


@pytest.mark.parametrize(
    ("trace", "verdict"),
    [
        ("4*3=12, 2, 10; 12+2=14, 10; 14+10=24", "valid"),
        ("4*3=12, 10, 2; 12+2=14, 10; 14+10=24", "valid"),
        ("4*3=12, 2, 10; 12+2=14, 10", "layout"),
        ("4x3=12, 2, 10; 12+2=14, 10; 14+10=24", "layout"),
        ("4*3=12, 2, 10; 12+2=14, 10; 14/(1/0)=24", "layout"),
        ("4*5=20, 2, 10; 20+2=22, 10; 22+10=32", "number"),
        ("4*4=16, 3, 2, 10; 12+2=14, 10; 14+10=24", "number"),
        ("4*3=13, 2, 10; 13+2=15, 10; 15+10=25", "arithmetic"),
        ("4*3=12, 2; 12+2=14, 10; 14+10=24", "rest"),
        ("4*3=12, 2, 10; 12-2=10, 10; 10+10=20", "target"),
        ("10*3=30, 4, 2; 30-4=26, 2; 26-2=24", "formula"),
    ],
)
def test_step_trace_is_checked_but_not_graded(trace, verdict):
    grade = grading.grade(reply("((4*3)+2)+10=24", trace=trace), TASK)
    assert grade.trace == verdict and grade.success
    assert grading.grade(reply("4*3+2+10"), TASK).trace == "absent"


def test_the_hint_is_the_longest_beginning_of_a_solution():
    task = grading.deal(("2", "3", "4", "10"), (10, 10, 10))
    assert grading.longest_right_prefix("2+3-4*10", task) == "2+3"
    assert grading.longest_right_prefix("((4*3)+2)-10=24", task) == "((4*3)+2)"
    assert grading.longest_right_prefix("1+2", task) == ""
    assert grading.longest_right_prefix("2+3*4+10", task) == "2+3*4+10"


def test_v22_every_gold_answer_scores_and_the_next_items_does_not():
    split = hands.splits(0)
    items = [(hand, hands.TRAINING_RULE) for hand in split.train] + [(hand, hands.TEST_RULE) for hand in split.test_ood]
    tasks = [grading.deal(hands.shuffled_cards(hand, 1, k), rule) for k, (hand, rule) in enumerate(items)][:1000]
    for task, following in zip(tasks, tasks[1:] + tasks[:1], strict=True):
        assert grading.grade(gold(task), task, STRICT).success
        assert not grading.grade(gold(following), task, STRICT).success


def test_v06_model_text_is_never_run(tmp_path):
    marker = tmp_path / "marker"
    problem = audit.Problem((2, 3, 4, 10), ("2", "3", "4", "10"), (10, 10, 10), (2, 3, 4, 10))
    task = grading.deal(problem.cards, problem.rule)
    texts = [problem.reply(formula) for formula in audit.exploit_formulas(problem, marker)]
    for text in texts + audit.exploit_texts(problem, marker):
        assert not grading.grade(text, task).success
        grading.grade(text, task, SOURCE)
    assert not marker.exists()
    sources = [*(ROOT / "common" / "verifiers").glob("*.py"), *Path(grading.__file__).parent.glob("*.py")]
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            name = node.func if isinstance(node, ast.Call) else None
            called = getattr(name, "id", getattr(name, "attr", ""))
            assert called not in ("eval", "exec", "sympify", "parse_expr", "literal_eval", "system", "Popen"), source
            assert called != "compile" or isinstance(name, ast.Attribute)  # re.compile only
