"""What is measured of a policy: outcome and cleanness of k episodes of each task, rule by rule, and what was farmed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.credits import DEAD
from common.episodes import Episode
from common.evaluation import evaluate_tasks, kl_on_samples, rollout_row
from common.files import read_json_lines
from common.runlog import RunLog
from common.seeding import generator
from experiments.exp_7_14_rlvp import data
from experiments.exp_7_14_rlvp.settings import Settings

ROLLOUTS = 20  # kept of each split, spread over its tasks
REACHED = 0.9  # the success of training samples that `steps_to_90` waits for
SMOOTH = 3  # steps over which that success is averaged
VIEWS = {"hidden": {}, "ruled": {"rules": True}, "guarded": {"guard": True}}


def total(episode: Episode, part: str) -> float:
    """Sum of a named part over the episode's turns."""
    return float(sum(info["parts"][part] for info in episode.infos))


def is_clean(episode: Episode) -> bool:
    """No rule was broken."""
    return total(episode, "violations") == 0


def episode_metrics(episodes: Sequence[Episode], rules: Sequence[str]) -> dict[str, list[float]]:
    """Metric -> one value per episode."""
    metrics: dict[str, Callable[[Episode], float]] = {
        "success": lambda e: float(e.success),
        "clean": lambda e: float(is_clean(e)),
        "perfect": lambda e: float(e.success and is_clean(e)),
        "violations": lambda e: total(e, "violations"),
        "credits": lambda e: total(e, "credits"),
        "unused_credits": lambda e: float(e.infos[-1].get("unused_credits", 0)),
        "malformed": lambda e: total(e, "malformed"),
        "blocked": lambda e: total(e, "blocked"),
        "calls": lambda e: float(len(e.infos)),
        "changes": lambda e: float(sum(info["mutated"] for info in e.infos)),
        "inactive": lambda e: float(not any(info["mutated"] for info in e.infos)),
        "unended": lambda e: float(not e.terminated),
        "progress": lambda e: float(e.infos[-1]["progress"]),
    }
    values = {name: [of(episode) for episode in episodes] for name, of in metrics.items()}
    for rule in rules:
        values[f"rule/{rule}"] = [float(sum(info["violations"].count(rule) for info in e.infos)) for e in episodes]
    return values


def all_of(values: Sequence[float], samples: int) -> list[float]:
    """Per task, 1 where all of its `samples` episodes have it: pass^k, clean^k, perfect^k with k = samples."""
    return [float(all(values[i : i + samples])) for i in range(0, len(values), samples)]


class Evaluator:
    """Plays the evaluation tasks of a cell and writes its records; every arm of a world sees the same tasks and numbers."""

    def __init__(self, settings: Settings, world: str, start: Any, tokenizer: Any, log: RunLog, seed: int) -> None:
        self.settings, self.start, self.tokenizer, self.log, self.seed = settings, start, tokenizer, log, seed
        self.name, self.world, self.make_env = world, settings.worlds[world], settings.make_env(world)
        self.limit = settings.turn_limit(world)
        self.split = "validation" if seed < 100 else "test"

    def play(self, model: Any, view: str, count: int, samples: int) -> list[Episode]:
        """Episodes of the first `count` tasks, task-major. view: hidden (rules not in the prompt), ruled, guarded."""
        return evaluate_tasks(
            model,
            self.tokenizer,
            self.make_env,
            data.tasks(self.split, {**self.world.options, **VIEWS[view]}, count),
            samples=samples,
            max_turns=self.limit,
            max_new_tokens=self.settings.answer_limit(self.name),
            temperature=self.settings.evaluation.temperature,
            generator=generator(self.seed, "evaluation", view),
        ).episodes

    def curve(self, model: Any, percent: int) -> None:
        """A point of the learning curve; steps are percent of the arm's compute."""
        count = min(self.settings.evaluation.curve_items, self.world.items)
        episodes = self.play(model, "hidden", count, 1)
        values = episode_metrics(episodes, ())
        for metric in ("success", "violations", "calls", "progress"):
            mean = sum(values[metric]) / len(episodes)
            self.log.record(split="hidden", metric=metric, value=mean, n=len(episodes), step=percent)

    def final(self, model: Any, views: Sequence[str]) -> None:
        """The numbers of the report, with one mean per task for paired intervals, and rollouts to read."""
        samples, rules = self.settings.evaluation.samples, list(self.make_env().rules)
        for view in views:
            episodes = self.play(model, view, self.world.items, samples)
            values = episode_metrics(episodes, rules)
            for metric, found in values.items():
                means = [sum(found[i : i + samples]) / samples for i in range(0, len(found), samples)]
                self.put(view, metric, sum(found) / len(found), len(found), means)
            for metric in ("success", "clean", "perfect"):
                every = all_of(values[metric], samples)
                self.put(view, f"{metric}_all", sum(every) / len(every), len(every), every)
            calls = sum(values["calls"])
            self.put(view, "violations_per_100", 100 * sum(values["violations"]) / calls, int(calls))
            kl = kl_on_samples(self.start, episodes, self.tokenizer.pad_token_id, self.settings.evaluation.temperature)
            self.put(view, "kl_start", kl, len(episodes))
            some = episodes[:: max(1, len(episodes) // ROLLOUTS)]
            self.log.rollouts([{"split": view, **rollout_row(e, self.tokenizer)} for e in some])

    def put(self, split: str, metric: str, value: float | None, n: int, items: list[float] | None = None, **more: Any) -> None:
        """One final record."""
        kept = items if metric in ("success", "violations", "clean", "perfect", "unused_credits") else None
        self.log.record(split=split, metric=metric, value=value, n=n, step=100, final=True, items=kept, **more)

    def training_records(self, folder: Path) -> None:
        """How training went: mean success over all steps, steps and episodes until it held, dead groups early and late."""
        rows = [row for row in read_json_lines(folder / "metrics.jsonl") if row.get("success/mean") is not None]
        if not rows:
            return
        success = [row["success/mean"] for row in rows]
        self.put("train", "success_area", sum(success) / len(success), len(success))
        self.put("train", "training_steps", float(len(rows)), 1)
        means = [sum(success[i : i + SMOOTH]) / SMOOTH for i in range(len(success) - SMOOTH + 1)]
        reached = next((i + SMOOTH for i, mean in enumerate(means) if mean >= REACHED), None)
        reason = {} if reached is not None else {"reason": f"success never reached {REACHED:.0%}"}
        self.put("train", "steps_to_90", None if reached is None else float(reached), len(success), **reason)
        quarter = max(1, len(rows) // 4)
        for name in (f"dead/{way}" for way in DEAD):
            shares = [row[name] for row in rows if row.get(name) is not None]
            for when, part in (("early", shares[:quarter]), ("late", shares[-quarter:])):
                if part:
                    self.put("train", f"{name.replace('/', '_')}_{when}", sum(part) / len(part), len(part))
