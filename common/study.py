"""The frame of an experiment's run: jobs on the workers, cells gathered, report written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.config import Common, result_folder, run_folder
from common.jobs import Cell, Job, run_jobs
from common.provenance import collect
from common.records import read_records
from common.report.build import build


def run_study(
    settings: Common,
    jobs: Sequence[Job],
    cells: Sequence[Cell],
    *,
    claims: Path,
    figures: Callable | None = None,
    sections: Callable[[list[dict]], Any] | None = None,
) -> int:
    """Runs the jobs, then gathers the cells and writes the report; 1 if a job failed, whose cells are left out.

    A job returns a dict: ``stages``, the folders of the stages it used or built, and, from a cell, ``headline``, which is
    printed as soon as the cell has ended. ``figures``, ``sections``: see common.report.build.
    """
    stages: dict[str, None] = {}

    def on_done(job: Job, result: dict | None) -> None:
        stages.update(dict.fromkeys((result or {}).get("stages", [])))
        if result and "headline" in result:
            print(f"{job.name}: {result['headline']}")

    folder = run_folder(settings)
    failures = run_jobs(
        list(jobs),
        workers=settings.workers,
        threads=settings.threads,
        launcher=settings.launcher,
        on_done=on_done,
        logs=folder / "logs",
        fork=settings.device == "cpu",
    )
    for failure in failures:
        print(f"failed: {failure.name}: {failure.error}")
    results = result_folder(settings)
    collect(folder, list(cells), results, settings=settings, failures=failures, stages=[Path(s) for s in sorted(stages)])
    build(results, claims, figures, sections(read_records(results)) if sections else None)
    print(f"report: {results / 'report.md'}")
    return 1 if failures else 0
