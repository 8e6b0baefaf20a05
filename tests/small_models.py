"""Small models, each with one trait that a capture can stumble over."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlplace.graphs import OpGraph, capture, run_graph
from rlplace.graphs.capturing.capture import as_call

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """A model, its inputs and its loss, in float64 so that equality means equality."""

    model: nn.Module
    inputs: Any
    loss_fn: Loss
    atol: float = 1e-9
    targets: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Eager:
    """What plain PyTorch makes of a `Case`."""

    loss: Tensor
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def run_eager(case: Case) -> Eager:
    """Loss, gradients, and the state after the step but before any update, on a copy of the model."""
    model, inputs = copy.deepcopy((case.model, case.inputs))
    args, kwargs = as_call(inputs)
    loss = case.loss_fn(model(*args, **kwargs), *case.targets)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return Eager(loss.detach(), gradients, {name: value.detach() for name, value in state.items()})


def assert_equals_eager(model: nn.Module, inputs: Any, loss_fn: Loss, **tolerance: float) -> OpGraph:
    """The graph of a step whose loss, gradients and buffers are those of plain PyTorch."""
    graph, eager = capture(model, inputs, loss_fn, "sgd"), copy.deepcopy(model)
    step, (args, kwargs) = run_graph(graph), as_call(copy.deepcopy(inputs))
    loss = loss_fn(eager(*args, **kwargs))
    loss.backward()
    torch.testing.assert_close(step.result, loss.detach(), **tolerance)
    expected = {name: each.grad for name, each in eager.named_parameters() if each.grad is not None}
    assert step.gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(step.gradients[name], gradient, **tolerance)
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(step.state[name], buffer.detach(), **tolerance)
    return graph


def step_graph(name: str, optimizer: str | None = "adam", **options: Any) -> OpGraph:
    """The captured step of one of `CASES`."""
    case = CASES[name]()
    return capture(case.model, case.inputs, case.loss_fn, optimizer, targets=case.targets, **options)


def mean_square(output: Any) -> Tensor:
    return (output**2).mean()


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    """Named parts, and a `forward` that is a function of the model and what it is given."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if type(part) is Tensor:
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.function(self, *args, **named)


class Function(nn.Module):
    """A linear layer before any function of its output."""

    def __init__(self, function: Callable[..., Any], width: int = 6, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width, dtype=dtype)
        self.function = function

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Any:
        return self.function(self.linear(x), *rest, **named)


def of_function(function: Callable[..., Any], *rest: Any, width: int = 6, loss_fn: Loss = mean_square) -> Case:
    return Case(Function(function, width), (random(3, 4), *rest), loss_fn)


class ConvNorm(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, dtype=torch.float64)
        self.norm = nn.BatchNorm2d(3, dtype=torch.float64, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, dtype=torch.float64)
        self.hidden = nn.Linear(4, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 7, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(tokens))))


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4, dtype=torch.float64).requires_grad_(False)
        self.trained = nn.Linear(4, 4, dtype=torch.float64)
        self.unused = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.trained(torch.sigmoid(self.frozen(x)))


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 5, dtype=torch.float64)

    def forward(self, x_TBI: Tensor) -> Tensor:
        hidden = cell = x_TBI.new_zeros(x_TBI.shape[1], 5)
        for x_BI in x_TBI:
            hidden, cell = self.cell(x_BI, (hidden, cell))
        return hidden + cell


class Attention(nn.Module):
    def __init__(self, is_causal: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24, dtype=torch.float64)
        self.is_causal = is_causal

    def forward(self, x_BTH: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.project(x_BTH).chunk(3, dim=-1)
        )
        return (
            functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
            .transpose(1, 2)
            .flatten(2)
        )


