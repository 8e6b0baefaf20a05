"""What `rlplace graph` shows people: one table of figures, one of the dearest targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from rlplace.report.format import format_bytes, format_seconds


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
