"""Plain values from YAML or the command line -> typed dataclasses, strictly.

OmegaConf's own structured configs convert quietly (a YAML `no` in a text field becomes "False", 12:30:45 "45045"); here
a value either has the declared type or the reader gets one sentence that names key, value and what is allowed.
"""

from __future__ import annotations

import difflib
import functools
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the key, the value and what is allowed."""


def suggest(word: str, known: Iterable[str]) -> str:
    """' Did you mean `x`?' for the nearest known word, or ''; a full dotted key or its last part may match."""
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if not close:
        last = {name.rsplit(".", 1)[-1]: name for name in reversed(names)}
        close = [last[hit] for hit in difflib.get_close_matches(word.rsplit(".", 1)[-1], list(last), n=1, cutoff=0.6)]
    return f" Did you mean `{close[0]}`?" if close else ""


def one_of(key: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raises ConfigError unless `value` is in `allowed`."""
    options = [str(option) for option in allowed]
    if str(value) not in options:
        raise ConfigError(f"{key}={value}: allowed are {', '.join(options)}.{suggest(str(value), options)}")


def within(key: str, value: float, low: float | None = None, high: float | None = None, *, above: bool = False) -> None:
    """Raises ConfigError unless low <= value <= high (`above`: low < value); None leaves that side open."""
    if (low is not None and (value < low or (above and value == low))) or (high is not None and value > high):
        sides = [f"{'above' if above else 'at least'} {low}"] if low is not None else []
        sides += [f"at most {high}"] if high is not None else []
        raise ConfigError(f"{key}={value}: must be {' and '.join(sides)}.")


def convert(annotation: Any, value: Any, key: str) -> Any:
    """`value` (None, bool, int, float, str, list, dict) as the annotated type; else raises ConfigError with `key`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(args, value, key)
    if origin is Literal:
        one_of(key, value, args)
        return value
    if is_dataclass(annotation):
        return build(annotation, value, key)
    if annotation is float and type(value) in (int, float):
        return float(value)
    if annotation in (int, float, str, bool):
        if type(value) is annotation:
            return value
        raise ConfigError(f"{key}={_show(value)}: must be {_WORDS[annotation]}{_hint(annotation, value)}.")
    if origin in (list, tuple):
        return _convert_sequence(origin, args, value, key)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}={_show(value)}: must be a mapping of keys to values.")
        return {convert(args[0], k, key): convert(args[1], v, f"{key}.{k}") for k, v in value.items()}
    raise TypeError(f"{key}: the schema's type {annotation} is not supported")


def build(schema: Any, values: Any, key: str = "") -> Any:
    """An instance of the dataclass `schema` from a mapping; unknown and missing keys raise ConfigError."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{key}={_show(values)}: must be a mapping with the keys {_names(schema)}.")
    prefix = f"{key}." if key else ""
    known = {item.name: item for item in fields(schema)}
    for name in values:
        if name not in known:
            hint = suggest(f"{prefix}{name}", [prefix + other for other in known])
            raise ConfigError(f"{prefix}{name}={_show(values[name])}: unknown key.{hint} Allowed are {_names(schema)}.")
    for name, item in known.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"{prefix}{name} is missing: give it a value in the experiment's configuration.")
    hints = _type_hints(schema)
    return schema(**{name: convert(hints[name], value, prefix + name) for name, value in values.items()})


_type_hints = functools.cache(get_type_hints)  # it compiles every annotation anew
_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _convert_union(args: tuple, value: Any, key: str) -> Any:
    if value is None and type(None) in args:
        return None
    choices = [arg for arg in args if arg is not type(None)]
    for index, choice in enumerate(choices):
        try:
            return convert(choice, value, key)
        except ConfigError:
            if index == len(choices) - 1:
                raise
    raise ConfigError(f"{key}={_show(value)}: must be null.")


def _convert_sequence(origin: Any, args: tuple, value: Any, key: str) -> Any:
    if not isinstance(value, (list, tuple)):
        hint = f", written {key}=[{value}]" if isinstance(value, str) else ""
        raise ConfigError(f"{key}={_show(value)}: must be a list{hint}.")
    if origin is tuple and Ellipsis not in args:
        if len(value) != len(args):
            raise ConfigError(f"{key}={_show(value)}: must hold {len(args)} values.")
        return tuple(convert(kind, item, f"{key}[{i}]") for i, (kind, item) in enumerate(zip(args, value, strict=True)))
    return origin(convert(args[0], item, f"{key}[{i}]") for i, item in enumerate(value))


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _hint(annotation: Any, value: Any) -> str:
    if annotation is str and isinstance(value, (bool, int, float)):
        return " (put it in quotes if you mean the letters)"
    if annotation is int and isinstance(value, float) and value.is_integer():
        return f" (write {int(value)})"
    return ""


def _names(schema: Any) -> str:
    return ", ".join(item.name for item in fields(schema))
