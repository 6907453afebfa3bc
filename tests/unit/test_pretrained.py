"""Pre-trained models in the place of tiny ones: texts as the chat template writes them, a stage with a merged adapter."""

import torch

from common.checkpoints import load_model
from common.lora import LoraSettings
from common.pretrained import ChatEncoder, TinyEncoder, encoder_of, is_tiny, tuned
from common.sft import SftConfig, pad_rows
from common.tokenizers import build_phrase_tokenizer
from tests.unit.chat_model import chat_folder, chat_tokenizer


def test_the_tokenizer_chooses_the_encoder():
    tiny, chat = build_phrase_tokenizer(["a", "b"]), chat_tokenizer()
    assert is_tiny(tiny) and isinstance(encoder_of(tiny), TinyEncoder)
    assert not is_tiny(chat) and isinstance(encoder_of(chat), ChatEncoder)


def test_a_tiny_prompt_begins_with_bos_and_a_reply_does_not():
    encode = encoder_of(build_phrase_tokenizer(["a", "b"]))
    assert encode.start("ab") == [1, 4, 5] and encode.reply("ab") == encode("ab") == [4, 5]
    assert encode.row("a", "b") == ([1, 4, 5, 2], [0, 0, 1, 1])


def test_pieces_of_a_conversation_are_what_the_chat_template_writes():
    tokenizer = chat_tokenizer()
    encode = encoder_of(tokenizer)
    ids, mask = encode.row("at 1 to 4", "c")
    turns = [("user", "at 1 to 4"), ("assistant", "c"), ("user", "at 4 to 9")]
    whole = tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in turns], add_generation_prompt=True, tokenize=False
    )
    joined = [*ids, *encode.reply("at 4 to 9")]
    assert joined == tokenizer(whole, add_special_tokens=False)["input_ids"]
    written = [token for token, own in zip(ids, mask, strict=True) if own]
    assert tokenizer.decode(written) == "c<|im_end|>" and encode.eos == written[-1] != encode.pad


def test_a_tuned_stage_holds_plain_weights_that_moved_and_is_found_again(tmp_path):
    source = chat_folder(tmp_path / "source")
    calls = []

    def batches(tokenizer):
        calls.append(1)
        return lambda step: pad_rows([encoder_of(tokenizer).row("at 1 to 4", "c")], tokenizer.pad_token_id)

    def build(lora):
        return tuned(
            "start", str(source), experiment="test", runs_dir=tmp_path, seed=0, config=SftConfig(lr=1e-3, batch_size=1),
            steps=3, lora=lora, device="cpu", dtype="float32", batches=batches, key="k", modules=["common.sft"],
        )  # fmt: skip

    folder = build(LoraSettings(enabled=True, sft_rank=2))
    assert build(LoraSettings(enabled=True, sft_rank=2)) == folder and len(calls) == 1
    assert build(LoraSettings(enabled=False)) != folder and len(calls) == 2
    assert not (folder / "model/adapter_config.json").exists()
    (before, _), (after, tokenizer) = load_model(source), load_model(folder / "model")
    moved = {n for (n, p), q in zip(before.named_parameters(), after.parameters(), strict=True) if not torch.equal(p, q)}
    assert "model.layers.0.mlp.up_proj.weight" in moved and "model.embed_tokens.weight" not in moved
    assert not is_tiny(tokenizer)
