"""Updates that follow each other are one call, which computes the same and is timed in shares."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from core_hosts import core_host
from small_models import mean_square
from torch import nn

from rlplace.graphs import capture
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.program import Update
from rlplace.measure.execute.generate import generate, update_runs
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.residents import Residents
from rlplace.measure.execute.workers import Crew
from rlplace.measure.plan import Plan


def mlp(dtype: torch.dtype = torch.float32) -> OpGraph:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2).to(dtype), nn.Linear(2, 2).to(dtype))

    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[3](self.layers[2](self.layers[1](self.layers[0](x)).to(dtype)))

    return capture(Casting(), torch.ones(5, 4), mean_square, "adam")


def updates_of(graph: OpGraph) -> list[int]:
    assert graph.program is not None
    return [op for op, call in sorted(graph.program.calls.items()) if isinstance(call, Update)]


def test_a_run_ends_where_something_else_stands_or_a_gang_takes_over() -> None:
    graph = mlp()
    assert graph.program is not None
    a, b, c, d, *_ = (op for op in updates_of(graph) if not graph.workspace_bytes[op])
    plain = next(op for op, call in graph.program.calls.items() if not isinstance(call, Update))
    transfer = graph.num_ops

    def runs(*items: int, waits: tuple[int, ...] = (), sets: tuple[int, ...] = ()) -> tuple[tuple[int, ...], ...]:
        assert graph.program is not None
        return update_runs(graph, graph.program, items, waits, sets)

    source = next(iter(graph.program.sources))
    assert runs(a, b, c) == ((a, b, c),)
    assert runs(a, source, b) == ((a, b),), "a source is no code"
    assert runs(a, plain, b, c, transfer, d) == ((a,), (b, c), (d,))
    assert runs(a, b, c, waits=(b,)) == ((a,), (b, c))
    assert runs(a, b, c, sets=(b,)) == ((a, b), (c,))
    assert runs() == ()


def test_parameters_of_another_dtype_are_a_run_of_their_own() -> None:
    graph = mlp(torch.float64)
    assert graph.program is not None
    runs = update_runs(graph, graph.program, updates_of(graph), (), ())
    assert sorted(map(len, runs)) == [2, 4]


@pytest.mark.parametrize("is_traced", [False, True])
def test_one_call_a_run_and_every_update_done(is_traced: bool) -> None:
    graph, host = mlp(), core_host(2)
    assert graph.program is not None
    none = np.zeros(0, dtype=np.int32)
    plan = Plan(np.zeros(graph.num_ops, dtype=np.int32), none, none, np.arange(graph.num_ops, dtype=np.int32))
    code = generate(graph, host, plan, is_traced=is_traced)
    (run,), _ = code.update_runs
    assert list(run) == updates_of(graph)
    assert code.sources[0].count(f"u{run[-1]}(") == 1
    assert sum(code.sources[0].count(f"u{op}(") for op in run) == 1
    crew, residents = Crew(host.devices), Residents(graph, host)
    try:
        step = PlacedStep(graph, host, plan, residents, crew, is_traced=is_traced)
        parameters = [op for op, source in graph.program.sources.items() if source.kind == "parameter"]
        before = {op: residents.tensor(op, 0).clone() for op in parameters}
        step.run()
        assert all(not torch.equal(residents.tensor(op, 0), value) for op, value in before.items())
        if is_traced:
            timeline = step.timeline()
            starts, ends = timeline.op_start_s[list(run)], timeline.op_end_s[list(run)]
            assert np.allclose(starts[1:], ends[:-1])
            shares = (ends - starts) / (ends[-1] - starts[0])
            assert np.allclose(shares, graph.bytes_moved[list(run)] / graph.bytes_moved[list(run)].sum())
    finally:
        crew.stop()
