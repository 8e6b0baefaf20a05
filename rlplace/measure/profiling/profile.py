"""Costs from real steps on this machine (`profile_costs`), and link figures from real copies (`profile_links`).

Ops that do not fit on a device together are timed one by one (`isolated_s`), on tensors made to match their `layouts`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import timeit
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplace import cuda
from rlplace.errors import RunnerError
from rlplace.graphs import OpGraph
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.optimizers import UpdateState, updater
from rlplace.graphs.program import Ref, Update, map_refs
from rlplace.graphs.random_streams import seeded
from rlplace.measure.costs.costs import Costs
from rlplace.measure.execute.device_threads import Channel, Crew, CudaChannel, Job, cycles_to_launch, torch_device
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.residents import Residents, limited_memory
from rlplace.measure.execute.shared_memory import Arena, SharedChannel
from rlplace.measure.hosts.host import Device, Host, Link
from rlplace.measure.hosts.nodes import join
from rlplace.measure.problem import capacity_bytes, single_device_peak_bytes, single_device_plan
from rlplace.measure.profiling import machine_links
from rlplace.measure.profiling.machine_links import line, measured_links
from rlplace.measure.profiling.metered_step import MeteredStep
from rlplace.measure.timing.race import Watch
from rlplace.measure.timing.threads import keep_freed_memory
from rlplace.say import Say

SIZES_BYTES = (4096, 256 << 10, 4 << 20)
"""Between cores."""
GPU_SIZES_BYTES = (4096, 1 << 20, 16 << 20, 64 << 20)
"""Where one is a GPU: its links have much latency for their bandwidth."""


REPEATS = 15


def profile_links(host: Host, *, repeats: int = REPEATS) -> Host:
    """The host with latency and bandwidth of every link as real transfers between its devices' threads take them.

    Tensors are passed there and back through the runner's own channels, waking the other threads included. Between
    cores the same tensor comes back, as in a step fresh from the other's cache: half a round trip is one transfer, and
    pairs of the same two kinds share figures. Where one is a GPU each ordered pair is measured, parts of one GPU for
    each other: the answer is a small tensor, and half the time of two small ones is the answer's. Between cores that
    are processes the tensors go through slots in shared memory, as in a step, though here two threads pass them.

    A route is as slow as its slowest link, so a link that several routes share has the best that any of them showed:
    the most bandwidth, the least latency. Where that says more of a pair than it showed, the pair needs a link of its
    own beside the shared ones (`Host.fingerprint` names links, so it is the host that must have it, from the start).
    """
    keep_freed_memory()
    routes = {(route.source, route.destination): route for route in host.routes}
    is_far = any(device.machine for device in host.devices) and host.is_wired
    between = measured_links(join(), has_slots=bool(host.shares_memory.any())) if is_far else {}
    measured: dict[object, tuple[float, float]] = {}
    figures: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for route in host.routes:
        if not route.links or not routes[route.destination, route.source].links:
            continue
        source, destination = host.device(route.source), host.device(route.destination)
        pair = (source.machine, destination.machine) if is_far else _alike(source, destination)
        if pair in between:
            measured[pair] = between[pair].as_link
        elif is_far:
            continue  # torchrun runs one process there: the figures of the host file stay
        elif pair not in measured:
            measured[pair] = _measure(source, destination, repeats, by_slots=host.processes)
        for link in route.links:
            figures[link].append(measured[pair])
    best = {
        link: Link(link, max(bandwidth for _, bandwidth in known), min(latency_s for latency_s, _ in known))
        for link, known in figures.items()
    }
    return dataclasses.replace(host, links=tuple(best.get(link.name, link) for link in host.links))


def links_main(answers: TextIO, *, has_slots: bool) -> None:
    """The part of one rank in the job that `measured_links` starts."""
    machine_links.main(answers, partial(_measure, repeats=REPEATS, by_slots=True) if has_slots else None)


def _alike(source: Device, destination: Device) -> object:
    """Equal for pairs that share figures: GPUs differ by their links, cores by their kind."""
    ends = [str(torch_device(each)) if each.backend == "cuda" else each.kind for each in (source, destination)]
    return tuple(ends) if "cuda" in (source.backend, destination.backend) else frozenset(ends)


def _measure(source: Device, destination: Device, repeats: int, *, by_slots: bool) -> tuple[float, float]:
    """(latency_s, bandwidth_bytes_per_s) of transfers from `source` to `destination`."""
    if "cuda" not in (source.backend, destination.backend):
        rounds_s = [_round_s(size, size, source, destination, repeats, by_slots=by_slots) for size in SIZES_BYTES]
        return line(SIZES_BYTES, [seconds / 2 for seconds in rounds_s])
    rounds_s = [_round_s(size, GPU_SIZES_BYTES[0], source, destination, repeats) for size in GPU_SIZES_BYTES]
    return line(GPU_SIZES_BYTES, [seconds - rounds_s[0] / 2 for seconds in rounds_s])


def _round_s(
    size: int, answer_size: int, source: Device, destination: Device, repeats: int, *, by_slots: bool = False
) -> float:
    """Median seconds of a transfer of `size` bytes and one of `answer_size` bytes back: of the same, if as large."""
    crew = Crew((source, destination))
    there: Channel | SharedChannel
    back: Channel | SharedChannel
    if by_slots:
        with contextlib.closing(Arena.new(2)) as arena:
            arena.make_room(2, size + answer_size)
            slots = arena.slots(size + answer_size)
            there, back = SharedChannel(arena, 0, slots, 0), SharedChannel(arena, 1, slots, size)
    else:
        there, back = crew.streams.channel(source, destination), crew.streams.channel(destination, source)
    place, answering = torch_device(source), torch_device(destination)
    with cuda.settled(place), cuda.settled(answering):
        original = torch.ones(size, dtype=torch.uint8, device=place)
        answer = torch.ones(answer_size, dtype=torch.uint8, device=answering)
    samples: list[float] = []

    def throw(_: int) -> None:
        for _ in range(repeats + 3):
            begin = time.perf_counter()
            there.send(original)
            back.wait_ready()
            back.take()
            if isinstance(back, CudaChannel):
                back.wait_arrived()
            if place.type == "cuda":
                cuda.await_stream(cuda.current_stream(place))
            samples.append(time.perf_counter() - begin)

    def catch(_: int) -> None:
        for _ in range(repeats + 3):
            there.wait_ready()
            taken = there.take()
            if isinstance(there, CudaChannel):
                there.wait_arrived()  # the answer is sent after it: both on one stream
            back.send(taken if answer_size == size else answer)

    def give_up() -> None:
        there.abort()
        back.abort()

    try:
        crew.run([throw, catch], 0, on_error=give_up, deadline_s=600.0)
    finally:
        crew.stop()
    return float(np.median(samples[3:]))


HOLD_EVERY = 200
"""Ops after which a GPU is held back again: with the marks of a trace they are fewer launches than its queue takes."""
NUM_COMPARED = 64
"""Signatures that are run alone where the whole step was traced as well, those that take longest."""
LEAST_RATIO, MOST_RATIO = 0.5, 2.0
"""The time of an op in a step over its time alone is between them: anything else is a disturbed measurement."""


def profile_costs(
    graph: OpGraph,
    host: Host,
    *,
    num_steps: int = 12,
    warmup: int = 3,
    most_s: float = math.inf,
    on_progress: Say | None = None,
    watch: Watch | None = None,
) -> Costs:
    """Seconds of every op on every device, traced in place from real steps with everything on one device.

    An op's figure is its median over the steps; ops of one signature share the mean of theirs, which keeps their total.
    Devices of one kind share figures. On a CPU device, one more step measures the scratch memory of each op. On a GPU,
    launches run ahead of it, so that the host's time for them is in no op's figure.

    Where no device of a kind holds the whole step (by its simulated peak, or as it ran out of memory), each signature
    is timed alone there, scaled by the ratio of the others' times in a step and alone: on a traced device of the
    same backend, or 1.

    Args:
        graph: with its program.
        host: of this machine.
        num_steps: traced steps on each kind of device.
        warmup: steps before them.
        most_s: seconds for tracing; where they are over, one step after the first is all that a kind gets.
        on_progress: told which part is being profiled.
        watch: told which device is at work, step by step; longer work is not `is_made`.

    Raises:
        InvalidValue: the graph has no program.
        RunnerError: an op failed other than by its size.
    """
    require_program(graph)
    keep_freed_memory()
    crew = Crew(host.devices)
    try:
        with limited_memory(host.devices):
            profiler = _Profiler(
                graph, host, crew, num_steps, warmup, most_s, on_progress or (lambda _: None), watch or Watch()
            )
            by_kind = profiler.run()
    finally:
        crew.stop()
    return Costs(np.stack([by_kind[device.kind] for device in host.devices], axis=1), "profiled", profiler.workspaces())


class _Profiler:
    """Profiles one device of each kind: those that hold the whole step first."""

    def __init__(
        self,
        graph: OpGraph,
        host: Host,
        crew: Crew,
        num_steps: int,
        warmup: int,
        most_s: float,
        say: Say,
        watch: Watch,
    ) -> None:
        self._graph, self._host, self._crew, self._say, self._watch = graph, host, crew, say, watch
        self._num_steps, self._warmup, self._most_s = num_steps, warmup, most_s
        self._residents = Residents(graph, host)
        self._traced: dict[int, NDArray[np.float64]] = {}  # by device
        self._workspaces: dict[str, NDArray[np.int64]] = {}  # by kind

    def run(self) -> dict[str, NDArray[np.float64]]:
        """(N,) seconds by kind."""
        by_kind: dict[str, NDArray[np.float64]] = {}
        too_small = []
        for kind in dict.fromkeys(device.kind for device in self._host.devices):
            device, why = self._device_of(kind)
            figures = None if why else self._trace(device)
            if figures is None:
                too_small.append((device, why or "the whole step ran out of its memory"))
            else:
                by_kind[kind] = self._traced[device] = figures
        for device, why in too_small:
            by_kind[self._host.devices[device].kind] = self._isolated(device, why)
        return by_kind

    def workspaces(self) -> NDArray[np.int64] | None:
        """(N, D) bytes; of a device that could not tell, those of another CPU device, or else as the graph says."""
        if not self._workspaces:
            return None
        other, told = next(iter(self._workspaces.values())), self._graph.workspace_bytes
        return np.stack(
            [
                self._workspaces.get(device.kind, other if device.backend == "cpu" else told)
                for device in self._host.devices
            ],
            axis=1,
        )

    def _device_of(self, kind: str) -> tuple[int, str]:
        """The first device of a kind that holds the step, else the first and why it does not."""
        devices = [index for index, device in enumerate(self._host.devices) if device.kind == kind]
        peaks = [single_device_peak_bytes(self._graph, self._host, device) for device in devices]
        for device, peak in zip(devices, peaks, strict=True):
            if peak <= capacity_bytes(self._host, device):
                return device, ""
        return devices[0], f"the whole step needs {peaks[0]:,} bytes of its {capacity_bytes(self._host, devices[0]):,}"

    def _trace(self, device: int) -> NDArray[np.float64] | None:
        """(N,) seconds, or None where memory does not suffice."""
        described, figures = self._host.devices[device], None
        self._say(f"profiling {self._graph.num_ops} ops on {described.name} ({described.kind})")
        try:
            samples = _trace_device(
                self._graph,
                self._host,
                device,
                self._residents,
                self._crew,
                num_steps=self._num_steps,
                warmup=self._warmup,
                deadline_s=time.monotonic() + self._most_s / len({each.kind for each in self._host.devices}),
                watch=self._watch,
            )
            figures = share_by_signature(self._graph.signatures, samples)
            if described.backend == "cpu":
                self._workspaces[described.kind] = seen_workspaces(
                    self._graph, self._host, device, self._residents, self._crew
                )
        except RunnerError as error:
            if not cuda.is_out_of_memory(error):
                raise
        if self._residents.keep_only(()):
            cuda.give_back_memory()
        return figures

    def _isolated(self, device: int, why: str) -> NDArray[np.float64]:
        """(N,) seconds of ops run alone."""
        graph, described = self._graph, self._host.devices[device]
        chosen = _first_of_each(graph, np.flatnonzero(~graph.is_source))
        self._say(f"profiling {len(chosen)} kinds of ops one by one on {described.name} ({described.kind}): {why}")
        known = layouts(graph)
        seconds = self._alone_s(device, chosen, known)
        alone_s = dict(zip(chosen, seconds.tolist(), strict=True))
        own = np.array([alone_s.get(name, 0.0) for name in graph.signatures])
        other = next((d for d in self._traced if self._host.devices[d].backend == described.backend), None)
        ratio = 1.0
        if other is not None:
            longest = np.argsort(-self._traced[other], kind="stable")
            compared = dict(list(_first_of_each(graph, longest[~graph.is_source[longest]]).items())[:NUM_COMPARED])
            beside_s = self._alone_s(other, compared, known).sum()
            in_step_s = self._traced[other][list(compared.values())].sum()
            ratio = float(np.clip(in_step_s / beside_s, LEAST_RATIO, MOST_RATIO))
        if described.backend == "cuda":
            cuda.give_back_memory()
        return np.where(graph.is_source, 0.0, own * ratio)

    def _alone_s(self, device: int, ops: dict[str, int], known: dict[int, Layout]) -> NDArray[np.float64]:
        """Seconds of each of some ops run alone."""
        self._watch.begin(device, is_made=False)
        seconds = isolated_s(self._graph, self._host, device, self._crew, list(ops.values()), known)
        self._watch.end()
        return seconds


def _first_of_each(graph: OpGraph, ops: NDArray[np.integer]) -> dict[str, int]:
    """By signature, in order of `ops`, the first of them that has it."""
    _, first = np.unique([graph.signatures[op] for op in ops.tolist()], return_index=True)
    return {graph.signatures[op]: op for op in ops[np.sort(first)].tolist()}


def share_by_signature(signatures: tuple[str, ...], samples_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """(N,) seconds from (S, N) samples: the median over steps, then the mean over the ops of a signature.

    >>> share_by_signature(("a", "a", "b"), np.array([[1.0, 3.0, 5.0], [1.0, 3.0, 9.0], [1.0, 3.0, 6.0]])).tolist()
    [2.0, 2.0, 6.0]
    """
    _, place = np.unique(signatures, return_inverse=True)
    return np.asarray((np.bincount(place, np.median(samples_s, axis=0)) / np.bincount(place))[place])


def _trace_device(
    graph: OpGraph,
    host: Host,
    device: int,
    residents: Residents,
    crew: Crew,
    *,
    num_steps: int,
    warmup: int,
    deadline_s: float,
    watch: Watch,
) -> NDArray[np.float64]:
    """(S, N) seconds of every op, of the steps until the deadline; on a GPU between events on its compute stream."""
    step = PlacedStep(
        graph, host, single_device_plan(graph, device), residents, crew, is_traced=True, hold_every=HOLD_EVERY
    )
    num_run = int(np.count_nonzero(~graph.is_source))
    samples: list[NDArray[np.float64]] = []
    try:
        for k in range(warmup + num_steps):
            watch.begin(device)
            step.run(k)
            watch.end()
            if k == min(1, warmup - 1):  # the first step takes long to launch, and later ones wait for a held GPU
                step.hold_cycles = cycles_to_launch(step.launch_s[device] * min(HOLD_EVERY / max(num_run, 1), 1.0))
            is_late = time.monotonic() > deadline_s
            if k < warmup and (k == 0 or not is_late):
                continue
            timeline = step.timeline()
            order = np.flatnonzero(timeline.op_end_s > 0)
            starts, ends = timeline.op_start_s[order], timeline.op_end_s[order]
            if host.devices[device].backend == "cpu":
                # from the end of the op before: what the interpreter does between them is part of a step on a core
                starts[1:] = ends[:-1]
            samples.append(np.zeros(graph.num_ops))
            samples[-1][order] = ends - starts
            if is_late:
                break
    finally:
        step.unload()
    return np.stack(samples)


WARMUP = 2
ENOUGH_S = 0.05
"""An op is run again and again for about so long ..."""
LEAST_RUNS, MOST_RUNS = 3, 20
"""... but so many times at least and at most."""
LATEST_S = 600.0


def isolated_s(
    graph: OpGraph, host: Host, device: int, crew: Crew, ops: Sequence[int], known: dict[int, Layout]
) -> NDArray[np.float64]:
    """(len(ops),) seconds of each of `ops` run alone, warm, on `device`; failed ones are estimated.

    One after the other: the arguments of an op are made on the device before and gone after. An op that fails, mostly
    as it alone is too big, has the others' median time a byte, and never less than the fastest of them.

    Args:
        graph: with its program.
        host: of this machine.
        device: where.
        crew: the host's threads.
        ops: no sources.
        known: `layouts` of the graph.

    Raises:
        RunnerError: all of them failed, or the device is lost.
    """
    timed = np.full(len(ops), np.nan)
    failure: RunnerError | None = None
    for k, op in enumerate(ops):
        try:
            timed[k] = _seconds(graph, host, device, crew, op, known)
        except RunnerError as error:
            if cuda.is_lost(error):
                raise
            if error.__cause__ is not None:
                traceback.clear_frames(error.__cause__.__traceback__)  # they hold the op's tensors
            failure = failure or error
    if failure is not None and np.all(np.isnan(timed)):
        raise RunnerError(f"no op runs alone on {host.devices[device].name}: {failure}") from failure
    moved = np.maximum(graph.bytes_moved[list(ops)], 1.0)
    told = np.maximum(moved * np.nanmedian(timed / moved), np.nanmin(timed)) if len(ops) else timed
    return np.where(np.isnan(timed), told, timed)


def _seconds(graph: OpGraph, host: Host, device: int, crew: Crew, op: int, known: dict[int, Layout]) -> float:
    place = torch_device(host.devices[device])
    is_gpu = host.devices[device].backend == "cuda"
    seconds: list[float] = []

    def job(_: int) -> None:
        run = _call(graph, op, place, maker(known, place))
        for _ in range(WARMUP):
            if is_gpu:
                cuda.await_stream(cuda.current_stream(place))
            begin_s = time.perf_counter()
            run()
        launch_s = max(time.perf_counter() - begin_s, 1e-9)
        num_runs = int(np.clip(ENOUGH_S / launch_s, LEAST_RUNS, MOST_RUNS))
        if is_gpu:
            seconds.append(_on_gpu_s(run, num_runs, place, launch_s))
        else:
            seconds.append(max(float(np.median(timeit.repeat(run, number=1, repeat=num_runs))), 1e-9))

    jobs: list[Job] = [job if index == device else lambda _: None for index in range(host.num_devices)]
    crew.run(jobs, 0, on_error=lambda: None, deadline_s=LATEST_S)
    return seconds[0]


def _call(graph: OpGraph, op: int, place: torch.device, make: Callable[[Ref], torch.Tensor]) -> Callable[[], object]:
    """The op on arguments of its own, as a placed step calls it."""
    program = require_program(graph)
    call = program.calls[op]
    if isinstance(call, Update):
        assert program.optimizer is not None
        parameter, gradient = make(call.parameter), make(call.gradient)
        update = updater([UpdateState(program.optimizer, parameter)], [parameter])
        return lambda: update(gradient)
    args, kwargs = map_refs(make, call.args), map_refs(make, call.kwargs)
    if call.takes_device and kwargs.get("device") is not None:
        kwargs["device"] = place
    target: Callable[..., object] = getattr(call.target, "_op", call.target)
    if call.draw is not None:
        draws = seeded(call.target, place, seed=0, key=call.draw)
        return lambda: draws(0, *args, **kwargs)
    return lambda: target(*args, **kwargs)


def _on_gpu_s(run: Callable[[], object], num_runs: int, place: torch.device, launch_s: float) -> float:
    stream = cuda.current_stream(place)
    begin, end = cuda.event(is_timed=True), cuda.event(is_timed=True)
    cuda.hold_back(stream, cycles_to_launch(num_runs * launch_s))
    cuda.record(begin, stream)
    for _ in range(num_runs):
        run()
    cuda.record(end, stream)
    cuda.await_event(end)
    return max(cuda.elapsed_s(begin, end) / num_runs, 1e-9)


LEAST, MOST = 0.01, 0.05
"""Between them lie the values of made tensors: probabilities, scales and variances may be so, and nothing overflows."""


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def make(self, place: torch.device, generator: torch.Generator) -> torch.Tensor:
        """A tensor that lies so: small random numbers, zeros where it holds integers or booleans.

        Args:
            place: where.
            generator: of that place.
        """
        size = 0 if 0 in self.shape else 1 + sum((n - 1) * k for n, k in zip(self.shape, self.strides, strict=True))
        memory = torch.zeros(size, dtype=self.dtype, device=place)
        if self.dtype.is_complex:
            torch.view_as_real(memory).uniform_(LEAST, MOST, generator=generator)
        elif self.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            memory.uniform_(LEAST, MOST, generator=generator)
        return memory.as_strided(self.shape, self.strides)


def layouts(graph: OpGraph) -> dict[int, Layout]:
    """By `Ref.id`, the layouts of tensors and views that calls read, as PyTorch's fake tensors have them on the CPU.

    Raises:
        InvalidValue: the graph has no program.
    """
    program = require_program(graph)
    values: dict[int, Any] = {}

    def read(ref: Ref) -> Any:
        if ref.id not in values:
            view = program.views[ref.id - program.num_tensors]
            values[ref.id] = view.target(*map_refs(read, view.args), **map_refs(read, view.kwargs))
        return values[ref.id]

    with FakeTensorMode(), torch.no_grad():
        for op in range(graph.num_ops):
            if op in program.sources:
                value = program.sources[op].value
                values[int(graph.output_offsets[op])] = torch.empty_strided(
                    tuple(value.shape), value.stride(), dtype=value.dtype
                )
            elif isinstance(call := program.calls[op], Update):
                read(call.gradient)
            else:
                output = call.target(*map_refs(read, call.args), **map_refs(read, call.kwargs))
                outputs = output if call.returns_tuple else (output,)
                values.update((tensor, value) for tensor, value in zip(call.outputs, outputs) if tensor >= 0)
    return {
        each: Layout(tuple(value.shape), value.stride(), value.dtype)
        for each, value in values.items()
        if isinstance(value, torch.Tensor)
    }


def maker(known: dict[int, Layout], place: torch.device) -> Callable[[Ref], torch.Tensor]:
    """A function of a `Ref` that gives a tensor of its layout, one and the same whenever it is asked for."""
    generator = torch.Generator(place).manual_seed(0)
    made: dict[int, torch.Tensor] = {}

    def make(ref: Ref) -> torch.Tensor:
        if ref.id not in made:
            made[ref.id] = known[ref.id].make(place, generator)
        return made[ref.id]

    return make


def seen_workspaces(graph: OpGraph, host: Host, device: int, residents: Residents, crew: Crew) -> NDArray[np.int64]:
    """(N,) bytes that each op holds beside its inputs and outputs while it runs, at least those of the graph.

    Libraries decide on the scratch memory of a convolution, a sort or a sum, by shapes and by the version that is
    installed: no formula tells it. One step is run with everything on one device; ops of one signature share the most
        of theirs.

    Args:
        graph: with its program.
        host: of this machine.
        device: a CPU device that holds the whole step.
        residents: of that graph.
        crew: the host's threads.

    Raises:
        RunnerError: an op failed.
    """
    step = MeteredStep(graph, host, single_device_plan(graph, device), residents, crew, marks_ops=True)
    try:
        step.run()
        needed = step.needed_bytes
    finally:
        step.unload()
    own = np.maximum(np.where(graph.is_source, 0, needed - graph.output_bytes), graph.workspace_bytes)
    _, place = np.unique(graph.signatures, return_inverse=True)
    most = np.zeros(graph.num_ops, dtype=np.int64)
    np.maximum.at(most, place, own)
    return most[place]
