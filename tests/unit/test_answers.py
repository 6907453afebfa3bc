"""JSON answers in model text: which object counts, what is refused, what follows it."""

import json
import random
import time

import pytest

from common.verifiers import answers
from common.verifiers.answers import Field, extract_json

FIELDS = {"n": Field(list, int), "f": Field(str), "note": Field(str, required=False)}
GOOD = '{"n": [1, 2], "f": "1+2"}'
BAD = '{"n": [9], "f": "9"}'


def reason_of(text):
    return extract_json(text, FIELDS).reason


def test_a_plain_answer():
    assert extract_json(GOOD, FIELDS) == ({"n": [1, 2], "f": "1+2"}, None, 0)
    assert extract_json(f"Sure:\n```json\n{GOOD}\n```", FIELDS) == ({"n": [1, 2], "f": "1+2"}, None, 3)


@pytest.mark.parametrize("length", [0, 1, 480, 10_000, 200_000])
def test_v11_text_after_the_answer_does_not_change_it(length):
    assert extract_json(GOOD + "a" * length, FIELDS).value == {"n": [1, 2], "f": "1+2"}
    assert extract_json(GOOD + " prose. " * (length // 8), FIELDS).value == {"n": [1, 2], "f": "1+2"}


def test_v12_v14_the_first_completed_object_counts_and_run_on_text_is_counted():
    answer = extract_json(f"{GOOD}\nExample: {BAD}", FIELDS)
    assert answer.value == {"n": [1, 2], "f": "1+2"}
    assert answer.run_on == len("".join(f"Example:{BAD}".split()))
    assert extract_json(f"{BAD} {GOOD}", FIELDS).value == {"n": [9], "f": "9"}


V13 = [
    (f"<think>so {GOOD}", answers.UNFINISHED),
    (f"<think>so {GOOD}</think>", answers.NO_OBJECT),
    (f"<think>{BAD}</think> {GOOD}", None),
    (f"... so it is</think>{GOOD}", None),
    (f"<think>a</think>{GOOD}", None),
    (f"{GOOD}", None),
    (f"{GOOD} <think> more {BAD} </think> {BAD}", None),
    (f"<think>{BAD}</think> then <think>{BAD}</think> {GOOD}", None),
    (f"<think>{BAD}</think>{GOOD} and </think> {BAD}", None),
    (f"<think>{GOOD}</think><think>{GOOD}", answers.UNFINISHED),
    (f"{GOOD}</think>", answers.NO_OBJECT),
]


@pytest.mark.parametrize(("text", "reason"), V13)
def test_v13_reasoning_blocks(text, reason):
    answer = extract_json(text, FIELDS)
    assert answer.reason == reason
    assert answer.value == (None if reason else {"n": [1, 2], "f": "1+2"})


@pytest.mark.parametrize("end", ["", "\n", "\r\n\n", "  "])
def test_v21_newlines_around_and_inside(end):
    assert extract_json(f'\n{{"n": [1,\n2],\n"f": "1+2"}}{end}', FIELDS) == ({"n": [1, 2], "f": "1+2"}, None, 0)


S12 = [
    ('{"f": "x', answers.UNCLOSED),
    ("{", answers.NO_OBJECT),
    ("", answers.NO_OBJECT),
    ("[1]", answers.NO_OBJECT),
    ("null", answers.NO_OBJECT),
    ('"s"', answers.NO_OBJECT),
    ("{'n': [1], 'f': '1'}", answers.NO_OBJECT),
    ('{"n": [1, 2], "f": "1+2",}', answers.NOT_JSON),
    ('{"n": [1, 2] "f": "1+2"}', answers.NOT_JSON),
    ('{"n": [1, 2}, "f": "1+2"}', answers.NOT_JSON),
    ('{"n": [1, 2], "f": "a\nb"}', answers.NOT_JSON),
    ('{"n": [1, 2], "f": "1+1", "f": "1+2"}', answers.DUPLICATE),
    ('{"n": [NaN], "f": "1+2"}', answers.NOT_FINITE),
    ('{"n": [-Infinity], "f": "1+2"}', answers.NOT_FINITE),
    ('{"n": [1e999], "f": "1+2"}', answers.NOT_FINITE),
    ("{}", f"{answers.MISSING}: n"),
    ('{"n": [1, 2]}', f"{answers.MISSING}: f"),
    ('{"answer": {"n": [1, 2], "f": "1+2"}}', f"{answers.MISSING}: n"),
    ('{"n": "1, 2", "f": "1+2"}', f"{answers.WRONG_TYPE}: n"),
    ('{"n": [1.0, 2], "f": "1+2"}', f"{answers.WRONG_TYPE}: n"),
    ('{"n": [true, 2], "f": "1+2"}', f"{answers.WRONG_TYPE}: n"),
    ('{"n": ["1", 2], "f": "1+2"}', f"{answers.WRONG_TYPE}: n"),
    ('{"n": [[1], 2], "f": "1+2"}', f"{answers.WRONG_TYPE}: n"),
    ('{"n": null, "f": "1+2"}', f"{answers.WRONG_TYPE}: n"),
    ('{"n": [1, 2], "f": 3}', f"{answers.WRONG_TYPE}: f"),
    ('{"n": [1, 2], "f": ["1+2", "3"]}', f"{answers.WRONG_TYPE}: f"),
    ('{"n": [1, 2], "f": "1+2", "note": 1}', f"{answers.WRONG_TYPE}: note"),
    (f'{{"n": {[1] * 65}, "f": "1+2"}}', f"{answers.WRONG_TYPE}: n"),
]


@pytest.mark.parametrize(("text", "reason"), S12)
def test_s12_broken_and_mistyped_objects_are_refused_with_a_reason(text, reason):
    assert extract_json(text, FIELDS).value is None
    assert reason_of(text) == reason
    assert extract_json(GOOD, FIELDS).value is not None


def test_a_broken_object_is_not_replaced_by_a_later_one_but_other_brackets_are_stepped_over():
    assert reason_of('{"n": [1],}' + GOOD) == answers.NOT_JSON
    assert reason_of('{"n": [1, 2], "f": "1+' + GOOD) == answers.UNCLOSED
    assert extract_json(f"The set {{24}} and \\frac{{1}}{{2}} {GOOD}", FIELDS).value == {"n": [1, 2], "f": "1+2"}
    assert extract_json(f"{{ {GOOD}", FIELDS).value == {"n": [1, 2], "f": "1+2"}


def test_unknown_keys_are_ignored_and_brackets_inside_strings_do_not_count():
    text = '{"n": [1, 2], "f": "}{][", "extra": {"a": [1]}}'
    assert extract_json(text, FIELDS).value == {"n": [1, 2], "f": "}{][", "extra": {"a": [1]}}


OVERSIZED = [
    ("{" * 100_000, answers.TOO_DEEP),
    ('{"a":' * 100_000, answers.TOO_DEEP),
    ('{"a":' + "[" * 1_000 + "]" * 1_000 + "}", answers.TOO_DEEP),
    ('{"n": [1], "f": "1", "x": ' + "[" * 9 + "]" * 9 + "}", answers.TOO_DEEP),
    ("[" * 100_000, answers.NO_OBJECT),
    ('{"f": "' + "1" * 1_000_000, answers.TOO_LONG),
    ('{"f": "' + "1" * 5_000 + '"}', answers.TOO_LONG),
    ('{"n": [' + "1" * 3_900 + '], "f": "1"}', None),
    ("a" * 1_000_000, answers.NO_OBJECT),
    ("a" * 100_001 + GOOD, answers.NO_OBJECT),
    ("{24}" * 10_000, answers.NO_OBJECT),
    ("<think>" * 100_000, answers.UNFINISHED),
    ("<think></think>" * 100_000 + GOOD, answers.UNFINISHED),
]


@pytest.mark.parametrize(("text", "reason"), OVERSIZED)
def test_v05_oversized_text_is_refused_in_bounded_time(text, reason):
    started = time.process_time()
    assert reason_of(text) == reason
    assert time.process_time() - started < 0.1


def test_random_damage_never_raises_and_never_yields_an_incomplete_object():
    stream = random.Random(3)
    for _ in range(5_000):
        characters = list(GOOD * 2)
        for _ in range(stream.randint(1, 4)):
            characters[stream.randrange(len(characters))] = stream.choice('{}[]",:\\ 1a\n')
        answer = extract_json("".join(characters), FIELDS)
        assert (answer.value is None) == (answer.reason is not None)
        if answer.value is not None:
            assert type(answer.value["f"]) is str and all(type(item) is int for item in answer.value["n"])
            json.dumps(answer.value, allow_nan=False)
