"""Python state that a step reads and that changes later: another step is refused by the name of what has changed."""

from __future__ import annotations

import argparse
import copy
import functools
import sys
from collections import ChainMap, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from loops import HOST, Classifier, apart, assert_same_state, batches, captured, classifier, module_of, placed
from torch import Tensor, nn
from torch.nn import functional

from rlplace.errors import InvalidValue
from rlplace.export import PlacedModel
from rlplace.graphs import OptimizerSpec, capture

WEIGHT = 1.0
SCHEDULE = {"weight": 1.0, "steps": [1, 2]}


def weighted(loss: Tensor) -> Tensor:
    return loss * WEIGHT


def scheduled(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output, labels) * SCHEDULE["weight"]


def by_global(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output, labels) * WEIGHT


def by_called(output: Tensor, labels: Tensor) -> Tensor:
    return weighted(functional.cross_entropy(output, labels))


class Smoothed(nn.Module):
    """A loss with a number in an attribute, and one in its class."""

    temperature = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.smoothing = 0.0

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(output / self.temperature, labels, label_smoothing=self.smoothing)


class Weights:
    """A loss that is no module, whose method reads a class that serves as a namespace."""

    def __call__(self, output: Tensor, labels: Tensor) -> Tensor:
        return self.of(functional.cross_entropy(output, labels))

    def of(self, loss: Tensor) -> Tensor:
        return loss * Numbers.weight


class Numbers:
    weight = 1.0


