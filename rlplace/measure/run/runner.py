"""`HostRunner`: a `Measurer` that runs placements for real on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlplace import cuda
from rlplace.errors import RlplaceError, RunnerError
from rlplace.measure.hosts.lost import all_lost, lost_of
from rlplace.measure.hosts.present import check_runs_here
from rlplace.measure.measurement import Measurement
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.run.crew.workers import Crew, Worker
from rlplace.measure.run.eager.eager_recipe import Other, Recipe
from rlplace.measure.run.failures import advice, is_lost
from rlplace.measure.run.first_losses import FirstLosses, NotANumber
from rlplace.measure.run.loaded_plans import LoadedPlans
from rlplace.measure.run.memory_limits import limited_memory
from rlplace.measure.run.outcomes import as_measurement
from rlplace.measure.run.placed.placed_step import PlacedStep
from rlplace.measure.run.placed.residents import Residents
from rlplace.measure.run.race import REFERENCE, RaceProtocol, Timer, Unwatched, Watch, race, watched
from rlplace.measure.run.suspensions import Suspensions
from rlplace.measure.run.threads import keep_freed_memory, usable_cores
from rlplace.measure.timeline import Timeline

LONGEST_S = 120.0
"""A step that takes longer is a `timeout`, however slow its host."""


class Planner(Protocol):
    """Turns a placement into a plan, and says what memory it takes: the simulator does."""

    def plan(self, devices: NDArray[np.int32]) -> Plan: ...
    def retime(self, plan: Plan) -> Measurement: ...


class HostRunner:
    """Runs placements on the problem's host and times them, interleaved with a reference placement.

    Placements of one race that do not fit into memory together take turns in it, between timed steps (`LoadedPlans`).
    Until `close`, this process has no more of each GPU than the host says. A plan is run even where its simulated peak
    is above the capacity: on a GPU it is `oom` if it really runs out of memory, on cores nothing limits it. A plan
    whose first step, from the captured parameters, gives NaN where that of another gives none is an `error`.

    Args:
        problem: on a host of this machine, its graph with a program.
        planner: makes the plans that are run.
        reference: (N,) placement timed beside every other, so that drift of the machine cancels.
        protocol: of the races.
        step_timeout_s: a step that takes longer is a `timeout`.
        seed: of random ops.
        watch: told which contender of a race is at work.
        is_fatal: whether an error of a contender ends the race for all, and is raised.

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
        step_timeout_s: float = LONGEST_S,
        seed: int = 0,
        watch: Watch | None = None,
        is_fatal: Callable[[Exception], bool] = is_lost,
    ) -> None:
        check_runs_here(problem.host)
        keep_freed_memory()
        self._problem = problem
        self._planner = planner
        self._protocol = protocol or RaceProtocol()
        self._timeout_s = step_timeout_s
        self._seed = seed
        self._watch = watch or Unwatched()
        self._is_fatal = is_fatal
        self._losses = FirstLosses()
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
        others: Sequence[Other] = (),
        deadline_s: float = float("inf"),
    ) -> list[Measurement]:
        """Races exactly these plans, with `others` (what is no plan) in the same race.

        Args:
            plans: what is to run.
            protocol: other than the runner's own.
            others: an eager step, or timers of anything.
            deadline_s: on `time.monotonic`; the race ends after the round in which it passes.

        Returns:
            A measurement for each plan, then one for each of `others`.

        Raises:
            RunnerError: the reference failed, or a GPU did in a way that leaves nothing to measure with.
        """
        self._residents.reset()
        first = [_First() for _ in plans]
        timers = [self._timer(plan, each) for plan, each in zip(plans, first)]
        timers += [partial(self._with_room, self._other(each, len(plans) + k), None) for k, each in enumerate(others)]
        suspensions = Suspensions()
        timers = [watched(timer, k, self._watch, suspensions) for k, timer in enumerate(timers)]
        reference = None
        if self._reference_plan is not None:
            reference = watched(self._timer(self._reference_plan, _First()), REFERENCE, self._watch, suspensions)
        try:
            with suspensions.watching():
                lanes = race(
                    timers, reference, protocol or self._protocol, deadline_s=deadline_s, is_fatal=self._is_fatal
                )
        except Exception as error:
            if (lost := lost_of(self._problem.host, error)) is not None:
                return all_lost(len(timers), lost)
            if isinstance(error, RlplaceError) or not is_lost(error):
                raise
            raise RunnerError(f"{type(error).__name__}: {error}{advice(error)}") from error
        finally:
            self._loaded.forget_all()
        if (lost := lost_of(self._problem.host)) is not None:
            return all_lost(len(timers), lost)
        for lane, each in zip(lanes, first):  # where another was free of NaN, but only later
            if each.is_nan and lane.error is None and self._losses.saw_numbers:
                lane.error = NotANumber()
        return [as_measurement(lane, has_reference=reference is not None) for lane in lanes]

    def trace(self, plan: Plan, *, num_steps: int = 5, warmup: int = 2) -> list[Timeline]:
        """Measured timelines of `num_steps` steps of `plan`, in order of step time."""
        self._residents.reset()
        step = self.load(plan, is_traced=True)
        peak_bytes = self._planner.retime(plan).peak_bytes
        self._watch.begin(0, is_made=False)
        try:
            for k in range(warmup):
                self._timed(step, peak_bytes, k)
            timed = []
            for k in range(num_steps):
                seconds = self._timed(step, peak_bytes, warmup + k)
                timed.append((seconds, k, step.timeline()))
        finally:
            self._loaded.forget(step)
        self._watch.end()
        return [timeline for _, _, timeline in sorted(timed, key=lambda item: item[:2])]

    def timer(self, plan: Plan) -> Timer:
        """What runs one step of `plan`, which is loaded now, to be raced by another runner.

        Raises:
            RunnerError: a device has no memory for it.
        """
        step = self.load(plan)
        step.load()
        return lambda: step.run(deadline_s=self._timeout_s)

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

    def _timer(self, plan: Plan, first: _First) -> Timer:
        try:
            step = self.load(plan)
            peak_bytes = self._planner.retime(plan).peak_bytes
        except RlplaceError:
            raise
        except Exception as error:  # a plan that code cannot even be made of is a failed measurement, not a crash
            return _raises(error)

        def timer() -> float:
            if first.is_done:
                return self._timed(step, peak_bytes, self.num_steps)
            first.is_done = True
            self._residents.reset()
            seconds = self._timed(step, peak_bytes, self.num_steps)
            first.is_nan = self._losses.is_nan(step.result)
            return seconds

        return timer

    def _other(self, other: Other, contender: int) -> Timer:
        if not isinstance(other, Recipe):
            return other
        self._watch.begin(contender, is_made=False)
        try:
            timer = other.timer(self._problem.graph, self._problem.host, self.widest_worker())
        except Exception as error:
            if self._is_fatal(error):
                raise
            return _raises(error)
        self._watch.end()
        return timer

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


@dataclass
class _First:
    """The first step of a plan in a race.

    Attributes:
        is_done: whether it was run.
        is_nan: whether it returned a NaN, which nobody could judge then.
    """

    is_done: bool = False
    is_nan: bool = False


def _raises(error: Exception) -> Callable[[], float]:
    def timer() -> float:
        raise error

    return timer
