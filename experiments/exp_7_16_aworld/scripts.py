"""Scripted episodes of mixed quality, from which the start model learns the tools' language, and perfect ones for SFT.

A script follows the shortest plan of its question and departs from it as `Mix` says: it forgets what a tool needs first,
takes a dear tool where a cheap one would do, calls what nobody asked for, gives up when a tool is not available, answers
wrongly. The replies to it are always the environment's true ones. What it does not know it guesses.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, fields

from common.episodes import Episode
from common.schema import within
from common.seeding import python_random
from common.tokenizers import PhraseEncoder
from experiments.exp_7_16_aworld import world as files
from experiments.exp_7_16_aworld.env import AWorldEnv, Step
from experiments.exp_7_16_aworld.protocol import write
from experiments.exp_7_16_aworld.questions import NAMES, Call
from experiments.exp_7_16_aworld.servers import TOOLS
from experiments.exp_7_16_aworld.servers.desk import DAYS
from experiments.exp_7_16_aworld.world import World, make_world

Encode = Callable[..., list[int]]


@dataclass(frozen=True)
class Mix:
    """Probabilities: what a tool ``needs`` is called first; a ``dear`` tool replaces a cheap one; ``junk`` comes before a
    call; a call that met a passing failure is made again (``retry``); the answer is ``wrong``."""

    needs: float = 0.6
    dear: float = 0.25
    junk: float = 0.25
    retry: float = 0.6
    wrong: float = 0.15

    def __post_init__(self) -> None:
        for item in fields(self):
            within(f"mix.{item.name}", getattr(self, item.name), 0, 1)


PERFECT = Mix(1.0, 0.0, 0.0, 1.0, 0.0)


def dear_call(call: Call) -> Call:
    """A call of a dearer tool whose reply holds the same; the call itself where there is none."""
    arguments = call.arguments
    if call.tool == "tables.lookup":
        return Call("tables.rows", {"file": arguments["file"]})
    if call.tool == "documents.docx_find":
        return Call("documents.docx_read", {"file": arguments["file"]})
    if call.tool == "tables.cell":
        return Call("tables.sheet", {"file": arguments["file"], "sheet": arguments["sheet"]})
    if call.tool == "encyclopaedia.fact":
        return Call("encyclopaedia.article", {"title": arguments["title"]})
    if call.tool == "calculator.evaluate":
        return Call("shell.python", {"code": f"print({arguments['formula']})"})
    if call.tool == "papers.cited":
        return Call("papers.show", arguments)
    return call


def junk_call(world: World, stream: random.Random) -> Call:
    """A call that the question did not ask for."""
    person, company, city = (stream.choice(NAMES[kind](world)) for kind in ("person", "company", "city"))
    return stream.choice(
        (
            Call("search.find", {"words": stream.choice((person, company))}),
            Call("calendar.when", {"name": person}),
            Call("calendar.free", {}),
            Call("encyclopaedia.fact", {"title": city, "field": stream.choice(("height", "area"))}),
            Call("encyclopaedia.fields", {"title": city}),
            Call("images.colour", {"file": f"{company}.png"}),
            Call("audio.length", {"file": f"{company}.wav"}),
            Call("tables.columns", {"file": files.STAFF}),
            Call("archive.list", {"name": company}),
            Call("papers.author", {"name": person}),
            Call("memory.put", {"key": person, "text": company}),
            Call("shell.files", {}),
        )
    )


def guess_argument(call: Call, stream: random.Random) -> Call:
    """The call with a guess in place of what only the tool before it would have told."""
    if call.tool == "browser.open":
        return Call(call.tool, {"page": f"p{stream.randint(1, 11)}"})
    if call.tool == "papers.cited":
        return Call(call.tool, {"paper": f"k{stream.randint(1, 29)}"})
    return call


def guess_answer(world: World, stream: random.Random) -> str:
    """An answer of some kind."""
    kind = stream.choice(("number", "person", "city", "day"))
    if kind == "number":
        return str(stream.choice(files.NUMBERS))
    return stream.choice(DAYS) if kind == "day" else stream.choice(NAMES[kind](world))


def play(env: AWorldEnv, mix: Mix, stream: random.Random, step: Callable[[str], Step]) -> None:
    """Plays the script of the environment's question; `step` takes each turn's text. The environment was reset."""
    assert env.question is not None and env.context is not None
    asked, world = env.question, make_world(env.context.world)
    knows = True
    for number, call in enumerate(asked.plan):
        following = asked.plan[number + 1] if number + 1 < len(asked.plan) else None
        if stream.random() < mix.junk:
            step(write(junk_call(world, stream)))
        if following and TOOLS[following.tool].needs == call.tool and stream.random() >= mix.needs:
            step(write(guess_argument(following, stream)))  # refused: what it needs comes now, and then the call itself
        if stream.random() < mix.dear:
            call = dear_call(call)
        outcome = step(write(call))[4]["outcome"]
        while outcome == "passing" and stream.random() < mix.retry and env.turn + 1 < env.limit:
            outcome = step(write(call))[4]["outcome"]
        if outcome != "answered":  # whatever follows would be built on nothing
            knows = False
            break
    wrong = not knows or stream.random() < mix.wrong
    if env.question is not None:
        step(f"<answer>{guess_answer(world, stream) if wrong else asked.answer}</answer>")


class Over(Exception):
    """The turn limit ended a script."""


def scripted_episode(
    env: AWorldEnv, task: dict, mix: Mix, encode: PhraseEncoder, start: Encode, reply: Encode, *stream: int | str
) -> Episode:
    """A scripted episode, token for token as run_episodes would build it; the turns are the policy's, with logp 0.0.

    start, reply: text -> ids of a prompt and of a reply (common.tokenizers.encode_prompt, encode_feedback).
    """
    observation, _ = env.reset(options=dict(task))
    prompt = start(observation)
    episode = Episode([], [], [], [], prompt_length=len(prompt), task=task, group=0)
    episode.append(prompt, None, -1)
    told: list[str] = []

    def step(text: str) -> Step:
        if told:
            episode.append(reply(told.pop(), True), None, -1)
        ids = [*encode(text), encode.eos]
        episode.append(ids, [0.0] * len(ids), len(episode.texts))
        found = env.step(text)
        observation, reward, episode.terminated, episode.truncated, info = found
        told.append(observation)
        episode.texts.append(text)
        episode.turn_rewards.append(reward)
        episode.infos.append(info)
        if episode.truncated:
            raise Over
        return found

    with contextlib.suppress(Over):
        play(env, mix, python_random(*stream, task["world"], task["question"]), step)
    episode.reward, episode.success = sum(episode.turn_rewards), bool(episode.infos[-1]["success"])
    return episode
