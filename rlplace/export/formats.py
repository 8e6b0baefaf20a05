"""`FORMATS`: the formats that a run's placement can be exported to; each format is a row here and a file of its own.

`CapturedRun`: the model that a run placed, built and captured again from its folder.

`rank_devices`: which devices of a host are processes of `torch.distributed`, for formats that run in several.

`csv`: one row an op, for spreadsheets and data frames.
"""

from __future__ import annotations

import csv
import io
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import numpy as np

from rlplace.errors import InvalidValue
from rlplace.graphs import Grouping, OpGraph
from rlplace.measure import Host, Placement, Problem
from rlplace.registry import Registry
from rlplace.session.folder import EXPORTED, RUN_FILES, RunFolder
from rlplace.session.prepare import capture_workload, only_simulated
from rlplace.session.session import Session
from rlplace.session.step_script import script
from rlplace.workloads import Workload, WorkloadSpec, build, build_for, parse_kept_workload


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """The argument of a format: the run to export."""

    run: RunFolder
    """Its folder."""
    session: Session
    """The state of the run: its request, problem, host, costs, and more."""
    placement: Placement
    """The best placement that was measured."""
    workload: str | None = None
    """The workload, passed again by the user; needed if the workload is the user's function."""
    cache_tokens: int = 0
    """Number of tokens of each sequence whose keys and values count as memory; for formats with this option."""

    @property
    def spec(self) -> WorkloadSpec:
        """The workload of the run, ready to build.

        Raises:
            InvalidValue: the workload is a graph file; or it is the user's function, and `workload` does not name it
                again.
        """
        kept, where = self.session.request.workload, str(self.session.path)
        spec = parse_kept_workload(kept, self.workload, where=where, command=shlex.join(["--workload", kept]))
        if spec.is_file:
            raise only_simulated(spec)
        return spec

    @property
    def is_simulated(self) -> bool:
        """Whether the host of the run is simulated, so that its placement cannot run here."""
        return self.session.host.is_simulated

    def captured(self) -> OpGraph:
        """The graph of the run's workload, captured now.

        Raises:
            UserError: the workload cannot be built again.
        """
        asked = self.session.request
        workload = build(self.spec, default_size=asked.default_size, seed=asked.workload_seed)
        return capture_workload(workload, *self.session.cut)


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of a format that also reports figures."""

    text: str
    """The content of the file."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Further entries of `--json`, by name."""


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """One format.

    Raises:
        InvalidValue: `file` is not a plain file name, or is the name of another file of a run.
    """

    file: str
    """Name of the exported file in the run folder."""
    summary: str
    """A description in a few words."""
    text: Callable[[ExportRequest], str | Exported]
    """Makes the content of the file, with or without figures; messages are printed to stderr."""
    options: tuple[str, ...] = ()
    """The additional fields of `ExportRequest` that the format uses."""

    def __post_init__(self) -> None:
        if PurePath(self.file).name != self.file or self.file in ("", ".."):
            raise InvalidValue("file", self.file, "a plain file name", where="export format")
        if self.file in RUN_FILES and self.file not in EXPORTED:
            raise InvalidValue("file", self.file, "another name: runs keep something else in it", where="export format")


@dataclass(frozen=True, eq=False)
class CapturedRun:
    """A run's workload and its step.

    Attributes:
        request: of the export.
        host: with the figures that were measured for the run.
        workload: without memory behind it where the host is simulated.
        graph: with its program; the placement's.
    """

    request: ExportRequest
    host: Host
    workload: Workload
    graph: OpGraph

    @classmethod
    def of(cls, request: ExportRequest) -> CapturedRun:
        """The workload of a run, captured as it was.

        Raises:
            UserError: the run lacks a file or is malformed, or its workload cannot be built again.
            FingerprintMismatch: the workload is another one now.
        """
        session, host = request.session, request.session.host
        workload = build_for(request.spec, host, session.request.workload_seed)
        graph = capture_workload(workload, *session.cut)
        request.placement.require_graph(graph)
        return cls(request, host, workload, graph)

    def problem(self) -> Problem:
        """The run's problem with the seconds that it found, every op a group of its own.

        Raises:
            FileProblem, InvalidValue: the session has no such seconds.
        """
        own = Grouping(np.arange(self.graph.num_ops, dtype=np.int32))
        return Problem(self.graph, self.host, self.request.session.costs, own)


def rank_devices(host: Host, where: str) -> dict[int, str]:
    """By index of a device, in order of ranks, PyTorch's name of it on its own machine: `cuda:N`, or `cpu`.

    GPUs are ranks; where there is none, cores are, gangs of them excepted.

    Args:
        host: whose devices they are.
        where: the format that asks, for messages.

    Raises:
        InvalidValue: a device is a part of a GPU, which cannot have a process of its own.
    """
    plain = [index for index, device in enumerate(host.devices) if not device.members]
    names = [device.name for device in host.devices]
    gpus = [index for index in plain if host.devices[index].backend != "cpu" and not names[index].startswith("cpu")]
    for index in gpus:
        if re.search(r"cuda:\d+/\d+$", names[index]):
            raise InvalidValue("device", names[index], "a whole GPU: each has one process", where=where)
    nodes = [names[index].rpartition("/")[0] for index in gpus]
    of_gpu = {index: f"cuda:{nodes[:rank].count(nodes[rank])}" for rank, index in enumerate(gpus)}
    return of_gpu or dict.fromkeys(plain, "cpu")


COLUMNS = ("op", "module", "group", "device", "op_time_s")


def _csv(request: ExportRequest) -> str:
    """The placement as CSV in the order of the graph: each op with its module, group, device and seconds there.

    Raises:
        FileProblem, InvalidValue: the session has no complete problem.
    """
    session, devices = request.session, request.placement.devices.tolist()
    facts, groups, times_s = session.facts, session.op_group.tolist(), session.costs.op_time_s.tolist()
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(COLUMNS)
    for op, device in enumerate(devices):
        name = request.placement.device_names[device]
        writer.writerow((facts.names[op], facts.modules[op], groups[op], name, times_s[op][device]))
    return written.getvalue()


def _step_script(request: ExportRequest) -> str:
    """The text of `step.py`."""
    asked = request.session.request
    return script(
        str(request.spec),
        default_size=asked.default_size,
        seed=asked.workload_seed,
        cut=request.session.cut,
        host=asked.host,
        is_simulated=request.is_simulated,
    )


FORMATS = Registry[ExportFormat](
    "export format",
    {
        "script": ExportFormat("step.py", "a short program that trains as placed", _step_script),
        "csv": ExportFormat("placement.csv", "one row an op: its module, group, device and seconds there", _csv),
        "device_map": "rlplace.export.device_map:DEVICE_MAP",
        "pipeline": "rlplace.export.pipeline:PIPELINE",
        "torchrec": "rlplace.export.torchrec:TABLES",
    },
    group="rlplace.export_formats",
    entry_type=ExportFormat,
)
