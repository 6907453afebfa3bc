"""V-IRL as a Gymnasium environment: walk a route by its instruction, one JSON answer per stop; text, or text and image.

    env = gymnasium.make("VirlNavigation-v0", rule="absolute", tries=2)
    prompt, info = env.reset(seed=0)           # or options={"city": "grid-0", "role": "train", "seed": 0, "index": 3}
    observation, reward, terminated, truncated, info = env.step(answer_text)

Source: Chu et al. 2025, section 4.2 and appendix. A right action leads on along the rail. A wrong one is asked again until
the graded tries of the stop are used up, which ends the route without success; only a route whose every stop was
answered rightly counts as a success. Departures, each undone by a switch of grading.DEFECTS: see there.
"""

from __future__ import annotations

import string
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from common.seeding import python_random
from experiments.exp_7_12_virl import grading, prompts, routes, views
from experiments.exp_7_12_virl.prompts import Rule
from experiments.exp_7_12_virl.routes import RailConfig, Route, Sight

ENV_ID = "VirlNavigation-v0"
MOST_TRIES = 8
# One space for all environments: making one costs more than walking a route.
_TEXT = spaces.Text(min_length=0, max_length=20_000, charset=string.printable)
_SEEN = spaces.Dict({"text": _TEXT, "image": spaces.Box(0, 255, (2 * views.SIDE, 2 * views.SIDE, 3), np.uint8)})


class Course(NamedTuple):
    """A route under a rule as texts, one entry per stop: what is shown, what is right."""

    opening: str
    shown: tuple[str, ...]
    sights: tuple[Sight, ...]
    instructions: tuple[str, ...]
    actions: tuple[str, ...]
    legal: frozenset[str]

    @property
    def stops(self) -> int:
        return len(self.shown)


def course(route: Route, rule: Rule, vision: bool = False) -> Course:
    """The texts of a route."""
    tell = prompts.image_text if vision else prompts.sight_text
    told = [prompts.instruction_text(k, one) for k, one in enumerate(route.instructions)]
    return Course(
        prompts.prompt(route, rule, vision),
        tuple(prompts.observation_text(k, tell(stop.sight)) for k, stop in enumerate(route.stops)),
        tuple(stop.sight for stop in route.stops),
        tuple(told[stop.instruction] for stop in route.stops),
        tuple(prompts.action_text(rule, stop.action, route.instructions[stop.instruction]) for stop in route.stops),
        prompts.legal_actions(rule),
    )


def with_switches(rail: RailConfig, switches: Collection[str]) -> RailConfig:
    """The rail as the switches that concern it have it."""
    wrap, passing = rail.wrap and "unwrapped_bearing" not in switches, rail.passing and "due_only" not in switches
    return replace(rail, wrap=wrap, passing=passing)


