"""The configuration of a run: Hydra composes it from conf/, the command line changes it, a dataclass checks it.

Order, later wins: conf/config.yaml, conf/scale/<scale>.yaml, conf/experiment/<number>/{base,<scale>}.yaml,
conf/tracker, conf/debug, then `key=value` from the command line. Hydra's compose interface is used, so nothing changes
the working folder and nothing writes a folder named after the clock: a folder's name follows from the configuration.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.algo import CONF, AlgoConfig, check_layer, load_algo
from common.schema import ConfigError, build, one_of, suggest, within

__all__ = [
    "AlgoConfig", "Common", "ConfigError", "cli", "compose", "load_algo", "result_folder", "run_folder", "seed_list"
]  # fmt: skip

ROOT = CONF.parent
FIRST_REPORT_SEED = 100  # seeds below belong to tuning on validation items and never reach results/

GROUPS = ("scale", "tracker", "debug")
UNCHANGED = {"tracker": "none", "debug": "off"}
SELECTION_KEYS = ("seeds", "first_seed", "arms")  # choose cells; the cells themselves stay the same
MACHINE_KEYS = ("workers", "launcher", "tracker", "runs_dir", "results_dir", "dry")  # change no number, so make no variant
FILLED_KEYS = ("experiment", "scale", "variant", "overrides", "selection")  # set by `compose`, never typed


@dataclass(kw_only=True)
class Common:
    """The keys that every experiment has; an experiment's Settings derives from it and adds its own."""

    experiment: str
    scale: str
    study: str = "main"
    seeds: int = 5
    first_seed: int = FIRST_REPORT_SEED
    arms: list[str] | None = None
    variant: str | None = None
    overrides: list[str] = field(default_factory=list)
    selection: list[str] = field(default_factory=list)
    workers: int = 2
    launcher: str = "local"
    threads: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    tracker: str = "none"
    runs_dir: str = "runs"
    results_dir: str = "results"
    algo: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raises ConfigError on an impossible combination. A subclass calls super().check() and adds its own rules."""
        one_of("study", self.study, ("main", "ablation"))
        one_of("launcher", self.launcher, ("local", "ray"))
        one_of("dtype", self.dtype, ("float32", "bfloat16", "float16"))
        one_of("tracker", self.tracker, ("none", "wandb", "trackio", "tensorboard"))
        one_of("device", re.sub(r"^cuda:\d+$", "cuda", self.device), ("auto", "cpu", "cuda", "mps"))
        for key in ("seeds", "workers", "threads"):
            within(key, getattr(self, key), 1)
        within("first_seed", self.first_seed, 0)
        check_layer(self.algo)
        if self.first_seed < FIRST_REPORT_SEED < self.first_seed + self.seeds:
            raise ConfigError(
                f"first_seed={self.first_seed} seeds={self.seeds}: the range mixes tuning seeds "
                f"(below {FIRST_REPORT_SEED}) with report seeds (from {FIRST_REPORT_SEED}); allowed is one kind only."
            )
        if self.arms is not None and (not self.arms or len(set(self.arms)) < len(self.arms)):
            raise ConfigError(f"arms={self.arms}: must name at least one arm, each once; null takes all.")


Settings = TypeVar("Settings", bound=Common)


def compose(number: str, schema: type[Settings], overrides: list[str], *, conf: Path = CONF) -> Settings:
    """The checked settings of experiment `number` ("7-11") after `overrides` ("key=value", Hydra's syntax).

    `conf` is the folder of configuration files. Bad input raises ConfigError and nothing else.
    """
    one_of("experiment", number, _numbers(conf))
    chosen, changes = _split(overrides)
    choice = {"scale": "laptop", **UNCHANGED, **chosen}
    for group, value in choice.items():
        one_of(group, value, scales(number, conf) if group == "scale" else _options(conf, group))
    own = f"{choice['scale']}-{changes.get('study')}"  # a study may have a file of its own, such as laptop-ablation.yaml
    entry = own if (conf / "experiment" / number / f"{own}.yaml").exists() else choice["scale"]
    plain = _from_files(conf, number, choice["scale"], entry)
    base = _typed(number, schema, choice["scale"], plain)
    groups = {group: choice[group] for group in ("tracker", "debug")}
    config = plain if groups == UNCHANGED else _from_files(conf, number, choice["scale"], entry, **groups)
    known = [key for key in _flat(asdict(base), inner=True) if key not in FILLED_KEYS]
    for key, value in changes.items():
        if key not in known:
            hint = suggest(key, [*known, *GROUPS])
            raise ConfigError(f"{key}={value}: unknown key.{hint} --help lists all keys.")
        if key in ("runs_dir", "results_dir") and isinstance(value, str):
            value = os.path.abspath(value)  # a typed path means the launch folder, whatever changes folder later
        OmegaConf.update(config, key, value, merge=True)
    settings = _typed(number, schema, choice["scale"], config)
    changed = _changed(asdict(base), asdict(settings))
    settings.overrides = [text for key, text in changed.items() if key not in SELECTION_KEYS]
    settings.selection = [text for key, text in changed.items() if key in SELECTION_KEYS]
    settings.variant = _safe_name(settings.overrides) if settings.overrides else None
    settings.check()
    return settings


def cli(number: str, schema: type[Settings], main: Callable[[Settings], int], *, conf: Path = CONF) -> NoReturn:
    """Runs `main` on the settings of the command line; a bad configuration ends with one sentence and exit code 2."""
    try:
        if {"-h", "--help"} & set(sys.argv[1:]):
            print(usage(number, schema, conf))
            raise SystemExit(0)
        settings = compose(number, schema, sys.argv[1:], conf=conf)
        settings.device = visible_device(settings.device)
        code = main(settings)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("stopped: the same command goes on from here", file=sys.stderr)
        raise SystemExit(130) from None
    raise SystemExit(code)


def seed_list(settings: Common) -> list[int]:
    """The seeds of the run: first_seed, first_seed + 1, ..."""
    return list(range(settings.first_seed, settings.first_seed + settings.seeds))


def number_keys(settings: Common, *apart: str) -> dict[str, Any]:
    """What the numbers of any cell depend on: all settings but those that choose cells or machines, and but `apart`."""
    skipped = {*SELECTION_KEYS, *MACHINE_KEYS, "study", "selection", *apart}
    return {key: value for key, value in vars(settings).items() if key not in skipped}


def run_folder(settings: Common) -> Path:
    """Scratch of this configuration: <runs_dir>/<experiment>/<scale>/<study>/<variant or base>."""
    name = settings.variant or "base"
    return ROOT / settings.runs_dir / settings.experiment / settings.scale / settings.study / name


def result_folder(settings: Common) -> Path:
    """Where records and reports go.

    Each changed configuration, or changed choice of cells, has a folder of its own, so that the committed one is only
    ever rewritten by the configuration that made it. Tuning seeds stay among the runs.
    """
    if settings.first_seed < FIRST_REPORT_SEED:
        return run_folder(settings) / "tuning-results"
    folder = ROOT / settings.results_dir / settings.experiment / settings.scale
    folder = folder / "ablation" if settings.study == "ablation" else folder
    changes = sorted([*settings.overrides, *settings.selection])
    return folder / "variants" / _safe_name(changes) if changes else folder


def scales(number: str, conf: Path = CONF) -> list[str]:
    """The scales that an experiment has: those with a file in conf/experiment/<number>/."""
    return [scale for scale in _options(conf, "scale") if (conf / "experiment" / number / f"{scale}.yaml").exists()]


def visible_device(device: str) -> str:
    """`device` with auto resolved to cuda or mps; raises ConfigError when this machine does not have it."""
    if device == "cpu":
        return device
    import torch  # kept out of composition: a misspelt key is reported before two seconds of imports

    seen = [name for name, backend in (("cuda", torch.cuda), ("mps", torch.backends.mps)) if backend.is_available()]
    if device == "auto" and seen:
        return seen[0]
    if device.split(":")[0] in seen:
        return device
    raise ConfigError(f"device={device}: this machine shows {', '.join(['cpu', *seen])}; device=cpu runs anywhere, slowly.")


def usage(number: str, schema: type[Settings], conf: Path = CONF) -> str:
    """The text of --help: how to write changes, the groups and every key with its value at laptop scale."""
    lines = [f"Experiment {number}. Changes are written key=value, lists key=[a,b]; conf/ explains each key.", ""]
    options = {group: _options(conf, group) for group in GROUPS} | {"scale": scales(number, conf)}
    lines += [f"  {group}=  one of {', '.join(names)}" for group, names in options.items()]
    start = "laptop" if "laptop" in options["scale"] else options["scale"][0]
    settings = compose(number, schema, [f"scale={start}"], conf=conf)
    hidden = (*FILLED_KEYS, "tracker")
    lines += ["", f"Keys and their values at scale={start}:"]
    lines += [f"  {key}={_text(value)}" for key, value in _flat(asdict(settings)).items() if key not in hidden]
    return "\n".join(lines)


def _options(conf: Path, group: str) -> list[str]:
    return sorted(path.stem for path in (conf / group).glob("*.yaml"))


def _numbers(conf: Path) -> list[str]:
    return sorted(path.name for path in (conf / "experiment").iterdir() if path.is_dir())


def _split(overrides: list[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Command-line texts as (choices of a group, changes of a key)."""
    parser = OverridesParser.create()
    chosen: dict[str, str] = {}
    changes: dict[str, Any] = {}
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            raise ConfigError(f"{text}: not understood; write key=value, for instance seeds=3.") from None
        key = override.get_key_element().lstrip("+~")
        if override.is_delete() or override.is_add() or override.is_force_add() or "@" in key:
            raise ConfigError(f"{text}: only key=value is allowed, without +, ~ or @.")
        if override.is_sweep_override():
            raise ConfigError(f"{text}: one value is allowed; a list is written {key}=[a,b], a text with commas in quotes.")
        if key in GROUPS:
            chosen[key] = str(override.value())
        else:
            changes[key] = override.value()
    return chosen, changes


def _from_files(conf: Path, number: str, scale: str, entry: str, tracker: str = "none", debug: str = "off") -> DictConfig:
    """The YAML files of one choice, merged by Hydra; the root is made here because only it knows the number.

    `entry`: the experiment's file, named after the scale, or after scale and study.
    """
    groups = [{"scale": scale}, {f"experiment/{number}": entry}, {"tracker": tracker}, {"debug": debug}]
    ConfigStore.instance().store("root", {"defaults": ["config", *groups]})
    try:
        with hydra.initialize_config_dir(str(conf.resolve()), version_base="1.3"):
            config = hydra.compose("root")
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"experiment {number}, scale={scale}: {' '.join(str(error).split())}") from None
    OmegaConf.set_struct(config, False)
    return config


