"""`rlplace.place`, also with a batch that is cut: the placed model takes the whole batch and trains as eager does."""

from __future__ import annotations

import copy
import dataclasses
import re
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from core_hosts import core_host
from faulty_ops import Faulty
from small_models import mean_square

import rlplace
from rlplace.errors import FileProblem, FingerprintMismatch, InvalidValue, RunnerError, UnknownName
from rlplace.export import PlacedModel
from rlplace.graphs.capturing.capture import capture
from rlplace.measure.hosts.host import Host
from rlplace.measure.hosts.resolve import resolve_host
from rlplace.measure.problem import OP_ORDERS, Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.rules import baselines

LOSS = torch.nn.functional.cross_entropy


def small() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    return model, torch.randn(5, 6), torch.randint(3, (5,))


@pytest.mark.parametrize("progress", [None, True, False])
def test_place_does_it_all_in_one_call(progress: bool | None, capsys: pytest.CaptureFixture[str]) -> None:
    model, x, _ = small()
    step = rlplace.place(model, x, mean_square, "sgd", host="cores", budget_s=1.0, progress=progress)
    out, said = capsys.readouterr()
    assert out == ""
    assert step.table is not None
    assert (step.table.summary in said) == (progress is not False)
    assert len(said.splitlines()) == {None: 1, False: 0}.get(progress, len(said.splitlines()))
    assert step.table.row(step.table.best)["step_time_s"] == step.step_time_s
    assert {"single", "eager", "learned", "portfolio"} <= {row["method"] for row in step.table.rows}
    assert [line in said for line in ("profiling ", "about 0:", "measuring the final table")] == [bool(progress)] * 3
    assert repr(step).startswith("PlacedModel(OpGraph(")
    assert float(step(x)) == pytest.approx(mean_square(model(x)).item(), rel=1e-5)
    step.close()


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [2, "auto"])
def test_a_cut_step_trains_as_eager(micro_batches: int | str) -> None:
    model, x, y = small()
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=1e-3)
    host = rlplace.Host.detect("cores")
    placed = rlplace.place(
        model,
        x,
        LOSS,
        "sgd",
        targets=y,
        host=host,
        budget_s=0.5,
        micro_batches=micro_batches,  # type: ignore[arg-type]
    )
    try:
        for _ in range(3):
            loss = placed(x, targets=y)
            optimizer.zero_grad()
            expected = LOSS(eager(x), y)
            expected.backward()
            optimizer.step()
            assert float(loss) == pytest.approx(expected.item(), rel=1e-4)
        assert placed.num_micro_batches in ((1, 2, 4, 5) if micro_batches == "auto" else (2,))
        assert placed.op_order in OP_ORDERS
        assert placed.step_time_s is not None
        assert placed.step_time_s > 0
        assert (placed.verdict is None) == (placed.num_micro_batches == 1)
        if placed.verdict is not None:
            assert (placed.verdict.kind, placed.verdict.is_checked) == ("joined", True), "labels may be padded"
            assert placed.verdict.why
        with pytest.raises(AttributeError):
            placed.num_micro_batches = 3  # type: ignore[misc]
        for name, value in placed.state_dict().items():
            torch.testing.assert_close(value, eager.state_dict()[name], rtol=1e-4, atol=1e-5)
    finally:
        placed.close()


@pytest.mark.parametrize(("reduction", "weights"), [("mean", "mean"), ("sum", "sum")])
def test_a_placed_step_says_how_its_loss_is_weighted(reduction: str, weights: str) -> None:
    model, x, _ = small()
    loss_fn = torch.nn.MSELoss(reduction=reduction)
    graph = capture(model, x, loss_fn, "sgd", targets=torch.randn(5, 3), micro_batches=2)
    problem = Problem.profile(graph, Host.detect("cores"), num_groups=4)
    plan = Simulator(problem).plan(baselines.single(problem, 0))
    placed = PlacedModel(graph, problem.host, plan)
    placed.close()
    assert placed.verdict is not None
    assert (placed.verdict.kind, placed.verdict.weights) == ("separate", weights)
    assert (placed.op_order, placed.step_time_s) == (None, None)