class VirlNavigation(gymnasium.Env):
    """One episode is one route.

    info after a step: success (only after the last stop), reason, class, parts, stop (0-based), trial (1-based), due (the
    kind of the right action), solved, recognised, sighted, located; after a reset: route, rule, stops, success False.
    """

    metadata: ClassVar = {"render_modes": []}

    def __init__(
        self,
        rule: str = "absolute",
        tries: int = 2,
        reward: str = "process",
        on_failure: str = "end",
        vision: bool = False,
        switches: Collection[str] = (),
        cities: Sequence[str] = ("grid-0", "radial-0", "organic-0"),
        rail: RailConfig | None = None,
    ) -> None:
        """rule: the action space where options name none. tries: graded answers per stop, 1..8.

        reward: process (points of every answer) or outcome (1 for a whole route, else 0). on_failure: `end` the route
        when the tries of a stop are used up, or `lead_on` to its next stop, for measuring every stop of a route.
        vision: observations are {"text", "image"} and the text names no place. cities: where routes without options are.
        """
        if type(tries) is not int or not 1 <= tries <= MOST_TRIES:
            raise ValueError(f"tries must be an integer 1..{MOST_TRIES}; got {tries}")
        words = {"rule": tuple(prompts.SPACES), "reward": ("process", "outcome"), "on_failure": ("end", "lead_on")}
        for (key, allowed), value in zip(words.items(), (rule, reward, on_failure), strict=True):
            if value not in allowed:
                raise ValueError(f"{key} must be one of {', '.join(allowed)}; got {value}")
        if unknown := set(switches) - set(grading.DEFECTS):
            raise ValueError(f"unknown switches {sorted(unknown)}; allowed: {', '.join(grading.DEFECTS)}")
        self.rule, self.tries, self.reward, self.on_failure, self.vision = rule, tries, reward, on_failure, vision
        self.switches, self.cities = frozenset(switches), tuple(cities)
        self.rail = with_switches(rail or RailConfig(), self.switches)
        self.observation_space = _SEEN if vision else _TEXT
        self.action_space = _TEXT
        self.route: Route | None = None
        self.course: Course | None = None
        self._stop = self._trial = self._failed = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins a route: options may give `route` (a Route), or `city`, `role`, `seed` and `index`; `rule` and `verbs`.

        Without a route one of the corpus' role is drawn from the stream that `seed` started: the k-th episode of a seed is
        the same route whatever was answered before.
        """
        super().reset(seed=seed)
        options = options or {}
        number = int(self.np_random.integers(2**31))
        rule = Rule(options.get("rule", self.rule), tuple(options.get("verbs", prompts.VERBS)))
        if rule.space not in prompts.SPACES or len(rule.verbs) != 3:
            raise ValueError(f"rule={rule.space} verbs={rule.verbs}: allowed are {', '.join(prompts.SPACES)} and three verbs")
        self.route = options.get("route") or self._find(options, number)
        self.course = course(self.route, rule, self.vision)
        self._stop = self._trial = self._failed = 0
        info = {"route": list(self.route.nodes), "city": self.route.city, "rule": rule.space, "stops": self.course.stops}
        return self._observe(self.course.opening), info | {"success": False, "reason": ""}

    def _find(self, options: dict[str, Any], number: int) -> Route:
        if "index" in options:
            names, index = tuple(options.get("cities", (options.get("city", self.cities[0]),))), options["index"]
            return routes.items(names, options["role"], options.get("seed", 0), index + 1, self.rail)[index]
        stream = python_random("environment", number)
        return routes.draw(options.get("city") or stream.choice(self.cities), "corpus", stream, self.rail)

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Grades an answer; the observation is the next stop, the same one again behind a feedback line, or "" at the end.

        TypeError unless the answer is a string; gymnasium.error.ResetNeeded when no route is running.
        """
        if not isinstance(action, str):
            raise TypeError(f"the answer must be text; got {type(action).__name__}")
        if self.course is None:
            raise gymnasium.error.ResetNeeded("call reset before step: no route is running")
        if self._trial >= self.tries:
            return self._over_the_limit()
        here, k = self.course, self._stop
        self._trial += 1
        trial = self._trial
        found = grading.grade(action, here.sights[k], here.instructions[k], here.actions[k], here.legal, self.switches)
        right, feedback, ended = found.kind == "right", "", False
        if right:
            self._stop, self._trial = k + 1, 0
        elif "wrong_action_executed" in self.switches or self._trial >= self.tries:
            self._failed += 1
            if self.on_failure == "lead_on":
                feedback = prompts.FEEDBACK["led_on"]
                self._stop, self._trial = k + 1, 0
            else:
                ended = "ungraded_last_call" not in self.switches or "wrong_action_executed" in self.switches
        if not right and not feedback:
            feedback = prompts.FEEDBACK[found.kind]
        ended = ended or self._stop >= here.stops
        success = self._stop >= here.stops and self._failed == 0
        info = {
            "success": success, "reason": found.reason, "class": found.kind, "parts": dict(found.parts), "stop": k,
            "trial": trial, "due": self.route.stops[k].action, "solved": right, "recognised": found.recognised,
            "sighted": found.sighted, "located": found.located,
        }  # fmt: skip
        points = sum(found.parts.values()) if self.reward == "process" else float(success)
        observation = self._observe("" if ended else feedback, ended)
        if ended:
            self.course = None
        return observation, points, ended, False, info

    def _observe(self, text: str, ended: bool = False) -> Any:
        if not ended:
            text += self.course.shown[self._stop]
        if not self.vision:
            return text
        stop = self.route.stops[min(self._stop, len(self.route.stops) - 1)]
        return {"text": text, "image": views.four_views(self.route.city, stop.x, stop.y, stop.heading)}

    def _over_the_limit(self) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """The published program's extra call: not graded, -1, and the episode is cut, never a success."""
        points = grading.WRONG if self.reward == "process" else 0.0
        info = {
            "success": False, "reason": "no try left", "class": "step_limit", "parts": {"step_limit": points},
            "stop": self._stop, "trial": self.tries + 1, "due": self.route.stops[self._stop].action,
            "solved": False, "recognised": False, "sighted": False, "located": False,
        }  # fmt: skip
        observation = self._observe("", ended=True)
        self.course = None
        return observation, points, False, True, info


if ENV_ID not in gymnasium.registry:
    gymnasium.register(id=ENV_ID, entry_point="experiments.exp_7_12_virl.env:VirlNavigation")