class Scaled(Classifier):
    """Numbers in attributes of several kinds, and layers that flags leave out."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.scale, self.config = 1.0, SimpleNamespace(scale=1.0)
        self.has_norm, self.skipped, self.slope = True, [False, False], nn.LeakyReLU(0.1)
        self.dropout.p = 0.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(self.frozen(x)) * self.scale * self.factor
        if self.has_norm:
            hidden = self.norm(hidden)
        for layer, is_skipped in zip((self.slope, self.dropout), self.skipped, strict=True):
            hidden = hidden if is_skipped else layer(hidden)
        out: Tensor = self.second(hidden) * self.config.scale
        return out


def of_closure() -> tuple[Callable[..., Tensor], Callable[[float], None]]:
    weight = 1.0

    def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(output, labels) * weight

    def change(value: float) -> None:
        nonlocal weight
        weight = value

    return loss_fn, change


def of_list() -> tuple[Callable[..., Tensor], Callable[[float], None]]:
    weights = [1.0]

    def change(value: float) -> None:
        weights[0] = value

    return lambda output, labels: functional.cross_entropy(output, labels) * weights[0], change


@dataclass
class Given:
    """A model, a loss and what changes them."""

    model: Any
    loss_fn: Any
    set_closure: Callable[[float], None]
    patch: Callable[[str, object], None]


Change = Callable[[Given], object]
CHANGES: dict[str, tuple[str, Change]] = {
    "number": ("scale", lambda given: setattr(given.model, "scale", 0.5)),
    "number of an object": ("config.scale", lambda given: setattr(given.model.config, "scale", 0.5)),
    "number of a layer": ("slope.negative_slope", lambda given: setattr(given.model.slope, "negative_slope", 0.3)),
    "number to a flag": ("has_norm", lambda given: setattr(given.model, "has_norm", False)),
    "layer drop": ("skipped", lambda given: given.model.skipped.__setitem__(0, True)),
    "class": ("Scaled.factor", lambda given: setattr(type(given.model), "factor", 0.5)),
    "instance over class": ("factor", lambda given: setattr(given.model, "factor", 0.5)),
    "base class": ("Base.factor", lambda given: setattr(type(given.model).__base__, "factor", 0.5)),
    "dropout": ("dropout.p", lambda given: setattr(given.model.dropout, "p", 1.0)),
    "momentum": ("norm.momentum", lambda given: setattr(given.model.norm, "momentum", 0.5)),
    "eps": ("norm.eps", lambda given: setattr(given.model.norm, "eps", 0.5)),
    "eval of norm": ("norm.training", lambda given: given.model.norm.eval()),
    "hook": (
        "_forward_hooks",
        lambda given: given.model.second.register_forward_hook(lambda module, args, out: out * 2),
    ),
    "patched forward": ("forward", lambda given: setattr(given.model.second, "forward", lambda x: x[:, :3])),
    "patched class": (
        "Scaled.forward",
        lambda given: given.patch("Scaled.forward", lambda self, x: self.second(self.first(x))),
    ),
    "loss number": ("smoothing", lambda given: setattr(given.loss_fn, "smoothing", 0.5)),
    "loss class": ("Smoothed.temperature", lambda given: given.patch("Smoothed.temperature", 2.0)),
    "global": ("WEIGHT", lambda given: given.patch("WEIGHT", 2.0)),
    "called global": ("WEIGHT", lambda given: given.patch("WEIGHT", 2.0)),
    "rebound function": ("weighted", lambda given: given.patch("weighted", lambda loss: loss * 3.0)),
    "entry": ("SCHEDULE['weight']", lambda given: given.patch("SCHEDULE['weight']", 2.0)),
    "other dict": ("SCHEDULE", lambda given: given.patch("SCHEDULE", {"weight": 2.0})),
    "namespace": ("Numbers.weight", lambda given: given.patch("Numbers.weight", 2.0)),
    "closure": ("weight", lambda given: given.set_closure(2.0)),
    "closure of a list": ("weights", lambda given: given.set_closure(2.0)),
    "partial": ("label_smoothing", lambda given: given.loss_fn.keywords.__setitem__("label_smoothing", 0.3)),
}
LOSSES: dict[str, Callable[[], Any]] = {
    "loss number": Smoothed,
    "loss class": Smoothed,
    "global": lambda: by_global,
    "called global": lambda: by_called,
    "rebound function": lambda: by_called,
    "entry": lambda: scheduled,
    "other dict": lambda: scheduled,
    "namespace": Weights,
    "partial": lambda: functools.partial(functional.cross_entropy, label_smoothing=0.0),
}


@pytest.fixture
def given(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Given:
    """A model of a class of its own, as its attributes change, too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = type("Base", (Scaled,), {"factor": 1.0})
        kind = base if "class" not in request.param else type("Scaled", (base,), {})
        if request.param == "class":
            kind.factor = 1.0
        model = kind().double()
    closure, change = of_list() if "list" in request.param else of_closure()
    loss_fn = LOSSES.get(request.param, lambda: closure)()

    def patch(name: str, value: object) -> None:
        if name.endswith("]"):
            monkeypatch.setitem(SCHEDULE, "weight", value)
            return
        owner, _, key = name.rpartition(".")
        monkeypatch.setattr(globals()[owner] if owner else sys.modules[__name__], key, value)

    return Given(model, loss_fn, change, patch)


