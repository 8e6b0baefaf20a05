"""Tables for `print` and for notebooks: as plain text, and as HTML.

The final table: what each method's placement measured.

The comparison as people read it: fastest first, the winner and the bound marked, what is no placement apart.

What `rlplace advise` shows people: the verdict, why, and the figures that it stands on.

What `rlplace explain` shows people: devices, critical path, costliest copies, and what else it would cost.

What `rlplace graph` shows people: one table of figures, one of the dearest targets.

What `rlplace doctor` shows people: a finding a line.
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from rlplace.format import NOTHING, format_bytes, format_ms, format_seconds
from rlplace.measure.explain.explanation import Explanation
from rlplace.report.console import CleanConsole
from rlplace.say import clean

WIDTH = 120
"""Columns of a printed table; longer notes go on in the next line."""


def as_text(table: Table) -> str:
    """The table as lines without colours, the same on every terminal and in every file."""
    stream = io.StringIO()
    CleanConsole(file=stream, width=WIDTH, color_system=None, force_terminal=False, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).strip("\n")


def as_html(table: Table) -> str:
    """The table as an HTML `<table>`, its text escaped; a caption follows as a paragraph."""
    names = "".join(f"<th>{_escaped(column.header)}</th>" for column in table.columns)
    rows = "".join(
        f"<tr>{''.join(f'<td>{_escaped(cell)}</td>' for cell in row)}</tr>"
        for row in zip(*(column.cells for column in table.columns), strict=True)
    )
    caption = f"<p>{_escaped(table.caption)}</p>" if table.caption else ""
    return f"<table><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table>{caption}"


def _escaped(cell: object) -> str:
    return html.escape(cell.plain if isinstance(cell, Text) else str(cell))


NO_PLACEMENT_NOTE = "† no placement: measured for comparison, cannot be handed back"


def results_table(rows: Sequence[Mapping[str, object]], *, best: str | None = None, title: str | None = None) -> Table:
    """Rows of `result.json` as a table, fastest first, what failed last.

    Rows that are no placement (`"placement": false`) form a section of their own below, with a note. The ratio is to
    the row called `single`.

    Args:
        rows: with `method`, `step_time_s`, `spread_s`, `placements`, `placement`, `status`, and `measured` and `why`
            where they apply.
        best: the method to mark as winner; by default the fastest placement.
        title: above the table.
    """
    placements = sorted((row for row in rows if row.get("placement", True)), key=_order)
    others = sorted((row for row in rows if not row.get("placement", True)), key=_order)
    if best is None:
        best = next((str(row["method"]) for row in placements if math.isfinite(_step_time_s(row))), None)
    single_s = next((_step_time_s(row) for row in rows if row["method"] == "single"), math.inf)
    table = Table(
        title=title,
        title_style="bold",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
    )
    table.add_column("method", no_wrap=True)
    table.add_column("step, ms", justify="right", no_wrap=True)
    table.add_column("", justify="left", no_wrap=True)
    table.add_column("vs single", justify="right", no_wrap=True)
    table.add_column("placements", justify="right", no_wrap=True)
    table.add_column("notes", overflow="fold")
    for row in placements:
        is_best = row["method"] == best
        table.add_row(*_cells(row, single_s, mark=" ★" if is_best else ""), style="bold green" if is_best else None)
    if others:
        table.add_section()
        for row in others:
            table.add_row(*_cells(row, single_s, mark=" †"), style="dim")
        table.caption = NO_PLACEMENT_NOTE
    return table


def _cells(row: Mapping[str, object], single_s: float, *, mark: str) -> list[Text]:
    step_time_s, spread_s = _step_time_s(row), _number(row.get("spread_s"))
    ratio = step_time_s / single_s if single_s > 0 else math.inf
    is_timed = math.isfinite(step_time_s)
    tried = row.get("placements")
    status, why = str(row.get("status", "ok")), str(row.get("why") or "")
    notes = [f"{row['measured']:,} measured"] if row.get("measured") else []
    if row.get("one_thread_s") is not None:
        notes.append(f"one thread {format_ms(_number(row['one_thread_s']))}")
    if status != "ok":
        notes.append(f"{status}: {why}" if why else status)
    elif why:
        notes.append(why)
    return [
        Text(f"{row['method']}{mark}"),
        Text(format_ms(step_time_s)),
        Text(f"± {format_ms(spread_s)}" if is_timed and math.isfinite(spread_s) else ""),
        Text(f"{ratio:.2f}×" if is_timed and math.isfinite(single_s) else NOTHING),
        Text(f"{tried:,}" if isinstance(tried, int) and tried else ""),
        Text("; ".join(notes)),
    ]


def _order(row: Mapping[str, object]) -> float:
    return _step_time_s(row)


def _step_time_s(row: Mapping[str, object]) -> float:
    """The row's step time, infinite where it failed or was not timed."""
    step_time_s = _number(row.get("step_time_s"))
    return step_time_s if row.get("status", "ok") == "ok" and not math.isnan(step_time_s) else math.inf


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.inf


