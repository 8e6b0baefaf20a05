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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import nn

from rlplace.errors import RlplaceError, RunnerError
from rlplace.graphs import Grouping, OpGraph
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.program import Origin
from rlplace.measure.costs.costs import Costs
from rlplace.measure.costs.profile import profile_costs
from rlplace.measure.hosts.host import Host
from rlplace.measure.hosts.resolve import check_runs_here
from rlplace.measure.isolate.messages import (
    BETWEEN_S,
    IDLE,
    MAKING_S,
    STOPPED_S,
    Ask,
    Done,
    Fault,
    Profile,
    Race,
    Request,
    Said,
    Setup,
    Step,
    TimeLimits,
    TorchSettings,
    Trace,
)
from rlplace.measure.isolate.packing import Packed
from rlplace.measure.isolate.worker import CannotIsolate, WorkerProcess, op_at_fault
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan, Problem, Timeline, single_device_plan
from rlplace.measure.timing.eager_step import EagerRecipe, Other, Recipe
from rlplace.measure.timing.host_runner import LONGEST_S, HostRunner, Planner, all_lost, lost_of, status_of
from rlplace.measure.timing.race import LOOKS_EVERY_S, REFERENCE, RaceProtocol, Suspensions, Timer
from rlplace.measure.timing.threads import usable_cores
from rlplace.say import Say


@dataclass(frozen=True)
class Asked:
    """A request, and what is needed to say who was at work when its worker ended."""

    request: Request
    """What the worker is asked."""
    problem: Problem
    """Of the plans."""
    reference: Plan | None
    """What every plan of a race is timed beside."""

    def describe(self, contender: int, stacks: str, *, is_stuck: bool = False) -> str:
        """A contender in words, for its own measurement: what it is, and the op where stacks tell.

        Args:
            contender: its index, `REFERENCE` or `IDLE`.
            stacks: what the worker wrote.
            is_stuck: whether its step hung.
        """
        if contender == IDLE:
            return "nothing that it was asked for"
        plan = self._plan(contender)
        if plan is None:
            return "plain PyTorch"
        graph, host = self.problem.graph, self.problem.host
        who = "the reference placement" if contender == REFERENCE else "this placement"
        if isinstance(self.request, Profile):
            who = f"profiling on {host.devices[contender].name}"
        is_traced = isinstance(self.request, Trace | Profile)
        op = op_at_fault(stacks, graph, host, plan, is_stuck=is_stuck, is_traced=is_traced)
        return f"{who}, {op}" if op else who

    def _plan(self, contender: int) -> Plan | None:
        if isinstance(self.request, Profile):
            return single_device_plan(self.problem.graph, contender)
        if not isinstance(self.request, Race):
            return self.request.plan
        if contender == REFERENCE:
            return self.reference
        return self.request.plans[contender] if contender < len(self.request.plans) else None


def wait_for(
    process: WorkerProcess,
    asked: Asked,
    timers: Sequence[Timer | None],
    limit_s: Callable[[], float],
    say: Say = lambda _: None,
) -> Done | Fault:
    """What the worker answers; where it is ended, by itself or from here, the fault of what it ran.

    Time in which this process or the worker was suspended is no contender's: its limit begins again.

    Args:
        process: a worker that is ready.
        asked: what it is asked.
        timers: of this process, by their number among the request's others; it waits while one of them runs.
        limit_s: how long the contender that is at work may take.
        say: told what the worker has for people.
    """
    board = process.board
    board.reset()
    not_before_s = running_s = time.monotonic()
    suspensions = Suspensions()
    try:
        process.connection.send(asked.request)
        while True:
            has_said = process.connection.poll(LOOKS_EVERY_S)
            if suspensions.look():
                not_before_s = running_s = time.monotonic()
            if has_said:
                answer = process.connection.recv()
                if isinstance(answer, Said):
                    say(answer.line)
                    continue
                if not isinstance(answer, Ask):
                    found: Done | Fault = answer
                    return found
                process.connection.send(_timed(timers[answer.other]))
                suspensions.look()
                not_before_s = time.monotonic()
            elif process.has_ended:
                return _dead(process, asked)
            elif process.look_at_memory():
                return _full(process, asked)
            elif process.is_stopped:
                not_before_s = time.monotonic()
                if not_before_s > running_s + STOPPED_S:
                    return _stopped(process, asked)
                continue
            elif board.is_at_work:
                allowed_s = limit_s()
                if time.monotonic() > max(board.begin_s, not_before_s) + allowed_s:
                    return _late(process, asked, allowed_s)
            elif time.monotonic() > max(board.end_s, not_before_s) + BETWEEN_S:
                return _lost(process)
            running_s = time.monotonic()
    except (EOFError, ConnectionError):
        return _dead(process, asked)


def _timed(timer: Timer | None) -> float | Fault:
    assert timer is not None
    try:
        return float(timer())
    except Exception as error:
        return Fault(IDLE, status_of(error), str(error))