def eager(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any, x: Tensor, labels: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = loss_fn(model(x), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:hooks of modules")
@pytest.mark.parametrize(("given", "kind"), [(kind, kind) for kind in CHANGES], indirect=["given"])
def test_what_changed_is_refused_by_name_and_taken_over_by_a_recapture(given: Given, kind: str) -> None:
    """Three steps of Adam before and after: parameters, moments and counts stay, in batches of two sizes."""
    name, change = CHANGES[kind]
    (x, labels), *more = batches(4)
    graph = capture(given.model, x, given.loss_fn, OptimizerSpec("adam", lr=0.1), targets=labels)
    twin = copy.deepcopy(given.model)
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.1)
    with PlacedModel(graph, HOST, apart(graph)) as step:
        for batch in ((x, labels), (x[:3], labels[:3])):
            torch.testing.assert_close(step(batch[0], targets=batch[1]), eager(twin, optimizer, given.loss_fn, *batch))
        change(given)
        before = step.state_dict()
        for call in (step, step.backward):
            with pytest.raises(InvalidValue, match="recapture") as caught:
                call(x, targets=labels)
            assert name in caught.value.field
        assert_same_state(step.state_dict(), before, 0.0)
        step.recapture()
        given.model.load_state_dict(twin.state_dict())
        twin = given.model
        state = optimizer.state_dict()
        optimizer = torch.optim.Adam(twin.parameters(), lr=0.1)
        optimizer.load_state_dict(state)
        for batch in (*more, (x[:3], labels[:3]), (x[:2], labels[:2])):
            torch.testing.assert_close(step(batch[0], targets=batch[1]), eager(twin, optimizer, given.loss_fn, *batch))
        assert_same_state(step.state_dict(), twin.state_dict())
        torch.testing.assert_close(step.evaluate(x), copy.deepcopy(twin).eval()(x).detach())


@pytest.mark.parametrize(("given", "kind"), [("number", "number"), ("global", "global")], indirect=["given"])
def test_new_shapes_take_the_new_value_and_known_ones_refuse_it(given: Given, kind: str) -> None:
    (x, labels), *_ = batches(1)
    graph = capture(given.model, x, given.loss_fn, targets=labels)
    with PlacedModel(graph, HOST, apart(graph)) as step:
        step.backward(x, targets=labels)
        step.evaluate(x)
        CHANGES[kind][1](given)
        with pytest.raises(InvalidValue, match=r"as captured.*recapture"):
            step.backward(x, targets=labels)
        expected = given.loss_fn(given.model(x[:3]), labels[:3])
        torch.testing.assert_close(step.backward(x[:3], targets=labels[:3]), expected.detach())
        twin = copy.deepcopy(given.model).eval()
        twin.load_state_dict(step.state_dict())
        torch.testing.assert_close(step.evaluate(x[:3]), twin(x[:3]).detach())
        if kind == "number":
            with pytest.raises(InvalidValue, match="recapture"):
                step.evaluate(x)
        else:
            step.evaluate(x)  # reads no loss


def test_what_was_changed_between_capture_and_placement_counts_from_the_capture() -> None:
    model = Scaled().double()
    graph = captured(model, "sgd")
    ((x, labels),) = batches(1)
    model.scale = 2.0
    with placed(graph) as step:
        with pytest.raises(InvalidValue, match=r"scale is 2\.0, expected 1\.0, as captured"):
            step(x, targets=labels)
        model.scale = 1.0
        step(x, targets=labels)


@pytest.mark.parametrize("micro_batches", [2, 3])
@pytest.mark.parametrize("loss", ["separate", "joined"])
def test_micro_batches_compare_model_and_loss(loss: str, micro_batches: int) -> None:
    model, loss_fn = nn.Sequential(nn.Linear(6, 3), nn.LeakyReLU(0.1)).double(), Smoothed()
    (x, labels), *_ = batches(1, 4)
    options = {"micro_batches": micro_batches, "loss": loss}
    graph = capture(model, x, loss_fn, targets=labels, **options)
    with PlacedModel(graph, HOST, apart(graph)) as step:
        for holder, key in ((model[1], "negative_slope"), (loss_fn, "smoothing")):
            step.backward(x, targets=labels)
            setattr(holder, key, 0.5)
            with pytest.raises(InvalidValue, match=key):
                step.backward(x, targets=labels)
            step.recapture()
            torch.testing.assert_close(step.backward(x, targets=labels), loss_fn(model(x), labels).detach())


class Logs(nn.Module):
    """Counts that are read and make no difference, or only later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.epoch, self.step, self.warm_up = nn.Linear(6, 3).double(), 0, 0, 3
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        print(f"epoch {self.epoch}, step {self.step}", end="")
        out: Tensor = self.linear(x) * (0.5 if self.epoch >= self.warm_up else 1.0)
        return out


def test_counters_that_are_only_logged_go_on(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are looked at ever less often, and what changes beside them is seen at once."""
    model, (x, labels) = Logs(), batches(1)[0]
    with placed(capture_of(model, x, labels)) as step:
        step.backward(x, targets=labels)
        capsys.readouterr()
        for count in range(40):
            model.step += 1
            model.log.append(count)
            step.backward(x, targets=labels)
        traces = capsys.readouterr().out.count("epoch")
        assert 3 <= traces <= 7
        assert "step" in caplog.text
        model.epoch = 3
        with pytest.raises(InvalidValue, match="epoch"):
            step.backward(x, targets=labels)
        model.epoch = 0
        step.backward(x, targets=labels)


def capture_of(model: nn.Module, x: Tensor, labels: Tensor, **options: Any) -> Any:
    return capture(model, x, functional.cross_entropy, targets=labels, **options)


def test_a_counter_that_matters_later_is_seen_where_it_changes_seldom() -> None:
    model, (x, labels) = Logs(), batches(1)[0]
    with placed(capture_of(model, x, labels)) as step:
        for epoch in range(3):
            model.epoch = epoch
            for _ in range(70):
                step.backward(x, targets=labels)
        model.epoch = 3
        with pytest.raises(InvalidValue, match=r"epoch is 3, expected 2, as captured"):
            step.backward(x, targets=labels)


class Caches(nn.Module):
    """Makes a mask once, keeps others by length, and counts what a step may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mask, self.calls = nn.Linear(6, 3).double(), None, 0
        self.masks: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.mask is None:
            self.mask = torch.ones(3, dtype=torch.float64)
        mask = self.masks.setdefault(len(x), torch.ones(len(x), 1, dtype=torch.float64))
        out: Tensor = self.linear(x) * self.mask * mask
        return out


def test_what_forward_sets_itself_may_be_set_by_eager_runs_in_between() -> None:
    model, (x, labels) = Caches(), batches(1)[0]
    with placed(capture_of(model, x, labels, frozen=["calls"])) as step:
        for size in (5, 3, 5):
            expected = functional.cross_entropy(model(x[:size]), labels[:size])
            torch.testing.assert_close(step.backward(x[:size], targets=labels[:size]), expected.detach())


def test_a_model_that_is_switched_as_a_whole_is_not_the_steps() -> None:
    """For validation by plain PyTorch; and a layer that was frozen before, and is not any more, is told."""
    model = classifier(dropout=0.5)
    model.norm.eval()
    ((x, labels),) = batches(1)
    with placed(captured(model, "sgd")) as step:
        model.eval()
        step(x, targets=labels)
        step(x[:3], targets=labels[:3])
        model.train()
        with pytest.raises(InvalidValue, match=r"norm\.training is True, expected False"):
            step(x, targets=labels)
        model.norm.eval()
        step(x, targets=labels)
        assert step.num_graphs == 2


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("scale", lambda module: setattr(module, "scale", 0.5)),
        ("config.scale", lambda module: setattr(module.config, "scale", 0.5)),
        ("slope.negative_slope", lambda module: setattr(module.slope, "negative_slope", 0.3)),
        ("skipped", lambda module: module.skipped.__setitem__(0, True)),
    ],
)
def test_a_module_reads_its_own_attributes_and_not_those_of_the_model(
    name: str, change: Callable[[Any], object]
) -> None:
    model = Scaled().double()
    twin = copy.deepcopy(model)
    module = module_of(model, captured(model))
    model.scale = 7.0  # of the model that was copied: the copy has its own
    ((x, labels),) = batches(1)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (module, twin)]

    def steps() -> None:
        for size in (5, 3):
            for each, optimizer in zip((module, twin), optimizers, strict=True):
                eager(each, optimizer, functional.cross_entropy, x[:size], labels[:size])
        torch.testing.assert_close(module(x), twin(x))
        assert_same_state(dict(module.state_dict()), dict(twin.state_dict()))

    steps()
    change(module)
    with pytest.raises(InvalidValue, match=r"placed module: .*recapture") as caught:
        module(x)
    assert caught.value.field == name
    module.recapture()
    change(twin)
    steps()
    assert model.scale == 7.0
    module.close()


def test_a_module_goes_on_where_a_counter_changes() -> None:
    model = Logs()
    module = module_of(model, capture(model, batches(1)[0][0]))
    x = batches(1)[0][0]
    for count in range(4):
        module.step = count
        torch.testing.assert_close(module(x), model(x))
    module.epoch = 3
    with pytest.raises(InvalidValue, match="epoch"):
        module(x)
    module.close()


class Reads(nn.Module):
    """A linear layer whose output is scaled by what a function reads of an object."""

    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.held, self.read = nn.Linear(6, 3).double(), held, read

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.read(self.held)
        return out


HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], object]]] = {
    "scale": (
        lambda: argparse.Namespace(scale=1.0),
        lambda held: held.scale,
        lambda held: setattr(held, "scale", 2.0),
    ),
    "data['scale']": (lambda: UserDict(scale=1.0), lambda held: held["scale"], lambda held: held.update(scale=2.0)),
    "maps[0]['scale']": (
        lambda: ChainMap({"scale": 1.0}),
        lambda held: held["scale"],
        lambda held: held.update(scale=2.0),
    ),
    "param_groups[0]['lr']": (
        lambda: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0),
        lambda held: held.param_groups[0]["lr"],
        lambda held: held.param_groups[0].update(lr=2.0),
    ),
}


@pytest.mark.parametrize("kind", HOLDERS)
@pytest.mark.parametrize("reader", ["model", "loss"])
def test_objects_of_the_standard_library_and_optimizers_are_looked_into(kind: str, reader: str) -> None:
    make, read, change = HOLDERS[kind]
    held, (x, labels) = make(), batches(1)[0]
    model = Reads(held, read) if reader == "model" else nn.Linear(6, 3).double()

    def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(output, labels) * (read(held) if reader == "loss" else 1.0)

    with placed(capture(model, x, loss_fn, targets=labels)) as step:
        step.backward(x, targets=labels)
        change(held)
        with pytest.raises(InvalidValue, match=r"is 2\.0, expected 1\.0, as captured") as caught:
            step.backward(x, targets=labels)
        assert caught.value.field == f"held.{kind}"
        step.recapture()
        torch.testing.assert_close(step.backward(x, targets=labels), loss_fn(model(x), labels).detach())


class Acts(nn.Module):
    """Functions in attributes: alone, with others, beside a tensor, and bound to a module of it."""

    act = staticmethod(torch.sigmoid)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3).double()
        self.act, self.table = torch.relu, {"act": torch.tanh, "scale": torch.ones(3, dtype=torch.float64)}
        self.run = functools.partial(self.again, 2)

    def again(self, times: int, x: Tensor) -> Tensor:
        out: Tensor = times * self.linear(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.table["act"](self.act(self.run(x)) * self.table["scale"])
        return out


ACTS: dict[str, Callable[[Any], object]] = {
    "act": lambda module: setattr(module, "act", torch.cos),
    "table": lambda module: module.table.update(act=torch.cos),
    "deleted": lambda module: delattr(module, "act"),
    "forward": lambda module: setattr(module.linear, "forward", lambda x: x[:, :3]),
}


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("kind", list(ACTS))
def test_a_module_takes_over_its_own_functions(kind: str, is_before: bool) -> None:
    model, (x, _) = Acts(), batches(1)[0]
    twin = copy.deepcopy(model)
    module = module_of(model, capture(model, x))
    if not is_before:
        torch.testing.assert_close(module(x), twin(x))
    for each in (module, twin):
        ACTS[kind](each)
    if not is_before:
        with pytest.raises(InvalidValue, match="recapture"):
            module(x)
        module.recapture()
    for size in (5, 3):
        torch.testing.assert_close(module(x[:size]), twin(x[:size]))
    module.close()


@pytest.mark.parametrize("kind", ["act", "table"])
def test_functions_of_the_model_that_was_copied_are_not_the_modules(kind: str) -> None:
    model, (x, _) = Acts(), batches(1)[0]
    twin = copy.deepcopy(model)
    module = module_of(model, capture(model, x))
    torch.testing.assert_close(module(x), twin(x))
    ACTS[kind](model)
    now = {key: value for key, value in vars(model).items() if not key.startswith("_")}
    for size in (5, 3):
        torch.testing.assert_close(module(x[:size]), twin(x[:size]))
    assert {key: vars(model)[key] for key in now} == now
    module.close()


def test_a_function_that_cannot_be_copied_to_the_model_is_refused_by_name() -> None:
    class Stuck:
        def __call__(self, x: Tensor) -> Tensor:
            return x

        def __deepcopy__(self, memo: object) -> Any:
            raise TypeError("stays here")

    model, (x, _) = Acts(), batches(1)[0]
    module = module_of(model, capture(model, x))
    module.act = Stuck()
    with pytest.raises(InvalidValue, match="what can be copied") as caught:
        module(x)
    assert caught.value.field == "act"
    module.close()


@pytest.mark.parametrize("kind", ["factor", "new", "removed"])
@pytest.mark.parametrize("is_module", [False, True])
def test_hooks_of_the_gradients_of_parameters_are_compared(kind: str, is_module: bool) -> None:
    model, (x, labels), factor = nn.Linear(6, 3).double(), batches(1)[0], [2.0]
    handle = model.weight.register_hook(lambda gradient: gradient * factor[0]) if kind != "new" else None
    graph = capture_of(model, x, labels)
    step = module_of(model, graph) if is_module else placed(graph)

    def run(size: int) -> Tensor:
        if is_module:
            step.zero_grad()
            functional.cross_entropy(step(x[:size]), labels[:size]).backward()
        else:
            dict(step.named_parameters())["weight"].grad = None
            step.backward(x[:size], targets=labels[:size])
        gradient = (step.weight if is_module else dict(step.named_parameters())["weight"]).grad
        assert gradient is not None
        weight = model.weight.detach().requires_grad_()
        loss = functional.cross_entropy(functional.linear(x[:size], weight, model.bias), labels[:size])
        return gradient / torch.autograd.grad(loss, weight)[0]

    now = 1.0 if kind == "new" else 2.0
    torch.testing.assert_close(run(5), torch.full((3, 6), now).double())
    if kind == "factor":
        factor[0] = now = 3.0
    elif handle is not None:
        handle.remove()
        now = 1.0
    else:
        model.weight.register_hook(lambda gradient: gradient * 4.0)
        now = 4.0
    with pytest.raises(InvalidValue, match="recapture"):
        run(5)
    torch.testing.assert_close(run(3), torch.full((3, 6), now).double())
    step.recapture()
    torch.testing.assert_close(run(5), torch.full((3, 6), now).double())
    step.close()


def test_hooks_of_the_parameters_of_a_module_may_come_at_any_time() -> None:
    """Autograd runs them behind the module, as with any other."""
    model, (x, labels) = nn.Linear(6, 3).double(), batches(1)[0]
    module = module_of(model, capture_of(model, x, labels))
    gradients = []
    for factor in (1.0, 3.0):
        module.weight.register_hook(lambda gradient, factor=factor: gradient * factor)
        module.zero_grad()
        functional.cross_entropy(module(x), labels).backward()
        gradients.append(module.weight.grad.clone())
    torch.testing.assert_close(gradients[1], 3.0 * gradients[0])
    module.close()


def by_name(loss: Tensor) -> Tensor:
    from settings_of_test import weight

    return loss * weight


def by_module(loss: Tensor) -> Tensor:
    import settings_of_test as settings

    return loss * settings.weight


def by_module_within(loss: Tensor) -> Tensor:
    from settings_of_test import inner

    return loss * inner.weight


@pytest.mark.parametrize(
    ("weigh", "name"), [(by_name, "weight"), (by_module, "weight"), (by_module_within, "inner.weight")]
)
def test_what_is_imported_when_it_is_read_is_compared(
    weigh: Callable[[Tensor], Tensor], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: Any = ModuleType("settings_of_test")
    settings.weight, settings.inner = 1.0, ModuleType("settings_of_test.inner")
    settings.inner.weight = 1.0
    monkeypatch.setitem(sys.modules, "settings_of_test", settings)
    model, (x, labels) = nn.Linear(6, 3).double(), batches(1)[0]

    def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
        return weigh(functional.cross_entropy(output, labels))

    with placed(capture(model, x, loss_fn, targets=labels)) as step:
        step.backward(x, targets=labels)
        (settings.inner if name.startswith("inner") else settings).weight = 2.0
        with pytest.raises(InvalidValue, match=r"is 2\.0, expected 1\.0, as captured") as caught:
            step.backward(x, targets=labels)
        assert caught.value.field == f"settings_of_test.{name}"
        step.recapture()
        torch.testing.assert_close(step.backward(x, targets=labels), loss_fn(model(x), labels).detach())
