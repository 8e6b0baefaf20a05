"""`rlplace.place` with a batch that is cut: the placed model takes the whole batch and trains as eager does."""

from __future__ import annotations

import copy

import pytest
import torch

import rlplace
from rlplace.errors import InvalidValue

LOSS = torch.nn.functional.cross_entropy


def small() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    return model, torch.randn(5, 6), torch.randint(3, (5,))


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
        for name, value in placed.state_dict().items():
            torch.testing.assert_close(value, eager.state_dict()[name], rtol=1e-4, atol=1e-5)
    finally:
        placed.close()


def test_mistakes_are_refused_before_anything_is_measured() -> None:
    model, x, y = small()
    with pytest.raises(InvalidValue, match="micro_batches is 0"):
        rlplace.place(model, x, LOSS, "sgd", targets=y, micro_batches=0)
    with pytest.raises(InvalidValue, match="loss is 'joined', expected `auto`"):
        rlplace.place(model, x, LOSS, "sgd", targets=y, loss="joined")
    with pytest.raises(InvalidValue, match="at most the batch, which is 5"):
        rlplace.place(model, x, LOSS, "sgd", targets=y, micro_batches=6)
