"""Collects a teacher's traces from any OpenAI-compatible server, verifies them and writes rows to train on.

    TEACHER_BASE_URL=http://localhost:8000/v1 python -m experiments.exp_7_09_cot_distillation.collect folder=runs/traces

The teacher is a model with open weights unless you name another: whether a closed model's answers may be trained on is
said by its terms, and most hide or rewrite their thinking. Keys, as key=value:

    folder=        where answers.jsonl (everything the server said), sft.jsonl and counts.json go
    problems=20    training problems, of 2 to 4 steps
    samples=4      answers to each
    cap=4          different right answers kept of each
    seed=0         which problems
    max_cost=null  USD after which no further answer is asked for
    server.model=  the model; else TEACHER_MODEL, else Qwen/Qwen3-8B (Apache-2.0)
    server.*       temperature, max_tokens, workers, requests_per_minute, timeout_s, retries, price_in, price_out, ...

The same command goes on where it was stopped; failed asks are asked again.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.files import write_json, write_json_lines
from common.schema import ConfigError, build, within
from common.teacher import Ask, TeacherError, collect, totals
from common.teacher_server import MODEL, ServerConfig, ServerTeacher
from experiments.exp_7_09_cot_distillation import problems, selection

OPEN_TEACHER = "Qwen/Qwen3-8B"
SYSTEM = (
    "Work out the sum step by step and check each step. End with a last line that holds nothing but `Final answer: ` and the "
    "number in digits."
)


@dataclass(frozen=True)
class CollectConfig:
    """See the module."""

    folder: str
    problems: int = 20
    samples: int = 4
    cap: int = 4
    seed: int = 0
    max_cost: float | None = None
    server: ServerConfig = field(default_factory=lambda: ServerConfig(system=SYSTEM))

    def __post_init__(self) -> None:
        for key in ("problems", "samples", "cap"):
            within(key, getattr(self, key), 1)


def read_words(words: list[str]) -> CollectConfig:
    """The configuration of a command line; ConfigError names what is wrong."""
    for word in words:
        if "=" not in word:
            raise ConfigError(f"{word}: not understood; write key=value, for instance problems=20.")
    try:
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist(words))
    except OmegaConfBaseException as error:
        raise ConfigError(" ".join(str(error).split())) from None
    config: CollectConfig = build(CollectConfig, values)
    server = replace(config.server, model=config.server.model or os.environ.get(MODEL) or OPEN_TEACHER)
    return replace(config, server=replace(server, system=server.system or SYSTEM))


def training_row(problem: problems.Problem, text: str) -> dict[str, Any]:
    """Problem -> thinking and answer, as chat messages."""
    return {"messages": [{"role": "user", "content": problem.prompt}, {"role": "assistant", "content": text}]}


def run(config: CollectConfig) -> dict[str, float]:
    """Asks, filters, writes; the counts of each step with tokens and cost."""
    folder = Path(config.folder)
    chosen = problems.items("train", config.seed, problems.ID_LENGTHS, config.problems)
    asks = [Ask(f"{i}/{k}", problem.prompt) for i, problem in enumerate(chosen) for k in range(config.samples)]
    file = folder / "answers.jsonl"
    rows = collect(ServerTeacher.from_environment(config.server), asks, file, max_cost=config.max_cost)
    chosen_by = selection.Selection(candidates=config.samples, cap=config.cap)
    kept, counts = selection.select(selection.judged(chosen, [row for row in rows if row["finished"]]), chosen_by)
    write_json_lines(folder / "sft.jsonl", [training_row(chosen[c.group], c.text) for c in kept])
    summary = {**totals(file), "cut": sum(not row["finished"] for row in rows), **counts}
    write_json(folder / "counts.json", summary)
    return summary


def main(words: list[str]) -> int:
    """0, or 2 with one sentence where something has to be mended first; what came in so far stays."""
    try:
        summary = run(read_words(words))
    except (ConfigError, TeacherError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped: the same command goes on from here", file=sys.stderr)
        return 130
    print(", ".join(f"{name} {value:,.10g}" for name, value in summary.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
