"""What is measured of a policy: every stop of a route, the whole route, what it saw, and which rule it obeyed.

Two rates that the chapter calls by one name are kept apart. `step_accuracy` is the share of stops that were answered
rightly within the tries; so that it speaks of all stops, a route goes on behind a stop that failed (`lead_on`). `success`
is the share of routes without such a stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from common.episodes import Episode
from common.evaluation import evaluate_tasks, kl_on_samples, rollout_row
from common.runlog import RunLog
from common.seeding import generator
from experiments.exp_7_12_virl import data, grading, prompts
from experiments.exp_7_12_virl.env import VirlNavigation
from experiments.exp_7_12_virl.prompts import Rule
from experiments.exp_7_12_virl.settings import MAX_TURNS, Branch, Settings

FAILURES = ("no_answer", "illegal_action", "wrong_action")
PAIRED = ("success", "step_accuracy", "step_first")
ROLLOUTS = 12  # kept of each split
SPLITS = {
    "id": ("train", data.TRAINING),
    "rule": ("train", Rule("relative")),
    "city": ("other", data.TRAINING),
    "both": ("other", Rule("relative")),
}
KNOWN = {  # rules of the pre-training that no arm trains on: what an arm still obeys of them
    "degrees": Rule("degrees"),
    "clock": Rule("clock"),
    "renamed": Rule("relative", ("walk", "face", "halt")),
}
CURVES = ("id", "rule")  # splits that are measured along the way
TRAINING_ACTIONS = prompts.legal_actions(data.TRAINING)


def evaluation_tasks(settings: Settings, seed: int) -> dict[str, list[dict]]:
    """Split -> tasks, the same for all seeds of a kind: seeds below 100 tune and see validation routes, the others test."""
    wanted = "validation" if seed < 100 else "test"
    cities = {"train": settings.cities.train, "other": getattr(settings.cities, wanted)}
    sizes = settings.evaluation
    splits = {
        split: [data.task(index, cities[where], wanted, 0, rule) for index in range(sizes.routes)]
        for split, (where, rule) in SPLITS.items()
    }
    return splits | {
        split: [data.task(index, cities["train"], wanted, 0, rule) for index in range(sizes.known_routes)]
        for split, rule in KNOWN.items()
    }


class Evaluator:
    """Plays the evaluation routes of a cell and writes its records; every arm sees the same routes and random numbers."""

    def __init__(self, settings: Settings, branch: Branch, reference: Any, tokenizer: Any, log: RunLog, seed: int) -> None:
        self.settings, self.reference, self.tokenizer, self.log, self.seed = settings, reference, tokenizer, log, seed
        self.splits = evaluation_tasks(settings, seed)
        self.make_env = partial(
            VirlNavigation, tries=branch.tries, on_failure="lead_on", switches=settings.switches, rail=settings.rail
        )

    def play(self, model: Any, split: str, limit: int | None = None) -> list[Episode]:
        """One walk over every route of a split."""
        return evaluate_tasks(
            model,
            self.tokenizer,
            self.make_env,
            self.splits[split][:limit],
            max_turns=MAX_TURNS,
            max_new_tokens=self.settings.max_new_tokens,
            temperature=self.settings.evaluation.temperature,
            generator=generator(self.seed, "evaluation", split),
        ).episodes

    def curve(self, model: Any, percent: int) -> None:
        """A point of the learning curve; steps are percent of the arm's compute."""
        for split in CURVES:
            metrics = route_metrics(self.play(model, split, self.settings.evaluation.curve_routes))
            for metric in (*PAIRED, "recognition", "training_rule"):
                values = metrics[metric]
                mean = sum(values) / len(values)
                self.log.record(split=split, metric=metric, value=mean, n=len(values), step=percent)

    def final(self, model: Any) -> None:
        """The numbers of the report, with one value per route for paired intervals, and walks to read."""
        for split in self.splits:
            episodes = self.play(model, split)
            for metric, values in route_metrics(episodes).items():
                mean, shown = sum(values) / len(values), values if metric in PAIRED else None
                self.log.record(split=split, metric=metric, value=mean, n=len(values), step=100, final=True, items=shown)
            kl = kl_on_samples(self.reference, episodes, self.tokenizer.pad_token_id, self.settings.evaluation.temperature)
            self.log.record(split=split, metric="kl_start", value=kl, n=len(episodes), step=100, final=True)
            some = episodes[:: max(1, len(episodes) // ROLLOUTS)]
            self.log.rollouts([{"split": split, **rollout_row(e, self.tokenizer)} for e in some])


def route_metrics(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """Metric -> one value per route. All but success and step_accuracy speak of the first answers at its stops.

    `training_rule`: of the stops where a turn is due, the share whose first answer is an action of the training space
    though another space is stated; 0 where the training space itself is stated.
    """
    metrics: dict[str, list[float]] = {}
    for episode in episodes:
        first = [(info, text) for info, text in zip(episode.infos, episode.texts, strict=True) if info["trial"] == 1]
        stops, solved = len(first), sum(info["solved"] for info in episode.infos)
        stated = prompts.legal_actions(Rule(episode.task["rule"], tuple(episode.task["verbs"])))
        kept = [grading.parse(text).action for _, text in first]
        turns = [action for action, (info, _) in zip(kept, first, strict=True) if info["due"] == "turn"]
        old = sum(action in TRAINING_ACTIONS and action not in stated for action in turns)
        values = {
            "success": float(episode.success),
            "step_accuracy": solved / stops,
            "step_first": sum(info["solved"] for info, _ in first) / stops,
            "turn_first": sum(i["solved"] for i, _ in first if i["due"] == "turn") / max(1, len(turns)),
            "recognition": sum(info["recognised"] for info, _ in first) / stops,
            "located": sum(info["located"] for info, _ in first) / stops,
            "training_rule": old / max(1, len(turns)),
            "length": float(sum(episode.mask)),
            "stops": float(stops),
            "truncated": float(episode.truncated),
        }
        values |= {f"failure/{kind}": sum(info["class"] == kind for info, _ in first) / stops for kind in FAILURES}
        for metric, value in values.items():
            metrics.setdefault(metric, []).append(value)
    return metrics
