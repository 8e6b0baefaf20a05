"""`wait_for`: the answer to a request, or what became of the worker that was to give it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rlplace.measure.isolate.board import IDLE
from rlplace.measure.isolate.messages import Ask, Done, Failed, Fault, Race, Timed, Trace
from rlplace.measure.isolate.post_mortem import op_at_fault
from rlplace.measure.isolate.process import WorkerProcess
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.run.race import Timer
from rlplace.measure.run.runner import status_of

LOOKS_EVERY_S = 0.1
"""How often the worker is looked at while it measures: rarely enough that nobody notices."""


def wait_for(
    process: WorkerProcess,
    request: Race | Trace,
    problem: Problem,
    timers: Sequence[Timer | None],
    limit_s: Callable[[], float],
) -> Done | Fault:
    """What the worker answers; where it is ended, by itself or from here, the fault of what it ran.

    Args:
        process: a worker that is ready.
        request: what it is asked.
        problem: of the plans.
        timers: of this process, by their number among the request's others; it waits while one of them runs.
        limit_s: how long the contender that is at work may take.
    """
    board = process.board
    board.reset()
    not_before_s = 0.0
    try:
        process.connection.send(request)
        while True:
            if process.connection.poll(LOOKS_EVERY_S):
                answer = process.connection.recv()
                if not isinstance(answer, Ask):
                    found: Done | Fault = answer
                    return found
                process.connection.send(_timed(timers[answer.other]))
                not_before_s = time.monotonic()
            elif process.has_ended:
                raise EOFError
            elif process.look_at_memory():
                return _ended(process, request, problem)
            elif board.is_at_work:
                allowed_s = limit_s()
                if time.monotonic() > max(board.begin_s, not_before_s) + allowed_s:
                    return _late(process, request, problem, allowed_s)
    except (EOFError, ConnectionError):
        return _dead(process, request, problem)


def _timed(timer: Timer | None) -> Timed | Failed:
    assert timer is not None
    try:
        return Timed(timer())
    except Exception as error:
        return Failed(status_of(error), str(error))


def _dead(process: WorkerProcess, request: Race | Trace, problem: Problem) -> Fault:
    """Of a worker that is gone."""
    process.end()
    contender, how = process.board.contender, process.how_it_ended()
    who = _who(contender, request, problem, process.stacks())
    if process.is_ended_from_outside():
        if process.ran_out_of_memory():
            return Fault(contender, "oom", f"the worker was ended for want of memory ({how}) in {who}")
        why = f"the worker was ended from outside ({how}) in {who}"
        return Fault(contender, "error", why, is_from_outside=True)
    return Fault(contender, "error", f"the worker died: {how} in {who}")


def _ended(process: WorkerProcess, request: Race | Trace, problem: Problem) -> Fault:
    """Of a worker that holds more memory than it may."""
    contender, held, limit = process.board.contender, process.held_bytes, process.limit_bytes
    process.write_stacks()
    process.end()
    who = _who(contender, request, problem, process.stacks())
    return Fault(contender, "oom", f"out of memory: the worker held {held:,} bytes of {limit:,.0f} allowed in {who}")


def _late(process: WorkerProcess, request: Race | Trace, problem: Problem, allowed_s: float) -> Fault:
    """Of a worker whose contender does not come to an end."""
    contender = process.board.contender
    process.write_stacks()
    process.end()
    who = _who(contender, request, problem, process.stacks(), is_stuck=True)
    return Fault(contender, "timeout", f"a step did not end within {allowed_s:.3g} s: {who}")


def _who(contender: int, request: Race | Trace, problem: Problem, stacks: str, *, is_stuck: bool = False) -> str:
    """What was at work, in words: the op where the stacks tell."""
    if contender == IDLE:
        return "nothing that it was asked for"
    plan = _plan(contender, request)
    if contender < 0:
        return "the reference placement"
    if plan is None:
        return "plain PyTorch"
    op = op_at_fault(stacks, problem.graph, problem.host, plan, is_stuck=is_stuck, is_traced=isinstance(request, Trace))
    return f"plan {contender}, {op}" if op else f"plan {contender}"


def _plan(contender: int, request: Race | Trace) -> Plan | None:
    if isinstance(request, Trace):
        return request.plan
    return request.plans[contender] if 0 <= contender < len(request.plans) else None
