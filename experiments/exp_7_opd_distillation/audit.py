"""Attacks the graders of both tasks before they are used: `python -m experiments.exp_7_opd_distillation.audit`.

Chains. Must score: the gold answer of every chain of up to ENUMERATED steps, and of many of every longer length. Must not
score: for some of them every other result, move and start at each place of it, steps left out or doubled, the answer to
another chain, and a corpus of exploits.

The dial. Must score: the best turns on every tour of one and of two stops and on many longer ones, and the way back from
every place that a single slip leads to. Must not score: each of those games with one turn replaced, as far as it goes
(a stop that was missed needs a turn more), and answers that are no button. Long random games are judged a second time by
a referee of its own, which knows the dial's rule from its description and shares no code with the environment.

Everything goes through the environments' reset and step. Gold answers must survive the tokenizer, and splits must not
overlap. Prints what was tried, lists each hole, and exits 1 if there is one.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import gymnasium

from common.seeding import python_random
from common.tokenizers import PhraseEncoder
from experiments.exp_7_opd_distillation import chains, data, dial
from experiments.exp_7_opd_distillation.chains import Chain
from experiments.exp_7_opd_distillation.dial import Tour

ENUMERATED = 3  # steps: some 12,000 chains
LENGTHS = range(4, 13)
SAMPLED = 60  # chains or tours of each further length and role
MUTATED_EVERY = 11  # of the chains
RANDOM_GAMES = 2000
SPLIT_SEEDS = (0, 100, 101, 102)


class Case(NamedTuple):
    """``turns``: the answers of an episode in order. ``must_score``: whether the last of them must earn a reward."""

    group: str
    task: dict[str, Any]
    turns: tuple[str, ...]
    must_score: bool


# Chains --------------------------------------------------------------------------------------------------------------


def enumerated() -> Iterator[Chain]:
    """Every chain of up to ENUMERATED steps."""
    digits = [sign * digit for digit in chains.DIGITS for sign in (1, -1)]
    for length in range(1, ENUMERATED + 1):
        for start, moves in product(range(chains.LARGEST + 1), product(digits, repeat=length)):
            chain = Chain(start, moves)
            if all(0 <= number <= chains.LARGEST for number in chain.results):
                yield chain


def longer() -> Iterator[Chain]:
    """Chains of every further length and role."""
    for name, length in product(chains.ROLES, LENGTHS):
        yield from chains.items(name, 0, (length,), SAMPLED)


def parts_of(chain: Chain) -> list[str]:
    """The gold answer in pieces: start, then move and result of each step."""
    steps = zip(chain.moves, chain.results, strict=True)
    return [str(chain.start), *(text for move, result in steps for text in (f"{move:+d}", f"={result}"))]


def chain_mutations(chain: Chain, other: Chain) -> Iterator[tuple[str, str]]:
    """(group, text) of one change each to the gold answer."""
    parts = parts_of(chain)
    for place, piece in enumerate(parts):
        kind = ("start", "result")[place > 0] if place % 2 == 0 else "move"
        if kind == "move":
            others = [move for move in chains.MOVES if move != piece] + [piece[1:], f"{piece}{piece}", f"{piece[0]}0"]
        else:
            sign = piece[:-1] if piece[:-1] == "=" else "=" if place else ""
            others = [f"{sign}{number}" for number in range(chains.LARGEST + 2) if f"{sign}{number}" != piece]
            others += [f"{sign}0{piece.removeprefix('=')}", f"{sign}-{piece.removeprefix('=')}", f"{piece}.0", sign]
        for changed in others:
            yield f"mutation: another {kind}", "".join([*parts[:place], changed, *parts[place + 1 :]])
    for place in range(1, len(parts), 2):
        step = parts[place : place + 2]
        yield "mutation: a step left out", "".join(parts[:place] + parts[place + 2 :])
        yield "mutation: a step twice", "".join(parts[:place] + step + parts[place:])
        yield "mutation: a step without its result", "".join(parts[: place + 1] + parts[place + 2 :])
    for piece in ("+1", "=0", f"={chain.results[-1]}", f"+1={chain.results[-1] + 1}", "+0=0"):
        yield "mutation: more behind it", "".join([*parts, piece])
    if other != chain:
        yield "mutation: another chain's answer", chains.answer(other)
    if other.start != chain.start:
        yield "mutation: the question's moves under other numbers", "".join([str(other.start), *parts[1:]])


def chain_exploits(chain: Chain) -> list[str]:
    """Answers that name the end without the work, name several, or attack the search for the steps."""
    gold, end = chains.answer(chain), chain.results[-1]
    question = chains.prompt(chain)
    wide = gold.translate(str.maketrans("0123456789+-=", "０１２３４５６７８９＋－＝"))
    arabic = gold.translate({ord("0") + d: ord("٠") + d for d in range(10)})
    bare = ["", " ", str(end), f"={end}", f"{chain.start}={end}", question, question.strip(), f"{question}{gold}", "right"]
    around = [f" {gold}", f"{gold} ", f"{gold}\n", f"\n{gold}", f"{gold}\x00", f"{gold}\u200b", f"{gold}.", f"({gold})"]
    around += [f"{gold}<eos>", f"<bos>{gold}", f"{gold}{gold}", f"{gold}\n{gold}", f"{gold};", f"x{gold}", f"{gold} wait"]
    written = [wide, arabic, gold.replace("=", "=="), gold.replace("=", " = "), gold.replace("-", "−").replace("+", "＋")]
    written += [gold.replace("+", "+ "), gold.replace("=", "=+"), gold.replace("=", "=0"), f"+{gold}", f"0{gold}", f"{gold}e0"]
    several = ["".join(f"{chain.start}={number}" for number in range(20)), "=".join(map(str, range(20)))]
    code = ["__import__('os')", "{result}", "%s", "[0-9]+", ".*", "True", "None", "1" * 100_000, "7" + "+1=8" * 30_000]
    return bare + around + [text for text in written if text != gold] + several + code


def chain_cases() -> Iterator[Case]:
    """All of them."""
    previous = Chain(0, (1,))
    for place, chain in enumerate(some := [*enumerated(), *longer()]):
        task = chains.task(chain)
        yield Case("chain, gold", task, (chains.answer(chain),), True)
        if place % MUTATED_EVERY == 0:
            yield from (Case(f"chain, {group}", task, (text,), False) for group, text in chain_mutations(chain, previous))
        previous = chain
    for chain in some[:: max(1, len(some) // 60)]:
        yield from (Case("chain, exploit", chains.task(chain), (text,), False) for text in chain_exploits(chain))


# The dial ------------------------------------------------------------------------------------------------------------


def short_tours() -> Iterator[Tour]:
    """Every tour of one and of two stops."""
    sizes = range(1, dial.FARTHEST + 1)
    for start, first in product(range(dial.PLACES), sizes):
        stop = (start + first) % dial.PLACES
        yield Tour(start, (stop,))
        yield from (Tour(start, (stop, (stop + second) % dial.PLACES)) for second in sizes)


def longer_tours() -> Iterator[Tour]:
    """Tours of every measured length and role."""
    for name, length in product(dial.ROLES, (*dial.TRAINED, *dial.LONGER)):
        yield from dial.items(name, 0, (length,), SAMPLED)


def best_turns(tour: Tour) -> list[str]:
    """The shortest way, one button a stop."""
    places = (tour.start, *tour.stops)
    return [dial.best_button(place, stop) for place, stop in zip(places, tour.stops, strict=False)]


def dial_cases() -> Iterator[Case]:
    """All of them but the random games."""
    for tour in [*short_tours(), *longer_tours()]:
        task, gold = dial.task(tour), best_turns(tour)
        yield Case("dial, gold", task, tuple(gold), True)
        for turn in range(len(gold)) if len(gold) < 3 else (0, len(gold) // 2, len(gold) - 1):
            for button in dial.BUTTONS:
                if button != gold[turn]:
                    replaced = (*gold[:turn], button, *gold[turn + 1 :])
                    yield Case("dial, mutation: another button", task, replaced, False)
        yield Case("dial, mutation: a turn left out", task, tuple(gold[1:] or ["z"]), False)
    yield from mended_cases()
    yield from no_button_cases()


def mended_cases() -> Iterator[Case]:
    """A slip past the first of two stops, the way back, and the way on: the game allows one such pair."""
    for tour in short_tours():
        if len(tour.stops) < 2:
            continue
        longer_tour = Tour(tour.start, (*tour.stops, *((tour.stops[-1] + k) % dial.PLACES for k in (1, 2))))
        gold = best_turns(longer_tour)
        for button in dial.ON:
            place = (tour.start + dial.ways(tour.start)[button]) % dial.PLACES
            if dial.is_past(place, tour.stops[0]):
                yield Case("dial, a slip that is mended", dial.task(longer_tour), (button, dial.BACK, *gold), True)
                late = (button, dial.BACK, button, dial.BACK, *gold)  # eight turns, and six are allowed
                yield Case("dial, mended too late", dial.task(longer_tour), late, False)


NO_BUTTONS = (
    "", " ", "a ", " a", "A", "aa", "ab", "az", "j", "1", "5", "а", "ａ", "a\n", "a\x00", "<eos>", "at 22", "past, ", "success",
    "best", "None", "True", "__import__('os')", "abcdefghiz", "zz", "a" * 100_000, "[a-i]", "%s", "{stop}", "a or b", "à",
)  # fmt: skip


def no_button_cases() -> Iterator[Case]:
    """What is no button never moves the dial, and a game of such turns alone earns nothing."""
    for tour in list(short_tours())[:: 37 * (dial.FARTHEST + 1) + 1]:
        task, limit = dial.task(tour), dial.turn_limit(len(tour.stops))
        yield from (Case("dial, exploit: no button", task, (text,) * limit, False) for text in NO_BUTTONS)
        for text in NO_BUTTONS if len(tour.stops) == 2 else ():
            yield Case("dial, no button before the way", task, (text, *best_turns(tour)), True)
            yield Case("dial, exploit: no button in the last turn", task, (best_turns(tour)[0], text, text), False)


def referee(tour: Tour, turns: Sequence[str], moves: dict[int, dict[str, int]]) -> int | None:
    """The turn that wins, by the rule as the module's text gives it; None if none does within the limit."""
    place, last, waiting = tour.start, tour.start, list(tour.stops)
    for number, button in enumerate(turns[: len(tour.stops) * 3 // 2]):
        if button == "z":
            place = last
        elif button in moves[place]:
            place = (place + moves[place][button]) % 40
        if place == waiting[0]:
            last = waiting.pop(0)
        if not waiting:
            return number
    return None


def referee_holes(count: int) -> tuple[int, Iterator[str]]:
    """(games, holes): random games, right turns among wrong ones and nonsense, judged twice."""
    stream = python_random("dial audit")
    moves = {place: dict(dial.ways(place)) for place in range(dial.PLACES)}
    found, won = [], 0
    for _ in range(count):
        tour = dial.random_tour(stream, stream.choice((1, 2, 3, 4, 8)))
        good, env = stream.choice((0.5, 0.8, 0.95)), dial.SafeDial()
        env.reset(options=dial.task(tour))
        turns: list[str] = []
        wins = None
        for number in range(dial.turn_limit(len(tour.stops))):
            stop = tour.stops[env._reached]
            right = stream.random() < good
            turns.append(dial.best_button(env._place, stop) if right else stream.choice((*dial.BUTTONS, "x", "")))
            _, reward, terminated, truncated, info = env.step(turns[-1])
            if (reward > 0) != terminated or terminated != info["success"]:
                found.append(f"reward {reward}, end {terminated} and success {info['success']} differ on {tour}, {turns}")
            wins = number if reward > 0 else wins
            if terminated or truncated:
                break
        won += wins is not None
        if referee(tour, turns, moves) != wins:
            found.append(f"{tour}, {turns}: the environment pays in turn {wins}, the referee in {referee(tour, turns, moves)}")
    if not 0.1 < won / count < 0.9:
        found.append(f"{won} of {count} random games are won, which tests little")
    return count, iter(found)


# Judging -------------------------------------------------------------------------------------------------------------


def judge(case: Case) -> str | None:
    """A hole, described, or None. An episode that has ended must refuse further turns; any exception is a hole."""
    try:
        return verdict(case)
    except Exception as error:  # report it and go on with the next case
        return f"{case.group}: {case.turns[-1][:60]!r} raises {type(error).__name__}: {error} on {case.task}"


def verdict(case: Case) -> str | None:
    """What is wrong with an episode's rewards and end, or None."""
    env: Any = chains.DistilledChains() if "moves" in case.task else dial.SafeDial()
    env.reset(options=case.task)
    rewards: list[float] = []
    for text in case.turns:
        _, reward, terminated, truncated, info = env.step(text)
        rewards.append(reward)
        if (reward == 1.0) != info["success"] or reward not in (0.0, 1.0):
            return f"{case.group}: reward {reward} with success {info['success']} on {case.task}"
        if terminated or truncated:
            try:
                env.step(text)
            except gymnasium.error.ResetNeeded:
                break
            return f"{case.group}: the episode goes on behind its end on {case.task}"
    if (rewards[-1] == 1.0) == case.must_score and sum(rewards) == float(case.must_score):
        return None
    return f"{case.group}: {tuple(text[:60] for text in case.turns)!r} earns {rewards} on {case.task}"


def tokenizer_holes() -> Iterator[str]:
    """Gold answers and observations that would read otherwise once they went through the tokenizer."""
    texts: dict[str, Callable[[], Iterator[str]]] = {
        "chain": lambda: (chains.answer(chain) for chain in [*enumerated(), *longer()]),
        "dial": lambda: iter(dial.BUTTONS),
    }
    for task, made in texts.items():
        tokenizer = data.build_tokenizer(task)
        encode = PhraseEncoder(tokenizer)
        names = {token: text for text, token in encode.ids.items()}
        for text in made():
            ids = encode(text)
            if "".join(names[token] for token in ids) != text or tokenizer.decode(ids[:1]) != names[ids[0]]:
                yield f"the tokenizer of {task} changes {text!r}"


def split_holes() -> Iterator[str]:
    """Items that two roles share, under any seed."""
    for name, module in data.TASKS.items():
        owner: dict[Any, str] = {}
        for role, seed in product(module.ROLES, SPLIT_SEEDS):
            for item in module.items(role, seed, (*module.TRAINED, *module.LONGER), 4 * SAMPLED):
                if owner.setdefault(item, role) != role:
                    yield f"{name}: {item} belongs to {owner[item]} and to {role}"


def main() -> int:
    """Runs the audit; 1 if there is a hole."""
    began, tried, holes = time.perf_counter(), Counter[str](), list[str]()
    for cases in (chain_cases(), dial_cases()):
        for case in cases:
            tried[case.group] += 1
            if hole := judge(case):
                holes.append(hole)
    games, found = referee_holes(RANDOM_GAMES)
    tried["dial, random games judged twice"] = games
    holes += [*found, *tokenizer_holes(), *split_holes()]
    for group, count in tried.items():
        print(f"{count:9,}  {group}")
    print(f"{tried.total():,} episodes in {time.perf_counter() - began:.1f} s, {len(holes)} holes")
    for hole in holes[:50]:
        print(f"HOLE {hole}")
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main())
