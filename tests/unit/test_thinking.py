"""The rule that tells thinking from answer (known faults V13 and V20)."""

import pytest

from common.verifiers.thinking import (
    FAULTS,
    NEVER_OPENED,
    NO_ANSWER,
    REOPENED,
    SEVERAL_ENDS,
    TEXT_BEFORE,
    UNFINISHED,
    Thinking,
    split_thinking,
)


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("3+4=7</think>7", "3+4=7", "7"),
        ("</think>7", "", "7"),
        (" \n</think>\n\n7\n", " \n", "\n\n7\n"),
        ("a < b > c</think> {7}", "a < b > c", " {7}"),
    ],
)
def test_prompt_opened_the_thinking(text, thought, answer):
    assert split_thinking(text, opened=True) == Thinking(thought, answer, None)


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("7", None, "7"),
        ("<think>3+4=7</think>7", "3+4=7", "7"),
        (" \n<think></think>7", "", "7"),
    ],
)
def test_prompt_did_not_open_it(text, thought, answer):
    assert split_thinking(text, opened=False) == Thinking(thought, answer, None)


@pytest.mark.parametrize(
    ("text", "opened", "fault"),
    [
        ("so the answer is 7", True, UNFINISHED),
        ("", True, UNFINISHED),
        ("<think>so the answer is 7", False, UNFINISHED),
        ("7</think>", True, NO_ANSWER),
        ("<think>7</think> \n", False, NO_ANSWER),
        ("", False, NO_ANSWER),
        ("a</think>6</think>7", True, SEVERAL_ENDS),
        ("<think>a</think>6</think>7", False, SEVERAL_ENDS),
        ("<think>a</think>7", True, REOPENED),
        ("a</think>6<think>b</think>7", True, REOPENED),
        ("<think>a", True, REOPENED),
        ("<think>a<think>b</think>7", False, REOPENED),
        ("<think>a</think><think>b</think>7", False, REOPENED),
        ("a</think>6<think>b</think>7", False, REOPENED),
        ("a</think>7", False, NEVER_OPENED),
        ("7 <think>a</think>7", False, TEXT_BEFORE),
        ("7 <think>a", False, TEXT_BEFORE),
        ("a</THINK>7", True, UNFINISHED),
        ("a< /think>7", True, UNFINISHED),
    ],
)
def test_faults_leave_an_empty_answer(text, opened, fault):
    found = split_thinking(text, opened)
    assert (found.fault, found.answer) == (fault, "")
    assert fault in FAULTS


def test_an_answer_inside_the_thinking_is_none():
    """V13: every place of the answer, both ways to open, closed and not."""
    for opened, head in ((True, ""), (False, "<think>")):
        assert split_thinking(f"{head}x {{24}}", opened).answer == ""
        assert split_thinking(f"{head}x {{24}}</think>{{23}}", opened).answer == "{23}"
        assert split_thinking(f"{head}x</think>{{24}}", opened).answer == "{24}"
    assert split_thinking("{24}</think>", opened=True).answer == ""


def test_blocks_repeated_never_gain():
    """V20: a completion that is right stops being right when any tag is added."""
    pieces = ["a", "b", "</think>", "7", "8"]
    for tag in ("<think>", "</think>"):
        for place in range(len(pieces) + 1):
            text = "".join([*pieces[:place], tag, *pieces[place:]])
            assert split_thinking(text, opened=True).fault, text


def test_skipped_means_an_empty_block():
    assert split_thinking("</think>7", opened=True).skipped
    assert split_thinking("\n\n</think>7", opened=True).skipped
    assert not split_thinking("a</think>7", opened=True).skipped
    assert not split_thinking("7", opened=False).skipped
