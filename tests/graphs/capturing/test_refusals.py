"""What no graph can hold is refused: which op, on which line, what to do instead; and nothing is left changed."""

from __future__ import annotations

import inspect
import logging
import random as python_random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Function, Model, mean_square, random
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


def branches(y: Tensor) -> Tensor:
    if y.sum() > 0:
        return y
    return -y


def selects(y: Tensor) -> Tensor:
    return y[y > 0]


def scales(y: Tensor) -> Tensor:
    return y * y.max().item()


def loops(y: Tensor) -> Tensor:
    for _ in range(int(y.sum())):
        y = y * 2
    return y


def uniques(y: Tensor) -> Tensor:
    return torch.unique(y)


def lists(y: Tensor) -> Tensor:
    return y * y.tolist()[0][0]


@pytest.mark.parametrize(
    ("function", "op", "line"),
    [
        (branches, "aten._local_scalar_dense.default", "if y.sum() > 0:"),
        (selects, "aten.nonzero.default", "return y[y > 0]"),
        (scales, "aten._local_scalar_dense.default", "return y * y.max().item()"),
        (loops, "aten._local_scalar_dense.default", "for _ in range(int(y.sum())):"),
        (uniques, "aten._unique2.default", "return torch.unique(y)"),
        (lists, "aten._local_scalar_dense.default", "return y * y.tolist()[0][0]"),
    ],
)
def test_control_flow_that_depends_on_data_names_the_op_and_the_line(
    function: Callable[[Tensor], Tensor], op: str, line: str
) -> None:
    refused = refusal(function)
    assert refused.op == op
    first_line = inspect.getsourcelines(function)[1]
    name, _, number = refused.source.partition(" in ")[0].rpartition(":")
    assert name == __file__
    assert first_line < int(number) <= first_line + 3
    assert refused.source.endswith(f"in {function.__name__}: {line}")
    assert op in str(refused)
    assert line in str(refused)
    assert "torch.where" in str(refused)


def converts(y: Tensor) -> Tensor:
    return y * float(y.detach().numpy().max())


def formats(y: Tensor) -> Tensor:
    return y if f"{y.sum():.3f}" else -y


def multiplies(y: Tensor) -> Tensor:
    return y @ y


def goes_to_a_gpu(y: Tensor) -> Tensor:
    return torch.add(y, torch.ones(6, device="meta"))


def backs(y: Tensor) -> Tensor:
    loss = y.sum()
    loss.backward()
    return loss


