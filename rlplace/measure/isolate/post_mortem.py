"""What a worker died of, from its exit status and the stacks that Python wrote on the way out."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.hosts.host import Host
from rlplace.measure.plan import Plan
from rlplace.measure.run.codegen.generate import generate

FROM_OUTSIDE = frozenset((signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT))
"""Signals that somebody sends; what an op does wrong makes others."""
_THREAD = re.compile(r"^(?P<current>Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_PLACED = re.compile(r"<placed step, device (?P<device>\d+)>\Z")

Frame = tuple[str, int, str]
"""File, line and function."""


def ending(return_code: int) -> str:
    """How a process ended, in words.

    >>> ending(-6), ending(3)
    ('SIGABRT', 'exit code 3')
    """
    if return_code >= 0:
        return f"exit code {return_code}"
    try:
        return signal.Signals(-return_code).name
    except ValueError:
        return f"signal {-return_code}"


def is_from_outside(return_code: int) -> bool:
    """Whether a process was ended by a signal that somebody sends."""
    return -return_code in FROM_OUTSIDE


def stacks_of(text: str) -> list[list[Frame]]:
    """The stack of each thread that `faulthandler` wrote, innermost frame first; the thread at fault comes first.

    Args:
        text: what it wrote: one dump, or several, of which the last counts.
    """
    begins = [match.start() for match in _THREAD.finditer(text)]
    currents = [match.start() for match in _THREAD.finditer(text) if match["current"].startswith("Current")]
    stacks: list[list[Frame]] = []
    first = 0
    for k, begin in enumerate(begins):
        end = begins[k + 1] if k + 1 < len(begins) else len(text)
        frames = [(match["file"], int(match["line"]), match["name"]) for match in _FRAME.finditer(text, begin, end)]
        if currents and begin == currents[-1]:
            first = len(stacks)
        stacks.append(frames)
    return stacks[first : first + 1] + stacks[:first] + stacks[first + 1 :]


def op_at_fault(
    text: str, graph: OpGraph, host: Host, plan: Plan, *, is_stuck: bool = False, is_traced: bool = False
) -> str:
    """The op that ran, with its device and the user's line below it, in words; "" where the stacks do not tell.

    Args:
        text: what `faulthandler` wrote.
        graph: with its program.
        host: the devices.
        plan: what ran.
        is_stuck: whether the step hung: then threads that wait for another's tensor are not at fault.
        is_traced: whether it was traced: its code has other lines.
    """
    for frames in stacks_of(text):
        depth = next((k for k, (file, _, _) in enumerate(frames) if _PLACED.match(file)), -1)
        if depth < 0 or (is_stuck and depth == 0):
            continue
        return _words(frames[: depth + 1], graph, host, plan, is_traced)
    return ""


def _words(frames: Sequence[Frame], graph: OpGraph, host: Host, plan: Plan, is_traced: bool) -> str:
    file, line, _ = frames[-1]
    placed = _PLACED.match(file)
    device = int(placed["device"]) if placed is not None else 0
    items = generate(graph, host, plan, is_traced=is_traced).line_items[device]
    item = items[line - 1] if 0 < line <= len(items) else -1
    if item < 0:
        return ""
    n = graph.num_ops
    op = item if item < n else int(graph.tensor_op[int(plan.transfer_tensor[item - n])])
    what = "op" if item < n else "the transfer of op"
    said = f"{what} {graph.names[op]!r} ({graph.targets[op]}) on {host.devices[device].name}"
    own = next((frame for frame in frames[:-1] if "/torch/" not in frame[0] and not frame[0].startswith("<")), None)
    return said if own is None else f"{said}, {own[0]}:{own[1]} in {own[2]}"
