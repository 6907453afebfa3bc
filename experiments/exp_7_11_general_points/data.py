"""Texts of 7-11: the tiny tokenizer, demonstrations and evaluation tasks; the corpus stands in common/cards/corpus.py."""

from transformers import PreTrainedTokenizerFast

from common.cards import hands, prompts
from common.cards.corpus import Row, WorkedAnswers, vocabulary
from common.seeding import python_random
from common.tokenizers import PhraseEncoder, build_phrase_tokenizer, encode_prompt


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per phrase, card, number, operator and bracket."""
    return build_phrase_tokenizer(vocabulary())


def _task(hand: tuple[int, ...], rule: hands.Rule, seed: int, index: int) -> dict:
    return {"cards": list(hands.shuffled_cards(hand, seed, index)), "face_values": list(rule)}


def evaluation_tasks(chosen: tuple[tuple[int, ...], ...], rule: hands.Rule, seed: int, orders: int) -> list[dict]:
    """Every hand in ``orders`` card orders, hand-major: options for the environment's reset."""
    return [_task(hand, rule, seed, order) for hand in chosen for order in range(orders)]


def training_tasks(train: tuple[tuple[int, ...], ...], seed: int, step: int, count: int) -> list[dict]:
    """The tasks of an RL step under the training rule; a longer list begins with the shorter one."""
    stream = python_random(seed, "tasks", step)
    order = stream.sample(range(len(train)), len(train))
    chosen = [train[order[i % len(train)]] for i in range(count)]
    return [_task(hand, hands.TRAINING_RULE, seed, step * 100_000 + i) for i, hand in enumerate(chosen)]


class Demonstrations:
    """Worked answers (`one` or `diverse`, see WorkedAnswers) as rows of token ids with the answer as target."""

    def __init__(self, train: tuple[tuple[int, ...], ...], encode, kind: str, trace: bool, end: str) -> None:
        self.answers = WorkedAnswers(train, kind)
        self.encode, self.trace, self.end = encode, trace, end

    def rows(self, seed: int, step: int, count: int) -> list[Row]:
        """``count`` demonstrations of a step: hands drawn at random, in a random card order."""
        made = []
        for cards, values, steps in self.answers.draw(python_random(seed, "demonstrations", step), count):
            prompt = prompts.prompt(cards, hands.TARGET, hands.TRAINING_RULE, self.trace)
            answer = prompts.answer(cards, values, steps, hands.TARGET, self.trace)
            made.append(self.encode(prompt, answer + self.end))
        return made


def demonstration_encoder(tokenizer):
    """(prompt, answer with its end token) -> (ids, mask), the two parts encoded apart so that no token spans the seam."""
    fast = PhraseEncoder(tokenizer) if len(tokenizer) < 1000 else None

    def encode(prompt: str, answer: str) -> Row:
        head = [fast.bos, *fast(prompt)] if fast else encode_prompt(tokenizer, prompt)
        tail = fast(answer) if fast else tokenizer(answer, add_special_tokens=False)["input_ids"]
        return [*head, *tail], [0] * len(head) + [1] * len(tail)

    return encode
