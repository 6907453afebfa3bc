"""Texts and pictures of 7-11-vl: tokenizer, the pre-training corpus, demonstrations and tasks.

Pre-training mixes text and pictures from its first step: the decoder learns the game's arithmetic from text, the whole
model learns to read cards. Its pictures have every suit in black and in cool inks; red and the inks beside it are never
seen before the test. As in the text variant no document has the target 24, and no full document states the rule
J, Q, K = 11, 12, 13.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from common.cards import hands, prompts
from common.cards.corpus import Corpus, CorpusConfig, Row, WorkedAnswers, vocabulary
from common.seeding import python_random
from common.sft import SeenBatch, pad_rows
from common.tokenizers import PhraseEncoder, build_phrase_tokenizer, encode_prompt
from common.vision import IMAGE, expand, image_tokens, stack
from experiments.exp_7_11_vl_general_points import drawing
from experiments.exp_7_11_vl_general_points.env import AGAIN

Hands = tuple[tuple[int, ...], ...]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The text variant's vocabulary, the place of an image, and what a further trial says."""
    return build_phrase_tokenizer([*vocabulary(), IMAGE, AGAIN])


class WrittenCorpus(Corpus):
    """Text laid out like pictures: a full document names, in the place of each patch, the card that would lie there.

    So the decoder learns from text where to look a card up, and the encoder has something to be translated into.
    """

    def __init__(self, encoder: PhraseEncoder, config: CorpusConfig, seed: int, image_tokens: int) -> None:
        super().__init__(encoder, config, seed)
        side = math.isqrt(image_tokens)
        # Two cards a row, two rows: patch -> place of its card.
        self.places = [2 * (2 * (patch // side) // side) + 2 * (patch % side) // side for patch in range(side * side)]

    def full(self, stream: Any) -> Row:
        cards, rule, values, steps, target = self.deal(stream)
        tail = self.encode(prompts.answer(cards, values, steps, target))
        context = [self.encode.bos, *self.encode(prompts.framed(IMAGE, target, rule, True))]
        place = context.index(self.encode.ids[IMAGE])
        named = [self.encode.ids[f'"{cards[card]}"'] for card in self.places]
        ids = [*context[:place], *named, *context[place + 1 :]]
        return [*ids, *tail, self.encode.eos], [0] * len(ids) + [1] * (len(tail) + 1)


@dataclass(frozen=True)
class PictureConfig:
    """The share of pictures in pre-training, and what they show. The rest of the batches is text.

    ``reading``: share of the batches whose rows stop behind the cards, ``reading_rows`` of them; ``full``: share of those
    whose rows hold a whole answer, ``full_rows`` of them. ``inks``: those of the pictures, never red; ``black``: share of
    the cards in black, the others are each in one of the inks.
    """

    reading: float = 0.22
    reading_rows: int = 48
    full: float = 0.13
    full_rows: int = 16
    inks: tuple[str, ...] = drawing.COOL
    black: float = 0.5


class PretrainingCorpus:
    """Text batches, and batches of pictures of random cards with what they show: functions of (configuration, seed, step)."""

    def __init__(self, encoder: PhraseEncoder, image_tokens: int, written: Corpus, config: PictureConfig, seed: int) -> None:
        self.encode, self.image_tokens, self.written = encoder, image_tokens, written
        self.config, self.seed = config, seed

    def batch(self, step: int, rows: int) -> SeenBatch:
        """The batch of a step: ``rows`` rows of text, or rows with images."""
        stream, config = python_random(self.seed, "pretraining", step), self.config
        turn = stream.random()
        if turn >= config.reading + config.full:
            return *self.written.batch(step, rows), None
        kind, count = (self.reading, config.reading_rows) if turn < config.reading else (self.full, config.full_rows)
        made = [kind(stream) for _ in range(count)]
        images = stack([self.picture(cards, stream) for cards, _ in made])
        return *pad_rows([row for _, row in made], self.encode.pad), images

    def picture(self, cards: Sequence[str], stream: Any) -> Any:
        """The cards in random suits, each in black or in one ink of its own."""
        suits = tuple(stream.choices(hands.SUITS, k=4))
        inks = ["black" if stream.random() < self.config.black else stream.choice(self.config.inks) for _ in cards]
        return drawing.draw(tuple(cards), suits, tuple(inks), stream.getrandbits(31))

    def reading(self, stream: Any) -> tuple[Sequence[str], Row]:
        """A picture without a task, then its cards."""
        cards = hands.cards_of(stream.choices(range(1, 14), k=4))
        return cards, self._row(f"{prompts.SAME}{IMAGE}{prompts.REPLY_TRACE}", f"{prompts.OPEN}{prompts.quoted(cards)}")

    def full(self, stream: Any) -> tuple[Sequence[str], Row]:
        """The task's own layout with another target, its cards as a picture."""
        cards, rule, values, steps, target = self.written.deal(stream)
        context = prompts.framed(IMAGE, target, rule, True)
        return cards, self._row(context, prompts.answer(cards, values, steps, target), [self.encode.eos])

    def _row(self, context: str, answer: str, end: Sequence[int] = ()) -> Row:
        head = expand([self.encode.bos, *self.encode(context)], self.encode.ids[IMAGE], self.image_tokens)
        tail = [*self.encode(answer), *end]
        return [*head, *tail], [0] * len(head) + [1] * len(tail)


def _task(hand: tuple[int, ...], rule: hands.Rule, look: str, seed: int, index: int) -> dict:
    cards = hands.shuffled_cards(hand, seed, index)
    stream = python_random(seed, "look", index, *cards)
    suits = stream.choices(drawing.SUITS_OF[look], k=4)
    return {"cards": list(cards), "face_values": list(rule), "suits": suits, "drawing": stream.getrandbits(31)}


def evaluation_tasks(chosen: Hands, rule: hands.Rule, look: str, seed: int, orders: int) -> list[dict]:
    """Every hand in ``orders`` card orders and pictures, hand-major. The two looks differ in suit and ink alone."""
    return [_task(hand, rule, look, seed, order) for hand in chosen for order in range(orders)]


def training_tasks(train: Hands, seed: int, step: int, count: int) -> list[dict]:
    """The tasks of an RL step: training rule, black suits; a longer list begins with the shorter one."""
    stream = python_random(seed, "tasks", step)
    order = stream.sample(range(len(train)), len(train))
    chosen = [train[order[i % len(train)]] for i in range(count)]
    return [_task(hand, hands.TRAINING_RULE, "black", seed, step * 100_000 + i) for i, hand in enumerate(chosen)]


def demonstration_batches(
    model: Any, tokenizer: Any, answers: WorkedAnswers, trace: bool, seed: int, count: int
) -> Callable[[int], SeenBatch]:
    """step -> batch of worked answers to pictures of training hands in black suits, under the training rule."""
    fast = PhraseEncoder(tokenizer) if len(tokenizer) < 1000 else None
    prompt = prompts.framed(IMAGE, hands.TARGET, hands.TRAINING_RULE, trace)
    head = [fast.bos, *fast(prompt)] if fast else encode_prompt(tokenizer, prompt)
    head = expand(head, model.config.image_token_id, image_tokens(model))

    def batch(step: int) -> SeenBatch:
        rows, images = [], []
        stream = python_random(seed, "demonstrations", step)
        for cards, values, steps in answers.draw(stream, count):
            text = prompts.answer(cards, values, steps, hands.TARGET, trace) + tokenizer.eos_token
            tail = fast(text) if fast else tokenizer(text, add_special_tokens=False)["input_ids"]
            rows.append(([*head, *tail], [0] * len(head) + [1] * len(tail)))
            suits = tuple(stream.choices(drawing.SUITS_OF["black"], k=4))
            images.append(drawing.draw(tuple(cards), suits, ("black",) * 4, stream.getrandbits(31)))
        return *pad_rows(rows, tokenizer.pad_token_id), stack(images)

    return batch
