"""A question about a world and the tools to answer it, as a Gymnasium environment of many turns.

    with Bridge(ServerHub(worlds)) as bridge:
        make = Envs(bridge, worlds)
        env = make()
        prompt, info = env.reset(options={"world": 3, "question": 7})
        reply, reward, terminated, truncated, info = env.step("tables.lookup staff.csv Ada age")

The reward is 1 at the end if GAIA's scorer accepts the answer, else 0, less `price` per unit of cost. Constraints between
tools are kept here, before a call reaches its server, as an agent's runtime would: a call that lacks what it needs, comes
after what excludes it, or costs more than is left, is refused. It has no effect but takes its turn.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
from gymnasium import spaces

from common.schema import one_of, within
from experiments.exp_7_16_aworld.desk import Reply, cut, forget
from experiments.exp_7_16_aworld.hub import Bridge, Context
from experiments.exp_7_16_aworld.protocol import SYNTAXES, BadTurn, manual, parse, write
from experiments.exp_7_16_aworld.questions import Call, Question, question
from experiments.exp_7_16_aworld.scorer import score
from experiments.exp_7_16_aworld.servers import TOOLS
from experiments.exp_7_16_aworld.world import World, make_world, world_folder

_TEXT = spaces.Text(min_length=0, max_length=20_000, charset=string.printable)  # making one costs more than a turn
BAD, NEEDS, EXCLUDED, BUDGET = "bad turn", "refused: something else first", "refused: excluded", "refused: budget"
LIMIT = 14  # turns
SLACK = 3  # units that the budget exceeds the shortest plan's cost by
SHOWN = {"compact": 200, "json": 4000}  # characters of a reply
EPISODES = itertools.count()
Step = tuple[str, float, bool, bool, dict[str, Any]]


class AWorldEnv(gymnasium.Env):
    """One episode is one question.

    reset(seed=, options=): `options["world"]` and `options["question"]` name the task; without them the seed does (its
    question of world 0). info after a step: success, reason; parts (malformed, refused, failed, cost of this turn); call,
    tool, outcome (answered, failed, passing, lost, malformed, needs, excluded, budget or answer); level, plan.
    """

    metadata: ClassVar = {"render_modes": []}

    def __init__(
        self, bridge: Bridge, worlds: Path, syntax: str = "compact", slack: int = SLACK, price: float = 0.0, limit: int = LIMIT
    ) -> None:
        one_of("syntax", syntax, SYNTAXES)
        within("slack", slack, 0)
        within("limit", limit, 1)
        self.observation_space = self.action_space = _TEXT
        self.bridge, self.worlds, self.syntax, self.slack, self.price, self.limit = bridge, worlds, syntax, slack, price, limit
        self.question: Question | None = None
        self.context: Context | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The question and the budget, and for pre-trained models the tools."""
        super().reset(seed=seed)
        options = dict(options or {})
        number, world = options.pop("question", None), options.pop("world", 0)
        for name in options:
            one_of("options", name, ("world", "question", "seed"))
        if number is None:
            number = seed if seed is not None else int(self.np_random.integers(2**31))
        self.close()
        found: World = make_world(int(world))
        if not world_folder(self.worlds, found.number).is_dir():
            raise FileNotFoundError(f"world {world} is not among the worlds of {self.worlds}")
        self.question = question(found, int(number))
        episode = f"{os.getpid()}-{next(EPISODES)}"
        self.context = Context(found.number, found.digest, episode, int(number))
        self.answered, self.left, self.turn = set[str](), self.question.cost + self.slack, 0
        prompt = f"{self.question.text} Budget {self.left}."
        if self.syntax == "json":
            prompt = f"{manual(TOOLS)}\n\n{prompt}"
        return prompt, {"world": found.number, "question": int(number), "success": False, "reason": ""}

    def step(self, action: str) -> Step:
        """Makes the call, marks the answer, or says why the turn is neither.

        TypeError unless the action is a string; gymnasium.error.ResetNeeded when no episode is running.
        """
        return self.bridge.wait(self.act(action))

    async def act(self, action: str) -> Step:
        """`step`, on the event loop of the hub."""
        if not isinstance(action, str):
            raise TypeError(f"the turn must be text; got {type(action).__name__}")
        asked, context = self.question, self.context
        if asked is None or context is None:
            raise gymnasium.error.ResetNeeded("call reset before step: no episode is running")
        self.turn += 1
        try:
            turn = parse(action, TOOLS, self.syntax)
        except BadTurn as error:
            return self.told(Reply(f"{BAD}: {error}" if self.syntax == "json" else BAD, failed=True), "malformed")
        if isinstance(turn, str):
            return self.end(turn)
        refusal = self.refusal(turn)
        if refusal:
            return self.told(Reply(self.explained(refusal, turn), failed=True), refusal, turn)
        self.left -= turn.cost
        reply = await self.bridge.hub.call(turn, context)
        context.past = context.key(turn)
        outcome = "lost" if reply.lost else "passing" if reply.passing else "failed" if reply.failed else "answered"
        if outcome == "answered":
            self.answered.add(turn.tool)
        return self.told(reply, outcome, turn)

    def refusal(self, call: Call) -> str:
        """Which constraint the call breaks, or nothing."""
        tool = TOOLS[call.tool]
        if tool.needs and tool.needs not in self.answered:
            return "needs"
        if self.answered & set(tool.excludes):
            return "excluded"
        return "budget" if tool.cost > self.left else ""

    def explained(self, refusal: str, call: Call) -> str:
        """What a refused caller reads."""
        text = {"needs": NEEDS, "excluded": EXCLUDED, "budget": BUDGET}[refusal]
        return f"{text} ({TOOLS[call.tool].description})" if self.syntax == "json" else text

    def told(self, reply: Reply, outcome: str, call: Call | None = None) -> Step:
        """The step behind a turn that did not answer."""
        assert self.question is not None
        over = self.turn >= self.limit
        paid = call.cost if call is not None and outcome in ("answered", "failed", "passing", "lost") else 0
        info = self.info(outcome, call, paid) | {"success": False, "reason": f"no answer in {self.limit} turns" if over else ""}
        if over:
            self.close()
        return cut(reply.text, SHOWN[self.syntax]), -self.price * paid, False, over, info

    def end(self, answer: str) -> Step:
        """The step behind an answer."""
        assert self.question is not None
        right = score(answer, self.question.answer)
        info = self.info("answer", None, 0) | {"success": right, "reason": "right" if right else "wrong"}
        self.close()
        return "right" if right else "wrong", float(right), True, False, info

    def info(self, outcome: str, call: Call | None, paid: int) -> dict[str, Any]:
        assert self.question is not None
        parts = {
            "malformed": int(outcome == "malformed"),
            "refused": int(outcome in ("needs", "excluded", "budget")),
            "failed": int(outcome in ("failed", "passing", "lost")),
            "cost": paid,
        }
        return {
            "parts": parts, "outcome": outcome, "tool": call.tool if call else "", "call": write(call) if call else "",
            "level": self.question.level, "plan": [step.tool for step in self.question.plan],
        }  # fmt: skip

    def close(self) -> None:
        """Ends the episode and removes its files."""
        if self.context is not None:
            forget(self.worlds, self.context.episode)
        self.question = self.context = None


class Envs:
    """Makes environments on one hub, and steps many of them at once (see common.episodes)."""

    def __init__(self, bridge: Bridge, worlds: Path, **options: Any) -> None:
        self.bridge, self.worlds, self.options = bridge, worlds, options

    def __call__(self) -> AWorldEnv:
        return AWorldEnv(self.bridge, self.worlds, **self.options)

    def step_all(self, envs: Sequence[AWorldEnv], texts: Sequence[str]) -> list[Step]:
        """One step of each environment; their calls run side by side."""

        async def all_steps() -> list[Step]:
            return list(await asyncio.gather(*(env.act(text) for env, text in zip(envs, texts, strict=True))))

        return self.bridge.wait(all_steps())
