"""What is measured of a policy: success, what it reads off the pictures card by card, and how the two hang together."""

import math
from collections.abc import Callable
from typing import Any

from common.cards import grading, hands
from common.episodes import Episode
from common.evaluation import evaluate_tasks, kl_on_samples, rollout_row
from common.runlog import RunLog
from common.seeding import generator
from common.verifiers import answers
from experiments.exp_7_11_vl_general_points import data
from experiments.exp_7_11_vl_general_points.env import VisualGeneralPoints
from experiments.exp_7_11_vl_general_points.settings import Settings

FAILURES = ("no_answer", "illegal_formula", "number", "no_solution")
KEPT_ITEMS = ("success", "recognition", "cards", "training_rule")
READ_APART = ("id", "visual")  # splits whose recognition is reported rank by rank and suit by suit
EPISODES_IN_FLIGHT = 512


def split_hands(settings: Settings, split_seed: int, seed: int) -> dict[str, tuple[data.Hands, hands.Rule, str]]:
    """Split name -> (hands, rule, look). Seeds below 100 tune and see validation hands, the others test hands.

    id: nothing is new but the hands. rule: J, Q, K = 11, 12, 13. visual: red suits. both: both. train: training hands.
    """
    splits = hands.splits(split_seed)
    tuning = seed < 100
    old = splits.validation_id if tuning else splits.test_id
    new = splits.validation_ood if tuning else splits.test_ood
    return {
        "id": (old, hands.TRAINING_RULE, "black"),
        "rule": (new, hands.TEST_RULE, "black"),
        "visual": (old, hands.TRAINING_RULE, "red"),
        "both": (new, hands.TEST_RULE, "red"),
        "train": (splits.train[:: max(1, len(splits.train) // 150)], hands.TRAINING_RULE, "black"),
    }


class Evaluator:
    """Plays the evaluation tasks of a cell and writes its records; every arm sees the same pictures and random numbers."""

    def __init__(self, settings: Settings, tokenizer: Any, log: RunLog, split_seed: int, seed: int) -> None:
        self.settings, self.tokenizer, self.log, self.seed = settings, tokenizer, log, seed
        self.splits = split_hands(settings, split_seed, seed)

    def env_maker(self, penalty: bool) -> Callable[[], VisualGeneralPoints]:
        """The environment as an arm trains in it; evaluation is without the recognition penalty for all arms."""
        switches = ("cards_first",) if penalty else ()
        return lambda: VisualGeneralPoints(1, self.settings.trace, self.settings.reward, switches)

    def play(self, model: Any, split: str, orders: int, limit: int | None = None) -> tuple[list[Episode], int]:
        """Episodes of a split, hand-major, and the number of hands."""
        chosen, rule, look = self.splits[split]
        chosen = chosen[:: max(1, len(chosen) // limit)][:limit] if limit else chosen
        played = evaluate_tasks(
            model,
            self.tokenizer,
            self.env_maker(penalty=False),
            data.evaluation_tasks(chosen, rule, look, self.seed, orders),
            max_new_tokens=self.settings.max_new_tokens,
            temperature=self.settings.evaluation.temperature,
            generator=generator(self.seed, "evaluation", split),
            batch_size=EPISODES_IN_FLIGHT,
        )
        return played.episodes, len(chosen)

    def curve(self, model: Any, percent: int) -> None:
        """A cheap point of the learning curve, on some hands of each split; steps are percent of the arm's compute."""
        for split in ("id", "rule", "visual", "both"):
            episodes, _ = self.play(model, split, 1, self.settings.evaluation.curve_hands)
            metrics = episode_metrics(episodes)
            for metric in ("success", "recognition"):
                self._record(split, metric, metrics[metric], percent)
            self._read_apart(split, episodes, percent)

    def final(self, model: Any, start: Any) -> None:
        """The numbers of the report, with one mean per hand for paired intervals, and rollouts to read."""
        config = self.settings.evaluation
        for split in self.splits:
            orders = 1 if split == "train" else config.orders
            episodes, count = self.play(model, split, orders, config.hands)
            metrics = episode_metrics(episodes)
            for metric, values in metrics.items():
                items = [sum(values[i * orders : (i + 1) * orders]) / orders for i in range(count)]
                self._record(split, metric, values, 100, final=True, items=items if metric in KEPT_ITEMS else None)
            self._read_apart(split, episodes, 100, final=True)
            if split == "train":
                continue
            value = correlation(metrics["recognition"], metrics["success"])
            reason = "recognition or success is the same in every episode" if value is None else None
            self.log.record(
                split=split, metric="correlation", value=value, n=len(episodes), step=100, final=True, reason=reason
            )
            one_order = episodes[::orders]
            kl = kl_on_samples(start, one_order, self.tokenizer.pad_token_id, config.temperature)
            self.log.record(split=split, metric="kl_start", value=kl, n=len(one_order), step=100, final=True)
            chosen = episodes[:: max(1, len(episodes) // 20)]
            self.log.rollouts([{"split": split, **rollout_row(e, self.tokenizer)} for e in chosen])

    def _record(self, split: str, metric: str, values: list[float], step: int, **more: Any) -> None:
        self.log.record(split=split, metric=metric, value=sum(values) / len(values), n=len(values), step=step, **more)

    def _read_apart(self, split: str, episodes: list[Episode], step: int, final: bool = False) -> None:
        """Recognition of each rank and suit, on the splits where it is kept apart."""
        if split not in READ_APART:
            return
        groups: dict[str, list[float]] = {}
        for episode in episodes:
            for card, suit, right in zip(episode.task["cards"], episode.task["suits"], cards_read(episode), strict=True):
                groups.setdefault(f"recognition/{card}", []).append(right)
                groups.setdefault(f"recognition/suit {suit}", []).append(right)
        for metric in sorted(groups):
            self._record(split, metric, groups[metric], step, final=final)


def cards_read(episode: Episode) -> list[float]:
    """1.0 for each of the four cards that the answer's card list states in its place; an answer without a list reads none."""
    found = answers.extract_json(episode.texts[0], grading.FIELDS)
    written = found.value["cards"] if found.value is not None else []
    shown = episode.task["cards"]
    return [float(place < len(written) and written[place] == card) for place, card in enumerate(shown)]


def episode_metrics(episodes: list[Episode]) -> dict[str, list[float]]:
    """Metric -> one value per episode."""
    infos = [episode.infos[0] for episode in episodes]
    read = [cards_read(episode) for episode in episodes]
    metrics = {
        "success": [float(episode.success) for episode in episodes],
        "recognition": [sum(cards) / len(cards) for cards in read],
        "cards": [float(all(cards)) for cards in read],
        "numbers": [float(info["recognised"]) for info in infos],
        "training_rule": [float(info["rule10"] and not info["success"]) for info in infos],
        "length": [float(sum(episode.mask)) for episode in episodes],
    }
    return metrics | {f"failure/{kind}": [float(info["class"] == kind) for info in infos] for kind in FAILURES}


def correlation(first: list[float], second: list[float]) -> float | None:
    """Pearson's correlation of two lists of one length; None where one of them is constant."""
    count = len(first)
    mean_1, mean_2 = sum(first) / count, sum(second) / count
    together = sum((a - mean_1) * (b - mean_2) for a, b in zip(first, second, strict=True))
    spread = math.sqrt(sum((a - mean_1) ** 2 for a in first) * sum((b - mean_2) ** 2 for b in second))
    return together / spread if spread > 1e-12 else None
