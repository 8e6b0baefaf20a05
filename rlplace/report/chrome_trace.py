"""One step as lanes of slices: made from a timeline, and written and read as a Chrome trace.

Perfetto (https://ui.perfetto.dev) and `chrome://tracing` open such a file. Source: "Trace Event Format" (Google, 2016),
JSON object format. Times are microseconds, rounded to whole nanoseconds.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, refuse_if
from rlplace.files import write_json_atomic
from rlplace.graphs import PHASES, OpGraph
from rlplace.measure import Host, Timeline
from rlplace.records import described
from rlplace.say import format_seconds

Event = dict[str, Any]

TRANSFER = "transfer"
_MEMORY = "memory "
_LONGEST_US = 1e12
_ROWS_A_PROCESS = 10_000  # thread ids are unique over the whole trace: Perfetto joins equal ones


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
        num_bytes: of the output, or of the sent tensor.
        ends: of a transfer: where from and where to; empty for an op.
        tensor: that is sent, by its index in the graph; -1 for an op, or where it is not known.
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
    tensor: int = -1

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Lane:
    """A row of the trace: a device or a link; slices of one that overlap have further rows."""

    name: str
    is_device: bool

    @property
    def owner(self) -> str:
        """The device or link; further rows of one are called `NAME (2)`."""
        head, separator, number = self.name.rpartition(" (")
        return head if separator and number[:-1].isdigit() else self.name


@dataclass(frozen=True)
class Trace:
    """One step, as pictures and the report show it.

    Attributes:
        kind: `measured` or `simulated`.
        lanes: in order of display.
        slices: ops and transfers, by lane and start; a transfer over several links is in the lane of each.
        memory: by device: the times at which its allocated bytes changed, in seconds, and the new values; ascending.
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
    def of_timeline(cls, timeline: Timeline, graph: OpGraph, host: Host) -> Trace:
        """The slices of a timeline; source ops, which take no time, are left out.

        Raises:
            InvalidValue: a timeline of another graph.
        """
        step = _Step("timeline", timeline, graph, host)
        return cls(timeline.source, tuple(step.lanes), tuple(step.slices), dict(step.memory()))

    @classmethod
    def of(cls, data: Mapping[str, Any], where: str) -> Trace:
        """The first process of a Chrome trace, as `write_chrome_trace` writes it.

        Args:
            data: of the file.
            where: its name, for messages.

        Raises:
            InvalidValue: a malformed event.
        """
        events, reader = data.get("traceEvents"), _Reader(where)
        reader.check("traceEvents", events, "a list", is_right=isinstance(events, list))
        for index, event in enumerate(events or ()):
            reader.check(f"traceEvents[{index}]", event, "an object", is_right=isinstance(event, Mapping))
            reader.take(event)
        return reader.trace()


def chrome_trace(timelines: Mapping[str, Timeline], graph: OpGraph, host: Host) -> dict[str, Any]:
    """A Chrome trace with one process for each timeline.

    A process has one row for each device and for each link that carried a transfer, an arrow from the op that made a
    sent tensor over its transfer to the first op that reads the copy, and a counter of each device's memory. Source
    ops, which take no time, are left out.

    Args:
        timelines: name of the process (`measured`, `simulated`) to timeline, in order of display.
        graph: the graph they are of.
        host: the host they are on.

    Returns:
        The trace as plain data: `{"traceEvents": [...], "displayTimeUnit": "ms", "otherData": {...}}`.

    Raises:
        InvalidValue: a timeline of another graph.
    """
    events, num_arrows = list[Event](), 0
    for pid, (name, timeline) in enumerate(timelines.items(), 1):
        events += _Step(f"timeline {name!r}", timeline, graph, host).events(pid, name, num_arrows)
        num_arrows += timeline.transfer_tensor.size
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "host": host.name,
            "graph_fingerprint": graph.fingerprint,
            "host_fingerprint": host.fingerprint,
        },
    }


