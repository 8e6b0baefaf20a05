"""`Trace`: one step as `timeline.json` keeps it (a Chrome trace), read back with care."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlplace.decode import described
from rlplace.errors import InvalidValue

TRANSFER = "transfer"
_MEMORY = "memory "
_LONGEST_US = 1e12
_MOST_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Slice:
    """An op, or a transfer on a link.

    Attributes:
        lane: index of its lane.
        name: of the op, or of the op whose output is sent.
        kind: `forward`, `backward`, `update` or `transfer`.
        micro_batch: its number; -1 where it serves all of them.
        start_s, end_s: seconds since the step began.
        target: ATen target.
        module: dotted path; empty outside of all modules.
        num_bytes: of the output, or of what is sent.
        ends: of a transfer: where from and where to; empty for an op.
    """

    lane: int
    name: str
    kind: str
    micro_batch: int
    start_s: float
    end_s: float
    target: str
    module: str
    num_bytes: int
    ends: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Lane:
    """A row of the trace: a device or a link, or what does not fit into its row beside others."""

    name: str
    is_device: bool

    @property
    def owner(self) -> str:
        """The device or link; further rows of one are called `NAME (2)`."""
        head, separator, number = self.name.rpartition(" (")
        return head if separator and number[:-1].isdigit() else self.name


@dataclass(frozen=True)
class Trace:
    """One step.

    Attributes:
        kind: `measured` or `simulated`, as the trace says.
        lanes: in order of display.
        slices: ops and transfers, by lane and start.
        memory: by device: when its allocated bytes changed, in seconds, and to what; ascending.
    """

    kind: str
    lanes: tuple[Lane, ...]
    slices: tuple[Slice, ...]
    memory: Mapping[str, tuple[tuple[float, int], ...]]

    @property
    def step_s(self) -> float:
        """When the last op or transfer ends."""
        return max((one.end_s for one in self.slices), default=0.0)

    @property
    def ops(self) -> tuple[Slice, ...]:
        """Ops alone."""
        return tuple(one for one in self.slices if one.kind != TRANSFER)

    def device_of(self, op: Slice) -> str:
        """The device that an op runs on."""
        return self.lanes[op.lane].owner

    @classmethod
    def of(cls, data: Mapping[str, Any], where: str) -> Trace:
        """The first process of a Chrome trace, as `write_chrome_trace` writes it.

        Args:
            data: what the file holds.
            where: its name, for messages.

        Raises:
            InvalidValue: a malformed event.
        """
        events = data.get("traceEvents")
        if not isinstance(events, list):
            raise InvalidValue("traceEvents", described(events), "a list", where=where)
        reader = _Reader(where)
        for index, event in enumerate(events):
            if not isinstance(event, Mapping):
                raise InvalidValue(f"traceEvents[{index}]", described(event), "an object", where=where)
            reader.take(event)
        return reader.trace()


class _Reader:
    """Collects events of the first process."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._pid: object = None
        self._kind = ""
        self._names: dict[int, str] = {}
        self._rows: dict[int, list[Slice]] = defaultdict(list)
        self._memory: dict[str, list[tuple[float, int]]] = defaultdict(list)

    def take(self, event: Mapping[str, Any]) -> None:
        if self._pid is None:
            self._pid = event.get("pid")
        if event.get("pid") != self._pid:
            return
        args = event.get("args", {})
        if not isinstance(args, Mapping):
            raise InvalidValue("args", described(args), "an object", where=self._where)
        sort, name = event.get("ph"), self._text(event, "name")
        if sort == "M" and name == "process_name":
            self._kind = self._text(args, "name")
        elif sort == "M" and name == "thread_name":
            self._names[self._whole(event, "tid")] = self._text(args, "name")
        elif sort == "X":
            self._slice(event, args, name)
        elif sort == "C" and name.startswith(_MEMORY):
            self._memory[name.removeprefix(_MEMORY)].append((self._seconds(event, "ts"), self._whole(args, "bytes")))

    def _slice(self, event: Mapping[str, Any], args: Mapping[str, Any], name: str) -> None:
        kind, _, micro_batch = self._text(event, "cat").partition(",micro-batch ")
        start_s, tid = self._seconds(event, "ts"), self._whole(event, "tid")
        self._rows[tid].append(
            Slice(
                lane=tid,
                name=name,
                kind=kind,
                micro_batch=int(micro_batch) if micro_batch.isdecimal() and len(micro_batch) < _MOST_DIGITS else -1,
                start_s=start_s,
                end_s=start_s + self._seconds(event, "dur"),
                target=self._text(args, "target"),
                module=self._text(args, "module"),
                num_bytes=self._whole(args, "bytes"),
                ends=(self._text(args, "from"), self._text(args, "to")) if kind == TRANSFER else (),
            )
        )

    def trace(self) -> Trace:
        """All that was taken."""
        tids = sorted({*self._names, *self._rows})
        is_link = {tid for tid, row in self._rows.items() if any(one.kind == TRANSFER for one in row)}
        lanes = tuple(Lane(self._names.get(tid, f"row {tid}"), tid not in is_link) for tid in tids)
        slices: list[Slice] = []
        for lane, tid in enumerate(tids):
            row = sorted(self._rows[tid], key=lambda one: (one.start_s, one.end_s))
            slices += [replace(one, lane=lane) for one in row]
        memory = {name: tuple(sorted(points, key=lambda point: point[0])) for name, points in self._memory.items()}
        return Trace(self._kind, lanes, tuple(slices), memory)

    def _text(self, data: Mapping[str, Any], key: str) -> str:
        value = data.get(key, "")
        if not isinstance(value, str):
            raise InvalidValue(key, described(value), "text", where=self._where)
        return value

    def _whole(self, data: Mapping[str, Any], key: str) -> int:
        value = data.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
            raise InvalidValue(key, described(value), "a whole number", where=self._where)
        return value

    def _seconds(self, data: Mapping[str, Any], key: str) -> float:
        value = data.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_US:
            raise InvalidValue(key, described(value), "microseconds, 0 or more", where=self._where)
        return float(value) / 1e6


def covered_s(slices: list[Slice]) -> float:
    """Seconds in which at least one of the slices runs."""
    total, until = 0.0, -math.inf
    for one in sorted(slices, key=lambda one: one.start_s):
        total += max(one.end_s - max(one.start_s, until), 0.0)
        until = max(until, one.end_s)
    return total
