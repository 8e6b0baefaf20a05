"""`IsolatedRunner`: a `HostRunner` in a process of its own, which is replaced when a placement breaks it.

`wait_for` waits for a worker's answer and tells why a worker died. `make_runner` chooses between the two runners.
`profile_isolated` profiles ops in a worker.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from functools import partial
from typing import cast

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import DeviceLost, RlplaceError, RunnerError
from rlplace.graphs import Grouping, OpGraph
from rlplace.graphs.interpreter import require_program
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Device, Host
from rlplace.measure.hosts.resolve import check_runs_here
from rlplace.measure.isolate.fleet import Fleet
from rlplace.measure.isolate.messages import (
    BETWEEN_S,
    IDLE,
    STOPPED_S,
    Board,
    Done,
    Fault,
    Profile,
    Race,
    Request,
    Said,
    Setup,
    Step,
    TimeLimits,
    Trace,
    torch_settings,
)
from rlplace.measure.isolate.packing import Packed, without_model
from rlplace.measure.isolate.worker import FROM_OUTSIDE, CannotIsolate, ending, ops_at_fault
from rlplace.measure.measurement import Measurement, Status
from rlplace.measure.problem import Plan, Problem, Timeline, single_device_plan
from rlplace.measure.profiling.profile import profile_costs
from rlplace.measure.timing.eager_step import MAKING_S, EagerRecipe, Other
from rlplace.measure.timing.host_runner import (
    LONGEST_S,
    HostRunner,
    Planner,
    all_lost,
    error_of,
    lost_of,
    status_of,
    with_timelines,
)
from rlplace.measure.timing.race import LOOKS_EVERY_S, REFERENCE, RaceProtocol, Suspensions, Timer
from rlplace.measure.timing.threads import usable_cores
from rlplace.say import Say


def describe(
    request: Request,
    problem: Problem,
    contender: int,
    stacks: str,
    *,
    is_stuck: bool = False,
    beside: Sequence[str] = (),
) -> str:
    """A contender in words, for its own measurement: the cause, and the op where stacks name it.

    Args:
        request: the request to the worker.
        problem: of the plans.
        contender: its index, `REFERENCE` or `IDLE`.
        stacks: the worker's output.
        is_stuck: whether its step hung.
        beside: output of its other ranks.
    """
    graph, host = problem.graph, problem.host
    who, plan = "this placement", None
    if contender == IDLE:
        return "nothing that it was asked for"
    if isinstance(request, Profile):
        who, plan = f"profiling on {host.devices[contender].name}", single_device_plan(graph, contender)
    elif not isinstance(request, Race):
        plan = request.plan
    elif contender == REFERENCE:
        who, plan = "the reference placement", request.reference
    elif contender < len(request.plans):
        plan = request.plans[contender]
    if plan is None:
        return "plain PyTorch"
    is_traced = isinstance(request, Trace | Profile)
    op, *waiting = ops_at_fault([stacks, *beside], graph, host, plan, is_stuck=is_stuck, is_traced=is_traced)
    said = f"{who}, {op}" if op else who
    return f"{said}; meanwhile in {', '.join(filter(None, waiting))}" if any(waiting) else said


def wait_for(
    process: Fleet,
    request: Request,
    problem: Problem,
    timers: Sequence[Timer | None],
    limit_s: Callable[[Board], float],
    say: Say = lambda _: None,
) -> Done | Fault:
    """The worker's answer; where it ended, by itself or from here, the fault of the plan that ran.

    Time in which this process or the worker was suspended, or a machine cut off, is no contender's: its limit begins
    again.

    Args:
        process: a worker that is ready.
        request: the request.
        problem: of the plans.
        timers: of this process, by their number among the request's others; it waits while one of them runs.
        limit_s: time limit of the running contender, as the worker wrote it.
        say: told the worker's messages for people.
    """
    board = process.board
    board.reset()
    not_before_s = running_s = time.monotonic()
    suspensions = Suspensions()
    try:
        process.connection.send(request)
        while True:
            has_said = process.connection.poll(LOOKS_EVERY_S)
            if suspensions.look():
                not_before_s = running_s = time.monotonic()
            if has_said:
                answer = process.connection.recv()
                if isinstance(answer, Done | Fault):
                    return answer
                if isinstance(answer, Said):
                    say(answer.line)
                else:
                    process.connection.send(_timed(timers[answer.other]))
                    suspensions.look()
                    not_before_s = time.monotonic()
            elif process.has_ended:
                return _dead(process, request, problem)
            elif process.look_at_memory():
                held = f"the worker held {process.held_bytes:,} bytes of {process.limit_bytes:,.0f} allowed"
                return _ended(process, request, problem, "oom", f"out of memory: {held} in ")
            elif (stopped := process.stopped) is not None:
                not_before_s = time.monotonic()
                if not_before_s > running_s + STOPPED_S:
                    contender = board.contender if board.is_at_work else IDLE
                    process.end()
                    why = f"{process.ranks[stopped].name} was stopped by a signal (SIGSTOP), and not continued "
                    why += f"within {STOPPED_S:g} s, in "
                    why += describe(request, problem, contender, "")
                    return Fault(contender, "error", why, is_from_outside=True)
                continue
            elif process.is_cut:
                not_before_s = time.monotonic()
            elif board.is_at_work:
                allowed_s = limit_s(board)
                if time.monotonic() > max(board.begin_s, not_before_s) + allowed_s:
                    why = f"a step did not end within {allowed_s:.3g} s: "
                    return _ended(process, request, problem, "timeout", why, is_stuck=True)
            elif time.monotonic() > max(board.end_s, not_before_s) + BETWEEN_S:
                process.end()
                why = f"the worker did nothing for {BETWEEN_S:g} s between steps"
                return Fault(IDLE, "error", why, is_from_outside=True)
            running_s = time.monotonic()
    except (EOFError, ConnectionError, TimeoutError):
        return _dead(process, request, problem)


def _timed(timer: Timer | None) -> float | Fault:
    assert timer is not None
    try:
        return float(timer())
    except Exception as error:
        return Fault(IDLE, status_of(error), str(error))


def _dead(process: Fleet, request: Request, problem: Problem) -> Fault:
    """The fault of the contender in whose turn the worker, or one of its ranks, ended by itself."""
    if len(process.ranks) > 1:  # the others wait for it
        process.write_stacks()
    process.end()
    if process.lost is not None:
        return Fault(process.board.contender, "lost", str(process.lost))
    return_code = process.ranks[process.gone].return_code
    contender, how, name = process.board.contender, ending(return_code), process.ranks[process.gone].name
    stacks = process.stacks()
    who = describe(request, problem, contender, stacks.pop(process.gone), beside=stacks)
    if -return_code not in FROM_OUTSIDE:
        return Fault(contender, "error", f"{name} died: {how} in {who}")
    if process.ran_out_of_memory():
        return Fault(contender, "oom", f"{name} was ended for want of memory ({how}) in {who}")
    return Fault(contender, "error", f"{name} was ended from outside ({how}) in {who}", is_from_outside=True)


def _ended(
    process: Fleet, request: Request, problem: Problem, status: Status, why: str, *, is_stuck: bool = False
) -> Fault:
    """Ends a worker; the fault of the contender that is at work, which is named after `why`."""
    contender = process.board.contender
    process.write_stacks()
    process.end()
    if process.lost is not None:
        return Fault(contender, "lost", str(process.lost))
    stacks = "".join(process.stacks())
    return Fault(contender, status, why + describe(request, problem, contender, stacks, is_stuck=is_stuck))


class IsolatedRunner:
    """Measures plans on the problem's host as `HostRunner` does, in a worker process.

    A plan that ends the worker, fills its memory, or does not end has that as its measurement; the worker is
    replaced, and those that are left are raced again from the beginning: samples of one race are comparable because
    all were taken in turn, in one process. A plan whose simulated peak is above the capacity is not run: here the
    capacity is a limit, on cores too. A worker that another process ends says nothing about the plan that ran; only if
    that happens to a plan twice is it an `error`.

    While a worker measures, this process waits, and looks at it ten times a second.

    Args:
        problem: on a host of this machine, its graph with a program.
        planner: makes the reference's plan, and gives the memory of plans: the simulator.
        reference: (N,) placement timed beside every other; none by default.
        seed: of random ops.
        limits: of time.
        memory_limit_bytes: most that placements may take on cores, together; by default the machine's memory.

    Attributes:
        num_started: workers started so far.

    Raises:
        InvalidValue: a simulated host, a host with a device that this machine lacks, or a graph without a program.
        CannotIsolate: no worker can be started: the program cannot be sent, or not be read there.
    """

    def __init__(
        self,
        problem: Problem,
        planner: Planner,
        *,
        reference: NDArray[np.int32] | None = None,
        seed: int = 0,
        limits: TimeLimits | None = None,
        memory_limit_bytes: int | None = None,
    ) -> None:
        check_runs_here(problem.host)
        self._problem, self._planner = problem, planner
        self._limits = limits or TimeLimits()
        self._reference = None if reference is None else planner.plan(reference)
        self._is_closed = False
        self.num_started = 0
        self._process: Fleet | None = None
        self._packed = packed_setup(problem, seed=seed, memory_limit_bytes=memory_limit_bytes)
        self._has_model = True
        try:
            self._packed.add(dataclasses.replace(require_program(problem.graph).origin, read=None))
        except Exception:  # then plain PyTorch runs in this process, beside placements in the worker
            self._has_model = False
        try:
            self._start(None)
        except BaseException:
            self.close()
            raise

    def turn_to(self, problem: Problem, planner: Planner, reference: NDArray[np.int32]) -> None:
        """From here on, with other figures of the same host and another reference; the worker stays."""
        self._problem, self._planner, self._reference = problem, planner, planner.plan(reference)

    def measure_plans(
        self,
        plans: Sequence[Plan],
        *,
        protocol: RaceProtocol | None = None,
        others: Sequence[Other] = (),
        deadline_s: float = float("inf"),
    ) -> list[Measurement]:
        """As `HostRunner.measure_plans`; a timer that is no recipe runs in this process.

        Raises:
            RunnerError: the reference failed, or the worker ended again and again while no plan ran.
        """
        try:
            protocol = protocol or RaceProtocol()
            found = self._measured(plans, dataclasses.replace(protocol, num_traced=0), others, deadline_s)
            # the worker is asked once more for each plan: a traced step that ends it costs no measurement
            traced = partial(self._traced, num_steps=protocol.num_traced)
            found = with_timelines(plans, found, protocol, deadline_s, traced)
        except RlplaceError as error:
            lost = error if isinstance(error, DeviceLost) else lost_of(self._problem.host, error)
            if lost is None:
                raise
        else:
            if (lost := lost_of(self._problem.host)) is None:
                return found
        return all_lost(len(plans) + len(others), lost)

    def _measured(
        self, plans: Sequence[Plan], protocol: RaceProtocol, others: Sequence[Other], deadline_s: float
    ) -> list[Measurement]:
        """As `measure_plans`, as long as no device is lost."""
        peaks = [self._simulated(plan) for plan in plans]
        found: list[Measurement | None] = [None if each.ok else each for each in peaks]
        found += [None] * len(others)
        beside = self._reference if protocol.is_beside_reference else None
        reference = [] if beside is None else [beside]
        deaths: Counter[int] = Counter()
        while left := [k for k, each in enumerate(found) if each is None]:
            raced = [k for k in left if k < len(plans)]
            timers = [self._sent(others[k - len(plans)]) for k in left if k >= len(plans)]
            request = Race(
                [plans[k] for k in raced],
                {plans[k].fingerprint: peaks[k].peak_bytes for k in raced}
                | {plan.fingerprint: self._planner.retime(plan).peak_bytes for plan in reference},
                [timer if isinstance(timer, EagerRecipe) else None for timer in timers],
                protocol,
                deadline_s,
                beside,
            )
            answer = self._ask(request, [None if isinstance(timer, EagerRecipe) else timer for timer in timers])
            if isinstance(answer, Done):
                for k, measurement in zip(left, answer.result, strict=True):
                    found[k] = measurement
                break
            if answer.status == "lost":
                return [Measurement("lost", math.inf, why=answer.why)] * len(found)
            if answer.contender == REFERENCE and not answer.is_from_outside:
                raise RunnerError(f"the reference placement failed: {answer.why}")
            if answer.contender < 0 and answer.is_usable:
                raise RunnerError(answer.why)
            k = left[answer.contender] if answer.contender >= 0 else answer.contender
            deaths[k] += 1
            if deaths[k] > 1 and k < 0:
                raise RunnerError(f"nothing can be measured: {answer.why}")
            if k >= 0 and (deaths[k] > 1 or not answer.is_from_outside):
                found[k] = Measurement(answer.status, math.inf, why=answer.why)
        return [each or Measurement("error", math.inf) for each in found]

    def trace(self, plan: Plan, *, num_steps: int = 5, warmup: int = 2) -> list[Timeline]:
        """Measured timelines of `num_steps` steps of `plan`, in order of step time.

        Raises:
            RunnerError: an op failed, or the worker ended.
        """
        return self._timelines(Trace(plan, self._peaks(plan), num_steps, warmup))

    def _traced(self, plan: Plan, *, num_steps: int, step_s: float) -> list[Timeline]:
        """As `trace`, for a plan of a race that just ended; a step that hangs takes little of its time."""
        first_s = self._process.board.first_s if self._process is not None else 0.0
        longest_s = (1 + num_steps) * self._limits.limit_s(RaceProtocol(), step_s, first_s)
        return self._timelines(Trace(plan, self._peaks(plan), num_steps, 1, step_s, longest_s))

    def _peaks(self, plan: Plan) -> dict[str, Sequence[int]]:
        return {plan.fingerprint: self._planner.retime(plan).peak_bytes}

    def _timelines(self, request: Trace) -> list[Timeline]:
        answer = self._ask_twice(request)
        if isinstance(answer, Fault):
            raise RunnerError(answer.why)
        return cast(list[Timeline], answer.result)

    def timer(self, plan: Plan) -> Timer:
        """A timer that runs one step of `plan` in the worker, to be raced by another runner.

        It raises a TimeoutError, a MemoryError or a RunnerError where the plan ended the worker or did not run.
        """
        self._step_s(plan)  # the first one loads it
        return lambda: self._step_s(plan)

    def close(self) -> None:
        """Ends the worker; the runner cannot be used again."""
        self._is_closed = True
        if self._process is not None:
            self._process.close()
            self._process = None
        self._packed.close()

    def _step_s(self, plan: Plan) -> float:
        answer = self._ask_twice(Step(plan))
        if isinstance(answer, Fault):
            raise answer.as_error()
        return float(answer.result)

    def _ask_twice(self, request: Request) -> Done | Fault:
        """The answer of a worker, of a second one where the first ended without fault of the plan."""
        answer = self._ask(request, [])
        if isinstance(answer, Fault) and (answer.is_from_outside or answer.contender == IDLE):
            answer = self._ask(request, [])
        return answer

    def _ask(self, request: Request, timers: Sequence[Timer | None]) -> Done | Fault:
        """The answer of a worker, which is started if there is none, and gone if it broke."""
        if self._is_closed:
            raise RunnerError("its worker was ended (`close`), so nothing can run there any more; make a new one")
        process = self._process or self._start(None)
        try:
            answer = wait_for(process, request, self._problem, timers, partial(self._limit_s, request))
        except BaseException:  # Ctrl-C, or an own timer's: the worker is amid a race whose result is not wanted
            self._drop(process)
            raise
        if isinstance(answer, Fault) and answer.status == "lost":
            self._drop(process)
        elif isinstance(answer, Fault) and not answer.is_usable:
            self._start(process)
        return answer

    def _limit_s(self, request: Request, board: Board) -> float:
        """How long the contender that is at work may take, as far as is known by then."""
        if isinstance(request, Step):
            return self._limits.longest_s
        if isinstance(request, Trace):
            return request.longest_s
        if isinstance(request, Profile) or not board.is_made or board.contender >= len(request.plans):
            others = {} if isinstance(request, Profile) else dict(enumerate(request.others, len(request.plans)))
            recipe = others.get(board.contender)
            return MAKING_S if recipe is None or board.is_made else recipe.making_s
        if board.contender == REFERENCE:
            return self._limits.longest_s
        return self._limits.limit_s(request.protocol, board.best_s, board.first_s)

    def _start(self, broken: Fleet | None) -> Fleet:
        """A worker that is ready, in the place of a broken one."""
        self._process = None
        with nullcontext() if broken is None else closing(broken):
            process = ready(self._packed, ranks(self._problem.host))
            if broken is not None:
                process.board.carry(broken.board)
        self.num_started += 1
        self._process = process
        return process

    def _drop(self, process: Fleet) -> None:
        self._process = None
        process.end()
        process.close()

    def _simulated(self, plan: Plan) -> Measurement:
        """Its simulated peaks; where they are too high, the measurement of a plan that is not run."""
        try:
            simulated = self._planner.retime(plan)
        except RlplaceError:
            raise
        except Exception as error:  # a plan that cannot be followed is a failed measurement, not a crash
            return Measurement(status_of(error), math.inf, why=str(error))
        if simulated.status == "oom":
            return dataclasses.replace(simulated, why=f"{simulated.why} (simulated; it was not run)")
        return simulated

    def _sent(self, other: Other) -> Other:
        """The recipe, where the worker can follow it; else a timer of this process."""
        if isinstance(other, EagerRecipe) and not self._has_model:
            return other.timer(self._problem.graph, self._problem.host, None)
        return other


def packed_setup(problem: Problem, *, seed: int = 0, memory_limit_bytes: float | None = None) -> Packed:
    """The packed `Setup` of a worker.

    Raises:
        CannotIsolate: it cannot be sent.
    """
    program, packed = require_program(problem.graph), Packed()
    try:
        sent = dataclasses.replace(program, origin=without_model(program.origin))
        packed.add(Setup(problem, sent, seed, usable_cores(), torch_settings(), memory_limit_bytes))
    except Exception as error:
        raise CannotIsolate(f"the captured step cannot be sent to it: {type(error).__name__}: {error}") from error
    return packed


def ranks(host: Host) -> tuple[Device, ...]:
    """The device of each process that runs steps on a host; the first one of all if a single process does."""
    return host.devices if host.processes else host.devices[:1]


def ready(packed: Packed, devices: Sequence[Device], *, first: int = 0, is_second: bool = False) -> Fleet:
    """A worker that can be asked; a second one if the first was ended from outside while it started.

    Args:
        packed: its setup.
        devices: of its ranks.
        first: the first rank that it starts.
        is_second: whether it is that second one.

    Raises:
        CannotIsolate: it cannot read its setup, or it ended; there is no memory for the tensors, or there are too many
            processes or open files.
        DeviceLost: another machine does not answer.
    """
    try:
        process = Fleet(packed, devices, first=first)
    except DeviceLost:
        raise
    except (OSError, RunnerError) as error:
        raise CannotIsolate(f"it cannot be started: {error}") from error
    try:
        process.await_ready()
    except BaseException as error:  # Ctrl-C, too
        process.close()
        if is_second or not (isinstance(error, CannotIsolate) and error.is_from_outside):
            raise
        return ready(packed, devices, first=first, is_second=True)
    return process


VARIABLE = "RLPLACE_IN_PROCESS"
"""Of the environment: with 1, plans run in this process by default."""


Runner = HostRunner | IsolatedRunner
"""Runs plans for real: in this process, or in a worker."""


def is_isolated(asked: bool | None) -> bool:
    """Whether plans run in a worker: as asked, else as the environment says, else yes where workers can be started."""
    return asked if asked is not None else os.environ.get(VARIABLE, "") != "1" and os.name == "posix"


def make_runner(
    problem: Problem, planner: Planner, *, reference: NDArray[np.int32] | None, seed: int, isolated: bool | None
) -> Runner:
    """The runner for a problem on a host of this machine; warns where a worker is wanted and cannot be had.

    Args:
        problem: its graph with a program.
        planner: the simulator.
        reference: (N,) placement timed beside every other.
        seed: of random ops.
        isolated: whether plans run in a worker; None is the default.

    Raises:
        InvalidValue: a simulated host, a host with a device that this machine lacks, or a graph without a program.
    """
    if is_isolated(isolated):
        try:
            return IsolatedRunner(problem, planner, reference=reference, seed=seed)
        except CannotIsolate as error:
            _warn("placements are measured", error, problem.host)
    return HostRunner(problem, planner, reference=reference, seed=seed)


def _warn(what: str, error: CannotIsolate, host: Host) -> None:
    """Says why work runs in this process, to the caller of the function that decided so."""
    if host.processes:
        raise error
    warnings.warn(
        f"{what} in this process, as no worker can be had: {error}. An op that crashes will end this process.",
        RuntimeWarning,
        stacklevel=4,
    )


def profile_isolated(
    graph: OpGraph,
    host: Host,
    *,
    num_steps: int = 12,
    warmup: int = 3,
    most_s: float = math.inf,
    on_progress: Say | None = None,
    isolated: bool | None = None,
    longest_s: float = LONGEST_S,
) -> Costs:
    """Seconds of every op on every device, as `profile_costs` finds them, in a worker process.

    A step that breaks its process, fills its memory or does not end is an error that names the op, and not the end of
    this process. Where no worker can be started, a warning says why, and steps run here.

    Args:
        graph: with its program.
        host: of this machine.
        num_steps: traced steps on each kind of device.
        warmup: steps before them.
        most_s: seconds for tracing, as of `profile_costs`.
        on_progress: told which part is being profiled.
        isolated: whether a worker is used at all; None is the default, see `is_isolated`.
        longest_s: seconds that a step may take in the worker.

    Raises:
        InvalidValue: the graph has no program.
        RunnerError: an op failed other than by its size, or the worker ended.
    """
    require_program(graph)
    say = on_progress or (lambda _: None)
    if is_isolated(isolated):
        try:
            return _in_workers(graph, host, Profile(num_steps, warmup, most_s), say, longest_s)
        except CannotIsolate as error:
            _warn("ops are profiled", error, host)
    return profile_costs(graph, host, num_steps=num_steps, warmup=warmup, most_s=most_s, on_progress=say)


def _in_workers(graph: OpGraph, host: Host, request: Profile, say: Say, longest_s: float) -> Costs:
    """Costs of all devices; a worker on each machine profiles the kinds of device that no machine before it has."""
    columns: dict[str, tuple[NDArray[np.float64], NDArray[np.int64] | None]] = {}  # by kind
    for machine in dict.fromkeys(device.machine for device in host.devices):
        new = [d for d, each in enumerate(host.devices) if each.machine == machine and each.kind not in columns]
        if len(new) == host.num_devices:
            return _in_worker(graph, host, request, say, longest_s)
        if new:
            part = host.part(new)
            costs = _in_worker(graph, part, request, say, longest_s)
            scratch = costs.workspace_bytes
            for d, device in enumerate(part.devices):
                columns[device.kind] = costs.op_time_s[:, d], None if scratch is None else scratch[:, d]
    times_s, workspaces = zip(*(columns[device.kind] for device in host.devices), strict=True)
    known = [each for each in workspaces if each is not None]
    is_known = len(known) == host.num_devices
    return Costs(np.stack(times_s, axis=1), "profiled", np.stack(known, axis=1) if is_known else None)


def _in_worker(graph: OpGraph, host: Host, request: Profile, say: Say, longest_s: float) -> Costs:
    """Costs of devices of one machine, by a worker there."""
    # nothing is known of its ops yet, and nothing is placed
    problem = Problem(
        graph,
        host,
        Costs(np.zeros((graph.num_ops, host.num_devices)), "estimated"),
        Grouping(np.zeros(graph.num_ops, dtype=np.int32)),
    )

    def ask(packed: Packed) -> Done | Fault:
        """The answer of one worker, which is ended then."""
        with closing(ready(packed, host.devices[:1])) as process:
            return wait_for(process, request, problem, (), lambda board: longest_s if board.is_made else MAKING_S, say)

    with closing(packed_setup(problem)) as packed:
        answer = ask(packed)
        if isinstance(answer, Fault) and answer.is_from_outside:
            answer = ask(packed)
    if isinstance(answer, Fault):
        lost = Measurement("lost", math.inf, why=answer.why)
        raise error_of(host, lost) if answer.status == "lost" else RunnerError(answer.why)
    return cast(Costs, answer.result)