def write_chrome_trace(
    path: str | os.PathLike[str], timelines: Mapping[str, Timeline], graph: OpGraph, host: Host
) -> None:
    """Writes `chrome_trace` of the same arguments to `path`, whole or not at all.

    Raises:
        FileProblem: the file cannot be written.
        InvalidValue: a timeline of another graph.
    """
    write_json_atomic(path, chrome_trace(timelines, graph, host), indent=None)


class _Step:
    """A timeline as lanes of slices, and the slice of each op and transfer."""

    def __init__(self, where: str, timeline: Timeline, graph: OpGraph, host: Host) -> None:
        refuse_if(
            len(timeline.op_device) != graph.num_ops,
            "op_device",
            f"{len(timeline.op_device)} entries",
            f"{graph.num_ops}, one for each op",
            where=where,
        )
        self._timeline, self._graph, self._host = timeline, graph, host
        self._names = [device.name for device in host.devices]
        self.lanes: list[Lane] = []
        self.slices: list[Slice] = []
        self._of_op: dict[int, Slice] = {}
        self._of_transfer: dict[int, Slice] = {}  # the slice of its first link
        for index, name in enumerate(self._names):
            ops = np.flatnonzero((timeline.op_device == index) & ~graph.is_source).tolist()
            lanes = self._lanes_for(name, timeline.op_start_s[ops], timeline.op_end_s[ops], is_device=True)
            self._of_op |= {op: self._op(op, lane) for op, lane in zip(ops, lanes, strict=True)}
        self.slices += self._of_op.values()
        links_of = {(route.source, route.destination): route.links for route in host.routes}
        sent = zip(timeline.transfer_source.tolist(), timeline.transfer_destination.tolist(), strict=True)
        links = [links_of.get((self._names[source], self._names[destination]), ()) for source, destination in sent]
        for link in host.links:
            transfers = [k for k, held in enumerate(links) if link.name in held]
            start_s, end_s = timeline.transfer_start_s[transfers], timeline.transfer_end_s[transfers]
            for k, lane in zip(transfers, self._lanes_for(link.name, start_s, end_s, is_device=False), strict=True):
                self.slices.append(self._transfer(k, lane))
                if links[k][0] == link.name:
                    self._of_transfer[k] = self.slices[-1]

    def memory(self) -> Iterator[tuple[str, tuple[tuple[float, int], ...]]]:
        """By device: every instant at which its level changes, and the level after all changes of that instant."""
        timeline, time_ns = self._timeline, _ns(self._timeline.memory_time_s)
        for index, name in enumerate(self._names):
            points = np.flatnonzero(timeline.memory_device == index)
            points = points[np.argsort(time_ns[points], kind="stable")]
            last = points[np.append(np.diff(time_ns[points]) > 0, True)[: points.size]]
            levels = timeline.memory_bytes[last].tolist()
            yield name, tuple(zip(timeline.memory_time_s[last].tolist(), levels, strict=True))

    def events(self, pid: int, name: str, first_arrow: int) -> Iterator[Event]:
        """The events of a process; ids of its arrows begin with `first_arrow`."""
        step_s = max((one.end_s for one in self.slices), default=0.0)
        for key, value in (("name", name), ("labels", f"step {format_seconds(step_s)}"), ("sort_index", pid)):
            yield {"ph": "M", "name": f"process_{key}", "pid": pid, "args": {key: value}}
        for row, lane in enumerate(self.lanes):
            for key, value in (("name", lane.name), ("sort_index", row)):
                yield {"ph": "M", "pid": pid, "tid": _tid(pid, row), "name": f"thread_{key}", "args": {key: value}}
        for one in self.slices:
            at = {"ph": "X", "pid": pid, "tid": _tid(pid, one.lane), "ts": _us(one.start_s)}
            # phase and micro-batch: categories can be searched for and switched off
            part = f",micro-batch {one.micro_batch}" if one.micro_batch >= 0 and one.kind != TRANSFER else ""
            duration = _us(one.end_s, one.start_s)
            yield at | {"name": one.name, "cat": one.kind + part, "dur": duration, "args": _args(one)}
        for transfer, tensor in enumerate(self._timeline.transfer_tensor.tolist()):
            stops = self._stops(transfer, tensor)
            for place, (row, us) in enumerate(stops if len(stops) > 1 else ()):
                ends = {"ph": "f", "bp": "e"} if place == len(stops) - 1 else {"ph": "t" if place else "s"}
                at = {"pid": pid, "tid": _tid(pid, row), "ts": us}
                yield {"name": TRANSFER, "cat": TRANSFER, "id": first_arrow + transfer, **at, **ends}
        for device, points in self.memory():
            for time_s, level in points:
                yield {"ph": "C", "pid": pid, "ts": _us(time_s), "name": _MEMORY + device, "args": {"bytes": level}}

    def _stops(self, transfer: int, tensor: int) -> list[tuple[int, float]]:
        """Lanes and microseconds of an arrow: from the producer, over the transfer, to its first reader there.

        Each stop binds to the slice that it is in.
        """
        offsets, ops = self._graph.readers
        readers = ops[offsets[tensor] : offsets[tensor + 1]]
        readers = readers[self._timeline.op_device[readers] == self._timeline.transfer_destination[transfer]]
        first = min(readers.tolist(), key=lambda op: _us(float(self._timeline.op_start_s[op])), default=-1)
        made = self._of_op.get(int(self._graph.tensor_op[tensor]))
        stops = [] if made is None else [(made.lane, max(_us(made.start_s), _us(made.end_s) - 1e-3))]
        later = self._of_transfer.get(transfer), self._of_op.get(first)
        return [*stops, *((one.lane, _us(one.start_s)) for one in later if one is not None)]

    def _op(self, op: int, lane: int) -> Slice:
        graph, timeline = self._graph, self._timeline
        return Slice(
            lane,
            graph.names[op],
            PHASES[graph.phases[op]],
            int(graph.micro_batch[op]),
            float(timeline.op_start_s[op]),
            float(timeline.op_end_s[op]),
            graph.targets[op],
            graph.modules[op],
            int(graph.output_bytes[op]),
        )

    def _transfer(self, transfer: int, lane: int) -> Slice:
        timeline, tensor = self._timeline, int(self._timeline.transfer_tensor[transfer])
        return replace(
            self._op(int(self._graph.tensor_op[tensor]), lane),
            kind=TRANSFER,
            start_s=float(timeline.transfer_start_s[transfer]),
            end_s=float(timeline.transfer_end_s[transfer]),
            num_bytes=int(self._graph.tensor_bytes[tensor]),
            ends=(
                self._names[timeline.transfer_source[transfer]],
                self._names[timeline.transfer_destination[transfer]],
            ),
            tensor=tensor,
        )

    def _lanes_for(
        self, name: str, start_s: NDArray[np.float64], end_s: NDArray[np.float64], *, is_device: bool
    ) -> list[int]:
        """A lane for each slice: one, and further ones where slices overlap (a row cannot show that)."""
        numbers, first = _lanes(_ns(start_s).tolist(), _ns(end_s).tolist()), len(self.lanes)
        count = max(numbers, default=0 if is_device else -1) + 1
        self.lanes += [Lane(f"{name} ({number + 1})" if number else name, is_device) for number in range(count)]
        return [first + number for number in numbers]


