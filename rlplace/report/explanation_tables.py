"""What `rlplace explain` shows people: devices, critical path, costliest copies, and what else it would cost."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from rlplace.measure.explain.explanation import Explanation
from rlplace.report.format import NOTHING, format_bytes, format_ms
from rlplace.say import clean

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
