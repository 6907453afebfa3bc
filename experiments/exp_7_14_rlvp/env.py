"""A world with tools and hidden rules as a Gymnasium environment: many turns, one call each.

    env = gymnasium.make("FileOps-v0")
    prompt, info = env.reset(seed=3)
    reply, reward, terminated, truncated, info = env.step("list s1")

Rules and paired credits are pure predicates on the world before the call (RLVP's FileOps and CSOps). The reward is the
outcome alone, 1 or 0 at the end; what the path earns stands in info and is paid by common.credits, if at all.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import gymnasium
from gymnasium import spaces

from common.schema import one_of
from experiments.exp_7_14_rlvp import calls
from experiments.exp_7_14_rlvp.calls import SYNTAXES, BadCall, Call, Tool, parse, usage

# One space for all environments: making one costs more than a turn.
_TEXT = spaces.Text(min_length=0, max_length=20_000, charset=string.printable)
BAD_CALL = "bad call"
BLOCKED = "blocked"
RULES_HEAD = "Rules: "


class Reply(NamedTuple):
    """What a tool answers; `failed`: the call had no effect; `mutated`: it changed the world; `done`: it ends the episode."""

    text: str
    failed: bool = False
    mutated: bool = False
    done: bool = False


class World(Protocol):
    """A task and the state of its world. `errors` counts the failed calls; the environment keeps it."""

    errors: Counter[Call]
    limit: int

    def prompt(self) -> str: ...

    def credits(self, call: Call) -> list[str]: ...

    def apply(self, call: Call) -> Reply: ...

    def success(self) -> bool: ...

    def progress(self) -> float: ...

    def state(self) -> str: ...

    def unused_credits(self) -> int: ...


Rule = Callable[[Any, Call], bool]


def repeat_failure(world: World, call: Call) -> bool:
    """The same call has failed twice already."""
    return world.errors[call] >= 2


class ToolEnv(gymnasium.Env):
    """One episode is one task of the subclass's world.

    reset(seed=, options=): `options["task"]` names the task (an integer); without it the seed does, or else the stream
    that the last seed started. `options["rules"]` true writes the rules into the prompt, `options["guard"]` true blocks
    each call that would break one; `world_options` go to the world, others are refused.
    info after a step: success, reason; parts (violations, credits, malformed, blocked of this turn); violations and credits
    as rule names; call, failed, mutated; progress; state (before the call); at the end unused_credits.
    """

    metadata: ClassVar = {"render_modes": []}
    tools: ClassVar[tuple[Tool, ...]] = ()
    rules: ClassVar[Mapping[str, Rule]] = {}
    rules_text: ClassVar[str] = ""
    world_options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, syntax: str = "compact") -> None:
        one_of("syntax", syntax, SYNTAXES)
        self.observation_space = self.action_space = _TEXT
        self.syntax = syntax
        self.world: Any = None
        self.turn = 0

    def make_world(self, task: int, options: Mapping[str, Any]) -> Any:
        """The world of a task, a function of its number and the options."""
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The prompt, and info with the task's number."""
        super().reset(seed=seed)
        options = dict(options or {})
        task = options.pop("task", seed if seed is not None else int(self.np_random.integers(2**31)))
        options.pop("seed", None)
        self.guard, ruled = bool(options.pop("guard", False)), bool(options.pop("rules", False))
        for name in options:
            one_of("options", name, ("task", "seed", "rules", "guard", *self.world_options))
        self.world, self.turn = self.make_world(int(task), options), 0
        prompt = (RULES_HEAD + self.rules_text if ruled else "") + self.world.prompt()
        if self.syntax == "json":
            prompt = f"{prompt}\nUse one tool per turn:\n{usage(self.tools, 'json')}\n"
        return prompt, {"task": int(task), "success": False, "reason": ""}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Makes the call, or answers why it is none; either takes a turn.

        TypeError unless the action is a string; gymnasium.error.ResetNeeded when no episode is running.
        """
        if not isinstance(action, str):
            raise TypeError(f"the answer must be text; got {type(action).__name__}")
        if self.world is None:
            raise gymnasium.error.ResetNeeded("call reset before step: no episode is running")
        world, state, self.turn = self.world, self.world.state(), self.turn + 1
        fired, paid, malformed, blocked = list[str](), list[str](), 0, 0
        try:
            call = parse(action, self.tools, self.syntax)
        except BadCall as error:
            malformed, written = 1, ""
            hint = f"{BAD_CALL}: {error}\n{usage(self.tools, 'json')}" if self.syntax == "json" else BAD_CALL
            reply = Reply(hint, failed=True)
        else:
            written = calls.write(call, self.tools)
            fired = [name for name, rule in self.rules.items() if rule(world, call)]
            if self.guard and fired:
                fired, blocked, reply = [], 1, Reply(BLOCKED, failed=True)
            else:
                paid, reply = world.credits(call), world.apply(call)
                world.errors[call] += reply.failed
        truncated = not reply.done and self.turn >= world.limit
        success = reply.done and world.success()
        ended = reply.done or truncated
        reason = "" if not ended else "solved" if success else "not solved" if reply.done else f"no end in {world.limit} turns"
        info = {
            "success": success, "reason": reason, "violations": fired, "credits": paid, "call": written,
            "parts": {"violations": len(fired), "credits": len(paid), "malformed": malformed, "blocked": blocked},
            "failed": reply.failed, "mutated": reply.mutated, "progress": world.progress(), "state": state,
        }  # fmt: skip
        if ended:
            info["unused_credits"] = world.unused_credits()
            self.world = None
        return reply.text, float(success), reply.done, truncated, info
