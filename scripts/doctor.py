"""Say in plain words what is installed, which scales can run on this machine, and what is missing.

    python -m scripts.doctor

Exit code 0 when the laptop scale can run, 1 otherwise. Reads pyproject.toml and constraints.txt and imports of the project
only the sandbox, which needs no package, so that it also works where the installation is broken.
"""

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MINIMUM_MEMORY_GIB = 3.0  # two workers of the laptop scale, with room for the system
MINIMUM_DISK_GIB = 1.0
SETUP = "make setup"


def requirements(extra: str | None = None) -> list[str]:
    """Names of the packages that pyproject.toml asks for, of the core or of one extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return [re.split(r"[\[<>=!~; ]", line, maxsplit=1)[0] for line in lines]


def locked() -> dict[str, str]:
    """{name: version} of constraints.txt, names as `normal` writes them."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {normal(name): version.split(";")[0].strip() for name, version in pins}


def normal(name: str) -> str:
    """A package's name as indexes compare it: lower case, dashes."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(name: str) -> str | None:
    """The installed version without its local part (2.13.0+cpu is 2.13.0), or None."""
    try:
        return importlib.metadata.version(name).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_packages(names: list[str], find: Callable[[str], str | None] = installed) -> tuple[list[str], list[str]]:
    """(one line per package, names of the missing ones)."""
    pins = locked()
    lines, missing = [], []
    for name in names:
        version, pin = find(name), pins.get(normal(name))
        if version is None:
            missing.append(name)
        note = f"missing; `{SETUP}` installs {pin or 'it'}" if version is None else "as pinned"
        if version is not None and pin is not None and version != pin:
            note = f"the lock says {pin}; numbers may differ in the last digits, `{SETUP}` restores it"
        lines.append(f"  {name:14} {version or '-':12} {note}")
    return lines, missing


def accelerator() -> str | None:
    """The name of the GPU that torch sees, or None."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name(0))
    return "Apple GPU (mps)" if torch.backends.mps.is_available() else None


def memory_gib() -> float:
    """Memory of the machine in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def with_scale(scale: str) -> str:
    """The experiments that have this scale, such as "7-1, 7-11, 7-algorithms", numbers first."""
    names = [path.parent.name for path in ROOT.glob(f"conf/experiment/*/{scale}.yaml")]
    return ", ".join(sorted(names, key=lambda name: [(not part.isdigit(), part.zfill(3)) for part in name.split("-")]))


def scale_lines(missing: list[str], gpu: str | None, extra_missing: list[str]) -> list[str]:
    """For each scale the experiments that can run here, or why none can and the remedy."""
    core = f"no: {', '.join(missing)} missing; run `{SETUP}`" if missing else ""
    verl = "no: run `.venv/bin/pip install -c constraints.txt -e '.[verl]'`" if extra_missing else ""
    hindrances = {
        "smoke": core,
        "laptop": core,
        "gpu": core or ("" if gpu else "no: torch sees no CUDA or MPS device (README, section Linux and GPU)"),
        "cluster": core or verl,
    }
    lines = []
    for scale, hindrance in hindrances.items():
        numbers = with_scale(scale)
        possible = f"yes: {numbers}" if numbers else "no: no experiment has this scale yet"
        lines.append(f"  {scale:8} {hindrance or possible}")
    return lines


def sandbox_lines() -> list[str]:
    """How model-written code is isolated on this machine, and what is not; found out by running a program."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return [f"  {line}" for line in importlib.import_module("common.sandbox").isolation().lines()]


def main() -> int:
    """Prints the examination; returns the exit code."""
    suitable = (3, 11) <= sys.version_info[:2] <= (3, 13)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    disk = shutil.disk_usage(ROOT).free / 2**30
    lines, missing = describe_packages(requirements())
    _, extra_missing = describe_packages(requirements("verl"))
    print("Machine")
    size = f"{memory_gib():.1f} GiB memory, {disk:.1f} GiB disk free"
    print(f"  {platform.system()} {platform.machine()}, {cores} cores, {size}")
    note = "good" if suitable else "3.11, 3.12 or 3.13 is needed: rm -r .venv, then make setup PYTHON=python3.12"
    print(f"  Python {platform.python_version()}: {note}")
    if memory_gib() < MINIMUM_MEMORY_GIB:
        print(f"  little memory: run one worker, ARGS='workers=1' (two want {MINIMUM_MEMORY_GIB:g} GiB)")
    if disk < MINIMUM_DISK_GIB:
        print(f"  little disk: runs want {MINIMUM_DISK_GIB:g} GiB; `make clean-runs` frees what earlier runs hold")
    print("Packages", *lines, sep="\n")
    print("Sandbox for model-written code", *sandbox_lines(), sep="\n")
    print("Scales", *scale_lines(missing, accelerator(), extra_missing), sep="\n")
    ready = suitable and not missing
    print("All set: try `make exp-7-1`." if ready else f"Not ready: see above; `{SETUP}` mends most of it.")
    return 0 if ready else 1


if __name__ == "__main__":
    sys.exit(main())
