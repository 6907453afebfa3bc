"""The splits, the vocabulary of a tiny model, tasks and scripted rows.

A task is a world and a question. The splits are ranges of worlds, so no fact of one is asked about in another.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from common.rejection import Row
from common.seeding import python_random
from common.tokenizers import PhraseEncoder, build_phrase_tokenizer, encode_feedback, encode_prompt
from experiments.exp_7_16_aworld import world as files
from experiments.exp_7_16_aworld.desk import QUOTA, UNAVAILABLE
from experiments.exp_7_16_aworld.env import BAD, BUDGET, EXCLUDED, NEEDS, AWorldEnv
from experiments.exp_7_16_aworld.hub import Bridge, LocalHub
from experiments.exp_7_16_aworld.questions import COMBINE, RELATIONS
from experiments.exp_7_16_aworld.scorer import CLOSE, OPEN
from experiments.exp_7_16_aworld.scripts import Mix, scripted_episode
from experiments.exp_7_16_aworld.servers import TOOLS
from experiments.exp_7_16_aworld.servers.desk import DAYS

SPLITS = {"train": range(500), "validation": range(500, 600), "test": range(600, 1000), "start": range(1000, 2000)}
QUESTIONS = 10_000  # of a world
ERRORS = (
    *("no such file", "no such page", "no such row", "no such column", "no such sheet", "no such part", "no such article"),
    *("no such field", "no such paper", "no such note", "nothing kept", "nothing kept of that year", "no meeting", "no words"),
    *("not a png file", "not a wav file", "the file cannot be read", "bad file name", "no sandbox on this machine"),
)  # what a caller in the compact language can bring about
_HOLES = re.compile(r"\{[xyab]\}")
PHRASES = (
    *(piece for template in (*(r.words for r in RELATIONS.values()), *COMBINE.values()) for piece in _HOLES.split(template)),
    *("What is ", "?", " Budget ", ".", OPEN, CLOSE),
    *(f"{tool.full} " if tool.params else tool.full for tool in TOOLS.values()),
    *files.PEOPLE, *files.COMPANIES, *files.CITIES, *DAYS, *map(str, files.YEARS), *map(str, range(201)),
    *(f"p{page}" for page in range(12)), *(f"k{paper}" for paper in range(1, 30)),
    *(files.STAFF, files.SALES, files.MEMO, files.DECK, files.REPORT, "notes.txt", ".png", ".wav"),
    *("name", "age", "city", "company", "units", "population", "height", "area", "author", "year", "cited"),
    *(" is led by ", " was led by ", " in ", " works at ", " sits in ", " earned ", " costs "),
    *("; ", " ", "+", "print(", ")", "red", "green", "blue", "kept", "none", "nothing found", "nobody", "no meeting"),
    *(BAD, NEEDS, EXCLUDED, BUDGET, UNAVAILABLE, QUOTA, "right", "wrong"),
    *(f"error: {text}" for text in ERRORS),
)  # fmt: skip


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word of the questions, calls and replies; other text is read as unknown."""
    return build_phrase_tokenizer([phrase for phrase in dict.fromkeys(PHRASES) if phrase])


def worlds(split: str, count: int) -> list[int]:
    """The first worlds of a split."""
    return list(SPLITS[split][:count])


def tasks(split: str, count: int, among: int) -> list[dict[str, Any]]:
    """Tasks of a split over its first `among` worlds, levels in turn."""
    chosen = worlds(split, among)
    return [{"world": chosen[number // 3 % among], "question": number} for number in range(count)]


def training_tasks(among: int, seed: int, step: int, count: int) -> list[dict[str, Any]]:
    """The training tasks of a step; a longer list begins with the shorter one."""
    stream, chosen = python_random(seed, "tasks", step), worlds("train", among)
    return [{"world": stream.choice(chosen), "question": stream.randrange(QUESTIONS)} for _ in range(count)]


def scripted_rows(
    tokenizer: Any, root: Path, split: str, among: int, mix: Mix, count: int, seed: int, env: dict[str, Any], conditions: Any
) -> list[Row]:
    """(ids, mask) of scripts about the first `among` worlds of a split, played on the tools of this process."""
    encode, stream = PhraseEncoder(tokenizer), python_random(seed, "scripts", split)
    start, reply = (functools.cache(functools.partial(f, tokenizer)) for f in (encode_prompt, encode_feedback))
    rows: list[Row] = []
    with Bridge(LocalHub(root, conditions)) as bridge:
        made = AWorldEnv(bridge, root, **env)
        for number in range(count):
            task = {"world": stream.choice(worlds(split, among)), "question": stream.randrange(QUESTIONS // 3) * 3 + number % 3}
            episode = scripted_episode(made, task, mix, encode, start, reply, seed, "script", number)
            rows.append((episode.ids, episode.mask))
        made.close()
    return rows


def unread(tokenizer: Any, rows: Sequence[Row]) -> float:
    """Share of tokens that a tiny model cannot read."""
    ids = [token for row, _ in rows for token in row]
    return ids.count(tokenizer.unk_token_id) / len(ids)
