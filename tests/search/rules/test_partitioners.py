"""Graph partitioners: hand-made graphs with one best cut, and SCOTCH behind a program of our own."""

from __future__ import annotations

import stat
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from micrographs import op_graph
from random_problems import plain_host

from rlplace.errors import MissingExtra, RunnerError
from rlplace.graphs.grouping.groups import Grouping, run_metis
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.rules import baselines
from rlplace.search.rules.baselines import Undirected, balances, score_cuts, undirected
from rlplace.search.schedule.list_schedule import op_units
from rlplace.search.task import Task

HALVES = np.array([0.5, 0.5])


def two_cliques(*, speed: tuple[float, float] = (1.0, 1.0)) -> Problem:
    """Two sets of six ops that read each other's 100 bytes, joined by one byte."""
    reads, num_bytes = [], []
    for base in (0, 6):
        for k in range(6):
            reads.append(list(range(base, base + k)))
            num_bytes.append(100)
    reads[6] = [5]
    num_bytes[5] = 1
    costs = Costs(np.tile(speed, (12, 1)), "estimated")
    return Problem(op_graph(reads, num_bytes), plain_host(2, 1e4), costs, Grouping(np.arange(12)))


def gmap(folder: Path, body: str) -> Path:
    """A stand-in for SCOTCH's program: Python that has `source`, `target` and `mapping`."""
    program = folder / "gmap"
    program.write_text(f"#!{sys.executable}\nimport sys\nsource, target, mapping = sys.argv[1:4]\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def test_labels_are_nodes_and_bytes_of_both_directions_are_edges() -> None:
    graph = op_graph([[], [0], [0, 1], [2]], [10, 30, 5, 1], colocation=[0, -1, 0, -1])
    problem = Problem(graph, plain_host(2), Costs(np.ones((4, 2)), "estimated"), Grouping(np.array([0, 1, 0, 2])))
    units = op_units(problem)
    cut = undirected(units, np.array([2.0, 1.0, 1.0]))
    # label 0 holds ops 0 and 2: 10 bytes to op 1, 30 back, 5 to op 3
    assert cut.offsets.tolist() == [0, 2, 3, 4]
    assert cut.neighbours.tolist() == [1, 2, 0, 0]
    assert cut.edge_weights.tolist() == [1 << 20, 1 << 17, 1 << 20, 1 << 17]
    assert cut.node_weights.tolist() == [1 << 19, 1 << 18, 1 << 18]


def test_metis_cuts_between_cliques() -> None:
    units = op_units(two_cliques())
    parts = baselines.metis_parts(undirected(units, np.ones(12)), HALVES)
    assert len(set(parts[:6].tolist())) == len(set(parts[6:].tolist())) == 1
    assert parts[0] != parts[6]


def test_fast_devices_get_more() -> None:
    problem = replace(two_cliques(speed=(1.0, 3.0)))
    units = op_units(problem)
    (time_s, shares), (memory, room) = balances(problem, units, [0, 1])
    assert shares == pytest.approx([0.75, 0.25])
    assert room.tolist() == [0.5, 0.5]
    assert time_s.tolist() == [2.0] * 12
    assert memory.tolist() == [100.0] * 5 + [1.0] + [100.0] * 6
    free = Problem(op_graph([[]] * 12), problem.host, problem.costs, problem.grouping)
    parts = baselines.metis_parts(undirected(op_units(free), np.ones(12)), shares)
    assert np.bincount(parts).tolist() == [9, 3]


def test_the_method_scores_allowed_placements_and_is_the_same_twice() -> None:
    problem = two_cliques()
    allowed = np.ones((12, 2), dtype=np.bool_)
    allowed[:3, 1] = False
    allowed[11, 0] = False
    pinned = replace(problem, allowed=allowed)
    first, second = (Task(pinned, Simulator(pinned, threads=1)) for _ in range(2))
    baselines.solve_metis(first)
    baselines.solve_metis(second)
    assert first.best_devices is not None
    assert second.best_devices is not None
    assert first.best_devices.tolist() == second.best_devices.tolist()
    assert first.best_devices[:3].tolist() == [0, 0, 0]


def test_without_pymetis_it_says_which_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlplace.graphs.grouping.groups.importlib.util.find_spec", lambda name: None)
    problem = two_cliques()
    with pytest.raises(MissingExtra, match="rlplace\\[metis\\]"):
        baselines.solve_metis(Task(problem, Simulator(problem, threads=1)))


def test_few_nodes_are_dealt_out() -> None:
    problem = two_cliques()
    few = undirected(op_units(replace(problem)), np.array([5.0, 4.0, 3.0] + [0.0] * 9))
    thirds = np.array([0.25, 0.25, 0.25, 0.25])
    assert sorted(baselines.metis_parts(few, thirds)[:3].tolist()) == [0, 1, 2]


def test_a_crash_of_metis_is_a_runner_error_and_one_of_every_cut_is_the_methods() -> None:
    problem = two_cliques()

    def crash(graph: Undirected, shares: np.ndarray) -> np.ndarray:
        edge_weights, node_weights = graph.edge_weights.tolist(), graph.node_weights.tolist()
        program = "import os; print('warning', flush=True); os.abort()"
        return run_metis(2, graph.offsets, graph.neighbours, node_weights, edge_weights, shares, program=program)

    with pytest.raises(RunnerError, match="metis: it ended with -6"):
        crash(undirected(op_units(problem), np.ones(12)), HALVES)
    with pytest.raises(RunnerError):
        score_cuts(Task(problem, Simulator(problem, threads=1)), crash)


def test_without_its_program_scotch_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingExtra, match=r"gmap.*apt install scotch"):
        baselines.find_program()


def test_scotch_gets_a_graph_and_a_target_and_its_mapping_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    body = """
lines = open(source).read().split("\\n")
assert lines[0] == "0" and lines[1].split()[0] == "12" and lines[2] == "0 011"
assert open(target).read().split()[:2] == ["cmpltw", "2"]
open(mapping, "w").write("12\\n" + "".join(f"{v}\\t{int(v >= 6)}\\n" for v in range(12)))
"""
    monkeypatch.setenv("PATH", str(gmap(tmp_path, body)))
    problem = two_cliques()
    parts = baselines.scotch_parts(undirected(op_units(problem), np.ones(12)), HALVES)
    assert parts.tolist() == [0] * 6 + [1] * 6
    task = Task(problem, Simulator(problem, threads=1))
    baselines.solve_scotch(task)
    assert task.best_s < np.inf


def test_scotch_s_source_format() -> None:
    graph = op_graph([[], [0]], [8, 1])
    problem = Problem(graph, plain_host(2), Costs(np.ones((2, 2)), "estimated"), Grouping(np.arange(2)))
    text = baselines.graph_text(undirected(op_units(problem), np.ones(2)))
    assert text == f"0\n2 2\n0 011\n{1 << 19} 1 {1 << 20} 1\n{1 << 19} 1 {1 << 20} 0\n"


@pytest.mark.parametrize("body", ["sys.exit(3)", "open(mapping, 'w').write('1\\n0 x\\n')", "open(mapping, 'w')"])
def test_a_program_that_fails_is_a_runner_error(body: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(gmap(tmp_path, body)))
    with pytest.raises(RunnerError, match="scotch"):
        baselines.scotch_parts(undirected(op_units(two_cliques()), np.ones(12)), HALVES)
