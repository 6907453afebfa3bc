"""Problems with a text answer from local files or the hub (GSM8K, MATH, AIME, DeepScaleR), and their environment.

A source is a local .jsonl, .json or .parquet file, or hub:OWNER/NAME:CONFIG:SPLIT (CONFIG may be empty). The columns are
found by name: `question` or `problem`, and `answer` or, where there is none, the last box of `solution`. GSM8K's answer is
what stands behind its ####. Every gold answer is valued when it is loaded (common.verifiers.mathematics).
"""

from __future__ import annotations

import json
import re
import string
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
from gymnasium import spaces

from common.schema import ConfigError
from common.seeding import python_random
from common.verifiers.mathematics import BadAnswer, boxed, check_gold, grade_math
from common.verifiers.thinking import split_thinking

QUESTIONS, ANSWERS, SOLUTIONS = ("question", "problem", "Problem"), ("answer", "Answer"), ("solution", "Solution")
_TEXT = spaces.Text(min_length=0, max_length=1_000_000, charset=string.printable)


@cache
def load(source: str, count: int, name: str, answer_format: str = "", skip_bad: bool = False) -> list[dict[str, Any]]:
    """The first `count` problems of a source in a fixed random order, as tasks: question, answer, level (`name`), index.

    ConfigError names the source and what is wrong with it; with `skip_bad`, problems whose gold answer cannot be valued are
    left out, and their number is printed.
    """
    rows = from_hub(source) if source.startswith("hub:") else from_file(Path(source))
    if not rows:
        raise ConfigError(f"problems: {source} holds no rows.")
    tasks: list[dict[str, Any]] = []
    skipped = 0
    for place in python_random("problems", source).sample(range(len(rows)), len(rows)):
        if len(tasks) == count:
            break
        where = f"{source}, row {place + 1}"
        question, answer = columns(rows[place], where)
        try:
            check_gold(answer, where)
        except BadAnswer:
            if not skip_bad:
                raise
            skipped += 1
            continue
        tasks.append({"question": f"{question}{answer_format}", "answer": answer, "level": name, "index": len(tasks)})
    if skipped:
        print(f"{source}: {skipped} problems left out, their answers cannot be valued")
    if not tasks:
        raise ConfigError(f"problems: {source} holds no problem whose answer can be valued.")
    return tasks


def from_hub(source: str) -> list[dict[str, Any]]:
    """Rows of hub:OWNER/NAME:CONFIG:SPLIT."""
    parts = source.split(":")
    if len(parts) != 4 or not parts[1] or not parts[3]:
        raise ConfigError(f"problems: {source} is not hub:OWNER/NAME:CONFIG:SPLIT (CONFIG may be empty).")
    from datasets import load_dataset  # needs the network, unless it is in the hub's cache

    return list(load_dataset(parts[1], parts[2] or None, split=parts[3]))


def from_file(path: Path) -> list[dict[str, Any]]:
    """Rows of a local file."""
    if not path.is_file():
        raise ConfigError(f"problems: there is no file {path}; give a local file or hub:OWNER/NAME:CONFIG:SPLIT.")
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return list(pyarrow.parquet.read_table(path).to_pylist())
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.split("\n") if line.strip()]
        return list(json.loads(text))
    except ValueError as error:
        raise ConfigError(f"problems: {path} is not valid JSON: {error}.") from None


def columns(row: dict[str, Any], where: str) -> tuple[str, str]:
    """Question and gold answer of a row."""
    question = next((row[name] for name in QUESTIONS if name in row), None)
    answer = next((str(row[name]) for name in ANSWERS if row.get(name) is not None), None)
    if answer is None:
        boxes = [box for name in SOLUTIONS if row.get(name) for box in boxed(row[name])]
        answer = boxes[-1] if boxes else None
    if not question or answer is None:
        raise ConfigError(f"{where}: needs a column of {QUESTIONS} and one of {ANSWERS} or {SOLUTIONS}; it has {sorted(row)}.")
    if "####" in answer:
        answer = re.sub(r"(?<=[0-9]),(?=[0-9])", "", answer.rsplit("####", 1)[1])
    return str(question).strip(), answer.strip(" \t\n")  # a form feed is a broken \\frac and must be seen


def training_tasks(pool: list[dict], seed: int, step: int, count: int) -> list[dict]:
    """The tasks of a step, without repeats within it; a longer list begins with the shorter one."""
    order = python_random(seed, "tasks", step).sample(range(len(pool)), len(pool))
    return [pool[order[i % len(order)]] for i in range(count)]


class Problems(gymnasium.Env):
    """One episode is one problem and one answer to it; reset(options=) names `question` and `answer`.

    Right is: exactly one </think>, behind it one boxed answer that equals the gold answer. info: success, reason, skipped.
    """

    metadata: ClassVar = {"render_modes": []}

    def __init__(self) -> None:
        self.observation_space = _TEXT
        self.action_space = _TEXT
        self._answer: str | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The question; a sum of two digits where no problem is named."""
        super().reset(seed=seed)
        if not options or "question" not in options:
            one, other = (int(n) for n in self.np_random.integers(0, 10, 2))
            options = {"question": f"What is {one}+{other}?", "answer": str(one + other)}
        self._answer = str(options["answer"])
        return str(options["question"]), {"success": False, "reason": ""}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Grades the answer and ends the episode.

        TypeError unless the action is a string; gymnasium.error.ResetNeeded when no episode is running.
        """
        if not isinstance(action, str):
            raise TypeError(f"the answer must be text; got {type(action).__name__}")
        if self._answer is None:
            raise gymnasium.error.ResetNeeded("call reset before step: no episode is running")
        gold, self._answer = self._answer, None
        parts = split_thinking(action, opened=True)
        if parts.fault:
            return "", 0.0, True, False, {"success": False, "reason": parts.fault, "skipped": parts.skipped}
        found = grade_math(gold=gold, text=parts.answer)
        info = {"success": found.success, "reason": found.reason, "skipped": parts.skipped}
        return "", float(found.success), True, False, info
