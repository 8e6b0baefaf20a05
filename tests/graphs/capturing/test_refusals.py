"""What no graph can hold is refused, with what to do instead, and nothing is left changed."""

from __future__ import annotations

import random as python_random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Function, mean_square, random
from torch import Tensor, nn

from rlplace.errors import CaptureError, InvalidValue, UnknownName
from rlplace.graphs import capture, run_graph
from rlplace.graphs.program import OptimizerSpec

ARRAY = np.ones((2, 3), dtype=np.float32)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (ARRAY, r"inputs is 'a NumPy array', expected tensors\. Pass `torch\.from_numpy"),
        ((ARRAY,), "a NumPy array"),
        ({"input": ARRAY}, "a NumPy array"),
        ([1.0, 2.0, 3.0], r"inputs is 'a list of numbers', expected tensors\. Pass `torch\.tensor"),
        (ARRAY.tolist(), "a list of numbers"),
        ((ARRAY.tolist(),), "a list of numbers"),
        (3.0, "inputs is 'float', expected a tensor, a tuple or a dict"),
    ],
)
def test_inputs_that_are_no_tensors_get_one_line(inputs: Any, message: str) -> None:
    with pytest.raises(InvalidValue, match=message) as refused:
        capture(nn.Linear(3, 2), inputs)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (np.array([0, 1]), r"targets is 'ndarray'.*Pass `torch\.from_numpy"),
        ([0, 1], r"targets\[0\] is 'int'.*Pass `torch\.tensor"),
    ],
)
def test_targets_that_are_no_tensors_get_one_line(targets: Any, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        capture(nn.Linear(3, 2), torch.ones(2, 3), nn.functional.cross_entropy, targets=targets)


def test_lists_of_numbers_beside_tensors_are_plain_arguments() -> None:
    class Reshapes(nn.Module):
        def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
            return x.reshape(sizes) * 2

    assert capture(Reshapes(), (torch.ones(2, 3), [3, 2])).tensor_shapes[-1] == (3, 2)


def draws(y: Tensor) -> Tensor:
    return y * python_random.gauss(0.0, 1.0)


def test_a_number_from_pythons_generator_is_refused_and_taken_back() -> None:
    python_random.seed(3)
    expected = python_random.random()
    python_random.seed(3)
    refused = refusal(draws)
    assert python_random.random() == expected
    assert refused.source.endswith("in draws: return y * python_random.gauss(0.0, 1.0)")
    assert "draw with torch" in str(refused)


def test_a_number_from_numpys_generator_is_refused_and_taken_back() -> None:
    np.random.seed(3)
    expected = np.random.rand()
    np.random.seed(3)
    assert "NumPy's random generator" in str(refusal(lambda y: y * float(np.random.rand())))
    assert np.random.rand() == expected


def test_a_plain_attribute_written_in_place_is_refused_and_taken_back() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.seen = torch.zeros(4)

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return self.linear(x) * self.seen

    model = Counts()
    with pytest.raises(CaptureError, match=r"writes to '1.seen' in place.*register_buffer"):
        capture(nn.Sequential(nn.ReLU(), model), torch.ones(3, 4), mean_square)
    assert model.seen.tolist() == [0, 0, 0, 0]


def test_what_is_written_may_share_no_memory() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x += 1
            return x * y

    x = torch.ones(4)
    for y in (x, x[:1], x[3:]):
        with pytest.raises(CaptureError, match=r"writes to input_0, which shares memory with input_1.*clone"):
            capture(Adds(), (x, y))
    both = torch.ones(2, 4)
    assert run_graph(capture(Adds(), (both[0], both[1]))).result.tolist() == [2, 2, 2, 2]
    assert run_graph(capture(Function(torch.mul, 4, torch.float32), (x, x))).result.shape == (4,)  # is only read
    linear = nn.Linear(2, 2)
    linear.bias = nn.Parameter(linear.weight.detach()[0])
    capture(linear, x[:2], mean_square)  # nothing is updated
    with pytest.raises(CaptureError, match=r"writes to \w+, which shares memory with \w+"):
        capture(linear, x[:2], mean_square, "sgd")


def test_a_post_accumulate_hook_is_refused() -> None:
    linear = nn.Linear(4, 4)
    linear.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(CaptureError, match=r"module 0 \(Linear\) has parameters with post-accumulate hooks"):
        capture(nn.Sequential(linear), torch.ones(3, 4), mean_square)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_an_op_that_runs_a_graph_of_its_own_is_refused() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return flex_attention(x, x, x)

    with pytest.raises(CaptureError, match=r"op flex_attention in module the root takes a .*graph of their own"):
        capture(Attends(), torch.ones(1, 1, 16, 8))


def test_a_model_loss_or_optimizer_of_another_type_is_refused() -> None:
    linear, x = nn.Linear(4, 4), torch.ones(3, 4)
    with pytest.raises(InvalidValue, match=r"model is 'the class Linear', expected a torch.nn.Module"):
        capture(nn.Linear, x)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match=r"model is 'function', expected a torch.nn.Module"):
        capture(mean_square, x)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match=r"loss_fn is 'str', expected a function"):
        capture(linear, x, "mse")  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match=r"optimizer is 'torch.optim.sgd.SGD', expected one of sgd, momentum"):
        capture(linear, x, mean_square, torch.optim.SGD(linear.parameters()))  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="lion"):
        capture(linear, x, mean_square, OptimizerSpec("lion", lr=1.0))


