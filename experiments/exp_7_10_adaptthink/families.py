"""Where tasks come from: generated chains, or problems from files. Both give a pool to train on and splits to measure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from experiments.exp_7_10_adaptthink import chains, data, problems
from experiments.exp_7_10_adaptthink.env import GradedChains, task
from experiments.exp_7_10_adaptthink.settings import Settings

ID = "id"  # all splits of trained levels together


class Family(NamedTuple):
    """``pool``: seed -> training tasks, each with its ``index`` and ``level``. ``batch``: (pool, seed, step, n) -> n of them.

    ``splits``: seed -> name -> tasks; ``pooled``: the splits that make up `ID`. ``worked``: (task, tokens of a NoThinking
    answer) -> length of the right answer with thinking, None where there is none.
    """

    make_env: Callable[[], Any]
    pool: Callable[[int], list[dict]]
    batch: Callable[[list[dict], int, int, int], list[dict]]
    splits: Callable[[int], dict[str, list[dict]]]
    pooled: tuple[str, ...]
    worked: Callable[[dict, int], int] | None


def kind_of(seed: int) -> str:
    """Seeds below 100 tune and see validation tasks, the others test."""
    return "validation" if seed < 100 else "test"


def chain_splits(count: int, seed: int) -> dict[str, list[dict]]:
    """One split per level, the same for all seeds of a kind."""
    levels = {f"level{level}": level for level in chains.LEVELS} | {"ood": chains.OOD_LEVEL}
    return {name: [task(chain) for chain in chains.items(kind_of(seed), 0, level, count)] for name, level in levels.items()}


def worked(item: dict, tokens: int) -> int:
    """Length of a chain's right answer with thinking."""
    return 1 + 3 * item["level"] + tokens


def family_of(settings: Settings) -> Family:
    """The tasks of a configuration."""
    if settings.problems is not None:
        return problems_family(settings)
    return Family(
        GradedChains,
        partial(data.pool, count=settings.train_items),
        data.training_tasks,
        partial(chain_splits, settings.evaluation.items),
        tuple(f"level{level}" for level in chains.LEVELS),
        worked,
    )


def problems_family(settings: Settings) -> Family:
    """Problems from files or the hub; the splits are the test sets by name."""
    files = settings.problems
    assert files is not None

    def pool(seed: int) -> list[dict]:
        return problems.load(files.train, settings.train_items, "train", files.answer_format, files.skip_bad_answers)

    def splits(seed: int) -> dict[str, list[dict]]:
        return {
            name: problems.load(source, settings.evaluation.items, name, files.answer_format, files.skip_bad_answers)
            for name, source in files.test.items()
        }

    return Family(problems.Problems, pool, problems.training_tasks, splits, tuple(files.test), None)
