"""Tokenizers for tiny models, and the one way in which any model's prompt and feedback turns become token ids.

A tiny model reads the very text a large one reads: its tokenizer holds the boilerplate phrases of a task as single
tokens, so that a prompt of 700 characters costs about 15 tokens.
"""

import re
from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
# User text as it is, an assistant's answer closed by <eos>: the whole chat format of a tiny model.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def build_phrase_tokenizer(phrases: Sequence[str]) -> PreTrainedTokenizerFast:
    """A Hugging Face tokenizer whose vocabulary is exactly ``phrases`` (longest match first) and four special tokens.

    Token ids follow the order of ``phrases`` after <pad>, <bos>, <eos>, <unk>. Raises ValueError on a duplicate.
    """
    specials = [PAD, BOS, EOS, UNKNOWN]
    vocabulary = {token: index for index, token in enumerate([*specials, *phrases])}
    if len(vocabulary) != len(specials) + len(phrases):
        raise ValueError("the phrases hold a duplicate or a special token; give each phrase once")
    longest_first = sorted(phrases, key=lambda phrase: (-len(phrase), phrase))
    pattern = "|".join(re.escape(phrase) for phrase in longest_first)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


class PhraseEncoder:
    """Text -> ids as a phrase tokenizer does it, by one compiled pattern: several times its speed on short texts.

    Characters outside the vocabulary are skipped; texts of a corpus hold none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.ids = tokenizer.get_vocab()
        longest_first = sorted(self.ids, key=lambda phrase: (-len(phrase), phrase))
        self.pattern = re.compile("|".join(re.escape(phrase) for phrase in longest_first))
        self.bos, self.eos, self.pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id

    def __call__(self, text: str) -> list[int]:
        return [self.ids[piece] for piece in self.pattern.findall(text)]

    def row(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """(ids, mask) of a prompt and the answer to it with its end token, which are the targets (mask 1)."""
        head, tail = [self.bos, *self(prompt)], [*self(answer), self.eos]
        return head + tail, [0] * len(head) + [1] * len(tail)


def number_tokens(tokenizer: PreTrainedTokenizerBase, prefixes: Sequence[str], numbers: Iterable[int]) -> dict[int, int]:
    """Token id -> integer for every token that writes a number behind one of the prefixes ("" for the bare number).

    KeyError where one of them is not a token. For the Fourier start of the embeddings (common.models.build_decoder).
    """
    vocabulary = tokenizer.get_vocab()
    return {vocabulary[f"{prefix}{number}"]: number for number in numbers for prefix in prefixes}


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _render(tokenizer: PreTrainedTokenizerBase, turns: Sequence[tuple[str, str]]) -> str:
    """The chat template's text of (role, content) turns, up to where the next answer begins."""
    messages = [{"role": role, "content": content} for role, content in turns]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def encode_prompt(tokenizer: PreTrainedTokenizerBase, observation: str) -> list[int]:
    """Token ids of a first user turn, up to where the answer begins; special tokens occur once, as the template writes them.

    A tokenizer without a chat template gets the plain text with the tokenizer's own special tokens, less a final end token.
    """
    if tokenizer.chat_template is None:
        ids = tokenizer(observation)["input_ids"]
        return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids
    return _encode(tokenizer, _render(tokenizer, [("user", observation)]))


def encode_feedback(tokenizer: PreTrainedTokenizerBase, observation: str, finished: bool) -> list[int]:
    """Token ids from the end of an assistant's answer to the start of its next one, with ``observation`` as the user turn.

    They are what the chat template writes between the two, so that the pieces joined equal the full rendering. The stop
    token leads only when the policy did not write it itself (``finished`` false: the answer was cut off by the limit).
    """
    if tokenizer.chat_template is None:
        return ([] if finished else [tokenizer.eos_token_id]) + _encode(tokenizer, observation)
    sentinel = "\x02answer\x03"
    text = _render(tokenizer, [("user", "q"), ("assistant", sentinel), ("user", observation)])
    if text.count(sentinel) != 1:
        raise ValueError(
            "the chat template drops or repeats an earlier assistant turn; many-turn episodes need one that keeps it"
        )
    ids = _encode(tokenizer, text.split(sentinel)[1])
    starts_with_stop = ids[:1] == [tokenizer.eos_token_id]
    if finished:
        return ids[1:] if starts_with_stop else ids
    return ids if starts_with_stop else [tokenizer.eos_token_id, *ids]
