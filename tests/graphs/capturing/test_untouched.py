"""Models, losses and Python state are after a capture what they were, and what a step would lose is refused."""

from __future__ import annotations

import functools
import itertools
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from naive_plan import naive_plan
from placed_steps import HOST, alternating
from torch import Tensor, nn

from rlplace.errors import CaptureError, InvalidValue, UnknownName
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


Forward = Callable[["Layer", Tensor], Tensor]


class Layer(nn.Module):
    """Has state of many kinds, and a `forward` that does something with it."""

    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.n, self.last, self.mask, self.ready = 0, None, None, False
        self.history: list[object] = []
        self.stats: dict[str, object] = {"n": 0}
        self.meter = SimpleNamespace(n=0, names=set())
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, self.linear(x))


def in_a_model(run: Forward) -> nn.Module:
    return nn.Sequential(nn.ReLU(), Layer(run))


def counts(layer: Layer, y: Tensor) -> Tensor:
    layer.n += 1
    return y


def warms_up(layer: Layer, y: Tensor) -> Tensor:
    layer.n += 1
    return y * min(layer.n, 10)


def appends(layer: Layer, y: Tensor) -> Tensor:
    layer.history.append(y.detach())
    return y


def counts_in_a_dict(layer: Layer, y: Tensor) -> Tensor:
    layer.stats["n"] = int(str(layer.stats["n"])) + 1
    return y


def adds_keys(layer: Layer, y: Tensor) -> Tensor:
    layer.stats[f"step {len(layer.stats)}"] = y.detach()
    return y


def counts_in_an_object(layer: Layer, y: Tensor) -> Tensor:
    layer.meter.n += 1
    return y


def adds_to_a_set(layer: Layer, y: Tensor) -> Tensor:
    layer.meter.names.add(len(layer.meter.names))
    return y


def counts_in_a_submodule(layer: Layer, y: Tensor) -> Tensor:
    layer.linear.n = getattr(layer.linear, "n", 0) + 1
    return y


def carries_on(layer: Layer, y: Tensor) -> Tensor:
    last = layer.last
    layer.last = y.detach()
    return y if last is None else y + last


def carries_zeros_on(layer: Layer, y: Tensor) -> Tensor:
    last = torch.zeros_like(y) if layer.last is None else layer.last
    layer.last = y.detach() + last
    return y * layer.last


def starts_up(layer: Layer, y: Tensor) -> Tensor:
    y = y if layer.ready else y.exp()
    layer.ready = True
    return y


def keeps_the_first(layer: Layer, y: Tensor) -> Tensor:
    layer.last = layer.linear.weight.exp().detach() if layer.last is None else layer.last
    return y @ layer.last


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("run", "name"),
    [
        (counts, "1.n"),
        (warms_up, "1.n"),
        (appends, "1.history"),
        (counts_in_a_dict, "1.stats['n']"),
        (adds_keys, "1.stats['step "),
        (counts_in_an_object, "1.meter.n"),
        (adds_to_a_set, "1.meter.names"),
        (counts_in_a_submodule, "1.linear.n"),
        (carries_on, "1.last"),
        (carries_zeros_on, "1.last"),
        (starts_up, "1.ready"),
        (keeps_the_first, "1.last"),
    ],
)
def test_state_that_changes_is_refused_by_its_name_and_taken_back(run: Forward, name: str, micro_batches: int) -> None:
    model = in_a_model(run)
    layer = model[1]
    with pytest.raises(CaptureError) as refused:
        capture(model, torch.randn(8, 4), mean_square, "sgd", micro_batches=micro_batches)
    assert f"`{name}" in str(refused.value)
    assert (layer.n, layer.last, layer.ready, layer.history, layer.stats) == (0, None, False, [], {"n": 0})
    assert (layer.meter.n, layer.meter.names, hasattr(layer.linear, "n")) == (0, set(), False)


class Streams(nn.Module):
    """Has what gives something else each time it is asked, and a class that counts."""

    calls = 0

    def __init__(self, draw: Callable[[Streams], float]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(4, 4), draw
        self.python, self.numpy = random.Random(0), np.random.default_rng(0)
        self.old = np.random.RandomState(0)
        self.cycle, self.count = itertools.cycle([1.0, 2.0, 3.0]), itertools.count(1)
        self.rates = [iter([1.0, 2.0, 3.0, 4.0])]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.draw(self)


def counts_in_its_class(model: Streams) -> float:
    type(model).calls += 1
    return float(type(model).calls)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda model: model.python.random(), "python"),
        (lambda model: float(model.numpy.random()), "numpy"),
        (lambda model: float(model.old.rand()), "old"),
        (lambda model: next(model.cycle), "cycle"),
        (lambda model: float(next(model.count)), "count"),
        (lambda model: next(model.rates[0]), "rates[0]"),
        (counts_in_its_class, "Streams.calls"),
    ],
)
def test_streams_and_attributes_of_classes_are_state_as_well(draw: Callable[[Streams], float], name: str) -> None:
    model, same = Streams(draw), Streams(draw)
    with pytest.raises(CaptureError) as refused:
        capture(model, torch.randn(8, 4), mean_square, "sgd")
    assert f"changes `{name}` in every step" in str(refused.value)
    assert Streams.calls == 0
    expected = [draw(same) for _ in range(4)]
    Streams.calls = 0
    assert [draw(model) for _ in range(4)] == expected
    Streams.calls = 0