def test_packed_sequences_get_one_line() -> None:
    def packs(model: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return model.lstm(packed)[0].data

    model, told = Model(packs, lstm=nn.LSTM(4, 5, batch_first=True)), r"run the layer on the padded tensor"
    with pytest.raises(CaptureError, match=rf"pack_padded_sequence\(x, lengths.*{told}") as refused:
        capture(model, (torch.ones(2, 3, 4), torch.tensor([3, 2])), lambda y: y.sum())
    assert "\n" not in str(refused.value)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    for inputs in (packed, (packed,), {"x": packed}):
        with pytest.raises(InvalidValue, match=r"is 'a packed sequence', expected tensors.*pass the padded tensor"):
            capture(nn.LSTM(4, 5), inputs)


@pytest.mark.parametrize(
    ("function", "line", "advice"),
    [
        (converts, "return y * float(y.detach().numpy().max())", "print or convert what the step returns"),
        (formats, 'return y if f"{y.sum():.3f}" else -y', "print or convert what the step returns"),
        (multiplies, "return y @ y", "raises by itself, in eager as well: RuntimeError: mat1 and mat2"),
        (goes_to_a_gpu, "return torch.add(y, torch.ones(6, device=\"meta\"))", "to one device"),
        (backs, "", "must not call `backward`"),
    ],
)  # fmt: skip
def test_other_failures_say_what_to_do(function: Callable[[Tensor], Tensor], line: str, advice: str) -> None:
    refused = refusal(function)
    assert refused.source.endswith(line)
    assert advice in str(refused)


def test_a_refusal_prints_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        refusal(multiplies)
    assert not caplog.records


def test_a_failure_inside_torch_names_the_module() -> None:
    def words(model: nn.Module, x: Tensor) -> Tensor:
        return model.loss(x, torch.tensor([0, 4, 8])).loss

    model = Model(words, loss=nn.AdaptiveLogSoftmaxWithLoss(4, 10, [3], div_value=2.0))
    with pytest.raises(CaptureError, match=r"module loss \(AdaptiveLogSoftmaxWithLoss\).*return model.loss\(x"):
        capture(model, torch.ones(3, 4), lambda loss: loss)


def test_a_parameter_changed_in_forward_is_refused() -> None:
    def counts(model: nn.Module, x: Tensor) -> Tensor:
        model.weight.add_(1)
        return x * model.weight

    with pytest.raises(CaptureError, match=r"leaf Variable.*model.weight.add_\(1\).*no_grad.*register_buffer"):
        capture(Model(counts, weight=nn.Parameter(torch.ones(4))), torch.ones(3, 4), mean_square)


class Changes(nn.Module):
    """A layer and a buffer, and a `forward` that changes them."""

    def __init__(self, change: Callable[[Changes], object]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 3), change
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return self.linear(x) * self.scale


def assigns_data(model: Changes) -> None:
    model.linear.weight.data = model.linear.weight.data * 0.9


def assigns_data_of_a_buffer(model: Changes) -> None:
    model.scale.data = model.scale * 0.9


def replaces_a_parameter(model: Changes) -> None:
    model.linear.weight = nn.Parameter(model.linear.weight.detach() * 0.9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (assigns_data, r"`linear\.weight\.data = \.\.\.`.*no_grad\(\): linear\.weight\.copy_"),
        (assigns_data_of_a_buffer, r"`scale\.data = \.\.\.`.*no_grad\(\): scale\.copy_"),
        (replaces_a_parameter, r"replaces parameter 'linear\.weight'.*linear\.weight\.copy_"),
    ],
)
def test_tensors_that_are_given_other_memory_in_forward_are_refused(
    change: Callable[[Changes], object], message: str
) -> None:
    model = Changes(change)
    before = model.linear.weight
    with pytest.raises(CaptureError, match=message):
        capture(model, torch.randn(5, 4), mean_square, "sgd")
    assert model.linear.weight is before


def test_a_generator_of_draws_is_refused_with_what_to_do() -> None:
    draws = Model(
        lambda model, x: model.linear(x) * torch.rand(3, generator=model.generator),
        linear=nn.Linear(4, 3),
        generator=torch.Generator(),
    )
    with pytest.raises(CaptureError, match=r"Leave `generator=` out: draws are seeded by the step"):
        capture(draws, torch.randn(5, 4), mean_square, "sgd")


