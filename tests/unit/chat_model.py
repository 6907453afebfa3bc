"""A tiny model folder that stands in for a pre-trained one: a byte-level tokenizer with a chat template, random weights."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common.checkpoints import save_model
from common.models import DecoderConfig, build_decoder

BEGIN, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
TEMPLATE = (
    "{% for m in messages %}" + BEGIN + "{{ m.role }}\n{{ m.content }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + BEGIN + "assistant\n{% endif %}"
)  # fmt: skip


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the three special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, additional_special_tokens=[BEGIN], chat_template=TEMPLATE,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def chat_folder(folder: Path, seed: int = 0) -> Path:
    """The folder of such a model, width 16."""
    tokenizer = chat_tokenizer()
    shape = DecoderConfig(hidden=16, layers=1, heads=2, kv_heads=2, feedforward=24, max_length=2048)
    save_model(build_decoder(shape, tokenizer, seed), tokenizer, folder)
    return folder