def _dead(process: WorkerProcess, asked: Asked) -> Fault:
    """Of a worker that is gone."""
    process.end()
    contender, how = process.board.contender, process.how_it_ended()
    who = asked.describe(contender, process.stacks())
    if not process.is_ended_from_outside():
        return Fault(contender, "error", f"the worker died: {how} in {who}")
    if process.ran_out_of_memory():
        return Fault(contender, "oom", f"the worker was ended for want of memory ({how}) in {who}")
    return Fault(contender, "error", f"the worker was ended from outside ({how}) in {who}", is_from_outside=True)


def _full(process: WorkerProcess, asked: Asked) -> Fault:
    """Of a worker that holds more memory than it may."""
    contender, held, limit = process.board.contender, process.held_bytes, process.limit_bytes
    process.write_stacks()
    process.end()
    who = asked.describe(contender, process.stacks())
    return Fault(contender, "oom", f"out of memory: the worker held {held:,} bytes of {limit:,.0f} allowed in {who}")


def _stopped(process: WorkerProcess, asked: Asked) -> Fault:
    """Of a worker that a signal stopped; no contender is to blame."""
    contender = process.board.contender if process.board.is_at_work else IDLE
    process.end()
    why = f"the worker was stopped by a signal (SIGSTOP), and not continued within {STOPPED_S:g} s"
    return Fault(contender, "error", f"{why}, in {asked.describe(contender, '')}", is_from_outside=True)


def _lost(process: WorkerProcess) -> Fault:
    """Of a worker that hangs between steps."""
    process.end()
    return Fault(IDLE, "error", f"the worker did nothing for {BETWEEN_S:g} s between steps", is_from_outside=True)


def _late(process: WorkerProcess, asked: Asked, allowed_s: float) -> Fault:
    """Of a worker whose contender does not end."""
    contender = process.board.contender
    process.write_stacks()
    process.end()
    who = asked.describe(contender, process.stacks(), is_stuck=True)
    return Fault(contender, "timeout", f"a step did not end within {allowed_s:.3g} s: {who}")


