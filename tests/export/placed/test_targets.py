"""Placed steps take new labels with every batch, and nothing else than what they were captured with."""

from __future__ import annotations

import copy
import functools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Keywords, random
from torch import Tensor, nn
from torch.nn import functional

import rlplace
from rlplace.cli.main import main
from rlplace.errors import InvalidValue
from rlplace.export import PlacedModel, check_export
from rlplace.graphs import OpGraph, capture
from rlplace.measure import Host, Plan, Problem, Simulator
from rlplace.measure.timing.eager_step import EagerStep
from rlplace.search.rules import baselines


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, *, flag: bool = False, scale: float = 1.0) -> Tensor:
        y: Tensor = self.second(torch.relu(self.first(x))) * scale
        return -y if flag else y


class WeightedEntropy(nn.Module):
    """A loss with a constant of its own and two targets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 0.5]))

    def forward(self, output: Tensor, labels: Tensor, importance: Tensor) -> Tensor:
        return (functional.cross_entropy(output, labels, weight=self.weight, reduction="none") * importance).mean()


def batches(count: int) -> list[tuple[Tensor, tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(5, 6, generator=generator),
            (torch.randint(3, (5,), generator=generator), torch.rand(5, generator=generator)),
        )
        for _ in range(count)
    ]


def placed_on_cores(graph: OpGraph, **options: Any) -> tuple[Problem, Plan, PlacedModel]:
    problem = Problem.profile(graph, Host.detect("cores"), num_groups=6)
    plan = Simulator(problem).plan(baselines.random(problem, np.random.default_rng(1))[0])
    return problem, plan, PlacedModel(graph, problem.host, plan, **options)


def test_every_batch_brings_its_labels() -> None:
    torch.manual_seed(0)
    model, loss_fn = Classifier(), WeightedEntropy()
    (first, targets), *rest = batches(6)
    graph = capture(model, first, loss_fn, "adam", targets=targets)
    problem, plan, step = placed_on_cores(graph)
    eager = copy.deepcopy(model)
    optimizer = torch.optim.Adam(eager.parameters())
    for x, labels in rest:
        optimizer.zero_grad()
        expected = loss_fn(eager(x), *labels)
        expected.backward()
        optimizer.step()
        assert float(step(x, targets=labels)) == pytest.approx(expected.item(), rel=1e-5)
    for name, value in step.state_dict().items():
        torch.testing.assert_close(value, eager.state_dict()[name], rtol=1e-4, atol=1e-5)
    step.close()
    assert check_export(graph, problem.host, plan).max_loss_rel_diff < 1e-12
    alone = EagerStep(graph, problem.host)
    alone()
    assert alone.loss.item() == pytest.approx(loss_fn(model(first), *targets).item(), rel=1e-6)


@pytest.fixture(scope="module")
def step() -> Any:
    torch.manual_seed(0)
    x, (labels, _) = batches(1)[0]
    inputs = {"x": x, "flag": False, "scale": 0.5}
    graph = capture(Classifier(), inputs, functional.cross_entropy, "sgd", targets=labels)
    *_, placed = placed_on_cores(graph, other_shapes="refuse")
    yield placed
    placed.close()


X, (LABELS, _) = batches(1)[0]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, r"targets is None, expected 1 tensors, as captured.*labels of this batch"),
        ({"targets": ()}, r"targets is None"),
        ({"targets": (LABELS, LABELS)}, r"targets is '2 tensors', expected 1 tensors"),
        ({"targets": [3]}, r"targets\[0\] is 'int', expected a tensor"),
        ({"targets": LABELS[:4]}, r"target_0 is 'torch.int64 \(4,\)', expected torch.int64 \(5,\)"),
        ({"targets": LABELS.float()}, r"target_0 is 'torch.float32 \(5,\)'"),
        (
            {"targets": LABELS, "flag": True},
            r"inputs\['flag'\] is True, expected False, as captured.*Capture the model",
        ),
        ({"targets": LABELS, "flag": 0}, r"inputs\['flag'\] is 0, expected False"),
        ({"targets": LABELS, "scale": 0.25}, r"inputs\['scale'\] is 0.25, expected 0.5"),
        ({"targets": LABELS, "scale": torch.tensor(0.5)}, r"inputs\['scale'\] is tensor, expected 0.5"),
        ({"targets": LABELS, "x": 3.0}, r"inputs\['x'\] is 3.0, expected tensor"),
        (
            {"targets": LABELS, "x": X.numpy()},
            r"inputs\['x'\] is a NumPy array \(float32 \(5, 6\)\), expected a tensor, as.*Pass `torch\.from_numpy",
        ),
        (
            {"targets": LABELS, "x": X.tolist()},
            r"inputs is .{200,220}\.\.\., expected .*pass `torch\.tensor\(\.\.\.\)` of them",
        ),
        ({"targets": LABELS, "more": 1}, r"inputs is .*more=1\), expected \(x=tensor, flag=False, scale=0.5\), as"),
    ],
)
def test_another_call_than_the_captured_one_is_refused(step: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        step(**{"x": X, "flag": False, "scale": 0.5, **kwargs})


def test_labels_behind_the_inputs_are_told_their_place() -> None:
    x, (labels, _) = batches(1)[0]
    *_, placed = placed_on_cores(capture(Classifier(), x, functional.cross_entropy, "sgd", targets=labels))
    with pytest.raises(
        InvalidValue, match=r"expected \(tensor\), as captured\. Labels are given by name: `step\(x, targets="
    ):
        placed(x, labels)
    with pytest.raises(InvalidValue, match=r"expected \(tensor\), as captured\.$"):
        placed(x, x, targets=labels)
    placed.close()


def test_keywords_come_in_any_order(step: Any) -> None:
    before = step.state_dict()
    first = step(scale=0.5, targets=[LABELS], flag=False, x=X)
    step.load_state_dict(before)
    assert torch.equal(step(x=X, flag=False, scale=0.5, targets=LABELS), first)


def test_keys_of_a_dict_among_the_inputs_come_in_any_order() -> None:
    class TakesABatch(nn.Module):
        def forward(self, batch: dict[str, Tensor], more: dict[str, dict[str, Tensor]]) -> Tensor:
            return batch["a"] - 2 * batch["b"] + 4 * more["inner"]["c"] - 8 * more["inner"]["d"]

    a, b, c, d = (torch.tensor([float(value)]) for value in (1, 10, 100, 1000))
    *_, placed = placed_on_cores(capture(TakesABatch(), ({"a": a, "b": b}, {"inner": {"c": c, "d": d}})))
    expected = TakesABatch()({"a": a, "b": b}, {"inner": {"c": c, "d": d}})
    assert torch.equal(placed({"b": b, "a": a}, {"inner": {"d": d, "c": c}}), expected)
    with pytest.raises(InvalidValue, match="as captured"):
        placed({"a": a, "z": b}, {"inner": {"c": c, "d": d}})
    placed.close()


def test_a_list_of_one_number_is_told_too() -> None:
    x = torch.ones(1)
    *_, placed = placed_on_cores(capture(nn.ReLU(), x))
    with pytest.raises(InvalidValue, match=r"pass `torch\.tensor\(\.\.\.\)` of them"):
        placed([1.0])
    placed.close()


def test_a_step_without_targets_takes_none() -> None:
    inputs = {"x": random(3, 4), "scale": 0.5, "extra": {"shift": random(4)}}
    *_, placed = placed_on_cores(capture(Keywords(), inputs))
    with pytest.raises(InvalidValue, match=r"targets is '1 tensors', expected None"):
        placed(**inputs, targets=LABELS)
    assert placed(**inputs, targets=None)["y"].shape == (3, 4)
    placed.close()


def test_a_model_may_have_an_argument_named_targets() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            return functional.cross_entropy(self.linear(x), targets)

    model = Own()
    *_, placed = placed_on_cores(capture(model, {"x": X, "targets": LABELS}, lambda loss: loss, "sgd"))
    other = (LABELS + 1) % 3
    expected = model(X, other).item()
    assert float(placed(x=X, targets=other)) == pytest.approx(expected, rel=1e-5)
    placed.close()


@pytest.mark.slow
def test_place_takes_targets() -> None:
    model = Classifier()
    placed = rlplace.place(model, X, functional.cross_entropy, "sgd", targets=LABELS, budget_s=1.0)
    other = (LABELS + 1) % 3
    expected = functional.cross_entropy(model(X), other).item()
    assert float(placed(X, targets=other)) == pytest.approx(expected, rel=1e-5)
    placed.close()


class NamedEntropy(nn.Module):
    """A loss with a constant of its own that takes its targets by name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 0.5]))

    def forward(self, output: Tensor, *, importance: Tensor, labels: Tensor) -> Tensor:
        return (functional.cross_entropy(output, labels, weight=self.weight, reduction="none") * importance).mean()


