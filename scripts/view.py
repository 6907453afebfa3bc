"""Open the report page of an experiment, or print its path where there is no display.

python -m scripts.view 7-11 scale=laptop
"""

import os
import sys
import webbrowser

from common.config import ConfigError, result_folder
from scripts.experiment import command, number_and_changes, settings


def has_display() -> bool:
    """Whether a browser window could appear here."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def main(arguments: list[str]) -> int:
    """0 when the page was opened or its path printed, 1 when there is none yet, 2 on bad arguments."""
    try:
        number, changes = number_and_changes(arguments, "python -m scripts.view 7-11 [scale=smoke] [key=value ...]")
        chosen = settings(number, changes)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    page = result_folder(chosen) / "report.html"
    if not page.is_file():
        print(f"There is no report at {page} yet; `{command(number, chosen)}` makes it.", file=sys.stderr)
        return 1
    if not (has_display() and webbrowser.open(page.as_uri())):
        print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
