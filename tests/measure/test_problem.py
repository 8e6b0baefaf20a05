"""`Problem`: groups by rule under constraints, draws that respect them, wrong placements, routes, one-device plans."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from core_hosts import core_host
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import op_graph
from random_problems import plain_host, random_graph
from small_models import step_graph
from torch import nn

from rlplace.errors import FingerprintMismatch, InvalidValue, UnknownName
from rlplace.graphs import capture
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.graphs.grouping.groups import LATENCY_S, S_PER_BYTE, Grouping, group_ops
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.hosts.host_file import save_host
from rlplace.measure.hosts.resolve import resolve_host
from rlplace.measure.placement import Placement
from rlplace.measure.prediction_error import draw_mix
from rlplace.measure.problem import (
    Problem,
    capacity_bytes,
    check_allowed,
    check_range,
    check_together,
    mean_transfer,
    over_routes,
    single_device_peak_bytes,
    single_device_plan,
)
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.rules import baselines


def barred_problem() -> Problem:
    """Three groups of one op on three devices; the first may be on 0 and 2, the second on 1, the third anywhere."""
    allowed = np.array([[True, False, True], [False, True, False], [True, True, True]])
    return Problem(
        op_graph([[], [0], [1]]), plain_host(3), Costs(np.ones((3, 3)), "estimated"), Grouping(np.arange(3)), allowed
    )


def test_it_prints_as_one_line_and_is_pickled_without_its_program() -> None:
    problem = barred_problem()
    graph = "OpGraph(3 ops, 2 edges)"
    assert repr(problem.graph) == graph
    assert repr(problem) == f"Problem({graph}, 3 groups on {problem.host.name} (3 devices), estimated costs)"
    assert problem.group_allowed.any()  # worked out, and not pickled
    found = pickle.loads(pickle.dumps(problem))  # noqa: S301 - our own bytes
    assert found.graph.fingerprint == problem.graph.fingerprint
    assert found.host == problem.host
    assert np.array_equal(found.costs.op_time_s, problem.costs.op_time_s)
    assert np.array_equal(found.allowed, problem.allowed)
    assert not found.allowed.flags.writeable
    assert (found.grouping.num_groups, found.op_order) == (3, problem.op_order)


def test_the_next_allowed_device_is_taken() -> None:
    rows = np.array([[0, 0, 0], [1, 1, 1], [2, 2, 2]])
    assert barred_problem().nearest_groups(rows).tolist() == [[0, 1, 0], [2, 1, 1], [2, 1, 2]]
    assert barred_problem().nearest_groups(rows[1]).tolist() == [2, 1, 1]


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int32])
def test_groups_of_any_integers_are_taken_as_int32(dtype: type[np.integer]) -> None:
    checked = barred_problem().check_groups(np.array([[1, 1, 1], [2, 0, 2]], dtype=dtype))
    assert checked.dtype == np.int32
    assert checked.tolist() == [[1, 1, 1], [2, 0, 2]]  # barred or not: what that means is the caller's


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ([0, 1], r"placement: length is \(2,\), expected 3 devices, one for each"),
        ([0, 1, 3], r"placement: device is 3, expected 0\.\.2"),
        ([0, -1, 0], r"placement: device is -1, expected 0\.\.2"),
        ([0.0, 1.0, 0.5], "placement: dtype is 'float64', expected integers"),
        ([0.0, 1.0, np.nan], "placement: dtype is 'float64', expected integers"),
    ],
)
def test_what_is_no_placement_is_refused(devices: list[float], words: str) -> None:
    problem = barred_problem()
    with pytest.raises(InvalidValue, match=words):
        problem.check_placement(np.array(devices))
    with pytest.raises(InvalidValue, match=words.replace("placement:", "placement of groups:")):
        problem.check_groups(np.array(devices))


def test_draws_are_uniform_over_allowed_devices() -> None:
    drawn = barred_problem().draw_groups(np.random.default_rng(0), 6000)
    shares = [np.bincount(drawn[:, group], minlength=3) / 6000 for group in range(3)]
    assert np.allclose(shares, [[1 / 2, 0, 1 / 2], [0, 1, 0], [1 / 3, 1 / 3, 1 / 3]], atol=0.03)
    assert drawn.dtype == np.int32


def test_the_mix_that_calibration_draws_is_allowed() -> None:
    problem = barred_problem()
    drawn, _ = draw_mix(problem, np.array([0, 1, 2], dtype=np.int32), 40, np.random.default_rng(0))
    assert problem.group_allowed[np.arange(3), drawn].all()


def test_constraints_bar_devices_and_tie_ops() -> None:
    graph = replace(op_graph([[], [0], [1], [2]], 0), modules=("a", "a", "b", "c"))
    constraints = Constraints.parse(pins=["a=d1"], exclusions=["c=d0"], together=["a,c"])
    problem = Problem.grouped(
        graph, plain_host(3), Costs(np.ones((4, 3)), "estimated"), 256, "module", constraints=constraints
    )
    assert problem.grouping.op_group.tolist() == [0, 0, 1, 0]
    assert problem.group_allowed.tolist() == [[False, True, False], [True, True, True]]
    assert problem.check_placement(np.array([1, 1, 0, 1])).tolist() == [1, 1, 0, 1]
    with pytest.raises(InvalidValue, match="op 'op3' away from 'op0'"):
        problem.check_placement(np.array([1, 1, 0, 2]))
    with pytest.raises(InvalidValue, match="expected one where it may run: d1"):
        problem.check_placement(np.array([0, 0, 0, 0]))
    assert graph.colocation.tolist() == [-1] * 4  # the caller's graph is as it was
    assert problem.graph.fingerprint == graph.fingerprint


def test_a_mistyped_rule_is_refused_before_anything_is_profiled() -> None:
    with pytest.raises(UnknownName, match="grouping rule"):
        Problem.profile(op_graph([[]]), plain_host(2), grouping="modle")
    with pytest.raises(InvalidValue, match="pin is 'nothing'"):
        Problem.profile(op_graph([[]]), plain_host(2), constraints=Constraints.parse(pins=["nothing=d0"]))


@pytest.mark.parametrize("way", ["preset", "file", "host", "in part"])
def test_what_is_simulated_is_not_profiled(way: str, tmp_path: Path) -> None:
    host = resolve_host("2xK80") if way == "preset" else core_host(2)
    if way != "preset":
        first, *others = (replace(device, backend="simulated") for device in host.devices)
        host = replace(host, devices=(first, *(host.devices[1:] if way == "in part" else others)))
    if way == "file":
        save_host(host, tmp_path / "host.json")
        host = resolve_host(str(tmp_path / "host.json"))
    graph = capture(nn.Linear(4, 4), torch.ones(2, 4))
    with pytest.raises(InvalidValue, match=r"profile: host is .*estimate its costs with `Problem\.estimate`"):
        Problem.profile(graph, host, num_groups=1, profiler=lambda *_: pytest.fail("it was profiled"))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from(["heavy-edge", "colocation", "module", "none"]))
def test_nothing_that_is_drawn_is_where_it_may_not_be(seed: int, rule: str) -> None:
    rng = np.random.default_rng(seed)
    graph = replace(random_graph(rng, 24), modules=tuple(rng.choice(["a", "a.b", "c"], 24)))
    graph = replace(graph, modules=("a", "a.b", "c", *graph.modules[3:]))
    constraints = Constraints.parse(pins=["a.b=d[12]"], exclusions=["c=d0", "a=d1"], together=["op5,op6"])
    costs = Costs(rng.random((24, 4)), "estimated")
    problem = Problem.grouped(graph, plain_host(4), costs, 6, rule, constraints=constraints)
    drawn = problem.draw_groups(rng, 20)
    devices = problem.check_placement(problem.grouping.expand(drawn))
    inside = [k for k, module in enumerate(graph.modules) if module == "a.b"]
    assert set(devices[:, inside].flatten().tolist()) <= {2}
    assert not np.any(devices[:, [k for k, module in enumerate(graph.modules) if module == "c"]] == 0)
    assert np.array_equal(devices[:, 5], devices[:, 6])


def test_what_modules_are_tied_to_is_allowed_together() -> None:
    graph = replace(op_graph([[], [0], [1]]), modules=("a", "a", "b"))
    costs = Costs(np.ones((3, 3)), "estimated")
    host = plain_host(3)
    first = host.devices[0].name
    constraints = Constraints(exclusions=((graph.names[1], first),))
    problem = Problem.grouped(graph, host, costs, grouping="device-map", constraints=constraints)
    assert problem.grouping.op_group.tolist() == [0, 0, 1]
    assert problem.graph.colocation.tolist() == [0, 0, 1], "every method keeps to it"
    assert problem.allowed[:, 0].tolist() == [False, False, True]
    with pytest.raises(InvalidValue, match="one device for ops that live together"):
        problem.check_placement(np.array([1, 2, 0], dtype=np.int32))


def test_modules_are_placed_for_whole_batches() -> None:
    graph = replace(op_graph([[], [0], [0]]), modules=("a", "b", "c"), micro_batch=np.array([-1, 0, 1], dtype=np.int32))
    with pytest.raises(InvalidValue, match="A device map places modules for whole batches"):
        Problem.grouped(graph, plain_host(2), Costs(np.ones((3, 2)), "estimated"), grouping="device-map")


@pytest.mark.parametrize("progress", [True, False, None])
def test_profiling_is_told_as_asked(progress: bool | None, capsys: pytest.CaptureFixture[str]) -> None:
    graph = capture(nn.Linear(4, 4), torch.ones(2, 4))
    Problem.profile(graph, Host.detect("cores"), num_groups=1, progress=progress)
    said = capsys.readouterr()
    assert said.out == ""
    assert bool(said.err) == bool(progress)  # off a terminal only if it is asked for
    if progress:
        assert said.err.startswith("profiling ")


def test_profiling_is_told_to_whoever_listens() -> None:
    told: list[str] = []
    Problem.profile(
        capture(nn.Linear(4, 4), torch.ones(2, 4)), Host.detect("cores"), num_groups=1, progress=told.append
    )
    assert told[0].startswith("profiling ")


def test_a_word_stands_for_a_host_wherever_one_is_taken() -> None:
    graph = capture(nn.Linear(4, 4), torch.ones(2, 4))
    problem = Problem.estimate(graph, "2xK80", num_groups=1)
    assert problem.host == resolve_host("2xK80")
    assert Problem.grouped(graph, "2xK80", problem.costs, 1).host == problem.host
    assert Problem.profile(graph, "cores:1", num_groups=1).host.fingerprint == resolve_host("cores:1").fingerprint
    with pytest.raises(UnknownName, match="2xK80"):
        Problem.estimate(graph, "2xK8")
    with pytest.raises(InvalidValue, match="host is 3"):
        Problem.estimate(graph, 3)  # type: ignore[arg-type]
    plan = Simulator(problem).plan(baselines.single(problem, 0))
    Placement.of(problem, plan).require(problem.graph, "2xK80")
    with pytest.raises(FingerprintMismatch, match="another host"):
        Placement.of(problem, plan).require(problem.graph, "cores:1")


GRAPH, HOST = op_graph([[], [0], [1]]), plain_host(3)


def test_what_is_in_range_comes_back_as_an_array() -> None:
    assert check_range([[0, 2], [1, 1]], 2, 3, one="op", where="here").tolist() == [[0, 2], [1, 1]]  # type: ignore[arg-type]
    assert check_range(np.zeros((0, 2), dtype=np.int64), 2, 3, one="op", where="here").shape == (0, 2)


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (np.zeros((4, 3), dtype=np.int32), r"here: length is \(4, 3\), expected 2 devices, one for each op"),
        (np.array([0.0, 1.0]), "here: dtype is 'float64', expected integers"),
        (np.array([0, 3]), r"here: device is 3, expected 0\.\.2"),
        (np.array([-1, 3]), r"here: device is -1, expected 0\.\.2"),
    ],
)
def test_what_is_out_of_range_is_refused(devices: np.ndarray, words: str) -> None:
    with pytest.raises(InvalidValue, match=words):
        check_range(devices, 2, 3, one="op", where="here")


def test_the_first_op_that_is_parted_from_its_class_is_named() -> None:
    members, leaders = np.array([1, 2]), np.array([0, 0])
    check_together(np.array([[0, 0, 0], [2, 2, 2]]), GRAPH, members, leaders)
    with pytest.raises(InvalidValue, match="op 'op2' away from 'op0'"):
        check_together(np.array([[0, 0, 0], [2, 2, 1]]), GRAPH, members, leaders)


def test_the_first_op_that_is_barred_is_named_with_where_it_may_be() -> None:
    allowed = np.array([[True, True, True], [True, False, True], [True, True, True]])
    check_allowed(np.array([[1, 0, 1], [1, 2, 1]]), GRAPH, HOST, allowed)
    with pytest.raises(InvalidValue, match=r"op1.* on .*d1.*, expected one where it may run: d0, d2"):
        check_allowed(np.array([[1, 0, 1], [1, 1, 1]]), GRAPH, HOST, allowed)


def test_a_route_has_the_longest_latency_and_the_lowest_rate_of_its_links() -> None:
    devices = tuple(Device(name, "Some device", "simulated", memory_bytes=1) for name in "abc")
    links = (Link("up", 10.0, 0.25), Link("down", 50.0, 0.5))
    names = {"ab": ("up", "down"), "ba": ("up",), "bc": ("down",), "cb": ("up",), "ac": ("down",), "ca": ()}
    host = Host("star", devices, links, tuple(Route(*pair, over) for pair, over in names.items()))
    assert over_routes(host, "latency_s", max, 0.0).tolist() == [[0.0, 0.5, 0.5], [0.25, 0.0, 0.5], [0.0, 0.25, 0.0]]
    assert (1.0 / over_routes(host, "bandwidth_bytes_per_s", min, np.inf)).tolist() == [
        [0.0, 0.1, 0.02],
        [0.1, 0.0, 0.02],
        [0.0, 0.1, 0.0],
    ]


def test_a_transfer_takes_what_the_routes_take_on_average() -> None:
    host = plain_host(2, bandwidth_bytes_per_s=50.0, latency_s=0.5)
    assert mean_transfer(host) == (0.5, 0.02)
    handed_over = replace(host, routes=tuple(Route(r.source, r.destination, ()) for r in host.routes))
    assert mean_transfer(handed_over) == (LATENCY_S, S_PER_BYTE)


def test_everything_on_one_device_in_order() -> None:
    graph = capture(nn.Linear(4, 2), torch.ones(3, 4))
    plan = single_device_plan(graph, 1)
    assert plan.devices.tolist() == [1] * 4
    assert plan.sequence.tolist() == [0, 1, 2, 3]
    assert plan.num_transfers == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm_cell", "batch_norm_train", "transformer_layer", "writes", "tied", "targets"])
@pytest.mark.parametrize("granularity", [1, 512])
def test_the_peak_is_the_simulators(name: str, granularity: int) -> None:
    graph = step_graph(name)
    host = core_host(2)
    facts = {"memory_granularity_bytes": granularity, "context_bytes": 1000, "memory_pool": ""}
    host = dataclasses.replace(host, devices=tuple(dataclasses.replace(each, **facts) for each in host.devices))
    costs = Costs(np.where(graph.is_source, 0.0, 1.0)[:, None].repeat(2, axis=1), "estimated")
    simulator = Simulator(Problem(graph, host, costs, group_ops(graph, costs.op_time_s[:, 0], 4)))
    peaks = simulator.retime(single_device_plan(graph, 1)).peak_bytes
    assert single_device_peak_bytes(graph, host, 1) == peaks[1]


def test_a_graph_without_ops_has_no_peak() -> None:
    assert single_device_peak_bytes(op_graph([]), core_host(1), 0) == 0


def test_contexts_of_others_in_the_pool_take_their_share() -> None:
    host = core_host(3)
    first, second, third = host.devices
    devices = (
        dataclasses.replace(first, memory_bytes=1000, context_bytes=1),
        dataclasses.replace(second, memory_bytes=900, context_bytes=20),
        dataclasses.replace(third, memory_bytes=10, context_bytes=5, memory_pool=""),
    )
    host = dataclasses.replace(host, devices=devices)
    assert [capacity_bytes(host, device) for device in range(3)] == [880, 899, 10]
