"""CSOps: a customer's request is settled by a call to the right department.

Tools, goals and rules are those of RLVP's CSOps. A call succeeds once the customer is verified, to the number that the
knowledge base gives for the request, with the account and the code that stand there; any other call is refused without a
reason. So a search and a verification are needed, whereas the time zone and the number of calls are free of consequence.
The source names paired credits for FileOps alone; here they are the first fitting search, verification and look at the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium

from common.schema import within
from experiments.exp_7_14_rlvp.calls import Call, Tool
from experiments.exp_7_14_rlvp.env import Reply, Rule, ToolEnv

ENV_ID = "CSOps-v0"
GOALS = {
    "refund": ("Billing", "REF-30"),
    "reschedule": ("Reservations", "RES-12"),
    "cancel_subscription": ("Accounts", "CAN-07"),
}
CITIES = ("Lisbon", "Oslo", "Quito", "Osaka", "Accra", "Perth", "Lima", "Delhi")
ACCOUNTS = tuple(f"A{number}" for number in range(10, 40))
NUMBERS = tuple(f"555-{number:02d}" for number in range(20))
HOURS = ("morning", "noon", "evening")
TASKS = len(GOALS) * len(ACCOUNTS) * len(CITIES) * len(NUMBERS) * len(HOURS)
SPREAD = 7919  # a prime that divides no count above: neighbours in number differ in everything
REFUSAL = "we cannot help you with that"
LIMIT = 12

_WORD, _NUMBER = r"[A-Za-z_0-9-]+", r"[0-9]{3}-[0-9]{2}"
TOOLS = (
    Tool("search_kb", "kb", (("query", _WORD),)),
    Tool("verify_identity", "verify", (("account_id", _WORD),)),
    Tool("check_timezone", "time", (("city", _WORD),)),
    Tool("place_call", "call", (("number", _NUMBER),), ("info", _WORD)),
    Tool("send_email", "email", (("to", _WORD), ("body", _WORD))),
    Tool("submit_resolution", "resolve", (("summary", _WORD),)),
)
RULES_TEXT = (
    "search the kb before you call, verify the customer before you call, check the time there before you call, "
    "call no number more than twice. "
)


def picked(place: int, choices: tuple[str, ...]) -> tuple[int, str]:
    """What is left of a mixed-radix number, and the choice that its lowest digit names."""
    return place // len(choices), choices[place % len(choices)]


class DeskWorld:
    """One request and what was done about it."""

    limit = LIMIT

    def __init__(self, task: int) -> None:
        within("task", task, 0, TASKS - 1)
        self.goal = list(GOALS)[task % len(GOALS)]
        # a bijection of task numbers below TASKS onto all combinations, so that no two tasks are the same
        place = task // len(GOALS) * SPREAD % (TASKS // len(GOALS))
        place, self.account = picked(place, ACCOUNTS)
        place, self.city = picked(place, CITIES)
        place, self.number = picked(place, NUMBERS)
        self.hour = HOURS[place]
        self.searched = self.verified = self.looked = self.settled = self.resolved = False
        self.calls: Counter[str] = Counter()
        self.errors: Counter[Call] = Counter()

    def prompt(self) -> str:
        return f"{self.goal} for {self.account} in {self.city}; "

    def state(self) -> str:
        """All that rules, credits and outcome depend on, but the failed calls."""
        flags = (self.searched, self.verified, self.looked, self.settled)
        return f"{flags}{sorted(self.calls.items())}"

    def success(self) -> bool:
        return self.settled and self.resolved

    def progress(self) -> float:
        """1 once the department has settled the request, which is the one thing that can be verified on the way."""
        return float(self.settled)

    def credits(self, call: Call) -> list[str]:
        """Rules that the call, made now, is the first step to keep."""
        if call == Call("search_kb", (self.goal,)) and not self.searched:
            return ["no_kb_before_call"]
        if call == Call("verify_identity", (self.account,)) and not self.verified:
            return ["unverified_call"]
        if call == Call("check_timezone", (self.city,)) and not self.looked:
            return ["no_tz_before_call"]
        return []

    def unused_credits(self) -> int:
        """Credited steps in an episode without a call."""
        return 0 if self.calls else self.searched + self.verified + self.looked

    def apply(self, call: Call) -> Reply:
        """The tool's effect and answer."""
        if call.tool == "search_kb":
            if call.args[0] != self.goal:
                return Reply("no entry", failed=True)
            self.searched = True
            return Reply(f"{GOALS[self.goal][0]} {self.number} {GOALS[self.goal][1]}")
        if call.tool == "verify_identity":
            if call.args[0] != self.account:
                return Reply("no entry", failed=True)
            self.verified = True
            return Reply("verified")
        if call.tool == "check_timezone":
            if call.args[0] not in CITIES:
                return Reply("no entry", failed=True)
            self.looked = self.looked or call.args[0] == self.city
            return Reply(self.hour)
        if call.tool == "place_call":
            return self.place_call(call)
        if call.tool == "send_email":
            return Reply("sent")
        self.resolved = call.args[0] == self.goal
        return Reply("", done=True)

    def place_call(self, call: Call) -> Reply:
        """Settled if the customer is verified, the number right, and account and code are said, and nothing else."""
        number, *said = call.args
        self.calls[number] += 1
        if not self.verified or number != self.number or sorted(said) != sorted((self.account, GOALS[self.goal][1])):
            return Reply(REFUSAL, failed=True)
        self.settled = True
        return Reply("settled", mutated=True)


def no_kb_before_call(world: DeskWorld, call: Call) -> bool:
    """Calls without having found the request in the knowledge base."""
    return call.tool == "place_call" and not world.searched


def unverified_call(world: DeskWorld, call: Call) -> bool:
    """Calls about a customer who is not verified."""
    return call.tool == "place_call" and not world.verified


def no_tz_before_call(world: DeskWorld, call: Call) -> bool:
    """Calls without having looked at the time in the customer's city."""
    return call.tool == "place_call" and not world.looked


def call_spam(world: DeskWorld, call: Call) -> bool:
    """Calls a number for the third time or more."""
    return call.tool == "place_call" and world.calls[call.args[0]] >= 2


class CSOps(ToolEnv):
    """A request at the desk; options are ToolEnv's."""

    tools = TOOLS
    rules: ClassVar[Mapping[str, Rule]] = {
        "no_kb_before_call": no_kb_before_call,
        "unverified_call": unverified_call,
        "no_tz_before_call": no_tz_before_call,
        "call_spam": call_spam,
    }
    rules_text = RULES_TEXT

    def make_world(self, task: int, options: Mapping[str, Any]) -> DeskWorld:
        return DeskWorld(task % TASKS)


if ENV_ID not in gymnasium.registry:
    gymnasium.register(id=ENV_ID, entry_point="experiments.exp_7_14_rlvp.csops:CSOps")
