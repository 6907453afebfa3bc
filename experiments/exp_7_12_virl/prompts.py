"""The texts of the task: prompt, observation, answer and feedback, built from constant phrases around varying words.

The sections, the lines O_i and A_i, the keys of the answer and the wording of actions and instructions follow what Chu et
al. 2025 show of their V-IRL prompts; the sentences around them are ours. Two departures: [Output] stands before the
observations, because the observations go on turn by turn; an answer names its instruction with its number.

Every phrase is exported, so that a small tokenizer can hold each as one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from experiments.exp_7_12_virl.routes import ABSOLUTE, RELATIONS, RELATIVE, Instruction, Route, Sight, Stop

VERBS = ("forward", "turn_direction", "stop")
OTHER_VERBS = (
    ("walk", "face", "halt"), ("advance", "look", "end"), ("proceed", "rotate", "finish"), ("go_on", "head", "arrive"),
    ("move", "steer", "wait"),
)  # fmt: skip
DEGREES = ("0", "45", "90", "135", "180", "225", "270", "315")
CLOCK = ("9 o'clock", "3 o'clock", "11 o'clock", "1 o'clock")  # in the order of RELATIVE
SPACES = {"absolute": ABSOLUTE, "relative": RELATIVE, "degrees": DEGREES, "clock": CLOCK}

TASK = (
    "[Task Description]\nYou are an expert in navigation. You walk through a city by the instruction below, one action per "
    "observation. What you see at a crossing tells you which part of the instruction you have reached.\n\n[Instruction]"
)
NUMBERS = tuple(f"{k}. " for k in range(1, 13))
LINE = "\n"
FIRST = "First, turn "
TURN = "Turn "
TO_FACE = " to face "
GO = "Move forward until you reach next intersection"
REACH = "Move forward until you reach destination"
WHERE = " where "
PERIOD = "."
FORMAT = "\n\n[Observation format]\nEach observation shows four views in a 2x2 grid: [front, right / back, left]."
SPACE = '\n\n[Action space]\n"'
IS_FORWARD = '()": moves you one step ahead.\n"'
IS_TURN = '(x)": turns you towards x, where x is one of ['
COMMA = ", "
IS_STOP_BEFORE = ']\n"'
IS_STOP = (
    '()": ends the walk at the destination.\n\n[Output]\nReply with one JSON object and nothing else. Its keys are:\n'
    '"current observation": what you see now,\n"current instruction": the part of the instruction that applies now,\n'
    '"action": one action of the action space.\n\n[Observations and actions sequence]'
)
OBSERVATIONS = tuple(f"\nO_{k}: " for k in range(1, 41))
ACTIONS = tuple(f"\nA_{k}: " for k in range(1, 41))
NOTHING = "No landmarks nearby"
CROSSING = "; You observe an intersection"
IMAGE = "You observe an image of 4 views"
STANDS = tuple(f" is {relation}" for relation in RELATIONS)

OPEN = '{"current observation": "'
INSTRUCTION = '", "current instruction": "'
ACTION = '", "action": "'
BRACKET = "("
CLOSE = ')"}'
CLOSE_BARE = '()"}'
FEEDBACK = {
    "no_answer": "\nYour reply is not one JSON object with the keys asked for. Try again.",
    "illegal_action": "\nThat is no action of the action space. Try again.",
    "wrong_action": "\nThat action is wrong here. Try another one.",
    "led_on": "\nThat action is wrong here, and no try is left. You are led to the next stop.",
}

PHRASES = (
    TASK, *NUMBERS, LINE, FIRST, TURN, TO_FACE, GO, REACH, WHERE, PERIOD, FORMAT, SPACE, IS_FORWARD, IS_TURN, COMMA,
    IS_STOP_BEFORE, IS_STOP, *OBSERVATIONS, *ACTIONS, NOTHING, CROSSING, IMAGE, *STANDS, OPEN, INSTRUCTION, ACTION, BRACKET,
    CLOSE, CLOSE_BARE, *FEEDBACK.values(), *VERBS, *(verb for verbs in OTHER_VERBS for verb in verbs), *ABSOLUTE,
    *RELATIVE, *DEGREES, *CLOCK,
)  # fmt: skip


class Rule(NamedTuple):
    """An action space: which words say where to turn (a key of SPACES), and what the three actions are called.

    The tested pairing is the standard verbs with the relative words.
    """

    space: str = "absolute"
    verbs: tuple[str, str, str] = VERBS

    @property
    def withheld(self) -> bool:
        """The pairing that the rule shift tests, which no training text may state."""
        return self.space == "relative" and self.verbs[1] == VERBS[1]


def turn_word(space: str, instruction: Instruction) -> str:
    """The word of a space for the turn that an instruction asks for."""
    return SPACES[space][instruction.direction if len(SPACES[space]) == len(ABSOLUTE) else instruction.way]


def action_text(rule: Rule, action: str, instruction: Instruction) -> str:
    """An action as the action space writes it: forward(), turn_direction(east), stop()."""
    forward, turn, stop = rule.verbs
    if action == "turn":
        return f"{turn}({turn_word(rule.space, instruction)})"
    return f"{forward if action == 'forward' else stop}()"


def legal_actions(rule: Rule) -> frozenset[str]:
    """Every action of the space."""
    forward, turn, stop = rule.verbs
    return frozenset({f"{forward}()", f"{stop}()", *(f"{turn}({word})" for word in SPACES[rule.space])})


def sight_text(sight: Sight) -> str:
    """`Bakery Alder is on your right; You observe an intersection`."""
    seen = NOTHING if sight.place is None else f"{sight.place}{STANDS[sight.relation]}"
    return seen + (CROSSING if sight.crossing else "")


def image_text(sight: Sight) -> str:
    """What the text of an observation with an image says: no place, but whether streets cross, as in the source."""
    return IMAGE + (CROSSING if sight.crossing else "")


def instruction_text(number: int, instruction: Instruction) -> str:
    """`3. Turn left to face west.`; number counts from 0."""
    if instruction.kind == "turn":
        begin = FIRST if number == 0 else TURN
        text = f"{begin}{RELATIVE[instruction.way]}{TO_FACE}{ABSOLUTE[instruction.direction]}"
    else:
        sight = instruction.sight
        text = GO if instruction.kind == "go" else REACH
        if sight is not None and sight.place is not None:
            text += f"{WHERE}{sight.place}{STANDS[sight.relation]}"
    return f"{NUMBERS[number]}{text}{PERIOD}"


def prompt(route: Route, rule: Rule, vision: bool = False) -> str:
    """The first turn up to the first observation, which observation_text adds."""
    lines = "".join(f"{LINE}{instruction_text(k, one)}" for k, one in enumerate(route.instructions))
    forward, turn, stop = rule.verbs
    words = COMMA.join(SPACES[rule.space])
    space = f"{SPACE}{forward}{IS_FORWARD}{turn}{IS_TURN}{words}{IS_STOP_BEFORE}{stop}{IS_STOP}"
    return f"{TASK}{lines}{FORMAT if vision else ''}{space}"


def observation_text(number: int, seen: str) -> str:
    """The lines O_i and A_i of a stop; number counts from 0."""
    return f"{OBSERVATIONS[number]}{seen}{ACTIONS[number]}"


def answer(observation: str, instruction: str, action: str) -> str:
    """The answer's text: one JSON object."""
    return f'{OPEN}{observation}{INSTRUCTION}{instruction}{ACTION}{action}"}}'


def gold(route: Route, stop: Stop, rule: Rule) -> str:
    """The right answer at a stop."""
    instruction = route.instructions[stop.instruction]
    return answer(
        sight_text(stop.sight), instruction_text(stop.instruction, instruction), action_text(rule, stop.action, instruction)
    )


def place_of(text: str) -> tuple[str | None, int, bool] | None:
    """(place, relation, crossing) that a stated observation names; None where it is no such statement."""
    crossing = text.endswith(CROSSING)
    text = text.removesuffix(CROSSING)
    if text == NOTHING:
        return None, -1, crossing
    for relation, words in enumerate(STANDS):
        if text.endswith(words):
            return text.removesuffix(words), relation, crossing
    return None


def name_pieces(names: Sequence[str], trades: Sequence[str], proper: Sequence[str]) -> list[str]:
    """What a small tokenizer needs to write the names: trade and proper name apart, any other name as one piece."""
    made = {f"{trade} {name}" for trade in trades for name in proper}
    return [*(f"{trade} " for trade in trades), *proper, *sorted(set(names) - made)]
