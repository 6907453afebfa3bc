"""Copy trained models out of the run folder, each with its tokenizer and a filled model card.

    python -m scripts.export 7-11 scale=laptop arm=grpo seed=100

Without arm= every arm is exported, without seed= the first seed of the run. What lies in export/ then loads with plain
transformers, or with PEFT when the run trained an adapter.
"""

import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from common.config import Common, ConfigError, run_folder, scales
from common.files import read_json, read_json_lines, write_text
from common.jobs import Cell, cell_folder
from scripts.experiment import ROOT, command, load, number_and_changes, settings

USAGE = "python -m scripts.export 7-11 [scale=laptop] [arm=grpo] [seed=100] [key=value ...]"


def main(arguments: list[str], root: Path = ROOT / "export") -> int:
    """0 when something was exported, 1 when the run holds no such model, 2 on bad arguments."""
    try:
        number, changes = number_and_changes(arguments, USAGE)
        picked = dict(word.split("=", 1) for word in changes if word.startswith(("arm=", "seed=")))
        chosen = settings(number, [word for word in changes if not word.startswith(("arm=", "seed="))])
        seed = picked.get("seed", str(chosen.first_seed))
        if not seed.isdigit():
            raise ConfigError(f"seed={seed}: must be a whole number.")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    trained = trained_cells(run_folder(chosen))
    cells = [cell for cell in trained if cell.seed == int(seed) and picked.get("arm", cell.arm) == cell.arm]
    if not cells:
        have = ", ".join(cell.name for cell in trained) or "none"
        wanted = f"{picked.get('arm', 'any arm')} with seed {seed}"
        print(f"No trained model of {wanted} in {run_folder(chosen)}; there are: {have}.", file=sys.stderr)
        print(f"`{command(number, chosen)}` trains them.{elsewhere(number, chosen)}", file=sys.stderr)
        return 1
    for cell in cells:
        print(export(number, chosen, cell, root / number / cell.name))
    return 0


def elsewhere(number: str, chosen: Common) -> str:
    """A sentence that names the other scales at which models of this study lie ready; empty when there are none."""
    own = run_folder(chosen)
    others = (scale for scale in scales(number) if scale != chosen.scale)
    found = [scale for scale in others if trained_cells(own.parents[2] / scale / own.parent.name / own.name)]
    return f" Models lie ready with SCALE={' and SCALE='.join(found)}." if found else ""


def trained_cells(folder: Path) -> list[Cell]:
    """The cells of a run folder that have ended and hold a model, sorted."""
    marks = [path for path in sorted(folder.glob("*/seed*/DONE")) if (path.parent / "model").is_dir()]
    named = [(path.parent.parent.name, path.parent.name.removeprefix("seed")) for path in marks]
    return [Cell(arm, int(seed)) for arm, seed in named if seed.isdigit()]  # others are set aside, such as seed100.stale


def export(number: str, chosen: Common, cell: Cell, target: Path) -> Path:
    """Copies one cell's model folder to `target` and writes its card; returns `target`."""
    source = cell_folder(run_folder(chosen), cell)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source / "model", target)
    records = [row for row in read_json_lines(source / "records.jsonl") if row.get("final")]
    cost = read_json(source / "cost.json") or {}
    write_text(target / "README.md", card(number, load(number).TITLE, chosen, cell, records, cost, target))
    return target


def card(
    number: str,
    title: str,
    chosen: Common,
    cell: Cell,
    records: list[dict[str, Any]],
    cost: dict[str, Any],
    folder: Path,
) -> str:
    """The model card in Markdown: what it is, how to load it, how it was made, what it scored and what it cost."""
    adapter = read_json(folder / "adapter_config.json")
    base = adapter.get("base_model_name_or_path") if adapter else getattr(chosen, "model_path", None)
    sees = "vision_config" in (read_json(folder / "config.json") or {})
    front: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
    front["pipeline_tag"] = "image-text-to-text" if sees else "text-generation"
    front |= {"base_model": base} if base else {"license": "apache-2.0"}
    front["tags"] = ["reinforcement-learning", f"experiment-{number}", cell.arm]
    rights = "The licence of the base model applies." if base else "Licence: Apache-2.0, like the code that made it."
    rows = [f"| {row['split']} | {row['metric']} | {_number(row['value'])} | {row['n']} |" for row in records]
    table = ["| split | metric | value | n |", "| --- | --- | --- | --- |", *rows] if rows else ["No final record."]
    spent = [f"- {key}: {_number(value)}" for key, value in cost.items()] or ["- not recorded"]
    silent = ("runs_dir", "results_dir", "workers", "launcher")
    keys = {key: value for key, value in asdict(chosen).items() if key not in silent}
    configuration = yaml.safe_dump(keys, sort_keys=False, allow_unicode=True).rstrip()
    return "\n".join([
        "---", yaml.safe_dump(front, sort_keys=False, allow_unicode=True).rstrip(), "---", "",
        f"# Experiment {number}, arm {cell.arm}, seed {cell.seed}", "",
        f"{title} Scale: {chosen.scale}. Made by `{command(number, chosen)}`. {rights}", "",
        "## Use", "", "```python", *_loading(bool(adapter), base, sees), "```", "",
        "## Result of this seed on the test split", "",
        "One seed is no evidence; the report of the experiment compares all seeds with intervals.", "", *table, "",
        "## Cost", "", *spent, "",
        "## Configuration", "", "```yaml", configuration, "```", "",
        "## Limits", "",
        "Trained on one synthetic task for a study of training methods; not meant for any other use.", "",
    ])  # fmt: skip


def _loading(adapter: bool, base: str | None, sees: bool) -> list[str]:
    kind = "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"
    lines = [f"from transformers import {kind}, AutoTokenizer"]
    if not adapter:
        return [
            *lines,
            f'model = {kind}.from_pretrained(".")',
            'tokenizer = AutoTokenizer.from_pretrained(".")',
        ]
    return [
        "from peft import PeftModel", *lines,
        f'model = PeftModel.from_pretrained({kind}.from_pretrained("{base}"), ".")',
        'tokenizer = AutoTokenizer.from_pretrained(".")',
    ]  # fmt: skip


def _number(value: Any) -> str:
    return "undefined" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
