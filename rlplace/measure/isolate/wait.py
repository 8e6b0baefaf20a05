"""`wait_for`: the answer to a request, or what became of the worker that was to give it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlplace.measure.costs.single_device import single_device_plan
from rlplace.measure.isolate.messages import (
    BETWEEN_S,
    IDLE,
    STOPPED_S,
    Ask,
    Done,
    Failed,
    Fault,
    Profile,
    Race,
    Request,
    Said,
    Timed,
    Trace,
)
from rlplace.measure.isolate.process import WorkerProcess, op_at_fault
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.run.outcomes import status_of
from rlplace.measure.run.race import LOOKS_EVERY_S, REFERENCE, Suspensions, Timer
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


def _timed(timer: Timer | None) -> Timed | Failed:
    assert timer is not None
    try:
        return Timed(timer())
    except Exception as error:
        return Failed(status_of(error), str(error))


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
    """Of a worker that a signal stopped; nobody in it is to blame."""
    contender = process.board.contender if process.board.is_at_work else IDLE
    process.end()
    why = f"the worker was stopped by a signal (SIGSTOP), and not continued within {STOPPED_S:g} s"
    return Fault(contender, "error", f"{why}, in {asked.describe(contender, '')}", is_from_outside=True)


def _lost(process: WorkerProcess) -> Fault:
    """Of a worker that hangs between steps."""
    process.end()
    return Fault(IDLE, "error", f"the worker did nothing for {BETWEEN_S:g} s between steps", is_from_outside=True)


def _late(process: WorkerProcess, asked: Asked, allowed_s: float) -> Fault:
    """Of a worker whose contender does not come to an end."""
    contender = process.board.contender
    process.write_stacks()
    process.end()
    who = asked.describe(contender, process.stacks(), is_stuck=True)
    return Fault(contender, "timeout", f"a step did not end within {allowed_s:.3g} s: {who}")
