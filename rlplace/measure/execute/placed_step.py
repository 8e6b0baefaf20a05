"""`PlacedStep`: a plan bound to its tensors and threads, ready to run again and again.

`step_timeline` and `allocated_bytes` read the record of a traced step.
"""

from __future__ import annotations

import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from rlplace import cuda
from rlplace.errors import RlplaceError, RunnerError
from rlplace.graphs import OpGraph
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.program import Update
from rlplace.graphs.random_streams import CPU, DrawKey, seeded
from rlplace.measure.execute.device_threads import (
    Clock,
    Crew,
    CudaChannel,
    HostClock,
    Job,
    Transport,
    Woken,
    clock_of,
    locked,
    release_all,
    torch_device,
)
from rlplace.measure.execute.distributed import DistributedChannel
from rlplace.measure.execute.launch_code import StepCode
from rlplace.measure.execute.rank_programs import Run
from rlplace.measure.execute.residents import GradientsOut, Resident, Residents
from rlplace.measure.hosts.host import Host, allocated
from rlplace.measure.problem import Plan, Timeline


class PlacedStep:
    """One step of a graph, run as `plan` says.

    It is loaded when it first runs, or by `load`: then it holds its residents, channels and code. `unload` lets go of
    them, so that other plans have the memory; the step can be loaded again.

    Args:
        graph: with its program.
        host: a host of this machine.
        plan: made for both.
        residents: where parameters and state are kept; plans over the same host may share them.
        crew: the host's threads.
        seed: of random ops; each draws from (seed, step, place), the same numbers on all devices of one kind.
        is_traced: record the times of ops and transfers (see `timeline`).
        traced: items whose times are recorded then; None for all.
        hold_every: if above 0, a GPU is held back for `hold_cycles` at the start and every so many ops, so that
            launches run ahead of it: for tracing, never for step times.
        gradients: where it leaves gradients when they are asked for; None for a step that is never asked.
        second: items of the second part of a step in two parts (`TwoPartStep`).

    Attributes:
        plan: the plan to run.
        needs: its residents.
        launch_s: by device: seconds in which the last step's part was launched; of traced steps.
        hold_cycles: clock cycles of the GPU.
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
        traced: Collection[int] | None = None,
        hold_every: int = 0,
        gradients: GradientsOut | None = None,
        second: Collection[int] | None = None,
    ) -> None:
        self.plan = plan
        self._graph, self._host, self._residents, self._crew = graph, host, residents, crew
        self._seed, self._is_traced = seed, is_traced
        self._program = require_program(graph)
        self._gradients = gradients
        # of it in other processes
        self._options = {"seed": seed, "is_traced": is_traced, "traced": traced, "second": second}
        self._options["hands_out"] = gradients is not None
        self._key = next(_KEYS)
        self._code = StepCode(
            graph,
            host,
            plan,
            is_traced=is_traced,
            traced=traced,
            hold_every=hold_every,
            hands_out=gradients is not None,
            second=second,
            has_slots=crew.has_slots,
            is_wired=crew.is_wired,
            sends_wait=crew.sends_wait,
            devices=crew.here,
        )
        self._marks = Marks([clock_of(device) if is_traced else HostClock() for device in host.devices])
        self.needs = frozenset(self._needs())
        self.launch_s = [0.0] * host.num_devices
        self.hold_cycles = 0
        self._compiled = {
            device: compile(self._code.sources[device], _file_name(device), "exec") for device in crew.here
        }
        self._makers = [int(plan.devices[graph.tensor_op[self._program.base(ref)]]) for ref, _ in self._code.results]
        self._namespaces: dict[int, dict[str, Any]] = {}  # by device
        self._functions: dict[int, list[Job]] = {}  # by device: of its code, one for each part of the step
        self._jobs: list[Job] = []
        self._channels: dict[int, Transport] = {}
        self._signals: list[threading.Lock] = []
        self._results: list[Any] = []
        self._kept: list[list[tuple[Any, ...]]] = []  # by device: tensors between the parts of a step
        self._is_loaded = self._is_broken = self._is_held = False

    @property
    def is_loaded(self) -> bool:
        """Whether it can run as it is; a step that failed is to be loaded anew."""
        return self._is_loaded and not self._is_broken

    def load(self) -> None:
        """Makes its channels and the residents that are not there yet, and binds the code to them.

        Raises:
            RunnerError: a device has no memory for them; nothing is held then.
        """
        self.unload()  # the channels of a failed step are in no known state, and a thread left behind may use them
        self._marks.renew(self._graph.num_ops + self.plan.num_transfers)
        self._results = [None] * len(self._code.results)
        self._kept = [[] for _ in self._host.devices]
        try:
            self._channels = self._crew.channels(self._code.ranks, self._host, is_traced=self._is_traced)
            self._signals = [locked() for _ in range(self._code.signals.count)]
            self._is_held = True
            held = self._residents.held(self.plan.devices.tolist(), self._crew.here)
            self._crew.load(self._key, self._graph, self.plan, self._options, held)
            self._jobs = [
                self._bind(device) if device in self._crew.here else self._crew.job(device, self._key)
                for device in range(self._host.num_devices)
            ]
        except BaseException as error:
            self.unload()
            traceback.clear_frames(error.__traceback__)  # they hold tensors
            if isinstance(error, RlplaceError) or not isinstance(error, Exception):
                raise
            what = f"{type(error).__name__}: {error}{cuda.advice(error)}"
            raise RunnerError(f"the step could not be loaded: {what}") from error
        self._is_loaded = True

    def unload(self) -> None:
        """Lets go of residents, channels and results; the last timeline and `result` are gone with them."""
        if self._is_held:
            self._crew.unload(self._key)
            self._is_held = False
        for names in self._namespaces.values():  # a thread that was left behind holds them
            names.clear()
        self._namespaces, self._functions, self._jobs, self._channels, self._signals = {}, {}, [], {}, []
        self._marks.renew(0)
        self._results, self._kept = [], []
        self._is_loaded = self._is_broken = False

    def run(self, step: int = 0, *, deadline_s: float = 600.0) -> float:
        """Seconds that one step took, from start to the end of its last op.

        Raises:
            RunnerError: an op failed; says which and why.
            TimeoutError: the step did not end within `deadline_s`.
        """
        if not self.is_loaded:
            self.load()
        return self._run(self._jobs, step, deadline_s)

    def _run(self, jobs: Sequence[Job], step: int, deadline_s: float = 600.0) -> float:
        self._marks.started_s = time.perf_counter()
        try:
            self._crew.run(list(jobs), step, on_error=self._abort, deadline_s=deadline_s)
        except RunnerError as error:
            raise self._explained(error) from error.__cause__
        return time.perf_counter() - self._marks.started_s

    def run_part(self, part: int, number: int, kept: tuple[Any, ...] = ()) -> tuple[Any, ...]:
        """Runs what a rank has of a step on the calling thread, beside the other ranks.

        Args:
            part: of a step in two parts (`TwoPartStep`), 0 or 1; else 0.
            number: of the step.
            kept: by the rank's first part.

        Returns:
            What the rank's second part needs of the first.

        Raises:
            RunnerError: an op failed.
        """
        here = self._crew.here[0]
        self._kept[here].extend([kept] * part)
        try:
            (self._functions[here][1] if part else self._jobs[here])(number)
        except Woken:
            raise
        except Exception as error:
            failed = RunnerError(f"{type(error).__name__}: {error}")
            failed.__cause__ = error
            raise self._explained(failed) from error
        return self._kept[here].pop() if self._kept[here] else ()

    @property
    def own_results(self) -> dict[int, torch.Tensor]:
        """Of `result`, by place, those that this process made."""
        return {index: each for index, each in enumerate(self._results) if each is not None}

    @property
    def own_marks(self) -> tuple[dict[int, float], dict[int, float]]:
        """When items began and ended, as far as this process, of one device, knows: seconds by `time.perf_counter`."""
        clock, n = self._marks.clocks[self._crew.here[0]], self._graph.num_ops
        sent = {n + k: each for k, each in self._channels.items() if isinstance(each, DistributedChannel)}
        begin = dict(enumerate(self._marks.begin)) | {item: each.began for item, each in sent.items()}
        end = dict(enumerate(self._marks.end)) | {item: each.ended for item, each in sent.items()}
        begin_s, end_s = (
            {item: clock.seconds(mark) for item, mark in marks.items() if mark is not None} for marks in (begin, end)
        )
        return begin_s, end_s

    @property
    def result(self) -> Any:
        """The results of the last step: the loss, or the model's output.

        Raises:
            RunnerError: the step is not loaded.
        """
        self._require_loaded()
        self._fetch(range(len(self._makers)))
        values = iter(self._results)
        return self._program.returned(lambda _: next(values))

    def _fetch(self, indices: Iterable[int]) -> None:
        """Gets these results from the ranks that made them."""
        makers = {index: self._makers[index] for index in indices}
        for index, value in self._crew.results(self._key, makers, self._results).items():
            self._results[index] = value

    def timeline(self, *, has_memory: bool = True, workspace_bytes: NDArray[np.int64] | None = None) -> Timeline:
        """Start and end of every op and transfer of the last step, 0 where not recorded; the step must be traced.

        Args:
            has_memory: whether it tells the memory of devices, too.
            workspace_bytes: (N, D) scratch memory of each op on each device; by default as the graph says.

        Raises:
            RunnerError: the step is not loaded.
        """
        self._require_loaded()
        marks, channels = self._marks, self._channels
        if len(self._crew.here) < self._host.num_devices:
            marks = Marks([HostClock()] * self._host.num_devices, started_s=marks.started_s)
            marks.renew(self._graph.num_ops + self.plan.num_transfers)
            for told in (self.own_marks, *self._crew.marks(self._key)):
                for known, seconds in zip((marks.begin, marks.end), told, strict=True):
                    for item, at_s in seconds.items():  # a transfer begins when both of its ends are there
                        known[item] = max(at_s, known[item] or at_s)
            channels = {}
        made = self._graph, self._host, self.plan, self._code, marks, channels
        return step_timeline(*made, has_memory=has_memory, workspace_bytes=workspace_bytes)

    def _abort(self) -> None:
        self._is_broken = True
        for channel in self._channels.values():
            channel.abort()
        release_all(self._signals)

    def _explained(self, error: RunnerError) -> RunnerError:
        """The error with the op that failed, and without the tensors that its traceback holds."""
        cause = error.__cause__
        if cause is None:
            return error
        devices = {_file_name(device): device for device in range(self._host.num_devices)}
        for frame, line in traceback.walk_tb(cause.__traceback__):
            device = devices.get(frame.f_code.co_filename, -1)
            name, words = self._code.item_words(device, line) if device >= 0 else ("", "")
            if name:
                error = RunnerError(f"{'reported at ' * cuda.is_late(cause)}{words}: {error}", op=name)
        traceback.clear_frames(cause.__traceback__)
        said = cuda.advice(cause)
        return RunnerError(f"{error}{said}", op=error.op) if said else error

    def _require_loaded(self) -> None:
        if not self._is_loaded:
            raise RunnerError("the step is not loaded, so there is no last step to tell about: run it first")

    def _needs(self) -> Iterator[Resident]:
        for device, items in enumerate(self._code.items):
            for item in items:
                call = self._program.calls.get(item)
                if item in self._program.sources or isinstance(call, Update):
                    yield self._residents.at(item, device)
                if isinstance(call, Update):
                    yield self._residents.at(int(self._graph.tensor_op[call.parameter.id]), device)

    def _bind(self, device: int) -> Job:
        clock, itself = self._marks.clocks[device], weakref.proxy(self)  # what is bound to the step does not hold it
        names: dict[str, Any] = {
            "clock": clock.mark,
            "hold": lambda: itself._hold_back(device),
            "B": self._marks.begin,
            "E": self._marks.end,
            "O": self._results,
            "S": self._kept[device],
            **self._program_names(device),
            **{
                f"k{k}_{word}": getattr(channel, method)
                for k, channel in self._channels.items()
                for word, method in CHANNEL_METHODS.items()
                if hasattr(channel, method)
            },
            **{f"s{k}_set": signal.release for k, signal in enumerate(self._signals)},
            **{f"s{k}_wait": signal.acquire for k, signal in enumerate(self._signals)},
        }
        self._namespaces[device] = names
        exec(self._compiled[device], names)
        # a function holds the names that it runs with; they do not hold it, so what is dropped is freed there and then
        self._functions[device] = [names.pop(name) for name in ("run", "second") if name in names]
        run = self._crew.part(self._functions[device][0], self._channels)
        if not self._is_traced:
            return run

        def traced(step: int) -> None:
            clock.start()
            begin_s = time.perf_counter()
            run(step)
            itself.launch_s[device] = time.perf_counter() - begin_s

        return traced

    def _program_names(self, device: int) -> dict[str, Any]:
        """The names of tensors and functions in one device's code; residents that are not there yet are made."""
        graph, code, program, gradients = self._graph, self._code, self._program, self._gradients
        places = [torch_device(described) for described in self._host.devices]
        sources = self._sources_of_draws()
        names: dict[str, Any] = {
            **code.constants.values,
            **{f"D{d}": place for d, place in enumerate(places)},
            **{f"g{k}": _direct(view.target) for k, view in enumerate(program.views)},
        }
        for item in code.items[device]:
            if item in program.sources:
                names[f"t{int(graph.output_offsets[item])}"] = self._residents.tensor(item, device)
                continue
            call = program.calls.get(item)
            if call is None or isinstance(call, Update):
                continue
            function = (
                seeded(call.target, places[device], seed=self._seed, key=call.draw, source=sources[call.draw])
                if call.draw is not None
                else _direct(call.target)
            )
            if gradients is not None and item in program.seeds:
                function = gradients.scaled(function)
            names[f"f{item}"] = function
        for run_of in code.update_runs[device]:
            update = self._residents.updater(run_of, device)
            if gradients is not None:
                keys = [program.sources[self._residents.updated(op)].key for op in run_of]
                update = gradients.instead_of(update, keys)
            names[f"u{run_of[-1]}"] = update
        if gradients is not None and program.optimizer is None:
            names.update(
                {f"a{k}": gradients.instead_of(lambda *_: None, [name]) for k, name in enumerate(program.gradients)}
            )
        return names

    def _sources_of_draws(self) -> dict[DrawKey, torch.device | None]:
        """The CPU for draws that are made on several kinds of device, whose generators make different numbers of one
        seed; None for others, which each device makes by itself."""
        kinds = [each.kind if each.backend == "cuda" else "" for each in self._host.devices]
        # other steps and other graphs make the same draw where the step seeds it
        where = {
            key: {kinds[self.plan.devices[op]] for op in ops} if key.fixed is None else {*kinds}
            for key, ops in self._program.draws.items()
        }
        return {key: CPU if len(found) > 1 else None for key, found in where.items()}

    def _hold_back(self, device: int) -> None:
        if self.hold_cycles > 0:
            cuda.hold_back(cuda.current_stream(torch_device(self._host.devices[device])), self.hold_cycles)


