"""`report_page`: a run as one HTML page that needs nothing else: no network, no file beside it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from string import Template

from rlplace.errors import MissingExtra
from rlplace.report.html.escape import escaped, prose
from rlplace.report.html.explained import explained_section
from rlplace.report.html.fidelity import fidelity_section
from rlplace.report.html.field import field_section
from rlplace.report.html.figure import figures_json
from rlplace.report.html.learned_host import learned_host_section
from rlplace.report.html.learning import learning_section
from rlplace.report.html.memory import memory_section
from rlplace.report.html.modules import modules_section
from rlplace.report.html.overview import overview
from rlplace.report.html.run_data import RunData
from rlplace.report.html.tags import Section
from rlplace.report.html.timeline import timeline_section
from rlplace.report.html.what_was_run import what_was_run_section

SECTIONS: tuple[tuple[str, str, Callable[[RunData], Section | None]], ...] = (
    ("The field", "the table", field_section),
    ("Timeline", "a timeline", timeline_section),
    ("Placement", "a timeline", modules_section),
    ("Where the time goes", "an explanation", explained_section),
    ("How the search went", "the history of a search", learning_section),
    ("Memory", "memory over time", memory_section),
    ("Simulator against measured", "placements both simulated and measured", fidelity_section),
    ("What was learned about the host", "what a method learned about the host", learned_host_section),
    ("What was run", "settings", what_was_run_section),
)
"""Title, what it is made from, and who makes it; in the order of the page."""


def report_page(data: RunData) -> str:
    """The page: its texts escaped, its script and plotly's inlined, and nothing else allowed to run.

    The page's policy names its scripts by their hashes: markup that came in with a name could run nothing, and nothing
    on the page can reach a network.

    Args:
        data: what the files of a run hold.

    Raises:
        MissingExtra: plotly is not installed.
    """
    made = [make(data) for _, _, make in SECTIONS]
    sections = [section for section in made if section is not None]
    missing = [what for (_, what, _), section in zip(SECTIONS, made, strict=True) if section is None]
    plotly, script = plotly_script(), _asset("page.js")
    return Template(_asset("page.html")).substitute(
        policy=_policy((plotly, script)),
        title=escaped(f"{data.workload}: rlplace report"),
        style=_asset("style.css"),
        contents="".join(f'<a href="#{section.id}">{escaped(section.title)}</a>' for section in sections),
        overview=overview(data),
        sections="".join(map(_markup, sections)),
        missing=_missing(missing),
        figures=figures_json([figure for section in sections for figure in section.figures]),
        plotly=plotly,
        script=script,
    )


def plotly_script() -> str:
    """plotly.js, as the plotly package brings it.

    Raises:
        MissingExtra: plotly is not installed.
    """
    found = find_spec("plotly")
    if found is None or found.origin is None:
        raise MissingExtra("plotly", how="it draws the figures of reports: pip install plotly")
    path = Path(found.origin).parent / "package_data" / "plotly.min.js"
    return path.read_text(encoding="utf-8")


def _markup(section: Section) -> str:
    return (
        f'<section id="{section.id}"><h2>{escaped(section.title)}</h2>'
        f'<p class="lead">{prose(section.lead)}</p>{section.body}</section>'
    )


def _missing(what: Sequence[str]) -> str:
    """What the run kept no data of, in a line."""
    kinds = list(dict.fromkeys(what))
    if not kinds:
        return ""
    listed = kinds[0] if len(kinds) == 1 else f"{', '.join(kinds[:-1])} or {kinds[-1]}"
    return f'<p class="note">This run kept nothing of these, so their sections are left out: {escaped(listed)}.</p>'


def _policy(scripts: Sequence[str]) -> str:
    """A content security policy under which these scripts run and nothing is loaded from anywhere."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode('utf-8')).digest()).decode('ascii')}'"
        for script in scripts
    )
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"


def _asset(name: str) -> str:
    return (resources.files("rlplace.report.html") / name).read_text(encoding="utf-8")
