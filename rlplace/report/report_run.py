"""The report of a run: made of its session, written as `report.html` into its folder."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from rlplace.files import write_text_atomic
from rlplace.session.folder import RUN_FILES, SESSION, RunFolder
from rlplace.session.session import Session

REPORT = "report.html"
"""Its name in a run folder."""


def write_report(folder: RunFolder | Path, session: Session | None = None) -> Path:
    """Writes the report of a run, over one that is there already, and returns where.

    Reading runs no code: neither the model nor the host is needed.

    Args:
        folder: of a run that came to its end.
        session: of the run, where it is open already.

    Raises:
        FileProblem: no run there, one without a result, or a file that cannot be read or written.
        InvalidValue, UnknownName: its session is malformed.
        MissingExtra: plotly is not installed.
    """
    from rlplace.report.html import RunData, report_page

    run = folder if isinstance(folder, RunFolder) else RunFolder.open(folder)
    path = run.path(REPORT)
    with Session.read(run.root) if session is None else nullcontext(session) as opened:
        files = tuple(name for name in RUN_FILES if name not in (REPORT, SESSION) and run.has(name))
        data = RunData.of(opened, files)
    write_text_atomic(path, report_page(data))
    return path
