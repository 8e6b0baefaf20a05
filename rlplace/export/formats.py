"""`FORMATS`: what a run's placement can be exported as; each format is a row here and a file of its own.

`CapturedRun`: what a run placed, built and captured again from what its folder holds.

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
from typing import Any, TypeVar

import numpy as np

from rlplace.errors import FingerprintMismatch, InvalidValue, UnknownName
from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs, read_workspaces
from rlplace.measure.hosts.host import Device, Host
from rlplace.measure.hosts.host_file import host_from_dict
from rlplace.measure.placement import Placement
from rlplace.measure.problem import Problem
from rlplace.records import described
from rlplace.registry import Registry
from rlplace.seeds import check_seed
from rlplace.session.cut import read_asked
from rlplace.session.folder import RUN_FILES, RunFolder
from rlplace.session.step_script import script
from rlplace.session.steps import capture_workload, only_simulated
from rlplace.workloads import SIZES, Size, Workload, WorkloadSpec, build_for, parse_kept_workload

T = TypeVar("T")

EXPORTED = ("step.py", "placement.csv", "device_map.json", "pipeline.py", "torchrec.json")
"""The files of a run that are exports: `--overwrite` removes them, and no others that formats write."""


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What a format is given: a run that is to be exported."""

    run: RunFolder
    """Its folder, for whatever else a format reads."""
    config: dict[str, Any]
    """What `config.json` holds: the words of the command, resolved."""
    placement: Placement
    """The best placement that was measured."""
    workload: str | None = None
    """The workload as the user passed it again, which a run of a user's function needs."""
    cache_tokens: int = 0
    """Tokens of each sequence whose keys and values are to be counted; for formats that say so in their `options`."""

    @property
    def spec(self) -> WorkloadSpec:
        """The workload of the run, which can be built.

        Raises:
            InvalidValue: it is a graph file; or one or a user's function, and `workload` does not name it again.
        """
        kept = self._field("workload", str, "text")
        command = shlex.join(["--workload", kept])
        spec = parse_kept_workload(kept, self.workload, where=str(self.run.path("config.json")), command=command)
        if spec.is_file:
            raise only_simulated(spec)
        return spec

    @property
    def default_size(self) -> Size:
        """Where options that the workload's name does not give come from.

        Raises:
            UnknownName: there is no such size.
            InvalidValue: the run does not say.
        """
        kept = self._field("default_size", str, f"one of {', '.join(SIZES)}")
        for size in SIZES:
            if kept == size:
                return size
        raise UnknownName("default_size in config.json", kept, SIZES)

    @property
    def train(self) -> dict[str, Any]:
        """The options of the run.

        Raises:
            InvalidValue: the run does not say.
        """
        return self._field("train", dict, "an object")

    @property
    def workload_seed(self) -> int:
        """Of the workload's weights and inputs.

        Raises:
            InvalidValue: the run has none, or one that is none.
        """
        seed = self.config.get("workload_seed", self.train.get("seed"))  # once one seed was for all
        if type(seed) is not int:
            raise InvalidValue("workload_seed", described(seed), "a whole number", where="config.json")
        return check_seed(seed, "config.json")

    def _field(self, name: str, kind: type[T], expected: str) -> T:
        """A field of `config.json`, checked."""
        value = self.config.get(name)
        if not isinstance(value, kind):
            raise InvalidValue(name, described(value), expected, where="config.json")
        return value

    @property
    def host_word(self) -> str:
        """The host that the run was started with.

        Raises:
            InvalidValue: it is no text.
        """
        return self._field("host", str, "text") if "host" in self.config else "another host"

    @property
    def is_simulated(self) -> bool:
        """Whether the run was of a simulated host, so that its placement runs nowhere here."""
        if not self.run.has("problem.json"):
            return False
        host = self.run.read_json("problem.json").get("host")
        devices = host.get("devices") if isinstance(host, dict) else None
        listed = devices if isinstance(devices, list) else []
        return any(isinstance(device, dict) and device.get("backend") == "simulated" for device in listed)

    def problem(self) -> dict[str, Any]:
        """What `problem.json` holds of the graph, its groups and costs; builds and captures nothing.

        Raises:
            FileProblem: it is missing or not JSON.
            InvalidValue: it lacks something.
            FingerprintMismatch: it is not what the placement was made for.
        """
        problem = self.run.read_json("problem.json")
        for part in ("graph", "grouping", "costs"):
            if not isinstance(problem.get(part), dict):
                raise InvalidValue(part, described(problem.get(part)), "an object", where="problem.json")
        for kind, actual in (("graph", problem["graph"].get("fingerprint")), ("host", problem.get("host_fingerprint"))):
            expected = getattr(self.placement, f"{kind}_fingerprint")
            if actual != expected:
                raise FingerprintMismatch(kind, str(actual), expected)
        return problem


