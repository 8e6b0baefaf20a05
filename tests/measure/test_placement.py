"""Placement files and plan checks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from core_hosts import core_host, process_host
from micrographs import op_graph
from random_problems import problem_of

from rlplace.errors import FileProblem, FingerprintMismatch, InvalidValue, UnknownName
from rlplace.graphs import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.placement import PlacedCut, Placement, check_plan, load_placement, save_placement
from rlplace.measure.problem import Plan, Problem


def two_devices(name: str = "two") -> Host:
    devices = tuple(Device(f"d{k}", name, "simulated", 1 << 30) for k in range(2))
    return Host(
        name, devices, links=(Link("wire", 1e9),), routes=(Route("d0", "d1", ("wire",)), Route("d1", "d0", ("wire",)))
    )


def chain_problem(host: Host) -> Problem:
    graph = op_graph([[], [0], [1]], 10, targets=["input", "aten.a", "aten.b"])
    return problem_of(graph, host)


def test_neither_nothing_nor_an_array_of_devices_is_a_plan() -> None:
    with pytest.raises(InvalidValue, match=r"placement: plan is None, expected a Plan\. A search that found nothing"):
        Placement.of(chain_problem(two_devices()), None)
    with pytest.raises(InvalidValue, match=r"plan is 'of type ndarray'.*Simulator\(problem\)\.plan\(devices\)"):
        Placement.of(chain_problem(two_devices()), np.zeros(3, dtype=np.int32))  # type: ignore[arg-type]


def split_plan() -> Plan:
    # input and a on d0, b on d1: tensor 1 is sent to d1 as item 3
    return Plan(np.array([0, 0, 1]), np.array([1]), np.array([1]), np.array([0, 1, 3, 2]))


def test_round_trip(tmp_path: Path) -> None:
    placement = Placement.of(chain_problem(two_devices()), split_plan(), "by hand")
    save_placement(placement, tmp_path / "placement.json")
    loaded = load_placement(tmp_path / "placement.json")
    assert loaded.to_dict() == placement.to_dict()
    assert loaded.device_names == ("d0", "d1")
    assert [path.name for path in tmp_path.iterdir()] == ["placement.json"]


def test_a_file_says_how_the_batch_was_cut_and_an_older_one_does_not(tmp_path: Path) -> None:
    problem = dataclasses.replace(chain_problem(two_devices()), op_order="tilt")
    graph = dataclasses.replace(problem.graph, micro_batch=np.array([0, 1, 2], dtype=np.int32))
    placement = Placement.of(dataclasses.replace(problem, graph=graph), split_plan())
    save_placement(placement, tmp_path / "placement.json")
    assert load_placement(tmp_path / "placement.json").cut == PlacedCut(3, "", "tilt")
    data = placement.to_dict()
    del data["micro_batches"]
    older = Placement.from_dict(data, "older.json")
    assert older.cut is None
    assert older.to_dict() == data
    for change, field in (({"count": 0}, "count"), ({"loss": "odd"}, "loss"), ({"op_order": "odd"}, "op_order")):
        with pytest.raises(InvalidValue, match=rf"f\.json: micro_batches\.{field} is"):
            Placement.from_dict(data | {"micro_batches": {"count": 2} | change}, "f.json")


@pytest.mark.parametrize(
    "change",
    [{"devices": ["d0", "d1\x1b[2J"]}, {"devices": ["d0", ""]}, {"method": "a\nb"}, {"graph_fingerprint": "\u202e"}],
)
def test_names_in_a_file_are_printable(change: dict[str, object]) -> None:
    data = Placement.of(chain_problem(two_devices()), split_plan()).to_dict()
    with pytest.raises(InvalidValue, match=rf"f\.json: {next(iter(change))}") as refused:
        Placement.from_dict(data | change, "f.json")
    assert str(refused.value).isprintable()


def test_another_graph_or_host_is_refused_with_both_fingerprints() -> None:
    problem = chain_problem(two_devices())
    placement = Placement.of(problem, split_plan())
    assert placement.require(problem.graph, problem.host) is placement
    other_graph = op_graph([[], [0], [0]], 10, targets=["input", "aten.a", "aten.b"])
    with pytest.raises(FingerprintMismatch) as caught:
        placement.require(other_graph, problem.host)
    assert problem.graph.fingerprint in str(caught.value)
    assert other_graph.fingerprint in str(caught.value)
    other_host = two_devices("other")
    with pytest.raises(FingerprintMismatch) as caught:
        placement.require(problem.graph, other_host)
    assert caught.value.kind == "host"
    assert other_host.fingerprint in str(caught.value)


@pytest.mark.parametrize(
    ("yours", "words"),
    [
        (core_host(2), "as processes, and yours are threads: use the host `procs:2` (`--host procs:2`)"),
        (process_host(2), "as threads, and yours are processes: use the host `cores:2` (`--host cores:2`)"),
        (core_host(3), "Use the host that it was made for"),
    ],
)
def test_threads_and_processes_are_told_apart(yours: Host, words: str) -> None:
    made = process_host(2) if yours == core_host(2) else core_host(2)
    problem = chain_problem(made)
    with pytest.raises(FingerprintMismatch) as caught:
        Placement.of(problem, split_plan()).require(problem.graph, yours)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error", "field"),
    [
        ({"schema": 2}, InvalidValue, "schema"),
        ({"op_device": [0, 0, 7]}, InvalidValue, "op_device"),
        ({"op_device": [0, 0, 1.5]}, InvalidValue, "op_device"),
        ({"sequence": [0, 1, 2]}, InvalidValue, "sequence"),
        ({"sequence": [0, 1, 2, 2]}, InvalidValue, "sequence"),
        ({"transfers": [[1]]}, InvalidValue, "transfers"),
        ({"devices": []}, InvalidValue, "devices"),
        ({"host_fingerprint": 5}, InvalidValue, "host_fingerprint"),
        ({"sequense": []}, UnknownName, "sequence"),
    ],
)
def test_malformed_files_name_the_field(
    tmp_path: Path, change: dict[str, object], error: type[Exception], field: str
) -> None:
    data = Placement.of(chain_problem(two_devices()), split_plan()).to_dict() | change
    path = tmp_path / "placement.json"
    path.write_text(json.dumps(data))
    with pytest.raises(error, match=field):
        load_placement(path)


def test_missing_and_broken_files_are_file_problems(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="no such file"):
        load_placement(tmp_path / "none.json")
    broken = tmp_path / "broken.json"
    broken.write_text('{"schema": 1,')
    with pytest.raises(FileProblem, match=r"not valid JSON.*Expected a placement"):
        load_placement(broken)


def test_a_plan_must_be_complete_and_in_order() -> None:
    graph = chain_problem(two_devices()).graph
    plan = split_plan()
    assert check_plan(graph, 2, plan) is plan
    none = np.zeros(0)
    with pytest.raises(InvalidValue, match="transfers"):  # the transfer that the devices call for is missing
        check_plan(graph, 2, Plan(np.array([0, 0, 1]), none, none, np.array([0, 1, 2])))
    with pytest.raises(InvalidValue, match="transfers"):  # to the wrong device
        check_plan(graph, 2, Plan(np.array([0, 0, 1]), np.array([1]), np.array([0]), np.array([0, 1, 3, 2])))
    with pytest.raises(InvalidValue, match="out of order"):  # b before its copy
        check_plan(graph, 2, Plan(np.array([0, 0, 1]), np.array([1]), np.array([1]), np.array([0, 1, 2, 3])))
    with pytest.raises(InvalidValue, match="out of order"):  # sent before it is made
        check_plan(graph, 2, Plan(np.array([0, 0, 1]), np.array([1]), np.array([1]), np.array([0, 3, 1, 2])))
    with pytest.raises(InvalidValue, match="op_device"):
        check_plan(graph, 2, Plan(np.array([0, 0]), none, none, np.array([0, 1])))


@pytest.mark.parametrize(
    ("tensor", "destination", "last", "expected"),
    [
        (0, 3, 2, r"transfers is 3, expected devices in 0\.\.1"),  # the same key as tensor 1 to device 1
        (2, -1, 2, r"transfers is -1, expected devices in 0\.\.1"),
        (-1, 5, 2, r"transfers is -1, expected tensors in 0\.\.2"),
        (1, 1, -2, "expected each of 4 items once"),
    ],
)
def test_numbers_of_a_plan_that_stand_for_others_are_refused(
    tensor: int, destination: int, last: int, expected: str
) -> None:
    plan = Plan(np.array([0, 0, 1]), np.array([tensor]), np.array([destination]), np.array([0, 1, 3, last]))
    with pytest.raises(InvalidValue, match=expected):
        check_plan(chain_problem(two_devices()).graph, 2, plan)


def test_a_placement_names_as_many_devices_as_its_host_has() -> None:
    problem = chain_problem(two_devices())
    placement = dataclasses.replace(Placement.of(problem, split_plan()), device_names=("d0", "d1", "d2"))
    with pytest.raises(InvalidValue, match="devices is '3 names', expected those of the host's 2"):
        placement.require(problem.graph, problem.host)


def test_a_placement_must_keep_what_lives_together_together() -> None:
    graph = op_graph([[], [0], [0]], 10, targets=["parameter", "aten.a", "aten.b"], colocation=[0, -1, 0])
    problem = Problem(graph, two_devices(), Costs(np.ones((3, 2)), "estimated"), Grouping(np.array([0, 1, 0])))
    assert problem.check_placement(np.array([1, 0, 1])).tolist() == [1, 0, 1]
    with pytest.raises(InvalidValue, match="op2"):
        problem.check_placement(np.array([1, 0, 0]))
    with pytest.raises(InvalidValue, match="length"):
        problem.check_placement(np.array([1, 0]))
    with pytest.raises(InvalidValue, match="device is 7"):
        problem.check_placement(np.array([7, 0, 7]))
