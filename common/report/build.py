"""report.md and report.html of one result folder, from records, provenance, rollouts and claims alone.

    results/7-11/laptop/{records.jsonl, provenance.json, rollouts.jsonl}  ->  {report.md, report.html, figures/*.svg}

Building is deterministic, so `check` can rebuild into a temporary folder and name every file that differs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jinja2
from markdown_it import MarkdownIt

from common.claims import VERDICTS, Claims, Finding, evaluate_all, load_claims
from common.config import FIRST_REPORT_SEED
from common.records import Record, ordered, read_json, read_jsonl, read_records
from common.report import tables
from common.report.figures import default_figures, inline, title_of
from common.report.text import number, visible

Figures = Callable[[list[Record], Path], list[str]]
PICKS = ("best", "worst", "surprising")
TEXT_LIMIT = 4000  # characters shown of one piece of a rollout; the rest is counted


@dataclass(frozen=True)
class Result:
    """All inputs of one report."""

    folder: Path
    claims: Claims
    records: list[Record]
    provenance: dict[str, Any]
    study: str

    @cached_property
    def findings(self) -> list[Finding]:
        return evaluate_all(self.claims, self.records, self.study)

    @property
    def scale(self) -> str:
        return str(self.provenance.get("configuration", {}).get("scale", ""))

    @property
    def changed(self) -> list[str]:
        """What a variant overrides, "key=value"; empty for the unchanged configuration."""
        config = self.provenance.get("configuration", {})
        return sorted([*config.get("overrides", []), *config.get("selection", [])])


def load(folder: Path, claims: Claims) -> Result:
    """Read a result folder; ValueError names what is missing or broken and what to do."""
    for name in ("records.jsonl", "provenance.json"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no {name}; run the experiment first (make exp-{claims.experiment})")
    provenance = read_json(folder / "provenance.json")
    study = str(provenance.get("configuration", {}).get("study", "ablation" if folder.name == "ablation" else "main"))
    place = {arm: i for i, arm in enumerate(provenance.get("arms", []))}
    records = sorted(read_records(folder), key=lambda row: place.get(row["arm"], len(place)))
    return Result(folder, claims, records, provenance, study)


def base_of(result: Result) -> Result | None:
    """The unchanged configuration beside which a variant is set: results/7-11/laptop for .../laptop/variants/<name>."""
    for parent in result.folder.parents:
        if parent.name == "variants" and (parent.parent / "records.jsonl").is_file():
            return load(parent.parent, result.claims)
    return None


def build(
    result_folder: Path,
    claims: Path,
    figures: Figures | None = None,
    sections: Mapping[str, str] | None = None,
    out: Path | None = None,
) -> None:
    """Write report.md, report.html and figures/ into `out` (default: the result folder).

    `figures(records, folder)` draws the experiment's SVG files and returns their names in order; without it each final
    metric gets a default figure. `sections` adds Markdown texts (heading -> text) after the figures.
    """
    result = load(result_folder, load_claims(claims))
    out = out or result_folder
    pictures = out / "figures"
    pictures.mkdir(parents=True, exist_ok=True)
    draw = figures or partial(default_figures, labels=result.claims.labels, unit_of=lambda m: result.claims.metric(m).unit)
    names = draw(result.records, pictures)
    for stale in set(pictures.glob("*.svg")) - {pictures / name for name in names}:
        stale.unlink()
    page = f"experiments/{claims.parent.name}/README.md"
    context = _context(result, page, [(name, (pictures / name).read_text(encoding="utf-8")) for name in names], sections or {})
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=lambda name: bool(name and name.endswith(".html.j2")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for name in ("report.md", "report.html"):
        (out / name).write_text(templates.get_template(f"{name}.j2").render(context), encoding="utf-8", newline="\n")


def check(
    result_folder: Path,
    claims: Path,
    figures: Figures | None = None,
    sections: Mapping[str, str] | None = None,
) -> list[str]:
    """Rebuild into a temporary folder; the files that differ from, or are missing in, the result folder."""
    with tempfile.TemporaryDirectory() as temporary:
        fresh = Path(temporary)
        build(result_folder, claims, figures, sections, out=fresh)
        expected = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
        expected |= {path.relative_to(result_folder) for path in (result_folder / "figures").glob("*.svg")}
        return [str(result_folder / name) for name in sorted(expected) if _bytes(fresh / name) != _bytes(result_folder / name)]


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def tally(findings: Sequence[Finding]) -> dict[str, int]:
    """How many claims got which verdict, in a fixed order."""
    return {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in VERDICTS}


def main_table(result: Result) -> tables.Table:
    """The result table, with the base column where the result is a variant."""
    base = base_of(result)
    beside = (base.records, base.provenance) if base else None
    return tables.main_table(result.claims, result.records, result.provenance, result.findings, result.study, beside)


def facts(provenance: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Where the numbers come from, as label and text; what the provenance does not say is left out."""
    config, machine = provenance.get("configuration", {}), provenance.get("machine", {})
    settings = [f"{key} {config[key]}" for key in (*tables.COMPARABLE, "threads", "workers") if config.get(key) is not None]
    commit = f"{provenance.get('commit') or ''}{' with uncommitted changes' if provenance.get('dirty') else ''}"
    packages = ", ".join(f"{name} {version}" for name, version in provenance.get("packages", {}).items())
    memory = f"{machine['memory_gib']} GiB" if "memory_gib" in machine else ""
    cores = f"{machine['cores']} cores" if "cores" in machine else ""
    place = [str(machine.get("gpu", "")), str(machine.get("cpu", "")), cores, memory, str(machine.get("system", ""))]
    found = [
        ("Command", str(provenance.get("command", ""))),
        ("Commit", commit),
        ("Settings", ", ".join(settings)),
        ("Machine", ", ".join(part for part in place if part)),
        ("Packages", f"Python {machine['python']}, {packages}" if "python" in machine else packages),
    ]
    return [(label, text) for label, text in found if text]


