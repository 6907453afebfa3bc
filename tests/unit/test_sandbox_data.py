"""Sandbox: limits, capped streams, equality of answers, and the mapping from how a program ended to a status."""

import json
import math
import signal
from typing import Any

import pytest

from common.sandbox import Answer, Limits, Result, SandboxError, passes
from common.sandbox.data import file_name
from common.sandbox.pool import _status, read_answers
from common.sandbox.worker import Capture, whole_seconds
from common.schema import ConfigError


@pytest.mark.parametrize(
    ("key", "value"),
    [("wall_s", 0), ("wall_s", math.nan), ("cpu_s", -1.0), ("memory_mb", 63), ("processes", 0), ("memory_mb", 128.5),
     ("open_files", True), ("file_size_mb", 0), ("output_bytes", 63), ("wall_s", "2"), ("cpu_s", math.inf)],
)  # fmt: skip
def test_limits_refuse_what_cannot_work(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"sandbox\.{key}={value}"):
        Limits(**{key: value})


def test_own_limits_only_lower_the_pools() -> None:
    """S13."""
    assert whole_seconds(10.0, None) == 10.0
    assert whole_seconds(400.0, 2.0) == 2.0
    assert whole_seconds(10.0, 9999.0) == 10.0
    assert whole_seconds(10.0, math.nan) == 10.0 and whole_seconds(10.0, -5.0) == 0.01


def capture(data: bytes, cap: int, step: int = 7) -> Capture:
    found = Capture(cap)
    for start in range(0, len(data), step):
        found.feed(data[start : start + step])
    return found


def test_capture_keeps_head_and_tail() -> None:
    """S04: the first and the last half, and how much was dropped between."""
    whole = capture(b"0123456789", 10)
    assert whole.text() == "0123456789" and not whole.cut
    cut = capture(b"abcde" + b"-" * 990 + b"vwxyz", 10)
    assert cut.cut and cut.text() == "abcde\n[... 990 bytes dropped ...]\nvwxyz"
    assert len(capture(b"x" * 10**6, 64, 4096).tail) <= 64


def test_every_byte_becomes_text_that_json_can_hold() -> None:
    """S06: bytes that are not UTF-8 become U+FFFD, NUL and escapes stay, a cut leaves no half character."""
    for byte in range(256):
        text = capture(b"ok" + bytes([byte]), 64).text()
        assert text == "ok" + (chr(byte) if byte < 128 else "\ufffd")
        assert json.loads(json.dumps(text)) == text
    for character in ("é", "€", "😀"):
        data = b"a" * 9 + character.encode() * 20 + b"z" * 9
        for cap in range(20, 40, 2):
            text = capture(data, cap).text()
            assert "\ufffd" not in text and text.startswith("a" * 9) and text.endswith("z" * 9)
            kept = len(text.replace(text[text.index("\n") : text.rindex("\n") + 1], "").encode())
            assert f"[... {len(data) - kept} bytes dropped ...]" in text


@pytest.mark.parametrize("value", ["", None, "x"])
@pytest.mark.parametrize("why", ["runtime error", "timeout", "killed", "the program ended before it answered"])
def test_a_failure_never_passes(why: str, value: Any) -> None:
    """S07: raising, timing out, being killed or saying nothing is no answer, not even where "" or None is expected."""
    assert not passes(Answer(failure=why), value)
    assert passes(Answer(value), value)


def test_equality_knows_types() -> None:
    assert passes(Answer([1, {"a": None}]), (1, {"a": None}))
    for value, expected in [(True, 1), (1, 1.0), ("", None), (0, False), ([1], [1, 2]), ({"a": 1}, {"b": 1}), ("1", 1)]:
        assert not passes(Answer(value), expected) and not passes(Answer(expected), value)
    assert not passes(Answer(math.nan), math.nan)


def test_answers_are_read_as_data() -> None:
    lines = [b'[0, "value", 1]', b'[0, "value", 2]', b"null", b'{"verdict": "pass"}', b'[7, "value", 1]', b'[true, "value", 1]']
    lines += [
        b'[1, "passed", true]',
        b"[" * 100_000,
        b'[2, "value", ' + b"9" * 5000 + b"]",
        b'[3, "failure", "KeyError: 1"]',
        b"\xff",
    ]
    found = read_answers(capture(b"\n".join(lines), 2**20), 4, Result("ok"))
    assert found[0] == Answer(1)
    assert [item.failure for item in found[1:3]] == ["the program ended before it answered"] * 2
    assert found[3].failure == "runtime error: KeyError: 1"
    assert read_answers(capture(b"\n".join(lines), 64), 1, Result("ok"))[0].failure == "more answers than the limit on output"


@pytest.mark.parametrize(
    ("cause", "code", "kind", "status"),
    [("", 0, "python", "ok"), ("", 1, "python", "error"), ("", 250, "python", "memory"), ("", 250, "shell", "error"),
     ("", 251, "call", "disk"), ("", 252, "python", "processes"), ("wall", None, "python", "timeout"),
     ("cpu", None, "shell", "timeout"), ("", -signal.SIGXCPU, "python", "timeout"), ("memory", None, "python", "memory"),
     ("output", None, "python", "output"), ("", -9, "python", "killed"), ("", -11, "shell", "killed"),
     ("", 128 + signal.SIGXFSZ, "shell", "disk"), ("", 128 + signal.SIGXFSZ, "python", "error"),
     ("wall", 0, "python", "timeout")],
)  # fmt: skip
def test_status_comes_from_outside_the_program(cause: str, code: int | None, kind: str, status: str) -> None:
    found, reason = _status(cause, code, kind, Limits(), {"wall_s": 1.0, "cpu_s": 1.0})
    assert found == status and bool(reason) == (status != "ok")


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a\0b", "."])
def test_file_names_stay_inside(path: str) -> None:
    """S09."""
    with pytest.raises(SandboxError):
        file_name(path)
