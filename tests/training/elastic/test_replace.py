"""A run's step on another host: what it starts from, and what a search makes of that."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from elastic_hosts import simulated_host, without

from rlplace.errors import FingerprintMismatch, InvalidValue, UnknownName
from rlplace.graphs.formats import save_graph
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.graphs.synthetic import synthetic
from rlplace.measure.costs.costs import estimate_costs
from rlplace.measure.host_model import LearnedHost, Prior
from rlplace.measure.host_model.learned_host import LearnedFactor
from rlplace.measure.hosts.host import Host
from rlplace.measure.placement import Placement
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.methods import find
from rlplace.search.task import Budget
from rlplace.session.prepare import Prepared
from rlplace.session.session import Session
from rlplace.session.session_records import Request
from rlplace.session.setup import WHOLE
from rlplace.training.config import TrainConfig
from rlplace.training.elastic.placed_again import KnownRun, replaced, search_again
from rlplace.workloads import parse_workload

GRAPH = synthetic("fork_join", seed=4, stages=6, width=4, flops=1e9)
FOUR = simulated_host(*["fast"] * 4, name="four")


def say(_: str) -> None:
    """Nobody listens."""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> KnownRun:
    """A run on four devices that came to a good placement."""
    folder = tmp_path_factory.mktemp("run")
    save_graph(GRAPH, folder / "graph.json")
    problem = Problem.estimate(GRAPH, FOUR, num_groups=64)
    simulator = Simulator(problem, threads=1)
    devices = find(problem, "portfolio", simulator, Budget(2000)).devices
    session = Session.in_memory()
    request = Request(str(folder / "graph.json"), "four", FOUR.fingerprint, "small")
    session.keep(request=request, config=TrainConfig(num_groups=64))
    session.keep_problem(Prepared(problem, WHOLE))
    session.keep_placement(Placement.of(problem, simulator.plan(devices), "portfolio"))
    return KnownRun.of(session, parse_workload(request.workload))


def with_facts(known: KnownRun, **changes: str) -> KnownRun:
    """The run with other facts of its problem."""
    session = Session.in_memory()
    session.keep(request=known.session.request, problem=dataclasses.replace(known.session.facts, **changes))
    return dataclasses.replace(known, session=session)


def step_s(problem: Problem, devices: np.ndarray | None) -> float:
    assert devices is not None
    return float(Simulator(problem, threads=1).step_times(devices[None])[0])


def test_on_the_same_host_nothing_changes(known: KnownRun) -> None:
    made = replaced(known, FOUR, say=say)
    assert made.known.placement is not None
    assert (made.start == made.known.placement.devices).all()
    assert step_s(made.believed, made.start) == pytest.approx(made.before_s)


@pytest.mark.parametrize(
    "host",
    [without(FOUR, "gpu:2"), simulated_host(*["fast"] * 8), simulated_host("fast", "slow", "fast", "slow")],
    ids=["fewer", "more", "other"],
)
def test_a_search_goes_on_from_the_carried_placement(known: KnownRun, host: Host) -> None:
    made = replaced(known, host, say=say)
    carried_s = step_s(made.believed, made.start)
    found = search_again(made, Budget(400))
    assert found.evaluations <= 400
    assert found.step_time_s < carried_s
    again = search_again(made, Budget(400))
    assert (again.devices == found.devices).all()


def test_the_least_that_is_found_is_the_carried_placement(known: KnownRun) -> None:
    made = replaced(known, FOUR, say=say)
    assert search_again(made, Budget(2), method="random").step_time_s <= made.before_s


def test_a_run_without_a_placement_is_searched_from_nothing(known: KnownRun) -> None:
    made = replaced(dataclasses.replace(known, placement=None), without(FOUR, "gpu:0"), say=say)
    assert made.start is None
    assert np.isnan(made.before_s)
    assert search_again(made, Budget(100)).devices is not None


def test_what_was_learned_is_believed(known: KnownRun) -> None:
    slow = LearnedFactor("device", "gpu:1", np.log(3.0), 0.01, 0.5)
    measured = dataclasses.replace(known.costs, source="profiled")
    learned = LearnedHost("four", FOUR.fingerprint, "profiled", Prior(overhead_s=0.0), (slow,), ())
    made = replaced(dataclasses.replace(known, costs=measured, learned=learned), without(FOUR, "gpu:2"), say=say)
    times_s = made.believed.costs.op_time_s[~GRAPH.is_source]
    assert (times_s[:, 1] > 2 * times_s[:, 0]).all()
    assert (made.problem.costs.op_time_s == measured.op_time_s[:, :3]).all(), "a run on it learns afresh"


def test_another_step_is_refused(known: KnownRun) -> None:
    with pytest.raises(FingerprintMismatch):
        replaced(with_facts(known, graph_fingerprint="0" * 16), FOUR, say=say)


def test_a_graph_file_runs_on_no_machine(known: KnownRun) -> None:
    with pytest.raises(InvalidValue, match="simulated, not measured"):
        replaced(known, Host.detect("cores"), say=say)


def test_pins_to_a_device_that_is_gone_are_to_be_given_again(known: KnownRun) -> None:
    name = GRAPH.names[int(np.flatnonzero(~GRAPH.is_source)[0])]
    config = dataclasses.replace(known.config, constraints=Constraints.parse(pins=[f"{name}=gpu:3"]))
    pinned = dataclasses.replace(known, config=config)
    with pytest.raises(UnknownName) as refused:
        replaced(pinned, without(FOUR, "gpu:3"), say=say)
    assert "--pin" in refused.value.__notes__[0]
    made = replaced(pinned, without(FOUR, "gpu:3"), say=say, constraints=Constraints())
    assert made.problem.host.num_devices == 3
    kept = replaced(pinned, without(FOUR, "gpu:2"), say=say)
    found = search_again(kept, Budget(50))
    assert found.devices is not None
    assert kept.problem.host.devices[found.devices[GRAPH.names.index(name)]].name == "gpu:3"


def test_the_order_of_ops_stays(known: KnownRun) -> None:
    made = replaced(with_facts(known, op_order="tilt"), FOUR, say=say)
    assert made.problem.op_order == "tilt"
    assert (made.problem.costs.op_time_s == estimate_costs(GRAPH, FOUR).op_time_s).all()
