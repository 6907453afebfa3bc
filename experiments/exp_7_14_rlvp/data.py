"""What each world is made of: environment, vocabulary, tasks and their splits, scripted rows for SFT.

A task is its number; the splits are ranges of numbers: training 0..499 and test from 1000 on as in the source, validation
between them, and from 10,000 on the tasks whose scripts the start model learns from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from common.episodes import Episode
from common.rejection import Row
from common.seeding import python_random
from common.tokenizers import PhraseEncoder, build_phrase_tokenizer
from experiments.exp_7_14_rlvp import csops, fileops, theorem
from experiments.exp_7_14_rlvp.csops import CSOps
from experiments.exp_7_14_rlvp.env import BAD_CALL, BLOCKED, RULES_HEAD, ToolEnv
from experiments.exp_7_14_rlvp.fileops import FileOps
from experiments.exp_7_14_rlvp.scripts import Mix, script
from experiments.exp_7_14_rlvp.terminal import Terminal
from experiments.exp_7_14_rlvp.theorem import Theorems

SPLITS = {"train": range(500), "validation": range(500, 1000), "test": range(1000, 10_000), "start": range(10_000, 40_000)}

FILE_PHRASES = (
    *(f"{kind} " for kind in fileops.KINDS),
    *(f"{tool.verb} " if tool.params else tool.verb for tool in fileops.TOOLS if tool.verb != "delete"),
    *("delete ", "/", " ", "; ", "ok", "error", "empty", "holds", "pass", "fail "),
    *(f"s{number}" for number in range(1, fileops.MOST_STAGES + 1)),
    *fileops.CONFIGS, *fileops.SCRATCH, *fileops.KEPT,
    *(f" {key}={value}" for key in fileops.KEYS for value in range(10)),
)  # fmt: skip
DESK_PHRASES = (
    *(f"{tool.verb} " for tool in csops.TOOLS),
    *csops.GOALS, *(word for pair in csops.GOALS.values() for word in pair),
    *csops.ACCOUNTS, *csops.CITIES, *csops.NUMBERS, *csops.HOURS,
    *(" ", " for ", " in ", "; ", "no entry", "verified", "sent", "settled", csops.REFUSAL),
)  # fmt: skip
PROOF_PHRASES = (
    *(f"{tool.verb} " if tool.params else tool.verb for tool in theorem.TOOLS),
    *theorem.NAMES, *theorem.ATOMS, *theorem.VARIABLES,
    *("->", "/\\", "\\/", "(", ")", "=", "f(", "|-", ":", " ", "error"),
    *(f"{count} " for count in range(1, 10)),
)  # fmt: skip


@dataclass(frozen=True)
class Domain:
    """An environment, and the words of its texts."""

    make_env: Callable[[], ToolEnv]
    phrases: tuple[str, ...]
    max_new_tokens: int


DOMAINS = {
    "fileops": Domain(FileOps, FILE_PHRASES, 10),
    "csops": Domain(CSOps, DESK_PHRASES, 8),
    "theorems": Domain(Theorems, PROOF_PHRASES, 4),
    "terminal": Domain(Terminal, (), 512),  # its commands are free text: for pre-trained models alone
}


def build_tokenizer(domain: str) -> PreTrainedTokenizerFast:
    """One token per word of the domain's texts; the rules are one token, as a tiny model could not read them."""
    found = DOMAINS[domain]
    phrases = [*found.phrases, BAD_CALL, BLOCKED, RULES_HEAD + found.make_env().rules_text]
    return build_phrase_tokenizer(phrases)


def tasks(split: str, options: Mapping[str, Any], count: int, begin: int = 0) -> list[dict]:
    """`count` tasks of a split from its `begin`th on, round and round, with the options of their world."""
    numbers = SPLITS[split]
    return [{"task": numbers[(begin + i) % len(numbers)], **options} for i in range(count)]


def training_tasks(options: Mapping[str, Any], seed: int, step: int, count: int) -> list[dict]:
    """The training tasks of a step, without repeats until all were used; a longer list begins with the shorter one."""
    numbers = SPLITS["train"]
    order = python_random(seed, "tasks", step).sample(numbers, len(numbers))
    return [{"task": order[i % len(order)], **options} for i in range(count)]


def scripted_episode(env: ToolEnv, task: dict, mix: Mix, encode: PhraseEncoder, *stream: int | str) -> Episode:
    """A scripted episode, token for token as run_episodes would build it; the calls are the policy's, with logp 0.0."""
    observation, _ = env.reset(options=dict(task))
    prompt = [encode.bos, *encode(observation)]
    episode = Episode([], [], [], [], prompt_length=len(prompt), task=task, group=0)
    episode.append(prompt, None, -1)
    reply = None
    for turn, text in enumerate(script(env.world, mix, python_random(*stream, task["task"]))):
        if reply is not None:
            episode.append(encode(reply), None, -1)
        call = [*encode(text), encode.eos]
        episode.append(call, [0.0] * len(call), turn)
        reply, reward, episode.terminated, episode.truncated, info = env.step(text)
        episode.texts.append(text)
        episode.turn_rewards.append(reward)
        episode.infos.append(info)
        if episode.terminated or episode.truncated:
            break
    episode.reward, episode.success = sum(episode.turn_rewards), bool(episode.infos[-1]["success"])
    return episode


def scripted_row(env: ToolEnv, task: dict, mix: Mix, encode: PhraseEncoder, *stream: int | str) -> Row:
    """(ids, mask) of a scripted episode; the calls are the targets."""
    episode = scripted_episode(env, task, mix, encode, *stream)
    return episode.ids, episode.mask


def start_rows(
    domain: str,
    encode: PhraseEncoder,
    choices: Sequence[Mapping[str, Any]],
    mix: Mix,
    ruled: float,
    obeying: Mix,
    count: int,
    seed: int,
) -> list[Row]:
    """`count` scripts of mixed quality, over the worlds of `choices` in turn; a share `ruled` reads the rules and obeys."""
    env, rows = DOMAINS[domain].make_env(), []
    stream = python_random(seed, "start", domain)
    for number in stream.sample(SPLITS["start"], count):
        rules = stream.random() < ruled
        task = {"task": number, **choices[len(rows) % len(choices)], "rules": rules}
        rows.append(scripted_row(env, task, obeying if rules else mix, encode, seed, "start"))
    return rows


def demonstration_rows(
    domain: str, encode: PhraseEncoder, options: Mapping[str, Any], mix: Mix, count: int, seed: int
) -> list[Row]:
    """Scripts of the first `count` training tasks, for the SFT controls."""
    env = DOMAINS[domain].make_env()
    return [scripted_row(env, task, mix, encode, seed, "demonstration") for task in tasks("train", options, count)]
