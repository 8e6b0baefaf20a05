"""`export_run`: what `rlplace export` does with a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlplace.errors import InvalidValue
from rlplace.export.check import check_export
from rlplace.export.formats import FORMATS, Exported, ExportRequest
from rlplace.export.step import matching_host
from rlplace.files import write_text_atomic
from rlplace.measure.timing.threads import one_thread_here
from rlplace.say import clean, say
from rlplace.session.folder import RunFolder
from rlplace.session.session import Session

LIST = "list"
"""The word for all formats."""


@one_thread_here()
def export_run(
    folder: Path, *, workload: str | None, is_check: bool, format: str = "script", cache_tokens: int = 0
) -> dict[str, Any]:
    """Writes a run's placement in a format, or compares its placed step with eager; returns what `--json` prints.

    Args:
        folder: of the run.
        workload: the workload again, where the run is of a user's function.
        is_check: compare, and write nothing.
        format: a name of `FORMATS`; or `list`, which writes nothing and says what there is.
        cache_tokens: tokens of each sequence whose keys and values a format counts.

    Raises:
        UnknownName: there is no such format.
        FileProblem: no run there, or a malformed one; or the file cannot be written.
        FingerprintMismatch: its placement is for another graph or host.
        InvalidValue: the run is of a user's function, and `workload` does not name it again; or of a graph file, and
            the format needs the model; or `is_check` with another format than `script`; or the format takes no
            `cache_tokens`, or they are negative.
    """
    if format == LIST:
        return listed()
    chosen = FORMATS[format]
    if is_check and format != "script":
        raise InvalidValue(
            "format",
            format,
            "none with a check",
            where="export",
            hint="A check runs the placed step and writes nothing: leave one of the two out.",
        )
    if cache_tokens < 0 or (cache_tokens and "cache_tokens" not in chosen.options):
        expected = "0 or more" if cache_tokens < 0 else f"0 with {format}"
        hint = "The format `device_map` counts keys and values."
        raise InvalidValue("cache_tokens", cache_tokens, expected, where="export", hint=hint)
    run = RunFolder.open(folder)
    path = run.root / chosen.file
    with Session.read(folder) as session:
        placement = session.best_placement()
        request = ExportRequest(run, session, placement, workload, cache_tokens)
        if (line := unchecked_loss(session)) is not None:
            say(line)
        if is_check:
            return _check(request)
        made = chosen.text(request)
        exported = made if isinstance(made, Exported) else Exported(made)
        if workload is not None:  # it may be another one, or have changed since
            placement.require_graph(request.captured())
        write_text_atomic(path, exported.text)
        how = _how_to_run(path, request) if format == "script" else chosen.summary
    say(f"wrote {path}: {how}")
    return {"schema": 1, "format": format, "path": str(path)} | exported.figures


def listed() -> dict[str, Any]:
    """Every format with its file and what it is for, said on stderr; what `--format list --json` prints."""
    formats = {name: FORMATS[name] for name in FORMATS}
    width = max(map(len, formats))
    for name, one in formats.items():
        say(f"{name:{width}}  {one.file}: {one.summary}")
    return {"schema": 1, "formats": {name: {"file": one.file, "is": one.summary} for name, one in formats.items()}}


def _how_to_run(path: Path, request: ExportRequest) -> str:
    if request.is_simulated:
        host = clean(request.session.request.host)
        return f"the run is of {host}, which was simulated: it runs on such a host only, not on this machine"
    return f"run it with python {path}"


def unchecked_loss(session: Session) -> str | None:
    """A warning, where the loss of a run's micro-batches was not checked; else None."""
    verdict = session.facts.verdict
    if verdict is None or verdict.is_checked:
        return None
    count, kind, why = map(clean, (session.facts.num_micro_batches, verdict.kind, verdict.why))
    return (
        f"warning: the loss of the run's {count} micro-batches was not checked, it is taken as "
        f"{kind} ({why}): the step may be refused where it is captured with values, or be "
        "another than was searched. Train again on a host of this machine, which checks it, or with "
        "`--loss accumulated`, which needs no check."
    )


def _check(request: ExportRequest) -> dict[str, Any]:
    placement = request.placement
    if request.is_simulated:
        hint = "A check runs the placed step: train on a host of this machine (`--host auto`) first."
        raise InvalidValue(
            "host", request.session.request.host, "one of this machine", where="export --check", hint=hint
        )
    graph, host = request.captured(), matching_host(placement)
    placement.require(graph, host)
    count = graph.num_micro_batches
    checked = check_export(graph, host, placement.plan)
    eager = f"eager gradient accumulation over {count} slices" if checked.is_accumulation else "eager"
    verdict = f"agrees with {eager}" if checked.ok else f"DIFFERS from {eager}"
    seeded = f", {checked.num_random_ops} random ops given the same seeds" if checked.num_random_ops else ""
    say(
        f"{checked.num_steps} placed steps{seeded}: {verdict}; largest relative difference of the loss "
        f"{checked.max_loss_rel_diff:.2e}, of parameters {checked.max_param_rel_diff:.2e} (float64)"
    )
    return checked.to_dict()
