"""What is measured: success at each length, what goes wrong, and how far a teacher can be trusted on a student's states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from common.episodes import Episode, collate
from common.evaluation import rollout_row
from common.learning_curves import curve_of, read_off
from common.policy import token_distributions
from common.runlog import RunLog
from common.tokenizers import PhraseEncoder
from experiments.exp_7_opd_distillation import chains, stages
from experiments.exp_7_opd_distillation.data import TASKS
from experiments.exp_7_opd_distillation.settings import Settings

FAULTS = ("misread", "arithmetic", "malformed", "short", "long")
ROLLOUTS = 4  # kept of each length


class Evaluator:
    """Plays the evaluation tasks of a cell and writes its records; all arms of a task see the same tasks.

    Splits: id (trained lengths), ood (longer), k<length> (one length). Seeds below 100 see validation items, others test.
    """

    def __init__(self, settings: Settings, arm: str, tokenizer: Any, log: RunLog, seed: int) -> None:
        self.settings, self.arm, self.task = settings, arm, settings.branches[arm].task
        self.config = settings.task_config(arm)
        self.tokenizer, self.log, self.seed = tokenizer, log, seed

    def items(self, lengths: tuple[int, ...], count: int) -> list[dict]:
        """The tasks of a split, the same for all seeds of a kind."""
        wanted = "validation" if self.seed < 100 else "test"
        return [TASKS[self.task].task(item) for item in TASKS[self.task].items(wanted, 0, lengths, count)]

    def play(self, model: Any, tasks: list[dict], each: int, name: str) -> list[Episode]:
        """Episodes, task-major."""
        return stages.play(self.settings, self.task, model, self.tokenizer, tasks, each, self.seed, "evaluation", name)

    def curve(self, model: Any) -> tuple[float, int]:
        """Success on trained lengths, and over how many episodes."""
        tasks = self.items(TASKS[self.task].TRAINED, self.settings.evaluation.curve_items)
        episodes = self.play(model, tasks, 1, "curve")
        return sum(episode.success for episode in episodes) / len(episodes), len(episodes)

    def on_the_way(self, model: Any, step: int, flops: int) -> None:
        """Records of the learning curve after the steps where one is due, with the FLOPs used until then."""
        if step in self.config.curve_steps:
            value, count = self.curve(model)
            self.log.record(split="id", metric="success", value=value, n=count, step=step)
            self.log.record(split="train", metric="flops", value=float(flops), n=1, step=step)

    def by_compute(self, rows: Sequence[dict], budget: float) -> None:
        """The learning curve read off at percents of the budget, straight lines between its points."""
        points = curve_of(rows, self.arm, self.seed, "id", "success", "flops")
        for percent in self.settings.evaluation.percents:
            value, count = read_off(points, percent / 100 * budget), self.settings.evaluation.curve_items
            self.log.record(split="id", metric="success_at_compute", value=value, n=count, step=percent)

    def final(self, model: Any, steps: int) -> None:
        """The numbers of the report, with one mean per task for paired intervals, and rollouts to read."""
        config, lengths = self.settings.evaluation, (*TASKS[self.task].TRAINED, *TASKS[self.task].LONGER)
        played = {k: self.play(model, self.items((k,), config.items), config.samples, f"k{k}") for k in lengths}
        groups = {f"k{k}": episodes for k, episodes in played.items()}
        groups["id"] = [e for k in TASKS[self.task].TRAINED for e in played[k]]
        groups["ood"] = [e for k in TASKS[self.task].LONGER for e in played[k]]
        for split, episodes in groups.items():
            for metric, values in episode_metrics(self.task, episodes).items():
                self.record(split, metric, values, steps)
        first, last = (mean([float(e.success) for e in played[k]]) for k in (lengths[0], lengths[-1]))
        self.log.record(split="lengths", metric="decay", value=first - last, n=len(played[lengths[0]]), step=steps, final=True)
        self.log.rollouts(
            [{"split": f"k{k}", **rollout_row(e, self.tokenizer)}
             for k in lengths for e in played[k][:: max(1, len(played[k]) // ROLLOUTS)]]
        )  # fmt: skip

    def record(self, split: str, metric: str, values: Sequence[float], steps: int) -> None:
        """A final record of per-episode (or per-turn) values; success keeps one mean per task."""
        if not values:
            self.log.record(split=split, metric=metric, value=None, n=0, step=steps, final=True, reason="no such turn")
            return
        each, shown = self.settings.evaluation.samples, None
        if metric == "success":
            shown = [mean(values[i : i + each]) for i in range(0, len(values), each)]
        self.log.record(split=split, metric=metric, value=mean(values), n=len(values), step=steps, final=True, items=shown)

    def reuse(self, model: Any, tasks: list[dict], steps: int) -> None:
        """Success on the few prompts that an arm was trained on, and by how much it exceeds that on new ones."""
        each = max(1, self.settings.evaluation.curve_items // len(tasks))
        own = [float(e.success) for e in self.play(model, tasks, each, "few")]
        new, _ = self.curve(model)
        self.log.record(split="few", metric="success", value=mean(own), n=len(own), step=steps, final=True)
        self.log.record(split="few", metric="memorised", value=mean(own) - new, n=len(own), step=steps, final=True)

    def trust(self, student: Any, teacher: Any, name: str, steps: int) -> None:
        """How likely the teacher finds the right continuation on the student's own episodes, before and after a slip."""
        tasks = self.items(TASKS[self.task].TRAINED, self.settings.evaluation.curve_items)
        episodes = self.play(student, tasks, 1, "trust")
        found = teacher_trust(self.task, teacher, episodes, self.tokenizer)
        for place, values in found.items():
            self.record(place, f"teacher_right/{name}", values, steps)


