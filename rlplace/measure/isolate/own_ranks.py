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
from collections.abc import Callable
from contextlib import closing
from typing import Any, NoReturn

import numpy as np

from rlplace.errors import RunnerError, refuse_if
from rlplace.graphs import Grouping, OpGraph
from rlplace.graphs.interpreter import require_program
from rlplace.measure.costs.costs import Costs
from rlplace.measure.execute.device_threads import Crew, Held, Job
from rlplace.measure.execute.rank_processes import MESSAGE, RankCrew
from rlplace.measure.hosts.host import Host
from rlplace.measure.isolate.fleet import Fleet
from rlplace.measure.isolate.isolated_runner import packed_setup, ready
from rlplace.measure.isolate.packing import packed_alone, without_values
from rlplace.measure.isolate.worker import FROM_OUTSIDE, ending, ops_at_fault
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.timing.race import LOOKS_EVERY_S

_STATE = (
    "but parameters and optimizer state are in this process, too: `save` or `state_dict` still gives them (the step "
    "that failed may have changed some of them). Make a new placed model, and load them there"
)


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
    return OwnCrew(graph, host, seed)


class OwnCrew(RankCrew):
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
        self._host, self._graphs = host, [graph]
        self._steps: dict[int, tuple[OpGraph, Plan, dict[str, Any]]] = {}
        sent = dataclasses.replace(graph, program=without_values(require_program(graph)))
        costs = Costs(np.zeros((graph.num_ops, host.num_devices)), "estimated")  # nobody asks for them
        problem = Problem(sent, host, costs, Grouping(np.zeros(graph.num_ops, dtype=np.int32)))
        with closing(packed_setup(problem, seed=seed, memory_limit_bytes=float("inf"))) as packed:
            self.fleet = ready(packed, host.devices, first=1)
        self._close = weakref.finalize(self, _closed, self.fleet, os.getpid())
        super().__init__(host, self.fleet.arena, links=self.fleet.links)

    def look(self) -> None:
        super().look()
        if busy := [worker.device.name for worker in self.workers if worker.is_busy and not worker.wait(0.0)]:
            op = "".join(f" in {op}" for op in self._late()[:1])
            raise RunnerError(
                f"{busy[0]} is still busy with a step that did not end in time{op}. No step can run until that has "
                f"ended, {_STATE}; `close` ends the processes of this one"
            )

    def watch(self) -> None:
        if not self.why and self.fleet.has_ended:
            self.why = self._death()
        if self.why:
            raise RunnerError(self.why)

    def lost(self) -> NoReturn:
        for _ in range(100):  # it closed its end, and its exit status comes soon
            self.watch()
            time.sleep(LOOKS_EVERY_S)
        raise RunnerError("a process of the placed model does not answer any more")

    def number_of(self, graph: OpGraph) -> int:
        if not any(known is graph for known in self._graphs):
            self.ask("add_graph", packed_alone((graph, without_values(require_program(graph)))))
            self._graphs.append(graph)
        return next(k for k, known in enumerate(self._graphs) if known is graph)

    def load(self, key: int, graph: OpGraph, plan: Plan, options: dict[str, Any], held: Held) -> None:
        self._steps[key] = graph, plan, options
        super().load(key, graph, plan, options, held)

    def stop(self) -> None:
        super().stop()
        self._close()

    def run(self, jobs: list[Job], step: int, *, on_error: Callable[[], None], deadline_s: float) -> None:
        try:
            super().run(jobs, step, on_error=on_error, deadline_s=deadline_s)
        except TimeoutError as error:
            late = self._late()
            said = f"the step did not end within {deadline_s:g} s: {late[0]}" if late else str(error)
            raise TimeoutError(said) from None

    def _late(self) -> list[str]:
        """The ops of ranks that have not ended, in words."""
        return [op for op, worker in zip(self._ops(), self.workers, strict=True) if worker.is_busy and op]

    def _ops(self) -> list[str]:
        """By rank, the op that its process is in, in words; empty where its stacks do not tell."""
        self.fleet.write_stacks()
        with tempfile.TemporaryFile(prefix="rlplace-") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            own = file.read().decode("utf-8", errors="replace")
        task, _ = self.fleet.arena.task(1 + self.fleet.gone)
        if task == MESSAGE or task // 2 not in self._steps:
            return [""] * self._host.num_devices
        graph, plan, options = self._steps[task // 2]
        lines = {name: value for name, value in options.items() if name != "seed"}
        return ops_at_fault([own, *self.fleet.stacks()], graph, self._host, plan, **lines)

    def _death(self) -> str:
        """Which process ended, how, and in which op; ends the others."""
        ops, fleet = self._ops(), self.fleet
        for each in fleet.ranks:  # all at once: each takes some time
            each.kill()
        fleet.end()
        gone, rank = fleet.ranks[fleet.gone], 1 + fleet.gone
        is_short, code = gone.has_lost_siblings(), gone.return_code
        how = f"was ended {'for want of memory' if is_short else 'from outside'}" if -code in FROM_OUTSIDE else "died"
        op, waiting = ops.pop(rank), ", ".join(filter(None, ops))
        said = f" in {op}" * bool(op) + f"; meanwhile in {waiting}" * bool(waiting)
        return (
            f"the process of {self._host.devices[rank].name} {how} ({ending(code)}){said}. No step can run any more, "
            f"{_STATE}"
        )


def _closed(fleet: Fleet, process: int) -> None:
    """Ends the processes, unless this is a fork of the one that started them."""
    if os.getpid() == process:
        fleet.close()
