"""What is measured of a policy: success, recognition, failure classes, KL to the start, and the pull of the training rule."""

from typing import Any

import torch

from common.cards import hands, prompts
from common.cards.env import GeneralPoints
from common.episodes import Episode, token_logprobs
from common.evaluation import evaluate_tasks, kl_on_samples, rollout_row
from common.runlog import RunLog
from common.seeding import generator
from common.tokenizers import encode_prompt
from experiments.exp_7_11_general_points import data
from experiments.exp_7_11_general_points.settings import Settings

FAILURES = ("no_answer", "illegal_formula", "number", "no_solution")
EPISODES_IN_FLIGHT = 512  # keys and values of more would take the two workers above 2 GB; more are hardly faster


def split_hands(settings: Settings, split_seed: int, seed: int) -> dict[str, tuple[tuple[tuple[int, ...], ...], hands.Rule]]:
    """Split name -> (hands, rule). Seeds below 100 tune and see validation hands, the others test hands."""
    splits = hands.splits(split_seed)
    tuning = seed < 100
    return {
        "id": (splits.validation_id if tuning else splits.test_id, hands.TRAINING_RULE),
        "ood": (splits.validation_ood if tuning else splits.test_ood, hands.TEST_RULE),
        "train": (splits.train[:: max(1, len(splits.train) // 150)], hands.TRAINING_RULE),
    }


class Evaluator:
    """Plays the evaluation tasks of a cell and writes its records; every arm sees the same tasks and random numbers."""

    def __init__(
        self, settings: Settings, tokenizer: Any, log: RunLog, split_seed: int, seed: int, iterations: int, leak: bool
    ):
        self.settings, self.tokenizer, self.log, self.seed = settings, tokenizer, log, seed
        self.splits = split_hands(settings, split_seed, seed)
        self.iterations = iterations
        self.switches = ("leaking_feedback",) if leak else ()

    def make_env(self) -> GeneralPoints:
        """The environment as the arm trains and is tested in it."""
        return GeneralPoints(self.iterations, self.settings.trace, self.settings.reward, self.switches)

    def play(self, model: Any, split: str, orders: int, limit: int | None = None) -> tuple[list[Episode], int]:
        """Episodes of a split, hand-major, and the number of hands."""
        chosen, rule = self.splits[split]
        chosen = chosen[:: max(1, len(chosen) // limit)][:limit] if limit else chosen
        tasks = data.evaluation_tasks(chosen, rule, self.seed, orders)
        played = evaluate_tasks(
            model,
            self.tokenizer,
            self.make_env,
            tasks,
            max_turns=self.iterations,
            max_new_tokens=self.settings.max_new_tokens,
            temperature=self.settings.evaluation.temperature,
            generator=generator(self.seed, "evaluation", split),
            batch_size=max(1, EPISODES_IN_FLIGHT // self.iterations),
        )
        return played.episodes, len(chosen)

    def curve(self, model: Any, percent: int) -> None:
        """A cheap point of the learning curve, on some hands of each split; steps are percent of the arm's compute."""
        config = self.settings.evaluation
        for split in ("id", "ood"):
            episodes, _ = self.play(model, split, config.curve_orders, max(1, config.curve_hands // self.iterations))
            share = sum(e.success for e in episodes) / len(episodes)
            self.log.record(split=split, metric="success", value=share, n=len(episodes), step=percent)

    def final(self, model: Any, start: Any) -> None:
        """The numbers of the report, with one mean per hand for paired intervals, and rollouts to read."""
        step, config = 100, self.settings.evaluation
        for split in ("id", "ood", "train"):
            orders = 1 if split == "train" else config.orders if self.iterations == 1 else config.retry_orders
            episodes, count = self.play(model, split, orders)
            metrics = episode_metrics(episodes)
            for metric, values in metrics.items():
                items = [sum(values[i * orders : (i + 1) * orders]) / orders for i in range(count)]
                shown = items if metric in ("success", "success_first", "recognition", "training_rule") else None
                mean = sum(values) / len(values)
                self.log.record(split=split, metric=metric, value=mean, n=len(values), step=step, final=True, items=shown)
            if split == "train":
                continue
            one_order = episodes[::orders]
            kl = kl_on_samples(start, one_order, self.tokenizer.pad_token_id, config.temperature)
            self.log.record(split=split, metric="kl_start", value=kl, n=len(one_order), step=step, final=True)
            self.log.rollouts(
                [{"split": split, **rollout_row(e, self.tokenizer)} for e in episodes[:: max(1, len(episodes) // 40)]]
            )
        self._training_rule_probability(model)

    def _training_rule_probability(self, model: Any) -> None:
        """Probability of writing 10 for a face card whose number the prompt states as 11, 12 or 13.

        Exact, where a sampled share would read zero; it needs a tokenizer that writes a number as one token.
        """
        first, later = (self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("10", ", 10"))
        record = {"split": "ood", "metric": "training_rule_probability", "step": 100, "final": True}
        if len(first) > 1 or len(later) > 1:
            self.log.record(**record, value=None, n=0, reason="the tokenizer writes a number as several tokens")
            return
        chosen, rule = self.splits["ood"]
        rows, places = [], []
        for task in data.evaluation_tasks(chosen, rule, self.seed, 1):
            cards, values = task["cards"], hands.card_values(task["cards"], rule)
            ids = encode_prompt(self.tokenizer, prompts.prompt(cards, hands.TARGET, rule, self.settings.trace))
            ids += self.tokenizer(f"{prompts.OPEN}{prompts.quoted(cards)}{prompts.NUMBER}", add_special_tokens=False)[
                "input_ids"
            ]
            for place, (card, value) in enumerate(zip(cards, values, strict=True)):
                if card in ("J", "Q", "K"):
                    rows.append([*ids, (later if place else first)[0]])
                    places.append(len(rows[-1]) - 1)
                ids += self.tokenizer(f"{', ' if place else ''}{value}", add_special_tokens=False)["input_ids"]
        length = max(map(len, rows))
        ids_BT = torch.tensor([row + [self.tokenizer.pad_token_id] * (length - len(row)) for row in rows])
        mask_BT = torch.zeros_like(ids_BT)
        mask_BT[torch.arange(len(rows)), torch.tensor(places)] = 1
        ids_BT, mask_BT = ids_BT.to(model.device), mask_BT.to(model.device)
        with torch.no_grad():
            logp_BT, _ = token_logprobs(model, ids_BT, torch.ones_like(ids_BT), mask_BT=mask_BT)
        self.log.record(**record, value=float(logp_BT[mask_BT.bool()].exp().mean()), n=len(rows))


def episode_metrics(episodes: list[Episode]) -> dict[str, list[float]]:
    """Metric -> one value per episode. All but ``success`` and ``length`` speak of the first answer."""
    first = [episode.infos[0] for episode in episodes]
    metrics = {
        "success": [float(episode.success) for episode in episodes],
        "success_first": [float(info["success"]) for info in first],
        "recognition": [float(info["recognised"]) for info in first],
        "training_rule": [float(info["rule10"] and not info["success"]) for info in first],
        "length": [float(sum(episode.mask)) for episode in episodes],
    }
    return metrics | {f"failure/{kind}": [float(info["class"] == kind) for info in first] for kind in FAILURES}
