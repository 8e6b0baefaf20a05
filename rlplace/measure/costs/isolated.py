"""`isolated_s`: what ops take one by one, on a device that does not hold the whole step."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rlplace import cuda
from rlplace.errors import RunnerError
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.optimizers import UpdateState, updater
from rlplace.graphs.program import Ref, Update, map_refs
from rlplace.measure.costs.layouts import Layout, maker
from rlplace.measure.hosts.host import Host
from rlplace.measure.run.crew.clocks import cycles_to_launch
from rlplace.measure.run.crew.streams import torch_device
from rlplace.measure.run.crew.workers import Crew, Job
from rlplace.measure.run.failures import is_lost
from rlplace.measure.run.placed.random_ops import seeded

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