def by_name(output: Tensor, importance: Tensor, labels: Tensor) -> Tensor:
    return (functional.cross_entropy(output, labels, reduction="none") * importance).mean()


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("loss_fn", [NamedEntropy(), by_name, functools.partial(by_name)])
def test_labels_in_a_dict_are_given_by_name(loss_fn: Any, micro_batches: int) -> None:
    torch.manual_seed(0)
    model = Classifier()
    (first, targets), *rest = batches(4)
    named = {"labels": targets[0], "importance": targets[1]}
    cut: dict[str, Any] = {} if micro_batches == 1 else {"batch_dims": {"labels": 0, "importance": 0, "x": 0}}
    graph = capture(model, first, loss_fn, "sgd", targets=named, micro_batches=micro_batches, **cut)
    problem, plan, step = placed_on_cores(graph)
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=1e-3)
    for size, (x, (labels, importance)) in zip((5, 4, 5), rest, strict=True):  # other sizes are captured again
        x, labels, importance = x[:size], labels[:size], importance[:size]
        optimizer.zero_grad()
        expected = loss_fn(eager(x), labels=labels, importance=importance)
        expected.backward()
        optimizer.step()
        loss = step(x, targets={"importance": importance, "labels": labels})
        assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(step.evaluate(first), eager(first), rtol=1e-4, atol=1e-5)
    assert step.num_graphs == 3
    assert step.backward(first, targets=named).isfinite()
    for wrong, message in (
        ({"labels": targets[0]}, r"a dict of labels, expected a dict of labels, importance, as captured"),
        ({**named, "more": targets[0]}, "a dict of labels, importance, more"),
        (targets[0], "targets is a tensor, expected a dict of labels, importance, as captured"),
        ((*targets,), "targets is a tuple, expected a dict of labels, importance, as captured"),
    ):
        with pytest.raises(InvalidValue, match=message):
            step(first, targets=wrong)
        with pytest.raises(InvalidValue, match=message):
            step.backward(first[:4], targets=wrong)
    step.close()
    assert check_export(graph, problem.host, plan).max_loss_rel_diff < 1e-12
    alone = EagerStep(graph, problem.host)
    alone()
    assert alone.loss.item() == pytest.approx(loss_fn(model(first), **named).item(), rel=1e-6)