def _context(result: Result, page: str, svgs: list[tuple[str, str]], sections: Mapping[str, str]) -> dict[str, Any]:
    """Everything the two templates show; ``page``: the experiment's own."""
    claims, records, provenance, findings = result.claims, result.records, result.provenance, result.findings
    counts = {verdict: count for verdict, count in tally(findings).items() if count}
    seeds = sorted({row["seed"] for row in records}.union(provenance.get("seeds", [])))
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    pictures = [
        {"file": name, "title": title_of(svg), "svg": inline(svg, f"figure{i}"), "id": f"figure{i}-caption"}
        for i, (name, svg) in enumerate(svgs, start=1)
    ]
    return {
        "claims": claims,
        "result": result,
        "page": page,
        "verdicts": VERDICTS,
        "counts": ", ".join(f"{count} {verdict}" for verdict, count in counts.items()),
        "seeds": ", ".join(map(str, seeds)),
        "first_report_seed": FIRST_REPORT_SEED,
        "tuning": any(seed < FIRST_REPORT_SEED for seed in seeds),
        "claims_table": tables.claims_table(findings, claims) if findings else None,
        "main_table": main_table(result),
        "has_base": base_of(result) is not None,
        "figures": pictures,
        "sections": [{"title": title, "text": text, "html": markdown.render(text)} for title, text in sections.items()],
        "discrepancies": tables.discrepancy_table(claims, records, provenance, findings, result.study),
        "departures": claims.departures,
        "compute": tables.compute_table(provenance, claims),
        "failures": tables.failures(provenance),
        "overlaps": tables.overlap_notes(records),
        "facts": facts(provenance),
        "rollouts": _rollouts(read_jsonl(result.folder / "rollouts.jsonl"), claims),
    }


def _rollouts(rows: list[Record], claims: Claims) -> list[dict[str, Any]]:
    """At most ten rollouts per arm, sorted best, worst, surprising; long text is cut and counted."""
    arms = []
    for arm in ordered(rows, "arm"):
        own = sorted((row for row in rows if row["arm"] == arm), key=lambda row: PICKS.index(row["pick"]))[:10]
        arms.append({"label": claims.label(arm), "rollouts": [_rollout(row) for row in own]})
    return arms


def _rollout(row: Record) -> dict[str, Any]:
    return {
        "pick": row["pick"],
        "seed": row["seed"],
        "success": row["success"],
        "reward": number(row["reward"]),
        "parts": [(name, number(value)) for name, value in (row.get("parts") or {}).items()],
        "reason": visible(str(row.get("reason", ""))),
        "prompt": shown(row["prompt"]),
        "segments": [{"text": shown(part["text"]), "policy": bool(part["mask"])} for part in row["segments"]],
    }


def shown(text: str) -> str:
    """Untrusted text made visible, cut at TEXT_LIMIT characters with the rest counted."""
    if len(text) <= TEXT_LIMIT:
        return visible(text)
    return f"{visible(text[:TEXT_LIMIT])} [{len(text) - TEXT_LIMIT:,} more characters]"
