"""The treasure hunt as a Gymnasium environment, `TreasureHunt-v0`.

Observations are the text a player reads, actions are numbers into `ACTIONS` or the very text of an action, so that a
table and a language model play the same game. `info["action_mask"]` marks the actions offered now; other actions are
executed too and cost what the game says.

Rewards (deterministic mode): -0.5 for every step, plus the pay of the action (`world.py`), plus 100 for the victory,
minus 10 when the moves run out. Winning on the last move counts as a victory: `terminated`, not `truncated`.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from experiments.exp_7_01_q_learning import world as rules
from experiments.exp_7_01_q_learning.world import ACTIONS, World

ENV_ID = "TreasureHunt-v0"
CHARSET = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;'-+/()_\n")
_ACTION_NUMBER = {name: number for number, name in enumerate(ACTIONS)}
_ROOM_TEXT = {
    "entrance": "A dim entrance hall of bare stone.",
    "storage": "A dusty store of crates and barrels.",
    "hallway": "A long hallway with a heavy door to the north.",
    "guard_room": "A wide room with racks for weapons.",
    "treasure_room": "The treasure room; gold shines everywhere.",
}


class TreasureHunt(gymnasium.Env[str, Any]):
    """The game of 50 moves.

    Args:
        stochastic: noisy step costs and pick-ups, 3 % fumbles, critical and glancing blows, crafts that fail.
        pays_once: each pick-up and each room entry pays the first time only.
        max_moves: moves per episode.
        render_mode: None or "ansi".

    `reset(options=...)` may change the first three for the episodes that follow.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 (how Gymnasium declares it)

    def __init__(
        self,
        stochastic: bool = False,
        pays_once: bool = False,
        max_moves: int = rules.MAX_MOVES,
        render_mode: str | None = None,
    ):
        self.options = {"stochastic": stochastic, "pays_once": pays_once, "max_moves": max_moves}
        self.render_mode = render_mode
        self.action_space = spaces.Discrete(len(ACTIONS))
        self.observation_space = spaces.Text(min_length=1, max_length=2000, charset=CHARSET)
        self.world = World()
        self.moves = 0
        self.over = True
        self.paid: set[str] = set()
        self._noise_T4 = np.zeros((max_moves, 4))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin a game. Without a seed the environment's own stream goes on; unknown options raise ValueError."""
        super().reset(seed=seed)
        for name, value in (options or {}).items():
            if name not in (*self.options, "seed"):
                raise ValueError(f"unknown option {name!r}; allowed: {', '.join(self.options)}")
            if name != "seed":
                self.options[name] = value
        self.world = World()
        self.moves = 0
        self.over = False
        self.paid = set()
        if self.options["stochastic"]:
            # All noise of an episode is drawn at once: later episodes then never depend on the length of earlier ones.
            self._noise_T4 = self.np_random.random((self.options["max_moves"], 4))
        return self.describe("The hunt begins."), self._info({}, "started")

    def step(self, action: int | str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make one move, given by number or by text; text that is no action costs a move and 1 point."""
        if self.over:
            raise RuntimeError("this game is over: call reset() first")
        text = action.strip().lower() if isinstance(action, str) else ACTIONS[int(action)]
        noise_4 = self._noise_T4[self.moves] if self.options["stochastic"] else None
        self.moves += 1
        last = self.moves >= self.options["max_moves"]

        parts = {"step": rules.STEP_REWARD if noise_4 is None else rules.STEP_REWARD + (-0.1 + 0.2 * noise_4[0])}
        fumbled = noise_4 is not None and noise_4[1] < rules.FUMBLE_PROBABILITY
        if fumbled:
            # A fumble on the last move costs the timeout alone.
            parts["action"] = 0.0 if last else rules.FUMBLE_REWARD
            message = "You fumble."
        else:
            outcome = rules.apply_action(self.world, text)
            if noise_4 is not None:
                outcome = rules.add_chance(self.world, outcome, noise_4)
            parts["action"] = self._pay(outcome)
            self.world, message = outcome.world, outcome.message

        won = self.world.won
        out = last and not won
        if won:
            parts["victory"] = rules.VICTORY_REWARD
        if out:
            parts["timeout"] = rules.TIMEOUT_REWARD
        self.over = won or out
        reward = 0.0
        for part in parts.values():
            reward += part
        reason = "victory" if won else "out of moves" if out else "playing"
        return self.describe(message), reward, won, out, self._info(parts, reason)

    def action_masks(self) -> np.ndarray:
        """Booleans (len(ACTIONS),), True where the action is offered; a new array at every call."""
        mask = np.zeros(len(ACTIONS), dtype=np.int8)
        mask[[_ACTION_NUMBER[name] for name in rules.legal_actions(self.world)]] = 1
        return mask.astype(bool)

    def describe(self, message: str = "") -> str:
        """What the player reads: what just happened, the room, its items and exits, the inventory, the moves left."""
        here = self.world
        lines = [message] if message else []
        lines.append(f"Room: {here.room.replace('_', ' ')}. {_ROOM_TEXT[here.room]}")
        if here.room == "guard_room" and here.guard:
            lines.append("A guard bars every way out.")
        if here.floor:
            lines.append(f"You see: {', '.join(here.floor)}.")
        shut = here.locked and here.room == "hallway"
        exits = [f"{way} (locked)" if shut and way == "north" else way for way in rules.EXITS[here.room]]
        lines.append(f"Exits: {', '.join(exits)}.")
        lines.append(f"You carry: {', '.join(here.inventory) or 'nothing'}.")
        lines.append(f"Moves left: {self.options['max_moves'] - self.moves}.")
        lines.append(f"Actions: {', '.join(rules.legal_actions(here))}.")
        # Text that the player made up must not leave the observation space.
        return "".join(letter if letter in CHARSET else "-" for letter in "\n".join(lines))[:2000]

    def set_noise(self, noise_T4: np.ndarray) -> None:
        """Play the running game (stochastic mode) with these numbers, shape (max_moves, 4), instead of the seed's."""
        self._noise_T4 = np.array(noise_T4)

    def render(self) -> str | None:
        """The description of the state in render mode "ansi"."""
        return self.describe() if self.render_mode == "ansi" else None

    def _pay(self, outcome: rules.Outcome) -> float:
        if self.options["pays_once"] and outcome.repeatable is not None:
            if outcome.repeatable in self.paid:
                return 0.0
            self.paid.add(outcome.repeatable)
        return outcome.pay

    def _info(self, parts: dict[str, float], reason: str) -> dict[str, Any]:
        return {
            "action_mask": self.action_masks(),
            "actions": rules.legal_actions(self.world),
            "success": self.world.won,
            "reason": reason,
            "parts": dict(parts),
        }


gymnasium.register(id=ENV_ID, entry_point="experiments.exp_7_01_q_learning.env:TreasureHunt")
