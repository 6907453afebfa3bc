"""Build or check everything that is generated from records: python -m scripts.report [check=true] [experiment=7-11]

Without arguments each result folder gets its report.md, report.html and figures, and results/README.md, the README
blocks and docs/metrics.md are renewed. `check=true` writes nothing, lists the files that differ and exits with 1.
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from common.claims import ClaimsError
from common.records import read_records
from common.report.build import build, check
from common.report.index import Experiment, find_experiments, generated, result_folders
from common.schema import ConfigError, suggest

ROOT = Path(__file__).resolve().parent.parent
DEFAULTS = {"check": "false", "experiment": "all", "results_dir": "results"}


def parse(arguments: Sequence[str]) -> dict[str, str]:
    """key=value words over the defaults; ConfigError names what is not understood."""
    chosen = dict(DEFAULTS)
    for word in arguments:
        key, equals, value = word.partition("=")
        if key not in DEFAULTS or not equals:
            raise ConfigError(f"{word}: unknown.{suggest(key, DEFAULTS)} Allowed are {', '.join(f'{k}=' for k in DEFAULTS)}.")
        chosen[key] = value
    if chosen["check"] not in ("true", "false"):
        raise ConfigError(f"check={chosen['check']}: allowed are true, false.")
    return chosen


def run_experiment(experiment: Experiment, results: Path, checking: bool) -> list[str]:
    """Build (or check) the pages of one experiment; the files that differ when checking."""
    folders = result_folders(results, experiment.claims.experiment, committed=checking)
    if not folders:
        return []
    module = importlib.import_module(experiment.module)
    figures, sections = getattr(module, "figures", None), getattr(module, "sections", None)
    differing = []
    for folder in folders:
        texts = sections(read_records(folder)) if sections else None
        inputs = (folder, experiment.folder / "claims.yaml", figures, texts)
        if checking:
            differing += check(*inputs)
        else:
            build(*inputs)
            print(f"{folder / 'report.md'}")
    return differing


def run(root: Path, chosen: dict[str, str]) -> int:
    """Exit status: 0 all good, 1 some file differs (they are printed)."""
    checking, results = chosen["check"] == "true", root / chosen["results_dir"]
    experiments = find_experiments(root)
    numbers = [experiment.claims.experiment for experiment in experiments]
    if chosen["experiment"] not in ("all", *numbers):
        raise ConfigError(f"experiment={chosen['experiment']}: allowed are all, {', '.join(numbers)}.")
    differing = []
    for experiment in experiments:
        if chosen["experiment"] in ("all", experiment.claims.experiment):
            if checking:
                print(f"{experiment.claims.experiment}: comparing its reports with its records", flush=True)
            differing += run_experiment(experiment, results, checking)
    texts = generated(root, results)
    for experiment in experiments:
        pages = getattr(importlib.import_module(experiment.module), "pages", None)
        texts |= pages(root, results) if pages else {}
    for path, text in texts.items():
        if not path.is_file() or path.read_bytes() != text.encode():
            if checking:
                differing.append(str(path))
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8", newline="\n")
                print(path)
    for name in differing:
        print(f"differs from its records: {Path(name).relative_to(root)}")
    if checking:
        print(
            f"{len(differing)} files differ; `make report` rebuilds them." if differing else "All reports match their records."
        )
    return 1 if differing else 0


def main(arguments: Sequence[str]) -> int:
    """Command line; bad arguments or a bad claims file exit with 2 and one sentence."""
    try:
        return run(ROOT, parse(arguments))
    except (ConfigError, ClaimsError) as error:
        print(error, file=sys.stderr)
        return 2
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