@dataclass(frozen=True, slots=True)
class Exported:
    """What a format makes of a run, where it has figures to tell besides."""

    text: str
    """What the file holds."""
    figures: dict[str, Any] = field(default_factory=dict)
    """What `--json` says besides, by name."""


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """One format.

    Raises:
        InvalidValue: `file` is no plain file name, or is that of another file of a run.
    """

    file: str
    """Name of the file in the run folder that it becomes."""
    summary: str
    """What it is, in a few words."""
    text: Callable[[ExportRequest], str | Exported]
    """What the file holds, with figures or without; what people are told besides it prints on stderr."""
    options: tuple[str, ...] = ()
    """The fields of `ExportRequest` that it takes, beside those of every run."""

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
        host = host_from_dict(request.problem().get("host"), str(request.run.path("problem.json")))
        workload = build_for(request.spec, host, request.workload_seed)
        graph = capture_workload(workload, *read_asked(request.config.get("micro_batches")))
        request.placement.require_graph(graph)
        return cls(request, host, workload, graph)

    def problem(self) -> Problem:
        """The run's problem with the seconds that it found, every op a group of its own.

        Raises:
            InvalidValue: `problem.json` has no such seconds.
        """
        kept = self.request.problem()["costs"]
        try:
            times_s = np.array(kept["op_time_s"], dtype=np.float64)
            costs = Costs(
                times_s,
                kept["source"],
                read_workspaces(kept.get("workspace_bytes"), times_s.shape, "problem.json"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidValue(
                "costs.op_time_s",
                "no table",
                "seconds of every op on every device",
                where="problem.json",
                hint=f"It cannot be read as numbers: {error}.",
            ) from error
        return Problem(self.graph, self.host, costs, Grouping(np.arange(self.graph.num_ops, dtype=np.int32)))


_PART = re.compile(r"cuda:\d+/\d+$")
"""Names of parts of a GPU."""


def rank_devices(host: Host, where: str) -> dict[int, str]:
    """By index of a device, in order of ranks, what PyTorch calls it on its own machine: `cuda:N`, or `cpu`.

    GPUs are ranks; where there is none, cores are, gangs of them excepted.

    Args:
        host: whose devices they are.
        where: the format that asks, for messages.

    Raises:
        InvalidValue: a device is a part of a GPU, which cannot have a process of its own.
    """
    plain = [index for index, device in enumerate(host.devices) if not device.members]
    gpus = [index for index in plain if not _is_core(host.devices[index])]
    for index in gpus:
        if _PART.search(host.devices[index].name):
            raise InvalidValue("device", host.devices[index].name, "a whole GPU: each has one process", where=where)
    if not gpus:
        return dict.fromkeys(plain, "cpu")
    nodes = [host.devices[index].name.rpartition("/")[0] for index in gpus]
    return {index: f"cuda:{nodes[:rank].count(nodes[rank])}" for rank, index in enumerate(gpus)}


def _is_core(device: Device) -> bool:
    return device.backend == "cpu" or device.name.startswith("cpu")


COLUMNS = ("op", "module", "group", "device", "op_time_s")


def _csv(request: ExportRequest) -> str:
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
        raise InvalidValue(
            "costs.op_time_s",
            "rows of another length",
            f"{len(device_names)} seconds an op, one for each device",
            where=where,
        )
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(COLUMNS)
    for op, device in enumerate(devices):
        writer.writerow((names[op], modules[op], groups[op], device_names[device], times_s[op][device]))
    return written.getvalue()


def _column(problem: dict[str, Any], part: str, field: str, num_ops: int, where: str) -> list[Any]:
    column = problem[part].get(field)
    if not isinstance(column, list) or len(column) != num_ops:
        raise InvalidValue(
            f"{part}.{field}",
            f"{len(column)} values" if isinstance(column, list) else column,
            f"{num_ops} values, one for each op",
            where=where,
        )
    return column


def _step_script(request: ExportRequest) -> str:
    """The text of `step.py`."""
    return script(
        str(request.spec),
        default_size=request.default_size,
        seed=request.workload_seed,
        cut=request.config.get("micro_batches"),
        host=request.host_word,
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
