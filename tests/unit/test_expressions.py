"""The formula grammar: accepted writings, one reason per refusal, exact values, limits."""

import random
import resource
import time
from fractions import Fraction

import pytest

from common.verifiers import expressions as ex
from common.verifiers.expressions import parse_formula

ACCEPTED = [
    ("4*3+2+10", 24, (4, 3, 2, 10)),
    ("((4*3)+2)+10=24", 24, (4, 3, 2, 10)),
    ("10-2-3", 5, (10, 2, 3)),
    ("12/2/3", 2, (12, 2, 3)),
    ("2+3*4", 14, (2, 3, 4)),
    ("(2+3)*4", 20, (2, 3, 4)),
    ("8/(3-8/3)", 24, (8, 3, 8, 3)),
    ("49/2", Fraction(49, 2), (49, 2)),
    ("3-10", -7, (3, 10)),
    ("2/(3-5)", -1, (2, 3, 5)),
    ("(((7)))", 7, (7,)),
    ("0*5", 0, (0, 5)),
    (" 4\t* 3\n", 12, (4, 3)),
]


@pytest.mark.parametrize(("text", "value", "leaves"), ACCEPTED)
def test_value_and_leaves(text, value, leaves):
    assert parse_formula(text) == (Fraction(value), None, leaves)


# V08: one row per writing style and its documented outcome, for the deal 4, 6, 8, 1 and target 24
V08 = [
    ("(6-4+1)×8 = 24", None),
    ("(6-4+1)·8", None),
    ("(6-4+1)⋅8", None),
    ("(6−4+1)*8", None),
    ("(6–4+1)*8", None),
    ("8÷(1-4÷6)", None),
    ("8∕(1-4/6)", None),
    ("（６－４＋１）＊８＝２４", None),
    ("24 = (6-4+1)*8", None),
    ("( ( 6 - 4 ) + 1 ) * 8", None),
    ("(6-4+1)\u00a0*\u202f8", None),
    ("-(1-4)*8*1", ex.UNARY),
    ("(6-4+1)(8)", ex.IMPLICIT),
    (r"(6-4+1)\times 8", ex.LATEX),
    (r"\frac{48}{2}", ex.LATEX),
    ("$24$", ex.LATEX),
    ("(6-4+1)x8", ex.CHARACTER),
    ("[6-4+1]*8", ex.CHARACTER),
    ("(6-4+1)*8 = 25", ex.RIGHT_SIDE),
    ("25 = (6-4+1)*8", ex.RIGHT_SIDE),
    ("(6-4+1)*8 = 12+12", ex.RIGHT_SIDE),
    ("(6-4+1)*8 =", ex.RIGHT_SIDE),
    ("(6-4+1)*8 = 24 = 24", ex.EQUALS),
]


@pytest.mark.parametrize(("text", "reason"), V08)
def test_v08_writing_styles(text, reason):
    formula = parse_formula(text, 24)
    assert formula.reason == reason
    assert formula.value == (24 if reason is None else None)


def test_v08_v15_the_stated_side_is_never_what_is_valued():
    assert parse_formula("1+1 = 24", 24) == (2, None, (1, 1))
    assert parse_formula("24 = 1+1", 24) == (2, None, (1, 1))
    assert parse_formula("1+1 = 3").reason == ex.RIGHT_SIDE
    assert parse_formula("1+1 = 2").value == 2


