"""`prepare`: which step a command works on, what it says of it, and what runs keep."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch
from micrographs import op_graph

from rlplace import capture
from rlplace.errors import CaptureError, InvalidValue, UnknownName
from rlplace.graphs import SplitPlan
from rlplace.measure import Problem, resolve_host
from rlplace.report.console import Progress
from rlplace.session.prepare import Steps, candidates, capture_workload, chosen_problem, prepare, verdict_of
from rlplace.session.setup import WHOLE, CutOptions, ProblemOptions
from rlplace.workloads import Workload, parse_workload

TINY = "gpt2@small,layers=1,width=16,heads=2,tokens=4,vocab=50,batch=4"
HOST = resolve_host("4xV100-pcie")


def told(asked: CutOptions, workload: str = TINY) -> tuple[Problem, dict[str, object], str]:
    stream = io.StringIO()
    progress = Progress(stream=stream)
    prepared = prepare(Steps(parse_workload(workload), HOST, 0, asked), progress.say, ProblemOptions(), evaluations=30)
    return prepared.problem, prepared.to_dict(), stream.getvalue()


def test_a_whole_batch_is_what_it_was() -> None:
    problem, kept, said = told(WHOLE)
    assert problem.graph.num_micro_batches == 1
    assert problem.op_order == "rank"
    assert kept["verdict"] is None
    assert kept["evaluations"] == 0
    assert "micro-batch" not in said


@pytest.mark.slow
def test_a_number_is_cut_judged_and_ordered() -> None:
    problem, kept, said = told(CutOptions(2))
    assert problem.graph.num_micro_batches == 2
    assert kept["count"] == 2
    assert "2 micro-batches, loss separate: " in said
    assert "found on its small size" in said
    assert "order tilt" in said


def test_accumulation_is_said() -> None:
    problem, _, said = told(CutOptions(2, loss="accumulated"))
    verdict = verdict_of(problem.graph)
    assert verdict is not None
    assert verdict["kind"] == "accumulated"
    assert "loss accumulated: gradient accumulation" in said


@pytest.mark.slow
def test_a_step_is_cut_the_same_way_again() -> None:
    assert CutOptions("auto", (0, None)).again(4, "joined") == (4, CutOptions(4, (0, None), "joined"))
    assert CutOptions(2, loss="accumulated").again(2, None) == (2, CutOptions(2, loss="accumulated"))
    assert CutOptions("auto").again(1, None) == (1, WHOLE)


def test_the_users_dimensions_and_loss_go_before_the_workloads() -> None:
    model = torch.nn.Linear(3, 1)
    inputs, mean = (torch.ones(4, 3),), lambda output: output.mean()
    declared = Workload("mine", model, inputs, mean, None, batch_dims=(None,), loss="joined")
    with pytest.raises(InvalidValue, match="one with a batch"):
        capture_workload(declared, 2)
    graph = capture_workload(declared, 2, CutOptions(2, (0,), "separate"))
    verdict = verdict_of(graph)
    assert verdict is not None
    assert verdict["kind"] == "separate"
    assert graph.num_micro_batches == 2


def test_a_loss_that_mixes_samples_is_refused_by_name() -> None:
    class Centred(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = super().forward(x)
            return (rows - rows.mean(dim=0)).square().mean()

    with pytest.raises(CaptureError, match="mean"):
        capture_workload(Workload("mine", Centred(3, 3), (torch.randn(4, 3),), lambda loss: loss, None), 2)


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        (CutOptions("auto", (0,)), InvalidValue, "an entry for each of the 2 tensors"),
        (CutOptions("auto", {"mask": None}), UnknownName, "mask"),
        (CutOptions("auto", (9, 0)), InvalidValue, "batch_dims of input 0 is 9"),
        (CutOptions("auto", loss="separate"), InvalidValue, "expected 'joined'"),
    ],
)
def test_what_a_user_says_wrongly_is_an_error_under_auto_too(
    asked: CutOptions, error: type[Exception], words: str
) -> None:
    """Not a number of micro-batches that is left out, as one that is slow would be."""
    graphs = []

    def problem_of(count: int) -> Problem:
        built = (torch.nn.Linear(4, 3), torch.ones(4, 4), lambda y, t: (y * t).square().mean().sqrt())
        cut = {} if count == 1 else {"micro_batches": count, "batch_dims": asked.batch_dims, "loss": asked.loss}
        graphs.append(capture(*built, targets=torch.rand(4, 3), **cut))  # type: ignore[arg-type]
        return Problem.estimate(graphs[-1], HOST)

    with pytest.raises(error, match=words):
        chosen_problem(asked, HOST, problem_of, seed=0, evaluations=30)
    right = CutOptions("auto", (0, 0), "joined")
    asked = right
    assert chosen_problem(right, HOST, problem_of, seed=0, evaluations=30).asked == right
    counts = [graph.num_micro_batches for graph in graphs]
    assert len(set(counts)) == len(counts), "each number is captured once"


@pytest.mark.parametrize(
    ("host", "counts"), [("2xK80", [1, 2, 3, 4, 6, 8]), ("2x8xA100-ib", [1, 2, 3, 4, 6, 8, 12, 16])]
)
def test_more_are_tried_where_there_are_many_devices(host: str, counts: list[int]) -> None:
    assert list(candidates(resolve_host(host))) == counts


def test_counts_that_cannot_be_had_are_left_out_and_said() -> None:
    asked_for: list[int] = []
    lines: list[str] = []

    def problem_of(count: int) -> Problem:
        asked_for.append(count)
        if count == 4:
            raise InvalidValue("micro_batches", count, "at most 2")
        graph = op_graph([[]] * 2, 8, flops=[1e9, 1e9])
        column = [-1, -1] if count == 1 else [0, 1]
        return Problem.estimate(dataclasses.replace(graph, micro_batch=torch.tensor(column).numpy()), HOST)

    prepared = chosen_problem(CutOptions("auto"), HOST, problem_of, seed=0, evaluations=40, say=lines.append)
    problem, spent = prepared.problem, prepared.evaluations
    assert {1, 2, 4} <= set(asked_for)
    assert problem.graph.num_micro_batches in (1, 2)
    assert 0 < spent <= 40
    assert any("4 micro-batches: left out" in line for line in lines)


def test_an_exact_step_refuses_statistics_of_micro_batches_and_accumulation() -> None:
    def mean(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    norm = Workload("mine", torch.nn.BatchNorm1d(3), (torch.randn(4, 3),), mean, None)
    linear = Workload("mine", torch.nn.Linear(3, 1), (torch.randn(4, 3),), mean, None)
    assert capture_workload(norm, 2).num_micro_batches == 2
    assert capture_workload(norm, 1, CutOptions(1, is_exact=True)).num_micro_batches == 1
    assert capture_workload(linear, 2, CutOptions(2, is_exact=True)).num_micro_batches == 2
    with pytest.raises(InvalidValue, match=r"micro_batches is 2, expected 1 for exactly the .* Batch norm takes"):
        capture_workload(norm, 2, CutOptions(2, is_exact=True))
    with pytest.raises(InvalidValue, match="Their losses are accumulated"):
        capture_workload(linear, 2, CutOptions(2, loss="accumulated", is_exact=True))


def test_graphs_of_plans_that_a_search_tries_are_not_kept() -> None:
    asked = CutOptions(split="mlp")
    steps, tried = Steps(parse_workload(TINY), HOST, 0, asked), SplitPlan(("vocabulary",))
    assert steps.graph(1, asked.plan) is steps.graph(1)
    assert steps.graph(1, tried) is not steps.graph(1, tried)


@pytest.mark.slow
def test_a_joined_loss_of_a_model_without_memory_that_makes_tensors_of_its_own() -> None:
    graph = Steps(parse_workload("clip@small"), HOST, 0, CutOptions(2)).graph(2)
    verdict = verdict_of(graph)
    assert verdict is not None
    assert (verdict["kind"], verdict["is_checked"]) == ("joined", True)
    assert graph.num_micro_batches == 2


def test_what_became_of_a_split_is_said() -> None:
    lines: list[str] = []
    asked = CutOptions(split="mlp", split_parts="3:1")
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 4))

    def problem_of(count: int) -> Problem:
        graph = capture(model, torch.ones(3, 4), lambda y: y.sum(), "sgd", split=asked.plan)
        return Problem.estimate(graph, "4xV100-pcie")

    chosen_problem(asked, resolve_host("4xV100-pcie"), problem_of, seed=0, say=lines.append)
    assert lines[0].startswith("mlp in shards 3:1: 3 parameters")
    assert lines[1].startswith("warning: 1 random op (first ")
    assert "in 1) draw for each shard apart" in lines[1]
