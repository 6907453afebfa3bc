"""What is learnt by imitation: play (go to an object), which stands for a robot model's pre-training, and demonstrations.

Labels are soft: a bin's neighbours get a little of its probability, by a Gaussian over the order of the bins, so that a
policy that is sampled at a high temperature errs by a centimetre and not by any bin.
Shape suffixes: _N frames, _L control steps, _A tokens of a control step, _V bins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from common.compute import Meter
from common.models import parameter_count
from common.runlog import RunLog
from common.schema import one_of, within
from common.seeding import rng
from common.sft import SftConfig, make_optimizers, rate_factor
from common.target_losses import distillation_loss
from experiments.exp_7_13_simplevla import tasks, tokens
from experiments.exp_7_13_simplevla.episodes import to_inputs
from experiments.exp_7_13_simplevla.expert import approach, demonstrate
from experiments.exp_7_13_simplevla.physics import BLOCKS, FINGER_OPEN, HIGH, LOW
from experiments.exp_7_13_simplevla.policy import Inputs, VlaPolicy, log_probabilities
from experiments.exp_7_13_simplevla.world import FIRST_BLOCK, Seen, World

PLAY_REACH = 0.2  # metres from the middle within which play begins


@dataclass(frozen=True)
class Lesson:
    """How long and how softly something is imitated; `batch` frames a step. `sigma` in bins; 0: hard labels.

    `optimizer`: muon for the matrices inside the layers and AdamW (`lr`) for the rest, or adamw for all.
    """

    steps: int
    batch: int
    lr: float
    sigma: float = 0.33
    optimizer: str = "muon"
    muon_lr: float = 0.02

    def __post_init__(self) -> None:
        within("steps", self.steps, 0)
        within("batch", self.batch, 1)
        within("lr", self.lr, 0, above=True)
        within("sigma", self.sigma, 0)
        one_of("optimizer", self.optimizer, ("adamw", "muon"))
        within("muon_lr", self.muon_lr, 0, above=True)


class Frames(NamedTuple):
    """Observations and the tokens (N, L, A) that are right for them."""

    inputs: Inputs
    tokens: Tensor

    def take(self, rows: Tensor) -> Frames:
        return Frames(self.inputs.take(rows), self.tokens[rows])


def play_frames(policy: VlaPolicy, count: int, seed: int) -> Frames:
    """`count` frames of "go to the <object>": the gripper anywhere, half the time near its goal. No physics is needed."""
    stream = rng(seed, "play")
    layouts = tasks.draw("train", stream.integers(len(tasks.TASKS), size=count), seed, "play", spread=tasks.WIDE)
    world, rows = World(layouts), np.arange(count)
    seen = world.see()
    goal = stream.integers(1, seen.places.shape[1], size=count)
    target = seen.places[rows, goal]
    hand = stream.uniform((-PLAY_REACH, -PLAY_REACH, LOW), (PLAY_REACH, PLAY_REACH, HIGH), (count, 3))
    near = stream.random(count) < 0.5
    hand[near, :2] = target[near, :2] + stream.uniform(-0.02, 0.02, (near.sum(), 2))
    seen.places[:, 0] = hand
    names = [tasks.WORDS[word] for word in seen.names[rows, goal]]
    kinds = np.where(goal < FIRST_BLOCK + BLOCKS, "block", "pad")
    words = np.array([tasks.encode(f"go to the {name} {kind}") for name, kind in zip(names, kinds, strict=True)])
    opening = 2 * FINGER_OPEN * stream.integers(0, 3, size=count) / 2
    actions = tokens.encode(approach(hand, target[:, :2], policy.config.chunk))
    return Frames(to_inputs(Seen(words, seen.names, seen.places, opening), policy, world, rows), torch.from_numpy(actions))


class Performance(NamedTuple):
    """The demonstrator at work: what was seen before each control step, its tokens (N, steps, A), control steps taken (N,)."""

    views: list[Seen]
    tokens: np.ndarray
    world: World
    solved: np.ndarray
    steps: np.ndarray
    states: np.ndarray  # (N, steps, S), after each control step


def perform(layouts: tasks.Layouts, limit: int, shape: str = "cube") -> Performance:
    """The demonstrator in each layout, for at most `limit` control steps; it stops when the block lies there."""
    world, rows = World(layouts, shape), np.arange(len(layouts.task))
    solved, steps = np.zeros(len(rows), bool), np.full(len(rows), limit)
    views, states, made = [], [], np.zeros((len(rows), limit, len(tokens.WIDTHS)), int)
    made[..., :3] = tokens.BINS // 2  # standing still
    for step in range(limit):
        views.append(world.see())
        if len(rows):
            hand = views[-1].places[rows, 0]
            wish = demonstrate(hand, world.closed[rows], world.meant()[rows], layouts.goal_xy[rows], 1)
            made[rows, step] = tokens.encode(wish)[:, 0]
            outcome = world.act(rows, made[rows, step][:, None])
            solved[rows] = outcome.solved
            steps[rows[outcome.solved]] = step + 1
            rows = rows[~outcome.solved]
        states.append(world.states.copy())
    return Performance(views, made, world, solved, steps, np.stack(states, 1))


def demonstration_frames(policy: VlaPolicy, demos: int, limit: int, seed: int) -> Frames:
    """Every control step of `demos` demonstrations per trained task. RuntimeError if the demonstrator fails."""
    shown = perform(tasks.draw("train", np.repeat(tasks.SEEN, demos), seed, "demonstrations"), limit)
    if not shown.solved.all():
        raise RuntimeError(
            f"The demonstrator failed in {(~shown.solved).sum()} of {len(shown.solved)} layouts in {limit} steps."
        )
    chunk, found = policy.config.chunk, []
    padded = np.concatenate([shown.tokens, np.repeat(still(len(shown.steps)), chunk, 1)], 1)
    for step, view in enumerate(shown.views):
        rows = np.flatnonzero(step < shown.steps)
        if len(rows):
            wanted = torch.from_numpy(padded[rows, step : step + chunk])
            found.append(Frames(to_inputs(view.take(rows), policy, shown.world, rows), wanted))
    inputs = Inputs(*(None if x[0] is None else torch.cat(x) for x in zip(*(f.inputs for f in found), strict=True)))
    return Frames(inputs, torch.cat([frames.tokens for frames in found]))


def still(count: int) -> np.ndarray:
    """Tokens (N, 1, A) of standing still with the gripper open."""
    token = [tokens.BINS // 2] * 3 + [0]
    return np.tile(np.array(token), (count, 1, 1))


def soft_labels(token_NLA: Tensor, sigma: float) -> Tensor:
    """Log-probabilities (N, L, A, V) of a Gaussian around each token's bin; sigma 0 puts all on the bin itself."""
    bins = torch.arange(tokens.BINS, device=token_NLA.device)
    away = (bins - token_NLA[..., None]).float()
    allowed = bins[None] < torch.tensor(tokens.WIDTHS, device=bins.device)[:, None]
    logits = torch.where(away == 0, 0.0, -torch.inf) if sigma == 0 else -0.5 * (away / sigma) ** 2
    return torch.log_softmax(logits.masked_fill(~allowed, -torch.inf), -1)


