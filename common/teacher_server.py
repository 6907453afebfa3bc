"""A teacher behind an OpenAI-compatible server: vLLM, llama.cpp, Ollama, a provider (see common.teacher).

What a server sends is untrusted: status, size, JSON, types and text are checked, and nothing of it is ever evaluated.
The key comes from the environment and is written nowhere; redirects are not followed, since they would carry it along.
"""

from __future__ import annotations

import concurrent.futures
import email.utils
import http.client
import ipaddress
import itertools
import json
import os
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.schema import ConfigError, within
from common.teacher import Ask, Keep, Reply, TeacherError

BASE_URL, API_KEY, MODEL = "TEACHER_BASE_URL", "TEACHER_API_KEY", "TEACHER_MODEL"
MAX_BODY = 4_000_000  # bytes of a reply
MAX_TEXT = 400_000  # characters of an answer
MAX_TOKENS = 10_000_000  # a usage figure above this is not believed
SHOWN = 300  # characters of an error body that are kept
FATAL = {
    401: f"the key in {API_KEY} is refused",
    403: f"the key in {API_KEY} is refused",
    404: f"{BASE_URL} or the model is wrong",
}
PASSING = {408, 409, 425, 429}  # statuses below 500 that may pass if asked again
GIVE_UP = 8  # asks in a row that failed after all their tries: the server is down, not the ask


class Passing(Exception):
    """One try failed in a way that may pass. ``wait``: seconds the server asks for."""

    def __init__(self, reason: str, wait: float = 0.0, usage: tuple[int, int] | None = None) -> None:
        super().__init__(reason)
        self.wait, self.usage = wait, usage or (0, 0)


@dataclass(frozen=True)
class ServerConfig:
    """How a server is asked. ``model``: empty takes TEACHER_MODEL. Prices: USD per million tokens, 0 where unknown.

    ``timeout_s``: for a whole reply. A try that fails in a way that may pass is repeated up to ``retries`` times, after
    ``backoff_s``, twice that, and so on up to ``backoff_max_s`` (with jitter), or after what the server asks for.
    ``options``: further keys of the request, such as {"presence_penalty": 0.5}; only the server knows them.
    """

    model: str = ""
    system: str = ""
    temperature: float = 0.7
    top_p: float = 1.0
    max_tokens: int = 4096
    workers: int = 4
    requests_per_minute: float = 60.0
    timeout_s: float = 300.0
    retries: int = 6
    backoff_s: float = 1.0
    backoff_max_s: float = 60.0
    price_in: float = 0.0
    price_out: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("max_tokens", "workers"):
            within(f"server.{key}", getattr(self, key), 1)
        for key in ("requests_per_minute", "timeout_s"):
            within(f"server.{key}", getattr(self, key), 0, above=True)
        within("server.top_p", self.top_p, 0, 1, above=True)
        for key in ("temperature", "retries", "backoff_s", "price_in", "price_out"):
            within(f"server.{key}", getattr(self, key), 0)
        within("server.backoff_max_s", self.backoff_max_s, self.backoff_s)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class ServerTeacher:
    """POST <base_url>/chat/completions, `workers` asks at a time."""

    def __init__(self, base_url: str, key: str, config: ServerConfig) -> None:
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ConfigError(f"{BASE_URL}: must look like https://host/v1, without user name or query.")
        if not config.model:
            raise ConfigError(f"server.model is empty: name the model, or set {MODEL}.")
        if key and parts.scheme == "http" and not _is_near(parts.hostname):
            raise ConfigError(f"{BASE_URL}: http would send the key in the clear to {parts.hostname}; use https.")
        self.url, self.key, self.config = base_url.rstrip("/") + "/chat/completions", key, config
        self.opener = urllib.request.build_opener(_NoRedirect)
        self.stopped, self.clock, self.next_start = threading.Event(), threading.Lock(), 0.0

    @classmethod
    def from_environment(cls, config: ServerConfig) -> ServerTeacher:
        """Address, key and (if the configuration names none) model from TEACHER_BASE_URL, TEACHER_API_KEY, TEACHER_MODEL."""
        base_url = os.environ.get(BASE_URL, "")
        if not base_url:
            raise ConfigError(f"{BASE_URL} is not set; for a vLLM server on this machine it is http://localhost:8000/v1.")
        model = config.model or os.environ.get(MODEL, "")
        return cls(base_url, os.environ.get(API_KEY, ""), ServerConfig(**{**vars(config), "model": model}))

    @property
    def name(self) -> dict[str, Any]:
        keys = ("model", "system", "temperature", "top_p", "max_tokens", "options")
        chosen = {key: getattr(self.config, key) for key in keys}
        return {"url": self.url, **chosen}

    def price(self, reply: Reply) -> float:
        """USD of a reply at the configured prices."""
        return (reply.tokens_in * self.config.price_in + reply.tokens_out * self.config.price_out) / 1e6

    def answer(self, asks: Sequence[Ask], done: Container[str], keep: Keep) -> None:
        waiting = iter([ask for ask in asks if ask.key not in done])
        running: dict[concurrent.futures.Future[Reply], Ask] = {}
        failed_in_a_row = 0
        self.stopped.clear()
        pool = concurrent.futures.ThreadPoolExecutor(self.config.workers)
        try:
            running = {pool.submit(self.ask, ask): ask for ask in itertools.islice(waiting, self.config.workers)}
            while running:
                ended, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in ended:
                    reply = future.result()
                    failed_in_a_row = 0 if reply.text is not None else failed_in_a_row + 1
                    if not keep(running.pop(future), reply):
                        return
                    if failed_in_a_row >= GIVE_UP:
                        raise TeacherError(f"{GIVE_UP} asks in a row failed, the last with: {reply.error}. Run again later.")
                    if (following := next(waiting, None)) is not None:
                        running[pool.submit(self.ask, following)] = following
        finally:  # whatever ended it: what is under way may be paid for, so it is waited for and kept
            self.stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)
            for future, ask in running.items():
                if not future.cancelled() and future.exception() is None and future.result().text is not None:
                    keep(ask, future.result())

    def ask(self, ask: Ask) -> Reply:
        """A reply after as many tries as it takes; TeacherError where no try can help."""
        tokens_in = tokens_out = 0
        jitter = random.Random(ask.key)
        for tries in range(1, self.config.retries + 2):
            self._wait_for_turn()
            try:
                reply = self.post(ask.prompt)
                return Reply(
                    reply.text, reply.finished, reply.tokens_in + tokens_in, reply.tokens_out + tokens_out, tries, reply.error
                )
            except Passing as error:
                reason, wait = str(error), error.wait
                tokens_in, tokens_out = tokens_in + error.usage[0], tokens_out + error.usage[1]
            pause = min(self.config.backoff_max_s, self.config.backoff_s * 2 ** (tries - 1)) * (0.5 + jitter.random() / 2)
            if self.stopped.is_set() or (tries <= self.config.retries and self.stopped.wait(max(pause, wait))):
                break
        return Reply(None, False, tokens_in, tokens_out, tries, reason)

    def _wait_for_turn(self) -> None:
        """Starts are spread evenly, so that no minute holds more than requests_per_minute of them."""
        with self.clock:
            start = max(time.monotonic(), self.next_start)
            self.next_start = start + 60.0 / self.config.requests_per_minute
        self.stopped.wait(max(0.0, start - time.monotonic()))

    def post(self, prompt: str) -> Reply:
        """One try. Raises Passing or TeacherError; a request that the server refuses for good is a Reply with an error."""
        config = self.config
        messages = [{"role": "system", "content": config.system}] if config.system else []
        messages.append({"role": "user", "content": prompt})
        body = {**config.options, "model": config.model, "messages": messages}
        body |= {key: getattr(config, key) for key in ("temperature", "top_p", "max_tokens")}
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        deadline = time.monotonic() + config.timeout_s
        try:
            with self.opener.open(request, timeout=config.timeout_s) as response:
                return checked_reply(_read(response, deadline))
        except urllib.error.HTTPError as error:
            with error:
                text = self._shown(error, deadline)
            if error.code in FATAL:
                raise TeacherError(f"HTTP {error.code}: {FATAL[error.code]}. The server says: {text}") from None
            if error.code in PASSING or error.code >= 500:
                raise Passing(f"HTTP {error.code}: {text}", _retry_after(error.headers.get("Retry-After"))) from None
            return Reply(None, error=f"HTTP {error.code}: {text}")
        except (OSError, http.client.HTTPException) as error:  # refused, reset, timed out, cut off
            raise Passing(f"{type(error).__name__}: {error}"[:SHOWN]) from None

    def _shown(self, error: urllib.error.HTTPError, deadline: float) -> str:
        try:
            text = _read(error, deadline).decode("utf-8", "replace")[:SHOWN]
        except (OSError, http.client.HTTPException, Passing):
            return ""
        return text.replace(self.key, "***") if self.key else text


