"""`HostRunner`: a `Measurer` that runs placements for real on this machine.

It tells a placement that breaks the arithmetic from a model that gives NaN wherever it runs. `LoadedPlans`
loads and unloads plans where the host's memory does not hold all of them. `as_measurement` is the outcome of a
contender as a `Measurement`, `with_timelines` gives those of plans the timelines of traced steps, and `lost_of` tells
whether devices of the host are lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree

from rlplace import cuda
from rlplace.errors import DeviceLost, RlplaceError, RunnerError, refuse_if
from rlplace.graphs import OpGraph
from rlplace.measure.execute.device_threads import Crew, Worker
from rlplace.measure.execute.placed_step import PlacedStep, resident_bytes
from rlplace.measure.execute.residents import Resident, Residents, limited_memory
from rlplace.measure.execute.traced_ops import TracingCosts, tracing_costs
from rlplace.measure.hosts.host import Device, Host
from rlplace.measure.hosts.nodes import is_here
from rlplace.measure.hosts.resolve import check_runs_here
from rlplace.measure.measurement import Measurement, Status
from rlplace.measure.problem import Plan, Problem, Timeline
from rlplace.measure.timing.eager_step import EagerRecipe, EagerStep, Other
from rlplace.measure.timing.race import (
    REFERENCE,
    Lane,
    RaceProtocol,
    Suspensions,
    Timer,
    Watch,
    as_in_a_loop,
    race,
    watched,
)
from rlplace.measure.timing.threads import keep_freed_memory, usable_cores

LONGEST_S = 120.0
"""A step that takes longer is a `timeout`, however slow its host."""


class Planner(Protocol):
    """Turns a placement into a plan, and gives its memory: the simulator does."""

    def plan(self, devices: NDArray[np.int32]) -> Plan: ...
    def retime(self, plan: Plan) -> Measurement: ...


class HostRunner:
    """Runs placements on the problem's host and times them, interleaved with a reference placement.

    If the placements of a race do not fit into memory together, they are swapped between timed steps (`LoadedPlans`).
    Until `close`, this process uses at most the memory of each GPU that the host states. A plan also runs if its
    simulated peak is above the capacity: on a GPU it is `oom` only if it really runs out of memory; on cores there is
    no limit. All plans start from the captured parameters. A plan whose first step gives NaN, while that of another
    plan does not, is an `error`.

    Args:
        problem: for a host of this machine, and a graph with its program.
        planner: makes the plans to run.
        reference: (N,) placement that is timed in every race, so that a drift of the machine cancels.
        protocol: of the races.
        step_timeout_s: a step that takes longer is a `timeout`.
        seed: of random ops.
        crew: that runs steps; by default a thread for each device.
        residents: of its steps.
        watch: called with the running contender of a race.
        is_fatal: whether an error of a contender ends the whole race and is raised.
        with_model: the graph with the user's model, for recipes; by default the problem's has it.

    Attributes:
        problem: the problem whose placements are measured.
        reference: its plan.

    Raises:
        InvalidValue: a simulated host, a host with a device that this machine lacks, or with a process for each, or a
            graph without a program.
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
        crew: Crew | None = None,
        residents: Residents | None = None,
        watch: Watch | None = None,
        is_fatal: Callable[[Exception], bool] = cuda.is_lost,
        with_model: Callable[[], OpGraph] | None = None,
    ) -> None:
        check_runs_here(problem.host)
        keep_freed_memory()
        self.problem = problem
        self._planner = planner
        self._protocol = protocol or RaceProtocol()
        self._timeout_s = step_timeout_s
        self._seed = seed
        self._watch = watch or Watch()
        self._is_fatal = is_fatal
        self._with_model = with_model or (lambda: self.problem.graph)
        devices = problem.host.devices
        self._teams = [d for d, each in enumerate(devices) if each.backend == "cpu" and len(each.cores) > 1]
        self._saw_numbers = False  # whether a first step returned no NaN: the model itself is fine then
        refuse_if(
            crew is None and problem.host.processes,
            "host",
            problem.host.name,
            "a host whose devices are threads of one process (`cores`)",
            where="measure in this process",
            hint="Processes are measured in workers: leave out `in_process`, and RLPLACE_IN_PROCESS.",
        )
        self._crew = crew or Crew(problem.host.devices)
        self._residents = residents or Residents(problem.graph, problem.host, seed=seed)
        self._loaded = LoadedPlans(problem.graph, problem.host, self._residents)
        self.reference = None if reference is None else planner.plan(reference)
        self.num_steps = 0
        self._tracing: TracingCosts | None = None  # once anything was traced
        self._sample = np.random.default_rng(seed)  # of the ops that are traced
        self._limits = contextlib.ExitStack()
        self._limits.enter_context(limited_memory([problem.host.devices[device] for device in self._crew.here]))

    def turn_to(self, problem: Problem, planner: Planner, reference: NDArray[np.int32]) -> None:
        """Continues with other costs of the same host, and another reference."""
        self.problem, self._planner, self.reference = problem, planner, planner.plan(reference)

    def measure(self, placements: NDArray[np.int32]) -> list[Measurement]:
        """One `Measurement` for each row of `placements` (B, N), all raced together."""
        devices = self.problem.check_placement(np.atleast_2d(placements))
        return self.measure_plans([self._planner.plan(row) for row in devices])

    def measure_plans(
        self,
        plans: Sequence[Plan],
        *,
        protocol: RaceProtocol | None = None,
        others: Sequence[Other] = (),
        deadline_s: float = float("inf"),
    ) -> list[Measurement]:
        """Races exactly these plans, and `others` (contenders that are not plans), in one race; then plans are traced.

        Args:
            plans: the plans to run.
            protocol: replaces that of the runner.
            others: an eager step, or timers of anything.
            deadline_s: on `time.monotonic`; the race ends after the round in which it passes.

        Returns:
            A measurement for each plan, then one for each of `others`.

        Raises:
            RunnerError: the reference failed, or a GPU failed so that it cannot be used any more.
        """
        protocol = protocol or self._protocol
        self._residents.reset()
        first = [_First() for _ in plans]
        timers = [self._timer(plan, each) for plan, each in zip(plans, first)]
        timers += [partial(self._with_room, self._other(each, len(plans) + k), None) for k, each in enumerate(others)]
        suspensions = Suspensions()
        timers = [watched(timer, k, self._watch, suspensions) for k, timer in enumerate(timers)]
        reference = (
            None
            if self.reference is None or not protocol.is_beside_reference
            else watched(self._timer(self.reference, _First()), REFERENCE, self._watch, suspensions)
        )
        try:
            with suspensions.watching():
                lanes = race(timers, reference, protocol, deadline_s=deadline_s, is_fatal=self._is_fatal)
        except Exception as error:
            if (lost := lost_of(self.problem.host, error)) is not None:
                return all_lost(len(timers), lost)
            if isinstance(error, RlplaceError) or not cuda.is_lost(error):
                raise
            raise RunnerError(f"{type(error).__name__}: {error}{cuda.advice(error)}") from error
        finally:
            self._loaded.forget_all()
        if (lost := lost_of(self.problem.host)) is not None:
            return all_lost(len(timers), lost)
        for lane, each in zip(lanes, first):  # where another was free of NaN, but only later
            if each.is_nan and lane.error is None and self._saw_numbers:
                lane.error = RunnerError(WHY_NAN)
        outcomes = [as_measurement(lane, has_reference=reference is not None) for lane in lanes]
        traced = partial(self.trace, num_steps=protocol.num_traced, warmup=1)
        return with_timelines(plans, outcomes, protocol, deadline_s, traced, self._is_fatal)

    def trace(self, plan: Plan, *, num_steps: int = 5, warmup: int = 2, step_s: float | None = None) -> list[Timeline]:
        """Measured timelines of `num_steps` steps of `plan`, in order of step time.

        Args:
            plan: the plan to run.
            num_steps: that are traced.
            warmup: steps before them.
            step_s: its step time in the race that the traced steps belong to: then their timelines are without memory,
                and of the ops alone that can be traced in a small part of that time (`TracingCosts.traced`).
        """
        graph = self.problem.graph
        self._residents.reset()
        costs = self._tracing = self._tracing or tracing_costs(self.problem.host, self._crew)
        traced = None if step_s is None else costs.traced(graph, plan, step_s, self._sample)
        step, added_s = self.load(plan, is_traced=True, traced=traced), costs.added_s(graph, plan)
        peak_bytes = self._planner.retime(plan).peak_bytes
        self._watch.begin(0, is_made=False)
        memory: dict[str, Any] = {"has_memory": step_s is None, "workspace_bytes": self.problem.workspace_bytes}
        try:
            for k in range(warmup):
                self._timed(step, peak_bytes, k)
            timed = [
                # its timeline is that of the last step
                (self._timed(step, peak_bytes, warmup + k), k, step.timeline(**memory))
                for k in range(num_steps)
            ]
        finally:
            self._loaded.forget(step)
        self._watch.end()
        timelines = [timeline for _, _, timeline in sorted(timed, key=lambda item: item[:2])]
        return [dataclasses.replace(timeline, traced_op_s=added_s) for timeline in timelines]

    def timer(self, plan: Plan) -> Timer:
        """Loads `plan` now, and returns a timer of one step of it for a race of another runner.

        Raises:
            RunnerError: a device has no memory for it.
        """
        step = self.load(plan)
        step.load()
        return lambda: step.run(deadline_s=self._timeout_s)

    def load(self, plan: Plan, *, is_traced: bool = False, traced: Collection[int] | None = None) -> PlacedStep:
        """Prepares a plan for the threads and tensors of this runner; it is loaded when it runs."""
        return PlacedStep(
            self.problem.graph,
            self.problem.host,
            plan,
            self._residents,
            self._crew,
            seed=self._seed,
            is_traced=is_traced,
            traced=traced,
        )

    def widest_worker(self) -> Worker | None:
        """The thread of a CPU device with all usable cores, or None. It is shared, because a second such team of
        threads would slow it down."""
        cores = set(usable_cores())
        here = self._crew.workers[: len(self._crew.here)]
        return next((w for w in here if w.device.backend == "cpu" and set(w.device.cores) == cores), None)

    def close(self) -> None:
        """Ends the threads and removes memory limits; the runner cannot be used again."""
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
            # later steps are not looked at: all placements of a race train the same parameters, and the loss may run
            # away in the turn of any of them
            first.is_nan = has_nan(step.result)
            if first.is_nan and self._saw_numbers:
                raise RunnerError(WHY_NAN)
            self._saw_numbers |= not first.is_nan
            return seconds

        return as_in_a_loop(timer, has_team=bool(np.isin(plan.devices, self._teams).any()))

    def _other(self, other: Other, contender: int) -> Timer:
        if not isinstance(other, EagerRecipe):
            return as_in_a_loop(other, has_team=False)
        self._watch.begin(contender, is_made=False)
        try:
            timer = other.timer(self._with_model(), self.problem.host, self.widest_worker())
        except Exception as error:
            if self._is_fatal(error):
                raise
            return _raises(error)
        self._watch.end()
        return as_in_a_loop(timer, has_team=isinstance(timer, EagerStep) and timer.has_team)

    def _timed(self, step: PlacedStep, peak_bytes: Sequence[int], number: int) -> float:
        try:
            return self._with_room(lambda: self._run(step, peak_bytes, number), step)
        except Exception:
            self._loaded.forget(step)
            raise

    def _with_room(self, timer: Timer, step: PlacedStep | None) -> float:
        """The timer that `timer` returns; if it ran out of memory beside plans on GPUs, with none but `step` there."""
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
        is_nan: whether it returned a NaN.
    """

    is_done: bool = False
    is_nan: bool = False


def _raises(error: Exception) -> Callable[[], float]:
    def timer() -> float:
        raise error

    return timer


WHY_NAN = (
    "the loss is NaN after the first step from the captured parameters, where another placement of the same step gives "
    "a number"
)


def has_nan(result: Any) -> bool:
    """Whether any tensor in `result`, nested tuples, lists or dicts, holds a NaN."""
    return any(
        bool(torch.isnan(leaf).any())
        for leaf in pytree.tree_leaves(result)
        if isinstance(leaf, torch.Tensor) and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
    )


class LoadedPlans:
    """Loads a plan before it runs, and unloads others where it would not fit beside them.

    A memory (a device's own, or a pool) holds the residents of every loaded plan, and the allocations of the one that
    runs: its simulated peak without residents. Where that is more than the capacity, residents that no loaded plan
    needs are dropped; if that does not do, plans are unloaded, the least recently run first, as far as this helps. A
    plan that does not fit alone is loaded all the same: whether it runs out of memory shows when it runs.

    Args:
        graph: with its program.
        host: its capacities.
        residents: shared by the plans.
    """

    def __init__(self, graph: OpGraph, host: Host, residents: Residents) -> None:
        self._graph, self._host, self._residents = graph, host, residents
        self._accounts = [device.memory_pool or residents.home(d) for d, device in enumerate(host.devices)]
        self._account_of = {residents.home(d): account for d, account in enumerate(self._accounts)}
        self._granularity = {
            residents.home(d): device.memory_granularity_bytes for d, device in enumerate(host.devices)
        }
        members: dict[str, list[Device]] = defaultdict(list)
        for account, device in zip(self._accounts, host.devices, strict=True):
            members[account].append(device)
        # bytes for a plan: the memory without contexts; of a pool, the least that a device of it says
        self._capacity = {
            account: min(each.memory_bytes for each in own) - sum(each.context_bytes for each in own)
            for account, own in members.items()
        }
        self._gpus = {residents.home(d) for d, device in enumerate(host.devices) if device.backend == "cuda"}
        self._steps: dict[PlacedStep, bool] = {}  # the least recently run first; whether its memory is still warm
        self._fitting: set[PlacedStep] = set()  # loaded plans that were found to fit beside the others

    def prepare(self, step: PlacedStep, peak_bytes: Sequence[int]) -> bool:
        """Whether `step`, which is loaded now, should run once untimed: it ran before and has lost its residents of
        then.

        Args:
            step: runs next.
            peak_bytes: (D,) its simulated peaks; empty where they are unknown.

        Raises:
            Exception: of a device without memory for it.
        """
        if step not in self._fitting or not step.is_loaded:
            self._make_room(step, self._running_bytes(step, peak_bytes))
        was_there, is_warm = step in self._steps, self._steps.pop(step, True) and step.is_loaded
        self._steps[step] = True
        if not step.is_loaded:
            self._fitting.clear()
            step.load()
        self._fitting.add(step)
        return was_there and not is_warm

    def leave_alone(self, step: PlacedStep | None) -> bool:
        """Unloads all plans but `step` if residents of theirs are on a GPU, whose memory is given back then."""
        needed = frozenset() if step is None else step.needs
        if not any(home in self._gpus for _, home in self._residents.made - needed):
            return False
        for other in self._steps:
            if other is not step:
                other.unload()
        return self._keep(needed)

    def forget(self, step: PlacedStep) -> None:
        """Unloads a plan that does not run again; its residents stay until their memory is needed."""
        self._fitting.discard(step)
        self._steps.pop(step, None)
        step.unload()

    def forget_all(self) -> None:
        """Unloads every plan; residents stay until their memory is needed."""
        for step in list(self._steps):
            self.forget(step)

    def _make_room(self, step: PlacedStep, running: dict[str, int]) -> None:
        if not self._overfull(self._residents.made | step.needs, running):
            return
        loaded = [each for each in self._steps if each is not step and each.is_loaded]
        while over := self._overfull(_union(step, loaded), running):
            helping = [
                each for each in loaded if any(self._account_of[home] in over for _, home in each.needs - step.needs)
            ]
            if not helping:
                break
            helping[0].unload()
            loaded.remove(helping[0])
        self._keep(_union(step, loaded))

    def _keep(self, needed: Collection[Resident]) -> bool:
        is_freed = self._residents.keep_only(needed)
        if is_freed:  # what PyTorch kept for the steps of other plans is given back as well
            cuda.give_back_memory()
            self._steps = dict.fromkeys(self._steps, False)
            self._fitting.clear()
        return is_freed

    def _overfull(self, residents: Collection[Resident], running: dict[str, int]) -> set[str]:
        """Accounts whose capacity is less than `residents` and the memory of runs."""
        held = defaultdict(int, running)
        for op, home in residents:
            held[self._account_of[home]] += self._num_bytes(op, home)
        return {account for account, num_bytes in held.items() if num_bytes > self._capacity[account]}

    def _num_bytes(self, op: int, home: str) -> int:
        """Of an op's tensors, or of an update's state."""
        size = int(self._graph.state_bytes[op] + self._graph.output_bytes[op])
        return -(-size // self._granularity[home]) * self._granularity[home]

    def _running_bytes(self, step: PlacedStep, peak_bytes: Sequence[int]) -> dict[str, int]:
        """By account, the most that `step` allocates beside residents: in a pool, as if all devices peaked at once."""
        context = np.array([device.context_bytes for device in self._host.devices], dtype=np.int64)
        own = np.array(peak_bytes or context) - context - resident_bytes(self._graph, self._host, step.plan.devices)
        held: dict[str, int] = defaultdict(int)
        for account, num_bytes in zip(self._accounts, np.maximum(own, 0).tolist(), strict=True):
            held[account] += num_bytes
        return held


def _union(step: PlacedStep, others: Iterable[PlacedStep]) -> frozenset[Resident]:
    return step.needs.union(*(other.needs for other in others))


def status_of(error: BaseException) -> Status:
    """The measurement of a placement that raised an error."""
    if cuda.is_out_of_memory(error):
        return "oom"
    if isinstance(error, DeviceLost) or cuda.is_gone(error):
        return "lost"
    return "timeout" if isinstance(error, TimeoutError) else "error"


def as_measurement(lane: Lane, *, has_reference: bool) -> Measurement:
    """The measurement of a lane: its median, or the error that stopped it.

    Args:
        lane: of a race that is over.
        has_reference: whether one was timed beside it.
    """
    if lane.error is not None:
        return Measurement(status_of(lane.error), float("inf"), tuple(lane.samples_s), why=str(lane.error))
    return Measurement(
        "ok",
        float(np.median(lane.samples_s)),
        tuple(lane.samples_s),
        reference_s=float(np.median(lane.references_s)) if has_reference else 0.0,
    )


def with_timelines(
    plans: Sequence[Plan],
    outcomes: Sequence[Measurement],
    protocol: RaceProtocol,
    deadline_s: float,
    trace: Callable[..., list[Timeline]],
    is_fatal: Callable[[Exception], bool] = lambda _: False,
) -> list[Measurement]:
    """The outcomes of a race, those of plans with the timeline of their traced step of median step time.

    A plan that was dropped for being slow is traced, too: its ops and transfers tell as much as those of a fast one.
    Where the traced steps fail, or would not end before the deadline, there is no timeline.

    Args:
        plans: that ran.
        outcomes: of `plans`, then of others.
        protocol: of the race.
        deadline_s: on `time.monotonic`.
        trace: runs the traced steps of a plan, given its `step_s`.
        is_fatal: whether no other plan can be traced after an error.
    """
    found = list(outcomes)
    for k, plan in enumerate(plans):
        outcome = outcomes[k]
        takes_s = (1 + protocol.num_traced) * outcome.step_time_s
        if not (outcome.ok and protocol.num_traced) or time.monotonic() + takes_s > deadline_s:
            continue
        try:
            timelines = trace(plan, step_s=outcome.step_time_s)
        except Exception as error:  # the measurement is one without it
            if is_fatal(error):
                break
        else:
            found[k] = dataclasses.replace(outcome, timeline=timelines[len(timelines) // 2])
    return found


_GPU = re.compile(r"\bcuda:[0-9]+(?:/[0-9]+)?")


def lost_of(host: Host, error: BaseException | None = None) -> DeviceLost | None:
    """The devices of a host of this machine that are lost, as an error with the cause; None if no device is known to be
    lost.

    A core is lost once this process may not run on it: it was taken offline, or out of the process's affinity or
    control group. The kernel does not report this: a thread that was pinned there continues elsewhere, and its times
    are wrong. The loss of a GPU is known only from errors.

    Args:
        host: that is measured.
        error: of the step or the worker.
    """
    usable = set(usable_cores())
    without = {device.name: sorted(set(device.cores) - usable) for device in filter(is_here, host.devices)}
    names = tuple(name for name, cores in without.items() if cores)
    if names:
        cores = sorted({core for missing in without.values() for core in missing})
        which = f"core{'s' * (len(cores) > 1)} {', '.join(map(str, cores))}"
        return DeviceLost(names, f"this process may not use {which} any more")
    if error is None or not cuda.is_gone(error):
        return None
    told = dict.fromkeys(name for name in _GPU.findall(_text(error)) if name in host.device_index)
    every = tuple(device.name for device in host.devices if device.backend == "cuda")
    return DeviceLost(tuple(told) or (every if len(every) == 1 else ()), str(error).rpartition(" lost: ")[2])


def all_lost(count: int, lost: DeviceLost) -> list[Measurement]:
    """Measurements of all that ran beside each other while a device was lost: their own times are unknown."""
    return [Measurement("lost", math.inf, why=str(lost))] * count


def error_of(host: Host, outcome: Measurement) -> DeviceLost:
    """The error that a measurement with the status `lost` tells of."""
    named, _, why = outcome.why.partition(" lost: ")
    devices = [word for word in named.replace(",", " ").split() if word in host.device_index]
    return DeviceLost(devices, why or outcome.why)


def _text(error: BaseException | None) -> str:
    return "" if error is None else f"{error} {_text(error.__cause__)}"
