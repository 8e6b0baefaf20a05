"""One placement takes inputs of several shapes, evaluates, and hands out more than the loss."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import HOST, Classifier, apart, assert_same_state, batches, captured, classifier, placed, twin
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from rlplace.errors import CaptureError, InvalidValue, UnknownName
from rlplace.export import PlacedModel, check_export
from rlplace.graphs import OptimizerSpec, capture
from rlplace.graphs.optimizers import torch_optimizer
from rlplace.measure import Problem
from rlplace.measure.execute.residents import Residents
from rlplace.measure.timing.threads import intra_op_threads


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("other_shapes", ["capture", "eager"])
def test_the_last_small_batch_trains_as_in_eager(other_shapes: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = classifier()
    eager = twin(model)
    optimizer = torch.optim.Adam(eager.parameters(), lr=0.1)
    caplog.set_level(logging.INFO, "rlplace")
    with placed(captured(model, OptimizerSpec("adam", lr=0.1)), other_shapes=other_shapes) as step:
        for size in (5, 5, 2, 5, 2, 3):
            ((x, labels),) = batches(1, size, seed=size)
            torch.testing.assert_close(step(x, targets=labels), eager_step(eager, optimizer, x, labels))
        assert_same_state(step.state_dict(), eager.state_dict())
        assert step.num_graphs == (3 if other_shapes == "capture" else 1)
        assert all(parameter.grad is None for parameter in step.parameters())
    said = [record.getMessage() for record in caplog.records]
    if other_shapes == "capture":
        assert said[-1] == "captured inputs of shapes ((3, 6), (3,)): 3 graphs share this placement"
    else:
        assert not said


def test_no_team_of_threads_copies_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for its next work on the cores of the devices, while these run the step."""
    counts: list[int] = []
    set_tensor = Residents.set_tensor

    def counted(self: Residents, *args: Any) -> None:
        counts.append(torch.get_num_threads())
        set_tensor(self, *args)

    monkeypatch.setattr(Residents, "set_tensor", counted)
    with intra_op_threads(2), placed(captured(classifier())) as step:
        ((x, labels),) = batches(1, 5)
        step.backward(x, targets=labels)
        assert torch.get_num_threads() == 2
    assert counts
    assert set(counts) == {1}


@pytest.mark.parametrize("other_shapes", ["capture", "eager"])
def test_gradients_of_another_shape(other_shapes: Any) -> None:
    model = classifier()
    with placed(captured(model), other_shapes=other_shapes) as step:
        for size in (2, 5):
            ((x, labels),) = batches(1, size)
            step.backward(x, targets=labels, loss_scale=2.0)
            (functional.cross_entropy(model(x), labels) * 2).backward()
        for (name, found), expected in zip(step.named_parameters(), model.parameters(), strict=True):
            assert (found.grad is None) == (expected.grad is None), name
            if found.grad is not None:
                torch.testing.assert_close(found.grad, expected.grad, msg=name)
        assert_same_state(step.state_dict(), model.state_dict())


def test_other_shapes_are_refused_on_request() -> None:
    ((x, labels),) = batches(1, 2)
    with placed(captured(classifier(), "sgd"), other_shapes="refuse") as step:
        with pytest.raises(InvalidValue, match="shapes that it was captured with"):
            step(x, targets=labels)
        assert step.num_graphs == 1
    with pytest.raises(UnknownName, match="unknown way with other shapes 'captur'"):
        placed(captured(classifier()), other_shapes="captur")


def test_shapes_that_the_model_cannot_take_are_told() -> None:
    ((x, labels),) = batches(1, 4)
    with placed(captured(classifier(), "sgd")) as step, pytest.raises(CaptureError, match="batch_size"):
        step(x[:3], targets=labels)


def test_the_mode_is_that_of_the_capture_whatever_the_model_is_in_later() -> None:
    model = classifier(dropout=0.5)
    eager = twin(model)
    ((x, labels),) = batches(1, 4)
    with placed(captured(model, "sgd")) as step:
        model.eval()
        step(x, targets=labels)
        eager(x)
        torch.testing.assert_close(step.state_dict()["norm.running_mean"], eager.norm.running_mean)
        assert not model.training
        assert not model.dropout.training


def test_evaluation_reads_the_trained_parameters_and_changes_nothing() -> None:
    model = classifier(dropout=0.5)
    with placed(captured(model, "sgd")) as step:
        for x, labels in batches(3):
            step(x, targets=labels)
        before = step.state_dict()
        trained = twin(model)
        trained.load_state_dict(before)
        trained.eval()
        for size in (5, 3, 5):
            ((x, _),) = batches(1, size, seed=size)
            torch.testing.assert_close(step.evaluate(x), trained(x).detach())
        assert step.num_graphs == 3
        assert step.num_steps == 3
        assert_same_state(step.state_dict(), before, 0.0)
        assert model.training
        with pytest.raises(InvalidValue, match="inputs is"):
            step.evaluate(x, x)