CHANNEL_METHODS = {
    "made": "mark_made",
    "send": "send",
    "take": "take",
    "wait": "wait_ready",
    "arrived": "wait_arrived",
    "done": "acknowledge",
    "copied": "wait_copied",
}
"""Methods of a channel by their names in the code: `k4_wait` is `wait_ready` of channel 4."""


def _file_name(device: int) -> str:
    return f"<placed step, device {device}>"


def _direct(target: Callable[..., Any]) -> Callable[..., Any]:
    """The C++ entry of an ATen overload, without its Python wrapper."""
    return cast("Callable[..., Any]", getattr(target, "_op", target))


@dataclass
class Marks:
    """The marks of the last step's code.

    Attributes:
        clocks: by device; those of GPUs, which cost events, in a traced step.
        begin: by item (op i, or N + k): the mark of its device's clock at its begin; None without a mark.
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


def step_timeline(
    graph: OpGraph,
    host: Host,
    plan: Plan,
    code: StepCode,
    marks: Marks,
    channels: Mapping[int, Transport],
    *,
    has_memory: bool = True,
    workspace_bytes: NDArray[np.int64] | None = None,
) -> Timeline:
    """Start and end of every op and transfer of the last step, and each device's memory.

    Args:
        graph: with its program.
        host: of this machine.
        plan: the plans that ran.
        code: made of it, traced.
        marks: that it made.
        channels: by transfer: a GPU's copy is timed by the channel itself.
        has_memory: whether each device's memory is told, too.
    """
    program, n = require_program(graph), graph.num_ops
    begin, end = np.zeros(n + plan.num_transfers), np.zeros(n + plan.num_transfers)
    for device, items in enumerate(code.items):
        for item in items:
            if item not in program.sources:
                begin[item], end[item] = _span_s(host, marks, device, item, channels.get(item - n))
        for updates in code.update_runs[device]:
            _share_run(graph, updates, begin, end)
    made = graph, host, plan, code, begin, end, workspace_bytes
    times, devices, allocated = allocated_bytes(*made) if has_memory else NO_LEVELS
    return Timeline(
        op_device=plan.devices,
        op_start_s=begin[:n],
        op_end_s=end[:n],
        transfer_tensor=plan.transfer_tensor,
        transfer_source=np.array(code.ranks.sources, dtype=np.int32),
        transfer_destination=plan.transfer_destination,
        transfer_start_s=begin[n:],
        transfer_end_s=end[n:],
        memory_time_s=times,
        memory_device=devices,
        memory_bytes=allocated,
        source="measured",
    )


def _span_s(host: Host, marks: Marks, device: int, item: int, channel: Transport | None) -> tuple[float, float]:
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


_KEYS = count()
"""A number for each step, by which other processes know it."""
Floats = NDArray[np.float64]
Levels = tuple[Floats, NDArray[np.int32], NDArray[np.int64]]
NO_LEVELS: Levels = (np.zeros(0), np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64))


def allocated_bytes(
    graph: OpGraph,
    host: Host,
    plan: Plan,
    code: StepCode,
    begin_s: Floats,
    end_s: Floats,
    workspace_bytes: NDArray[np.int64] | None = None,
) -> Levels:
    """Instants in seconds, devices and bytes: allocated bytes of a device from that instant on, in order of time.

    A device holds its residents all along, every tensor from its making to its `del`, scratch memory while its op runs.

    Args:
        graph: with its program.
        host: the devices.
        plan: the plans that ran.
        code: made of it.
        begin_s: (N + K,) when each item began.
        end_s: (N + K,) when it ended.
        workspace_bytes: (N, D) scratch memory of each op on each device; by default as the graph says.
    """
    n, sizes = graph.num_ops, [allocated(graph.tensor_bytes, each.memory_granularity_bytes) for each in host.devices]
    resident = resident_bytes(graph, host, plan.devices)
    resident += np.array([device.context_bytes for device in host.devices], dtype=np.int64)
    events: list[tuple[float, int, int, int]] = [(0.0, 1, d, int(size)) for d, size in enumerate(resident)]
    for device in range(host.num_devices):
        events += [
            (float(begin_s[k]), 1, device, int(sizes[device][tensor])) for k, tensor in code.ranks.allocations(device)
        ]
        for item, tensor in code.ranks.releases(device):
            lent_s = _lent_until_s(graph, plan, code, tensor, device, end_s)
            events.append((max(float(end_s[item]), lent_s), 0, device, -int(sizes[device][tensor])))
    scratch = graph.workspace_bytes if workspace_bytes is None else workspace_bytes[np.arange(n), plan.devices]
    scratch = allocated(scratch, np.array([each.memory_granularity_bytes for each in host.devices])[plan.devices])
    for op in np.flatnonzero((scratch > 0) & (begin_s[:n] < end_s[:n])).tolist():
        device, size = int(plan.devices[op]), int(scratch[op])
        events += [(float(begin_s[op]), 1, device, size), (float(end_s[op]), 0, device, -size)]
    events.sort()
    moments_s, _, devices, changes = map(np.array, zip(*events, strict=True))
    levels = np.zeros(len(events), dtype=np.int64)
    for device in range(host.num_devices):
        levels[devices == device] = np.cumsum(changes[devices == device])
    return moments_s, devices.astype(np.int32), levels


def resident_bytes(graph: OpGraph, host: Host, devices: NDArray[np.int32]) -> NDArray[np.int64]:
    """(D,) bytes that stay on each device from step to step where ops are on `devices` (N,): tensors and states."""
    is_source = np.isin(np.arange(graph.num_ops), list(require_program(graph).sources))
    kept = graph.state_bytes + np.where(is_source, graph.output_bytes, 0)
    granularity = np.array([device.memory_granularity_bytes for device in host.devices], dtype=np.int64)[devices]
    held = np.zeros(host.num_devices, dtype=np.int64)
    np.add.at(held, devices, allocated(kept, granularity))
    return held


def _lent_until_s(graph: OpGraph, plan: Plan, code: StepCode, tensor: int, device: int, end_s: Floats) -> float:
    """When the last other device is done with what this one sends: it has its copy, or its last reader has ended."""
    lent_s = 0.0
    for transfer in np.flatnonzero(plan.transfer_tensor == tensor):
        if code.ranks.sources[transfer] != device:
            continue
        lent_s = max(lent_s, float(end_s[graph.num_ops + transfer]))
        if not code.is_handover[transfer]:
            continue
        offsets, ops = graph.readers
        readers = ops[offsets[tensor] : offsets[tensor + 1]]
        there = readers[plan.devices[readers] == plan.transfer_destination[transfer]]
        lent_s = max(lent_s, float(end_s[there].max(initial=0.0)))
    return lent_s
