"""Small file tools that survive a kill at any moment: atomic writes, locks, strict JSON and JSON lines."""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO


def strict_json(value: Any, **options: Any) -> str:
    """One JSON text that every strict reader accepts: ASCII only, and ValueError on NaN or Infinity."""
    return json.dumps(value, allow_nan=False, **options)


def fsync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename inside it outlives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file aside, flush it to disk and rename it: readers see the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The pid keeps two writers of the same path apart; the loser's rename replaces the winner's whole file.
    aside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with open(aside, "wb") as handle:
        write(handle)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(aside, path)
    fsync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Atomic UTF-8 text with newline characters kept as they are."""
    write_atomic(path, lambda handle: handle.write(text.encode("utf-8")))


def write_json(path: Path, value: Any) -> None:
    """Atomic strict JSON, indented, keys in the order given."""
    write_text(path, strict_json(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """The value of a JSON file, or None if there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a JSON-lines file (missing file: none). A last line cut by a kill is left out."""
    if not path.exists():
        return []
    *lines, _unfinished = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines if line]


def json_line(row: dict[str, Any]) -> str:
    """A row as one line of a JSON-lines file, without spaces: records hold many thousand numbers."""
    return strict_json(row, separators=(",", ":")) + "\n"


def write_json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Atomic JSON-lines file, one row a line."""
    write_text(path, "".join(json_line(row) for row in rows))


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold an exclusive lock, which the system frees when its holder dies; `waiting` is called if another has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is not None:
                waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)  # a forked child may hold a copy of the handle, which closing would leave