def _typed(number: str, schema: type[Settings], scale: str, config: DictConfig) -> Settings:
    try:
        values: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(" ".join(str(error).split())) from None
    if isinstance(values.get("experiment"), dict):
        raise ConfigError(f"each file in conf/experiment/{number}/ must begin with the line `# @package _global_`.")
    for key in FILLED_KEYS:
        if key in values:
            raise ConfigError(f"{key}={values[key]}: not a key of a file; it follows from the command.")
    return build(schema, {"experiment": number, "scale": scale, **values})


def _flat(values: Mapping[str, Any], prefix: str = "", inner: bool = False) -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}; `inner` keeps "a" as well."""

    def walk(part: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        for key, value in part.items():
            nested = isinstance(value, Mapping) and bool(value)
            if not nested or inner:
                yield f"{path}{key}", value
            if nested:
                yield from walk(value, f"{path}{key}.")

    return dict(walk(values, prefix))


def _changed(base: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """{key: "key=value"} of what differs, sorted; keys that change no number of a cell are left out."""
    before, after = _flat(base), _flat(now)
    silent = {*FILLED_KEYS, *MACHINE_KEYS, "study"}
    keys = sorted(key for key in after if key not in silent and after[key] != before.get(key))
    return {key: f"{key}={_text(after[key])}" for key in keys}


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_text(item) for item in value) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _safe_name(changes: list[str]) -> str:
    """The changes joined by commas as a folder name; a hash tells apart what a file system could not hold."""
    text = ",".join(re.sub(r"\[(.*)\]$", lambda hit: hit[1].replace(",", "+"), change) for change in changes)
    name = re.sub(r"[^A-Za-z0-9._+=,-]", "_", text)[:120]
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
