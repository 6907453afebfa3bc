"""Random streams: one generator per purpose, seeded by a hash of what it is for, so that no run needs to store RNG state."""

import hashlib
import random

import numpy as np
import torch


def stream_seed(*parts: int | str) -> int:
    """A 63-bit seed from the parts, e.g. ``(seed, "rollout", step)``; the same parts give the same seed on any machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU torch generator for this purpose."""
    return torch.Generator().manual_seed(stream_seed(*parts))


def rng(*parts: int | str) -> np.random.Generator:
    """A numpy generator for this purpose."""
    return np.random.default_rng(stream_seed(*parts))


def python_random(*parts: int | str) -> random.Random:
    """A generator of the standard library for this purpose: many small draws cost a tenth of numpy's."""
    return random.Random(stream_seed(*parts))


def base_seed(seed: int, bases: int) -> int:
    """Seed of the base that a seed uses, one of `bases` in its hundred: report seeds and tuning seeds share no base."""
    hundred = seed // 100 * 100
    return hundred + (seed - hundred) % bases