@pytest.mark.parametrize("optimizer", [None, "adam"])
def test_a_loss_function_may_return_more_than_the_loss(optimizer: str | None) -> None:
    model = classifier()
    eager = twin(model)
    (first, labels), (x, others) = batches(2)

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        loss = functional.cross_entropy(output, target)
        return loss, {"right": (output.argmax(1) == target).sum(), "logits": output, "name": "train"}

    graph = capture(model, first, loss_fn, optimizer, targets=labels)
    with PlacedModel(graph, HOST, apart(graph)) as step:
        loss, extras = step.backward(x, targets=others)
        expected, more = loss_fn(eager(x), others)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(extras["logits"], more["logits"].detach())
        assert (extras["right"], extras["name"]) == (more["right"], "train")
        torch.testing.assert_close(dict(step.named_parameters())["first.weight"].grad, eager.first.weight.grad)
    if optimizer is not None:
        assert check_export(graph, HOST, apart(graph)).ok


@pytest.mark.parametrize("loss", ["auto", "separate", "joined"])
def test_micro_batches_take_the_loss_alone(loss: str) -> None:
    (x, labels), *_ = batches(1, 4)
    model = nn.Linear(6, 3).double()
    with pytest.raises(CaptureError, match="returned a tuple, expected the loss alone"):
        capture(
            model,
            x,
            lambda y, t: (functional.cross_entropy(y, t), y),
            "sgd",
            targets=labels,
            micro_batches=2,
            loss=loss,
        )


def test_micro_batches_of_other_sizes() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    eager = twin(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=1e-3)
    ((x, labels),) = batches(1, 4)
    graph = capture(model, x, functional.cross_entropy, "sgd", targets=labels, micro_batches=3)
    with PlacedModel(graph, HOST, apart(graph)) as step:
        for size in (4, 2, 1, 5):
            ((x, labels),) = batches(1, size, seed=size)
            torch.testing.assert_close(step(x, targets=labels), eager_step(eager, optimizer, x, labels))
        assert_same_state(step.state_dict(), eager.state_dict())
        ((x, _),) = batches(1, 2)
        torch.testing.assert_close(step.evaluate(x), eager(x).detach())


