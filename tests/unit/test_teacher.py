"""The collection of a teacher's answers, against a server of our own that fails in every way, and from a local model."""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from common import teacher_server
from common.models import DecoderConfig, build_decoder
from common.schema import ConfigError
from common.teacher import Ask, LocalTeacher, TeacherError, collect, totals
from common.teacher_server import Passing, ServerConfig, ServerTeacher, checked_reply
from common.tokenizers import build_phrase_tokenizer

KEY = "sk-secret-4711"
FAST = {"model": "m", "requests_per_minute": 60_000.0, "backoff_s": 0.01, "backoff_max_s": 0.02, "timeout_s": 0.4, "workers": 2}
ASKS = [Ask(f"{i}", f"question {i}") for i in range(5)]


def completion(text, **changes):
    """A chat completion as servers send it."""
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 3}} | changes


class Server:
    """A local server. `script[question]` lists what its first tries get, one each; then it is answered."""

    def __init__(self):
        self.script, self.seen, self.lock = {}, [], threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                question = body["messages"][-1]["content"]
                with outer.lock:
                    outer.seen.append((question, self.headers.get("Authorization"), body, time.monotonic()))
                    todo = outer.script.get(question, [])
                    act = todo.pop(0) if todo else completion(f"answer to {question}")
                outer.act(self, act)

            def log_message(self, *_):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def act(self, handler, act):
        if callable(act):
            act(handler)
            return
        status, headers, body = act if isinstance(act, tuple) else (200, {}, act)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(raw)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(raw)

    def asked(self, question):
        return sum(seen[0] == question for seen in self.seen)


@pytest.fixture
def server():
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


def ask_all(server, file, asks=ASKS, key=KEY, max_cost=None, **changes):
    return collect(ServerTeacher(server.url, key, ServerConfig(**{**FAST, **changes})), asks, file, max_cost=max_cost)


def test_answers_come_in_the_order_of_the_asks_with_tokens_and_cost(server, tmp_path):
    rows = ask_all(
        server, tmp_path / "a.jsonl", price_in=2.0, price_out=10.0, system="Be brief.", top_p=0.9, options={"seed": 3}
    )
    assert [row["text"] for row in rows] == [f"answer to question {i}" for i in range(5)]
    assert rows[0] == {
        "key": "0", "prompt": "question 0", "text": "answer to question 0", "finished": True, "tokens_in": 7, "tokens_out": 3,
        "tries": 1, "error": None, "cost": (7 * 2 + 3 * 10) / 1e6,
    }  # fmt: skip
    assert totals(tmp_path / "a.jsonl") == {
        "answers": 5, "failed": 0, "tries": 5, "tokens_in": 35, "tokens_out": 15, "cost": pytest.approx(5 * 44e-6),
    }  # fmt: skip
    _, authorization, body, _ = server.seen[0]
    assert authorization == f"Bearer {KEY}" and body["messages"][0]["content"] == "Be brief."
    assert (body["top_p"], body["seed"]) == (0.9, 3)
    assert KEY not in (tmp_path / "a.jsonl").read_text()


def drop(handler):
    handler.connection.close()


def hang(handler):
    time.sleep(0.8)