def _args(one: Slice) -> Event:
    part = {"micro_batch": one.micro_batch} if one.micro_batch >= 0 else {}
    sent = {"tensor": one.tensor, "from": one.ends[0], "to": one.ends[1]} if one.ends else {}
    return {"target": one.target, "module": one.module, **part, "bytes": one.num_bytes, **sent}


def _tid(pid: int, row: int) -> int:
    return pid * _ROWS_A_PROCESS + row


def _us(end_s: float, start_s: float = 0.0) -> float:
    """Microseconds between two instants, each rounded to a nanosecond."""
    return (round(end_s * 1e9) - round(start_s * 1e9)) / 1e3


def _ns(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.rint(seconds * 1e9).astype(np.int64)


def _lanes(starts: Sequence[int], ends: Sequence[int]) -> list[int]:
    """For each interval the lowest lane that is free at its start."""
    lanes = [0] * len(starts)
    ends_of: list[int] = []  # when each lane is free again: there are few
    for index in sorted(range(len(starts)), key=lambda i: (starts[i], ends[i])):
        lanes[index] = next((lane for lane, end in enumerate(ends_of) if end <= starts[index]), len(ends_of))
        ends_of[lanes[index] : lanes[index] + 1] = [ends[index]]
    return lanes


class _Reader:
    """Collects events of the first process."""

    def __init__(self, where: str) -> None:
        self._where, self._kind, self._names = where, "", dict[int, str]()
        self._pid: object = None
        self._rows = defaultdict[int, list[Slice]](list)
        self._memory = defaultdict[str, list[tuple[float, int]]](list)

    def check(self, key: str, value: object, expected: str, *, is_right: bool) -> None:
        """Refuses a malformed value of the file."""
        if not is_right:
            raise InvalidValue(key, described(value), expected, where=self._where)

    def take(self, event: Mapping[str, Any]) -> None:
        self._pid = event.get("pid") if self._pid is None else self._pid
        if event.get("pid") != self._pid:
            return
        args = event.get("args", {})
        self.check("args", args, "an object", is_right=isinstance(args, Mapping))
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
        kind = self._text(event, "cat").partition(",")[0]
        start_s, tid = self._seconds(event, "ts"), self._whole(event, "tid")
        self._rows[tid].append(
            Slice(
                lane=tid,
                name=name,
                kind=kind,
                micro_batch=self._whole(args, "micro_batch", -1),
                start_s=start_s,
                end_s=start_s + self._seconds(event, "dur"),
                target=self._text(args, "target"),
                module=self._text(args, "module"),
                num_bytes=self._whole(args, "bytes"),
                ends=(self._text(args, "from"), self._text(args, "to")) if kind == TRANSFER else (),
                tensor=self._whole(args, "tensor", -1),
            )
        )

    def trace(self) -> Trace:
        """All that was taken."""
        tids = sorted({*self._names, *self._rows})
        is_link = {tid for tid, row in self._rows.items() if any(one.kind == TRANSFER for one in row)}
        lanes = tuple(Lane(self._names.get(tid, f"row {tid}"), tid not in is_link) for tid in tids)
        slices = [
            replace(one, lane=lane)
            for lane, tid in enumerate(tids)
            for one in sorted(self._rows[tid], key=lambda one: (one.start_s, one.end_s))
        ]
        memory = {name: tuple(sorted(points, key=lambda point: point[0])) for name, points in self._memory.items()}
        return Trace(self._kind, lanes, tuple(slices), memory)

    def _text(self, data: Mapping[str, Any], key: str) -> str:
        value: Any = data.get(key, "")
        self.check(key, value, "text", is_right=isinstance(value, str))
        return str(value)

    def _whole(self, data: Mapping[str, Any], key: str, default: int = 0) -> int:
        value: Any = data.get(key, default)
        self.check(key, value, "a whole number", is_right=type(value) is int and abs(value) < 2**63)
        return int(value)

    def _seconds(self, data: Mapping[str, Any], key: str) -> float:
        value: Any = data.get(key)
        is_right = type(value) in (int, float) and 0 <= value <= _LONGEST_US
        self.check(key, value, "microseconds, 0 or more", is_right=is_right)
        return float(value) / 1e6


def covered_s(slices: Iterable[Slice]) -> float:
    """Seconds in which at least one of the slices runs."""
    total, until = 0.0, -math.inf
    for one in sorted(slices, key=lambda one: one.start_s):
        total += max(one.end_s - max(one.start_s, until), 0.0)
        until = max(until, one.end_s)
    return total
