"""Figures of a host: its links, the ops of a step, and what the step takes with launches that run ahead and without."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from gpu_stages.subject import subject
from gpu_stages.verdict import Verdict
from rlplace import cuda
from rlplace.measure.execute.device_threads import Crew, Job, torch_device
from rlplace.measure.profiling.profile import profile_costs, profile_links

CYCLES = 200_000_000
"""About a tenth of a second: longer than launching the step takes."""
NUM_STEPS = 7


def run(host_word: str) -> Verdict:
    placed = subject(host_word, "nmt@small")
    host = profile_links(placed.host)
    links = {link.name: link for link in host.links}
    routes = {
        f"{route.source}->{route.destination}": {
            "latency_s": max(links[name].latency_s for name in route.links),
            "bandwidth_bytes_per_s": min(links[name].bandwidth_bytes_per_s for name in route.links),
        }
        for route in host.routes
        if route.links
    }
    costs = profile_costs(placed.graph, host, num_steps=5)
    work_s = dict(zip((device.name for device in host.devices), costs.op_time_s.sum(axis=0).tolist(), strict=True))
    step_s = {}
    for is_held in (False, True):
        crew = _Timed(placed.host.devices, is_held=is_held)
        try:
            with placed.loaded(placed.plan_on(0), crew) as step:
                for k in range(2 + NUM_STEPS):
                    step.run(k)
        finally:
            crew.stop()
        step_s["run ahead" if is_held else "as launched"] = float(np.median(crew.seconds[2:]))
    first = placed.host.devices[0].name
    line = (
        f"step on {first}: ops {work_s[first] * 1e3:.2f} ms in all as profiled; the device is busy for "
        f"{step_s['run ahead'] * 1e3:.2f} ms where launches run ahead, {step_s['as launched'] * 1e3:.2f} ms where not"
    )
    is_ok = all(np.isfinite(list(figures.values())).all() for figures in routes.values())
    return Verdict.of(is_ok, line, routes=routes, work_s=work_s, step_s=step_s)


class _Timed(Crew):
    """A crew that times the first device's part of each step on the device itself.

    Attributes:
        seconds: one for each step.
    """

    def __init__(self, *args: object, is_held: bool) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.seconds: list[float] = []
        self._is_held = is_held

    def run(self, jobs: list[Job], step: int, *, on_error: Callable[[], None], deadline_s: float) -> None:
        super().run([partial(self._timed, jobs[0]), *jobs[1:]], step, on_error=on_error, deadline_s=deadline_s)

    def _timed(self, job: Job, step: int) -> None:
        place = torch_device(self.workers[0].device)
        if place.type != "cuda":
            begin_s = time.perf_counter()
            job(step)
            self.seconds.append(time.perf_counter() - begin_s)
            return
        stream = cuda.current_stream(place)
        if self._is_held:
            cuda.hold_back(stream, CYCLES)
        begin, end = cuda.event(is_timed=True), cuda.event(is_timed=True)
        cuda.record(begin, stream)
        job(step)
        cuda.record(end, stream)
        cuda.await_event(end)
        self.seconds.append(cuda.elapsed_s(begin, end))
