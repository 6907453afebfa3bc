"""The rules of the treasure hunt as pure functions of an immutable state.

Rooms, items, hidden mechanics and rewards follow the companion program of the book
(`chapter1/learning-from-experience`, July 2026); the code is new. The player must learn, without being told, that

1. the red key opens the hallway's north door by itself and is not used up,
2. the guard falls only to a silver sword,
3. the living guard blocks *every* exit of its room, the way back included,
4. rusty sword and magic crystal combine into the silver sword, and both are used up.

The order of items matters: it is the order in which actions are offered, and ties between action values go to the
first action offered.
"""

from collections.abc import Sequence
from typing import NamedTuple

ROOMS = ("entrance", "storage", "hallway", "guard_room", "treasure_room")
ITEMS = ("rusty sword", "red key", "magic crystal", "silver sword", "dragon's treasure")
WEAPONS = ("rusty sword", "silver sword")
DIRECTIONS = ("north", "south", "east", "west")
EXITS = {
    "entrance": {"north": "hallway", "east": "storage"},
    "storage": {"west": "entrance"},
    "hallway": {"south": "entrance", "north": "guard_room"},
    "guard_room": {"south": "hallway", "east": "treasure_room"},
    "treasure_room": {"west": "guard_room"},
}
ACTIONS = (
    *(f"go {direction}" for direction in DIRECTIONS),
    *(f"take {item}" for item in ITEMS),
    *(f"use {item}" for item in ITEMS),
    *(f"drop {item}" for item in ITEMS),
    *(f"attack with {weapon}" for weapon in WEAPONS),
    "look around",
    "check inventory",
    "try crafting",
)
MAX_MOVES = 50
STEP_REWARD = -0.5
VICTORY_REWARD = 100.0
TIMEOUT_REWARD = -10.0
FUMBLE_PROBABILITY = 0.03
FUMBLE_REWARD = -0.2
TAKE_REWARD = dict(zip(ITEMS, (3.0, 5.0, 2.0, 3.0, 100.0), strict=True))
# Events that can be repeated for pay, by their bit in the learner's tables: four pick-ups and five room entries.
REPEATABLE = (*(f"take {item}" for item in ITEMS[:4]), *(f"enter {room}" for room in ROOMS))


