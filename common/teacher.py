"""Answers of a teacher, collected so that nothing is lost: from a local model, or from any OpenAI-compatible server.

    rows = collect(LocalTeacher(model, tokenizer, max_new_tokens=96, seed=0), asks, Path("answers.jsonl"))
    rows = collect(ServerTeacher.from_environment(config), asks, Path("answers.jsonl"))

The file has a head line that names the teacher, then one line per ask as soon as its answer (or its final failure) is
there. A run that was killed, or that failed half way, goes on with the asks that have no answer yet; so do failed asks.
Tokens and, where prices are given, cost stand in each line; `totals` adds them up, failed tries included where the server
said what they took. The server's side is common.teacher_server.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from common.files import json_line, locked, read_json_lines
from common.schema import ConfigError


class TeacherError(RuntimeError):
    """The teacher cannot be asked at all; the message says what to do. Answers so far are kept."""


@dataclass(frozen=True)
class Ask:
    """One answer that is wanted; several answers to a prompt have keys of their own."""

    key: str
    prompt: str


@dataclass(frozen=True)
class Reply:
    """What came of an ask: the text, or None and the error. ``finished``: ended by itself, not cut by the token limit."""

    text: str | None
    finished: bool = False
    tokens_in: int = 0
    tokens_out: int = 0
    tries: int = 1
    error: str | None = None


Keep = Callable[[Ask, Reply], bool]


class Teacher(Protocol):
    """``name``: what makes two teachers the same. ``price``: USD for a reply."""

    @property
    def name(self) -> dict[str, Any]: ...

    def price(self, reply: Reply) -> float: ...

    def answer(self, asks: Sequence[Ask], done: Container[str], keep: Keep) -> None:
        """Hands a reply to each ask whose key is not `done` to `keep`, in any order, until that returns False."""
        ...


# The file -------------------------------------------------------------------------------------------------------------


def collect(teacher: Teacher, asks: Sequence[Ask], file: Path, *, max_cost: float | None = None) -> list[dict[str, Any]]:
    """The answered asks as rows (key, prompt, text, finished, tokens_in, tokens_out, tries, cost), in the order of `asks`.

    Rows that `file` holds already are not asked again. ``max_cost``: USD after which no further ask is sent. Raises
    ConfigError where the file belongs to another teacher or a key to another prompt, TeacherError where the teacher
    cannot be asked; what has come in by then stays in the file.
    """
    if len({ask.key for ask in asks}) != len(asks):
        raise ConfigError("asks: two of them share a key; give each answer that is wanted a key of its own.")
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.with_name(f".{file.name}.lock")):
        rows = _resume(file, teacher.name, asks)
        spent = totals(file)["cost"]
        with open(file, "ab") as handle:

            def keep(ask: Ask, reply: Reply) -> bool:
                nonlocal spent
                row = {"key": ask.key, "prompt": ask.prompt, **asdict(reply), "cost": teacher.price(reply)}
                handle.write(json_line(row).encode())
                handle.flush()
                if row["cost"]:  # what was paid for outlives a power cut, too
                    os.fsync(handle.fileno())
                if reply.text is not None:
                    rows[ask.key] = row
                spent += row["cost"]
                return max_cost is None or spent < max_cost

            if max_cost is None or spent < max_cost:
                teacher.answer(asks, set(rows), keep)
            os.fsync(handle.fileno())
    return [rows[ask.key] for ask in asks if ask.key in rows]


def totals(file: Path) -> dict[str, float]:
    """Answers, failures, tries, tokens and cost of a file, failed asks included."""
    rows = [row for row in read_json_lines(file) if "key" in row]
    sums = {name: sum(row[name] for row in rows) for name in ("tries", "tokens_in", "tokens_out", "cost")}
    answered = {row["key"] for row in rows if row["error"] is None}
    return {"answers": len(answered), "failed": len({row["key"] for row in rows} - answered), **sums}


def _resume(file: Path, name: dict[str, Any], asks: Sequence[Ask]) -> dict[str, dict[str, Any]]:
    """Answers that the file holds, by key; a last line cut by a kill is taken off, an empty file gets its head."""
    content = file.read_bytes() if file.exists() else b""
    if (end := content.rfind(b"\n") + 1) < len(content):
        with open(file, "r+b") as handle:
            handle.truncate(end)
    lines = read_json_lines(file)
    if not lines:
        with open(file, "ab") as handle:
            handle.write(json_line({"teacher": name}).encode())
            handle.flush()
            os.fsync(handle.fileno())
        return {}
    if lines[0].get("teacher") != json.loads(json_line(name)):
        raise ConfigError(f"{file} holds answers of {lines[0].get('teacher')}, not of {name}; give this teacher another file.")
    rows = {row["key"]: row for row in lines[1:] if row["error"] is None}
    for ask in asks:
        if ask.key in rows and rows[ask.key]["prompt"] != ask.prompt:
            raise ConfigError(f"{file}: the answer with key {ask.key} belongs to another prompt; take another file.")
    return rows


# A local model ----------------------------------------------------------------------------------------------------------


@dataclass
class LocalTeacher:
    """A Hugging Face model of this machine. ``batch``: answers sampled together; the same batches whatever is done already,
    so that a resumed collection has the texts of an undisturbed one. ``label``: what tells its weights from others'."""

    model: Any
    tokenizer: Any
    max_new_tokens: int
    seed: int
    temperature: float = 1.0
    batch: int = 512
    label: str = "local model"

    @property
    def name(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("label", "max_new_tokens", "temperature", "seed", "batch")}

    def price(self, reply: Reply) -> float:
        """Nothing: its cost is counted in FLOPs, from the tokens."""
        return 0.0

    def answer(self, asks: Sequence[Ask], done: Container[str], keep: Keep) -> None:
        from common.rollout import sample  # here, since a server can be asked without two seconds of torch
        from common.seeding import generator
        from common.tokenizers import encode_prompt

        for begin in range(0, len(asks), self.batch):
            part = asks[begin : begin + self.batch]
            if all(ask.key in done for ask in part):
                continue
            ids = {prompt: encode_prompt(self.tokenizer, prompt) for prompt in {ask.prompt for ask in part}}
            found = sample(
                self.model,
                [ids[ask.prompt] for ask in part],
                max_new_tokens=self.max_new_tokens,
                stop_ids=[self.tokenizer.eos_token_id],
                temperature=self.temperature,
                generator=generator(self.seed, "teacher", begin),
            )
            for ask, completion in zip(part, found, strict=True):
                if ask.key not in done:
                    text = self.tokenizer.decode(completion.ids, skip_special_tokens=True)
                    keep(ask, Reply(text, completion.finished, len(ids[ask.prompt]), len(completion.ids)))
