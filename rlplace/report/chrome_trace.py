"""Timelines as a Chrome trace, which Perfetto (https://ui.perfetto.dev) and `chrome://tracing` open.

Source: "Trace Event Format" (Google, 2016), JSON object format. Times are microseconds, rounded to whole nanoseconds.

`Trace`: one step as `timeline.json` keeps it (a Chrome trace), read back with care.
"""

from __future__ import annotations

import heapq
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.decode import described
from rlplace.errors import InvalidValue
from rlplace.files import write_json_atomic
from rlplace.format import format_seconds
from rlplace.graphs.opgraph import PHASES, OpGraph
from rlplace.measure.hosts.host import Host
from rlplace.measure.plan import Timeline

Event = dict[str, Any]

_ROWS_A_PROCESS = 10_000  # thread ids are unique over the whole trace: Perfetto joins equal ones


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
    events: list[Event] = []
    num_arrows = 0
    for index, (name, timeline) in enumerate(timelines.items()):
        if len(timeline.op_device) != graph.num_ops:
            raise InvalidValue(
                "op_device",
                f"{len(timeline.op_device)} entries",
                f"{graph.num_ops}, one for each op",
                where=f"timeline {name!r}",
            )
        process = _Process(index + 1, name, timeline, graph, host, first_arrow=num_arrows)
        events += process.events()
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


