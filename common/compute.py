"""One written cost model for every branch: 2·N FLOPs per token of a forward pass or of sampling, 6·N per trained token.

N counts all parameters of the policy, except that what turns images into embeddings counts per image, with its own N and
its patches in place of tokens (common.vision.meter_for). The constants are those of Kaplan et al. 2020, section 2.1 (2·N
forward, twice that for the backward pass); attention's share is left out, as it is small at the lengths used here.
"""

import math
from dataclasses import dataclass
from typing import Any

FORWARD_FLOPS = 2
TRAIN_FLOPS = 6


@dataclass(frozen=True)
class Budget:
    """How long a branch may train: FLOPs under the cost model, optimizer-loop steps, or whichever ends first."""

    flops: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.flops is None and self.steps is None:
            raise ValueError("Budget needs flops, steps or both; it was given neither.")
        for key, value in (("flops", self.flops), ("steps", self.steps)):
            if value is not None and (not math.isfinite(value) or value < 0):
                raise ValueError(f"Budget {key}={value} must be a finite number of at least 0.")


class Meter:
    """Counts the tokens a model of `parameters` weights has processed, and their FLOPs.

    ``image_flops``: what it costs to encode one image, without and with a gradient.
    """

    def __init__(self, parameters: int, image_flops: tuple[int, int] = (0, 0)) -> None:
        if parameters <= 0:
            raise ValueError(f"Meter parameters={parameters} must be positive.")
        self.parameters = parameters
        self.image_flops = image_flops
        self.images_forward = 0
        self.images_trained = 0
        self.tokens_forward = 0
        self.tokens_trained = 0
        self.flops_of_others = 0  # what passes of models of another size cost beyond this one's

    def add_forward(self, tokens: int, parameters: int | None = None) -> None:
        """Count tokens of sampling, scoring or any other pass without gradient.

        ``parameters``: of the model that made the pass, where it is another one (a teacher, a judge).
        """
        self.tokens_forward += int(tokens)
        if parameters is not None:
            self.flops_of_others += FORWARD_FLOPS * (parameters - self.parameters) * int(tokens)

    def add_train(self, tokens: int) -> None:
        """Count tokens of a forward and backward pass."""
        self.tokens_trained += int(tokens)

    def add_images(self, images: int, train: bool = False) -> None:
        """Count images encoded: with ``train`` in a pass that has a backward one."""
        if train:
            self.images_trained += images
        else:
            self.images_forward += images

    @property
    def flops(self) -> int:
        """Total FLOPs so far, an exact integer so that a resumed run ends at the same step."""
        own = self.parameters * (FORWARD_FLOPS * self.tokens_forward + TRAIN_FLOPS * self.tokens_trained)
        seen = self.image_flops[0] * self.images_forward + self.image_flops[1] * self.images_trained
        return own + seen + self.flops_of_others

    def used(self, budget: Budget, step: int) -> float:
        """Share of the budget used after `step` finished steps, 0 to 1: the larger of the two limits' shares."""
        shares = [0.0]
        if budget.flops is not None:
            shares.append(self.flops / budget.flops if budget.flops else 1.0)
        if budget.steps is not None:
            shares.append(step / budget.steps if budget.steps else 1.0)
        return min(1.0, max(shares))

    def exhausted(self, budget: Budget, step: int) -> bool:
        """True when `step` finished steps or the FLOPs counted so far have reached the budget."""
        return self.used(budget, step) >= 1.0

    def state_dict(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "tokens_forward": self.tokens_forward,
            "tokens_trained": self.tokens_trained,
            "flops_of_others": self.flops_of_others,
            "images_forward": self.images_forward,
            "images_trained": self.images_trained,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved count. ValueError when it was taken on a model of another size."""
        if state["parameters"] != self.parameters:
            raise ValueError(
                f"The saved meter counted a model of {state['parameters']} parameters, this one has {self.parameters}; "
                "the checkpoint belongs to another model."
            )
        self.tokens_forward = state["tokens_forward"]
        self.tokens_trained = state["tokens_trained"]
        self.flops_of_others = state.get("flops_of_others", 0)  # 0 in a state that counted one model alone
        self.images_forward, self.images_trained = state.get("images_forward", 0), state.get("images_trained", 0)
