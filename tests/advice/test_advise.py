"""Advice on hand-made problems where the verdict is known, and on one that is run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from core_hosts import core_host
from micrographs import op_graph
from random_problems import plain_host

import rlplace
from rlplace.advice.advising import advise
from rlplace.advice.verdict import Verdict
from rlplace.errors import InvalidValue
from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.opgraph import BACKWARD, FORWARD, OpGraph
from rlplace.measure import Simulator, resolve_host
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Problem
from rlplace.search import Budget, find
from rlplace.search.rules.baselines import single
from rlplace.training.outputs import explain_run
from rlplace.workloads import without_memory


def problem_of(graph: OpGraph, host: Host, op_s: float = 1.0) -> Problem:
    costs = np.full((graph.num_ops, host.num_devices), op_s)
    return Problem(graph, host, Costs(costs, "estimated"), Grouping(np.arange(graph.num_ops)))


def asked(problem: Problem, **options: object) -> Verdict:
    return advise(problem, seconds=math.inf, evaluations=200, **options)  # type: ignore[arg-type]


def branches(width: int, num_bytes: int = 1) -> OpGraph:
    """One op, `width` chains of three, and one op that joins them: what several devices can share."""
    reads: list[list[int]] = [[]]
    ends = []
    for _ in range(width):
        reads += [[0], [len(reads)], [len(reads) + 1]]
        ends.append(len(reads) - 1)
    return op_graph([*reads, ends], num_bytes)


def chain(length: int) -> OpGraph:
    return op_graph([[], *([op] for op in range(length - 1))])


def no_split(problem: Problem) -> Problem:
    """The same with links so slow that summing gradients takes for ever; the graph holds none but says so."""
    graph = replace(problem.graph, gradient_bytes=np.full(problem.graph.num_ops, 10**6))
    return replace(problem, graph=graph)


def wide() -> OpGraph:
    """A step of one sample whose time is the reading and writing of two large weights."""
    with without_memory():
        layers = torch.nn.Linear(4096, 16384), torch.nn.GELU(), torch.nn.Linear(16384, 4096)
        model, x = torch.nn.Sequential(*layers), torch.randn(1, 4096)
        return rlplace.capture(model, x, lambda output: output.square().mean(), "adam")


def test_one_device_has_nothing_to_split() -> None:
    two_gpus = resolve_host("2xK80")
    one_gpu = Host("one", two_gpus.devices[:1])
    one, two = (asked(Problem.estimate(wide(), host)) for host in (one_gpu, two_gpus))
    assert (one.split_of_ops, one.figures.work_s) == ("", None)
    assert two.split_of_ops
    assert asked(problem_of(chain(6), plain_host(2))).figures.work_s is None  # a graph without its program


def test_parallel_branches_are_worth_placing() -> None:
    found = asked(no_split(problem_of(branches(2), plain_host(2))))
    assert found.verdict == "place"
    # 2 + 6 ops on one device; on two 1 + 3 + 1 and a copy of 1 byte at 100 bytes/s, the join being where it went
    assert found.figures.single_s == 8.0
    assert found.figures.placed_s == pytest.approx(5.01)
    assert found.ratio_found == pytest.approx(5.01 / 8.0)


def test_a_chain_stays_on_one_device() -> None:
    found = asked(no_split(problem_of(chain(6), plain_host(2))))
    assert (found.verdict, found.ratio_found, found.ratio_least) == ("one-device", 1.0, pytest.approx(1.0))
    assert "bound" in found.reason


def test_branches_whose_copies_cost_more_than_they_save_stay_on_one_device() -> None:
    assert asked(no_split(problem_of(branches(2, num_bytes=10_000), plain_host(2)))).verdict == "one-device"


def test_a_chain_whose_batch_can_be_split_is_to_be_cut() -> None:
    graph = chain(6)
    found = asked(problem_of(replace(graph, phases=np.array([0, 0, 0, BACKWARD, BACKWARD, BACKWARD])), plain_host(2)))
    assert (found.verdict, found.figures.split_s) == ("cut-batch", pytest.approx(3.0))
    assert found.ratio_least == pytest.approx(0.5)


def test_micro_batches_are_tried_and_recommended() -> None:
    whole = problem_of(chain(6), plain_host(2), op_s=2.0)
    halves = op_graph([[], [0], [1], [], [3], [4]])
    cut = problem_of(replace(halves, micro_batch=np.array([0, 0, 0, 1, 1, 1])), plain_host(2), op_s=2.0)
    said: list[str] = []
    found = asked(whole, cuts={2: lambda: cut}, say=said.append)
    assert (found.verdict, found.figures.cut_count, found.figures.counts) == ("cut-batch", 2, (1, 2))
    assert found.figures.cut_s == 6.0
    assert [line.split(":")[0] for line in said] == ["the whole batch", "2 micro-batches"]


def test_a_number_that_cannot_be_cut_is_left_out_and_said() -> None:
    def fails() -> Problem:
        raise InvalidValue("batch", 3, "a multiple of 2")

    said: list[str] = []
    found = asked(problem_of(chain(6), plain_host(2)), cuts={2: fails}, say=said.append)
    assert (found.verdict, found.figures.counts, found.figures.split_s) == ("one-device", (1,), None)
    assert said[-1] == "2 micro-batches: left out (batch is 3, expected a multiple of 2.)"


def small(host: Host, memory_bytes: int) -> Host:
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in host.devices)
    return replace(host, devices=devices)


def test_what_no_device_holds_is_placed_or_cut() -> None:
    graph = op_graph([[], [], [0, 1]], [100, 100, 1], targets=["parameter", "parameter", "aten.op"])
    two = replace(graph, input_offsets=np.array([0, 0, 0, 1]), input_tensors=np.array([1], dtype=np.int32))
    placed = asked(problem_of(two, small(plain_host(2), 150)))
    assert (placed.verdict, placed.figures.single_s, placed.ratio_found) == ("place", None, None)
    assert placed.figures.single_bytes == 201
    nothing = asked(problem_of(graph, small(plain_host(2), 150)))
    assert (nothing.verdict, nothing.figures.placed_s) == ("cut-batch", None)
    assert "none of" in nothing.reason


def awaited(count: int) -> OpGraph:
    """Micro-batches of a forward op, whose output of 10 bytes waits for the backward op, and that op.

    By rank all forward ops come first; the order `tilt` begins the next one before a backward; backward ops first hold
    one output at a time.
    """
    graph = op_graph([each for k in range(count) for each in ([], [2 * k])], [10, 1] * count)
    slices = np.repeat(np.arange(count), 2)
    return replace(graph, micro_batch=slices, phases=np.array([FORWARD, BACKWARD] * count))


@pytest.mark.parametrize(
    ("memory_bytes", "order"), [(31, "rank"), (30, "backward-first"), (21, "backward-first"), (11, "backward-first")]
)
def test_what_fits_in_another_order_of_ops_fits(memory_bytes: int, order: str) -> None:
    problem = problem_of(awaited(3), small(plain_host(1), memory_bytes))
    found = asked(problem)
    assert (found.verdict, found.figures.op_order) == ("one-device", order)
    assert (found.figures.single_s, found.figures.cut_s) == (6.0, 6.0)
    for method in ("single", "eft", "portfolio", "anneal"):
        result = find(problem, method, Simulator(problem), Budget(20))
        assert (result.step_time_s, result.op_order) == (6.0, order)
        if order != "rank":
            assert result.plan is not None
            assert Simulator(problem).retime(result.plan).peak_bytes == (11,)


def test_a_placement_in_another_order_is_searched_further_in_it() -> None:
    problem = problem_of(awaited(4), small(plain_host(2), 12))
    found = asked(problem)
    assert (found.verdict, found.figures.single_s, found.figures.cut_s) == ("place", 8.0, 4.0)
    assert found.next == "rlplace.train(dataclasses.replace(problem, op_order='backward-first'))"


def test_nothing_fits_only_after_all_orders() -> None:
    found = asked(problem_of(awaited(3), small(plain_host(1), 10)))
    assert (found.verdict, found.next) == ("cut-batch", "a smaller batch, then the same again")
    assert "in any order of ops" in found.reason


def kept(parameter_bytes: int, state_bytes: int) -> OpGraph:
    """A parameter and its update, with optimizer state."""
    graph = op_graph([[], [0]], [parameter_bytes, 0], targets=["parameter", "update.adam"])
    return replace(graph, state_bytes=np.array([0, state_bytes]))


@pytest.mark.parametrize(
    ("parameter_bytes", "state_bytes", "devices", "memory_bytes", "verdict"),
    [
        (40, 80, {}, 100, "more-memory"),
        (40, 60, {}, 100, "cut-batch"),  # together there is room, but not for both in one place
        (40, 80, {"memory_bytes": 100, "memory_pool": "ram"}, 100, "more-memory"),  # both devices have the same 100
        (40, 40, {"memory_bytes": 60, "context_bytes": 25}, 70, "more-memory"),
    ],
)
def test_state_that_alone_exceeds_all_memory_is_said(
    parameter_bytes: int, state_bytes: int, devices: dict[str, Any], memory_bytes: int, verdict: str
) -> None:
    host = plain_host(2)
    host = replace(host, devices=tuple(replace(each, **({"memory_bytes": 50} | devices)) for each in host.devices))
    found = asked(problem_of(kept(parameter_bytes, state_bytes), host))
    held = parameter_bytes + state_bytes
    assert (found.figures.state_bytes, found.figures.memory_bytes) == (held, memory_bytes)
    assert found.verdict == verdict
    assert ("optimizer" in found.next) == (verdict == "more-memory")
    assert f"{held} B" in found.reason


@pytest.mark.parametrize("count", [2, 3, 4])
def test_micro_batches_gain_over_the_whole_batch_on_one_device(count: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    x, host = torch.randn(12, 64), resolve_host("2xK80")

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    whole = Problem.estimate(rlplace.capture(model, x, loss, "sgd"), host)
    cut = Problem.estimate(rlplace.capture(model, x, loss, "sgd", micro_batches=count), host)
    times = [float(Simulator(each).step_times(single(each, 0)[None])[0]) for each in (whole, cut)]
    assert times[1] > count / 2 * times[0]  # of ops so small the launches count
    assert asked(cut).figures.single_s == times[0]
    plan = Simulator(cut).plan(single(cut, 0))
    rows = [{"method": "single", "status": "ok", "step_time_s": times[1], "spread_s": 0.0}]
    explained = explain_run(cut, plan, Simulator(cut).timeline(plan), rows, "single")
    assert explained.alternatives[0].step_time_s == times[0]
    assert explained.advice.rule in ("one-device", "memory")


def test_options_are_checked() -> None:
    problem = problem_of(chain(2), plain_host(2))
    with pytest.raises(InvalidValue, match="seconds is 0"):
        advise(problem, seconds=0)
    with pytest.raises(InvalidValue, match="evaluations is 0"):
        advise(problem, evaluations=0)


def test_a_step_of_this_machine_is_raced_beside_eager() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    graph = rlplace.capture(model, torch.randn(4, 8), lambda output: output.square().mean(), "sgd")
    host = core_host()
    costs = Costs(np.full((graph.num_ops, 2), 1e-5), "profiled")
    found = rlplace.advise(Problem.grouped(graph, host, costs, 8), seconds=2.0, evaluations=60)
    figures = found.figures
    assert figures.kind == "measured"
    assert found.over == "eager"
    for step_s in (figures.eager_s, figures.single_s, figures.placed_s):
        assert step_s is not None
        assert 0 < step_s < 10
    assert figures.counts == (1,)
    assert found.verdict in ("place", "one-device", "eager", "cut-batch")
