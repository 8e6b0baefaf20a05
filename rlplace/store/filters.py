"""`Filter`: which measurements are meant."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import get_args

from rlplace.errors import InvalidValue, UnknownName
from rlplace.measure.measurement import Status

STATUSES = tuple(status for status in get_args(Status) if status != "lost")
"""Those that are kept: where a device was lost, nothing was measured."""


@dataclass(frozen=True)
class Filter:
    """Measurements that are all of this; what is empty is not asked for.

    Raises:
        UnknownName: no such status.
        InvalidValue: an age below 0.
    """

    workload: str = ""
    """A pattern of the workload's name, such as `nmt*`."""
    graph: str = ""
    """How the graph's fingerprint begins."""
    host: str = ""
    """How the host's fingerprint begins, or a pattern of its name."""
    status: str = ""
    older_than_s: float | None = None
    """Taken at least so many seconds ago."""
    newer_than_s: float | None = None
    """Taken at most so many seconds ago."""

    def __post_init__(self) -> None:
        if self.status and self.status not in STATUSES:
            raise UnknownName("status", self.status, STATUSES)
        for name in ("older_than_s", "newer_than_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise InvalidValue(name, value, "at least 0", where="filter")

    @property
    def is_empty(self) -> bool:
        """Whether every measurement is meant."""
        return all(getattr(self, field.name) in ("", None) for field in fields(self))

    def sql(self) -> tuple[str, dict[str, object]]:
        """A condition on `measurements m` and `sessions s`, and the values in it."""
        words, values = ["1"], dict[str, object]()
        if self.workload:
            words.append("s.workload GLOB :workload")
            values["workload"] = self.workload
        if self.graph:
            words.append("substr(m.graph, 1, length(:graph)) = :graph")
            values["graph"] = self.graph
        if self.host:
            words.append("(substr(m.host, 1, length(:host)) = :host OR s.host_name GLOB :host)")
            values["host"] = self.host
        if self.status:
            words.append("m.status = :status")
            values["status"] = self.status
        now_s = time.time()
        if self.older_than_s is not None:
            words.append("m.taken_s <= :before")
            values["before"] = now_s - self.older_than_s
        if self.newer_than_s is not None:
            words.append("m.taken_s >= :after")
            values["after"] = now_s - self.newer_than_s
        return " AND ".join(words), values
