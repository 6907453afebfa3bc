"""Texts of 7-12 as token ids: tokenizer, pre-training corpus, demonstrations, tasks.

The corpus holds walks through cities of its own under action spaces of many kinds: compass words, degrees, the clock, the
relative words, with the standard and with other verbs. One pairing is withheld, the one that the rule shift tests: the
standard verbs with the relative words. So obeying the stated action space is a skill the base brings along, to be kept or
lost. Batch and item are functions of (configuration, seed, index).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerFast

from common.rejection import Row, row_batches
from common.seeding import python_random
from common.sft import SftBatch, pad_rows
from common.tokenizers import PhraseEncoder, build_phrase_tokenizer
from experiments.exp_7_12_virl import prompts, routes
from experiments.exp_7_12_virl.cities import KINDS, PROPER, TRADES, City, city
from experiments.exp_7_12_virl.env import Course, course
from experiments.exp_7_12_virl.prompts import OTHER_VERBS, SPACES, Rule
from experiments.exp_7_12_virl.routes import RailConfig, Route

TRAINING = Rule("absolute")
STANDARD = tuple(space for space in SPACES if not Rule(space).withheld)
CORPUS_CITIES = tuple(f"{kind}-{number}" for number in range(900, 908) for kind in KINDS)


def build_tokenizer(cities: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token per phrase and per word of a generated name; the places of real cities are one token each."""
    real = routes.all_names(tuple(sorted({name for name in cities if name.split("-")[0] not in KINDS})))
    return build_phrase_tokenizer([*prompts.PHRASES, *prompts.name_pieces(real, TRADES, PROPER)])


@dataclass(frozen=True)
class CorpusConfig:
    """How the walks of the pre-training text are drawn.

    ``renamed``: share of walks with other verbs than the standard ones. ``wrong``: share of stops at which a wrong answer
    and the feedback on it stand before the right one. ``straight_on``: how readily a walk passes crossings; often, because
    only there must a place be compared with the one in the instruction, which is what takes longest to learn.
    ``renamed_places``: share of walks whose places carry names drawn afresh from all names of the vocabulary, so that a
    name is read and not remembered.
    """

    renamed: float = 0.5
    wrong: float = 0.08
    straight_on: float = 0.85
    renamed_places: float = 1.0


class Corpus:
    """The pre-training text as batches of rows, one walk each; targets are the right answers alone."""

    def __init__(self, encode: PhraseEncoder, config: CorpusConfig, rail: RailConfig, seed: int, names: Sequence[str]) -> None:
        self.encode, self.config, self.rail, self.seed = encode, config, rail, seed
        self.names = [*(f"{trade} {name}" for trade in TRADES for name in PROPER), *names]

    def batch(self, step: int, rows: int) -> SftBatch:
        """The batch of a step: ids, attention and target mask."""
        stream = python_random(self.seed, "corpus", step)
        return pad_rows([self.walk(stream) for _ in range(rows)], self.encode.pad)

    def walk(self, stream: random.Random) -> Row:
        """A random route under a random rule."""
        route = routes.draw(stream.choice(CORPUS_CITIES), "corpus", stream, self.rail, self.config.straight_on)
        if stream.random() < self.config.renamed_places:
            route = with_names(route, stream, self.names)
        return walk_row(self.encode, route, random_rule(stream, self.config.renamed), stream, self.config.wrong)


def random_rule(stream: random.Random, renamed: float) -> Rule:
    """An action space of the corpus: never the standard verbs with the relative words."""
    if stream.random() >= renamed:
        return Rule(stream.choice(STANDARD))
    return Rule(stream.choice(tuple(SPACES)), stream.choice(OTHER_VERBS))


def with_names(route: Route, stream: random.Random, names: Sequence[str]) -> Route:
    """The same route with other names for its places, one for one."""
    seen = {one.sight.place for one in (*route.stops, *route.instructions) if one.sight and one.sight.place}
    other = dict(zip(sorted(seen), stream.sample(names, len(seen)), strict=True))

    def renamed(part):
        return part if not part.sight or not part.sight.place else part._replace(
            sight=part.sight._replace(place=other[part.sight.place])
        )  # fmt: skip

    return replace(route, instructions=tuple(map(renamed, route.instructions)), stops=tuple(map(renamed, route.stops)))


def walk_row(encode: PhraseEncoder, route: Route, rule: Rule, stream: random.Random | None = None, wrong: float = 0.0) -> Row:
    """A whole walk as token ids and target mask: prompt, then stop by stop what is seen and the right answer.

    With ``wrong`` some stops hold a wrong answer and the feedback before it; these are no targets.
    """
    here = course(route, rule)
    ids, mask = [encode.bos, *encode(here.opening)], [0] * (1 + len(encode(here.opening)))

    def add(text: str, target: int) -> None:
        new = [*encode(text), encode.eos] if target >= 0 else encode(text)
        ids.extend(new)
        mask.extend([max(target, 0)] * len(new))

    for k, stop in enumerate(route.stops):
        add(here.shown[k], -1)
        if stream is not None and stream.random() < wrong:
            add(wrong_answer(here, k, stream), 0)
            add(prompts.FEEDBACK["wrong_action"] + here.shown[k], -1)
        add(prompts.answer(prompts.sight_text(stop.sight), here.instructions[k], here.actions[k]), 1)
    return ids, mask


def wrong_answer(here: Course, k: int, stream: random.Random) -> str:
    """An answer that sees rightly and does another action of the space, half of the time from the next or last instruction."""
    action = stream.choice(sorted(here.legal - {here.actions[k]}))
    others = (here.instructions[max(0, k - 1)], here.instructions[min(k + 1, here.stops - 1)])
    told = stream.choice(others) if stream.random() < 0.5 else here.instructions[k]
    return prompts.answer(prompts.sight_text(here.sights[k]), told, action)


def task(index: int, cities: Sequence[str], role: str, seed: int, rule: Rule = TRAINING) -> dict:
    """Options for the environment's reset."""
    return {"cities": list(cities), "role": role, "seed": seed, "index": index, "rule": rule.space, "verbs": list(rule.verbs)}


def training_tasks(cities: Sequence[str], total: int, seed: int, step: int, count: int) -> list[dict]:
    """The tasks of a step, drawn without repeats until all were used; a longer list begins with the shorter one."""
    order = python_random(seed, "tasks", step).sample(range(total), total)
    return [task(order[i % total], cities, "train", seed) for i in range(count)]


class Demonstrations:
    """The right walks over the training routes under the training rule."""

    def __init__(self, encode: PhraseEncoder, train: Sequence[Route], rule: Rule = TRAINING) -> None:
        self.rows = [walk_row(encode, route, rule) for route in train]
        self.pad = encode.pad

    def batches(self, seed: int, name: str, count: int):
        """step -> batch of `count` walks."""
        return row_batches(self.rows, self.pad, count, seed, name)


def known_cities(groups: Sequence[Sequence[str]]) -> list[City]:
    """All cities of a run, built or refused with what is missing, before anything is trained."""
    return [city(name) for group in groups for name in group]