def drip(handler):
    """Keeps the socket busy without ever ending."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(8):
        try:
            handler.wfile.write(b" ")
            handler.wfile.flush()
        except OSError:
            return
        time.sleep(0.15)


PASSING = {
    "429": (429, {"Retry-After": "0.01"}, {"error": "slow down"}),
    "500": (500, {}, b"oops"),
    "503 without a body": (503, {}, b""),
    "dropped": drop,
    "timeout": hang,
    "drip": drip,
    "half a reply": (200, {"Content-Length": "5000"}, b'{"choices": ['),
    "broken JSON": (200, {}, b'{"choices": [{"message": {"content": "x"'),
    "not an object": (200, {}, b"[1, 2]"),
    "NaN": (200, {}, b'{"choices": [{"message": {"content": "x"}}], "usage": NaN}'),
    "nested": (200, {}, b"[" * 100_000),
    "no choice": completion("", choices=[]),
    "null": completion(None),
    "empty": completion(""),
    "a number": completion(42),
    "a list": completion([{"type": "text", "text": "x"}]),
    "half a character": completion("\ud800"),
    "a null byte": completion("a\x00b"),
    "message is text": completion("", choices=[{"message": "x"}]),
}


@pytest.mark.parametrize("failure", PASSING.values(), ids=PASSING)
def test_what_may_pass_is_tried_again(server, tmp_path, failure):
    server.script["question 0"] = [failure, failure]
    (row,) = ask_all(server, tmp_path / "a.jsonl", ASKS[:1])
    assert (row["text"], row["tries"], server.asked("question 0")) == ("answer to question 0", 3, 3)


def test_too_long_a_reply_is_refused_while_it_is_read(server, tmp_path, monkeypatch):
    monkeypatch.setattr(teacher_server, "MAX_BODY", 10_000)
    server.script["question 0"] = [completion("x" * 20_000)]
    (row,) = ask_all(server, tmp_path / "a.jsonl", ASKS[:1])
    assert row["tries"] == 2
    with pytest.raises(Passing, match="too long"):
        checked_reply(json.dumps(completion("x" * (teacher_server.MAX_TEXT + 1))).encode())


def test_a_failure_is_kept_costs_included_and_asked_again_by_the_next_run(server, tmp_path):
    file = tmp_path / "a.jsonl"
    server.script["question 2"] = [completion(None)] * 3
    rows = ask_all(server, file, retries=2, price_out=1e6)
    assert [row["key"] for row in rows] == ["0", "1", "3", "4"]
    assert totals(file) == {"answers": 4, "failed": 1, "tries": 7, "tokens_in": 49, "tokens_out": 21, "cost": 21.0}
    (line,) = [row for row in map(json.loads, file.read_text().splitlines()[1:]) if row["text"] is None]
    assert (line["key"], line["error"], line["tries"]) == ("2", "the reply holds no text", 3)
    rows = ask_all(server, file, retries=2, price_out=1e6)
    assert [row["key"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert len(server.seen) == 8 and totals(file)["failed"] == 0  # only the missing one was asked


def test_a_refused_request_is_not_repeated_and_stops_nothing(server, tmp_path):
    server.script["question 1"] = [(400, {}, {"error": "prompt too long"})]
    rows = ask_all(server, tmp_path / "a.jsonl")
    assert [row["key"] for row in rows] == ["0", "2", "3", "4"] and server.asked("question 1") == 1


@pytest.mark.parametrize(("status", "words"), [(401, "TEACHER_API_KEY"), (403, "TEACHER_API_KEY"), (404, "TEACHER_BASE_URL")])
def test_a_wrong_key_or_address_stops_with_a_sentence_and_loses_nothing(server, tmp_path, status, words):
    server.script["question 3"] = [(status, {}, f"key {KEY} unknown".encode())]
    with pytest.raises(TeacherError, match=words) as caught:
        ask_all(server, tmp_path / "a.jsonl", workers=1)
    assert KEY not in str(caught.value) and "key *** unknown" in str(caught.value)
    assert totals(tmp_path / "a.jsonl")["answers"] == 3
    assert len(ask_all(server, tmp_path / "a.jsonl")) == 5


def test_what_is_under_way_when_another_ask_stops_the_run_is_kept(server, tmp_path):
    def late(handler):
        time.sleep(0.2)
        server.act(handler, completion("late"))

    server.script = {"question 0": [late], "question 1": [(401, {}, b"")]}
    with pytest.raises(TeacherError):
        ask_all(server, tmp_path / "a.jsonl")
    assert [json.loads(line)["text"] for line in (tmp_path / "a.jsonl").read_text().splitlines()[1:]] == ["late"]


def test_a_server_that_is_down_is_given_up(server, tmp_path):
    asks = [Ask(f"{i}", f"question {i}") for i in range(30)]
    server.script = {ask.prompt: [(500, {}, b"down")] for ask in asks}
    with pytest.raises(TeacherError, match="8 asks in a row failed"):
        ask_all(server, tmp_path / "a.jsonl", asks, retries=0)
    assert len(server.seen) <= 12
    assert len(ask_all(server, tmp_path / "a.jsonl", asks, retries=1)) == 30


def test_a_redirect_is_not_followed(server, tmp_path):
    other = Server()
    server.script["question 0"] = [(302, {"Location": other.url + "/chat/completions"}, b"")]
    assert ask_all(server, tmp_path / "a.jsonl", ASKS[:1]) == [] and other.seen == []
    other.http.shutdown()
    other.http.server_close()


def test_the_rate_limit_and_the_servers_wish_are_kept(server, tmp_path):
    server.script["question 0"] = [(429, {"Retry-After": "0.3"}, b"")]
    ask_all(server, tmp_path / "a.jsonl", workers=4, requests_per_minute=1200)
    starts = sorted(seen[3] for seen in server.seen)
    assert len(starts) == 6 and starts[4] - starts[0] > 0.15  # a twentieth of a second apart
    tries = [seen[3] for seen in server.seen if seen[0] == "question 0"]
    assert tries[1] - tries[0] >= 0.29


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(None, 0), ("7", 7), ("1e9", 600), ("-3", 0), ("nan", 0), ("soon", 0), ("Thu, 01 Jan 1970 00:00:00 GMT", 0)],
)
def test_retry_after(text, seconds):
    assert teacher_server._retry_after(text) == seconds


def test_the_cost_limit_stops_before_more_is_asked(server, tmp_path):
    file = tmp_path / "a.jsonl"
    limit = {"max_cost": 6.0, "price_out": 1e6, "workers": 1}  # 3 USD an answer
    assert len(ask_all(server, file, **limit)) == 2 and len(server.seen) == 2
    assert len(ask_all(server, file, **limit)) == 2 and len(server.seen) == 2
    assert len(ask_all(server, file, **{**limit, "max_cost": None})) == 5


def test_usage_that_cannot_be_is_not_believed():
    for usage in ({"prompt_tokens": -1}, {"prompt_tokens": 1e3}, {"prompt_tokens": True}, {"prompt_tokens": 10**9}, [], None):
        assert checked_reply(json.dumps(completion("x", usage=usage)).encode()).tokens_in == 0


def test_reasoning_sent_apart_is_put_in_front():
    message = {"content": "42", "reasoning_content": "6*7"}
    body = completion("", choices=[{"message": message, "finish_reason": "length"}])
    reply = checked_reply(json.dumps(body).encode())
    assert (reply.text, reply.finished) == ("<think>6*7</think>42", False)


def test_files_are_not_mixed(server, tmp_path):
    file = tmp_path / "a.jsonl"
    ask_all(server, file, ASKS[:1])
    with pytest.raises(ConfigError, match="another file"):
        ask_all(server, file, temperature=0.1)
    with pytest.raises(ConfigError, match="another prompt"):
        ask_all(server, file, [Ask("0", "another question")])
    with pytest.raises(ConfigError, match="share a key"):
        ask_all(server, file, [ASKS[0], ASKS[0]])


@pytest.mark.parametrize(
    ("url", "config", "words"),
    [
        ("ftp://host/v1", FAST, "https://host/v1"),
        ("https://user@host/v1", FAST, "user name"),
        ("http://api.example.com/v1", FAST, "in the clear"),
        ("https://api.example.com/v1", {**FAST, "model": ""}, "TEACHER_MODEL"),
        ("https://host/v1", {**FAST, "workers": 0}, "server.workers=0"),
    ],
)
def test_what_cannot_work_is_refused(url, config, words):
    with pytest.raises(ConfigError, match=words):
        ServerTeacher(url, KEY, ServerConfig(**config))


def test_address_key_and_model_come_from_the_environment(monkeypatch):
    monkeypatch.delenv("TEACHER_BASE_URL", raising=False)
    with pytest.raises(ConfigError, match="TEACHER_BASE_URL is not set"):
        ServerTeacher.from_environment(ServerConfig())
    for name, value in {"TEACHER_BASE_URL": "http://localhost:1/v1/", "TEACHER_API_KEY": "k", "TEACHER_MODEL": "env"}.items():
        monkeypatch.setenv(name, value)
    found = ServerTeacher.from_environment(ServerConfig())
    assert (found.url, found.key, found.name["model"]) == ("http://localhost:1/v1/chat/completions", "k", "env")
    assert ServerTeacher.from_environment(ServerConfig(model="own")).name["model"] == "own"


COLLECTOR = """
import sys
from pathlib import Path
from common.teacher import Ask, collect
from common.teacher_server import ServerConfig, ServerTeacher
config = ServerConfig(model="m", requests_per_minute=6000.0, workers=2)
asks = [Ask(str(i), f"question {i}") for i in range(40)]
print(len(collect(ServerTeacher(sys.argv[1], "", config), asks, Path(sys.argv[2]))))
"""


def test_killed_at_any_moment_it_goes_on_and_asks_nothing_twice_that_was_answered(server, tmp_path):
    file = tmp_path / "a.jsonl"
    line = [sys.executable, "-c", COLLECTOR, server.url, str(file)]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    while not file.exists() or file.read_bytes().count(b"\n") < 8:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = file.read_bytes()
    with open(file, "ab") as handle:  # a kill in the middle of a write
        handle.write(b'{"key": "39", "prompt": "ques')
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout == "40\n" and file.read_bytes().startswith(kept)
    rows = [json.loads(line) for line in file.read_bytes().splitlines()[1:]]
    assert sorted(row["key"] for row in rows) == sorted(str(i) for i in range(40))
    asked = [seen[0] for seen in server.seen]
    assert len(asked) - len(set(asked)) <= 2  # only those that were under way at the kill


@pytest.fixture
def local():
    tokenizer = build_phrase_tokenizer([*"abcdefgh", " "])
    shape = DecoderConfig(hidden=16, layers=1, heads=2, kv_heads=2, feedforward=32, max_length=64)
    return LocalTeacher(build_decoder(shape, tokenizer, 0), tokenizer, max_new_tokens=6, seed=3, batch=4)


def test_a_local_models_answers_do_not_depend_on_where_a_collection_was_broken_off(local, tmp_path):
    asks = [Ask(f"{i}/{k}", "ab" * (i + 1)) for i in range(3) for k in range(3)]
    whole = collect(local, asks, tmp_path / "whole.jsonl")
    assert len({row["text"] for row in whole}) > 3 and all(row["tokens_out"] <= 6 and row["cost"] == 0 for row in whole)
    assert whole[0]["tokens_in"] == 3  # <bos> a b
    broken = tmp_path / "broken.jsonl"
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    broken.write_bytes(b"".join(lines[:7]) + lines[7][:10])
    assert collect(local, asks, broken) == whole
    assert broken.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