def mean(values: Sequence[float]) -> float:
    """The mean of at least one number."""
    return sum(values) / len(values)


def episode_metrics(task: str, episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """Metric -> one value per episode; for the dial's slip and lost, one per turn that begins on or off the way."""
    metrics = {
        "success": [float(episode.success) for episode in episodes],
        "progress": [float(episode.infos[-1]["progress"]) for episode in episodes],
        "length": [float(sum(episode.mask)) for episode in episodes],
    }
    if task == "chain":
        kinds = [episode.infos[0]["class"] for episode in episodes]
        return metrics | {f"fault/{kind}": [float(found == kind) for found in kinds] for kind in FAULTS}
    infos = [info for episode in episodes for info in episode.infos]
    wrong = {off: [float(info["class"] != "best") for info in infos if info["off"] is off] for off in (False, True)}
    return metrics | {"slip": wrong[False], "lost": wrong[True], "off": [float(info["off"]) for info in infos]}


@torch.no_grad()
def teacher_trust(task: str, teacher: Any, episodes: Sequence[Episode], tokenizer: Any) -> dict[str, list[float]]:
    """{"before": probabilities that the teacher gives to the right token, "after": the same behind the student's slip}.

    A chain's right token is the one that follows from what is written: the step that is asked for at this place, or the
    result of the written number and digit. A dial's is the best turn; after a slip means a turn that begins off the way.
    """
    batch = collate(episodes, tokenizer.pad_token_id)
    logp_NV, _ = token_distributions(teacher, batch.ids_BT, batch.mask_BT, 1.0)
    found: dict[str, list[float]] = {"before": [], "after": []}
    encode, row = PhraseEncoder(tokenizer), 0
    for episode in episodes:
        right = right_tokens(task, episode, encode)
        for token, place in right:
            if token is not None:
                found[place].append(float(logp_NV[row, token].exp()))
            row += 1
    return found


def right_tokens(task: str, episode: Episode, encode: PhraseEncoder) -> list[tuple[int | None, str]]:
    """(right token or None, "before" or "after" a slip) for every token that the student wrote."""
    if task == "dial":
        right: list[tuple[int | None, str]] = []
        shown = shown_states(episode, encode)
        for turn, info in enumerate(episode.infos):
            move = encode.ids[TASKS["dial"].best_button(*shown[turn])]
            count = episode.turns.count(turn)
            right += [(move, "after" if info["off"] else "before"), *[(None, "before")] * (count - 1)]
        return right
    chain, written = chains.chain_of(episode.task), episode.ids[episode.prompt_length :]
    names = {token: text for text, token in encode.ids.items()}
    gold = [*encode(chains.answer(chain)), encode.eos]
    right, place, number = [], "before", chain.start
    for index, token in enumerate(written):
        wanted: int | None = gold[index] if index < len(gold) else encode.eos
        text = names[token]
        if index and index % 2 == 0 and index < len(gold) - 1:
            move = names[written[index - 1]]
            result = number + int(move) if move in chains.MOVES else -1
            wanted = encode.ids.get(f"={result}")
        right.append((wanted, place))
        if index < len(gold) and token != gold[index]:
            place = "after"
        digits = text.lstrip("=")
        number = int(digits) if digits.isdigit() else number
    return right


def shown_states(episode: Episode, encode: PhraseEncoder) -> list[tuple[int, int]]:
    """(place, stop) that the environment showed before each turn of a dial's episode."""
    names = {token: text for text, token in encode.ids.items()}
    shown = [names[token] for token, own in zip(episode.ids, episode.mask, strict=True) if not own]
    dial = TASKS["dial"]
    places = [int(text.removeprefix(dial.AT)) for text in shown if text.startswith(dial.AT)]
    stops = [int(text.removeprefix(dial.TO)) for text in shown if text.startswith(dial.TO)]
    return list(zip(places, stops, strict=True))