def test_sparse_gradients_and_tensors_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"gradient of parameter 'weight' is sparse.*sparse=False"):
        capture(nn.Embedding(7, 4, sparse=True), torch.tensor([1, 2]), mean_square)
    with pytest.raises(CaptureError, match=r"input 0 is a sparse tensor.*to_dense"):
        capture(nn.Linear(4, 2), torch.eye(4).to_sparse(), mean_square)
    with pytest.raises(CaptureError, match=r"_to_sparse.*is sparse"):
        capture(Function(lambda y: y.to_sparse() @ y.t()), random(3, 4), mean_square)


def test_tensors_of_several_devices_or_of_none_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"weight is on device meta.*FakeTensorMode"):
        capture(nn.Linear(4, 2, device="meta"), torch.ones(3, 4))
    with torch._subclasses.fake_tensor.FakeTensorMode():
        model, x = nn.Linear(4, 2), torch.ones(3, 4, device="cuda")
    with pytest.raises(CaptureError, match=r"2 devices \(weight on cpu, input 0 on cuda:0\)"):
        capture(model, x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_that_no_trace_goes_through_are_refused() -> None:
    linear, x = nn.Linear(4, 4), torch.ones(3, 4)
    with pytest.raises(CaptureError, match=r"module 1 \(LazyLinear\) has lazy parameters.*once with its inputs"):
        capture(nn.Sequential(linear, nn.LazyLinear(2)), x)
    with pytest.raises(CaptureError, match=r"module 0 \(DataParallel\).*its `module`"):
        capture(nn.Sequential(nn.DataParallel(linear)), x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"is a ScriptModule; pass the module that it was scripted from"):
        capture(torch.jit.script(nn.Linear(4, 4)), torch.ones(3, 4))


def refusal(function: Callable[[Tensor], Tensor]) -> CaptureError:
    with pytest.raises(CaptureError) as refused:
        capture(Function(function), random(3, 4), mean_square)
    return refused.value


def test_hooks_of_modules_are_told_and_those_of_torch_are_not() -> None:
    seen: list[Any] = []

    def records(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(output)

    def notes(module: nn.Module, given: Any, taken: Any) -> None:
        seen.append(taken)

    model = nn.Sequential(nn.Linear(4, 4), nn.utils.spectral_norm(nn.Linear(4, 4)))
    capture(model, torch.ones(3, 4), mean_square)
    model[0].register_forward_hook(records)
    model[1].register_full_backward_hook(notes)
    with pytest.warns(RuntimeWarning, match=r"0: forward hook \S*records; 1: backward hook \S*notes$"):
        capture(model, torch.ones(3, 4), mean_square)
    assert not seen  # they ran, and what they recorded of the capture is taken back


def test_a_loss_that_is_a_class_is_to_be_an_instance() -> None:
    with pytest.raises(InvalidValue, match=r"the class CrossEntropyLoss.*Make an instance: `CrossEntropyLoss\("):
        capture(nn.Linear(2, 2), torch.ones(1, 2), nn.CrossEntropyLoss, "sgd", targets=torch.zeros(1, dtype=torch.long))