class RunningMean(nn.Module):
    """A buffer that user code updates in place, a counter of integers, and one that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("rows", torch.zeros(2, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x - self.mean)
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
            self.count += 1
            self.last = y.detach().sum(0)
            self.rows[1] = self.last
        return y * self.count + self.rows.sum()


class SharedNorm(nn.Module):
    """One batch norm called twice in a step, and its statistics read in between."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        before = self.norm.running_mean.clone()
        first = self.norm(self.linear(x))
        between = self.norm.running_mean * 2
        return self.norm(first + before) + between + self.norm.running_mean


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, *, x: Tensor, scale: float, extra: dict[str, Tensor]) -> dict[str, Any]:
        y = self.linear(x) * scale
        return {"y": y, "pair": (y.sum(), extra["shift"] + y)}


class Constants(nn.Module):
    """Tensors made in `forward`, one of them from data that is not in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.plain = torch.arange(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
        y = y + torch.arange(4) + torch.zeros(4) + torch.ones_like(y) + self.plain
        return y + torch.full((4,), 0.5, dtype=torch.float64) + torch.eye(3, 4)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.linear(x)) * 2
        y += 1
        y.mul_(2).add_(x)
        return y


class Writes(nn.Module):
    """Writes into slices and by index, as users do in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        y = self.linear(x)
        out = torch.zeros(3, 8, dtype=x.dtype)
        out[:, :4] = y
        out[:, 4:] = y * 2
        out[rows] = out[rows] * 3
        out[0, 1] += 1
        out[1].copy_(out[0])
        out.t()[2].mul_(2)
        return out.masked_fill_(out > 3, 0.5)


class Dropouts(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8, dtype=torch.float64), nn.Linear(8, 4, dtype=torch.float64)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.second(self.dropout(self.first(x))))


def attention_case(*, is_causal: bool) -> Case:
    return Case(Attention(is_causal), random(2, 5, 8), mean_square)


def norm_case(*, is_training: bool = True, **options: Any) -> Case:
    model = ConvNorm(**options)
    model(random(2, 2, 5, 5, seed=7))  # statistics other than the initial ones
    return Case(model.train(is_training), random(2, 2, 5, 5), mean_square)


