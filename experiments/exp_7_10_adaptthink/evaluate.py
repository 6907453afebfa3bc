"""What is measured of a policy: accuracy, length and share of NoThinking per level, and accuracy within each mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from common.episodes import Episode
from common.evaluation import rollout_row
from common.modes import end_think_id, play_modes, skips
from common.runlog import RunLog
from common.seeding import generator
from experiments.exp_7_10_adaptthink.families import ID, Family
from experiments.exp_7_10_adaptthink.settings import Branch, Settings

Played = dict[str, tuple[list[Episode], list[float]]]
ROLLOUTS = 6  # kept of each split, spread over its items
ITEM_METRICS = ("success", "saving")  # recorded with one number per item, for intervals over items


class Evaluator:
    """Plays the evaluation tasks of a cell and writes its records; every arm sees the same tasks and random numbers.

    ``mode_of``: the mode in which the arm answers a task; a router sets its own.
    """

    def __init__(self, settings: Settings, family: Family, branch: Branch, tokenizer: Any, log: RunLog, seed: int) -> None:
        self.settings, self.family, self.branch = settings, family, branch
        self.tokenizer, self.log, self.seed = tokenizer, log, seed
        self.end = end_think_id(tokenizer)
        self.splits = family.splits(seed)
        self.mode_of: Callable[[dict], str] = lambda task: branch.mode

    def play(self, model: Any, mode_of: Callable[[dict], str], samples: int, limit: int | None = None) -> Played:
        """Split -> its episodes, task-major, and of each task the probability that it is answered without thinking.

        All tasks of a mode are played at once.
        """
        tasks = [(name, task) for name, tasks in self.splits.items() for task in tasks[:limit]]
        played: Played = {name: ([], []) for name in self.splits}
        by_mode: dict[str, list[tuple[str, dict]]] = {}
        for name, task in tasks:
            by_mode.setdefault(mode_of(task), []).append((name, task))
        for mode, some in by_mode.items():
            episodes, nothink_P = self.play_mode(model, mode, [task for _, task in some], samples)
            for place, ((name, _), nothink) in enumerate(zip(some, nothink_P, strict=True)):
                played[name][0].extend(episodes[place * samples : (place + 1) * samples])
                played[name][1].append(nothink)
        return played

    def play_mode(self, model: Any, mode: str, tasks: list[dict], samples: int) -> tuple[list[Episode], list[float]]:
        """Episodes of tasks in one mode, task-major, and each task's probability of NoThinking: exact, 0 or 1 where forced."""
        episodes, nothink_P = play_modes(
            model,
            self.tokenizer,
            self.family.make_env,
            tasks,
            [mode] * samples,
            end=self.end,
            generator=generator(self.seed, "evaluation", mode),
            temperature=self.settings.temperature,
            max_new_tokens=self.settings.max_new_tokens,
            batch_size=self.settings.sample_batch,
        )
        return episodes, nothink_P.tolist() if mode == "free" else [float(mode == "nothink")] * len(tasks)

    def curve(self, model: Any, percent: int) -> None:
        """A point of the learning curve: success, length and P(</think>) of the trained levels together, and P by split.

        By split only where the branch asks for it: the levels it trains on, if it names some, else all. Steps are percent of
        the arm's compute.
        """
        config, pooled = self.settings.evaluation, dict[str, list[float]]()
        own = [f"level{level}" for level in self.branch.levels] or (list(self.splits) if self.branch.level_curves else [])
        played = self.play(model, self.mode_of, config.curve_samples, config.curve_items)
        for split, (episodes, nothink) in played.items():
            values = self.values(episodes)
            found = {name: mean(values[name]) for name in ("success", "length")} | {"nothink_p": mean(nothink)}
            if split in own:
                self.write(split, {"nothink_p": found["nothink_p"]}, len(nothink), percent)
            if split in self.family.pooled:
                for name, value in found.items():
                    pooled.setdefault(name, []).append(value)
        self.write(ID, {name: mean(found) for name, found in pooled.items()}, config.curve_items, percent)

    def write(self, split: str, found: dict[str, float], n: int, percent: int) -> None:
        """Records along the way."""
        for metric, value in found.items():
            self.log.record(split=split, metric=metric, value=value, n=n, step=percent)

    def values(self, episodes: Sequence[Episode]) -> dict[str, list[float]]:
        """Metric -> one value per episode."""
        lengths = [float(sum(episode.mask)) for episode in episodes]
        found = {
            "success": [float(episode.success) for episode in episodes],
            "length": lengths,
            "nothink_share": [float(skips(episode, self.end)) for episode in episodes],
            "truncated": [float(episode.truncated) for episode in episodes],
        }
        if self.family.worked is not None:
            full = [self.family.worked(episode.task, self.branch.answer_tokens) for episode in episodes]
            found["saving"] = [1 - length / whole for length, whole in zip(lengths, full, strict=True)]
        return found

    def final(self, model: Any) -> None:
        """The numbers of the report for each split and for all trained levels together, and rollouts to read."""
        config = self.settings.evaluation
        pooled: list[dict[str, list[float]]] = []
        forced = {mode: self.play(model, lambda _, mode=mode: mode, config.forced_samples) for mode in ("think", "nothink")}
        for split, (episodes, nothink) in self.play(model, self.mode_of, config.samples).items():
            values = self.values(episodes) | {"nothink_p": [p for p in nothink for _ in range(config.samples)]}
            self.record_all(split, values, config.samples)
            in_mode = {}
            for mode, played in forced.items():
                found = self.values(played[split][0])
                in_mode |= {f"success_{mode}": found["success"], f"length_{mode}": found["length"]}
            self.record_all(split, in_mode, config.forced_samples)
            if split in self.family.pooled:
                pooled.append(values | {f"forced {name}": found for name, found in in_mode.items()})
            self.keep_rollouts(split, episodes)
        self.record_pooled(pooled)

    def record_pooled(self, pooled: list[dict[str, list[float]]]) -> None:
        """The trained levels together, and how far the first of them is from the last in the probability of NoThinking."""
        config = self.settings.evaluation
        joined = {name: [value for found in pooled for value in found[name]] for name in pooled[0]}
        self.record_all(ID, {k: v for k, v in joined.items() if not k.startswith("forced ")}, config.samples)
        forced = {k.removeprefix("forced "): v for k, v in joined.items() if k.startswith("forced ")}
        self.record_all(ID, forced, config.forced_samples)
        spread = mean(pooled[0]["nothink_p"]) - mean(pooled[-1]["nothink_p"])
        self.log.record(split=ID, metric="share_spread", value=spread, n=len(joined["nothink_p"]), step=100, final=True)

    def record_all(self, split: str, metrics: dict[str, list[float]], samples: int) -> None:
        """Final records of per-episode values, `samples` of each task in a row; success within a mode where it occurs."""
        for metric, values in metrics.items():
            items = [round(mean(values[i : i + samples]), 4) for i in range(0, len(values), samples)]
            shown = items if metric in ITEM_METRICS else None
            self.log.record(split=split, metric=metric, value=mean(values), n=len(values), step=100, final=True, items=shown)
        if "nothink_share" in metrics:
            for name, wanted in (("success_when_skipping", 1.0), ("success_when_thinking", 0.0)):
                some = [s for s, share in zip(metrics["success"], metrics["nothink_share"]) if share == wanted]
                reason = None if some else "no answer in this mode"
                value = mean(some) if some else None
                self.log.record(split=split, metric=name, value=value, n=len(some), step=100, final=True, reason=reason)

    def keep_rollouts(self, split: str, episodes: Sequence[Episode]) -> None:
        """Some episodes to read, spread over the split."""
        some = episodes[:: max(1, len(episodes) // ROLLOUTS)]
        self.log.rollouts([{"split": split, **rollout_row(e, self.tokenizer)} for e in some])


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)
