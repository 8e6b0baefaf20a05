"""`crew_of`: the threads of a placed model, or its processes, of which the caller's own is the first rank.

Parameters, gradients and optimizer states are in memory that all processes share. So the caller's loop uses them as if
there were threads, while ranks read and write them.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import tempfile
import time
import weakref
from typing import Any, NoReturn

import numpy as np

from rlplace.errors import RunnerError, refuse_if
from rlplace.graphs import Grouping, OpGraph
from rlplace.graphs.interpreter import require_program
from rlplace.measure.costs.costs import Costs
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.rank_processes import MESSAGE, Lookout, RankCrew
from rlplace.measure.hosts.host import Host
from rlplace.measure.isolate.isolated_runner import packed_setup, started
from rlplace.measure.isolate.packing import packed_alone, without_values
from rlplace.measure.isolate.worker import FROM_OUTSIDE, ending, op_at_fault
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.timing.race import LOOKS_EVERY_S

_SEEN_WITHIN_S = 10.0
"""After a process closed its end, its exit status must be there."""


def crew_of(graph: OpGraph, host: Host, *, seed: int = 0) -> Crew:
    """Those who run steps of a model on a host, in the caller's own loop.

    Args:
        graph: the first graph of the model, with its program.
        host: of this machine.
        seed: of random ops.

    Raises:
        InvalidValue: its devices are GPUs with a process each.
        CannotIsolate: a process cannot be started.
    """
    if not host.processes or host.num_devices == 1:
        return Crew(host.devices)
    refuse_if(
        host.is_wired,
        "host",
        host.name,
        "a host whose GPUs are threads of one process (`cuda`)",
        where="a placed model",
        hint="Only cores can be processes in a loop of your own.",
    )
    ranks = OwnRanks(graph, host, seed)
    fleet = ranks.fleet
    crew = RankCrew(host, fleet.arena, links=fleet.links, lookout=ranks, first=graph)
    weakref.finalize(crew, ranks.close)
    return crew


class OwnRanks(Lookout):
    """The processes of all ranks but the first, which is a thread of this process.

    Args:
        graph: with its program.
        host: its devices.
        seed: of random ops.

    Attributes:
        fleet: the processes.

    Raises:
        CannotIsolate: one cannot be started.
    """

    def __init__(self, graph: OpGraph, host: Host, seed: int) -> None:
        self._host, self._process, self._why = host, os.getpid(), ""
        self._steps: dict[int, tuple[OpGraph, Plan, dict[str, Any]]] = {}
        sent = dataclasses.replace(graph, program=without_values(require_program(graph)))
        costs = Costs(np.zeros((graph.num_ops, host.num_devices)), "estimated")  # nobody asks for them
        problem = Problem(sent, host, costs, Grouping(np.zeros(graph.num_ops, dtype=np.int32)))
        packed = packed_setup(problem, seed=seed, memory_limit_bytes=float("inf"))
        try:
            self.fleet = started(packed, host.devices, first=1)
            try:
                self.fleet.await_ready()
            except BaseException:
                self.fleet.close()
                raise
        finally:
            packed.close()

    def look(self) -> None:
        if not self._why and self.fleet.has_ended:
            self._why = self._ended()
        if self._why:
            raise RunnerError(self._why)

    def lost(self) -> NoReturn:
        until_s = time.monotonic() + _SEEN_WITHIN_S
        while time.monotonic() < until_s:
            self.look()
            time.sleep(LOOKS_EVERY_S)
        raise RunnerError("a process of the placed model does not answer any more")

    def note(self, key: int, graph: OpGraph, plan: Plan, options: dict[str, Any]) -> None:
        self._steps[key] = graph, plan, options

    def packed(self, graph: OpGraph) -> bytes:
        return packed_alone((graph, without_values(require_program(graph))))

    def close(self) -> None:
        if os.getpid() == self._process:  # not in a fork, which has none of them
            self._process = 0
            self.fleet.close()

    def _ended(self) -> str:
        """Which process ended, how, and in which op; ends the others, which wait for it."""
        fleet = self.fleet
        fleet.write_stacks()
        with tempfile.TemporaryFile(prefix="rlplace-") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            own = file.read().decode("utf-8", errors="replace")
        fleet.end()
        stacks, gone = fleet.stacks(), fleet.gone
        task, _ = fleet.arena.task(1 + gone)
        code, name = fleet.ranks[gone].return_code, self._host.devices[1 + gone].name
        is_short = fleet.ranks[gone].has_lost_siblings()
        how = f"was ended {'for want of memory' if is_short else 'from outside'}" if -code in FROM_OUTSIDE else "died"
        op, *waiting = (self._op(text, task) for text in (stacks.pop(gone), own, *stacks))
        said = f" in {op}" if op else ""
        if any(waiting):
            said += f"; meanwhile in {', '.join(filter(None, waiting))}"
        return (
            f"the process of {name} {how} ({ending(code)}){said}. No step can run any more, but parameters and "
            "optimizer state are in this process, too: `save` or `state_dict` still gives them (the step that failed "
            "may have changed some of them). Make a new placed model, and load them there"
        )

    def _op(self, stacks: str, task: int) -> str:
        if task == MESSAGE or task // 2 not in self._steps:
            return ""
        graph, plan, options = self._steps[task // 2]
        lines = {name: value for name, value in options.items() if name != "seed"}
        return op_at_fault(stacks, graph, self._host, plan, **lines)
