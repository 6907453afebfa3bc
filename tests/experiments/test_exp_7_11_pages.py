"""The README blocks of 7-11 beside the report, and the demonstration whose record one of them shows."""

import json
import shutil
from pathlib import Path

import pytest

from common.checkpoints import save_model
from common.config import compose
from common.files import strict_json, write_json
from common.models import DecoderConfig, build_decoder
from common.records import read_json, read_jsonl
from experiments.exp_7_11_general_points import data, demo, pages
from experiments.exp_7_11_general_points.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


def record(arm, seed, split, value, items, **changes):
    row = {"experiment": "7-11", "scale": "laptop", "variant": None, "arm": arm, "seed": seed, "split": split}
    return {**row, "metric": "success", "value": value, "n": len(items), "step": 100, "final": True, "items": items, **changes}


def write_run(folder, rates, cpu_s):
    """Records of GRPO alone: seed -> success under the unseen rule."""
    folder.mkdir(parents=True)
    rows = [record("grpo", seed, "ood", rate, [rate] * 4) for seed, rate in rates.items()]
    rows.append(record("grpo", 100, "ood", 0.5, [], metric="kl_start"))
    rows.append(record("grpo", 100, "ood", 0.9, [0.9] * 4, step=50, final=False))
    (folder / "records.jsonl").write_text("".join(strict_json(row) + "\n" for row in rows))
    cells = [{"arm": "grpo", "seed": seed, "cpu_s": cpu_s} for seed in rates]
    kept = {"command": "python -m x backend=trl", "packages": {"trl": "1.16.0", "transformers": "5.10.4"}, "cells": cells}
    write_json(folder / "provenance.json", {**kept, "configuration": {"long": "text"}})


def test_both_backends_are_compared_on_the_seeds_that_both_have(tmp_path):
    results = tmp_path / "results"
    write_run(results / "7-11" / "laptop", {100: 0.10, 101: 0.20, 102: 0.30, 103: 0.90}, 80.0)
    write_run(tmp_path / "run", {100: 0.12, 101: 0.21, 102: 0.33}, 240.0)
    pages.keep(tmp_path / "run", results / pages.TRL_FOLDER)
    kept = read_jsonl(results / pages.TRL_FOLDER / "records.jsonl")
    assert [row["value"] for row in kept] == [0.12, 0.21, 0.33]
    assert "configuration" not in read_json(results / pages.TRL_FOLDER / "provenance.json")
    text = pages.backends_text(results)
    assert text.startswith("Made by `python -m x backend=trl` with TRL 1.16.0, transformers 5.10.4.")
    row = [cell.strip() for cell in text.splitlines()[-1].split("|")[1:-1]]
    assert row[:2] == ["GRPO", "unseen rule"]
    assert row[2].startswith("20.0 % [") and row[3].startswith("22.0 % [")
    assert row[4].startswith("+2.0 points [")
    assert row[5:] == ["yes", "3 seeds", "80", "240"]


def test_a_gap_that_leaves_the_interval_is_said(tmp_path):
    results = tmp_path / "results"
    write_run(results / "7-11" / "laptop", {100: 0.10, 101: 0.11, 102: 0.12}, 80.0)
    write_run(tmp_path / "run", {100: 0.40, 101: 0.41, 102: 0.42}, 80.0)
    pages.keep(tmp_path / "run", results / pages.TRL_FOLDER)
    assert pages.backends_text(results).splitlines()[-1].split("|")[6].strip() == "no"


def test_without_records_the_blocks_say_so(tmp_path):
    assert pages.backends_text(tmp_path) == "No comparison yet."
    assert pages.smollm2_text(tmp_path) == "Not measured yet."
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "records.jsonl").write_text("")
    with pytest.raises(ValueError, match="no final success records"):
        pages.keep(tmp_path / "run", tmp_path / "kept")


def test_the_readme_holds_what_the_committed_records_say():
    ((readme, text),) = pages.pages(ROOT, ROOT / "results").items()
    for begin, end in (pages.BACKENDS_BLOCK, pages.SMOLLM2_BLOCK):
        assert readme.read_text().split(begin)[1].split(end)[0] == text.split(begin)[1].split(end)[0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny pre-trained model as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = data.build_tokenizer()
    shape = DecoderConfig(hidden=32, layers=2, heads=2, kv_heads=1, feedforward=64)
    save_model(build_decoder(shape, tokenizer, 0), tokenizer, folder)
    return folder


def test_the_demonstrations_adapter_goes_on_in_plain_peft(tiny, tmp_path, monkeypatch):
    """LoRA SFT and LoRA GRPO on a folder, then the adapter in a fresh process without this suite."""
    monkeypatch.setattr(demo, "STEPS", 2)
    settings = compose("7-11", Settings, [*demo.DEMO, f"model_path={tiny}", "lora.sft_rank=4", "lora.rl_rank=4"])
    row = demo.measured("SFT", lambda: demo.sft(settings, tmp_path))
    assert row["steps"] == 2 and float(row["memory_gib"]) > 0.1 and row["first"].startswith("loss ")
    row = demo.grpo(settings, tmp_path)
    assert row["steps"] == 2 and row["first"].startswith("reward ")
    assert json.loads((tmp_path / "grpo" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tmp_path / "start"
    )
    assert demo.plain_peft(settings, tmp_path)["steps"] == 2
    shutil.copy(tmp_path / "grpo" / "adapter_model.safetensors", tmp_path / "sft" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="does not go on in plain PEFT"):  # another adapter's weights under its name
        demo.plain_peft(settings, tmp_path)


def test_the_demonstration_names_a_wrong_key(capsys):
    assert demo.main(["model_path=smollm2", "lorra.sft_rank=4"]) == 2
    assert "lorra.sft_rank=4: unknown key" in capsys.readouterr().err
