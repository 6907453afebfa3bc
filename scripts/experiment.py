"""Finds an experiment by its number for the scripts that look at its runs and results."""

import importlib
import re
from pathlib import Path
from types import ModuleType

from common.config import Common, ConfigError, compose
from common.schema import one_of

ROOT = Path(__file__).resolve().parents[1]


def folders() -> dict[str, str]:
    """{"7-11": "exp_7_11_general_points", ...}: the number stands in run.py as NUMBER = "7-11"."""
    files = sorted(ROOT.glob("experiments/exp_*/run.py"))
    found = ((re.search(r'^NUMBER = "(.+)"$', file.read_text(encoding="utf-8"), re.MULTILINE), file) for file in files)
    return {match[1]: file.parent.name for match, file in found if match}


def load(number: str) -> ModuleType:
    """The run module of an experiment; ConfigError names the experiments that there are."""
    found = folders()
    one_of("experiment", number, found)
    return importlib.import_module(f"experiments.{found[number]}.run")


def settings(number: str, overrides: list[str]) -> Common:
    """The settings that `python -m experiments.<folder>.run` would have with the same changes."""
    return compose(number, load(number).Settings, overrides)


def command(number: str, settings: Common) -> str:
    """The make command that makes the run of these settings."""
    target = f"{'ablate' if settings.study == 'ablation' else 'exp'}-{number}"
    scale = "" if settings.scale == "laptop" else f" SCALE={settings.scale}"
    changes = [*settings.overrides, *settings.selection]
    return f"make {target}{scale}" + (f" ARGS='{' '.join(changes)}'" if changes else "")


def number_and_changes(arguments: list[str], usage: str) -> tuple[str, list[str]]:
    """Splits `7-11 key=value ...`; ConfigError with the usage when there is no number."""
    if not arguments or "=" in arguments[0]:
        raise ConfigError(f"which experiment? {usage}")
    return arguments[0], arguments[1:]
