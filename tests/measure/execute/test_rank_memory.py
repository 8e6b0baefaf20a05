"""Simulated peaks of hosts whose devices are processes, against what the programs of the ranks take and free."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from micrographs import op_graph
from naive_plan import random_devices
from random_problems import plain_host, random_graph

from rlplace.graphs import Grouping
from rlplace.measure import Costs, Host, Problem, Simulator
from rlplace.measure.execute.rank_programs import RankPrograms, rank_programs


def peaks_of_programs(problem: Problem, made: RankPrograms, is_posted: bool) -> tuple[int, ...]:
    """(D,) bytes: `made.allocations` and `made.releases` at the simulated times of their items.

    A copy that goes into a slot takes memory from its start. One that the destination is to receive takes it from when
    the receive is posted: when the op before it in the program of the destination has ended.
    """
    graph, plan, n = made.graph, made.plan, made.graph.num_ops
    times = Simulator(problem, threads=1).timeline(plan)
    start_s = np.concatenate([times.op_start_s, times.transfer_start_s])
    end_s = np.concatenate([times.op_end_s, times.transfer_end_s])
    found = []
    for rank, program in enumerate(made.programs):
        posted_s, now = {}, 0.0
        for kind, item, _ in program:
            if kind in ("op", "updates"):
                now = end_s[item]
            elif kind == "receive" and is_posted:
                posted_s[item] = now
        jobs = [op for op in range(n) if plan.devices[op] == rank and not graph.is_source[op]]
        changes = [(start_s[op], 1, int(problem.workspace_bytes[op, rank])) for op in jobs]
        changes += [(end_s[op], 0, -int(problem.workspace_bytes[op, rank])) for op in jobs]
        for item, tensor in made.allocations(rank):
            taken_s = min(start_s[item], posted_s.get(item, np.inf))
            changes.append((taken_s, 1, int(graph.tensor_bytes[tensor])))
        for item, tensor in made.releases(rank):
            is_own = plan.devices[graph.tensor_op[tensor]] == rank
            sends = np.flatnonzero((plan.transfer_tensor == tensor) & is_own)
            readers = graph.edge_op[graph.input_tensors == tensor]
            readers = readers[plan.devices[readers] == rank]  # one may end after a send that is later in the program
            freed_s = max([end_s[item], *end_s[readers], *times.transfer_end_s[sends]])
            changes.append((freed_s, 0, -int(graph.tensor_bytes[tensor])))
        here = plan.devices == rank
        held = int(graph.state_bytes[here].sum())
        held += int(graph.tensor_bytes[(here & graph.is_source)[graph.tensor_op]].sum())
        levels = np.cumsum([num_bytes for *_, num_bytes in sorted(changes)])
        found.append(held + int(levels.max(initial=0)))
    return tuple(found)


def random_steps(seed: int, host: Host, sends_wait: bool) -> tuple[Problem, RankPrograms]:
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, int(rng.integers(6, 60)))
    costs = Costs(rng.integers(1, 9, (graph.num_ops, host.num_devices)) / 2, "given")
    problem = Problem(graph, host, costs, Grouping(np.arange(graph.num_ops)))
    devices = random_devices(graph, host.num_devices, rng)
    changed = list(zip(graph.mutation_op.tolist(), graph.tensor_op[graph.mutation_tensor].tolist(), strict=True))
    for _ in changed:  # what an op changes is where the op is
        for pair in changed:
            devices[list(pair)] = devices[list(pair)].min()
    plan = Simulator(problem, threads=1).plan(devices)
    return problem, rank_programs(graph, host, plan, sends_wait=sends_wait)


def processes(num_devices: int, *, blocks_source: bool, **facts: object) -> Host:
    host = plain_host(num_devices, 200.0, 0.25, **facts).as_processes("processes")
    return replace(host, routes=tuple(replace(route, blocks_source=blocks_source) for route in host.routes))


@pytest.mark.parametrize("dispatch_s", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("is_posted", [False, True])
def test_simulated_peaks_are_those_of_the_programs(is_posted: bool, dispatch_s: float) -> None:
    """Over slots, which sources write, and over receives that destinations post ahead."""
    num_ahead = 0
    for seed in range(150):
        host = processes(2 + seed % 3, blocks_source=not is_posted, dispatch_s=dispatch_s, run_ahead=1 + 8 * (seed % 2))
        problem, made = random_steps(seed, host, is_posted)
        found = Simulator(problem, threads=1).retime(made.plan).peak_bytes
        assert found == peaks_of_programs(problem, made, is_posted), seed
        num_ahead += is_posted and found != peaks_of_programs(problem, made, False)
    assert num_ahead >= 5 * is_posted, "it makes a difference when a receive is posted"


def test_a_receive_is_posted_before_its_tensor_is_made() -> None:
    """Device 1 is done with op 1 at 1 s, and waits for the 100 bytes that device 0 has made after 5 s.

    Its op 1 takes another 300 bytes, which op 2 frees, if that comes first.
    """
    graph = op_graph([[], [], [1], [0, 2]], [100, 300, 10, 1])
    costs = Costs(np.array([[5.0, 5.0], [1.0, 1.0], [2.0, 2.0], [1.0, 1.0]]), "given")
    peaks = {}
    for is_ahead in (False, True):
        host = replace(processes(2, blocks_source=False), processes=is_ahead)
        problem = Problem(graph, host, costs, Grouping(np.arange(4)))
        simulator = Simulator(problem, threads=1)
        plan = simulator.plan(np.array([0, 1, 1, 1], dtype=np.int32))
        # the transfer stands where op 0 might have ended, had it been as fast as planned
        plan = replace(plan, sequence=np.array([0, 1, 4, 2, 3], dtype=np.int32))
        peaks[is_ahead] = simulator.retime(plan).peak_bytes
    assert peaks == {False: (100, 310), True: (100, 410)}
