"""Generic pre-training text of the card game: hindsight "random play", and worked answers to the training hands.

Numbers are drawn and combined at random, and whatever comes out is the target. No solver is asked, no document has the
target 24, and no full document states the rule J, Q, K = 11, 12, 13 (the numbers 11 to 13 and that rule do occur in
`reading` documents). A batch is a function of (configuration, seed, step).
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from common.cards import hands, prompts
from common.seeding import python_random
from common.sft import SftBatch, pad_rows
from common.tokenizers import PhraseEncoder

LARGEST = 60
NUMBERS = range(LARGEST + 1)
PREFIXES = ("", ", ", "=")  # a number stands bare, behind a comma, or behind an equals sign
Row = tuple[list[int], list[int]]


def vocabulary() -> list[str]:
    """One token per phrase, card, number 0..60 (bare, behind a comma, behind an equals sign), operator and bracket."""
    cards = [f'"{card}"' for card in hands.RANKS]
    numbers = [f"{before}{number}" for before in PREFIXES for number in NUMBERS]
    phrases = [phrase for phrase in prompts.PHRASES if phrase != prompts.COMMA]
    return [*phrases, *cards, *(f", {card}" for card in cards), *numbers, *"+-*/()"]


def random_play(values: list[int], stream: random.Random) -> list[hands.Step] | None:
    """Combine the numbers at random until one is left; None where a step has no whole result in 0..60.

    The larger operand of + and * stands first, as in the solver's canonical form.
    """
    left = list(values)
    steps: list[hands.Step] = []
    while len(left) > 1:
        a = left.pop(stream.randrange(len(left)))
        b = left.pop(stream.randrange(len(left)))
        op = stream.choice("+-*/")
        if op in "+*-" and b > a:
            a, b = b, a
        if op == "/" and (b == 0 or a % b):
            return None
        result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[op]
        if result > LARGEST:
            return None
        left.append(result)
        steps.append((a, op, b, result))
    return steps


def play_to_other_target(count: int, stream: random.Random, small_share: float) -> tuple[list[int], list[hands.Step]]:
    """Numbers 1..13 and a play on them whose target is 1..60 but not 24; targets below 13 are thinned to ``small_share``."""
    while True:
        values = stream.choices(range(1, 14), k=count)
        steps = random_play(values, stream)
        if steps is None:
            continue
        target = steps[-1][3]
        if target not in (0, hands.TARGET) and (target > 12 or stream.random() < small_share):
            return values, steps


def random_rule(stream: random.Random, hold_out: bool, drawn_share: float = 1.0) -> hands.Rule:
    """What J, Q, K count as: 10 by convention, or in ``drawn_share`` of the cases drawn from 1..13 (30 % one for all)."""
    if stream.random() >= drawn_share:
        return hands.TRAINING_RULE
    while True:
        rule = stream.choices(range(1, 14), k=3)
        if stream.random() < 0.3:
            rule = [rule[0]] * 3
        if not hold_out or tuple(rule) != hands.TEST_RULE:
            return rule[0], rule[1], rule[2]


@dataclass(frozen=True)
class CorpusConfig:
    """Shares of the rows of a pre-training batch, which sum to 1, and how they are drawn.

    ``small_share`` thins targets below 13, which random play favours; ``drawn_rules`` is the share of full documents
    whose card rule is drawn, the others state J = Q = K = 10.
    """

    full: float = 0.45
    make4: float = 0.25
    reading: float = 0.08
    make3: float = 0.07
    facts: float = 0.15
    retry: float = 0.0
    small_share: float = 0.4
    drawn_rules: float = 0.5
    row_tokens: int = 60


class Corpus:
    """The generic pre-training text as rows of token ids with a target mask; rows hold one full or several short documents."""

    def __init__(self, encoder: PhraseEncoder, config: CorpusConfig, seed: int) -> None:
        self.encode, self.config, self.seed = encoder, config, seed
        self.kinds = [self.full, self.make4, self.reading, self.make3, self.facts, self.retry]
        shares = np.array([config.full, config.make4, config.reading, config.make3, config.facts, config.retry])
        if abs(shares.sum() - 1) > 1e-6 or (shares < 0).any():
            raise ValueError(f"the corpus shares {shares.tolist()} must be non-negative and sum to 1")
        self.bounds = np.cumsum(shares)

    def batch(self, step: int, rows: int) -> SftBatch:
        """The batch of a step: ids, attention and target mask, each (rows, row_tokens)."""
        stream = python_random(self.seed, "corpus", step)
        kinds = np.searchsorted(self.bounds, (np.arange(rows) + stream.random()) / rows)
        made = [self.kinds[min(kind, len(self.kinds) - 1)](stream) for kind in kinds]
        limit = self.config.row_tokens if self.config.retry == 0 else 6 * self.config.row_tokens
        return pad_rows([(ids[:limit], mask[:limit]) for ids, mask in made], self.encode.pad)

    def _document(self, context: str, answer: str) -> Row:
        head, tail = self.encode(context), self.encode(answer)
        ids = [self.encode.bos, *head, *tail, self.encode.eos]
        return ids, [0] * (1 + len(head)) + [1] * (len(tail) + 1)

    def _pack(self, documents: list[Row]) -> Row:
        return [i for ids, _ in documents for i in ids], [m for _, mask in documents for m in mask]

    def deal(self, stream: random.Random):
        """(cards, rule, values, steps, target) of a play on a random hand under a random rule."""
        while True:
            rule = random_rule(stream, hold_out=True, drawn_share=self.config.drawn_rules)
            cards = hands.cards_of(stream.choices(range(1, 14), k=4))
            values = hands.card_values(cards, rule)
            steps = random_play(list(values), stream)
            if steps is None or steps[-1][3] in (0, hands.TARGET):
                continue
            if steps[-1][3] > 12 or stream.random() < self.config.small_share:
                return cards, rule, values, steps, steps[-1][3]

    def full(self, stream: random.Random) -> Row:
        """The task's own layout with another target: prompt, then cards, numbers, trace and formula."""
        cards, rule, values, steps, target = self.deal(stream)
        return self._document(prompts.prompt(cards, target, rule, trace=True), prompts.answer(cards, values, steps, target))

    def retry(self, stream: random.Random) -> Row:
        """A full document in which one to four wrong answers and their feedback stand before the right one."""
        cards, rule, values, steps, target = self.deal(stream)
        ids = [self.encode.bos, *self.encode(prompts.prompt(cards, target, rule, trace=True))]
        again = self.encode(prompts.feedback(cards, "no_solution"))
        for _ in range(stream.randint(1, 4)):
            wrong = random_play(list(values), stream)
            if wrong is not None and wrong[-1][3] != target:
                ids += [*self.encode(prompts.answer(cards, values, wrong, target)), self.encode.eos, *again]
        right = [*self.encode(prompts.answer(cards, values, steps, target)), self.encode.eos]
        return [*ids, *right], [0] * len(ids) + [1] * len(right)

    def _make(self, count: int, stream: random.Random) -> Row:
        values, steps = play_to_other_target(count, stream, self.config.small_share)
        numbers = prompts.COMMA.join(map(str, values))
        context = f"{prompts.TASK}{steps[-1][3]}{prompts.NUMBER}{numbers}{prompts.TRACE}"
        return self._document(context, f"{prompts.trace_text(values, steps)}{prompts.CLOSE}")

    def make4(self, stream: random.Random) -> Row:
        """Two documents: a target and four numbers, then the trace."""
        return self._pack([self._make(4, stream) for _ in range(2)])

    def make3(self, stream: random.Random) -> Row:
        """Three documents: a target and three numbers, then the trace."""
        return self._pack([self._make(3, stream) for _ in range(3)])

    def _reading(self, stream: random.Random) -> Row:
        rule = random_rule(stream, hold_out=False)
        cards = hands.cards_of(stream.choices(range(1, 14), k=12))
        stated = prompts.prompt(cards, 0, rule, trace=True).removeprefix(f"{prompts.TASK}0").removesuffix(prompts.REPLY_TRACE)
        numbers = prompts.COMMA.join(map(str, hands.card_values(cards, rule)))
        return self._document(f"{stated}{prompts.NUMBER}", f"{numbers}{prompts.CLOSE}")

    def reading(self, stream: random.Random) -> Row:
        """A card rule and twelve cards, then their numbers; and one document of `make3`."""
        return self._pack([self._reading(stream), self._make(3, stream)])

    def facts(self, stream: random.Random) -> Row:
        """Arithmetic facts `a op b=r;` with whole results 0..60; only the results are targets."""
        ids, mask = [self.encode.bos], [0]
        while len(ids) + 5 <= self.config.row_tokens:
            steps = random_play(stream.choices(range(1, 41), k=2), stream)
            if steps is not None:
                a, op, b, result = steps[0]
                ids += self.encode(f"{a}{op}{b}={result}{prompts.SEMICOLON}")
                mask += [0, 0, 0, 1, 0]
        return ids, mask


class WorkedAnswers:
    """Solutions of training hands under the training rule, to demonstrate.

    ``one``: each hand's simplest solution; ``diverse``: any of its solutions. Only solutions whose results are whole and
    not negative are shown, so that a trace needs no fractions; hands without one are left out.
    """

    def __init__(self, train: tuple[tuple[int, ...], ...], kind: str) -> None:
        rule = hands.TRAINING_RULE
        self.solutions = {
            hand: [s for s in hands.solve(hands.value_key(hand, rule)) if s.plain and max(r for *_, r in s.steps) <= LARGEST]
            for hand in train
        }
        self.hands = [hand for hand in train if self.solutions[hand]]
        self.kind = kind

    def draw(self, stream: random.Random, count: int) -> Iterator[tuple[list[str], tuple[int, ...], tuple[hands.Step, ...]]]:
        """(cards in a random order, their numbers, the solution's steps) of ``count`` hands drawn at random."""
        for hand in stream.choices(self.hands, k=count):
            cards = list(hands.cards_of(hand))
            stream.shuffle(cards)
            shown = self.solutions[hand]
            solution = shown[0] if self.kind == "one" else stream.choice(shown)
            yield cards, hands.card_values(cards, hands.TRAINING_RULE), solution.steps
