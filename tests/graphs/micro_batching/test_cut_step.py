"""Steps in micro-batches: they do what the whole batch does, every one by itself, and are put together once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from small_models import (
    Case,
    ConvNorm,
    Dropouts,
    Function,
    RunningMean,
    Tied,
    mean_square,
    of_function,
    random,
    run_eager,
)
from torch import Tensor, nn
from torch.nn import functional

from rlplace.errors import CaptureError, InvalidValue, UnknownName
from rlplace.graphs import capture, run_graph
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import BACKWARD, FORWARD, OpGraph
from rlplace.search.parallel.layouts import roles

LABELS = torch.tensor([0, 5, 2, 4, 1])


def cross_entropy(y: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(y, labels)


def contrastive(y: Tensor) -> Tensor:
    """Every sample is compared with every other."""
    y = functional.normalize(y, dim=1)
    return functional.cross_entropy(y @ y.t(), torch.arange(len(y)))


class Towers(nn.Module):
    """Two outputs that grow with the batch, one of them along dimension 1, and one that does not depend on it; with
    tensors that are made on the way, and one in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(4, 6, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        self.plain = torch.arange(6, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        right = self.right(x)[torch.arange(len(x))] * torch.ones(6) + self.plain
        return self.left(x), right.t(), self.scale.exp(), 3


def towers_loss(output: tuple[Tensor, Tensor, Tensor, int]) -> Tensor:
    left, right, scale, power = output
    return functional.cross_entropy(left @ right * scale, torch.arange(len(left))) ** power


class Lookups(nn.Module):
    """A table that is read twice, with a padding row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=2, dtype=torch.float64)
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, one_TB: Tensor, other_TB: Tensor) -> Tensor:
        out: Tensor = self.linear(self.table(one_TB) * self.table(other_TB)).sum(0)
        return out


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 7, shape, generator=torch.Generator().manual_seed(3))


CUT: dict[str, tuple[Callable[[], Case], dict[str, object], str]] = {
    "mean": (lambda: Case(Function(torch.tanh), random(5, 4), mean_square), {}, "separate"),
    "sum": (lambda: Case(Function(torch.tanh), random(5, 4), lambda y: y.square().sum()), {}, "separate"),
    "targets": (lambda: Case(Function(torch.tanh), random(5, 4), cross_entropy, targets=(LABELS,)), {}, "joined"),
    "never padded": (
        lambda: Case(Function(torch.tanh), random(5, 4), cross_entropy, targets=(LABELS,)),
        {"loss": "separate"},
        "separate",
    ),
    "contrastive": (lambda: Case(Function(torch.tanh), random(5, 4), contrastive), {}, "joined"),
    "towers": (lambda: Case(Towers(), random(5, 4), towers_loss), {}, "joined"),
    "tied": (lambda: Case(Tied(), tokens(5, 3), mean_square), {}, "separate"),
    "lookups": (
        lambda: Case(Lookups(), (tokens(3, 5), tokens(3, 5)), mean_square),
        {"batch_dims": (1, 1)},
        "separate",
    ),
    "shared input": (
        lambda: of_function(lambda y, other: y * other, random(1, 6)),
        {"batch_dims": (0, None)},
        "separate",
    ),
    "expanded gradient": (
        lambda: of_function(lambda y: y.sum(1), loss_fn=lambda y: y.sum()),
        {"loss": "separate"},
        "separate",
    ),
}


def captured(case: Case, count: int, **options: object) -> OpGraph:
    return capture(
        case.model,
        case.inputs,
        case.loss_fn,
        "sgd",
        targets=case.targets,
        micro_batches=count,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", CUT)
def test_a_step_in_micro_batches_is_that_of_the_whole_batch(name: str, count: int) -> None:
    make, options, kind = CUT[name]
    case = make()
    graph = captured(case, count, **options)
    micro = require_program(graph).origin.micro
    assert micro is not None
    assert (micro.verdict.kind, graph.num_micro_batches) == (kind, count)
    result, eager = run_graph(graph), run_eager(case)
    torch.testing.assert_close(result.result.reshape(()), eager.loss.reshape(()), rtol=1e-9, atol=1e-9)
    assert result.gradients.keys() == eager.gradients.keys()
    for parameter, gradient in eager.gradients.items():
        torch.testing.assert_close(result.gradients[parameter], gradient, rtol=1e-9, atol=1e-9, msg=parameter)


def test_inference_joins_outputs() -> None:
    model, x = Towers(), random(5, 4)
    graph = capture(model, x, micro_batches=2)
    left, right, scale, power = run_graph(graph).result
    for one, other in zip((left, right, scale), model(x)[:3], strict=True):
        torch.testing.assert_close(one, other)
    assert power == 3
    assert {graph.targets[op] for op in np.flatnonzero(graph.micro_batch < 0)} == {
        "parameter",
        "constant",
        "aten.cat.default",
    }


def depends(graph: OpGraph, ops: np.ndarray) -> np.ndarray:
    """(N,) bool: ops that are among `ops`, or compute from one."""
    reached = ops.copy()
    for op in range(graph.num_ops):
        read = graph.input_tensors[graph.input_offsets[op] : graph.input_offsets[op + 1]]
        reached[op] |= bool(reached[graph.tensor_op[read]].any())
    return reached


@pytest.mark.parametrize("name", ["mean", "tied", "lookups", "never padded"])
def test_no_micro_batch_waits_for_another(name: str) -> None:
    """All that is computed from micro-batch 1, but for sums of gradients and what is shared, belongs to it."""
    make, options, _ = CUT[name]
    graph = captured(make(), 3, **options)
    summed = np.array([name.startswith("sum_") and "." in name for name in graph.names]) & (graph.phases == BACKWARD)
    later = depends(graph, graph.micro_batch == 1)
    assert set(graph.micro_batch[later & ~summed].tolist()) == {1, -1}
    own_backward = (graph.phases == BACKWARD) & (graph.micro_batch >= 0) & ~summed
    losses = np.array([target.startswith("aten.mean") for target in graph.targets]) & (graph.phases == FORWARD)
    if name == "mean":  # the gradient of a loss is a constant
        assert losses.any()
        assert not (depends(graph, losses) & own_backward).any()


def test_what_is_shared_is_there_once_and_lives_together() -> None:
    graph = captured(Case(Function(torch.tanh), random(6, 4), mean_square), 3)
    program = require_program(graph)
    own = graph.micro_batch >= 0
    for target, count in {"parameter": 2, "update.sgd": 2}.items():
        ops = [op for op in range(graph.num_ops) if graph.targets[op] == target]
        assert len(ops) == count
        assert not own[ops].any()
    inputs = [op for op in range(graph.num_ops) if graph.targets[op] == "input"]
    assert graph.micro_batch[inputs].tolist() == [0, 1, 2]
    assert graph.output_bytes[inputs].tolist() == [2 * 4 * 8] * 3
    assert [program.sources[op].cut.start for op in inputs if program.sources[op].cut] == [0, 2, 4]  # type: ignore[union-attr]
    together = [set(np.flatnonzero(graph.colocation == each).tolist()) for each in (0, 1)]
    for ops in together:
        assert sorted(graph.targets[op] for op in ops) == ["aten.add.Tensor", "parameter", "update.sgd"]
        assert not own[sorted(ops)].any()
    partial = [op for op in range(graph.num_ops) if graph.names[op].startswith("sum_linear.weight")]
    assert graph.micro_batch[partial].tolist() == [1, -1]


def test_copies_share_signature_module_and_role() -> None:
    graph = captured(Case(Tied(), tokens(6, 3), mean_square), 3)
    summed = np.array([name.startswith("sum_") for name in graph.names])
    by_role: dict[int, set[tuple[str, str, int]]] = {}
    numbers: dict[int, list[int]] = {}
    for op, role in enumerate(roles(graph).tolist()):
        if graph.micro_batch[op] >= 0 and not summed[op]:
            by_role.setdefault(role, set()).add((graph.signatures[op], graph.modules[op], int(graph.phases[op])))
            numbers.setdefault(role, []).append(int(graph.micro_batch[op]))
    assert all(len(kinds) == 1 for kinds in by_role.values())
    assert all(found == [0, 1, 2] for found in numbers.values())


def test_a_table_has_one_dense_gradient_for_all_micro_batches() -> None:
    graph = captured(Case(Tied(), tokens(6, 3), mean_square), 3)
    (op,) = (op for op in range(graph.num_ops) if graph.targets[op] == "aten.embedding_dense_backward.default")
    assert graph.micro_batch[op] == -1
    table = graph.names.index("embedding.weight")
    assert graph.colocation[op] == graph.colocation[table] >= 0
    assert (graph.micro_batch[graph.colocation == graph.colocation[table]] == -1).all()


def test_one_micro_batch_is_the_whole_step() -> None:
    case = Case(Tied(), tokens(5, 3), mean_square)
    plain = capture(case.model, case.inputs, case.loss_fn, "adam")
    one = capture(case.model, case.inputs, case.loss_fn, "adam", micro_batches=1)
    assert require_program(one).origin.micro is None
    for name in OpGraph.__dataclass_fields__:
        if name != "program":
            first, second = getattr(plain, name), getattr(one, name)
            same = np.array_equal(first, second) if isinstance(first, np.ndarray) else first == second
            assert same, name


def test_random_ops_of_micro_batches_draw_apart() -> None:
    x = torch.ones(6, 4, dtype=torch.float64)
    graph = captured(Case(Dropouts(0.5), x, mean_square), 2)
    calls = [call for call in require_program(graph).calls.values() if getattr(call, "is_random", False)]
    assert len(calls) == 4
    assert torch.isfinite(run_graph(graph).result)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (lambda: Case(RunningMean(), random(4, 4), mean_square), "changes 'mean'"),
        (lambda: Case(Function(lambda y, z: z.mul_(2) + y), (random(4, 4), random(4, 6)), mean_square), "'input_1"),
        (lambda: Case(hooked(), random(4, 4), mean_square), "'linear.weight' has a hook"),
    ],
)
def test_what_every_micro_batch_would_change_again_is_refused(case: Callable[[], Case], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        captured(case(), 2, loss="accumulated")


def hooked() -> nn.Module:
    model = Function(torch.tanh)
    model.linear.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return model


def test_numbers_that_do_not_fit_are_refused() -> None:
    case = Case(Function(torch.tanh), random(5, 4), mean_square)
    for count in (0, -1, 6):
        with pytest.raises(InvalidValue, match="micro_batches"):
            captured(case, count)
    with pytest.raises(UnknownName, match="separate"):
        captured(case, 2, loss="seperate")


def test_outputs_that_do_not_grow_with_the_batch_cannot_be_joined() -> None:
    with pytest.raises((CaptureError, InvalidValue), match=r"scalar|joined"):
        captured(of_function(lambda y: y.std(), loss_fn=lambda y: y), 2, loss="joined")


def test_layouts_of_the_whole_stay() -> None:
    """Slices of images whose channels come last are laid out so too."""
    x = random(4, 2, 5, 5).to(memory_format=torch.channels_last)
    graph = captured(Case(ConvNorm(track_running_stats=False), x, mean_square), 2, loss="accumulated")
    sources = require_program(graph).sources
    first = sources[graph.names.index("input_0.mb0")].value
    assert first.is_contiguous(memory_format=torch.channels_last)
