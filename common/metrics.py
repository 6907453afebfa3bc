"""The one metric registry: name -> unit and meaning. Tables, figures, trackers and docs/metrics.md all read it.

An experiment names further metrics of its own in the `metrics` block of its claims.yaml. `<...>` in a name stands for
one path part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

UNITS = {
    "rate": "share between 0 and 1, printed in percent; differences in percentage points",
    "count": "a number of things",
    "seconds": "seconds",
    "nats": "natural-log units",
    "tokens": "tokens",
    "tokens/s": "tokens per second",
    "reward": "reward units of the experiment",
    "number": "no unit",
}


@dataclass(frozen=True)
class Metric:
    """What a metric counts (`meaning`, one clause), in which `unit`, and the `label` an axis carries."""

    name: str
    unit: str
    meaning: str
    label: str = ""

    @property
    def title(self) -> str:
        return self.label or self.name


TRAINING = {
    "success/mean": ("rate", "share of the sampled answers that the verifier accepts"),
    "score/mean": ("reward", "mean of what the verifier says about the sampled answers"),
    "reward/mean": ("reward", "mean of what training maximises (score plus shaping, KL in reward and penalties)"),
    "reward/<part>": ("reward", "mean of one named part of the reward"),
    "reward/zero_std_frac": ("rate", "share of groups whose rewards are all equal and so carry no GRPO gradient"),
    "loss/policy": ("number", "policy loss of the update"),
    "loss/sft": ("nats", "mean negative log-likelihood of the target tokens in pre-training or SFT"),
    "loss/value": ("number", "value-head loss of the update"),
    "loss/reward": ("nats", "Bradley-Terry loss of the reward model"),
    "preference/chosen": ("number", "mean of beta * log(policy / reference) over the better answers"),
    "preference/rejected": ("number", "mean of beta * log(policy / reference) over the worse answers"),
    "preference/margin": ("number", "mean of the better answer's (implicit) reward less the worse one's"),
    "preference/accuracy": ("rate", "share of pairs whose better answer has the higher (implicit) reward"),
    "preference/kl": ("nats", "KTO's reference point: mean log(policy / reference) of answers behind other prompts, or 0"),
    "preference/pairs": ("count", "pairs that a step of online DPO learns from"),
    "kl/ref": ("nats", "mean per-token KL estimate from the policy to the reference"),
    "kl/old": ("nats", "mean per-token KL estimate from the policy that sampled to the policy that is trained"),
    "ratio/clip_low_frac": ("rate", "share of trained tokens whose ratio was clipped from below"),
    "ratio/clip_high_frac": ("rate", "share of trained tokens whose ratio was clipped from above"),
    "kl/teacher": ("nats", "mean per-token KL from the student to the teacher, over whole distributions"),
    "sft/weight": ("number", "mean weight of a target token in a variant of SFT; with dropped tokens, the share kept"),
    "rejection/<step>": ("count", "candidates of a rejection-sampling round: sampled, removed by a step, or kept"),
    "entropy": ("nats", "mean entropy of the policy's next-token distribution on its own tokens"),
    "grad_norm": ("number", "gradient norm before clipping"),
    "len/completion_mean": ("tokens", "mean number of tokens the policy wrote per episode"),
    "len/truncated_frac": ("rate", "share of episodes cut by the token or turn limit"),
    "time/rollout": ("seconds", "wall seconds spent sampling in this step"),
    "time/update": ("seconds", "wall seconds spent in forward, backward and optimizer in this step"),
    "throughput/tokens_per_s": ("tokens/s", "sampled tokens per wall second of the rollout"),
    "progress/step": ("count", "optimizer or environment steps done"),
    "progress/eta_s": ("seconds", "estimated wall seconds left"),
}
EVALUATION = {
    "eval/<split>/<metric>": ("number", "an evaluation metric while training, on the named split"),
    "success": ("rate", "share of episodes the verifier calls solved, within the allowed attempts"),
    "success_first": ("rate", "share of episodes solved by the first answer"),
    "return": ("reward", "undiscounted sum of the rewards of an episode"),
    "reward": ("reward", "mean reward of an episode"),
    "length": ("tokens", "mean number of tokens the policy wrote per episode"),
    "steps": ("count", "environment steps of an episode"),
    "kl_start": ("nats", "KL per answer from the trained policy to the start, on the policy's own samples"),
    "cpu_s": ("seconds", "CPU seconds of a cell"),
    "overlap": ("count", "test items that also occur in training or demonstrations (must be 0)"),
}


def _entries(table: Mapping[str, tuple[str, str]]) -> dict[str, Metric]:
    return {name: Metric(name, unit, meaning) for name, (unit, meaning) in table.items()}


REGISTRY: dict[str, Metric] = _entries(TRAINING) | _entries(EVALUATION)


def find(name: str, extra: Mapping[str, Metric] | None = None) -> Metric | None:
    """The metric of that name, from `extra` (an experiment's own) or the registry; None if neither knows it."""
    known = {**REGISTRY, **(extra or {})}
    if name in known:
        return known[name]
    for pattern, metric in known.items():
        if "<" in pattern and re.fullmatch(re.sub(r"<\w+>", "[^/]+", re.escape(pattern)), name):
            return metric
    return None


def document(experiments: Mapping[str, Mapping[str, Metric]]) -> str:
    """docs/metrics.md: the registry, the units, and each experiment's own metrics (title -> metrics)."""
    lines = ["# Metrics", "", "Generated by `python -m scripts.report` from `common/metrics.py` and each experiment's"]
    lines += ["`claims.yaml`. The same names are used in metric logs, records, trackers, tables and figures.", ""]
    tables = {"While training": _entries(TRAINING), "Evaluation": _entries(EVALUATION), **experiments}
    for title, metrics in tables.items():
        if metrics:
            lines += [f"## {title}", "", "| name | unit | meaning |", "| --- | --- | --- |"]
            lines += [f"| `{m.name}` | {m.unit} | {m.meaning} |" for m in metrics.values()] + [""]
    lines += ["## Units", "", "| unit | meaning |", "| --- | --- |"]
    lines += [f"| {unit} | {meaning} |" for unit, meaning in UNITS.items()]
    return "\n".join(lines) + "\n"
