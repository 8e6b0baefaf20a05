"""`HostRunner`: a `Measurer` that runs placements for real on this machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlplace import cuda
from rlplace.errors import InvalidValue, RlplaceError, RunnerError
from rlplace.measure.hosts.present import check_present
from rlplace.measure.measurement import Measurement, Status
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.run.failures import advice, is_lost
from rlplace.measure.run.loaded_plans import LoadedPlans
from rlplace.measure.run.memory_limits import limited_memory
from rlplace.measure.run.placed_step import PlacedStep
from rlplace.measure.run.race import Lane, RaceProtocol, Timer, race
from rlplace.measure.run.residents import Residents
from rlplace.measure.run.threads import keep_freed_memory, usable_cores
from rlplace.measure.run.workers import Crew, Worker
from rlplace.measure.timeline import Timeline


class Planner(Protocol):
    """Turns a placement into a plan, and says what memory it takes: the simulator does."""

    def plan(self, devices: NDArray[np.int32]) -> Plan: ...
    def retime(self, plan: Plan) -> Measurement: ...


class HostRunner:
    """Runs placements on the problem's host and times them, interleaved with a reference placement.

    Placements of one race that do not fit into memory together take turns in it, between timed steps (`LoadedPlans`).
    Until `close`, this process has no more of each GPU than the host says. A plan is run even where its simulated peak
    is above the capacity: on a GPU it is `oom` if it really runs out of memory, on cores nothing limits it.

    Args:
        problem: on a host of this machine, its graph with a program.
        planner: makes the plans that are run.
        reference: (N,) placement timed beside every other, so that drift of the machine cancels.
        protocol: of the races.
        step_timeout_s: a step that takes longer is a `timeout`.
        seed: of random ops.

    Raises:
        InvalidValue: a simulated host, one with a device that this machine lacks, or a graph without a program.
    """

    def __init__(
        self,
        problem: Problem,
        planner: Planner,
        *,
        reference: NDArray[np.int32] | None = None,
        protocol: RaceProtocol | None = None,
        step_timeout_s: float = 120.0,
        seed: int = 0,
    ) -> None:
        if problem.host.is_simulated:
            raise InvalidValue(
                "host",
                problem.host.name,
                "a host of this machine (`auto`, `cores`, `cuda`)",
                where="measure",
                hint="A simulated host has no devices to run on: simulate instead.",
            )
        check_present(problem.host)
        keep_freed_memory()
        self._problem = problem
        self._planner = planner
        self._protocol = protocol or RaceProtocol()
        self._timeout_s = step_timeout_s
        self._seed = seed
        self._crew = Crew(problem.host.devices)
        self._residents = Residents(problem.graph, problem.host, seed=seed)
        self._loaded = LoadedPlans(problem.graph, problem.host, self._residents)
        self._reference_plan = None if reference is None else planner.plan(reference)
        self.num_steps = 0
        self._limits = contextlib.ExitStack()
        self._limits.enter_context(limited_memory(problem.host))

    @property
    def problem(self) -> Problem:
        return self._problem

    def measure(self, placements: NDArray[np.int32]) -> list[Measurement]:
        """One `Measurement` for each row of `placements` (B, N), all raced together."""
        devices = self._problem.check_placement(np.atleast_2d(placements))
        return self.measure_plans([self._planner.plan(row) for row in devices])

    def measure_plans(
        self,
        plans: Sequence[Plan],
        *,
        protocol: RaceProtocol | None = None,
        others: Sequence[Timer] = (),
        deadline_s: float = float("inf"),
    ) -> list[Measurement]:
        """Races exactly these plans, with `others` (timers of things that are no plans) in the same race.

        Args:
            plans: what is to run.
            protocol: other than the runner's own.
            others: timers, e.g. of an eager step.
            deadline_s: on `time.monotonic`; the race ends after the round in which it passes.

        Returns:
            A measurement for each plan, then one for each of `others`.

        Raises:
            RunnerError: the reference failed, or a GPU did in a way that leaves nothing to measure with.
        """
        self._residents.reset()
        timers = [self._timer(plan) for plan in plans]
        timers += [partial(self._with_room, other, None) for other in others]
        reference = self._timer(self._reference_plan) if self._reference_plan is not None else None
        try:
            lanes = race(timers, reference, protocol or self._protocol, deadline_s=deadline_s, is_fatal=is_lost)
        except Exception as error:
            if isinstance(error, RlplaceError) or not is_lost(error):
                raise
            raise RunnerError(f"{type(error).__name__}: {error}{advice(error)}") from error
        finally:
            self._loaded.forget_all()
        return [_as_measurement(lane, has_reference=reference is not None) for lane in lanes]

    def trace(self, plan: Plan, *, num_steps: int = 5, warmup: int = 2) -> list[Timeline]:
        """Measured timelines of `num_steps` steps of `plan`, in order of step time."""
        self._residents.reset()
        step = self.load(plan, is_traced=True)
        peak_bytes = self._planner.retime(plan).peak_bytes
        try:
            for k in range(warmup):
                self._timed(step, peak_bytes, k)
            timed = []
            for k in range(num_steps):
                seconds = self._timed(step, peak_bytes, warmup + k)
                timed.append((seconds, k, step.timeline()))
        finally:
            self._loaded.forget(step)
        return [timeline for _, _, timeline in sorted(timed, key=lambda item: item[:2])]

    def load(self, plan: Plan, *, is_traced: bool = False) -> PlacedStep:
        """The plan for this runner's threads and tensors; it is loaded when it runs."""
        return PlacedStep(
            self._problem.graph,
            self._problem.host,
            plan,
            self._residents,
            self._crew,
            seed=self._seed,
            is_traced=is_traced,
        )

    def widest_worker(self) -> Worker | None:
        """The thread of a CPU device that has all usable cores, or None: a second such team would slow it."""
        cores = set(usable_cores())
        return next((w for w in self._crew.workers if w.device.backend == "cpu" and set(w.device.cores) == cores), None)

    def close(self) -> None:
        """Ends the threads and lifts limits of memory; the runner cannot be used again."""
        self._crew.stop()
        self._limits.close()

    def _timer(self, plan: Plan) -> Timer:
        try:
            step = self.load(plan)
            peak_bytes = self._planner.retime(plan).peak_bytes
        except RlplaceError:
            raise
        except Exception as error:  # a plan that code cannot even be made of is a failed measurement, not a crash
            return _raises(error)
        return lambda: self._timed(step, peak_bytes, self.num_steps)

    def _timed(self, step: PlacedStep, peak_bytes: Sequence[int], number: int) -> float:
        try:
            return self._with_room(lambda: self._run(step, peak_bytes, number), step)
        except Exception:
            self._loaded.forget(step)
            raise

    def _with_room(self, timer: Timer, step: PlacedStep | None) -> float:
        """What `timer` gives; if it ran out of memory beside plans on GPUs, with none but `step` there."""
        try:
            return timer()
        except Exception as error:
            if not cuda.is_out_of_memory(error) or not self._loaded.leave_alone(step):
                raise
        return timer()

    def _run(self, step: PlacedStep, peak_bytes: Sequence[int], number: int) -> float:
        if self._loaded.prepare(step, peak_bytes):
            self.num_steps += 1
            step.run(number, deadline_s=self._timeout_s)
        self.num_steps += 1
        return step.run(number, deadline_s=self._timeout_s)


def _raises(error: Exception) -> Callable[[], float]:
    def timer() -> float:
        raise error

    return timer


def _as_measurement(lane: Lane, *, has_reference: bool) -> Measurement:
    if lane.error is not None:
        status: Status = "timeout" if isinstance(lane.error, TimeoutError) else "error"
        if cuda.is_out_of_memory(lane.error):
            status = "oom"
        return Measurement(status, float("inf"), tuple(lane.samples_s), why=str(lane.error))
    return Measurement(
        "ok",
        float(np.median(lane.samples_s)),
        tuple(lane.samples_s),
        reference_s=float(np.median(lane.references_s)) if has_reference else 0.0,
    )


def idle_share(seconds: float = 0.5) -> float:
    """Share of this machine's CPU time that nobody used over `seconds`: 1 on an idle machine; nan if unknown."""
    try:
        before = _cpu_times()
        time.sleep(seconds)
        after = _cpu_times()
    except OSError:
        return float("nan")
    total = sum(after) - sum(before)
    return (after[3] + after[4] - before[3] - before[4]) / total if total else float("nan")


def _cpu_times() -> list[int]:
    with open("/proc/stat", encoding="ascii") as lines:
        return [int(value) for value in lines.readline().split()[1:9]]