_UNKNOWN = Measurement("error", math.inf)
"""Of a plan that was not measured yet."""


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
        planner: makes the reference's plan, and says what memory plans take: the simulator.
        reference: (N,) placement timed beside every other; none by default.
        seed: of random ops.
        limits: of time.
        memory_limit_bytes: most that placements may take on cores, together; by default what the machine has.

    Attributes:
        num_started: workers started so far.

    Raises:
        InvalidValue: a simulated host, one with a device that this machine lacks, or a graph without a program.
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
        self._process: WorkerProcess | None = None
        self._packed = packed_setup(problem, seed=seed, memory_limit_bytes=memory_limit_bytes)
        self._has_model = True
        try:
            self._packed.add(require_program(problem.graph).origin)
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
            found = self._measured(plans, protocol or RaceProtocol(), others, deadline_s)
        except RlplaceError as error:
            if (lost := lost_of(self._problem.host, error)) is None:
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
        deaths: Counter[int] = Counter()
        while left := [k for k, each in enumerate(found) if each is None]:
            raced = [k for k in left if k < len(plans)]
            timers = [self._sent(others[k - len(plans)]) for k in left if k >= len(plans)]
            request = Race(
                [plans[k] for k in raced],
                [peaks[k].peak_bytes for k in raced],
                [timer if isinstance(timer, EagerRecipe) else None for timer in timers],
                protocol,
                deadline_s,
                self._reference,
                () if self._reference is None else self._planner.retime(self._reference).peak_bytes,
            )
            answer = self._ask(request, [None if isinstance(timer, Recipe) else timer for timer in timers])
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
        return [each or _UNKNOWN for each in found]

    def trace(self, plan: Plan, *, num_steps: int = 5, warmup: int = 2) -> list[Timeline]:
        """Measured timelines of `num_steps` steps of `plan`, in order of step time.

        Raises:
            RunnerError: an op failed, or the worker ended.
        """
        request = Trace(plan, self._planner.retime(plan).peak_bytes, num_steps, warmup)
        answer = self._ask_twice(request)
        if isinstance(answer, Fault):
            raise RunnerError(answer.why)
        timelines: list[Timeline] = answer.result
        return timelines

    def timer(self, plan: Plan) -> Timer:
        """What runs one step of `plan` in the worker, to be raced by another runner.

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
            asked = Asked(request, self._problem, self._reference)
            answer = wait_for(process, asked, timers, self._limit_s(process, request))
        except BaseException:  # Ctrl-C, or an own timer's: the worker is amid a race whose result is not wanted
            self._drop(process)
            raise
        if isinstance(answer, Fault) and answer.status == "lost":
            self._drop(process)
        elif isinstance(answer, Fault) and not answer.is_usable:
            self._start(process)
        return answer

    def _limit_s(self, process: WorkerProcess, request: Request) -> Callable[[], float]:
        """What tells how long the contender that is at work may take, as far as is known by then."""
        board = process.board

        def limit_s() -> float:
            if isinstance(request, Step):
                return self._limits.longest_s
            if isinstance(request, Trace | Profile) or not board.is_made or board.contender >= len(request.plans):
                return MAKING_S
            if board.contender == REFERENCE:
                return self._limits.longest_s
            return self._limits.limit_s(request.protocol, board.best_s, board.first_s)

        return limit_s

    def _start(self, broken: WorkerProcess | None) -> WorkerProcess:
        """A worker that is ready, in the place of a broken one."""
        process = started(self._packed)
        self.num_started += 1
        if broken is not None:
            process.board.carry(broken.board)
            broken.close()
        self._process = process
        try:
            process.await_ready()
        except BaseException:  # what it says when it is ready would be taken for an answer
            self._drop(process)
            raise
        return process

    def _drop(self, process: WorkerProcess) -> None:
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
        if isinstance(other, Recipe) and not (self._has_model and isinstance(other, EagerRecipe)):
            return other.timer(self._problem.graph, self._problem.host, None)
        return other


def without_model(origin: Origin) -> Origin:
    """What placements need of what the user gave: how the batch is cut."""
    return Origin(nn.Module(), (), {}, None, autocast=origin.autocast, micro=origin.micro)


def packed_setup(problem: Problem, *, seed: int = 0, memory_limit_bytes: int | None = None) -> Packed:
    """The packed `Setup` of a worker.

    Raises:
        CannotIsolate: it cannot be sent.
    """
    program = require_program(problem.graph)
    sent = dataclasses.replace(program, origin=without_model(program.origin))
    settings = TorchSettings.here()
    packed = Packed()
    try:
        packed.add(Setup(problem, sent, seed, usable_cores(), settings, memory_limit_bytes))
    except Exception as error:
        raise CannotIsolate(f"the captured step cannot be sent to it: {type(error).__name__}: {error}") from error
    return packed


def started(packed: Packed) -> WorkerProcess:
    """A worker, not yet ready.

    Raises:
        CannotIsolate: there is no memory for the tensors, or there are too many processes or open files.
    """
    try:
        return WorkerProcess(packed)
    except OSError as error:
        raise CannotIsolate(f"it cannot be started: {error}") from error


VARIABLE = "RLPLACE_IN_PROCESS"
"""Of the environment: with 1, plans run in this process by default."""


Runner = HostRunner | IsolatedRunner
"""Runs plans for real: in this process, or in a worker."""


def is_isolated(asked: bool | None) -> bool:
    """Whether plans run in a worker: as asked, else as the environment says, else yes where workers can be started."""
    if asked is not None:
        return asked
    return os.environ.get(VARIABLE, "") != "1" and os.name == "posix"


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
        InvalidValue: a simulated host, one with a device that this machine lacks, or a graph without a program.
    """
    if is_isolated(isolated):
        try:
            return IsolatedRunner(problem, planner, reference=reference, seed=seed)
        except CannotIsolate as error:
            _warn("placements are measured", error)
    return HostRunner(problem, planner, reference=reference, seed=seed)


def _warn(what: str, error: CannotIsolate) -> None:
    """Says why work runs in this process, to the caller of the function that decided so."""
    why = f"{what} in this process, as no worker can be had: {error}. An op that crashes will end this process."
    warnings.warn(why, RuntimeWarning, stacklevel=4)


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
        on_progress: told what is being profiled.
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
            return _in_worker(graph, host, Profile(num_steps, warmup, most_s), say, longest_s)
        except CannotIsolate as error:
            _warn("ops are profiled", error)
    return profile_costs(graph, host, num_steps=num_steps, warmup=warmup, most_s=most_s, on_progress=say)


def _in_worker(graph: OpGraph, host: Host, request: Profile, say: Say, longest_s: float) -> Costs:
    # nothing is known of its ops yet, and nothing is placed
    problem = Problem(
        graph,
        host,
        Costs(np.zeros((graph.num_ops, host.num_devices)), "estimated"),
        Grouping(np.zeros(graph.num_ops, dtype=np.int32)),
    )
    packed = packed_setup(problem)
    try:
        answer = _asked(packed, problem, request, say, longest_s)
        if isinstance(answer, Fault) and answer.is_from_outside:
            answer = _asked(packed, problem, request, say, longest_s)
    finally:
        packed.close()
    if isinstance(answer, Fault):
        raise RunnerError(answer.why)
    costs: Costs = answer.result
    return costs


def _asked(packed: Packed, problem: Problem, request: Profile, say: Say, longest_s: float) -> Done | Fault:
    """What one worker answers, which is gone then."""
    process = started(packed)

    def limit_s() -> float:
        """Of a step, or of all ops one by one."""
        return longest_s if process.board.is_made else MAKING_S

    try:
        process.await_ready()
        return wait_for(process, Asked(request, problem, None), (), limit_s, say)
    finally:
        process.close()
