"""Training states and models on disk: written aside and renamed, checked when saved and when loaded.

transformers and peft are imported by the functions that need them: loading a state must not cost their seconds.
"""

import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from common.files import fsync_folder, write_atomic

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ADAPTER_FILE = "adapter_model.safetensors"
# What torch raises for a file that was cut short, emptied or flipped.
BROKEN_FILE = (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError)


def check_state(value: Any, where: str = "state") -> None:
    """TypeError naming the entry if torch's safe loader (weights_only) could not read it back."""
    if isinstance(value, dict):
        for key, entry in value.items():
            check_state(entry, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            check_state(entry, f"{where}[{index}]")
    elif not isinstance(value, torch.Tensor) and type(value) not in (int, float, str, bool, type(None)):
        raise TypeError(f"{where} is a {type(value).__name__}; a state holds tensors, numbers, strings, dicts and lists.")


def previous_path(path: Path) -> Path:
    """Where the state before the newest one is kept."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Save a training state so that a kill at any moment leaves a complete one; the one before is kept beside it.

    Log everything of a step before saving the state of that step: `RunLog.resume(step)` drops what lies beyond it.
    """
    path = Path(path)
    check_state(state)
    if path.exists():
        aside = path.with_name(f"{path.name}.link")
        aside.unlink(missing_ok=True)
        os.link(path, aside)
        os.replace(aside, previous_path(path))
    write_atomic(path, lambda handle: torch.save(state, handle))


def load_state(path: Path) -> dict[str, Any] | None:
    """The newest complete state, or None if there is none. A broken or unfinished file is skipped with a warning."""
    path = Path(path)
    for leftover in sorted(path.parent.glob(f"{path.name}.*.partial")):
        leftover.unlink()
        warnings.warn(f"Skipped {leftover.name}: its save was never finished.", stacklevel=2)
    for candidate in (path, previous_path(path)):
        if not candidate.exists():
            continue
        try:
            return torch.load(candidate, map_location="cpu", weights_only=True)
        except BROKEN_FILE as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            warnings.warn(f"Skipped the broken checkpoint {candidate.name} ({reason}).", stacklevel=2)
    return None


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a safetensors file."""
    with safe_open(file, framework="pt") as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118 (no mapping)


def check_adapter_file(folder: Path, model: "PeftModel") -> None:
    """ValueError unless the adapter file holds exactly the tensors, in their shapes, that the live adapter has."""
    from peft import get_peft_model_state_dict

    stored = tensor_shapes(folder / ADAPTER_FILE)
    wanted = {name: tuple(tensor.shape) for name, tensor in get_peft_model_state_dict(model).items()}
    if stored != wanted or not wanted or any(0 in shape for shape in stored.values()):
        missing, extra = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
        changed = sorted(name for name in wanted.keys() & stored.keys() if wanted[name] != stored[name])
        raise ValueError(
            f"The adapter in {folder} does not fit its model: {len(stored)} tensors stored, {len(wanted)} wanted; "
            f"missing {missing[:3]}, unknown {extra[:3]}, other shape {changed[:3]}."
        )


def check_one_kind(folder: Path) -> None:
    """ValueError if a folder holds an adapter and full weights at once: loaders would apply the adapter twice."""
    full = sorted(file.name for file in folder.glob("*.safetensors") if file.name != ADAPTER_FILE)
    if (folder / "adapter_config.json").exists() and full:
        raise ValueError(f"{folder} holds an adapter and full weights ({', '.join(full)}); keep one of the two.")


def save_model(model: "PreTrainedModel | PeftModel", tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Save a Hugging Face model or a PEFT adapter with its tokenizer; `folder` appears whole or not at all.

    Raises ValueError for an adapter that is merged into its base, or whose file does not hold the live adapter.
    """
    from peft import PeftModel
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    folder = Path(folder)
    if isinstance(model, PeftModel) and any(getattr(module, "merged", False) for module in model.modules()):
        raise ValueError("The adapter is merged into its base; unmerge it, or save the result of merge_and_unload().")
    aside, old = folder.with_name(folder.name + ".partial"), folder.with_name(folder.name + ".old")
    for leftover in (aside, old):
        shutil.rmtree(leftover, ignore_errors=True)
    aside.mkdir(parents=True)
    model.save_pretrained(str(aside))
    tokenizer.save_pretrained(aside)
    check_one_kind(aside)
    if isinstance(model, PeftModel):
        check_adapter_file(aside, model)
    for file in aside.rglob("*"):
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
    if folder.exists():
        os.replace(folder, old)
    os.replace(aside, folder)
    fsync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def load_model(
    folder: Path | str, device: str = "cpu", dtype: str = "float32", base: Path | str | None = None
) -> tuple[Any, "PreTrainedTokenizerBase"]:
    """Load a Hugging Face folder (or hub name), or a PEFT adapter folder upon its base model; in eval mode.

    `base` replaces the base model path that the adapter names. ValueError if an adapter tensor finds no place.
    """
    from peft import PeftConfig, PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
    from transformers.utils import logging as hf_logging

    def whole(source: Path | str) -> Any:
        sees = getattr(AutoConfig.from_pretrained(source), "vision_config", None) is not None
        kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        return kind.from_pretrained(source, dtype=torch_dtype)

    hf_logging.disable_progress_bar()
    torch_dtype = getattr(torch, dtype)
    local = Path(folder)
    if local.is_dir():
        check_one_kind(local)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not (local / "adapter_config.json").exists():
        return whole(folder).to(device).eval(), tokenizer
    source = base if base is not None else PeftConfig.from_pretrained(str(local)).base_model_name_or_path
    if source is None:
        raise ValueError(f"The adapter in {local} does not name its base model; pass base=<folder>.")
    model = whole(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the check below turns missing keys into an error
        adapted = PeftModel.from_pretrained(model, str(local), is_trainable=True)
    check_adapter_file(local, adapted)
    return adapted.to(device).eval(), tokenizer
