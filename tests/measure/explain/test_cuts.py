"""The costliest copies of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from micrographs import op_graph
from random_problems import plain_host

from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.opgraph import BACKWARD, FORWARD, UPDATE, OpGraph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.explain.explain_step import costliest_cuts, critical_items, what_is_sent
from rlplace.measure.explain.explanation import CutEdge
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator


def cuts_of(graph: OpGraph, devices: list[int], count: int = 10) -> tuple[CutEdge, ...]:
    host = plain_host(max(devices) + 1)
    costs = Costs(np.ones((graph.num_ops, host.num_devices)), "estimated")
    problem = Problem(graph, host, costs, Grouping(np.arange(graph.num_ops)))
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(np.array(devices, dtype=np.int32))
    timeline = simulator.timeline(plan)
    return costliest_cuts(problem, plan, timeline, critical_items(problem, plan, timeline), count)


def test_the_longest_come_first_with_who_reads_them() -> None:
    graph = replace(op_graph([[], [], [1], [1], [0]], [100, 500, 1, 1, 1]), modules=tuple("abcde"))
    cuts = cuts_of(graph, [0, 1, 2, 2, 3])
    assert [(cut.op, cut.module, cut.reader, cut.reader_module, cut.num_readers) for cut in cuts] == [
        ("op1", "b", "op2", "c", 2),
        ("op0", "a", "op4", "e", 1),
    ]
    assert [(cut.source, cut.destination, cut.num_bytes, cut.seconds) for cut in cuts] == [
        ("d1", "d2", 500, 5.0),
        ("d0", "d3", 100, 1.0),
    ]
    assert [cut.is_critical for cut in cuts] == [True, False]
    assert cuts_of(graph, [0, 1, 2, 2, 3], count=1) == cuts[:1]
    assert cuts_of(graph, [0, 0, 0, 0, 0]) == ()


def test_what_is_sent() -> None:
    targets = ["parameter", "input", "aten.op", "aten.op", "update.adam", "buffer"]
    phases = [FORWARD, FORWARD, FORWARD, BACKWARD, UPDATE, FORWARD]
    graph = op_graph([[], [], [0], [2], [3], []], targets=targets, phases=phases)
    found = [what_is_sent(graph, op) for op in range(6)]
    assert found == ["parameter", "input", "activation", "gradient", "parameter", "parameter"]
