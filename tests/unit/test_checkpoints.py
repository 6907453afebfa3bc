"""Training states that survive a kill inside save (D09), models and adapters that load back whole (A01, A02, A03)."""

import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from common.checkpoints import load_model, load_state, previous_path, save_model, save_state

FORK = multiprocessing.get_context("fork")
ADAPTER = "adapter_model.safetensors"
IDS_BT = torch.tensor([[1, 2, 3, 4, 5]])


def state(step: int) -> dict:
    return {"step": step, "weights": torch.full((3,), float(step)), "schedule": {"last": (step, 0.5, None, True)}}


def save_half_and_die(path: Path) -> None:
    def half(value: object, handle) -> None:
        handle.write(b"PK\x03\x04half")
        handle.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half
    save_state(path, state(2))


def test_a_state_comes_back_as_it_was(tmp_path):
    path = tmp_path / "deep" / "state.pt"
    assert load_state(path) is None
    save_state(path, state(1))
    save_state(path, state(2))
    loaded = load_state(path)
    assert loaded["step"] == 2 and loaded["schedule"] == {"last": (2, 0.5, None, True)}
    assert loaded["weights"].tolist() == [2.0, 2.0, 2.0]
    assert load_state(previous_path(path))["step"] == 1
    assert sorted(file.name for file in path.parent.iterdir()) == ["state.previous.pt", "state.pt"]


def test_d09_killed_inside_save_resumes_from_the_newest_complete_state(tmp_path):
    path = tmp_path / "state.pt"
    save_state(path, state(1))
    process = FORK.Process(target=save_half_and_die, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.glob("*.partial"))) == 1
    with pytest.warns(UserWarning, match="never finished"):
        assert load_state(path)["step"] == 1
    assert list(tmp_path.glob("*.partial")) == []


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_d09_a_broken_newest_state_is_skipped_and_named(tmp_path, damage):
    path = tmp_path / "state.pt"
    save_state(path, state(1))
    save_state(path, state(2))
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "other": b"not a checkpoint" * 50}[damage])
    with pytest.warns(UserWarning, match=r"broken checkpoint state\.pt"):
        assert load_state(path)["step"] == 1
    previous_path(path).write_bytes(b"")
    with pytest.warns(UserWarning, match="broken checkpoint"):
        assert load_state(path) is None


def test_a_state_that_could_not_be_read_back_is_refused_before_it_is_written(tmp_path):
    path = tmp_path / "state.pt"
    save_state(path, state(1))
    with pytest.raises(TypeError, match=r"state\['seen'\]\[1\] is a set"):
        save_state(path, {"seen": [1, {2}]})
    assert load_state(path)["step"] == 1


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1} | {f"w{index}": index for index in range(2, 16)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def base_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=32,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture
def adapter(tmp_path):
    """A base folder and an adapted model whose adapter is not the identity."""
    save_model(base_model(), tokenizer(), tmp_path / "base")
    model, _ = load_model(tmp_path / "base")
    model = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", lora_dropout=0.0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS_BT).logits


def test_a_full_model_and_its_tokenizer_come_back(tmp_path):
    model = base_model()
    save_model(model, tokenizer(), tmp_path / "model")
    save_model(model, tokenizer(), tmp_path / "model")  # a rerun replaces the folder
    loaded, loaded_tokenizer = load_model(tmp_path / "model", "cpu", "float32")
    assert torch.equal(logits(loaded), logits(model))
    assert loaded_tokenizer.encode("w3 w7") == [3, 7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a01_merging_gives_the_textbook_weights():
    layer = torch.nn.Sequential()
    layer.add_module("proj", torch.nn.Linear(2, 2, bias=False))
    model = get_peft_model(layer, LoraConfig(r=1, lora_alpha=2, target_modules=["proj"]))
    with torch.no_grad():
        model.base_model.model.proj.base_layer.weight.copy_(torch.eye(2))
        model.base_model.model.proj.lora_A.default.weight.copy_(torch.tensor([[1.0, 2.0]]))
        model.base_model.model.proj.lora_B.default.weight.copy_(torch.tensor([[1.0], [3.0]]))
    merged = model.merge_and_unload()
    assert merged.proj.weight.tolist() == [[3.0, 4.0], [6.0, 13.0]]
    assert merged(torch.ones(2)).tolist() == [7.0, 19.0]


def test_a01_a02_an_adapter_comes_back_on_a_fresh_base(tmp_path, adapter):
    save_model(adapter, tokenizer(), tmp_path / "adapter")
    loaded, _ = load_model(tmp_path / "adapter")
    assert torch.allclose(logits(loaded), logits(adapter), atol=1e-6)
    base, _ = load_model(tmp_path / "base")
    assert (logits(loaded) - logits(base)).abs().max() > 0.01
    shutil.move(tmp_path / "base", tmp_path / "moved")
    moved, _ = load_model(tmp_path / "adapter", base=tmp_path / "moved")
    assert torch.allclose(logits(moved), logits(adapter), atol=1e-6)


def damage_prefix(tensors: dict) -> dict:
    return {name.replace("base_model.model.", "base_model."): tensor for name, tensor in tensors.items()}


def damage_zero_size(tensors: dict) -> dict:
    return {name: tensor[:0].clone() for name, tensor in tensors.items()}


def damage_missing(tensors: dict) -> dict:
    return dict(sorted(tensors.items())[1:])


@pytest.mark.parametrize("damage", [damage_prefix, damage_zero_size, damage_missing])
def test_a01_a02_an_adapter_that_does_not_fit_is_an_error(tmp_path, adapter, damage):
    save_model(adapter, tokenizer(), tmp_path / "adapter")
    file = tmp_path / "adapter" / ADAPTER
    save_file(damage(load_file(file)), file, metadata={"format": "pt"})
    with pytest.raises((ValueError, RuntimeError), match=r"does not fit its model|size mismatch"):
        load_model(tmp_path / "adapter")


def test_a03_a_folder_holds_either_an_adapter_or_full_weights(tmp_path, adapter):
    save_model(adapter, tokenizer(), tmp_path / "adapter")
    wanted = logits(adapter)
    merged = adapter.merge_and_unload()
    save_model(merged, tokenizer(), tmp_path / "merged")
    assert not list((tmp_path / "merged").glob("adapter*"))
    loaded, _ = load_model(tmp_path / "merged")
    assert torch.allclose(logits(loaded), wanted, atol=1e-5)
    shutil.copy(tmp_path / "merged" / "model.safetensors", tmp_path / "adapter" / "model.safetensors")
    with pytest.raises(ValueError, match=r"adapter and full weights \(model\.safetensors\)"):
        load_model(tmp_path / "adapter")


def test_a03_a_merged_adapter_is_not_saved_as_an_adapter(tmp_path, adapter):
    adapter.merge_adapter()
    with pytest.raises(ValueError, match="merged into its base"):
        save_model(adapter, tokenizer(), tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
