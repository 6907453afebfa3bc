"""What is measured: success, calls, share of code that runs, repair after an error, place of the first call, length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.episodes import Episode, run_episodes
from common.evaluation import rollout_row
from common.runlog import RunLog
from common.seeding import generator
from experiments.exp_7_15_retool import files, problems
from experiments.exp_7_15_retool.env import CODE, Calculations
from experiments.exp_7_15_retool.interpreter import Interpreter
from experiments.exp_7_15_retool.settings import Branch, Settings

ID, LONG = "id", "long"
ROLLOUTS = 6  # kept of each split
Values = dict[str, list[float]]
CURVE = ("success", "calls", "uses_tool", "length", "first_call", "code_ok")
WHY_NOT = {
    "code_ok": "no code was run", "first_call": "no answer calls the interpreter", "retried": "no code failed",
    "mended": "no code failed",
}  # fmt: skip


class Evaluator:
    """Plays the evaluation problems of a cell and writes its records; all arms see the same problems and random numbers.

    Splits: one per kind, `id` (all kinds together), `long` (chains longer than any trained on). Seeds below 100 see
    validation problems.
    """

    def __init__(
        self, settings: Settings, branch: Branch, tokenizer: Any, log: RunLog, seed: int, interpreter: Interpreter | None
    ) -> None:
        self.settings, self.branch, self.tokenizer = settings, branch, tokenizer
        self.log, self.seed, self.interpreter = log, seed, interpreter

    def make_env(self) -> Calculations:
        """The environment that the arm is measured in."""
        return Calculations(self.interpreter, self.settings.env_config(self.branch, training=False))

    def splits(self, count: int) -> dict[str, list[dict]]:
        """Split -> tasks, `count` of each kind."""
        if self.settings.problems is not None:
            return files.splits(self.settings.problems, self.branch.tool, count)
        role = "validation" if self.seed < 100 else "test"
        found = {kind: problems.items(role, 0, kind, problems.LENGTHS, count) for kind in problems.KINDS}
        found[LONG] = tuple(p for kind in problems.CHAINS for p in problems.items(role, 1, kind, problems.LONGER, count))
        return {split: [problems.options_of(problem) for problem in some] for split, some in found.items()}

    def play(self, model: Any, tasks: list[dict], samples: int, stream: str) -> list[Episode]:
        """`samples` episodes of each task, task-major."""
        return run_episodes(
            model, self.tokenizer, self.make_env, tasks, group_size=samples,
            max_turns=self.settings.env_config(self.branch, training=False).max_turns,
            max_new_tokens=self.settings.max_new_tokens, temperature=self.settings.evaluation.temperature,
            generator=generator(self.seed, "evaluation", stream), batch_size=self.settings.sample_batch,
        )  # fmt: skip

    def curve(self, model: Any, percent: int) -> None:
        """A point of the learning curve on the trained kinds together; steps are percent of the arm's compute."""
        tasks = [
            task for split, some in self.splits(self.settings.evaluation.curve_items).items() if split != LONG for task in some
        ]
        found = metrics(self.play(model, tasks, 1, "curve"))
        for name in CURVE:
            values = found[name]
            value, reason = (mean(values), None) if values else (None, WHY_NOT[name])
            self.log.record(split=ID, metric=name, value=value, n=len(values), step=percent, reason=reason)

    def final(self, model: Any) -> None:
        """The numbers of the report, and rollouts to read."""
        config, pooled = self.settings.evaluation, list[Episode]()
        for split, tasks in self.splits(config.items).items():
            episodes = self.play(model, tasks, config.samples, split)
            self.record_all(split, episodes)
            some = episodes[:: max(1, len(episodes) // ROLLOUTS)]
            self.log.rollouts([{"split": split, **rollout_row(episode, self.tokenizer)} for episode in some])
            if split != LONG:
                pooled += episodes
        self.record_all(ID, pooled)
        strong = self.interpreter is not None and self.interpreter.strong
        reason = None if self.interpreter else "this arm runs no code"
        value = float(strong) if self.interpreter else None
        self.log.record(split="train", metric="isolated", value=value, n=1, step=100, final=True, reason=reason)

    def record_all(self, split: str, episodes: Sequence[Episode]) -> None:
        """Final records of a split's episodes, the successes with one number per task."""
        samples = self.settings.evaluation.samples
        for name, values in metrics(episodes).items():
            value, reason = (mean(values), None) if values else (None, WHY_NOT[name])
            items = None
            if name == "success":
                items = [round(mean(values[i : i + samples]), 4) for i in range(0, len(values), samples)]
            self.log.record(
                split=split, metric=name, value=value, n=len(values), step=100, final=True, reason=reason, items=items
            )


def metrics(episodes: Sequence[Episode]) -> Values:
    """Metric -> its values, one per episode, per block of code, or per episode with an error."""
    found: Values = {name: [] for name in (*CURVE, "retried", "mended", "malformed", "truncated", "tokens_read")}
    for episode in episodes:
        ran = [info for info in episode.infos if info["reply"]]
        found["success"].append(float(episode.success))
        found["calls"].append(float(len(ran)))
        found["uses_tool"].append(float(bool(ran)))
        found["length"].append(float(sum(episode.mask)))
        found["tokens_read"].append(float(len(episode.ids) - episode.prompt_length - sum(episode.mask)))
        found["malformed"].append(float(episode.infos[-1]["turn"] != "answer"))
        found["truncated"].append(float(episode.truncated))
        found["code_ok"] += [float(not info["failed"]) for info in ran]
        if ran:
            found["first_call"].append(first_call(episode.texts))
        failed = [place for place, info in enumerate(ran) if info["failed"]]
        if failed:
            retried, mended = repair(ran, failed[0], episode.success)
            found["retried"].append(float(retried))
            found["mended"].append(float(mended))
    return found


def first_call(texts: Sequence[str]) -> float:
    """Share of the policy's text, in characters, that stands in front of its first code block."""
    return texts[0].index(CODE) / sum(map(len, texts))


def repair(ran: Sequence[dict], error: int, success: bool) -> tuple[bool, bool]:
    """Whether other code was tried after the first error, and whether such code ran and the answer was right."""
    others = [info for info in ran[error + 1 :] if info["code"] != ran[error]["code"]]
    return bool(others), success and any(not info["failed"] for info in others)


def mean(values: Sequence[float]) -> float:
    """The mean of at least one number."""
    return sum(values) / len(values)
