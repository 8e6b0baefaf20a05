"""`csv`: one row an op, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
from typing import Any

from rlplace.errors import InvalidValue
from rlplace.export.registry import ExportFormat, ExportRequest

COLUMNS = ("op", "module", "group", "device", "op_time_s")


def table(request: ExportRequest) -> str:
    """The placement as CSV in the order of the graph: each op with its module, group, device and seconds there.

    Raises:
        FileProblem, InvalidValue: the run has no complete `problem.json`.
        FingerprintMismatch: its `problem.json` is of another graph or host than its placement.
    """
    problem, where = request.problem(), str(request.run.path("problem.json"))
    device_names, devices = request.placement.device_names, request.placement.devices.tolist()
    names, modules, groups, times_s = (
        _column(problem, part, field, len(devices), where)
        for part, field in (("graph", "names"), ("graph", "modules"), ("grouping", "op_group"), ("costs", "op_time_s"))
    )
    if any(not isinstance(row, list) or len(row) != len(device_names) for row in times_s):
        expected = f"{len(device_names)} seconds an op, one for each device"
        raise InvalidValue("costs.op_time_s", "rows of another length", expected, where=where)
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(COLUMNS)
    for op, device in enumerate(devices):
        writer.writerow((names[op], modules[op], groups[op], device_names[device], times_s[op][device]))
    return written.getvalue()


def _column(problem: dict[str, Any], part: str, field: str, num_ops: int, where: str) -> list[Any]:
    column = problem[part].get(field)
    if not isinstance(column, list) or len(column) != num_ops:
        actual = f"{len(column)} values" if isinstance(column, list) else column
        raise InvalidValue(f"{part}.{field}", actual, f"{num_ops} values, one for each op", where=where)
    return column


TABLE = ExportFormat("placement.csv", "one row an op: its module, group, device and seconds there", table)