def _is_near(host: str) -> bool:
    """This machine or a private network."""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return host == "localhost"


def _read(response: Any, deadline: float) -> bytes:
    """The body; Passing where it is too long or takes too long (a server that drips never trips the socket's timeout)."""
    parts, size = [], 0
    while part := response.read1(65_536):
        parts.append(part)
        size += len(part)
        if size > MAX_BODY:
            raise Passing(f"the reply is longer than {MAX_BODY:,} bytes")
        if time.monotonic() > deadline:
            raise Passing("the reply took too long")
    return b"".join(parts)


def _retry_after(text: str | None) -> float:
    """Seconds of a Retry-After header, as a number or a date, at most ten minutes; 0 where there is none to believe."""
    try:
        seconds = float(text or 0)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text or "").timestamp() - time.time()
        except ValueError:
            return 0.0
    return min(600.0, seconds) if seconds > 0 else 0.0


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def checked_reply(body: bytes) -> Reply:
    """The answer in a chat completion; Passing where it is not one. `reasoning_content`, which some servers send apart, is
    put in front of the answer as <think> ... </think>."""
    try:
        data = json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise Passing("the reply is not JSON") from None
    usage = _usage(data)
    pick = _get(data, "choices", list)
    message = _get(pick[0] if pick else None, "message", dict)
    text, thought = _get(message, "content", str), _get(message, "reasoning_content", str)
    if not text or len(text) + len(thought or "") > MAX_TEXT or "\x00" in text:
        raise Passing("the reply holds no text" if not text else "the text is too long or not text", usage=usage)
    text = f"<think>{thought}</think>{text}" if thought else text
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Passing("the text is not Unicode", usage=usage) from None
    return Reply(text, _get(pick[0], "finish_reason", str) == "stop", *usage)


def _get(value: Any, key: str, kind: type) -> Any:
    """value[key] if that is of this very type, else None."""
    found = value.get(key) if isinstance(value, dict) else None
    return found if type(found) is kind else None


def _usage(data: Any) -> tuple[int, int]:
    """Prompt and completion tokens; 0 where the server does not say, or says what cannot be."""
    usage = _get(data, "usage", dict)
    first, second = (_get(usage, key, int) or 0 for key in ("prompt_tokens", "completion_tokens"))
    return tuple(count if 0 <= count <= MAX_TOKENS else 0 for count in (first, second))  # type: ignore[return-value]
