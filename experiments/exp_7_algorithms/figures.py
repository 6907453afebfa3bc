"""The figures of the comparison and the table of docs/algorithms.md, from records and provenance alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.claims import load_claims
from common.records import Point, Record, ordered, read_json, read_jsonl, sample_at
from common.report.figures import bars, curve
from common.report.index import COMMITTED_SCALE, replaced
from common.report.tables import Table
from common.report.text import NOT_AVAILABLE, interval, number
from common.statistics import estimate

CLAIMS = load_claims(Path(__file__).with_name("claims.yaml"))
LABELS = CLAIMS.labels
FAMILIES = {
    "supervised": ("sft", "dft", "iw_sft", "eksft", "rft", "star"),
    "preference": ("dpo", "step_dpo", "kto", "online_dpo"),
    "policy-gradient": ("reinforce", "reinforce_baseline", "reinforce_pp", "rloo", "ppo", "grpo", "dr_grpo", "gspo", "cispo"),
    "distillation": ("grpo", "opd_sampled", "opd_full", "opsd"),
    "grpo-options": ("grpo", "grpo_kl", "grpo_kl_strong", "dapo", "dapo_window"),
}
LEARNED = ("rlhf", "rlhf_kl")
GROUPED = ("grpo", "dr_grpo", "rloo", "gspo", "cispo", "dapo", "dapo_window", "grpo_kl", "grpo_kl_strong")
# What a method needs beside the policy and the prompts.
NEEDS = {
    "sft": "worked answers", "dft": "worked answers", "iw_sft": "worked answers, reference",
    "eksft": "worked answers, reference", "rft": "verifier", "star": "verifier, worked answers as hints",
    "dpo": "verdicts, reference", "step_dpo": "verdicts, reference", "kto": "verdicts, reference",
    "online_dpo": "verifier, reference", "rlhf": "verdicts, reward model", "rlhf_kl": "verdicts, reward model, reference",
    "reinforce": "verifier", "reinforce_baseline": "verifier", "reinforce_pp": "verifier, reference", "rloo": "verifier",
    "ppo": "verifier, value head", "grpo": "verifier", "grpo_kl": "verifier, reference",
    "grpo_kl_strong": "verifier, reference", "dr_grpo": "verifier", "dapo": "verifier", "dapo_window": "verifier",
    "gspo": "verifier", "cispo": "verifier", "opd_sampled": "teacher", "opd_full": "teacher",
    "opsd": "worked answers", "best_of_2": "verifier when answering", "best_of_4": "verifier when answering",
    "best_of_8": "verifier when answering", "best_of_16": "verifier when answering",
}  # fmt: skip
COSTS = (("flops", 1e12, 3), ("tokens_forward", 1e6, 2), ("tokens_trained", 1e6, 2), ("cpu_s", 1, 0))
BLOCK = ("<!-- comparison:begin -->", "<!-- comparison:end -->")


def figures(records: list[Record], folder: Path) -> list[str]:
    """Success at the end and along the way by family, groups that teach nothing, and the learned reward beside the true one."""
    arms = ordered(records, "arm")
    share = {"labels": LABELS}
    names = [
        bars(records, "id", "success", arms, folder / "id.svg", title="Success on new chains of trained lengths", **share),
        bars(records, "ood", "success", arms, folder / "ood.svg", title="Success on chains longer than any trained", **share),
    ]
    trained = [arm for arm in arms if any(row["arm"] == arm and not row["final"] for row in records)]
    axis = "compute of the arm's own training, percent"
    for family, members in FAMILIES.items():
        some = [arm for arm in members if arm in trained]
        if some:
            title = f"Success on chains of trained lengths along training: {family.replace('-', ' ')}"
            names.append(
                curve(records, "id", "success", some, folder / f"curve-{family}.svg", title=title, x_label=axis, **share)
            )
    learned = [arm for arm in LEARNED if arm in trained]
    for metric, what in (("proxy", "score of the reward model"), ("success", "success by the verifier")):
        if learned:
            title = f"RLHF with a learned reward: {what}, chains of trained lengths"
            path = folder / f"learned-{metric}.svg"
            names.append(curve(records, "id", metric, learned, path, title=title, x_label=axis, y_label=what, **share))
    grouped = [arm for arm in GROUPED if arm in trained]
    for metric, when in (("zero_early", "first"), ("zero_late", "last")):
        if grouped:
            title = f"Share of samples in groups without spread, {when} quarter of the steps"
            names.append(bars(records, "train", metric, grouped, folder / f"{metric}.svg", title=title, unit="rate", **share))
    return names


WRONG = {
    "success": "right",
    "lucky": "right behind wrong steps or none",
    "direct": "no step written",
    "failure/no_steps": "no step written, and wrong",
    "failure/arithmetic": "a result is wrong",
    "failure/misread": "not the step asked for",
    "failure/wrong_end": "another final number than the steps'",
    "failure/no_answer": "no final answer",
    "truncated": "cut by the limit",
    "length": "tokens",
}


def sections(records: list[Record]) -> dict[str, str]:
    """Heading -> Markdown: what goes wrong first in the answers to longer chains."""
    lines = [f"| arm | {' | '.join(WRONG.values())} |", "| --- |" + " --- |" * len(WRONG)]
    for arm in ordered(records, "arm"):
        cells = []
        for metric in WRONG:
            found = estimate(sample_at(records, Point(arm, metric, "ood")))
            cells.append(number(found.mean, CLAIMS.metric(metric).unit) if found else NOT_AVAILABLE)
        lines.append(f"| {LABELS.get(arm, arm)} | {' | '.join(cells)} |")
    return {"What goes wrong first on longer chains": "\n".join(lines)}


def comparison(records: list[Record], provenance: Mapping[str, Any]) -> Table:
    """One row per arm: success with its interval, KL, and what one cell cost."""
    header = (
        "algorithm", "success, trained lengths", "success, longer chains", "KL to the start, nats", "TFLOP",
        "million tokens sampled or scored", "million tokens trained", "CPU s", "needs beside policy and prompts",
    )  # fmt: skip
    rows = []
    for arm in ordered(provenance.get("cells", []), "arm"):
        row = [LABELS.get(arm, arm)]
        for metric, split, unit in (("success", "id", "rate"), ("success", "ood", "rate"), ("kl_start", "id", "number")):
            found = estimate(sample_at(records, Point(arm, metric, split)), rate=unit == "rate")
            row.append(interval(found, unit) if found else "")
        cells = [cell for cell in provenance["cells"] if cell["arm"] == arm]
        for key, scale, decimals in COSTS:
            known = [cell[key] for cell in cells if key in cell]
            row.append(f"{sum(known) / len(known) / scale:,.{decimals}f}" if known else "")
        rows.append([*row, NEEDS.get(arm, "")])
    return Table(header, rows)


def pages(root: Path, results: Path) -> dict[Path, str]:
    """What this experiment generates beside its report: the comparison table of docs/algorithms.md."""
    folder, page = results / CLAIMS.experiment / COMMITTED_SCALE, root / "docs" / "algorithms.md"
    if not (folder / "provenance.json").is_file():
        return {page: replaced(page, BLOCK, f"No result at {COMMITTED_SCALE} scale yet: `make exp-{CLAIMS.experiment}`.")}
    provenance = read_json(folder / "provenance.json")
    seeds, wall = provenance.get("seeds", []), provenance.get("wall_s")
    link = Path("..") / (folder / "report.md").relative_to(root)
    text = f"{len(seeds)} seeds, 95 % intervals over seeds and chains"
    text += "" if wall is None else f", {wall / 60:.0f} minutes in all"
    table = comparison(read_jsonl(folder / "records.jsonl"), provenance)
    return {page: replaced(page, BLOCK, f"{text}; [full report]({link}).\n\n{table.markdown}")}
