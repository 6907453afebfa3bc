"""A learned judge in place of rules: which turns of an episode break one?

The judge is the policy's decoder under a scalar head, read at the last token of each turn, so that one forward judges all
turns of an episode. It learns from labelled turns by binary cross-entropy, and then stands in a policy-gradient loop in the
place of the rules (`Judged`): what it takes for a violation is paid for as one, be it one or not.

Shape suffixes: _B rows, _T tokens, _N turns, packed episode by episode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium
import torch
from torch import Tensor, nn

from common.episodes import Episode, MakeEnv
from common.models import parameter_count
from common.pairs import answer_row
from common.seeding import rng
from common.sft import SftConfig, make_optimizers, pad_rows, rate_factor

ROWS = 256  # episodes of a forward pass
JUDGED = "judged"  # the name of a violation that the judge sees


class Quality(NamedTuple):
    """``precision``: share of the turns it names that are violations; ``recall``: share of the violations it names."""

    precision: float | None
    recall: float | None


def turn_ends(episode: Episode) -> list[int]:
    """Position of the last token of each of the policy's turns."""
    return list({turn: position for position, turn in enumerate(episode.turns) if turn >= 0}.values())


def labels_of(episode: Episode) -> list[float]:
    """1 for each turn that breaks a rule."""
    return [float(bool(info["violations"])) for info in episode.infos]


def turn_logits(model: Any, episodes: Sequence[Episode], pad_id: int) -> Tensor:
    """The judge's logit of each turn, (N,): above 0 it takes it for a violation."""
    ids_BT = pad_rows([answer_row(episode) for episode in episodes], pad_id)[0].to(model.device)
    places = [(row, end) for row, episode in enumerate(episodes) for end in turn_ends(episode)]
    row_N, end_N = torch.tensor(places, device=model.device).T
    hidden_BTD = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    return model.score(hidden_BTD[row_N, end_N]).float()[:, 0]


@torch.no_grad()
def judge(model: Any, episodes: Sequence[Episode], pad_id: int) -> list[list[bool]]:
    """For each episode, which turns the judge takes for violations."""
    found: list[list[bool]] = []
    for start in range(0, len(episodes), ROWS):
        part = episodes[start : start + ROWS]
        verdicts = iter((turn_logits(model, part, pad_id) > 0).tolist())
        found += [[next(verdicts) for _ in turn_ends(episode)] for episode in part]
    return found


def quality(model: Any, episodes: Sequence[Episode], pad_id: int) -> Quality:
    """How well the judge names the violations of some episodes; None where there is nothing to name, or nothing is named."""
    said = [verdict for row in judge(model, episodes, pad_id) for verdict in row]
    true = [label for episode in episodes for label in labels_of(episode)]
    both = sum(label for verdict, label in zip(said, true, strict=True) if verdict)
    return Quality(both / sum(said) if any(said) else None, both / sum(true) if any(true) else None)


def train_judge(
    model: Any, episodes: Sequence[Episode], config: SftConfig, *, steps: int, pad_id: int, seed: int
) -> list[float]:
    """Minimises the mean binary cross-entropy of the turns, batch_size episodes a step; the loss of each step.

    Batches are a function of (seed, step) alone.
    """
    optimizers, losses = make_optimizers(model, config), []
    model.train()
    for step in range(steps):
        chosen = rng(seed, "judge", step).choice(len(episodes), min(config.batch_size, len(episodes)), replace=False)
        batch = [episodes[i] for i in chosen]
        label_N = torch.tensor([label for episode in batch for label in labels_of(episode)], device=model.device)
        loss = nn.functional.binary_cross_entropy_with_logits(turn_logits(model, batch, pad_id), label_N)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate_factor(config, step, step / steps)
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    model.eval()
    return losses


@dataclass
class Judged:
    """Stands in make_env's place in a policy-gradient loop, whose turns then violate what the judge says they violate.

    The rules' own verdict stays in each info's parts. The judge's forward is charged to the episode's tokens_forward, in
    tokens of the policy.
    """

    make_env: MakeEnv
    model: Any
    pad_id: int
    policy_parameters: int

    def __call__(self) -> gymnasium.Env:
        return self.make_env()

    def rescore(self, episodes: Sequence[Episode]) -> None:
        """Replaces the violations of sampled episodes, in place."""
        price = parameter_count(self.model) / self.policy_parameters
        for episode, verdicts in zip(episodes, judge(self.model, episodes, self.pad_id), strict=True):
            for info, verdict in zip(episode.infos, verdicts, strict=True):
                info["violations"] = [JUDGED] * verdict
            episode.tokens_forward += math.ceil(len(episode.ids) * price)