def test_streams_that_no_step_asks_are_let_be() -> None:
    model = Streams(lambda model: 2.0)
    x = torch.randn(8, 4)
    graph = capture(model, x)
    assert torch.allclose(run_graph(graph).result, model(x))
    assert next(model.cycle) == 1.0


def test_what_is_frozen_may_change_and_other_state_may_not() -> None:
    model, x = in_a_model(warms_up), torch.randn(8, 4)
    graph = capture(model, x, mean_square, "sgd", frozen=["1.n"])
    assert run_graph(graph).result.item() == pytest.approx(mean_square(model(x)).item())
    capture(in_a_model(counts_in_a_dict), x, mean_square, frozen=["1.stats"])
    with pytest.raises(CaptureError, match=r"`1\.n`.*frozen=\['1\.n'\]"):
        capture(in_a_model(counts), x, mean_square, frozen=["1.stats", "n"])
    with pytest.raises(InvalidValue, match=r"frozen is '1\.n', expected a list of names"):
        capture(model, x, frozen="1.n")


def test_a_counter_of_the_loss_is_refused() -> None:
    class Annealed(nn.Module):
        n = 0

        def forward(self, y: Tensor) -> Tensor:
            self.n += 1
            return y.square().mean() * min(1.0, self.n / 10)

    loss = Annealed()
    with pytest.raises(CaptureError, match="changes `n`"):
        capture(nn.Linear(4, 4), torch.randn(8, 4), loss, "sgd")
    with pytest.raises(CaptureError, match=r"changes `loss\.n`"):
        capture(nn.Linear(4, 4), torch.randn(8, 4), lambda y: loss(y), "sgd")
    assert loss.n == 0


def caches_a_mask(layer: Layer, y: Tensor) -> Tensor:
    if layer.mask is None:
        layer.mask = torch.ones(4, 4).tril()
    return y @ layer.mask


def caches_by_length(layer: Layer, y: Tensor) -> Tensor:
    key = str(y.shape[-1])
    if key not in layer.stats:
        layer.stats[key] = torch.arange(y.shape[-1]) / 2
    return y + layer.stats[key]


def notes_shapes(layer: Layer, y: Tensor) -> Tensor:
    layer.n, layer.last = len(y), None
    layer.meter.names.add(y.dtype)
    layer.history = []
    return y


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("run", [caches_a_mask, caches_by_length, notes_shapes])
def test_caches_are_no_change(run: Forward, micro_batches: int) -> None:
    model, x = in_a_model(run), torch.randn(8, 4)
    graph = capture(model, x, mean_square, "sgd", micro_batches=micro_batches)
    assert model[1].mask is None
    assert model[1].stats == {"n": 0}
    assert run_graph(graph).result.item() == pytest.approx(mean_square(model(x)).item(), rel=1e-5)
    model[1].run = caches_a_mask
    capture(model, x, mean_square)  # once more, and with a cache that eager filled


@functools.lru_cache
def lower(size: int) -> Tensor:
    return torch.ones(size, size).tril()


class Cached(nn.Module):
    @functools.lru_cache  # noqa: B019 - as users write it
    def steps(self, size: int) -> Tensor:
        return torch.arange(size) / size

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.steps(4)) @ lower(4)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_a_trace_leaves_in_an_lru_cache_is_forgotten(micro_batches: int) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Cached()), torch.randn(8, 4)
    graph = capture(model, x, mean_square, "sgd", micro_batches=micro_batches)
    assert (type(lower(4)), lower(4).dtype) == (Tensor, torch.float32)
    assert run_graph(graph).result.item() == pytest.approx(mean_square(model(x)).item(), rel=1e-5)
    lower.cache_clear()
    Cached.steps.cache_clear()


def test_tensors_of_the_step_in_attributes_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def leaves(layer: Layer, y: Tensor) -> Tensor:
        layer.last = y.square().mean()
        return y

    model, x = in_a_model(leaves), torch.randn(8, 4)

    def loss(y: Tensor) -> Tensor:
        return y.sum() + model[1].last

    with caplog.at_level(logging.WARNING, logger="rlplace"):
        graph = capture(model, x, loss, "sgd")
    assert ["1.last" in record.getMessage() for record in caplog.records] == [True]
    assert model[1].last is None
    assert run_graph(graph).result.item() == pytest.approx(loss(model(x)).item(), rel=1e-5)


def test_a_frozen_name_of_nothing_is_refused_with_the_nearest() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(2, 2), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.last = self.calls  # set by `forward` alone
            return self.linear(x)

    with pytest.raises(UnknownName, match="did you mean 'calls'"):
        capture(Counts(), torch.ones(1, 2), frozen=["cals"])
    capture(Counts(), torch.ones(1, 2), frozen=["calls", "last"])
