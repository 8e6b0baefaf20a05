"""`FORMATS`: what a run's placement can be exported as; each format is a row here and a file of its own."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, TypeVar

from rlplace.decode import described
from rlplace.errors import FingerprintMismatch, InvalidValue, UnknownName
from rlplace.measure.placement import Placement
from rlplace.registry import Registry
from rlplace.seeds import check_seed
from rlplace.session.folder import RUN_FILES, RunFolder
from rlplace.session.steps import only_simulated
from rlplace.workloads import SIZES, Size, WorkloadSpec, parse_kept_workload

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
        """A field of `config.json`, which nobody vouches for."""
        value = self.config.get(name)
        if not isinstance(value, kind):
            raise InvalidValue(name, described(value), expected, where="config.json")
        return value

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


FORMATS = Registry[ExportFormat](
    "export format",
    {
        "script": "rlplace.export.script:SCRIPT",
        "csv": "rlplace.export.table:TABLE",
        "device_map": "rlplace.export.device_map.format:DEVICE_MAP",
        "pipeline": "rlplace.export.pipeline.script:PIPELINE",
        "torchrec": "rlplace.export.torchrec:TABLES",
    },
    group="rlplace.export_formats",
    entry_type=ExportFormat,
)
