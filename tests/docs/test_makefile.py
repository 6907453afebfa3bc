"""The front door: targets, the plain lines they run, and what they say when something is missing."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.experiment import folders

ROOT = Path(__file__).resolve().parents[2]


def make(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # `make test` runs this: its flags and level would change what the inner make prints.
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *words], cwd=folder, env=plain, capture_output=True, text=True, check=False)


def last_line(*words: str) -> str:
    done = make("-n", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_help_is_the_default_and_lists_every_target_once() -> None:
    rules = re.findall(r"^([a-z][a-z0-9%-]*):(?![=])", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shown = make().stdout
    assert shown == make("help").stdout
    listed = [line.split()[0] for line in shown.splitlines() if line.startswith("  ")]
    assert listed == [rule.replace("7-%", "7-N") for rule in rules] and len(set(listed)) == len(listed)
    assert all(len(line) <= 120 for line in shown.splitlines())
    assert f"Experiments 7-N: {' '.join(folders())}" in shown


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("exp-7-11",), "python -m experiments.exp_7_11_general_points.run scale=laptop"),
        (("exp-7-1",), "python -m experiments.exp_7_01_q_learning.run scale=laptop"),
        (
            ("exp-7-11", "SCALE=smoke", "SEEDS=1", "ARGS=algo.lr=1e-4 workers=1"),
            "python -m experiments.exp_7_11_general_points.run scale=smoke seeds=1 algo.lr=1e-4 workers=1",
        ),
        (
            ("exp-7-11", "STUDY=ablation"),
            "python -m experiments.exp_7_11_general_points.run scale=laptop study=ablation",
        ),
        (("ablate-7-1",), "python -m experiments.exp_7_01_q_learning.run scale=laptop study=ablation"),
        (("audit-7-11",), "python -m experiments.exp_7_11_general_points.audit"),
        (("export-7-11", "ARM=grpo", "SEED=101"), "python -m scripts.export 7-11 scale=laptop arm=grpo seed=101"),
        (("view-7-11", "SCALE=smoke"), "python -m scripts.view 7-11 scale=smoke"),
        (("report",), "python -m scripts.report"),
        (("report", "CHECK=1"), "python -m scripts.report check=true"),
        (("report", "CHECK=0"), "python -m scripts.report"),
        (
            ("exp-7-11", "SCALE=cluster", "DRY=1"),
            "python -m experiments.exp_7_11_general_points.run scale=cluster dry=true",
        ),
        (("exp-7-11", "SCALE=cluster"), "python -m experiments.exp_7_11_general_points.run scale=cluster"),
        (("cluster-check",), "python -m scripts.cluster_check"),
        (("smollm2",), "python -m common.smollm2"),
        (("helsinki",), "python -m experiments.exp_7_12_virl.osm"),
        (("doctor",), "python -m scripts.doctor"),
        (("bench",), "python -m scripts.bench"),
        (("test-unit",), "python -m pytest -n 2 --dist loadfile tests/unit"),
    ],
)
def test_targets_print_the_plain_line(words: tuple[str, ...], line: str) -> None:
    assert last_line(*words) == f".venv/bin/{line}"


def test_lint_runs_the_four_checks_and_test_everything() -> None:
    shown = make("-n", "lint").stdout
    for tool in ("ruff check .", "ruff format --check .", "-m mypy", "lint-imports"):
        assert tool in shown
    assert ".venv/bin/python -m pytest -n 2 --dist loadfile\n" in make("-n", "test").stdout


def test_all_experiments_in_turn() -> None:
    lines = [line for line in make("-n", "exp-all").stdout.splitlines() if ".run scale=" in line]
    assert [line.split(".")[2] for line in lines] == list(folders().values())


def test_an_experiment_that_is_not_there() -> None:
    done = make("-n", "exp-7-99")
    assert done.returncode == 2
    assert f"There is no experiment 7-99; there are: {' '.join(folders())}" in done.stderr


@pytest.mark.parametrize(("scale", "offline"), [("laptop", "1"), ("smoke", "1"), ("gpu", "0")])
def test_environment(scale: str, offline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "WANDB_MODE", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.delenv(name, raising=False)
    extra = tmp_path / "show.mk"
    extra.write_text("show:\n\t@echo $$HF_HUB_OFFLINE $$WANDB_MODE $$OMP_NUM_THREADS $$TOKENIZERS_PARALLELISM\n")
    words = ("-f", "Makefile", "-f", str(extra), "show", f"SCALE={scale}")
    assert make(*words).stdout == f"{offline} offline 1 false\n"
    assert make(*words, "WANDB_MODE=online").stdout == f"{offline} online 1 false\n"


def front_door(tmp_path: Path, interpreter: str) -> Path:
    """A folder with the Makefile and an interpreter that is a shell script."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{interpreter}\n")
    script.chmod(0o755)
    return tmp_path


def test_a_python_that_is_too_old(tmp_path: Path) -> None:
    folder = front_door(tmp_path, '[ "$1" = --version ] && echo "Python 3.9.6" && exit 0; exit 1')
    done = make("setup", f"PYTHON={folder}/python", folder=folder)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        f"error: Python 3.11, 3.12 or 3.13 is needed, but {folder}/python is Python 3.9.6; "
        "install one and name it: make PYTHON=python3.12"
    )
    assert not (folder / ".venv").exists()


def test_no_suitable_python_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = front_door(tmp_path, "exit 1")
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("make", "sh", "sed", "tr"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    monkeypatch.setenv("PATH", str(tools))
    assert make("setup", folder=folder).stderr.splitlines()[0] == (
        "error: Python 3.11, 3.12 or 3.13 is needed, but python3 is missing; install one and name it: make PYTHON=python3.12"
    )


def test_a_debian_python_without_venv(tmp_path: Path) -> None:
    folder = front_door(tmp_path, 'case "$2" in *ensurepip*) exit 1;; esac; exit 0')
    done = make("setup", f"PYTHON={folder}/python", folder=folder)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        f"error: {folder}/python has no venv module; on Debian or Ubuntu run: apt install python3-venv"
    )


def test_first_set_up_makes_the_environment_and_installs_the_pins(tmp_path: Path) -> None:
    fake = 'echo "$0 $*" >> calls; [ "$2" = venv ] && mkdir -p .venv/bin && cp python .venv/bin/python; exit 0'
    folder = front_door(tmp_path, fake)
    assert make("setup", f"PYTHON={folder}/python", folder=folder).returncode == 0
    calls = [line for line in (folder / "calls").read_text().splitlines() if " -m " in line]
    assert calls == [
        f"{folder}/python -m venv --clear .venv",
        ".venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e .[dev]",
    ]
    assert "is up to date" in make(".venv/.ready", f"PYTHON={folder}/python", folder=folder).stdout


def test_the_makefile_keeps_to_what_make_3_81_knows() -> None:
    text = (ROOT / "Makefile").read_text()
    for newer in (".ONESHELL", ".RECIPEPREFIX", "!=", "$(file ", "::=", "undefine ", "$(guile"):
        assert newer not in text


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111 and "make test" in script.read_text().splitlines()
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
