"""GeneralPoints, image variant: the same game, but the cards are shown and never named.

    env = gymnasium.make("GeneralPointsVL-v0", switches=["cards_first"])
    observation, info = env.reset(seed=0)  # {"text": ..., "image": (48, 48, 3) uint8}; the text holds <image> once
    observation, reward, terminated, truncated, info = env.step(answer_text)

Source: Chu et al. 2025 (arXiv 2501.17161), section 4.1 and appendix. Departures beside those of common.cards.env: the
picture is 48 x 48 with the cards in two rows of two, the published one 1200 x 1200 with the cards in one row.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from common.cards import grading, hands, prompts
from common.cards.env import GeneralPoints
from common.vision import IMAGE
from experiments.exp_7_11_vl_general_points import drawing

ENV_ID = "GeneralPointsVL-v0"
AGAIN = "\nTry again."


class VisualGeneralPoints(GeneralPoints):
    """GeneralPoints with an image. info after a reset has in addition: suits, inks, drawing (the picture's seed).

    The recognition penalty of the published program is the switch `cards_first`: a card list that is not the cards shown
    costs -1.5 and the formula is not looked at.
    """

    def __init__(
        self,
        verify_iter: int = 1,
        trace: bool = True,
        reward: str = "ladder",
        switches: Collection[str] = (),
        face_values: Collection[int] = hands.TRAINING_RULE,
        look: str = "black",
    ) -> None:
        """look: `black` or `red`, the suits of deals that the options of reset do not set. The rest as in GeneralPoints."""
        super().__init__(verify_iter, trace, reward, switches, face_values)
        if look not in drawing.SUITS_OF:
            raise ValueError(f"look must be one of {', '.join(drawing.SUITS_OF)}; got {look}")
        self.look = look
        box = spaces.Box(0, 255, (drawing.SIDE, drawing.SIDE, 3), np.uint8)
        self.observation_space: Any = spaces.Dict({"text": self.observation_space, "image": box})
        self._image = np.zeros(box.shape, np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Deals and draws a task: options may give `cards`, `face_values`, `target`, `suits` and `drawing` (a seed).

        What the options leave out comes from the stream that `seed` started, whatever was answered before.
        """
        text, info = super().reset(seed=seed, options=options)
        options = options or {}
        suits = options.get("suits")
        if suits is None:
            suits = [drawing.SUITS_OF[self.look][k] for k in self.np_random.integers(0, 2, size=4)]
        place = options.get("drawing")
        if place is None:
            place = int(self.np_random.integers(2**31))
        inks = drawing.in_their_ink(tuple(suits))
        self._image = drawing.draw(tuple(info["cards"]), tuple(suits), inks, place)
        return self._show(text), info | {"suits": list(suits), "inks": list(inks), "drawing": place}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Grades one answer; the picture of a further trial is the same one."""
        text, reward, terminated, truncated, info = super().step(action)
        return self._show(text), reward, terminated, truncated, info

    def _show(self, text: str) -> dict[str, Any]:
        return {"text": text, "image": self._image.copy()}

    def _prompt(self, deal: grading.Deal) -> str:
        return prompts.framed(IMAGE, deal.target, deal.rule, self.trace)

    def _again(self, deal: grading.Deal, failure: str, hint: str | None) -> str:
        return f"{prompts.failed(failure, hint)}{AGAIN}"  # the text variant would name the cards here


if ENV_ID not in gymnasium.registry:
    gymnasium.register(id=ENV_ID, entry_point="experiments.exp_7_11_vl_general_points.env:VisualGeneralPoints")
