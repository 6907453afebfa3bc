"""What is measured of a policy: answers by level, calls that work, calls that were not needed; and of a cell: what it left."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.episodes import Episode
from common.evaluation import evaluate_tasks, kl_on_samples, rollout_row
from common.files import read_json_lines
from common.runlog import RunLog
from common.seeding import generator
from experiments.exp_7_16_aworld import data
from experiments.exp_7_16_aworld.env import Envs
from experiments.exp_7_16_aworld.hub import RecordingHub, ServerHub
from experiments.exp_7_16_aworld.questions import LEVELS
from experiments.exp_7_16_aworld.settings import Settings

ROLLOUTS = 24  # kept, spread over the questions
PAIRED = ("success", "reward")  # kept with one mean per question
Value = tuple[float | None, int]  # value and what it is a mean of; None where nothing defines it


def calls_of(episode: Episode) -> list[dict[str, Any]]:
    """The infos of all turns but the answer."""
    return [info for info in episode.infos if info["outcome"] != "answer"]


def share(hits: int, total: int) -> Value:
    return (hits / total if total else None), total


def call_metrics(episodes: Sequence[Episode]) -> dict[str, Value]:
    """Metrics that are counted over the calls of all episodes."""
    calls = [info for episode in episodes for info in calls_of(episode)]
    named = [info for info in calls if info["tool"]]
    outcomes = [info["outcome"] for info in calls]
    met, again = recoveries(episodes)
    solved = [episode for episode in episodes if episode.success]
    extra = sum(len(calls_of(episode)) - len(episode.infos[0]["plan"]) for episode in solved)
    return {
        "tool_success": share(outcomes.count("answered"), len(calls)),
        "obeyed": share(sum(info["outcome"] not in ("needs", "excluded") for info in named), len(named)),
        "within_budget": share(sum(info["outcome"] != "budget" for info in named), len(named)),
        "wasted": share(sum(info["tool"] not in info["plan"] for info in named), len(named)),
        "recovered": share(again, met),
        "calls_per_solved": share(len(calls), len(solved)),
        "extra_calls": share(extra, len(solved)),
    }


def recoveries(episodes: Sequence[Episode]) -> tuple[int, int]:
    """(calls met by a passing failure, those of them that the same call later in the episode mends)."""
    met = again = 0
    for episode in episodes:
        infos = calls_of(episode)
        for number, info in enumerate(infos):
            if info["outcome"] == "passing":
                met += 1
                again += any(i["outcome"] == "answered" and i["call"] == info["call"] for i in infos[number + 1 :])
    return met, again


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """Metric -> one value per episode."""

    def part(name: str) -> list[float]:
        return [float(sum(info["parts"][name] for info in episode.infos)) for episode in episodes]

    return {
        "success": [float(episode.success) for episode in episodes],
        "reward": [float(episode.reward) for episode in episodes],
        "calls": [float(len(calls_of(episode))) for episode in episodes],
        "unanswered": [float(not episode.terminated) for episode in episodes],
        **{name: part(name) for name in ("malformed", "refused", "failed", "cost")},
    }


class Evaluator:
    """Plays the evaluation questions of a cell and writes its records; every arm of a seed sees the same questions."""

    def __init__(self, settings: Settings, envs: Envs, start: Any, tokenizer: Any, log: RunLog, seed: int) -> None:
        self.settings, self.envs, self.start, self.tokenizer, self.log, self.seed = settings, envs, start, tokenizer, log, seed
        self.split = "validation" if seed < 100 else "test"

    def play(self, model: Any, count: int, samples: int) -> list[Episode]:
        """Episodes of the first `count` questions, question-major."""
        config, settings = self.settings.evaluation, self.settings
        return evaluate_tasks(
            model, self.tokenizer, self.envs, data.tasks(self.split, count, getattr(settings.worlds, self.split)),
            samples=samples, max_turns=settings.turns, max_new_tokens=settings.max_new_tokens,
            temperature=config.temperature, generator=generator(self.seed, "evaluation"),
        ).episodes  # fmt: skip

    def curve(self, model: Any, percent: int) -> None:
        """A point of the learning curve; steps are percent of the arm's compute."""
        count = min(self.settings.evaluation.curve_questions, self.settings.evaluation.questions)
        episodes = self.play(model, count, 1)
        counted = call_metrics(episodes)
        for metric in ("success", "calls"):
            mean = sum(episode_metrics(episodes)[metric]) / count
            self.log.record(split="questions", metric=metric, value=mean, n=count, step=percent)
        for metric in ("tool_success", "obeyed", "wasted"):
            value, n = counted[metric]
            if value is not None:
                self.log.record(split="questions", metric=metric, value=value, n=n, step=percent)

    def final(self, model: Any) -> None:
        """The numbers of the report, and rollouts to read."""
        samples = self.settings.evaluation.samples
        episodes = self.play(model, self.settings.evaluation.questions, samples)
        values = episode_metrics(episodes)
        for metric, found in values.items():
            means = [sum(found[i : i + samples]) / samples for i in range(0, len(found), samples)]
            self.put("questions", metric, sum(found) / len(found), len(found), means if metric in PAIRED else None)
        for metric, (value, n) in call_metrics(episodes).items():
            self.put("questions", metric, value, n)
        for level in LEVELS:
            hits = [success for success, e in zip(values["success"], episodes, strict=True) if e.infos[0]["level"] == level]
            self.put("questions", f"level_{level}", *share(int(sum(hits)), len(hits)))
        kl = kl_on_samples(self.start, episodes, self.tokenizer.pad_token_id, self.settings.evaluation.temperature)
        self.put("questions", "kl_start", kl, len(episodes))
        some = episodes[:: max(1, len(episodes) // ROLLOUTS)]
        self.log.rollouts([{"split": "questions", **rollout_row(e, self.tokenizer)} for e in some])

    def put(self, split: str, metric: str, value: float | None, n: int, items: list[float] | None = None) -> None:
        """One final record."""
        reason = {} if value is not None else {"reason": "nothing that it could be counted on"}
        self.log.record(split=split, metric=metric, value=value, n=n, step=100, final=True, items=items, **reason)

    def training_records(self, folder: Path) -> None:
        """Mean success of the training samples over all steps, and how many steps there were."""
        success = [
            row["success/mean"] for row in read_json_lines(folder / "metrics.jsonl") if row.get("success/mean") is not None
        ]
        if success:
            self.put("train", "success_area", sum(success) / len(success), len(success))
            self.put("train", "training_steps", float(len(success)), 1)


def held() -> tuple[int, int | None]:
    """(open descriptors, child processes) of this process; None for the second where psutil is not installed."""
    gc.collect()
    try:
        import psutil
    except ImportError:
        return len(os.listdir("/dev/fd")), None
    return len(os.listdir("/dev/fd")), len(psutil.Process().children(recursive=True))


def leak_records(evaluator: Evaluator, before: tuple[int, int | None], episodes: int) -> None:
    """What the cell's hub bore and left behind; the hub is closed, `before` was taken when it was not yet open.

    episodes: played in training and in the last evaluation. After a kill the counts of the hub are those of the last run.
    """
    hub = evaluator.envs.bridge.hub
    hub = hub.inner if isinstance(hub, RecordingHub) else hub
    evaluator.put("train", "episodes", float(episodes), 1)
    if not isinstance(hub, ServerHub):
        return
    evaluator.put("train", "lost_calls", float(hub.supervisor.lost), episodes)
    evaluator.put("train", "restarts", float(hub.supervisor.restarts), episodes)
    for name, was, now in zip(("leaked_descriptors", "leaked_processes"), before, held(), strict=True):
        evaluator.put("train", name, None if was is None or now is None else float(now - was), episodes)
