"""`profile_isolated`: what ops take on this machine, from steps that a worker process runs."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable

import numpy as np

from rlplace.errors import RunnerError
from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.costs.profile import profile_costs
from rlplace.measure.hosts.host import Host
from rlplace.measure.isolate.isolated_runner import Asked, is_isolated, wait_for, without_model
from rlplace.measure.isolate.messages import MAKING_S, Board, Done, Fault, Profile, Setup, TorchSettings
from rlplace.measure.isolate.packing import Packed
from rlplace.measure.isolate.process import CannotIsolate, WorkerProcess
from rlplace.measure.problem import Problem
from rlplace.measure.timing.host_runner import LONGEST_S
from rlplace.measure.timing.threads import usable_cores
from rlplace.say import Say


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

    A step that breaks its process, fills its memory or does not come to an end is an error that says which op did, and
    not the end of this process. Where no worker can be had, a warning says why, and steps run here.

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
            warnings.warn(
                f"ops are profiled in this process, as no worker can be had: {error}. One that crashes will end this "
                "process.",
                RuntimeWarning,
                stacklevel=3,
            )
    return profile_costs(graph, host, num_steps=num_steps, warmup=warmup, most_s=most_s, on_progress=say)


def _in_worker(graph: OpGraph, host: Host, request: Profile, say: Say, longest_s: float) -> Costs:
    # nothing is known of its ops yet, and nothing is placed
    problem = Problem(
        graph,
        host,
        Costs(np.zeros((graph.num_ops, host.num_devices)), "estimated"),
        Grouping(np.zeros(graph.num_ops, dtype=np.int32)),
    )
    packed = Packed()
    try:
        _pack(packed, problem)
        answer = _asked(packed, problem, request, say, longest_s)
        if isinstance(answer, Fault) and answer.is_from_outside:
            answer = _asked(packed, problem, request, say, longest_s)
    finally:
        packed.close()
    if isinstance(answer, Fault):
        raise RunnerError(answer.why)
    costs: Costs = answer.result
    return costs


def _pack(packed: Packed, problem: Problem) -> None:
    """Packs what a worker needs.

    Raises:
        CannotIsolate: it cannot be sent.
    """
    program = require_program(problem.graph)
    sent = dataclasses.replace(program, origin=without_model(program.origin))
    try:
        packed.add(Setup(problem, sent, None, (), 0, usable_cores(), TorchSettings.here(), None))
    except Exception as error:
        raise CannotIsolate(f"the captured step cannot be sent to it: {type(error).__name__}: {error}") from error


def _asked(packed: Packed, problem: Problem, request: Profile, say: Say, longest_s: float) -> Done | Fault:
    """What one worker answers, which is gone then."""
    try:
        process = WorkerProcess(packed)
    except OSError as error:  # no memory for the tensors, too many processes or open files
        raise CannotIsolate(f"it cannot be started: {error}") from error
    try:
        process.await_ready()
        return wait_for(process, Asked(request, problem, None), (), _limit_s(process.board, longest_s), say)
    finally:
        process.close()


def _limit_s(board: Board, longest_s: float) -> Callable[[], float]:
    """What tells how long what is at work may take: a step, or all ops one by one."""
    return lambda: longest_s if board.is_made else MAKING_S
