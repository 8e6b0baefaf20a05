"""`profile_costs`: what ops take on this machine, from real steps.

`isolated_s`: what ops take one by one, on a device that does not hold the whole step.

`layouts`: how every value of a program lies in memory, found without computing any; tensors made to match.

`seen_workspaces`: the scratch that ops really take, from a step whose allocations are counted.
"""

from __future__ import annotations

import math
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplace import cuda
from rlplace.errors import RunnerError
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.optimizers import UpdateState, updater
from rlplace.graphs.program import Ref, Update, map_refs
from rlplace.measure.costs.costs import Costs
from rlplace.measure.costs.single_device import capacity_bytes, single_device_peak_bytes, single_device_plan
from rlplace.measure.hosts.host import Host
from rlplace.measure.metered_step import MeteredStep
from rlplace.measure.placed.channels import torch_device
from rlplace.measure.placed.placed_step import PlacedStep
from rlplace.measure.placed.residents import Residents, seeded
from rlplace.measure.placed.workers import Crew, Job, cycles_to_launch
from rlplace.measure.run.failures import is_lost, limited_memory
from rlplace.measure.run.race import Unwatched, Watch
from rlplace.measure.run.threads import keep_freed_memory
from rlplace.say import Say

HOLD_EVERY = 200
"""Ops after which a GPU is held back again: with the marks of a trace they are fewer launches than its queue takes."""
NUM_COMPARED = 64
"""Signatures that are run alone where the whole step was traced as well, those that take longest."""
LEAST_RATIO, MOST_RATIO = 0.5, 2.0
"""What an op takes in a step, over what it takes alone, is between them: anything else is a disturbed measurement."""


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
    Devices of one kind share figures. On a CPU device, one more step tells what scratch each op takes. On a GPU,
    launches run ahead of it, so that what the host takes for them is in no op's figure.

    Where no device of a kind holds the whole step (by its simulated peak, or as it ran out of memory), each signature
    is timed alone there, scaled by what the others take in a step over what they take alone: on a traced device of the
    same backend, or 1.

    Args:
        graph: with its program.
        host: of this machine.
        num_steps: traced steps on each kind of device.
        warmup: steps before them.
        most_s: seconds for tracing; where they are over, one step after the first is all that a kind gets.
        on_progress: told what is being profiled.
        watch: told which device is at work, step by step; what takes longer is not `is_made`.

    Raises:
        InvalidValue: the graph has no program.
        RunnerError: an op failed other than by its size.
    """
    require_program(graph)
    keep_freed_memory()
    crew = Crew(host.devices)
    try:
        with limited_memory(host):
            say = on_progress or (lambda _: None)
            profiler = _Profiler(graph, host, crew, num_steps, warmup, most_s, say, watch or Unwatched())
            by_kind = profiler.run()
    finally:
        crew.stop()
    seconds = np.stack([by_kind[device.kind] for device in host.devices], axis=1)
    return Costs(seconds, "profiled", profiler.workspaces())


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
        columns = [
            self._workspaces.get(device.kind, other if device.backend == "cpu" else told)
            for device in self._host.devices
        ]
        return np.stack(columns, axis=1)

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
        described = self._host.devices[device]
        self._say(f"profiling {self._graph.num_ops} ops on {described.name} ({described.kind})")
        samples: NDArray[np.float64] | None = None
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
            if described.backend == "cpu":
                self._workspaces[described.kind] = seen_workspaces(
                    self._graph, self._host, device, self._residents, self._crew
                )
        except RunnerError as error:
            if not cuda.is_out_of_memory(error):
                raise
        if self._residents.keep_only(()):
            cuda.give_back_memory()
        return None if samples is None else share_by_signature(self._graph.signatures, samples)

    def _isolated(self, device: int, why: str) -> NDArray[np.float64]:
        """(N,) seconds of ops run alone."""
        graph, described = self._graph, self._host.devices[device]
        chosen = _first_of_each(graph, np.flatnonzero(~graph.is_source))
        self._say(f"profiling {len(chosen)} kinds of ops one by one on {described.name} ({described.kind}): {why}")
        known = layouts(graph)
        alone_s = dict.fromkeys(graph.signatures, 0.0)
        self._watch.begin(device, is_made=False)
        seconds = isolated_s(graph, self._host, device, self._crew, list(chosen.values()), known)
        self._watch.end()
        alone_s.update(zip(chosen, seconds.tolist(), strict=True))
        own = np.array([alone_s[name] for name in graph.signatures])
        other = next((d for d in self._traced if self._host.devices[d].backend == described.backend), None)
        ratio = 1.0
        if other is not None:
            longest = np.argsort(-self._traced[other], kind="stable")
            compared = dict(list(_first_of_each(graph, longest[~graph.is_source[longest]]).items())[:NUM_COMPARED])
            self._watch.begin(other, is_made=False)
            beside_s = isolated_s(graph, self._host, other, self._crew, list(compared.values()), known)
            self._watch.end()
            in_step_s = self._traced[other][list(compared.values())]
            ratio = float(np.clip(in_step_s.sum() / beside_s.sum(), LEAST_RATIO, MOST_RATIO))
        if described.backend == "cuda":
            cuda.give_back_memory()
        return np.where(graph.is_source, 0.0, own * ratio)


def _first_of_each(graph: OpGraph, ops: NDArray[np.integer]) -> dict[str, int]:
    """By signature, the first op in `ops` that has it."""
    first: dict[str, int] = {}
    for op in ops.tolist():
        first.setdefault(graph.signatures[op], op)
    return first


def share_by_signature(signatures: tuple[str, ...], samples_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """(N,) seconds from (S, N) samples: the median over steps, then the mean over the ops of a signature.

    >>> share_by_signature(("a", "a", "b"), np.array([[1.0, 3.0, 5.0], [1.0, 3.0, 9.0], [1.0, 3.0, 6.0]])).tolist()
    [2.0, 2.0, 6.0]
    """
    own = np.median(samples_s, axis=0)
    members: dict[str, list[int]] = defaultdict(list)
    for op, name in enumerate(signatures):
        members[name].append(op)
    shared = np.empty_like(own)
    for ops in members.values():
        shared[ops] = np.mean(own[ops])
    return shared


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
    """(len(ops),) seconds of each of `ops` run alone, warm, on `device`; what failed is estimated.

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
            if is_lost(error):
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
        seconds.append(_on_gpu_s(run, num_runs, place, launch_s) if is_gpu else _on_core_s(run, num_runs))

    jobs: list[Job] = [job if index == device else _nothing for index in range(host.num_devices)]
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
    if call.is_random:
        draws = seeded(call.target, place, seed=0, op=op)
        return lambda: draws(0, *args, **kwargs)
    return lambda: target(*args, **kwargs)


