"""Tokenizers: phrases as single tokens, and prompts and feedback as the chat template writes them."""

import pytest
from transformers import AutoTokenizer

from common.tokenizers import build_phrase_tokenizer, encode_feedback, encode_prompt

WORDS = [
    "Add ",
    "12",
    "1",
    "2",
    "+",
    "3",
    ". Wrong.",
    " ",
    "<|im_end|>",
    "\n",
    "<|im_start|>user\n",
    "<|im_start|>assistant\n",
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def tokenizer():
    return build_phrase_tokenizer(WORDS)


@pytest.fixture
def chat(tokenizer):
    tokenizer.chat_template = CHATML
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def test_longest_phrase_wins_and_text_round_trips(tokenizer):
    ids = tokenizer("Add 12+3")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["Add ", "12", "+", "3"]
    assert tokenizer.decode(ids) == "Add 12+3"


def test_text_outside_the_vocabulary_is_marked_not_dropped(tokenizer):
    assert tokenizer("1?2")["input_ids"] == [
        *tokenizer("1")["input_ids"],
        tokenizer.unk_token_id,
        *tokenizer("2")["input_ids"],
    ]


def test_duplicate_phrases_are_refused():
    with pytest.raises(ValueError, match="duplicate"):
        build_phrase_tokenizer(["a", "a"])


def test_saved_folder_loads_with_plain_transformers(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert encode_prompt(again, "Add 12+3") == encode_prompt(tokenizer, "Add 12+3")
    assert again.decode(again("Add 12+3")["input_ids"]) == "Add 12+3"


def test_T01_exactly_one_start_token(tokenizer):
    ids = encode_prompt(tokenizer, "Add 12")
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    tokenizer.chat_template = None
    assert encode_prompt(tokenizer, "Add 12").count(tokenizer.bos_token_id) <= 1


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_T08_pieces_joined_equal_the_full_rendering(chat, turns):
    messages = [{"role": "user", "content": "Add 1"}]
    pieces = encode_prompt(chat, "Add 1")
    for _ in range(turns):
        messages += [{"role": "assistant", "content": "3"}, {"role": "user", "content": "2"}]
        pieces += [*chat("3")["input_ids"], chat.eos_token_id, *encode_feedback(chat, "2", finished=True)]
    full = chat.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert pieces == chat(full)["input_ids"]


def test_feedback_closes_an_answer_that_was_cut_off(tokenizer, chat):
    finished, cut = encode_feedback(chat, "2", True), encode_feedback(chat, "2", False)
    assert cut == [chat.eos_token_id, *finished]


def test_T09_a_template_that_drops_earlier_answers_is_refused(tokenizer):
    tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(ValueError, match="keeps it"):
        encode_feedback(tokenizer, "2", True)
