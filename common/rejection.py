"""Rejection-sampling fine-tuning: sample several answers, keep the verified and different ones, train on them, repeat.

One round from a fine-tuned start is RFT (Yuan et al. 2023); rounds that each train the start anew on the newest model's
answers are STaR (Zelikman et al. 2022); rounds that go on from the last weights are expert iteration.

Departures from the papers:
- RFT: answers count as equal where the caller's key says so (there: the list of equations), the first one sampled stays.
- STaR: rationalisation is an option: a task without a right answer is played again with a hint, and the answers are kept
  behind the prompt without it. Each round gets the same share of the budget instead of growing steps.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.compute import Budget, Meter
from common.episodes import Episode, MakeEnv, run_episodes
from common.files import read_json, write_json
from common.loop import TaskAt, trainable
from common.models import parameter_count
from common.runlog import RunLog
from common.schema import within
from common.seeding import generator, python_random
from common.sft import SftBatch, SftConfig, pad_rows, train_sft

Row = tuple[list[int], list[int]]
Key = Callable[[Episode], Hashable]


@dataclass(frozen=True)
class RejectionConfig:
    """``rounds`` of: ``candidates`` answers to each of ``prompts`` tasks, at most ``cap`` different right ones kept of each.

    ``restart``: a round trains the start's weights (STaR), not the last round's.
    """

    rounds: int = 1
    prompts: int = 64
    candidates: int = 8
    cap: int = 4
    restart: bool = False
    temperature: float = 1.0
    max_new_tokens: int = 64
    max_turns: int = 1

    def __post_init__(self) -> None:
        for key in ("rounds", "prompts", "candidates", "cap", "max_new_tokens", "max_turns"):
            within(f"rejection.{key}", getattr(self, key), 1)
        within("rejection.temperature", self.temperature, 0, above=True)


@dataclass(frozen=True)
class Samples:
    """Rows to train on, the tokens that sampling them processed, and how many candidates each step removed."""

    rows: list[Row]
    tokens_forward: int
    counts: dict[str, int]


def verified(episode: Episode) -> bool:
    """Whether the environment called the episode solved."""
    return episode.success


def keep_candidates(
    episodes: Sequence[Episode], key: Key, cap: int, verify: Callable[[Episode], bool] = verified
) -> tuple[list[Episode], dict[str, int]]:
    """The right, different candidates, at most `cap` of a group, in the order in which they were sampled; and the counts.

    ``counts``: candidates sampled, then removed as wrong, as repeated (a kept one of the group has the same key), as
    over_cap, and kept; they add up. ``solved``: groups with a kept candidate.
    """
    kept: list[Episode] = []
    seen: dict[int, set[Hashable]] = {}
    counts = {"sampled": len(episodes), "wrong": 0, "repeated": 0, "over_cap": 0}
    for episode in episodes:
        keys = seen.setdefault(episode.group, set())
        if not verify(episode):
            counts["wrong"] += 1
        elif (own := key(episode)) in keys:
            counts["repeated"] += 1
        elif len(keys) >= cap:
            counts["over_cap"] += 1
        else:
            keys.add(own)
            kept.append(episode)
    return kept, counts | {"kept": len(kept), "solved": sum(map(bool, seen.values()))}


def without_hint(hinted: Episode, plain: Episode) -> Row:
    """(ids, mask) of a hinted episode behind the prompt of a plain one of the same task."""
    own = hinted.ids[hinted.prompt_length :], hinted.mask[hinted.prompt_length :]
    return plain.ids[: plain.prompt_length] + own[0], [0] * plain.prompt_length + own[1]


def verified_samples(
    model: Any,
    tokenizer: Any,
    make_env: MakeEnv,
    tasks: list[dict],
    config: RejectionConfig,
    key: Key,
    *,
    stream: torch.Generator,
    file: Path,
    verify: Callable[[Episode], bool] = verified,
    hint: Callable[[dict], dict] | None = None,
) -> Samples:
    """config.candidates answers per task, filtered by `keep_candidates`; kept in `file`, from which the next call reads.

    ``stream``: where the sampler's random numbers come from. ``hint``: task -> the same task whose observation gives the
    answer away; tasks that the candidates leave unsolved are played once more with it, and what is kept of that
    (``counts["hinted"]``) loses the hint.
    """
    if (saved := read_json(file)) is not None:
        return Samples([(ids, mask) for ids, mask in saved["rows"]], saved["tokens_forward"], saved["counts"])

    def play(chosen: list[dict]) -> list[Episode]:
        return run_episodes(
            model,
            tokenizer,
            make_env,
            chosen,
            group_size=config.candidates,
            max_turns=config.max_turns,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            generator=stream,
        )

    episodes = play(tasks)
    kept, counts = keep_candidates(episodes, key, config.cap, verify)
    rows: list[Row] = [(episode.ids, episode.mask) for episode in kept]
    tokens_forward = sum(episode.tokens_forward for episode in episodes)
    if hint is not None:
        unsolved = sorted({episode.group for episode in episodes} - {episode.group for episode in kept})
        hinted = play([hint(tasks[group]) for group in unsolved])
        right, _ = keep_candidates(hinted, key, config.cap, verify)
        rows += [without_hint(episode, episodes[unsolved[episode.group] * config.candidates]) for episode in right]
        tokens_forward += sum(episode.tokens_forward for episode in hinted)
        counts["hinted"] = len(right)
    write_json(file, {"tokens_forward": tokens_forward, "counts": counts, "rows": rows})
    return Samples(rows, tokens_forward, counts)


def row_batches(rows: list[Row], pad_id: int, count: int, *stream: int | str) -> Callable[[int], SftBatch]:
    """step -> batch of `count` rows drawn with replacement from the random stream named by `stream` and the step."""
    return lambda step: pad_rows(python_random(*stream, step).choices(rows, k=count), pad_id)


def train_rejection(
    model: nn.Module,
    tokenizer: Any,
    make_env: MakeEnv,
    task_at: TaskAt,
    config: RejectionConfig,
    sft: SftConfig,
    key: Key,
    *,
    seed: int,
    budget: Budget,
    log: RunLog,
    folder: Path,
    verify: Callable[[Episode], bool] = verified,
    hint: Callable[[dict], dict] | None = None,
    evaluate: Callable[[int, int], None] | None = None,
) -> Meter:
    """Trains `model` in place for config.rounds rounds, each with an equal share of the budget. Returns the meter.

    Everything of a round lies in ``folder/round_<i>``: samples.json, the SFT's own log and state, round.json once it has
    ended; the same call goes on from there. `log` gets a line a round. ``task_at(round, prompts)`` gives a round's tasks;
    ``evaluate(rounds done, flops)`` is called after each. A round without a right answer leaves the model as it is.
    """
    start = {name: parameter.detach().clone() for name, parameter in trainable(model).items()}
    meter = Meter(parameter_count(model))
    for index in range(config.rounds):
        here = folder / f"round_{index}"
        here.mkdir(parents=True, exist_ok=True)
        tasks, stream = task_at(index, config.prompts), generator(seed, "rejection", index)
        samples = verified_samples(
            model, tokenizer, make_env, tasks, config, key, stream=stream, file=here / "samples.json", verify=verify, hint=hint
        )
        meter.add_forward(samples.tokens_forward)
        if samples.rows:
            if config.restart:
                model.load_state_dict(start, strict=False)
            batch_at = row_batches(samples.rows, tokenizer.pad_token_id, sft.batch_size, seed, "rejection", index)
            share = round_budget(budget, meter, index, config.rounds)
            with RunLog(here, log.labels, quiet=True) as inner:
                spent = train_sft(model, batch_at, sft, budget=share, log=inner, folder=here)
            meter.add_forward(spent.tokens_forward)
            meter.add_train(spent.tokens_trained)
        values = {f"rejection/{name}": float(count) for name, count in samples.counts.items()}
        log.metrics(index + 1, values | {"progress/step": index + 1}, progress=(index + 1) / config.rounds)
        log.cost(flops=meter.flops, tokens_forward=meter.tokens_forward, tokens_trained=meter.tokens_trained)
        if evaluate is not None and not (here / "round.json").exists():
            evaluate(index + 1, meter.flops)
        write_json(here / "round.json", samples.counts)
    return meter


def round_budget(budget: Budget, meter: Meter, index: int, rounds: int) -> Budget:
    """What the SFT of round `index` (from 0) may use, so that rounds end at equal shares of the whole budget.

    FLOPs that earlier rounds, or this one's sampling, took too much are taken off; steps are cut evenly.
    """
    flops = None if budget.flops is None else max(0.0, budget.flops * (index + 1) / rounds - meter.flops)
    steps = None if budget.steps is None else budget.steps * (index + 1) // rounds - budget.steps * index // rounds
    return Budget(flops=flops, steps=steps)
