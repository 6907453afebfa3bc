"""What is measured: success, the habit of checking, entropy and length, and the self-teacher with what it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from common.episodes import Episode
from common.evaluation import rollout_row
from common.files import read_json_lines
from common.loop import to_batch
from common.losses import entropy_from_logprobs
from common.policy import micro_batches, select, token_distributions
from common.rollout import sample
from common.runlog import RunLog
from common.seeding import generator
from common.tokenizers import encode_prompt
from experiments.exp_7_opsd_self_distillation import stages, tasks
from experiments.exp_7_opsd_self_distillation.settings import Settings

FAULTS = ("misread", "arithmetic", "malformed", "short", "long")
ROLLOUTS = 8  # kept of each split


class Evaluator:
    """Plays the evaluation tasks of a cell and writes its records; all arms of a kind see the same tasks.

    Splits: <kind> (trained lengths), <kind>-long, <kind>-train (training tasks). Seeds below 100 see validation tasks.
    """

    def __init__(self, settings: Settings, kind: str, tokenizer: Any, log: RunLog, seed: int) -> None:
        self.settings, self.kind, self.tokenizer, self.log, self.seed = settings, kind, tokenizer, log, seed

    def splits(self, count: int) -> dict[str, list[dict]]:
        """Split -> tasks: the same questions under all seeds, each in the seed's world."""
        wanted, kind = ("validation" if self.seed < 100 else "test"), self.kind
        some = {kind: tasks.items(wanted, 0, kind, self.seed, tasks.TRAINED[kind], count)}
        if tasks.LONGER[kind] != tasks.TRAINED[kind]:
            some[f"{kind}-long"] = tasks.items(wanted, 0, kind, self.seed, tasks.LONGER[kind], count)
        some[f"{kind}-train"] = stages.training_items(self.settings, kind, self.seed)[:count]
        return {split: [tasks.options_of(task) for task in chosen] for split, chosen in some.items()}

    def on_the_way(self, model: Any, step: int, flops: int) -> None:
        """Records of the learning curve, where one is due, with the tokens sampled and the FLOPs used until then."""
        config = self.settings.evaluation
        if step not in config.curve_steps:
            return
        options = self.splits(config.curve_items)[self.kind]
        episodes = stages.play(self.settings, model, self.tokenizer, options, 1, self.seed, "evaluation", "curve")
        count, checks = len(episodes), sum(episode.infos[0]["waits"] > 0 for episode in episodes)
        rows = [row for row in read_json_lines(self.log.folder / "metrics.jsonl") if row["step"] <= step]
        tokens = sum(row.get("len/completion_mean", 0.0) for row in rows) * self.settings.episodes_per_step
        for split, metric, value in (
            (self.kind, "success", sum(episode.success for episode in episodes) / count),
            (self.kind, "checks", checks / count),
            ("train", "flops", float(flops)),
            ("train", "sampled", tokens),
        ):
            self.log.record(split=split, metric=metric, value=value, n=count, step=step)

    def final(self, model: Any, steps: int) -> None:
        """The numbers of the report, with one mean per task for paired intervals, and rollouts to read."""
        config = self.settings.evaluation
        for split, options in self.splits(config.items).items():
            episodes = stages.play(
                self.settings, model, self.tokenizer, options, config.samples, self.seed, "evaluation", split
            )
            for metric, values in episode_metrics(episodes).items():
                shown = None
                if metric == "success":
                    shown = [mean(values[i : i + config.samples]) for i in range(0, len(values), config.samples)]
                self.record(split, metric, values, steps, shown)
            entropies = token_entropies(model, episodes, self.tokenizer)
            self.record(split, "entropy", entropies, steps)
            some = episodes[:: max(1, len(episodes) // ROLLOUTS)]
            self.log.rollouts([{"split": split, **rollout_row(episode, self.tokenizer)} for episode in some])

    def teacher(self, model: Any, shown: str, steps: int) -> None:
        """How often the model itself is right, and checks, once it sees what a self-teacher is shown."""
        config = self.settings.evaluation
        chosen = [tasks.task_of(options) for options in self.splits(config.curve_items)[self.kind]]
        prompts = [encode_prompt(self.tokenizer, tasks.prompt(task, shown)) for task in chosen]
        written = sample(
            model, prompts, max_new_tokens=self.settings.max_new_tokens, stop_ids=[self.tokenizer.eos_token_id],
            temperature=config.temperature, generator=generator(self.seed, "teacher", self.kind, shown),
        )  # fmt: skip
        texts = [self.tokenizer.decode(answer.ids, skip_special_tokens=True) for answer in written]
        grades = [tasks.grade(text, task) for text, task in zip(texts, chosen, strict=True)]
        self.record(self.kind, f"teacher_success/{shown}", [float(grade.success) for grade in grades], steps)
        self.record(self.kind, f"teacher_checks/{shown}", [float(grade.waits > 0) for grade in grades], steps)

    def record(self, split: str, metric: str, values: Sequence[float], steps: int, items: list[float] | None = None) -> None:
        """A final record of per-answer values."""
        self.log.record(split=split, metric=metric, value=mean(values), n=len(values), step=steps, final=True, items=items)


def mean(values: Sequence[float]) -> float:
    """The mean of at least one number."""
    return sum(values) / len(values)


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """Metric -> one value per answer."""
    infos = [episode.infos[0] for episode in episodes]
    metrics = {
        "success": [float(episode.success) for episode in episodes],
        "checks": [float(info["waits"] > 0) for info in infos],
        "waits": [float(info["waits"]) for info in infos],
        "mended": [float(mended(episode.texts[0])) for episode in episodes],
        "length": [float(sum(episode.mask)) for episode in episodes],
    }
    return metrics | {f"fault/{kind}": [float(info["class"] == kind) for info in infos] for kind in FAULTS}


def mended(text: str) -> bool:
    """Whether some result was followed by a wait and another result."""
    for part in text.split(tasks.WAIT)[1:]:
        before = text[: text.index(f"{tasks.WAIT}{part}")].rsplit("=", 1)[-1]
        after = part.lstrip("=")
        digits = after[: next((i for i, letter in enumerate(after) if not letter.isdigit()), len(after))]
        if before.isdigit() and digits and before != digits:
            return True
    return False


@torch.no_grad()
def token_entropies(model: Any, episodes: list[Episode], tokenizer: Any) -> list[float]:
    """Entropy in nats of the model's next-token distribution at every token that it wrote in the episodes."""
    batch = to_batch(episodes, tokenizer, model)
    found: list[float] = []
    for rows in micro_batches(batch, torch.arange(len(episodes))):
        part = select(batch, rows)
        logp_NV, _ = token_distributions(model, part.ids_BT, part.mask_BT, 1.0)
        found += entropy_from_logprobs(logp_NV).tolist()
    return found
