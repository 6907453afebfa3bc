"""What preference methods learn from, as token ids: pairs and labelled answers out of episodes.

Nothing is decoded and encoded again, and masks come from the episodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from common.episodes import Episode
from common.schema import one_of
from common.seeding import rng

Row = tuple[list[int], list[int]]  # token ids, and 1 on the tokens whose probability counts
RULES = ("best_worst", "right_wrong", "all")


class Pair(NamedTuple):
    """Two rows with the same tokens up to where they are compared (their masks' first 1)."""

    chosen: Row
    rejected: Row


class Answer(NamedTuple):
    """A row and whether it is desirable: what KTO learns from."""

    row: Row
    desirable: bool


def answer_row(episode: Episode) -> Row:
    """The episode's ids and mask up to the policy's last token."""
    end = len(episode.mask) - episode.mask[::-1].index(1)
    return episode.ids[:end], episode.mask[:end]


def by_prompt(episodes: Iterable[Episode]) -> list[list[Episode]]:
    """The episodes of each prompt (same group, same prompt tokens), without unscored ones and those without an answer."""
    groups: dict[tuple, list[Episode]] = defaultdict(list)
    for episode in episodes:
        if episode.reward == episode.reward and any(episode.mask[1:]):
            groups[episode.group, tuple(episode.ids[: episode.prompt_length])].append(episode)
    return list(groups.values())


def pairs_from_episodes(episodes: Iterable[Episode], rule: str, *, per_prompt: int = 1, seed: int = 0) -> list[Pair]:
    """At most `per_prompt` pairs of each prompt; never two answers that earned the same, or the same tokens.

    best_worst: the i-th best against the i-th worst. right_wrong: successes against failures, drawn at random, each
    answer at most once. all: any two answers, drawn at random (Ouyang et al. 2022, section 3.5, for a reward model).
    `seed` drives the draws. Raises ConfigError for an unknown rule.
    """
    one_of("rule", rule, RULES)
    pairs: list[Pair] = []
    for index, group in enumerate(by_prompt(episodes)):
        shuffled = [group[i] for i in rng(seed, "pairs", index).permutation(len(group))]
        if rule == "right_wrong":
            meetings = list(zip([e for e in shuffled if e.success], [e for e in shuffled if not e.success]))
        elif rule == "best_worst":
            ranked = sorted(group, key=lambda episode: -episode.reward)
            meetings = [(a, b) for a, b in zip(ranked, ranked[::-1]) if a.reward > b.reward]
        else:
            meetings = [(a, b) for a in shuffled for b in shuffled if a.reward > b.reward]
            meetings = [meetings[i] for i in rng(seed, "all pairs", index).permutation(len(meetings))]
        made = [Pair(answer_row(a), answer_row(b)) for a, b in meetings]
        pairs += [pair for pair in made if pair.chosen != pair.rejected][:per_prompt]
    return pairs


def steps(episode: Episode, separators: frozenset[int] = frozenset()) -> list[tuple[int, int]]:
    """[first, end) of each step: a turn of the policy, or a piece of one that ends behind a token of `separators`."""
    spans, first = [], None
    for t, turn in enumerate(episode.turns):
        if turn < 0:
            continue
        first = t if first is None else first
        if t + 1 == len(episode.ids) or episode.turns[t + 1] != turn or episode.ids[t] in separators:
            spans.append((first, t + 1))
            first = None
    return spans


def step_pairs(episodes: Iterable[Episode], *, per_prompt: int = 1, separators: frozenset[int] = frozenset()) -> list[Pair]:
    """Pairs of single steps behind a common prefix: Step-DPO, Lai et al. 2024 (arXiv 2406.18629), section 3.1.

    The episodes of a prompt form a tree of steps (see `steps`). Where they part, the step with the highest mean reward
    of the episodes through it is chosen over each one with a lower mean. A row ends with the step, and the step alone is
    under its mask. Of each prompt the `per_prompt` pairs with the largest gap are kept.

    Departures: the paper has a judge look for the first wrong step, samples new steps behind what comes before it, and
    takes one pair of each problem; here all steps are those of the given episodes.
    """
    pairs: list[Pair] = []
    for group in by_prompt(episodes):
        tree: dict[tuple, dict[tuple, list[float]]] = defaultdict(lambda: defaultdict(list))
        for episode in group:
            for first, end in steps(episode, separators):
                tree[tuple(episode.ids[:first])][tuple(episode.ids[first:end])].append(episode.reward)
        found = []
        for prefix, branches in tree.items():
            value = {step: sum(rewards) / len(rewards) for step, rewards in branches.items()}
            best = max(value, key=lambda step: value[step])
            for worse in (step for step in value if value[step] < value[best]):
                chosen, rejected = (([*prefix, *s], [0] * len(prefix) + [1] * len(s)) for s in (best, worse))
                found.append((value[best] - value[worse], Pair(chosen, rejected)))
        found.sort(key=lambda item: -item[0])
        pairs += [pair for _, pair in found[:per_prompt]]
    return pairs


def answers_from_episodes(episodes: Iterable[Episode]) -> list[Answer]:
    """Every scored answer with the verifier's verdict: desirable where the episode ended in success."""
    return [Answer(answer_row(episode), episode.success) for group in by_prompt(episodes) for episode in group]
