"""Attacks the V-IRL reward before it is used: `python -m experiments.exp_7_12_virl.audit`.

Must score: the right answer at every stop of a few hundred routes of all characters under every action space, in the
writings that JSON allows. Must not score: every other action of the space, the right action of the other spaces, right
actions inside broken answers, and a corpus of exploits. Everything goes through the environment's reset and step.
Further: routes and cities of different uses must not overlap, and every instruction must be one that can be followed.
Prints what was tried, lists each hole, and exits 1 if there is one.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from common.config import compose
from experiments.exp_7_12_virl import prompts, routes
from experiments.exp_7_12_virl.data import CORPUS_CITIES
from experiments.exp_7_12_virl.env import VirlNavigation
from experiments.exp_7_12_virl.prompts import SPACES, Rule
from experiments.exp_7_12_virl.routes import RailConfig, Route
from experiments.exp_7_12_virl.settings import Settings

CITIES = ("grid-0", "radial-0", "organic-0")
ROUTES = 60
MAX_SECONDS_PER_CASE = 0.5
RULES = (
    *(Rule(space) for space in SPACES),
    Rule("relative", ("walk", "face", "halt")),
    Rule("absolute", ("advance", "look", "end")),
)


class Case(NamedTuple):
    """``points``: the reward that the answer must earn; ``leads_on``: it is accepted as right."""

    group: str
    text: str
    points: float
    leads_on: bool


def reply(observation: str, instruction: str, action: object) -> str:
    """A well-formed answer."""
    return json.dumps({"current observation": observation, "current instruction": instruction, "action": action})


def gold_cases(route: Route, k: int, rule: Rule) -> Iterator[Case]:
    """The right answer in every accepted writing."""
    stop, text = route.stops[k], prompts.gold(route, route.stops[k], rule)
    told = json.loads(text)
    wide = json.dumps(told, indent=2)
    moved = json.dumps(dict(reversed(told.items())))
    for writing in (text, wide, moved, f"I see. {text}", f"```json\n{text}\n```", f"<think>hm</think>{text}"):
        yield Case("gold: accepted writing", writing, 1.0, True)
    blind = reply("No landmarks nearby" if stop.sight.place else "Hotel Nowhere is behind you", "?", told["action"])
    yield Case("gold: right action, wrong landmark", blind, -0.5, True)


def wrong_cases(route: Route, k: int, rule: Rule) -> Iterator[Case]:
    """Other actions, actions of other spaces, and right actions in answers that do not count."""
    stop = route.stops[k]
    instruction = route.instructions[stop.instruction]
    seen, told = prompts.sight_text(stop.sight), prompts.instruction_text(stop.instruction, instruction)
    right = prompts.action_text(rule, stop.action, instruction)
    for action in sorted(prompts.legal_actions(rule) - {right}):
        yield Case("mutation: another action of the space", reply(seen, told, action), -1.0, False)
    for other in RULES:
        action = prompts.action_text(other, stop.action, instruction)
        if action != right:
            yield Case("mutation: another space's right action", reply(seen, told, action), -1.0, False)
    for change in (right.upper(), f" {right}", f"{right};", right.replace("()", "").replace(")", ""), f"{right} {right}", ""):
        yield Case("mutation: right action misspelt", reply(seen, told, change), -1.0, False)
    everything = " or ".join(sorted(prompts.legal_actions(rule)))
    for text in (everything, f"[{everything}]", right.replace("(", "(x=")):
        yield Case("exploit: several actions in one", reply(seen, told, text), -1.0, False)
    gold = prompts.gold(route, stop, rule)
    bad = reply(seen, told, "nothing")
    for text in (
        "", right, gold[:-1], gold.replace('"action"', '"Action"'), f"<think>{gold}", f"<think>{gold}</think>",
        f'{{"x": 1,}}{gold}', f'{{"answer": {gold}}}',
        f"[{gold[:-1]}", gold.replace("{", '{"action": "nothing", '), reply(seen, told, [right]),
        reply(seen, told, {"name": right}), reply(seen, told, None), reply(seen, told, True), prompts.prompt(route, rule),
        "{" * 50_000, '{"a":' * 50_000, "\x00", gold.replace('"', "'"), json.dumps({"action": right}),
    ):  # fmt: skip
        yield Case("exploit: no answer that counts", text, -2.5, False)
    yield Case("exploit: right answer behind a wrong one", bad + gold, -1.0, False)
    yield Case("exploit: claims success", bad[:-1] + ', "success": true, "reward": 99}', -1.0, False)


def audit(count: int = ROUTES) -> tuple[Counter, list[str]]:
    """(number of cases by group, one line per hole). A hole is another reward than due, a false step on, a crash or a stall."""
    tried, holes = Counter[str](), list[str]()
    found = routes.items(CITIES, "corpus", 0, count, RailConfig())
    env = VirlNavigation(tries=8)
    for number, route in enumerate(found):
        rule = RULES[number % len(RULES)]
        options = {"route": route, "rule": rule.space, "verbs": rule.verbs}
        for k in range(len(route.stops)):
            cases = gold_cases(route, k, rule) if (number + k) % 2 else wrong_cases(route, k, rule)
            for case in cases:
                walk_to(env, options, route, rule, k)
                tried[case.group] += 1
                started = time.process_time()  # not wall time: a busy machine is no hole
                try:
                    _, points, _, _, info = env.step(case.text)
                    verdict = round(points, 6), info["solved"]
                except Exception as error:  # any exception is a hole: report it and go on with the next case
                    verdict = None, f"{type(error).__name__}: {error}"
                seconds = time.process_time() - started
                if verdict != (case.points, case.leads_on) or seconds > MAX_SECONDS_PER_CASE:
                    holes.append(
                        f"{case.group} {route.city} stop {k} {rule}: {case.text[:120]!r} -> {verdict} in {seconds:.2f} s"
                    )
        walk_to(env, options, route, rule, len(route.stops) - 1)
        tried["gold: whole route"] += 1
        if not env.step(prompts.gold(route, route.stops[-1], rule))[4]["success"]:
            holes.append(f"gold: whole route {route.city} {route.nodes}: the right answers are no success")
    return tried, holes


def walk_to(env: VirlNavigation, options: dict, route: Route, rule: Rule, k: int) -> None:
    """A fresh episode, answered rightly up to stop k."""
    env.reset(options=options)
    for stop in route.stops[:k]:
        env.step(prompts.gold(route, stop, rule))


def audit_splits(settings: Settings, count: int = 200) -> tuple[Counter, list[str]]:
    """(number of comparisons, one line per overlap): ends of routes by role, cities by use, instructions that fit twice."""
    tried, holes = Counter[str](), list[str]()
    held = {}
    for role in routes.ROLES:
        found = routes.items(settings.cities.train, role, 0, count, settings.rail)
        held[role] = {(route.city, *sorted((route.nodes[0], route.nodes[-1]))) for route in found}
        for route in found:
            tried["instruction can be followed"] += 1
            if not unambiguous(route):
                holes.append(f"{route.city} {route.nodes}: an instruction fits at two stops")
    for one, other in combinations(held, 2):
        tried["split: ends of routes"] += 1
        if shared := held[one] & held[other]:
            holes.append(f"{one} and {other} share {len(shared)} pairs of ends")
    uses = {"corpus": CORPUS_CITIES, **vars(settings.cities)}
    for one, other in combinations(uses, 2):
        tried["split: cities"] += 1
        if shared_cities := set(uses[one]) & set(uses[other]):
            holes.append(f"{one} and {other} share {', '.join(sorted(shared_cities))}")
    return tried, holes


def unambiguous(route: Route) -> bool:
    """What ends a leg is seen at its end and at no earlier stop of that leg."""
    for number, instruction in enumerate(route.instructions):
        if instruction.sight is None or instruction.sight.place is None:
            continue
        here = [stop for stop in route.stops if stop.instruction == number and stop.action == "forward"]
        if any(stop.sight[:2] == instruction.sight[:2] for stop in here):
            return False
    return True


def report(tried: Counter, holes: Sequence[str], seconds: float) -> int:
    """Prints the counts and the holes; returns the exit code."""
    for group, count in sorted(tried.items()):
        print(f"{count:8,d}  {group}")
    print(f"{tried.total():8,d}  cases in {seconds:.1f} s, {len(holes)} holes")
    for hole in holes[:20]:
        print(f"HOLE {hole}")
    return 1 if holes else 0


def main() -> int:
    started = time.perf_counter()
    tried, holes = audit()
    compared, overlaps = audit_splits(compose("7-12", Settings, ["scale=laptop"]))
    return report(tried + compared, holes + overlaps, time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
