"""How often a model solves each task: samples of it before training, kept as a stage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.checkpoints import load_model
from common.episodes import MakeEnv, run_episodes
from common.files import read_json, write_json
from common.modes import end_think_id, play_modes
from common.seeding import generator
from common.stages import stage

PRESAMPLE_MODULES = [f"common.{name}" for name in ("presample", "modes", "episodes", "rollout", "decoding", "fused", "seeding")]
RATES_FILE = "rates.json"


def solve_rates(
    model: Any,
    tokenizer: Any,
    make_env: MakeEnv,
    tasks: Sequence[dict],
    samples: int,
    *,
    seed: int,
    max_new_tokens: int,
    max_turns: int = 1,
    temperature: float = 1.0,
    mode: str = "free",
    batch_size: int = 1024,
) -> dict[str, Any]:
    """``rates``: share of `samples` episodes of each task that succeed; ``tokens_forward``: what the sampling cost.

    mode: think or nothink forces how the answers begin (common.modes); free leaves it to the model.
    """
    stream = generator(seed, "presample")
    sampling: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    sampling |= {"generator": stream, "batch_size": batch_size}
    if mode == "free":
        episodes = run_episodes(model, tokenizer, make_env, list(tasks), group_size=samples, max_turns=max_turns, **sampling)
    else:
        end = end_think_id(tokenizer)
        episodes, _ = play_modes(model, tokenizer, make_env, tasks, [mode] * samples, end=end, **sampling)
    groups = [episodes[i : i + samples] for i in range(0, len(episodes), samples)]
    rates = [sum(episode.success for episode in group) / samples for group in groups]
    return {"samples": samples, "rates": rates, "tokens_forward": sum(episode.tokens_forward for episode in episodes)}


def presampled(
    name: str,
    start: Path,
    make_env: MakeEnv,
    tasks: Sequence[dict],
    samples: int,
    *,
    seed: int,
    modules: Sequence[str],
    runs_dir: str | Path,
    threads: int = 1,
    device: str = "cpu",
    dtype: str = "float32",
    **sampling: Any,
) -> Path:
    """The stage's folder with rates.json (see `solve_rates`, which gets `sampling`) of the model under `start`/model.

    Args:
        modules: the experiment's modules that make the tasks and judge the answers.
    """

    def build(folder: Path) -> None:
        model, tokenizer = load_model(start / "model", device, dtype)
        found = solve_rates(model.eval(), tokenizer, make_env, tasks, samples, seed=seed, **sampling)
        write_json(folder / RATES_FILE, found)

    key = [list(tasks), samples, seed, threads, dtype, sampling]
    return stage(
        name, build, config=key, modules=[*PRESAMPLE_MODULES, *modules], inputs=[start], root=Path(runs_dir) / "stages"
    )


def read_rates(folder: Path) -> dict[str, Any]:
    """What `presampled` kept: samples, rates in the tasks' order, tokens_forward."""
    found: dict[str, Any] = read_json(folder / RATES_FILE)
    return found
