"""`rlplace.place`, also with a batch that is cut: the placed model takes the whole batch and trains as eager does."""

from __future__ import annotations

import copy

import pytest
import torch
from small_models import mean_square

import rlplace
from rlplace.errors import InvalidValue
from rlplace.export import PlacedModel
from rlplace.graphs.capturing.capture import capture
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import OP_ORDERS, Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.rules import baselines

LOSS = torch.nn.functional.cross_entropy


def small() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    return model, torch.randn(5, 6), torch.randint(3, (5,))


@pytest.mark.parametrize("progress", [None, True])
def test_place_does_it_all_in_one_call(progress: bool | None, capsys: pytest.CaptureFixture[str]) -> None:
    model, x, _ = small()
    step = rlplace.place(model, x, mean_square, "sgd", budget_s=1.0, progress=progress)
    said = capsys.readouterr().err
    assert [line in said for line in ("profiling ", "about 0:", "measuring the final table")] == [bool(progress)] * 3
    assert repr(step).startswith("PlacedModel(OpGraph(")
    assert float(step(x)) == pytest.approx(mean_square(model(x)).item(), rel=1e-5)
    step.close()


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


def test_mistakes_are_refused_before_anything_is_measured() -> None:
    model, x, y = small()
    with pytest.raises(InvalidValue, match="micro_batches is 0"):
        rlplace.place(model, x, LOSS, "sgd", targets=y, micro_batches=0)
    with pytest.raises(InvalidValue, match="loss is 'joined', expected `auto`"):
        rlplace.place(model, x, LOSS, "sgd", targets=y, loss="joined")
    with pytest.raises(InvalidValue, match="at most the batch, which is 5"):
        rlplace.place(model, x, LOSS, "sgd", targets=y, micro_batches=6)