NO_STEP_TIME_NOTE = "† no placement: for comparison, cannot be handed back"


def compare_table(comparison: Mapping[str, Any]) -> Table:
    """What `rlplace compare --json` prints, as a table for a terminal.

    Args:
        comparison: with `rows`, `objective`, `best` and the bound.
    """
    best, bound_ms = comparison["best"], _bound_ms(comparison)
    rows = sorted(
        comparison["rows"], key=lambda row: (*_compared_order(row)[:2], not _is(row, best), *_compared_order(row)[2:])
    )
    has_seeds = len({row["seed"] for row in rows}) > 1
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, caption_justify="left")
    table.add_column("method", no_wrap=True)
    if has_seeds:
        table.add_column("seed", justify="right", no_wrap=True)
    table.add_column(_heading(comparison), justify="right", no_wrap=True)
    if comparison.get("measured"):
        table.add_column("", justify="left", no_wrap=True)
        table.add_column("simulated", justify="right", no_wrap=True)
    if comparison.get("truth"):
        table.add_column("as known", justify="right", no_wrap=True)
        table.add_column("measured", justify="right", no_wrap=True)
    for heading in ("over\nbound", "evaluations", "found\nin", "peak\nmemory"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("notes", overflow="fold")
    is_apart = False
    for row in rows:
        if not row["placement"] and not is_apart:
            table.add_section()
            is_apart = True
        is_best = _is(row, best)
        style = "bold green" if is_best and row["placement"] else "dim" if not row["placement"] else None
        table.add_row(*_compared_cells(row, comparison, is_best=is_best, has_seeds=has_seeds), style=style)
    table.add_section()
    blank = [Text("")] * has_seeds
    table.add_row(Text("lower bound"), *blank, Text(format_ms(bound_ms / 1e3)), style="cyan")
    notes = [f"bound: {comparison['lower_bound']}"] + ([NO_STEP_TIME_NOTE] if is_apart else [])
    if comparison.get("truth"):
        notes.append(f"truth: {comparison['truth']}; `as known` is what the simulator says that knows nothing of it")
    table.caption = "\n".join(notes)
    return table


def _compared_cells(
    row: Mapping[str, Any], comparison: Mapping[str, Any], *, is_best: bool, has_seeds: bool
) -> list[Text]:
    mark = " ★" if is_best and row["placement"] else "" if row["placement"] else " †"
    value_ms, gap = _value_ms(row), row["gap_to_bound"]
    cells = [Text(f"{row['method']}{mark}")]
    if has_seeds:
        cells.append(Text(str(row["seed"])))
    cells.append(Text(format_ms(value_ms / 1e3)))
    if comparison.get("measured"):
        spread_s, simulated_s = row.get("spread_s"), row.get("simulated_s")
        cells.append(Text("" if spread_s is None else f"± {format_ms(spread_s)}"))
        cells.append(Text(NOTHING if simulated_s is None else format_ms(simulated_s)))
    if comparison.get("truth"):
        simulated_s = row["simulated_s"]
        cells.append(Text(NOTHING if simulated_s is None else format_ms(simulated_s)))
        cells.append(Text(f"{row['measured']}"))
    cells.append(Text(NOTHING if gap is None else f"{gap:+.1%}"))
    cells.append(Text(f"{row['evaluations']:,}" if row["evaluations"] else ""))
    cells.append(Text(format_seconds(row["plan_s"]) if row["plan_s"] else ""))
    cells.append(Text(format_bytes(max(row["peak_bytes"])) if row["peak_bytes"] else ""))
    why = row.get("why", "")
    status = "" if row["status"] == "ok" else row["status"]
    cells.append(Text(": ".join(part for part in (status, why) if part)))
    return cells


def _compared_order(row: Mapping[str, Any]) -> tuple[bool, float, str, int]:
    return not row["placement"], _value_ms(row), row["method"], row["seed"]


def _is(row: Mapping[str, Any], best: Mapping[str, Any] | None) -> bool:
    return best is not None and (row["method"], row["seed"]) == (best["method"], best["seed"])


def _heading(comparison: Mapping[str, Any]) -> str:
    words = {"latency": "step, ms", "throughput": "step, ms", "max-load": "load, ms", "piece-latency": "ms"}
    return words[comparison["objective"]]


def _value_ms(row: Mapping[str, Any]) -> float:
    if row["status"] != "ok":
        return math.inf
    value = row["value_ms"] if row["value_ms"] is not None else row["step_time_s"]
    if value is None:
        return math.inf
    return float(value) if row["value_ms"] is not None else float(value) * 1e3


def _bound_ms(comparison: Mapping[str, Any]) -> float:
    if comparison["lower_bound_ms"] is not None:
        return float(comparison["lower_bound_ms"])
    return float(comparison["lower_bound_s"]) * 1e3


def advice_panel(told: Mapping[str, Any], verdict: str) -> Group:
    """The verdict first, then the figures, then what to do next.

    Args:
        told: what `rlplace advise --json` prints.
        verdict: in words.
    """
    figures = told["figures"]
    reason = str(told["reason"])
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in (
        ("expected step", _expected(told)),
        ("eager PyTorch", _time(figures["eager_s"], figures["eager_why"])),
        ("one device", _single(figures)),
        (_placed(figures), _time(figures["placed_s"], "none fits, or none was tried")),
        *_cut(figures),
        ("bound", f"{format_seconds(figures['bound_s'])} ({figures['bound']})"),
        ("step times", f"{figures['kind']}, op times {figures['costs']}"),
        ("it took", f"{format_seconds(told['capture_s'])} to capture, {format_seconds(told['seconds'])} from there"),
        ("next", str(told["next"])),
    ):
        table.add_row(name, Text(value))
    return Group(Text(f"{verdict}: {reason}", style="bold"), table)


def _expected(told: Mapping[str, Any]) -> str:
    if told["ratio_found"] is None:
        return f"{NOTHING} (nothing else can run the step)"
    found, medians = told["ratio_found"], told["ratio_of_medians"]
    words = f"{told['ratio_least']:.2f} to {found:.2f} of what {told['over']} takes"
    if medians is None or f"{medians:.2f}" == f"{found:.2f}":
        return words
    spread = f"{told['figures']['spread']:.0%}".replace("%", " %")
    is_stay = found == 1.0 and medians < 1.0
    why = "to stay is no gain" if is_stay else f"{found:.2f} with a spread of ± {spread}"
    return f"{words}: {medians:.2f} by the medians, {why}"


def _placed(figures: Mapping[str, Any]) -> str:
    """What the searched placement of the whole batch is called: it may have measured slower than one device."""
    single_s, placed_s = figures["single_s"], figures["placed_s"]
    is_slower = single_s is not None and placed_s is not None and single_s < placed_s
    return "searched placement" if is_slower else "best placement"


def _single(figures: Mapping[str, Any]) -> str:
    held = f"{format_bytes(figures['single_bytes'])} of {format_bytes(figures['single_capacity_bytes'])}"
    return f"{_time(figures['single_s'], 'does not fit')} on {figures['single_device']}, {held}"


def _cut(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Lines on what the batch in slices would take."""
    rows = []
    if max(figures["counts"]) > 1:
        count = figures["cut_count"]
        rows.append((f"{count} micro-batches", _time(figures["cut_s"], "not faster, or does not fit")))
    if figures["split_s"] is not None:
        rows.append(("even split", f"{format_seconds(figures['split_s'])} at best (estimated)"))
    return rows


def _time(step_s: float | None, why: str) -> str:
    return format_seconds(step_s) if step_s is not None else f"{NOTHING} ({why})"


ROOT = "(the model itself)"


def explanation_tables(explanation: Explanation, top: int = 12) -> Group:
    """Everything an explanation holds, for a terminal without markup, the advice last.

    Args:
        explanation: of a placed step.
        top: most modules of the critical path that are shown.
    """
    explanation = Explanation.from_dict(_printable(explanation.to_dict()), "explanation")
    return Group(
        _headline(explanation),
        *([Text(explanation.disturbed, style="yellow")] if explanation.disturbed else []),
        _devices(explanation),
        _path(explanation, top),
        *([_cuts(explanation)] if explanation.cuts else []),
        _alternatives(explanation),
        Text(explanation.advice.sentence, style="bold"),
    )


def _headline(explanation: Explanation) -> Text:
    spread = f" ± {format_ms(explanation.spread_s)}" if explanation.spread_s else ""
    cut = f", {explanation.num_micro_batches} micro-batches" if explanation.num_micro_batches > 1 else ""
    by = f" of {explanation.method}" if explanation.method else ""
    step_ms = f"{format_ms(explanation.step_time_s)}{spread} ms"
    return Text(
        f"{explanation.host}: the placement{by}, {step_ms} a step {explanation.kind}{cut}; "
        f"explained: a typical step of {format_ms(explanation.explained_s)} ms; "
        f"bound {format_ms(explanation.bound_s)} ms ({explanation.bound})"
    )


def _devices(explanation: Explanation) -> Table:
    table = _table("devices")
    table.add_column("device", no_wrap=True)
    for heading in ("ops", "busy", "copies\nalone", "idle", "sent", "received", "peak memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    step_s = explanation.explained_s
    for device in explanation.devices:
        table.add_row(
            device.name,
            f"{device.num_ops:,}",
            *(_share(seconds, step_s) for seconds in (device.busy_s, device.transfer_s, device.idle_s)),
            format_bytes(device.sent_bytes),
            format_bytes(device.received_bytes),
            f"{format_bytes(device.peak_bytes)} ({_share(device.peak_bytes, device.capacity_bytes)})",
        )
    return table


def _path(explanation: Explanation, top: int) -> Table:
    path, step_s = explanation.path, explanation.explained_s
    table = _table(
        f"critical path: ops {_share(path.op_s, step_s)}, copies {_share(path.transfer_s, step_s)}, "
        f"waits {_share(path.wait_s, step_s)}"
    )
    table.add_column("what", overflow="fold")
    table.add_column("phase", no_wrap=True)
    for heading in ("items", "ms", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    for module in path.modules[:top]:
        figures = f"{module.num_ops:,}", format_ms(module.seconds), _share(module.seconds, step_s)
        table.add_row(Text(module.module or ROOT), module.phase, *figures)
    if others := path.modules[top:]:
        seconds = sum(module.seconds for module in others)
        num_ops = f"{sum(module.num_ops for module in others):,}"
        table.add_row(f"{len(others):,} more", "", num_ops, format_ms(seconds), _share(seconds, step_s), style="dim")
    for route in path.routes:
        figures = f"{route.num_transfers:,}", format_ms(route.seconds), _share(route.seconds, step_s)
        table.add_row(Text(f"copies {route.source} → {route.destination}"), "", *figures, style="cyan")
    if path.wait_s > 0:
        waits = sum(part.kind == "wait" for part in path.parts)
        table.add_row("waits", "", f"{waits:,}", format_ms(path.wait_s), _share(path.wait_s, step_s), style="yellow")
    return table


def _cuts(explanation: Explanation) -> Table:
    table = _table(
        f"costliest copies, of {explanation.num_transfers:,} with {format_bytes(explanation.transfer_bytes)}",
    )
    table.add_column("from", overflow="fold")
    table.add_column("to", overflow="fold")
    table.add_column("what", no_wrap=True)
    for heading in ("bytes", "ms", "critical"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cut in explanation.cuts:
        more = f" and {cut.num_readers - 1:,} more" if cut.num_readers > 1 else ""
        table.add_row(
            Text(f"{cut.source}: {cut.op}" + (f" in {cut.module}" if cut.module else "")),
            Text(f"{cut.destination}: {cut.reader}" + (f" in {cut.reader_module}" if cut.reader_module else "") + more),
            cut.what,
            format_bytes(cut.num_bytes),
            format_ms(cut.seconds),
            "yes" if cut.is_critical else "",
        )
    return table


def _alternatives(explanation: Explanation) -> Table:
    table = _table("what else it would cost")
    table.add_column("instead", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("over this", justify="right", no_wrap=True)
    table.add_column("how", no_wrap=True)
    table.add_column("notes", overflow="fold")
    for other in explanation.alternatives:
        step_s = float("inf") if other.step_time_s is None else other.step_time_s
        is_known = other.step_time_s is not None and explanation.step_time_s > 0
        ratio = f"{step_s / explanation.step_time_s:.2f}×" if is_known else NOTHING
        table.add_row(other.name, format_ms(step_s), ratio, other.kind if is_known else "", Text(other.note))
    return table


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_style="bold",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 0 else NOTHING


def _printable(data: Any) -> Any:
    """The same data without characters that a terminal would act on."""
    if isinstance(data, dict):
        return {key: _printable(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_printable(item) for item in data]
    return clean(data) if isinstance(data, str) else data


def graph_table(facts: Mapping[str, Any]) -> Table:
    """The figures of a graph, one a line.

    Args:
        facts: what `rlplace graph --json` prints.
    """
    phases = ", ".join(f"{count:,} {phase}" for phase, count in facts["phases"].items() if count)
    host = facts["costs_host"]
    rows = [
        ("ops", f"{facts['num_ops']:,} ({phases}; {facts['num_sources']:,} of them sources)"),
        *_micro_batches(facts),
        ("edges", f"{facts['num_edges']:,} between {facts['num_tensors']:,} tensors"),
        ("groups", f"{facts['num_groups']:,} ({facts['grouping']})"),
        ("work", f"{facts['flops']:.3g} FLOPs, {format_bytes(facts['bytes_moved'])} moved"),
        ("outputs", format_bytes(facts["output_bytes"])),
        ("parameters", format_bytes(facts["parameter_bytes"])),
        ("gradients", format_bytes(facts["gradient_bytes"])),
        ("optimizer state", format_bytes(facts["state_bytes"])),
        ("largest workspace", format_bytes(facts["workspace_bytes"])),
        ("widest level", f"{facts['widest_level']:,} ops that can run at once"),
        ("critical path", f"{facts['critical_path_ops']:,} ops, {format_seconds(facts['critical_path_s'])} on {host}"),
        ("one device", f"{format_seconds(facts['single_device_s'])} on {facts['single_device']} of {host}"),
        ("costs", f"{'by roofline' if facts['costs_source'] == 'estimated' else 'as the file gives them'}, on {host}"),
        ("read in" if facts["is_file"] else "captured in", format_seconds(facts["capture_s"])),
    ]
    table = Table(
        title=str(facts["workload"]),
        title_style="bold",
        title_justify="left",
        box=None,
        show_header=False,
        padding=(0, 2, 0, 0),
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def _micro_batches(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A line where the batch is cut."""
    count, shared = facts["num_micro_batches"], facts["num_shared"]
    if count == 1:
        return []
    each = (facts["num_ops"] - shared) / count
    return [("micro-batches", f"{count:,} of about {each:,.0f} ops each; {shared:,} shared by all")]


def targets_table(rows: Sequence[Mapping[str, Any]], host: str) -> Table:
    """The dearest targets, one a line.

    Args:
        rows: `top_targets` of what `rlplace graph --json` prints.
        host: whose costs these are.
    """
    table = Table(
        title=f"dearest targets on {host}",
        title_style="bold",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
    )
    table.add_column("target", overflow="fold")
    for name in ("ops", "time", "share", "FLOPs", "bytes moved"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            Text(str(row["target"])),
            f"{row['num_ops']:,}",
            format_seconds(row["cost_s"]),
            f"{row['share']:.1%}",
            f"{row['flops']:.3g}",
            format_bytes(row["bytes_moved"]),
        )
    return table


STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Findings as a table, in their order.

    Args:
        rows: `checks` of what `rlplace doctor --json` prints.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("verdict", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold", ratio=3)
    table.add_column("remedy", overflow="fold", ratio=2)
    for row in rows:
        cells = (Text(row["verdict"], STYLES[row["verdict"]]), *(Text(row[key]) for key in ("name", "found", "remedy")))
        table.add_row(*cells)
    return table
