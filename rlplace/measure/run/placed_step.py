"""`PlacedStep`: a plan bound to its tensors and threads, ready to run again and again."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils import _pytree as pytree

from rlplace import cuda
from rlplace.errors import RunnerError
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.program import Call, Ref, Update
from rlplace.measure.hosts.host import Host
from rlplace.measure.plan import Plan
from rlplace.measure.run.channels import Channel, CudaChannel, make_channel, release_all
from rlplace.measure.run.clocks import Clock, CudaClock, HostClock
from rlplace.measure.run.codegen import StepCode, generate
from rlplace.measure.run.residents import Residents
from rlplace.measure.run.streams import torch_device
from rlplace.measure.run.update_runs import Run
from rlplace.measure.run.workers import Crew, Job
from rlplace.measure.timeline import Timeline

_random_lock = threading.Lock()


class PlacedStep:
    """One step of a graph, run as `plan` says.

    Args:
        graph: with its program.
        host: a host of this machine.
        plan: made for both.
        residents: where parameters and state are kept; plans over the same host may share them.
        crew: the host's threads.
        seed: of random ops; each draws from (seed, op, step), the same numbers on all devices of one kind: a CPU and a
            GPU make different ones of one seed.
        is_traced: record the times of ops and transfers (see `timeline`).
    """

    def __init__(
        self,
        graph: OpGraph,
        host: Host,
        plan: Plan,
        residents: Residents,
        crew: Crew,
        *,
        seed: int = 0,
        is_traced: bool = False,
    ) -> None:
        self.plan = plan
        self._graph, self._host, self._residents, self._crew = graph, host, residents, crew
        self._seed, self._is_traced = seed, is_traced
        self._program = require_program(graph)
        self._code: StepCode = generate(graph, host, plan, is_traced=is_traced)
        self._clocks: list[Clock] = [
            CudaClock(torch_device(device)) if is_traced and device.backend == "cuda" else HostClock()
            for device in host.devices
        ]
        self._routes = {(route.source, route.destination): route for route in host.routes}
        self._started_s = 0.0
        self._load()

    def run(self, step: int = 0, *, deadline_s: float = 600.0) -> float:
        """Seconds that one step took, from start to the end of its last op.

        Raises:
            RunnerError: an op failed; says which and why.
            TimeoutError: the step did not end within `deadline_s`.
        """
        if self._is_broken:  # its channels are in no known state, and a thread left behind may still use them
            self._load()
        self._started_s = time.perf_counter()
        try:
            self._crew.run(self._jobs, step, on_error=self._abort, deadline_s=deadline_s)
        except RunnerError as error:
            raise self._explained(error) from error.__cause__
        return time.perf_counter() - self._started_s

    @property
    def result(self) -> Any:
        """What the last step returned: the loss, or the model's output."""
        values = iter(self._results)
        return pytree.tree_map_only(Ref, lambda _: next(values), self._program.result)

    def timeline(self) -> Timeline:
        """Start and end of every op and transfer of the last step; the step must be traced."""
        n, plan = self._graph.num_ops, self.plan
        begin, end = np.zeros(n + plan.num_transfers), np.zeros(n + plan.num_transfers)
        for device, items in enumerate(self._code.items):
            for item in items:
                if item not in self._program.sources:
                    begin[item], end[item] = self._span_s(item, self._clocks[device])
            for updates in self._code.update_runs[device]:
                self._share_run(updates, begin, end)
        source = plan.devices[self._graph.tensor_op[plan.transfer_tensor]]
        times, devices, allocated = self._memory(begin, end)
        return Timeline(
            op_device=plan.devices,
            op_start_s=begin[:n],
            op_end_s=end[:n],
            transfer_tensor=plan.transfer_tensor,
            transfer_source=source,
            transfer_destination=plan.transfer_destination,
            transfer_start_s=begin[n:],
            transfer_end_s=end[n:],
            memory_time_s=times,
            memory_device=devices,
            memory_bytes=allocated,
            source="measured",
        )

    def _span_s(self, item: int, clock: Clock) -> tuple[float, float]:
        """When an item began and ended, in seconds from the start of the last step."""
        marks = self._begin[item], self._end[item]
        channel = self._channels[item - self._graph.num_ops] if item >= self._graph.num_ops else None
        if isinstance(channel, CudaChannel) and channel.began is not None:
            marks = channel.began, channel.arrived  # the copy itself, on its own stream
            clock = self._clocks[self._host.device_index[channel.device.name]]
        return clock.seconds(marks[0]) - self._started_s, clock.seconds(marks[1]) - self._started_s

    def _share_run(self, updates: Run, begin: Any, end: Any) -> None:
        """Gives each of some updates that were one call its share of the time, by the bytes that it moves."""
        ops = list(updates)
        moved = np.cumsum(np.maximum(self._graph.bytes_moved[ops], 1.0))
        first_s, last_s = begin[ops[0]], end[ops[-1]]
        end[ops] = first_s + (last_s - first_s) * moved / moved[-1]
        begin[ops[1:]] = end[ops[:-1]]

    def _memory(self, begin: Any, end: Any) -> tuple[Any, Any, Any]:
        """Allocated bytes of each device over the step: residents, then every tensor from its making to its `del`."""
        graph, host = self._graph, self._host
        resident = np.array([device.context_bytes for device in host.devices], dtype=np.int64)
        for op in range(graph.num_ops):
            kept = int(graph.state_bytes[op]) + (int(graph.output_bytes[op]) if op in self._program.sources else 0)
            resident[self.plan.devices[op]] += _rounded(
                kept, host.devices[self.plan.devices[op]].memory_granularity_bytes
            )
        events: list[tuple[float, int, int, int]] = [(0.0, 1, d, int(size)) for d, size in enumerate(resident)]
        for device, described in enumerate(host.devices):
            for item, tensor in self._code.allocations[device]:
                size = _rounded(int(graph.tensor_bytes[tensor]), described.memory_granularity_bytes)
                events.append((float(begin[item]), 1, device, size))
            for item, tensor in self._code.releases[device]:
                size = _rounded(int(graph.tensor_bytes[tensor]), described.memory_granularity_bytes)
                is_here = int(self.plan.devices[graph.tensor_op[tensor]]) == device
                lent_s = self._lent_until_s(tensor, end) if is_here else 0.0
                events.append((max(float(end[item]), lent_s), 0, device, -size))
        events.sort()
        level = np.zeros(host.num_devices, dtype=np.int64)
        times, devices, levels = [], [], []
        for moment_s, _, device, change in events:
            level[device] += change
            times.append(moment_s)
            devices.append(device)
            levels.append(int(level[device]))
        return np.array(times), np.array(devices, dtype=np.int32), np.array(levels, dtype=np.int64)

    def _lent_until_s(self, tensor: int, end: Any) -> float:
        """When the last other device is done with the original: it has its copy, or its last reader has ended."""
        graph, plan = self._graph, self.plan
        lent_s = 0.0
        for transfer in np.flatnonzero(plan.transfer_tensor == tensor):
            lent_s = max(lent_s, float(end[graph.num_ops + transfer]))
            if not self._code.is_handover[transfer]:
                continue
            offsets, ops = graph.readers
            readers = ops[offsets[tensor] : offsets[tensor + 1]]
            there = readers[plan.devices[readers] == plan.transfer_destination[transfer]]
            lent_s = max(lent_s, float(end[there].max(initial=0.0)))
        return lent_s

    def _channel(self, transfer: int) -> Channel:
        plan, host = self.plan, self._host
        source = host.devices[int(plan.devices[self._graph.tensor_op[plan.transfer_tensor[transfer]]])]
        destination = host.devices[int(plan.transfer_destination[transfer])]
        is_copy = bool(self._routes[source.name, destination.name].links)
        return make_channel(
            source,
            destination,
            self._crew.streams.copies(source, destination),
            is_copy=is_copy,
            is_traced=self._is_traced,
        )

    def _abort(self) -> None:
        self._is_broken = True
        for channel in self._channels:
            channel.abort()
        release_all(self._signals)

    def _explained(self, error: RunnerError) -> RunnerError:
        """The error with the op that failed, and without the tensors that its traceback holds."""
        cause, n = error.__cause__, self._graph.num_ops
        if cause is None:
            return error
        devices = {_file_name(device): device for device in range(self._host.num_devices)}
        for frame, line in traceback.walk_tb(cause.__traceback__):
            device = devices.get(frame.f_code.co_filename, -1)
            item = self._code.line_items[device][line - 1] if device >= 0 else -1
            if item >= 0:
                tensor = int(self.plan.transfer_tensor[item - n]) if item >= n else -1
                op = item if item < n else int(self._graph.tensor_op[tensor])
                what = "op" if item < n else "the transfer of op"
                name, place = self._graph.names[op], self._host.devices[device].name
                error = RunnerError(f"{what} {name!r} ({self._graph.targets[op]}) on {place}: {error}", op=name)
        traceback.clear_frames(cause.__traceback__)
        return error

    def _load(self) -> None:
        """Channels, signals and code, made anew."""
        items = self._graph.num_ops + self.plan.num_transfers
        self._begin: list[Any] = [0.0] * items
        self._end: list[Any] = [0.0] * items
        self._results: list[Any] = [None] * len(self._program.result_refs)
        self._channels = [self._channel(k) for k in range(self.plan.num_transfers)]
        self._signals = [threading.Lock() for _ in range(self._code.num_signals)]
        for signal in self._signals:  # a lock that starts locked: released by the one side, taken by the other
            signal.acquire()
        self._jobs = [self._bind(device) for device in range(self._host.num_devices)]
        self._is_broken = False

    def _bind(self, device: int) -> Job:
        graph, program, residents = self._graph, self._program, self._residents
        clock = self._clocks[device]
        names: dict[str, Any] = {
            "clock": clock.mark,
            "B": self._begin,
            "E": self._end,
            "O": self._results,
            **self._code.constants,
            **{f"D{d}": torch_device(described) for d, described in enumerate(self._host.devices)},
            **{f"g{k}": _direct(view.target) for k, view in enumerate(program.views)},
        }
        for item in self._code.items[device]:
            if item >= graph.num_ops:
                continue
            if item in program.sources:
                names[f"t{int(graph.output_offsets[item])}"] = residents.tensor(item, device)
                continue
            call = program.calls[item]
            if not isinstance(call, Update):
                names[f"f{item}"] = self._seeded(item, call, device) if call.is_random else _direct(call.target)
        for run_of in self._code.update_runs[device]:
            names[f"u{run_of[-1]}"] = residents.updater(run_of, device)
        for transfer, channel in enumerate(self._channels):
            for method in ("send", "take"):
                names[f"k{transfer}_{method}"] = getattr(channel, method)
            names[f"k{transfer}_wait"] = channel.wait_ready
            names[f"k{transfer}_done"] = channel.acknowledge
            names[f"k{transfer}_copied"] = channel.wait_copied
        for index, signal in enumerate(self._signals):
            names[f"s{index}_set"], names[f"s{index}_wait"] = signal.release, signal.acquire
        exec(compile(self._code.sources[device], _file_name(device), "exec"), names)
        run: Job = names["run"]
        if not self._is_traced:
            return run

        def traced(step: int) -> None:
            clock.start()
            run(step)

        return traced

    def _seeded(self, op: int, call: Call, device: int) -> Callable[..., Any]:
        place = torch_device(self._host.devices[device])
        target, seed = call.target, self._seed

        def run(step: int, *args: Any, **kwargs: Any) -> Any:
            generator = cuda.generator(place)
            with _random_lock:  # the generator belongs to the whole process: others must not notice
                before = generator.get_state()
                generator.manual_seed(_mix(seed, op, step))
                try:
                    return target(*args, **kwargs)
                finally:
                    generator.set_state(before)

        return run


def _file_name(device: int) -> str:
    return f"<placed step, device {device}>"


def _direct(target: Callable[..., Any]) -> Callable[..., Any]:
    """The C++ entry of an ATen overload, without its Python wrapper."""
    direct: Callable[..., Any] = getattr(target, "_op", target)
    return direct


def _mix(*values: int) -> int:
    """A 63-bit hash of integers (splitmix64's finaliser, Steele et al. 2014)."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def _rounded(size: int, granularity: int) -> int:
    return -(-size // granularity) * granularity
