"""The report of a run: read from its folder, written as `report.html` beside what it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.errors import FileProblem
from rlplace.files import write_text_atomic
from rlplace.measure.explain.explanation import FILE as EXPLANATION
from rlplace.measure.explain.explanation import load_explanation
from rlplace.session.folder import RUN_FILES, RunFolder

if TYPE_CHECKING:
    from rlplace.report.html import RunData

REPORT = "report.html"
"""Its name in a run folder."""


def write_report(folder: RunFolder | Path) -> Path:
    """Writes the report of a run, over one that is there already, and returns where.

    Reading runs no code: neither the model nor the host is needed.

    Args:
        folder: of a run that came to its end.

    Raises:
        FileProblem: no run there, one without a result, or a file that cannot be read or written.
        InvalidValue, UnknownName: a malformed file of the run.
        MissingExtra: plotly is not installed.
    """
    from rlplace.report.html import report_page

    run = folder if isinstance(folder, RunFolder) else RunFolder.open(folder)
    path = run.path(REPORT)
    write_text_atomic(path, report_page(read_run(run)))
    return path


def read_run(run: RunFolder) -> RunData:
    """What a run's files hold of what a report shows; a file that is missing leaves its part out.

    Raises:
        FileProblem: no `result.json`, or a file that cannot be read.
        InvalidValue, UnknownName: a malformed file.
    """
    from rlplace.report.html import decode_run

    if not run.has("result.json"):
        raise FileProblem(
            run.root, "this run has no result.json: it stopped before its table, so there is nothing to report."
        )
    return decode_run(
        run.read_json("config.json"),
        run.read_json("result.json"),
        problem=_optional(run, "problem.json"),
        trace=_optional(run, "timeline.json"),
        search=_optional(run, "search.json"),
        host_model=_optional(run, "host_model.json"),
        explanation=load_explanation(run.path(EXPLANATION)) if run.has(EXPLANATION) else None,
        files=tuple(name for name in RUN_FILES if name != REPORT and run.has(name)),
    )


def _optional(run: RunFolder, name: str) -> dict[str, Any] | None:
    return run.read_json(name) if run.has(name) else None
