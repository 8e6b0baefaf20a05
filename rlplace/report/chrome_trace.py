"""Timelines as a Chrome trace, which Perfetto (https://ui.perfetto.dev) and `chrome://tracing` open.

Source: "Trace Event Format" (Google, 2016), JSON object format. Times are microseconds, rounded to whole nanoseconds.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        for device, described in enumerate(self.host.devices):
            ops = np.flatnonzero((self.timeline.op_device == device) & ~graph.is_source).tolist()
            tids = self._rows_for(described.name, self.op_start_ns[ops], self.op_end_ns[ops], is_always_shown=True)
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
        for device, described in enumerate(self.host.devices):
            points = np.flatnonzero(self.timeline.memory_device == device)
            points = points[np.argsort(memory_ns[points], kind="stable")]
            is_last = np.append(np.diff(memory_ns[points]) > 0, True)[: points.size]
            for point in points[is_last].tolist():
                yield {
                    "ph": "C",
                    "name": f"memory {described.name}",
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