# V04, V17, V18, V23 and the rest of the refusals: each has its own reason
REFUSED = [
    ("", ex.EMPTY),
    ("   ", ex.EMPTY),
    ("2**3", ex.OPERATOR),
    ("49//2", ex.OPERATOR),
    ("4!", ex.OPERATOR),
    ("5%3", ex.OPERATOR),
    ("1<<3", ex.OPERATOR),
    ("2^3", ex.OPERATOR),
    ("5²", ex.OPERATOR),
    ("√576", ex.OPERATOR),
    ("24|0", ex.OPERATOR),
    ("~25", ex.OPERATOR),
    ("4**3=24", ex.OPERATOR),
    ("2.5*4", ex.DECIMAL),
    (".5*48", ex.DECIMAL),
    ("24.", ex.DECIMAL),
    ("1,234", ex.DECIMAL),
    ("1e3", ex.CHARACTER),
    ("0x18", ex.CHARACTER),
    ("2_4", ex.CHARACTER),
    ("٢٤", ex.CHARACTER),
    ("𝟐𝟒", ex.CHARACTER),
    ("2\u200b4", ex.CHARACTER),
    ("x=24", ex.CHARACTER),
    (r"1 - \frac{1}{\mathrm{e}}", ex.LATEX),
    (r"4\sqrt(2)", ex.LATEX),
    ("4 3", ex.TWO_NUMBERS),
    ("1 000", ex.TWO_NUMBERS),
    ("2 1/4", ex.TWO_NUMBERS),
    ("(1+2)(8)", ex.IMPLICIT),
    ("4(6)", ex.IMPLICIT),
    ("(1+2)8", ex.IMPLICIT),
    ("-24", ex.UNARY),
    ("+24", ex.UNARY),
    ("--24", ex.UNARY),
    ("4--3", ex.UNARY),
    ("4*-3", ex.UNARY),
    ("(-3)*8", ex.UNARY),
    ("04*6", ex.LEADING_ZERO),
    ("4*", ex.MISSING_OPERAND),
    ("4+*3", ex.MISSING_OPERAND),
    ("4* *3", ex.MISSING_OPERAND),
    ("*3", ex.MISSING_OPERAND),
    ("(4+)", ex.MISSING_OPERAND),
    ("()", ex.MISSING_OPERAND),
    ("(4+3", ex.BRACKETS),
    ("4+3)", ex.BRACKETS),
    (")4", ex.BRACKETS),
    ("4/0", ex.ZERO_DIVISION),
    ("1/0+24", ex.ZERO_DIVISION),
    ("4/(3-3)", ex.ZERO_DIVISION),
    ("1234567+1", ex.TOO_LARGE),
    ("4*6=0000024", ex.TOO_LARGE),
]


@pytest.mark.parametrize(("text", "reason"), REFUSED)
def test_v04_v17_v18_v23_refusals_carry_their_own_reason(text, reason):
    assert parse_formula(text, 24) == (None, reason, ())


def test_every_reason_is_reached():
    reached = {reason for _, reason in REFUSED + V08} | {ex.TOO_LONG, ex.TOO_DEEP}
    assert reached - {None} == set(ex.REASONS)


def test_v02_v16_values_are_exact():
    assert parse_formula("49/2", 24).value == Fraction(49, 2)
    near = parse_formula("24+1/999999", 24).value
    assert near != 24 and near - 24 == Fraction(1, 999999)
    assert parse_formula("1/(2*2*2*2)").value != parse_formula("1/(2*2*2)").value
    for top in range(1, 40):
        for bottom in range(2, 12):
            value = parse_formula(f"{top}/{bottom}").value
            assert value == Fraction(top, bottom)
            assert (value == round(value)) == (top % bottom == 0)


V05 = {
    "power tower": ("9**9**9", ex.OPERATOR),
    "250 brackets": ("(" * 250 + "24" + ")" * 250, ex.TOO_LONG),
    "90 brackets": ("(" * 90 + "24" + ")" * 90, ex.TOO_DEEP),
    "100,000 brackets": ("(" * 100_000, ex.TOO_LONG),
    "5,000 signs": ("-" * 5_000 + "24", ex.TOO_LONG),
    "150 signs": ("-" * 150 + "24", ex.UNARY),
    "1 MB of digits": ("1" * 1_000_000, ex.TOO_LONG),
    "largest product": ("*".join(["999999"] * 28), None),
}


@pytest.mark.parametrize("name", V05)
def test_v05_oversized_input_is_refused_in_bounded_time_and_memory(name):
    text, reason = V05[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    assert parse_formula(text, 24).reason == reason
    assert time.process_time() - started < 0.05
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB
    assert parse_formula("4*6", 24).value == 24


def random_tree(stream, depth):
    if depth == 0 or stream.random() < 0.2:
        number = stream.randint(0, 13)
        return str(number), Fraction(number)
    left, a = random_tree(stream, depth - 1)
    right, b = random_tree(stream, depth - 1)
    op = stream.choice("+-*/")
    values = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}
    if values[op] is None:
        op = "+"
    return f"({left}{op}{right})", values[op]


def test_random_formulas_have_their_tree_value():
    stream = random.Random(7)
    for _ in range(2_000):
        text, value = random_tree(stream, 4)
        assert parse_formula(text, limits=ex.Limits(length=500)).value == value


def test_any_text_gets_a_value_or_a_known_reason():
    stream = random.Random(11)
    alphabet = "0123456789+-*/()= .,x×÷−\\$[]{}!%^_'\"\n\u200b\ud800"
    for _ in range(20_000):
        text = "".join(stream.choices(alphabet[: stream.choice((17, 30, len(alphabet)))], k=stream.randint(0, 14)))
        formula = parse_formula(text, 24)
        assert (formula.value is None) == (formula.reason is not None)
        assert formula.reason is None or formula.reason in ex.REASONS
