"""What is measured of a policy: success, what went wrong first, KL to the start, and the learned reward beside the true one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.episodes import Episode
from common.evaluation import evaluate_tasks, kl_on_samples, rollout_row
from common.files import read_json_lines
from common.pairs import answer_row
from common.reward_model import score_answers
from common.runlog import RunLog
from common.seeding import generator
from experiments.exp_7_algorithms import chains, data
from experiments.exp_7_algorithms.env import ArithmeticChains
from experiments.exp_7_algorithms.settings import Settings

FAILURES = ("no_answer", "no_steps", "misread", "arithmetic", "wrong_end")
ROLLOUTS = 20  # kept of each split, spread over its items


def evaluation_chains(settings: Settings, seed: int) -> dict[str, tuple[chains.Chain, ...]]:
    """Split -> chains, the same for all seeds of a kind: seeds below 100 tune and see validation chains, the others test."""
    wanted, count = ("validation" if seed < 100 else "test"), settings.evaluation.items
    return {
        "id": chains.items(wanted, 0, chains.ID_LENGTHS, count),
        "ood": chains.items(wanted, 0, chains.OOD_LENGTHS, count),
    }


class Evaluator:
    """Plays the evaluation tasks of a cell and writes its records; every arm sees the same tasks and random numbers.

    ``scorer``: a reward model whose mean score is recorded as ``proxy``.
    """

    def __init__(
        self, settings: Settings, start: Any, tokenizer: Any, log: RunLog, seed: int, scorer: Any | None = None
    ) -> None:
        self.settings, self.start, self.tokenizer, self.log, self.seed = settings, start, tokenizer, log, seed
        self.scorer = scorer
        self.splits = evaluation_chains(settings, seed)

    def play(self, model: Any, split: str, samples: int, limit: int | None = None) -> list[Episode]:
        """Episodes of a split, chain-major."""
        return evaluate_tasks(
            model,
            self.tokenizer,
            ArithmeticChains,
            [data.task(chain) for chain in self.splits[split][:limit]],
            samples=samples,
            max_new_tokens=self.settings.max_new_tokens,
            temperature=self.settings.evaluation.temperature,
            generator=generator(self.seed, "evaluation", split),
        ).episodes

    def proxies(self, episodes: Sequence[Episode]) -> list[float]:
        """The reward model's score of each episode."""
        return score_answers(self.scorer, [answer_row(e) for e in episodes], self.tokenizer.pad_token_id).tolist()

    def kl(self, episodes: list[Episode]) -> float:
        """KL from the policy to the start, per answer."""
        return kl_on_samples(self.start, episodes, self.tokenizer.pad_token_id, self.settings.evaluation.temperature)

    def curve(self, model: Any, percent: int) -> None:
        """A point of the learning curve; steps are percent of the arm's compute."""
        config = self.settings.evaluation
        for split in ("id", "ood"):
            episodes = self.play(model, split, config.curve_samples, config.curve_items)
            values = {"success": sum(e.success for e in episodes) / len(episodes), "kl_start": self.kl(episodes)}
            if self.scorer is not None:
                values["proxy"] = sum(self.proxies(episodes)) / len(episodes)
            for metric, value in values.items():
                self.log.record(split=split, metric=metric, value=value, n=len(episodes), step=percent)

    def final(self, model: Any) -> None:
        """The numbers of the report, with one mean per chain for paired intervals, and rollouts to read."""
        samples = self.settings.evaluation.samples
        for split in self.splits:
            episodes = self.play(model, split, samples)
            self.record_all(split, episode_metrics(episodes), samples)
            if self.scorer is not None:
                self.record_all(split, {"proxy": self.proxies(episodes)}, samples)
            self.log.record(split=split, metric="kl_start", value=self.kl(episodes), n=len(episodes), step=100, final=True)
            self.keep_rollouts(split, episodes)

    def best_of(self, model: Any, count: int) -> int:
        """Best of `count` answers: by the verifier (success), by the reward model (success_proxy). Returns tokens sampled."""
        tokens = 0
        for split in self.splits:
            episodes = self.play(model, split, count)
            groups = [episodes[i : i + count] for i in range(0, len(episodes), count)]
            best = [max(group, key=lambda e: e.success) for group in groups]
            metrics = {"success": [float(e.success) for e in best], "length": [float(sum(map(written, g))) for g in groups]}
            if self.scorer is not None:
                scores = self.proxies(episodes)
                picked = [max(range(i, i + count), key=scores.__getitem__) for i in range(0, len(episodes), count)]
                metrics["success_proxy"] = [float(episodes[i].success) for i in picked]
                metrics["proxy"] = [scores[i] for i in picked]
            self.record_all(split, metrics, 1)
            self.keep_rollouts(split, best)
            tokens += sum(episode.tokens_forward for episode in episodes)
        return tokens

    def record_all(self, split: str, metrics: dict[str, list[float]], samples: int) -> None:
        """Final records of per-episode values, `samples` of each chain in a row."""
        for metric, values in metrics.items():
            means = [sum(values[i : i + samples]) / samples for i in range(0, len(values), samples)]
            shown = means if metric in ("success", "success_proxy") else None
            mean = sum(values) / len(values)
            self.log.record(split=split, metric=metric, value=mean, n=len(values), step=100, final=True, items=shown)

    def keep_rollouts(self, split: str, episodes: Sequence[Episode]) -> None:
        """Some episodes to read, spread over the split."""
        some = episodes[:: max(1, len(episodes) // ROLLOUTS)]
        self.log.rollouts([{"split": split, **rollout_row(e, self.tokenizer)} for e in some])

    def group_records(self, folder: Path) -> None:
        """How many groups taught nothing, early and late: means over the first and the last quarter of the steps."""
        name = "reward/zero_std_frac"
        shares = [row[name] for row in read_json_lines(folder / "metrics.jsonl") if row.get(name) is not None]
        quarter = max(1, len(shares) // 4)
        for metric, part in (("zero_early", shares[:quarter]), ("zero_late", shares[-quarter:]), ("zero_all", shares)):
            if shares:
                value = sum(part) / len(part)
                self.log.record(split="train", metric=metric, value=value, n=len(part), step=100, final=True)


def written(episode: Episode) -> int:
    """Tokens that the policy wrote."""
    return sum(episode.mask)


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """Metric -> one value per episode."""
    infos = [episode.infos[0] for episode in episodes]
    metrics = {
        "success": [float(episode.success) for episode in episodes],
        "direct": [float(info["class"] == "no_steps") for info in infos],
        "lucky": [float(info["lucky"]) for info in infos],
        "length": [float(written(episode)) for episode in episodes],
        "truncated": [float(episode.truncated) for episode in episodes],
    }
    wrong = [(info["class"], not info["success"]) for info in infos]
    return metrics | {f"failure/{kind}": [float(found == kind and bad) for found, bad in wrong] for kind in FAILURES}
