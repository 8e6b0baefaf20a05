"""Programs without a guard around them, as people type them: a script, `python -c`, standard input, a notebook."""

from __future__ import annotations

MEASURES = """
import os
import numpy as np, torch
from torch import nn
from rlplace.graphs import capture
from rlplace.measure import Costs, Host, Problem, RaceProtocol, Simulator
from rlplace.measure.evaluator import Evaluator

MAIN, FACTOR = os.getpid(), 2


@torch.library.custom_op("rlplace_tests_script::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    import os
    if os.getpid() == MAIN:
        raise RuntimeError("it runs in the main process")
    return x / FACTOR

@halve.register_fake
def _(x):
    return torch.empty_like(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
    def forward(self, x):
        return halve(x) + self.weight.sum()

graph = capture(Model(), torch.ones(4), check=False)
host = Host.detect("cores")
costs = Costs(np.ones((graph.num_ops, host.num_devices)), "profiled")
problem = Problem.grouped(graph, host, costs, 2)


simulator = Simulator(problem)
placement = np.zeros(graph.num_ops, dtype=np.int32)
evaluator = Evaluator(problem, simulator, placement)
(outcome,) = evaluator.measure_plans([simulator.plan(placement)], RaceProtocol(1, 1, 1))
evaluator.close()
print(outcome.status, outcome.why)
"""
"""Measures a placement with an op of its own, which refuses to run in the process that asks; in four parts."""