def test_a_loss_that_writes_to_its_own_parameters_is_refused() -> None:
    teacher = nn.Linear(4, 3).requires_grad_(False)

    def loss_fn(y: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            teacher.weight.mul_(0.9)
        return nn.functional.mse_loss(y, teacher(x))

    x, before = torch.randn(5, 4), teacher.weight.clone()
    with pytest.raises(CaptureError, match=r"writes to parameter `teacher\.weight` in place"):
        capture(nn.Linear(4, 3), x, loss_fn, "sgd", targets=x)
    assert torch.equal(teacher.weight, before)


def test_a_value_that_is_overwritten_before_the_backward_reads_it_is_refused() -> None:
    def overwrites(y: Tensor) -> Tensor:
        z = y.exp()
        z.mul_(2)
        return z

    assert "`inplace=False`" in str(refusal(overwrites))


@pytest.fixture
def ops() -> Iterator[Any]:
    with torch.library._scoped_library("rlplace_refused", "FRAGMENT") as library:
        yield library


def sine(ops: Any, schema: str, **impls: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    ops.define(f"sine{schema}")
    for key, impl in impls.items():
        if key == "fake":
            torch.library.register_fake("rlplace_refused::sine", impl, lib=ops)
        else:
            ops.impl("sine", impl, key)
    return lambda y: torch.ops.rlplace_refused.sine(y)


def test_an_op_without_a_fake_is_refused(ops: Any) -> None:
    function = sine(ops, "(Tensor x) -> Tensor", CPU=torch.sin)
    assert "register_fake" in str(refusal(function))


def test_an_op_without_a_gradient_is_refused(ops: Any) -> None:
    function = sine(ops, "(Tensor x) -> Tensor", CPU=torch.sin, fake=torch.empty_like)
    assert "register_autograd" in str(refusal(function))


def test_an_op_that_writes_to_its_arguments_is_refused(ops: Any) -> None:
    function = sine(ops, "(Tensor(a!) x) -> ()", CPU=torch.sin_, fake=lambda x: None)

    def writes(y: Tensor) -> Tensor:
        z = y.detach().clone()
        function(z)
        return y * z

    assert "must return new tensors" in str(refusal(writes))


def test_printing_a_tensor_is_no_obstacle(capsys: pytest.CaptureFixture[str]) -> None:
    def prints(y: Tensor) -> Tensor:
        print(y)
        return y

    graph = capture(Function(prints), random(3, 4), mean_square)
    assert "size=(3, 6)" in capsys.readouterr().out
    assert run_graph(graph).result.shape == ()


def refuses(y: Tensor) -> Tensor:
    if len(y) == 3:
        raise KeyError("three samples")
    return y


def fails_while_traced(y: Tensor) -> Tensor:
    if type(y) is not Tensor:
        raise TypeError("a plain tensor is wanted")
    return y


def test_what_a_model_raises_by_itself_is_told_from_what_tracing_does() -> None:
    refused = refusal(refuses)
    assert str(refused).startswith(
        "the model or its loss raises by itself, in eager as well: KeyError: 'three samples'"
    )
    assert refused.source.endswith('in refuses: raise KeyError("three samples")')
    assert str(refusal(fails_while_traced)).startswith("cannot capture the model: TypeError: a plain tensor")


def test_distributions_are_told_to_leave_their_arguments_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # stable-baselines3 switches it off

    def loss(y: Tensor, t: Tensor, **options: bool) -> Tensor:
        return -torch.distributions.Categorical(logits=y, **options).log_prob(t).mean()

    model, x, labels = nn.Linear(4, 6), torch.randn(3, 4), torch.tensor([0, 5, 2])
    with pytest.raises(CaptureError, match=r"Categorical\(logits=y.*pass it `validate_args=False`"):
        capture(model, x, loss, "sgd", targets=labels)
    graph = capture(model, x, lambda y, t: loss(y, t, validate_args=False), "sgd", targets=labels)
    assert run_graph(graph).result.item() == pytest.approx(loss(model(x), labels).item())


CROSS, X, INTS = nn.functional.cross_entropy, torch.randn(3, 4), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("model", "inputs", "loss_fn", "targets", "told"),
    [
        (nn.Linear(4, 6), X, CROSS, INTS.int(), "targets int32"),
        (nn.Linear(4, 6), X, CROSS, INTS.float(), "targets float32"),
        (nn.Linear(4, 6), X, CROSS, INTS.bool(), "targets bool"),
        (nn.Linear(4, 6), X.double(), CROSS, INTS, "inputs float64; targets int64; parameters float32"),
        (nn.Linear(4, 6), X.long(), CROSS, INTS, "inputs int64"),
        (nn.Linear(4, 6).half(), X, CROSS, INTS, "inputs float32; targets int64; parameters float16"),
        (nn.LayerNorm(4), X.double(), CROSS, INTS, "inputs float64"),
        (nn.Embedding(6, 4), X, lambda y, t: y.sum(), INTS, "inputs float32"),
        (nn.Conv1d(3, 2, 1), X[None].double(), lambda y, t: y.sum(), INTS, "inputs float64"),
        (
            nn.Sigmoid(),
            X.requires_grad_(),
            nn.functional.binary_cross_entropy,
            torch.ones(3, 4).long(),
            "targets int64",
        ),
    ],
)
def test_wrong_dtypes_are_told_at_capture(model: nn.Module, inputs: Any, loss_fn: Any, targets: Any, told: str) -> None:
    scale = Model(lambda model, y: y * model.scale.to(y.dtype), scale=nn.Parameter(torch.ones(())))
    model = nn.Sequential(nn.Identity(), model, scale)
    with pytest.raises(CaptureError, match=rf"Hint: now .*{told}") as refused:
        capture(model, inputs, loss_fn, "sgd", targets=targets)
    assert refused.value.source.startswith(__file__) or f", at {__file__}:" in str(refused.value)
