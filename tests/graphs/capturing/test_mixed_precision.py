"""Steps in low or mixed precision are the eager ones, casts included, down to the optimizer's state."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from small_models import random
from torch import Tensor, nn
from torch.nn import functional

from rlplace.errors import CaptureError
from rlplace.graphs import capture, run_graph
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.optimizers import resolve_optimizer, torch_optimizer


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.batch_norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.last(torch.relu(self.norm(self.first(x))))
            return torch.softmax(self.batch_norm(y), -1)


class Parts(nn.Module):
    """A part in bfloat16, a part in float32, and a weight that both names of one module share."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8)
        self.tied = nn.Sequential(nn.Linear(8, 8, bias=False))
        self.tied[0].weight = self.high.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(torch.tanh(self.high(self.low(x.bfloat16()).float())))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))


def mean_square(y: Tensor) -> Tensor:
    return (y.float() ** 2).mean()


def autocast_loss(y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return functional.linear(y, y).float().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], torch.dtype, Callable[[Tensor], Tensor]]] = {
    "autocast": (Autocast, torch.float32, mean_square),
    "autocast around the loss": (plain, torch.float32, autocast_loss),
    "bfloat16": (lambda: plain().bfloat16(), torch.bfloat16, mean_square),
    "float16": (lambda: plain().half(), torch.float16, mean_square),
    "parts": (Parts, torch.float32, mean_square),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_equals_eager_to_the_bit(name: str, optimizer: str) -> None:
    torch.manual_seed(0)
    make, dtype, loss_fn = CASES[name]
    model, x = make(), random(6, 8).to(dtype)
    graph = capture(model, x, loss_fn, optimizer)
    assert "bfloat16" in graph.tensor_dtypes or dtype is torch.float16
    step, eager = run_graph(graph), copy.deepcopy(model)
    spec = resolve_optimizer(optimizer)
    assert spec is not None
    updater = torch_optimizer(spec, list(eager.parameters()))
    loss = loss_fn(eager(x))
    loss.backward()
    assert torch.equal(step.result, loss.detach())
    for parameter, value in eager.named_parameters():
        assert value.grad is not None
        assert torch.equal(step.gradients[parameter], value.grad)
    updater.step()
    for key, value in (*eager.named_parameters(), *eager.named_buffers()):
        assert torch.equal(step.state[key], value.detach())
        assert step.state[key].dtype == value.dtype


def test_a_shared_weight_has_one_parameter_one_update_and_its_gradients_summed() -> None:
    graph = capture(Parts(), random(6, 8, dtype=torch.float32), mean_square, "adam")
    names = [name for name, target in zip(graph.names, graph.targets, strict=True) if target == "parameter"]
    assert names == ["low.weight", "low.bias", "high.weight", "high.bias"]
    assert [name for name in graph.names if name.startswith("update_")] == [f"update_{name}" for name in names]
    state = {name: int(bytes_) for name, bytes_ in zip(graph.names, graph.state_bytes, strict=True) if bytes_}
    assert state["update_low.weight"] == 2 * 64 * 2 + 4
    assert state["update_high.weight"] == 2 * 64 * 4 + 4


def test_a_capture_inside_of_autocast_holds_its_casts() -> None:
    torch.manual_seed(0)
    model, x = plain(), random(6, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        graph, expected = capture(model, x), model(x)
    assert "aten._to_copy.default" in graph.targets
    assert torch.equal(run_graph(graph).result, expected.detach())


def test_what_was_active_around_the_capture_is_remembered() -> None:
    model, x = plain(), random(6, 8, dtype=torch.float32)
    assert require_program(capture(model, x)).origin.autocast is None
    with torch.autocast("cpu", torch.bfloat16):
        graph = capture(model, x)
        with torch.autocast("cpu", enabled=False):
            assert require_program(capture(model, x)).origin.autocast is None
    assert require_program(graph).origin.autocast == torch.bfloat16


def test_autocast_of_a_gpu_around_a_model_on_the_cpu_is_refused_rather_than_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        torch, "is_autocast_enabled", lambda kind: kind == "cuda"
    )  # without a GPU it cannot be turned on
    with pytest.raises(
        CaptureError, match=r'`torch.autocast\("cuda"\)` is active .* use `torch.autocast\("cpu", dtype'
    ):
        capture(plain(), random(6, 8, dtype=torch.float32))
