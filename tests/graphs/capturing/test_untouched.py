"""Models and losses are after a capture what they were, and what a placed step would lose of them is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from naive_plan import naive_plan
from placed_steps import HOST, alternating
from torch import Tensor, nn

from rlplace.errors import CaptureError
from rlplace.export import PlacedModel
from rlplace.graphs import capture, run_graph


class Counting(nn.Module):
    """Weighs its loss by how often it was called."""

    def __init__(self, change: Callable[[Counting], None]) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("weights", torch.arange(3.0))
        self.change = change
        self.last = 0

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        self.change(self)
        self.last = max(self.last, 1)
        return ((y - t).square() * self.weights).mean() * (1 + self.calls)


def in_place(loss: Counting) -> None:
    loss.calls += 1


def anew(loss: Counting) -> None:
    loss.calls = loss.calls + 1


@pytest.mark.parametrize("change", [in_place, anew])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loss_that_changes_its_buffer_is_refused_and_left_as_it_was(
    change: Callable[[Counting], None], micro_batches: int
) -> None:
    loss, batch = Counting(change), (torch.randn(8, 4), torch.randn(8, 3))
    calls = loss.calls
    for loss_fn in (loss, lambda y, t: loss(y, t) / 2):
        with pytest.raises(CaptureError, match=r"the loss changes its buffer '(loss\.)?calls'"):
            capture(nn.Linear(4, 3), batch[0], loss_fn, "sgd", targets=batch[1], micro_batches=micro_batches)
        assert loss.calls is calls
        assert calls == 0
        assert loss.last == 0


def test_a_loss_that_reads_its_buffers_is_captured() -> None:
    loss = Counting(lambda loss: None)
    graph = capture(nn.Linear(4, 3), torch.randn(8, 4), loss, "sgd", targets=torch.randn(8, 3))
    assert graph.num_ops > 0
    assert loss.last == 0


def test_what_the_model_changes_is_its_own() -> None:
    """Though the loss reaches the model: its running statistics are part of the step."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    capture(model, torch.randn(8, 4), lambda y: y.square().mean() + 0 * len(list(model.children())), "sgd")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Twice(nn.Module):
    """One module under two names."""

    def __init__(self, one: nn.Module | None = None) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4) if one is None else one
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


class Tied(nn.Module):
    """One parameter, and one buffer, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight
        self.embed.register_buffer("scale", torch.full((), 2.0))
        self.out.register_buffer("scale", self.embed.scale)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.argmax(-1)
        return self.out(self.embed(tokens) * self.embed.scale) / self.out.scale


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, y: y * 2)
    model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[1].register_full_backward_hook(lambda module, gradients, _: (gradients[0] * 3,))
    return model


parametrizations = nn.utils.parametrizations
MODELS: dict[str, Callable[[], nn.Module]] = {
    "module twice": Twice,
    "norm twice": lambda: Twice(nn.LayerNorm(4)),
    "nested": lambda: nn.Sequential(Twice(Twice()), Twice()),
    "tied": Tied,
    "hooks": hooked,
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4))),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4))),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4))),
    "old weight norm": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4))),
    "old spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4))),
    "parametrized twice": lambda: Twice(parametrizations.weight_norm(nn.Linear(4, 4))),
}


def held(model: nn.Module) -> list[dict[str, object]]:
    """Everything that modules hold, by identity."""
    return [
        dict(each)
        for module in model.modules()
        for each in (vars(module), module._parameters, module._buffers, module._modules, module._forward_hooks)
    ]


def assert_same(model: nn.Module, before: list[dict[str, object]], values: dict[str, Tensor]) -> None:
    for now, was in zip(held(model), before, strict=True):
        assert now.keys() == was.keys()
        assert all(now[name] is value for name, value in was.items())
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


class Fails(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return y if y.sum() > 0 else -y


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:hooks of modules", r"ignore:.*nn\.utils\.\w+_norm")
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_as_it_was_and_its_placed_step_is_eagers(name: str, micro_batches: int) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(8, 4), MODELS[name]()
    failing = nn.Sequential(model, Fails())
    before, values = held(failing), {key: value.clone() for key, value in failing.state_dict().items()}
    with pytest.raises(CaptureError, match=r"y if y\.sum"):
        capture(failing, x, mean_square, "sgd", micro_batches=micro_batches)
    assert_same(failing, before, values)

    before, values = held(model), {key: value.clone() for key, value in model.state_dict().items()}
    if "spectral" in name and micro_batches > 1:
        with pytest.raises(CaptureError, match=r"`forward` changes '.*_u'"):
            capture(model, x, mean_square, "sgd", micro_batches=micro_batches)
        assert_same(model, before, values)
        return
    graph = capture(model, x, mean_square, "sgd", micro_batches=micro_batches)
    assert_same(model, before, values)

    with PlacedModel(graph, HOST, naive_plan(graph, alternating(graph, 2))) as step:
        losses = [float(step(x)) for _ in range(3)]
        trained = step.state_dict()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for loss in losses:
        optimizer.zero_grad()
        expected = mean_square(model(x))
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-5)
    eager = model.state_dict()
    assert all(torch.allclose(value, eager[key], rtol=1e-4, atol=1e-6) for key, value in trained.items())


def test_parametrized_weights_that_are_cached_around_a_capture_stay_theirs() -> None:
    model, x = MODELS["weight norm"](), torch.randn(8, 4)
    with nn.utils.parametrize.cached():
        expected = model(x)
        graph = capture(model, x)
        assert model(x).equal(expected)
    assert torch.allclose(run_graph(graph).result, expected)


def mean_square(y: Tensor) -> Tensor:
    return y.square().mean()


def test_collections_with_code_of_their_own_are_not_entered() -> None:
    class Pool(Mapping[str, int]):
        def __getitem__(self, name: str) -> int:
            raise NotImplementedError

        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Iterator[str]:
            raise NotImplementedError("iteration is not safe")

    pool = Pool()

    def loss(output: Tensor) -> Tensor:
        return output.sum() * (1 if pool is not None else 0)

    assert capture(nn.Linear(2, 1), torch.ones(3, 2), loss, "sgd").num_ops
