"""Every command in the project's pages exists, and every key it changes is a key."""

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from common.config import compose
from scripts.experiment import folders, load

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("experiments/*/README.md"))]
MAKE_VARIABLES = {"SCALE", "SEEDS", "ARGS", "STUDY", "ARM", "SEED", "CHECK", "DRY", "PYTHON", "HF_HUB_OFFLINE", "WANDB_MODE"}


def commands(page: Path) -> list[str]:
    """The make and `python -m` lines of a page: lines of code blocks and code spans, comments cut off."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()] + spans
    found = [re.sub(r"\s+#.*$", "", line) for line in lines if re.match(r"make [a-z.]|(\S+/)?python3? -m ", line)]
    return [line for line in found if "7-N" not in line and "venv .venv" not in line and "..." not in line]


ALL = [(page, command) for page in PAGES for command in commands(page)]


def check_module(words: list[str]) -> None:
    """The module of a `python -m` line resolves, and an experiment's settings accept the arguments."""
    module, arguments = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
    assert importlib.util.find_spec(module), f"no module {module}"
    numbers = {f"experiments.{folder}.run": number for number, folder in folders().items()}
    changes = [word for word in arguments if "=" in word and not word.startswith(("arm=", "seed="))]
    number = numbers.get(module) or (arguments[0] if module in ("scripts.export", "scripts.view") else None)
    if number is not None:
        assert compose(number, load(number).Settings, changes).experiment == number


@pytest.mark.parametrize(("page", "command"), ALL, ids=[f"{page.parent.name}: {command}" for page, command in ALL])
def test_command_exists(page: Path, command: str) -> None:
    words = shlex.split(command)
    if words[0] != "make":
        check_module(words)
        return
    assert {word.split("=")[0] for word in words[1:] if "=" in word} <= MAKE_VARIABLES
    done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    runs = [line for line in done.stdout.splitlines() if line.startswith(".venv/bin/python -m ") and " -m pip " not in line]
    assert runs or words[1] in ("setup", "clean-runs")
    for line in runs:
        check_module(shlex.split(line))


def test_the_first_screen_shows_the_two_commands() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:20])
    assert "make exp-7-11" in first_screen and "make test" in first_screen
    assert "<!-- results:begin -->" in first_screen


def test_pages_have_commands_and_their_links_lead_somewhere() -> None:
    assert len(ALL) >= 20
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