class Weighted(nn.Module):
    """A loss that holds a constant and takes a target."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [torch.rand(6, dtype=torch.float64)]

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return (self.weights[0] * (y - target) ** 2).mean()


def targets_case() -> Case:
    model = Function(torch.tanh)
    return Case(model, random(3, 4), Weighted(), targets=(random(3, 6, seed=2),))


def low_precision_case() -> Case:
    model = Function(torch.tanh, dtype=torch.bfloat16)
    return Case(model, random(3, 4, dtype=torch.bfloat16), lambda y: y.float().square().mean(), atol=1e-2)


def max_with_indices(y: Tensor) -> Tensor:
    values, indices = y.max(dim=1)
    return values * indices


def channels_last_case(dtype: torch.dtype = torch.float64) -> Case:
    model = nn.Sequential(ConvNorm(), nn.Flatten()).to(dtype, memory_format=torch.channels_last)
    x = random(2, 2, 5, 5, dtype=dtype).to(memory_format=torch.channels_last)
    return Case(model, x, mean_square, atol=1e-9 if dtype == torch.float64 else 1e-5)


CASES: dict[str, Callable[[], Case]] = {
    "linear": lambda: of_function(torch.relu),
    "batch_norm_train": norm_case,
    "batch_norm_eval": lambda: norm_case(is_training=False),
    "batch_norm_eval_without_momentum": lambda: norm_case(is_training=False, momentum=None),
    "batch_norm_without_statistics": lambda: norm_case(track_running_stats=False),
    "batch_norm_without_affine": lambda: norm_case(affine=False),
    "batch_norm_shared": lambda: Case(SharedNorm(), random(5, 4), mean_square),
    "channels_last": channels_last_case,
    "channels_last_float32": lambda: channels_last_case(torch.float32),
    "in_place": lambda: Case(InPlace(), random(3, 4), mean_square),
    "tied": lambda: Case(Tied(), torch.tensor([[0, 3], [6, 3]]), mean_square),
    "frozen_and_unused": lambda: Case(PartlyFrozen(), random(3, 4), mean_square),
    "dropout_zero": lambda: Case(Dropouts(0.0), random(3, 4), mean_square),
    "dropout_eval": lambda: Case(Dropouts(0.5).eval(), random(3, 4), mean_square),
    "split": lambda: of_function(lambda y: y.split((1, 2, 3), dim=1)[1] * y.split(3, dim=1)[1][:, :2]),
    "chunk": lambda: of_function(lambda y: y.chunk(2, dim=1)[0] * y.chunk(2, dim=1)[1]),
    "unbind": lambda: of_function(lambda y: sum(part * k for k, part in enumerate(y.unbind(0)))),
    "max_with_indices": lambda: of_function(max_with_indices),
    "sort": lambda: of_function(lambda y: y.sort(dim=1).values[:, :2] + y.topk(2, dim=1).values),
    "lstm_cell": lambda: Case(Cell(), random(3, 2, 4), mean_square),
    "lstm": lambda: Case(
        nn.LSTM(4, 5, num_layers=2, bidirectional=True, dtype=torch.float64),
        random(3, 2, 4),
        lambda output: mean_square(output[0]) + output[1][1].sum(),
    ),
    "gru": lambda: Case(nn.GRU(4, 5, dtype=torch.float64), random(3, 2, 4), lambda output: mean_square(output[0])),
    "attention": lambda: attention_case(is_causal=False),
    "attention_causal": lambda: attention_case(is_causal=True),
    "transformer_layer": lambda: Case(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64),
        random(2, 5, 8),
        mean_square,
    ),
    "buffers": lambda: Case(RunningMean(), random(3, 4), mean_square),
    "keywords": lambda: Case(
        Keywords(),
        {"x": random(3, 4), "scale": 0.5, "extra": {"shift": random(4)}},
        lambda output: output["pair"][0] + mean_square(output["y"]) + output["pair"][1].mean(),
    ),
    "constants": lambda: Case(Constants(), random(3, 4), mean_square),
    "targets": targets_case,
    "integers": lambda: of_function(lambda y, k: y[:, k] * k, torch.tensor([0, 2, 5])),
    "low_precision": low_precision_case,
    "writes": lambda: Case(Writes(), (random(3, 4), torch.tensor([2, 0])), mean_square),
    "input_changed": lambda: Case(Function(lambda y, z: z.mul_(2) + y), (random(3, 4), random(3, 6)), mean_square),
    "expanded_gradient": lambda: of_function(lambda y: y.sum(), loss_fn=lambda y: y),
    "transposed_gradient": lambda: Case(TransposedWeight(), random(3, 4), mean_square),
    "strided_input": lambda: Case(nn.Linear(4, 2, dtype=torch.float64), random(6, 9)[1::2, 2:6], mean_square),
    "views_of_views": lambda: of_function(
        lambda y: y.t().reshape(2, 9).unsqueeze(0).expand(2, -1, -1)[..., ::2].transpose(0, 2).contiguous()
    ),
    "embedding_bag": lambda: Case(
        nn.EmbeddingBag(7, 4, mode="mean", dtype=torch.float64), torch.tensor([[0, 3], [6, 3]]), mean_square
    ),
    "group_norm": lambda: Case(
        nn.Sequential(nn.Conv1d(4, 4, 1, dtype=torch.float64), nn.GroupNorm(2, 4, dtype=torch.float64), nn.GELU()),
        random(2, 4, 5),
        mean_square,
    ),
    "pooling": lambda: Case(
        nn.Sequential(nn.Conv2d(2, 3, 3, dtype=torch.float64), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        random(2, 2, 8, 8),
        mean_square,
    ),
    "cross_entropy": lambda: of_function(
        lambda y: y, loss_fn=lambda y: functional.cross_entropy(y, torch.tensor([0, 5, 2]), label_smoothing=0.1)
    ),
    "one_element_loss": lambda: of_function(lambda y: y.sum(), loss_fn=lambda y: y.reshape(1)),
}


class TransposedWeight(nn.Module):
    """Its gradient comes out with other strides than the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(random(4, 6, seed=3))
        self.column = nn.Parameter(random(6, 4, seed=4).t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + torch.einsum("bi,io->bo", x, self.column)