class Adds(nn.Module):
    """Writes to its input, and replaces and changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        self.calls += 1
        self.last = x.detach().sum(0)
        out: Tensor = self.linear(x)
        return out


@pytest.mark.parametrize("other_shapes", ["capture", "eager"])
def test_a_model_that_writes_to_its_input_does_so_placed(other_shapes: Any) -> None:
    model = Adds()
    eager = twin(model)
    graph = capture(model, torch.ones(5, 6), lambda y: y.sum(), "sgd")
    with PlacedModel(graph, HOST, apart(graph), other_shapes=other_shapes) as step:
        for size in (5, 2):
            ours, theirs = torch.ones(size, 6), torch.ones(size, 6)
            step.backward(ours)
            eager(theirs)
            assert torch.equal(ours, theirs)
        assert_same_state(step.state_dict(), eager.state_dict(), 1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", None, "inference"])
def test_whatever_runs_a_step_what_it_writes_to_its_input_is_seen_and_the_sample_is_left_alone(
    optimizer: str | None,
) -> None:
    model, sample = Adds(), torch.ones(5, 6)
    loss_fn = None if optimizer == "inference" else torch.sum
    graph = capture(model, sample, loss_fn, None if optimizer == "inference" else optimizer)
    problem = Problem.profile(graph, HOST, num_groups=2)
    assert torch.equal(sample, torch.ones(5, 6))  # the capture and the profile ran the step on copies
    eager = twin(model)
    with PlacedModel(graph, problem.host, apart(graph)) as step:
        for view in (lambda: torch.ones(5, 6), lambda: torch.ones(6, 5).t(), lambda: torch.ones(7, 6)[1:6]):
            ours, theirs = view(), view()
            returned = step(ours)
            expected = eager(theirs)
            assert torch.equal(ours, theirs)
            if optimizer != "sgd":  # there eager would have to step too
                torch.testing.assert_close(returned, expected.detach() if loss_fn is None else expected.detach().sum())
    assert torch.equal(sample, torch.ones(5, 6))


def test_a_closed_step_says_so() -> None:
    (x, labels), *_ = batches(1)
    with placed(captured(Classifier().double())) as step:
        pass
    from rlplace.errors import RunnerError

    with pytest.raises(RunnerError, match="it was closed"):
        step(x, targets=labels)


@pytest.mark.parametrize("other_shapes", ["capture", "eager"])
def test_other_shapes_are_cast_as_the_first(other_shapes: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = capture(model, torch.ones(5, 6), lambda y: (y.float().sum(), y), "sgd")
    with PlacedModel(graph, HOST, apart(graph), other_shapes=other_shapes) as step:
        for size in (5, 2):
            assert step.backward(torch.ones(size, 6))[1].dtype == torch.bfloat16
            assert step.evaluate(torch.ones(size, 6)).dtype == torch.bfloat16
    plain = capture(model, torch.ones(5, 6), lambda y: (y.sum(), y), "sgd")
    with (
        PlacedModel(plain, HOST, apart(plain), other_shapes=other_shapes) as step,
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        assert step.backward(torch.ones(2, 6))[1].dtype == torch.float32


def test_evaluations_draw_anew_and_leave_the_draws_of_training(tmp_path: Path) -> None:
    class Sampling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(functional.dropout(x, 0.5, True))
            return out

    x, path = torch.ones(4, 6), tmp_path / "s.safetensors"
    graph = capture(Sampling(), x, lambda output: output.square().mean(), "sgd")
    with placed(graph) as one, placed(graph) as other:
        first, second = one.evaluate(x), one.evaluate(x)
        assert not torch.equal(first, second)
        assert torch.equal(other.evaluate(x), first)
        one.save(path)
        assert all(torch.equal(one(x), other(x)) for _ in range(2))  # one was evaluated more often
        other.load(path)
        assert other.num_steps == 0
        one.load(path)
        assert torch.equal(one.evaluate(x), other.evaluate(x))


def test_a_state_without_a_count_of_evaluations_loads(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    with placed(captured(classifier(), "sgd")) as step:
        step.save(path)
        with safe_open(path, framework="pt") as file:
            told = json.loads(file.metadata()["rlplace"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
        del told["num_evaluations"]
        save_file(tensors, path, metadata={"rlplace": json.dumps({**told, "num_steps": 4})})
        step.load(path)
        assert step.num_steps == 4


class ByLength(nn.Module):
    """Layers that only some lengths use."""

    def __init__(self, uses: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.uses = uses
        self.layers = nn.ModuleDict({name: nn.Linear(6, 3) for name in uses})

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layers[name](x) for name, sizes in self.uses.items() if len(x) in sizes]).sum(0)


USES = {
    "more later": {"a": (5, 3, 2), "b": (3,)},
    "fewer later": {"a": (5, 3, 2), "b": (5,)},
    "others": {"a": (5,), "b": (3,), "c": (2,), "d": (5, 3)},
}
SIZES = (5, 3, 5, 2, 3, 5)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("uses", USES)
def test_parameters_that_only_some_shapes_use_are_updated_by_these_alone(
    uses: str, optimizer: str, tmp_path: Path
) -> None:
    """As in eager, where a parameter without a gradient is skipped; and so after a load into a new step."""
    torch.manual_seed(0)
    model = ByLength(USES[uses]).double()
    eager, spec = twin(model), OptimizerSpec(optimizer, lr=0.1)
    stepper = torch_optimizer(spec, list(eager.parameters()))
    if optimizer == "momentum":  # PyTorch's fused one takes no parameters that begin later
        stepper = torch.optim.SGD(eager.parameters(), lr=0.1, momentum=spec.momentum)
    with placed(captured(model, spec)) as step, placed(captured(model, spec)) as other:
        for size in SIZES:
            ((x, labels),) = batches(1, size, seed=size)
            torch.testing.assert_close(step(x, targets=labels), eager_step(eager, stepper, x, labels))
        assert_same_state(step.state_dict(), eager.state_dict())
        step.save(tmp_path / "state")
        other.load(tmp_path / "state")
        for size in SIZES:
            ((x, labels),) = batches(1, size, seed=size)
            torch.testing.assert_close(other(x, targets=labels), eager_step(eager, stepper, x, labels))
        assert_same_state(other.state_dict(), eager.state_dict())


@pytest.mark.parametrize("has_optimizer", [False, True])
@pytest.mark.parametrize("uses", USES)
def test_gradients_are_those_of_the_parameters_that_a_shape_uses(uses: str, has_optimizer: bool) -> None:
    torch.manual_seed(0)
    model = ByLength(USES[uses]).double()
    eager = twin(model)
    stepper = torch.optim.AdamW(eager.parameters(), lr=1e-3)
    with placed(captured(model, "adamw" if has_optimizer else None)) as step:
        optimizer = step.optimizer if has_optimizer else torch.optim.AdamW(list(step.parameters()), lr=1e-3)
        for size in SIZES:
            ((x, labels),) = batches(1, size, seed=size)
            step.zero_grad()
            step.backward(x, targets=labels)
            stepper.zero_grad()
            functional.cross_entropy(eager(x), labels).backward()
            for (name, found), expected in zip(step.named_parameters(), eager.parameters(), strict=True):
                assert (found.grad is None) == (expected.grad is None), name
                if found.grad is not None:
                    torch.testing.assert_close(found.grad, expected.grad, msg=name)
            optimizer.step()
            stepper.step()
        assert_same_state(step.state_dict(), eager.state_dict())