def test_a_placement_that_was_kept_is_checked_and_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "placement.json"
    model, x, y = small()
    again = partial(rlplace.place, loss_fn=LOSS, optimizer="sgd", host="cores:1", budget_s=1.0, path=path)
    first = again(model, x, targets=y, progress=True)
    said = capsys.readouterr().err
    ahead = re.search(r"about 0:(\d\d) from here", said)
    assert ahead is not None, "the budget is the limit of all that is announced"
    assert int(ahead[1]) <= 4, "reading kernels takes what it takes"
    kept = rlplace.load_placement(path)
    assert kept.host_fingerprint == resolve_host("cores:1").fingerprint

    def searched(*_: object, **__: object) -> None:
        raise AssertionError("nothing is to be searched or measured")

    for name in ("train", "profile_isolated", "chosen_problem"):
        monkeypatch.setattr(import_module("rlplace.export.place_model"), name, searched)
    second = again(model, x, targets=y)
    assert kept.verdict is not None
    assert (second.table, second.step_time_s) == (None, kept.verdict.step_s)
    assert second.op_order == first.op_order
    told = capsys.readouterr().err
    assert "placement.json" in told
    assert str(kept.verdict) in told
    assert float(second(x, targets=y)) == pytest.approx(float(first(x, targets=y)))
    first.close()
    second.close()
    before = path.read_bytes()
    with pytest.raises(FingerprintMismatch, match="another graph"):
        again(model, x[:3], targets=y[:3])
    with pytest.raises(FingerprintMismatch, match="another host"):
        again(model, x, targets=y, host=rlplace.Host.detect("cores", gangs=True))
    with pytest.raises(UnknownName, match="cpu:7"):
        again(model, x, targets=y, constraints=rlplace.Constraints.parse(pins=("0=cpu:7",)))
    (tmp_path / "torn.json").write_text("{")
    with pytest.raises(FileProblem):
        again(model, x, targets=y, path=tmp_path / "torn.json")
    assert path.read_bytes() == before


def test_a_kept_placement_that_breaks_a_constraint_is_refused(tmp_path: Path) -> None:
    model, x, _ = small()
    graph = capture(model, x, mean_square, "sgd")
    problem = Problem.profile(graph, "cores:2", num_groups=4)
    path = tmp_path / "placement.json"
    plan = Simulator(problem).plan(baselines.single(problem, 0))
    rlplace.save_placement(rlplace.Placement.of(problem, plan), path)
    pinned = rlplace.Constraints.parse(pins=("0=cpu:1",))
    with pytest.raises(InvalidValue, match="where it may run: cpu:1"):
        rlplace.place(model, x, mean_square, "sgd", host="cores:2", path=path, constraints=pinned)


def test_mistakes_are_refused_before_anything_is_measured() -> None:
    model, x, y = small()
    with pytest.raises(InvalidValue, match="micro_batches is 0"):
        rlplace.place(model, x, LOSS, "sgd", targets=y, micro_batches=0)
    with pytest.raises(InvalidValue, match="loss is 'joined', expected `auto`"):
        rlplace.place(model, x, LOSS, "sgd", targets=y, loss="joined")
    with pytest.raises(InvalidValue, match="at most the batch, which is 5"):
        rlplace.place(model, x, LOSS, "sgd", targets=y, micro_batches=6)
    with pytest.raises(InvalidValue, match="budget_s is '60'"):
        rlplace.place(model, x, LOSS, "sgd", targets=y, budget_s="60")  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match=r"seed is 1\.5"):
        rlplace.place(model, x, LOSS, "sgd", targets=y, seed=1.5)  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="'cores'"):
        rlplace.place(model, x, LOSS, "sgd", targets=y, host="coers")
    with pytest.raises(InvalidValue, match="a host of this machine"):
        rlplace.place(model, x, LOSS, "sgd", targets=y, host="4xV100-pcie")
    with pytest.raises(FileProblem, match="no such folder"):
        rlplace.place(model, x, LOSS, "sgd", targets=y, path="no/such/folder/placement.json")


@pytest.mark.slow
def test_an_op_that_crashes_while_it_is_profiled_does_not_end_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLPLACE_IN_PROCESS")
    host = core_host(2)
    host = dataclasses.replace(host, devices=(host.devices[0], dataclasses.replace(host.devices[1], kind="other")))
    with pytest.raises(RunnerError, match=r"the worker died: SIGABRT in profiling on cpu:1, op 'faulty'"):
        rlplace.place(Faulty(("abort",)), torch.ones(8), host=host, budget_s=1.0, progress=False)