def test_a_dict_of_labels_is_held_against_the_loss_and_the_step(step: Any) -> None:
    for targets, message in (
        ({"labels": LABELS, "weights": LABELS}, r"importance, labels\)', expected one .* the targets labels, weights"),
        ({"labels": [0, 1]}, r"targets\['labels'\] is 'list', expected a tensor.*Pass `torch\.tensor"),
        ({0: LABELS}, r"targets\[0\] is 'Tensor', expected a tensor, by the name"),
    ):
        with pytest.raises(InvalidValue, match=message):
            capture(Classifier(), X, by_name, "sgd", targets=targets)
    with pytest.raises(InvalidValue, match="a dict of labels, expected a tensor or a tuple of tensors, as captured"):
        step(x=X, flag=False, scale=0.5, targets={"labels": LABELS})


WORK = """
import torch
from torch.nn import functional

def work():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    return model, torch.ones(5, 4), functional.cross_entropy, "sgd", torch.tensor([0, 1, 2, 0, 1])

def named():
    model, x, loss_fn, optimizer, labels = work()
    return model, x, lambda output, labels: loss_fn(output, labels), optimizer, {"labels": labels}

def frozen():
    model, x, loss_fn, optimizer, labels = work()
    return model, x, lambda output: loss_fn(output, labels), optimizer
"""


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "labelled_work.py").write_text(WORK, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield "labelled_work"
    sys.modules.pop("labelled_work", None)


def test_a_users_function_with_targets_is_measured(users_module: str, capsys: pytest.CaptureFixture[str]) -> None:
    for function in ("work", "named"):
        assert main(["measure", f"{users_module}:{function}", "--host", "cores", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["status"] == "ok"
    assert main(["simulate", f"{users_module}:named", "--host", "4xV100-pcie", "--micro-batches", "2", "--json"]) == 0


def test_a_users_function_that_closes_over_labels_exits_with_2(
    users_module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", f"{users_module}:frozen", "--host", "4xV100-pcie"]) == 2
    assert "takes `labels` (int64 (5,)) from outside" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_a_users_function_with_targets(
    users_module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{users_module}:work"
    assert main(["train", name, "--host", "cores", "--budget", "1s", "--run", "r", "--quiet"]) == 0
    capsys.readouterr()  # the table
    assert main(["export", "r", "--check", "--workload", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    assert main(["export", "r", "--workload", name]) == 0
    names: dict[str, Any] = {"__name__": "step", "__file__": str(tmp_path / "r" / "step.py")}
    exec(compile((tmp_path / "r" / "step.py").read_text(encoding="utf-8"), "step.py", "exec"), names)
    assert names["labels"]["targets"][0].shape == (5,)
    assert names["step"].num_steps == 10
