"""What arms share, each built once: the policy after play, which stands for pre-training, and after its demonstrations."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers.utils import logging as hf_logging

from common.runlog import RunLog
from common.seeding import base_seed
from common.stages import stage
from experiments.exp_7_13_simplevla.lessons import demonstration_frames, frames_of, imitate, play_frames
from experiments.exp_7_13_simplevla.policy import VlaPolicy, build_policy
from experiments.exp_7_13_simplevla.settings import Settings

HERE = "experiments.exp_7_13_simplevla."
PHYSICS = [HERE + name for name in ("physics", "tasks", "tokens", "world", "expert")]
LEARNT = [*PHYSICS, *(HERE + name for name in ("episodes", "lessons", "policy", "render", "stages"))]
LEARNT += ["common.sft", "common.muon", "common.target_losses", "common.losses"]


def load_policy(folder: Path, device: str = "cpu") -> VlaPolicy:
    """The policy of a stage or a cell, in eval mode."""
    hf_logging.disable_progress_bar()
    return VlaPolicy.from_pretrained(folder / "model").to(device).eval()


def log_of(settings: Settings, folder: Path, name: str, seed: int) -> RunLog:
    """The log of a stage's training."""
    labels = {"experiment": settings.experiment, "scale": settings.scale, "variant": None, "arm": name, "seed": seed}
    return RunLog(folder, labels)


def play_of(settings: Settings, start: str, seed: int) -> Path:
    """A policy that has learnt, from play, to go to what is named."""
    first, shape = base_seed(seed, settings.bases), settings.policy_config(start)

    def build(folder: Path) -> None:
        torch.set_num_threads(settings.threads)
        policy = build_policy(shape, first)
        frames = play_frames(policy, settings.play_frames, first)
        with log_of(settings, folder, "play", first) as log:
            imitate(policy, frames_of(frames, settings.play.batch, first, "play"), settings.play, log)
        policy.save_pretrained(folder / "model")

    own = settings.starts[start]
    key = [settings.policy, own.chunk, own.view, settings.play_frames, settings.play, first, settings.threads]
    return stage("play", build, config=key, modules=LEARNT, root=Path(settings.runs_dir) / "stages")


def start_of(settings: Settings, start: str, seed: int) -> Path:
    """That policy after the demonstrations of this seed."""
    played, own = play_of(settings, start, seed), settings.starts[start]

    def build(folder: Path) -> None:
        torch.set_num_threads(settings.threads)
        policy = load_policy(played)
        frames = demonstration_frames(policy, own.demos, settings.demonstration_steps, seed)
        with log_of(settings, folder, "demonstrations", seed) as log:
            lesson = settings.demonstrations
            imitate(policy, frames_of(frames, lesson.batch, seed, "demonstrations"), lesson, log)
        policy.save_pretrained(folder / "model")

    key = [own, settings.demonstrations, settings.demonstration_steps, seed, settings.threads]
    root = Path(settings.runs_dir) / "stages"
    return stage(f"start-{start}", build, config=key, modules=LEARNT, inputs=[played], root=root)
