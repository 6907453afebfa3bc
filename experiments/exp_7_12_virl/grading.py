"""One answer judged against what is right at a stop: class, reward parts, what it says it sees. Pure functions.

Points: right action +1, wrong action -1 (Chu et al. 2025, section 4.2). A wrong landmark costs an additional -1.5, as the
chapter says. Where the published program does otherwise, its behaviour is a named switch (DEFECTS), off by default.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from common.verifiers import answers
from experiments.exp_7_12_virl import prompts
from experiments.exp_7_12_virl.routes import Sight

RIGHT, WRONG, LANDMARK = 1.0, -1.0, -1.5
DEFECTS = {
    "unwrapped_bearing": "a difference of bearings is not brought within half a turn: 350 -> 10 degrees is called left",
    "intersection_only": "not the place is checked but whether answer and truth both mention an intersection, and only "
    "where the action is wrong",
    "penalty_replaces": "-1.5 stands in the place of -1 instead of being added to it",
    "due_only": "the rail shows places and crossings only where an action is due",
    "ungraded_last_call": "after the last graded answer there is one more call, ungraded and penalised, and the episode is cut",
    "wrong_action_executed": "a wrong action is carried out, leaves the route and ends it, instead of being asked again",
}
FIELDS = {key: answers.Field(str) for key in ("current observation", "current instruction", "action")}


class Reply(NamedTuple):
    """An answer's fields; ``reason`` says why there are none. ``stated``: (place, relation, crossing), None if not stated."""

    observation: str = ""
    instruction: str = ""
    action: str = ""
    stated: tuple[str | None, int, bool] | None = None
    reason: str = ""


class Grade(NamedTuple):
    """``kind``: right, wrong_action, illegal_action or no_answer. ``parts``: name -> points; their sum is the reward.

    ``recognised``: the place (or that there is none) is stated rightly; ``sighted``: the whole observation is;
    ``located``: the instruction that applies is.
    """

    kind: str
    reason: str
    parts: dict[str, float]
    recognised: bool
    sighted: bool
    located: bool


@lru_cache(maxsize=65536)
def parse(text: str) -> Reply:
    """The one JSON object of an answer; never raises on any text. See common.verifiers.answers for the written rule."""
    found = answers.extract_json(text, FIELDS)
    if found.value is None:
        return Reply(reason=found.reason or answers.NO_OBJECT)
    observation, instruction, action = (found.value[key] for key in FIELDS)
    return Reply(observation, instruction, action, prompts.place_of(observation))


def penalty(reply: Reply, truth: Sight, right: bool, switches: frozenset[str]) -> float:
    """Points for what the answer says it sees: 0 or -1.5."""
    if "intersection_only" in switches:
        # The published test: exactly one of answer and truth mentions the word, and the action is wrong.
        return LANDMARK if not right and ("intersection" in reply.observation) != truth.crossing else 0.0
    return 0.0 if reply.stated is not None and reply.stated[0] == truth.place else LANDMARK


def grade(text: str, truth: Sight, instruction: str, action: str, legal: frozenset[str], switches: frozenset[str]) -> Grade:
    """Judges an answer. instruction and action: the right ones as text; legal: the actions of the space."""
    reply = parse(text)
    right = reply.action == action and not reply.reason
    lost = penalty(reply, truth, right, switches)
    if lost and not right and "penalty_replaces" in switches:
        parts = {"landmark": lost}
    else:
        parts = {"action": RIGHT if right else WRONG} | ({"landmark": lost} if lost else {})
    if reply.reason:
        return Grade("no_answer", reply.reason, parts, False, False, False)
    kind = "right" if right else "wrong_action" if reply.action in legal else "illegal_action"
    reason = "right" if right else f"{action} is right here" if kind == "wrong_action" else "not in the action space"
    recognised = reply.stated is not None and reply.stated[0] == truth.place
    return Grade(kind, reason, parts, recognised, reply.stated == tuple(truth), reply.instruction == instruction)
