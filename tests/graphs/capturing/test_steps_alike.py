"""Python state that a step changes is refused by its name, unless the next step is the same all the same."""

from __future__ import annotations

import functools
import itertools
import logging
import random
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlplace.errors import CaptureError, InvalidValue, UnknownName
from rlplace.graphs import capture, run_graph

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
        out: Tensor = self.linear(x) * self.draw(self)
        return out


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


def mean_square(y: Tensor) -> Tensor:
    return y.square().mean()


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
