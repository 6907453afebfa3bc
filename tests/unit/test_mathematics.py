"""Mathematical answers: classes of equal spellings, pairs that must differ, and the known faults V13 to V19 and V23."""

import itertools
import sys

import pytest

from common.schema import ConfigError
from common.verifiers import mathematics
from common.verifiers.mathematics import (
    NO_BOX,
    SEVERAL,
    TOO_LONG,
    UNCLOSED,
    UNPARSABLE,
    WRONG,
    boxed,
    check_gold,
    exact,
    grade_math,
    same_answer,
)

CLASSES = [  # V18, V23: every pair within a line is equal both ways, across lines never
    ["2/3", r"\frac{2}{3}", r"\dfrac23", "4/6", r"\frac23", " 2 / 3 "],
    ["1/2", r"\frac12", "0.5", ".5", "0.50", r"\frac{1}{2}."],
    ["9/4", "2 1/4", r"2\frac{1}{4}", r"2\frac14", "2.25", r"2 \dfrac{1}{4}"],
    ["1234", "1,234", "$1,234.00", "1234.", r"1{,}234".replace("{,}", ","), r"1234\text{ cm}", r"1234^\circ"],
    ["1.234"],
    ["-7", "−7", "(-7)", "-7.0"],
    ["0.333"], ["1/3"],
    ["1/2^{99}"], ["1/2^{98}"],  # V16
    ["1/2004!"], ["1/2006!"],
    ["1331 and 1728", "1728, 1331", r"\{1331, 1728\}", "1728 or 1331"],  # V14
    ["1331"], ["1331, 1728, 0"],
    ["(1,2)"], ["(2,1)"], ["[1,2]"], ["[1,2)"],
]  # fmt: skip


def test_spellings_of_one_value_are_equal_and_others_are_not():
    for (i, one), (j, other) in itertools.product(enumerate(CLASSES), repeat=2):
        for a, b in itertools.product(one, other):
            assert same_answer(gold=a, stated=b) == (i == j), (a, b)


@pytest.mark.parametrize(
    ("text", "value"), [("1e3", None), ("", None), ("--4", 4), ("2 5", None), ("1/0", None), ("0^{-1}", None), ("3^4", 81)]
)
def test_exact_grammar(text, value):
    assert exact(text) == value


@pytest.mark.parametrize(
    ("text", "success", "reason"),
    [
        (r"so \boxed{24}.", True, "right"),
        (r"\boxed{24} and again \boxed{24}", True, "right"),
        (r"\boxed{23} or rather \boxed{24}", False, SEVERAL),
        (r"\boxed{24 or 25 or 26}", False, WRONG),  # V14: a list of guesses
        (r"\boxed{24, 24}", False, WRONG),
        ("the answer is 24", False, NO_BOX),
        (r"\boxed{24", False, UNCLOSED),
        (r"\boxed{24} \boxed{2", False, UNCLOSED),
        (r"\boxed{}", False, UNPARSABLE),
        (r"\boxed{x = 24}", True, "right"),
        (r"\boxed{23 = 24}", False, None),
        (r"\boxed{\text{24}}", False, None),
        (r"\boxed{" + "2" * 400 + "}", False, TOO_LONG),
        (r"\boxed{24\%}", True, "right"),
        (r"\boxed{2\boxed{4}}", False, None),
    ],
)
def test_the_boxed_answer_alone_counts(text, success, reason):
    pytest.importorskip("math_verify")
    found = grade_math(gold="24", text=text)
    assert found.success == success
    assert reason is None or found.reason == reason


def test_appended_prose_changes_nothing():
    """V11: no tail of free text, however long, moves the verdict."""
    for length in (0, 1, 480, 10_000):
        assert grade_math(gold="42", text=r"\boxed{42}" + " prose" * length).success


def test_boxes_are_balanced():
    assert boxed(r"\boxed{\frac{1}{2}} \boxed {a\}b} \fbox{3}") == [r"\frac{1}{2}", r"a\}b", "3"]


@pytest.mark.parametrize("gold", ["\frac{1}{2}", "", r"\sqrt(2", "see above"])
def test_a_gold_answer_without_a_value_is_an_error_when_loaded(gold):
    pytest.importorskip("math_verify")
    with pytest.raises(ConfigError, match="item 3"):
        check_gold(gold, "item 3")


def test_math_verify_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    mathematics.parsed.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install .*\[math\]"):
        same_answer(gold=r"\sqrt{2}", stated=r"\sqrt{3}")
    assert same_answer(gold="1/2", stated="0.5")  # numbers need none


EQUAL = [
    (r"\sqrt{2}", r"2^{1/2}"), (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), (r"(x+1)^2", "x^2+2x+1"),
    (r"1-\frac{1}{\mathrm{e}}", r"1 - \frac{1}{e}"), ("x+y=1", "2x+2y-2=0"), (r"\frac{\pi}{2}", r"0.5\pi"),
    (r"[0,\sqrt{4}]", "[0,2]"), (r"\{1,\sqrt{4}\}", "2, 1"), ("5", "x=5"), (r"-\frac{1}{2}\pi", r"-\pi/2"),
]  # fmt: skip
DIFFERENT = [
    (r"1 - \frac{1}{\mathrm{e}}", r"1 + \frac{1}{\mathrm{e}}"), ("4", r"4\sqrt(2)"), (r"4\sqrt{2}", "4"),  # V17
    ("3x+4y+14=0", "3*x-1*y+13=0"), ("x+y=1", "1"), ("x=2", "y=2"),  # V15
    (r"\sqrt{2}", "1.4142135623730951"), (r"\pi", "3.14159265358979"), (r"(0,12.5)", "0<x<12.5"),  # V16, V19
    ("1/2^{99}", r"\frac{1}{2^{98}}"), ("10", "10^{10^{10}}"), (r"\infty", r"-\infty"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "stated"), EQUAL)
def test_equal_expressions(gold, stated):
    pytest.importorskip("math_verify")
    assert same_answer(gold=gold, stated=stated)


@pytest.mark.parametrize(("gold", "stated"), DIFFERENT)
def test_different_expressions(gold, stated):
    pytest.importorskip("math_verify")
    assert not same_answer(gold=gold, stated=stated)
    assert not same_answer(gold=stated, stated=gold)


def test_tiny_and_huge_powers_stay_apart():
    """V16: powers of ten over sixty orders of magnitude."""
    powers = [f"10^{{{n}}}" for n in range(-30, 31, 6)]
    for a, b in itertools.product(powers, repeat=2):
        assert same_answer(gold=a, stated=b) == (a == b)