def imitation_loss(policy: VlaPolicy, frames: Frames, sigma: float) -> Tensor:
    """Mean over tokens of the divergence from the soft labels (cross-entropy, up to a constant)."""
    logp = log_probabilities(policy(frames.inputs)[0], 1.0)
    labels = soft_labels(frames.tokens, sigma)
    return distillation_loss("forward_kl", logp.flatten(0, -2), labels.flatten(0, -2), frames.tokens.flatten()).mean()


def imitate(policy: VlaPolicy, frames_at: Callable[[int], Frames], lesson: Lesson, log: RunLog | None = None) -> Meter:
    """Trains `policy` in place on frames_at(step); returns the compute. It takes seconds, so it is not resumed midway."""
    meter, config = (
        Meter(parameter_count(policy)),
        SftConfig(
            lr=lesson.lr, optimizer=lesson.optimizer, muon_lr=lesson.muon_lr, warmup_steps=20, decay_share=1.0, floor=0.0
        ),
    )
    optimizers = make_optimizers(policy, config)
    policy.train()
    for step in range(lesson.steps):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["peak"] * rate_factor(config, step, step / lesson.steps)
        frames = frames_at(step)
        policy.zero_grad(set_to_none=True)
        loss = imitation_loss(policy, frames, lesson.sigma)
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), config.grad_clip)
        for optimizer in optimizers:
            optimizer.step()
        meter.add_train(len(frames.tokens) * policy.length)
        if log is not None and (step + 1) % 20 == 0:
            log.metrics(step + 1, {"loss/sft": loss.item(), "grad_norm": grad_norm.item()}, progress=(step + 1) / lesson.steps)
    policy.eval()
    return meter


def frames_of(frames: Frames, batch: int, seed: int, name: str) -> Callable[[int], Frames]:
    """Random batches of `frames`, by (seed, name, step)."""
    return lambda step: frames.take(torch.from_numpy(rng(seed, name, step).integers(len(frames.tokens), size=batch)))
