"""`step_timeline`: when the ops and transfers of a traced step began and ended, from the marks that its code made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.hosts.host import Host
from rlplace.measure.plan import Plan
from rlplace.measure.run.codegen.step_code import StepCode
from rlplace.measure.run.codegen.update_runs import Run
from rlplace.measure.run.crew.channels import Channel, CudaChannel
from rlplace.measure.run.crew.clocks import Clock, CudaClock, HostClock
from rlplace.measure.run.crew.streams import torch_device
from rlplace.measure.run.placed.allocated import allocated_bytes
from rlplace.measure.timeline import Timeline


@dataclass
class Marks:
    """What the code of the last step marked.

    Attributes:
        clocks: by device.
        begin: by item (op i, or N + k): what its device's clock marked when it began; None without a mark.
        end: when it ended, likewise.
        started_s: when the step was started, on `time.perf_counter`.
    """

    clocks: Sequence[Clock]
    begin: list[Any] = field(default_factory=list)
    end: list[Any] = field(default_factory=list)
    started_s: float = 0.0

    def renew(self, num_items: int) -> None:
        """Lists of their own for `num_items` items, without a mark."""
        self.begin, self.end = [None] * num_items, [None] * num_items


def clocks_of(host: Host, *, is_traced: bool) -> list[Clock]:
    """A clock for each device; those of GPUs, which cost events, where a step is traced."""
    return [
        CudaClock(torch_device(device)) if is_traced and device.backend == "cuda" else HostClock()
        for device in host.devices
    ]


def step_timeline(
    graph: OpGraph, host: Host, plan: Plan, code: StepCode, marks: Marks, channels: Sequence[Channel]
) -> Timeline:
    """Start and end of every op and transfer of the last step, and what each device held.

    Args:
        graph: with its program.
        host: of this machine.
        plan: what ran.
        code: made of it, traced.
        marks: that it made.
        channels: by transfer: a GPU's copy is timed by the channel itself.
    """
    program, n = require_program(graph), graph.num_ops
    begin, end = np.zeros(n + plan.num_transfers), np.zeros(n + plan.num_transfers)
    for device, items in enumerate(code.items):
        for item in items:
            if item not in program.sources:
                channel = channels[item - n] if item >= n else None
                begin[item], end[item] = _span_s(host, marks, device, item, channel)
        for updates in code.update_runs[device]:
            _share_run(graph, updates, begin, end)
    times, devices, allocated = allocated_bytes(graph, host, plan, code, begin, end)
    return Timeline(
        op_device=plan.devices,
        op_start_s=begin[:n],
        op_end_s=end[:n],
        transfer_tensor=plan.transfer_tensor,
        transfer_source=plan.devices[graph.tensor_op[plan.transfer_tensor]],
        transfer_destination=plan.transfer_destination,
        transfer_start_s=begin[n:],
        transfer_end_s=end[n:],
        memory_time_s=times,
        memory_device=devices,
        memory_bytes=allocated,
        source="measured",
    )


def _span_s(host: Host, marks: Marks, device: int, item: int, channel: Channel | None) -> tuple[float, float]:
    """When an item began and ended, in seconds from the start of the last step; 0 without a mark."""
    clock, made = marks.clocks[device], (marks.begin[item], marks.end[item])
    if isinstance(channel, CudaChannel) and channel.began is not None:
        made = channel.began, channel.arrived  # the copy itself, on its own stream
        clock = marks.clocks[host.device_index[channel.device.name]]
    begin_s, end_s = (0.0 if mark is None else clock.seconds(mark) - marks.started_s for mark in made)
    return begin_s, end_s


def _share_run(graph: OpGraph, updates: Run, begin: NDArray[np.float64], end: NDArray[np.float64]) -> None:
    """Gives each of some updates that were one call its share of the time, by the bytes that it moves."""
    ops = list(updates)
    moved = np.cumsum(np.maximum(graph.bytes_moved[ops], 1.0))
    first_s, last_s = begin[ops[0]], end[ops[-1]]
    end[ops] = first_s + (last_s - first_s) * moved / moved[-1]
    begin[ops[1:]] = end[ops[:-1]]