class World(NamedTuple):
    """Everything that moves: a full (Markov) state but for the number of moves made."""

    room: str = "entrance"
    inventory: tuple[str, ...] = ()
    floors: tuple[tuple[str, ...], ...] = (
        ("rusty sword",),
        ("red key", "magic crystal"),
        (),
        (),
        ("dragon's treasure",),
    )
    locked: bool = True
    guard: bool = True

    @property
    def floor(self) -> tuple[str, ...]:
        """Items lying in the player's room, oldest first."""
        return self.floors[ROOMS.index(self.room)]

    @property
    def won(self) -> bool:
        """Victory means holding the dragon's treasure, and nothing else."""
        return "dragon's treasure" in self.inventory

    def with_floor(self, floor: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """All floors with the player's room holding `floor` instead."""
        return tuple(floor if room == self.room else old for room, old in zip(ROOMS, self.floors, strict=True))


class Outcome(NamedTuple):
    """What an action does, before the cost of the step: the new state, its pay, how chance may change it, a message.

    `chance` names the stochastic mode's rule (`attack`, `craft`, or empty); `spread` is the half-width of the uniform
    noise it adds to the pay; `repeatable` is an entry of REPEATABLE or None.
    """

    world: World
    pay: float
    message: str
    repeatable: str | None = None
    spread: float = 0.0
    chance: str = ""


def legal_actions(world: World) -> list[str]:
    """The actions offered in a state, in the order of the companion program."""
    actions = [f"go {direction}" for direction in EXITS[world.room]]
    actions += [f"take {item}" for item in world.floor]
    for item in world.inventory:
        actions += [f"use {item}", f"drop {item}"]
    if world.room == "guard_room" and world.guard:
        actions += [f"attack with {item}" for item in world.inventory if item in WEAPONS]
    actions += ["look around", "check inventory"]
    if len(world.inventory) >= 2:
        actions.append("try crafting")
    return actions


def apply_action(world: World, action: str) -> Outcome:
    """Apply any text as an action; what is not possible costs something and changes nothing."""
    verb, _, noun = action.partition(" ")
    if verb == "go":
        return _go(world, noun)
    if verb == "take":
        return _take(world, noun)
    if verb == "use":
        return _use(world, noun)
    if verb == "drop":
        return _drop(world, noun)
    if action.startswith("attack with "):
        return _attack(world, action.removeprefix("attack with "))
    if action == "look around":
        return Outcome(world, 0.0, "You look around.")
    if action == "check inventory":
        return Outcome(world, 0.0, "You carry: " + (", ".join(world.inventory) or "nothing") + ".")
    if action == "try crafting":
        return _craft(world)
    return Outcome(world, -1.0, f"Unknown action: {action}.")


def _go(world: World, direction: str) -> Outcome:
    if direction not in EXITS[world.room]:
        return Outcome(world, -1.0, f"There is no way {direction} from here.")
    target = EXITS[world.room][direction]
    entered = f"enter {target}"
    if world.room == "hallway" and direction == "north" and world.locked:
        if "red key" not in world.inventory:
            return Outcome(world, -0.5, "The north door is locked; it wants a red key.")
        return Outcome(world._replace(room=target, locked=False), 5.0, "The red key opens the door.", entered)
    if world.room == "guard_room" and world.guard:
        return Outcome(world, -1.0, "The guard lets you go nowhere.")
    return Outcome(world._replace(room=target), 1.0, f"You go {direction}.", entered)


def _take(world: World, item: str) -> Outcome:
    if item not in world.floor:
        return Outcome(world, -0.5, f"There is no {item} here.", spread=0.1)
    floor = tuple(other for other in world.floor if other != item)
    taken = world._replace(inventory=(*world.inventory, item), floors=world.with_floor(floor))
    repeatable = f"take {item}" if f"take {item}" in REPEATABLE else None
    return Outcome(taken, TAKE_REWARD[item], f"You take the {item}.", repeatable, spread=0.5)


def _use(world: World, item: str) -> Outcome:
    if item == "red key" and item in world.inventory:
        return Outcome(world, 0.0, "The red key works by itself at its door.")
    return Outcome(world, -0.5, f"The {item} cannot be used now.")


def _drop(world: World, item: str) -> Outcome:
    if item not in world.inventory:
        return Outcome(world, 0.0, f"You have no {item}.")
    inventory = tuple(other for other in world.inventory if other != item)
    dropped = world._replace(inventory=inventory, floors=world.with_floor((*world.floor, item)))
    return Outcome(dropped, 0.0, f"You drop the {item}.")


def _attack(world: World, weapon: str) -> Outcome:
    if world.room != "guard_room" or not world.guard:
        return Outcome(world, -1.0, "There is nothing to attack here.")
    if weapon not in world.inventory or weapon not in WEAPONS:
        return Outcome(world, -1.0, f"You have no weapon called {weapon}.")
    if weapon == "rusty sword":
        return Outcome(world, -2.0, "The rusty sword does nothing to this guard.", spread=0.5)
    return Outcome(world._replace(guard=False), 20.0, "The guard falls to the silver sword.", chance="attack")


def _craft(world: World) -> Outcome:
    if not {"rusty sword", "magic crystal"} <= set(world.inventory):
        # Too few items and unfitting items cost the same, but only unfitting ones are noisy in stochastic mode.
        return Outcome(world, -0.5, "Nothing comes of it.", spread=0.1 if len(world.inventory) >= 2 else 0.0)
    rest = tuple(item for item in world.inventory if item not in ("rusty sword", "magic crystal"))
    crafted = world._replace(inventory=(*rest, "silver sword"))
    return Outcome(crafted, 10.0, "You craft a silver sword.", chance="craft")


def add_chance(world: World, outcome: Outcome, noise: Sequence[float]) -> Outcome:
    """Let chance change an outcome (stochastic mode).

    `noise` holds the step's four numbers in [0, 1): step cost, fumble, roll, spread (in this order; the first two are
    used by the environment). An attack with the silver sword is critical (+30) in 10 % of cases and glances off
    (-0.5, guard lives) in 5 %; a craft fails in 10 % (-0.2, nothing consumed).
    """
    _, _, roll, spread = noise
    if outcome.chance == "attack":
        if roll < 0.1:
            return outcome._replace(pay=30.0, message="A critical hit: the guard falls.")
        if roll < 0.95:
            return outcome
        return Outcome(world, -0.5, "Your sword glances off.")
    if outcome.chance == "craft":
        if roll < 0.9:
            return outcome._replace(pay=10.0 + (-1.0 + 3.0 * spread))
        return Outcome(world, -0.2, "The crafting fizzles; try again.")
    if outcome.spread:
        return outcome._replace(pay=outcome.pay + (-outcome.spread + 2.0 * outcome.spread * spread))
    return outcome


def seen_key(world: World) -> tuple:
    """The state as the companion's learner sees it: its own room only, and not the number of moves (not Markov)."""
    locked = world.locked and world.room == "hallway"
    guard = world.guard and world.room == "guard_room"
    return (world.room, tuple(sorted(world.inventory)), tuple(sorted(world.floor)), locked, guard)


def full_key(world: World) -> tuple:
    """The whole world without the order of items: Markov together with the number of moves made."""
    floors = tuple(tuple(sorted(floor)) for floor in world.floors)
    return (world.room, tuple(sorted(world.inventory)), floors, world.locked, world.guard)