def _on_core_s(run: Callable[[], object], num_runs: int) -> float:
    samples = []
    for _ in range(num_runs):
        begin_s = time.perf_counter()
        run()
        samples.append(time.perf_counter() - begin_s)
    return max(float(np.median(samples)), 1e-9)


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


def _nothing(_: int) -> None:
    """The part of a device that is not asked."""


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
                made = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype)
                values[int(graph.output_offsets[op])] = made
                continue
            call = program.calls[op]
            if isinstance(call, Update):
                read(call.gradient)
                continue
            output = call.target(*map_refs(read, call.args), **map_refs(read, call.kwargs))
            outputs = output if call.returns_tuple else (output,)
            values.update({tensor: value for tensor, value in zip(call.outputs, outputs, strict=False) if tensor >= 0})
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
    """(N,) bytes that each op holds beside its inputs and outputs while it runs, at least what the graph says.

    Libraries decide what a convolution, a sort or a sum takes, by shapes and by the version that is installed: no
    formula tells it. One step is run with everything on one device; ops of one signature share the most of theirs.

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
    most: dict[str, int] = {}
    for name, num_bytes in zip(graph.signatures, own.tolist(), strict=True):
        most[name] = max(most.get(name, 0), num_bytes)
    return np.array([most[name] for name in graph.signatures], dtype=np.int64)
