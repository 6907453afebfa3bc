"""Problems from local files, for a pre-trained model (scale=gpu): a .jsonl or .parquet file with a question and an answer.

Columns are found by name; of a prompt in chat form (DAPO-Math-17k) the first user turn counts, and of `reward_model` its
ground truth. Every gold answer is valued when it is loaded (common.verifiers.mathematics).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from common.schema import ConfigError
from common.seeding import python_random
from common.verifiers.mathematics import BadAnswer, check_gold
from experiments.exp_7_15_retool.settings import ProblemFiles

QUESTIONS, ANSWERS = ("question", "problem", "prompt", "Problem"), ("answer", "Answer", "reward_model")


@cache
def load(source: str, count: int) -> tuple[tuple[str, str], ...]:
    """The first `count` (question, gold answer) of a file in a fixed random order; bad gold answers are left out and counted.

    ConfigError names the file and what is wrong with it.
    """
    rows = read(Path(source))
    found: list[tuple[str, str]] = []
    skipped = 0
    for place in python_random("problems", source).sample(range(len(rows)), len(rows)):
        if len(found) == count:
            break
        where = f"{source}, row {place + 1}"
        question, answer = columns(rows[place], where)
        try:
            check_gold(answer, where)
        except BadAnswer:
            skipped += 1
            continue
        found.append((question, answer))
    if skipped:
        print(f"{source}: {skipped} problems left out, their answers cannot be valued")
    if not found:
        raise ConfigError(f"problems: {source} holds no problem whose answer can be valued.")
    return tuple(found)


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a local file."""
    if not path.is_file():
        raise ConfigError(f"problems: there is no file {path}; give a local .jsonl or .parquet file.")
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return list(pyarrow.parquet.read_table(path).to_pylist())
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except ValueError as error:
        raise ConfigError(f"problems: {path} is not valid JSON lines: {error}.") from None


def columns(row: dict[str, Any], where: str) -> tuple[str, str]:
    """Question and gold answer of a row."""
    question = next((row[name] for name in QUESTIONS if row.get(name)), None)
    answer = next((row[name] for name in ANSWERS if row.get(name) is not None), None)
    if isinstance(question, list):
        question = next((turn.get("content") for turn in question if turn.get("role") == "user"), None)
    if isinstance(answer, dict):
        answer = answer.get("ground_truth")
    if not question or answer is None:
        raise ConfigError(f"{where}: needs a column of {QUESTIONS} and one of {ANSWERS}; it has {sorted(row)}.")
    return str(question).strip(), str(answer).strip(" \t\n")  # a form feed is a broken \\frac and must be seen


def tasks(source: str, count: int, lead: str) -> list[dict[str, Any]]:
    """A file's problems as tasks, with the text that explains the protocol in front of each question."""
    return [{"question": f"{lead}{question}", "answer": answer} for question, answer in load(source, count)]


def training_pool(chosen: ProblemFiles, tool: bool, count: int) -> list[dict[str, Any]]:
    """The training problems."""
    return tasks(chosen.train, count, chosen.protocol if tool else chosen.text)


def splits(chosen: ProblemFiles, tool: bool, count: int) -> dict[str, list[dict[str, Any]]]:
    """Name -> the problems of a test file."""
    lead = chosen.protocol if tool else chosen.text
    return {name: tasks(source, count, lead) for name, source in chosen.test.items()}
