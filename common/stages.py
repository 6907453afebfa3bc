"""Stages whose results are found again: a folder named by the hash of configuration, code and inputs.

Arms share their common start, and a second run finds what the first one built. A build runs inside
`<name>-<key>.partial`, which outlives a kill, so that training inside it can go on from its own checkpoint.
"""

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.files import locked, read_json, strict_json, write_json

STAGE_FILE = "stage.json"
KEY_LENGTH = 16
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def plain(value: Any) -> Any:
    """A configuration as plain JSON values: dataclasses become dicts, paths text, tuples lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def strip_docstrings(tree: ast.Module) -> ast.Module:
    """Remove the docstrings of a module, its classes and its functions, in place."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return tree


def code_hash(module: str) -> str:
    """Hash of what a module computes: its syntax tree without comments, docstrings and layout."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ModuleNotFoundError(f"Stage module {module!r} has no Python source file; name modules as in an import.")
    return syntax_hash(Path(spec.origin).read_text(encoding="utf-8"))


@functools.cache
def syntax_hash(source: str) -> str:
    """Hash of a source's syntax tree; kept, since a cell asks for the same modules again with every stage it stands on."""
    return hashlib.sha256(ast.dump(strip_docstrings(ast.parse(source))).encode()).hexdigest()


def input_key(path: Path) -> str:
    """Key of an input: the stage key of a stage folder, else a hash of the file's or folder's contents."""
    path = Path(path)
    if (path / STAGE_FILE).exists():
        return read_json(path / STAGE_FILE)["key"]
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    if not files:
        raise FileNotFoundError(f"Stage input {path} does not exist or is empty.")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.relative_to(path).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def fingerprint(config: Any, modules: Sequence[str], inputs: Sequence[Path] = ()) -> str:
    """Key of a result: 16 hex digits over configuration, the named modules' code and the inputs' keys."""
    parts = {
        "config": plain(config),
        "code": {module: code_hash(module) for module in modules},
        "inputs": [input_key(path) for path in inputs],
    }
    return hashlib.sha256(strict_json(parts, sort_keys=True).encode()).hexdigest()[:KEY_LENGTH]


def stage(
    name: str,
    build: Callable[[Path], None],
    *,
    config: Any,
    modules: Sequence[str],
    inputs: Sequence[Path] = (),
    root: Path,
) -> Path:
    """The folder of a stage, built once: `build(folder)` runs unless a folder with the same key is there.

    Processes that ask at the same time wait for one build. A build that raises or is killed leaves its
    `.partial` folder, and the next call builds on in it.
    """
    root = Path(root)
    key = fingerprint(config, modules, inputs)
    folder = root / f"{name}-{key}"
    if folder.is_dir():
        return folder
    with locked(root / f".{folder.name}.lock", lambda: print(f"waiting for another process to build {folder.name}")):
        if folder.is_dir():
            return folder
        partial = root / f"{folder.name}.partial"
        partial.mkdir(exist_ok=True)
        wall, cpu = time.perf_counter(), time.process_time()
        build(partial)
        write_json(
            partial / STAGE_FILE,
            {
                "name": name,
                "key": key,
                "config": plain(config),
                "modules": list(modules),
                "inputs": [Path(path).name for path in inputs],
                "wall_s": round(time.perf_counter() - wall, 3),
                "cpu_s": round(time.process_time() - cpu, 3),
            },
        )
        os.replace(partial, folder)
    return folder