class _Process:
    """The events of one timeline."""

    def __init__(
        self, pid: int, name: str, timeline: Timeline, graph: OpGraph, host: Host, *, first_arrow: int
    ) -> None:
        self.pid, self.name, self.timeline, self.graph, self.host = pid, name, timeline, graph, host
        self.first_arrow = first_arrow
        self.rows: list[str] = []
        self.op_start_ns, self.op_end_ns = _ns(timeline.op_start_s), _ns(timeline.op_end_s)
        self.transfer_start_ns, self.transfer_end_ns = _ns(timeline.transfer_start_s), _ns(timeline.transfer_end_s)
        self.op_tid: dict[int, int] = {}
        self.transfer_tid: dict[int, int] = {}  # the row of its first link
        names = [device.name for device in host.devices]
        links_of = {(route.source, route.destination): route.links for route in host.routes}
        self.transfer_links = [
            links_of.get((names[source], names[destination]), ())
            for source, destination in zip(
                timeline.transfer_source.tolist(), timeline.transfer_destination.tolist(), strict=True
            )
        ]

    def events(self) -> list[Event]:
        slices = [*self._op_slices(), *self._transfer_slices()]
        return [*self._metadata(), *slices, *self._arrows(), *self._memory()]

    def _metadata(self) -> Iterator[Event]:
        end_ns = max(self.op_end_ns.max(initial=0), self.transfer_end_ns.max(initial=0))
        for key, args in (
            ("process_name", {"name": self.name}),
            ("process_labels", {"labels": f"step {format_seconds(float(end_ns) / 1e9)}"}),
            ("process_sort_index", {"sort_index": self.pid}),
        ):
            yield {"ph": "M", "name": key, "pid": self.pid, "args": args}
        for row, name in enumerate(self.rows):
            for key, thread_args in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": row})):
                yield {"ph": "M", "name": key, "pid": self.pid, "tid": self._tid(row), "args": thread_args}

    def _op_slices(self) -> Iterator[Event]:
        graph = self.graph
        for index, device in enumerate(self.host.devices):
            ops = np.flatnonzero((self.timeline.op_device == index) & ~graph.is_source).tolist()
            tids = self._rows_for(device.name, self.op_start_ns[ops], self.op_end_ns[ops], is_always_shown=True)
            for op, tid in zip(ops, tids, strict=True):
                self.op_tid[op] = tid
                yield self._slice(
                    graph.names[op],
                    self._category(op),
                    tid,
                    int(self.op_start_ns[op]),
                    int(self.op_end_ns[op]),
                    self._facts(op) | {"bytes": int(graph.output_bytes[op])},
                )

    def _transfer_slices(self) -> Iterator[Event]:
        graph, timeline = self.graph, self.timeline
        names = [device.name for device in self.host.devices]
        for link in self.host.links:
            transfers = [k for k, links in enumerate(self.transfer_links) if link.name in links]
            tids = self._rows_for(link.name, self.transfer_start_ns[transfers], self.transfer_end_ns[transfers])
            for k, tid in zip(transfers, tids, strict=True):
                if self.transfer_links[k][0] == link.name:
                    self.transfer_tid[k] = tid
                tensor = int(timeline.transfer_tensor[k])
                producer = int(graph.tensor_op[tensor])
                yield self._slice(
                    graph.names[producer],
                    "transfer",
                    tid,
                    int(self.transfer_start_ns[k]),
                    int(self.transfer_end_ns[k]),
                    {
                        **self._facts(producer),
                        "bytes": int(graph.tensor_bytes[tensor]),
                        "tensor": tensor,
                        "from": names[timeline.transfer_source[k]],
                        "to": names[timeline.transfer_destination[k]],
                    },
                )

    def _category(self, op: int) -> str:
        """Phase and micro-batch: categories can be searched for and switched off."""
        phase, micro_batch = PHASES[self.graph.phases[op]], int(self.graph.micro_batch[op])
        return phase if micro_batch < 0 else f"{phase},micro-batch {micro_batch}"

    def _facts(self, op: int) -> Event:
        graph = self.graph
        facts: Event = {"target": graph.targets[op], "module": graph.modules[op]}
        if graph.micro_batch[op] >= 0:
            facts["micro_batch"] = int(graph.micro_batch[op])
        return facts

    def _arrows(self) -> Iterator[Event]:
        """For each transfer: from its producer, over its row, to its first reader; each binds to the slice it is in."""
        for k, tensor in enumerate(self.timeline.transfer_tensor.tolist()):
            stops: list[tuple[int, int]] = []  # (tid, ns)
            producer = int(self.graph.tensor_op[tensor])
            if producer in self.op_tid:
                start_ns, end_ns = int(self.op_start_ns[producer]), int(self.op_end_ns[producer])
                stops.append((self.op_tid[producer], max(start_ns, end_ns - 1)))
            if k in self.transfer_tid:
                stops.append((self.transfer_tid[k], int(self.transfer_start_ns[k])))
            reader = self._first_reader(tensor, int(self.timeline.transfer_destination[k]))
            if reader >= 0:
                stops.append((self.op_tid[reader], int(self.op_start_ns[reader])))
            if len(stops) < 2:
                continue
            for position, (tid, ns) in enumerate(stops):
                event = {
                    "ph": "t",
                    "name": "transfer",
                    "cat": "transfer",
                    "id": self.first_arrow + k,
                    "pid": self.pid,
                    "tid": tid,
                    "ts": ns / 1e3,
                }
                if position == 0:
                    event["ph"] = "s"
                elif position == len(stops) - 1:
                    event |= {"ph": "f", "bp": "e"}
                yield event

    def _first_reader(self, tensor: int, device: int) -> int:
        """The op on `device` that reads `tensor` first, -1 if there is none."""
        offsets, ops = self.graph.readers
        readers = ops[offsets[tensor] : offsets[tensor + 1]]
        readers = readers[self.timeline.op_device[readers] == device]
        return int(readers[np.argmin(self.op_start_ns[readers])]) if readers.size else -1

    def _memory(self) -> Iterator[Event]:
        """The level of each device at every instant at which it changes, after all changes of that instant."""
        memory_ns = _ns(self.timeline.memory_time_s)
        for index, device in enumerate(self.host.devices):
            points = np.flatnonzero(self.timeline.memory_device == index)
            points = points[np.argsort(memory_ns[points], kind="stable")]
            is_last = np.append(np.diff(memory_ns[points]) > 0, True)[: points.size]
            for point in points[is_last].tolist():
                yield {
                    "ph": "C",
                    "name": f"memory {device.name}",
                    "pid": self.pid,
                    "ts": int(memory_ns[point]) / 1e3,
                    "args": {"bytes": int(self.timeline.memory_bytes[point])},
                }

    def _rows_for(
        self, name: str, start_ns: NDArray[np.int64], end_ns: NDArray[np.int64], *, is_always_shown: bool = False
    ) -> list[int]:
        """A thread id for each slice: one row, and further ones where slices overlap (a row cannot show that)."""
        lanes = _lanes(start_ns.tolist(), end_ns.tolist())
        first = len(self.rows)
        num_lanes = max(lanes, default=0 if is_always_shown else -1) + 1
        self.rows += [name if lane == 0 else f"{name} ({lane + 1})" for lane in range(num_lanes)]
        return [self._tid(first + lane) for lane in lanes]

    def _tid(self, row: int) -> int:
        return self.pid * _ROWS_A_PROCESS + row

    def _slice(self, name: str, category: str, tid: int, start_ns: int, end_ns: int, args: Event) -> Event:
        return {
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": self.pid,
            "tid": tid,
            "ts": start_ns / 1e3,
            "dur": (end_ns - start_ns) / 1e3,
            "args": args,
        }


def _ns(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.rint(seconds * 1e9).astype(np.int64)


def _lanes(starts: Sequence[int], ends: Sequence[int]) -> list[int]:
    """For each interval the lowest lane that is free at its start."""
    lanes = [0] * len(starts)
    running: list[tuple[int, int]] = []  # (end, lane)
    free: list[int] = []
    num_lanes = 0
    for index in sorted(range(len(starts)), key=lambda i: (starts[i], ends[i])):
        while running and running[0][0] <= starts[index]:
            heapq.heappush(free, heapq.heappop(running)[1])
        if free:
            lanes[index] = heapq.heappop(free)
        else:
            lanes[index], num_lanes = num_lanes, num_lanes + 1
        heapq.heappush(running, (ends[index], lanes[index]))
    return lanes


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
