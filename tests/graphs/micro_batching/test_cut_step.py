"""Steps in micro-batches: they do what the whole batch does, every one by itself, and are put together once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_models import (
    Case,
    ConvNorm,
    Dropouts,
    Function,
    RunningMean,
    SharedNorm,
    Tied,
    mean_square,
    of_function,
    random,
    run_eager,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from rlplace.errors import CaptureError, InvalidValue, UnknownName
from rlplace.graphs import capture, run_graph
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.micro_batching.assembly import Assembly, Sum
from rlplace.graphs.micro_batching.slices import run_in_micro_batches
from rlplace.graphs.opgraph import BACKWARD, FORWARD, OpGraph
from rlplace.graphs.program import Ref, Source
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
        return self.linear(self.table(one_TB) * self.table(other_TB)).sum(0)


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
    "lookups": (lambda: Case(Lookups(), (tokens(3, 5), tokens(3, 5)), mean_square), {"batch_dims": (1, 1)}, "separate"),
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


def sum_of(assembly: Assembly, count: int) -> Sum:
    def add(micro_batch: int, one: Ref, other: Ref) -> Ref:
        target = torch.ops.aten.add.Tensor
        return assembly.call(target, one, other, name="sum_weight", phase=BACKWARD, micro_batch=micro_batch)

    return Sum(count, add)


def test_sums_belong_to_their_last_micro_batch_and_the_root_to_all() -> None:
    assembly = Assembly()
    terms = [assembly.add_source(Source("input", str(k), torch.ones(3)), f"input_{k}", micro_batch=k) for k in range(4)]
    total = sum_of(assembly, 4)
    for k, term in enumerate(terms):
        total.add(k, term)
    built = assembly.ops.built
    added = [op for op, row in enumerate(built.ops) if row.target == "aten.add.Tensor"]
    assert [built.ops[op].micro_batch for op in added] == [1, 3, -1]
    assert total.root == Ref([row.op for row in built.tensors].index(added[-1]))
    assert total.is_sum


def test_micro_batches_without_a_gradient_are_passed_over() -> None:
    assembly = Assembly()
    only = assembly.add_source(Source("input", "0", torch.ones(3)), "input_0")
    total = sum_of(assembly, 3)
    for k in range(3):
        total.add(k, only if k == 1 else None)
    assert (total.root, total.is_sum) == (only, False)


class Twice(nn.Module):
    """One batch norm, called twice in a step."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64, **options)
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(self.norm(x)))


class Recomputed(Twice):
    """Runs again in the backward, which updates running statistics once more."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def captured_step(case: Case, count: int) -> OpGraph:
    return capture(case.model, case.inputs, case.loss_fn, "sgd", micro_batches=count)


CASES = {
    "one call": lambda: Case(ConvNorm(), random(5, 2, 5, 5), mean_square),
    "of averages": lambda: Case(ConvNorm(momentum=None), random(5, 2, 5, 5), mean_square),
    "without affine": lambda: Case(ConvNorm(affine=False), random(5, 2, 5, 5), mean_square),
    "two calls": lambda: Case(Twice(), random(7, 4), mean_square),
    "two calls of averages": lambda: Case(Twice(momentum=None), random(7, 4), mean_square),
    "recomputed": lambda: Case(Recomputed(), random(7, 4), mean_square),
    "without statistics": lambda: Case(ConvNorm(track_running_stats=False), random(5, 2, 5, 5), mean_square),
}


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_it_is_accumulation_over_the_slices(name: str, count: int) -> None:
    case = CASES[name]()
    case.model(case.inputs + 1)  # other statistics than the initial ones
    graph = captured_step(case, count)
    micro = require_program(graph).origin.micro
    assert micro is not None
    model = copy.deepcopy(case.model)
    loss = run_in_micro_batches(model, ((case.inputs,), {}), case.loss_fn, (), micro)
    result = run_graph(graph)
    torch.testing.assert_close(result.result, loss)
    for parameter, value in model.named_parameters():
        torch.testing.assert_close(result.gradients[parameter], value.grad, rtol=1e-9, atol=1e-9)
    for buffer, value in model.named_buffers():
        torch.testing.assert_close(result.state[buffer], value, rtol=1e-9, atol=1e-9)


def test_only_what_updates_a_buffer_lives_with_it() -> None:
    graph = captured_step(CASES["one call"](), 3)
    micro = require_program(graph).origin.micro
    assert not micro.equals_whole
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        buffer = graph.names.index(name)
        together = np.flatnonzero(graph.colocation == graph.colocation[buffer])
        assert graph.colocation[buffer] >= 0
        assert (graph.micro_batch[together] == -1).all()
        assert {graph.targets[op] for op in together} <= {
            "buffer", "aten.cat.default", "aten.lerp.Scalar", "aten.add.Tensor", "aten.copy_.default",
        }  # fmt: skip
    norms = [op for op in range(graph.num_ops) if "batch_norm" in graph.targets[op]]
    assert len(norms) == 6
    assert (graph.colocation[norms] == -1).all()


def test_norms_that_are_not_trained_are_left_alone() -> None:
    case = CASES["one call"]()
    case.model(case.inputs + 1)
    case.model.eval()
    graph = captured_step(case, 2)
    micro = require_program(graph).origin.micro
    assert micro.equals_whole
    assert not len(graph.mutation_op) - len(list(case.model.parameters()))
    loss = mean_square(case.model(case.inputs))
    torch.testing.assert_close(run_graph(graph).result, loss.detach())


def test_a_step_that_reads_running_statistics_is_refused() -> None:
    case = Case(SharedNorm(), random(6, 4), mean_square)
    with pytest.raises(CaptureError, match=r"running_mean"):
        capture(case.model, case.inputs, case.loss_fn, "sgd", micro_batches=2, loss="accumulated")


def test_the_model_stays_as_it_is() -> None:
    case = CASES["one call"]()
    before = copy.deepcopy(case.model.state_dict())
    captured_step(case, 2)
    assert all("forward" not in vars(module) for module in case.model.modules())
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())


@pytest.mark.slow
def test_neighbouring_norms_hand_over_their_statistics_together() -> None:
    """Of fourteen, four, one with another momentum, eight and one."""
    layers = [nn.BatchNorm1d(3, momentum=0.5 if k == 4 else 0.1, dtype=torch.float64) for k in range(14)]
    case = Case(nn.Sequential(*layers), random(6, 3), mean_square)
    graph = captured_step(case, 2)
    handed_over = [op for op in range(graph.num_ops) if graph.names[op].startswith("statistics")]
    assert sorted(graph.micro_batch[handed_over].tolist()) == [0] * 4 + [1] * 4
    model = copy.deepcopy(case.model)
    micro = require_program(graph).origin.micro
    assert micro is not None
    run_in_micro_batches(model, ((case.inputs,), {}), case.loss_fn, (), micro)
    state = run_graph(graph).state
    for buffer, value in model.named_buffers():
        torch.testing.assert_close(state[buffer], value, rtol=1e-9, atol=1e-9)


class Layer(nn.Module):
    def __init__(self, change: Callable[[nn.Linear], object]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 3, dtype=torch.float64), change

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.change(self.linear)
        return self.linear(x)


def normalised(layer: nn.Linear) -> None:
    layer.weight /= layer.weight.norm(dim=1, keepdim=True)


def shifted(layer: nn.Linear) -> None:
    layer.bias += 1


def clamped(layer: nn.Linear) -> None:
    layer.weight.data.clamp_(-0.1, 0.1)


CHANGES = [(normalised, "weight"), (shifted, "bias"), (clamped, "weight")]


@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_parameters_that_forward_writes_to(change: Callable[[nn.Linear], object], name: str) -> None:
    model, x = Layer(change), random(6, 4)
    step = run_graph(capture(model, x, lambda y: (y * y).mean(), "sgd"))
    with pytest.raises(CaptureError, match=rf"changes 'linear.{name}'"):
        capture(model, x, lambda y: (y * y).mean(), "sgd", micro_batches=2)
    (model(x) ** 2).mean().backward()
    for parameter in ("weight", "bias"):
        torch.testing.assert_close(
            step.gradients[f"linear.{parameter}"], model.get_parameter(f"linear.{parameter}").grad
        )


def test_a_norm_of_all_processes_is_in_one_process_as_any_other() -> None:
    x, steps = random(8, 4), []
    for kind in (nn.BatchNorm1d, nn.SyncBatchNorm):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), kind(3)).double()
        steps.append(run_graph(capture(model, x, lambda y: (y**3).mean(), "sgd", micro_batches=2)))
    one, other = steps
    assert one.state.keys() == other.state.keys()
    assert all(torch.equal(one.state[name], other.state[name]) for name in one.state)


def test_sizes_that_fit_one_batch_alone_are_named() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.linear(x)).as_strided((8, 2), (4, 2))

    with pytest.raises(CaptureError, match=r"x\.shape\[0\]"):
        capture(Fixed(), random(8, 4), lambda y: (y * y).mean(), "sgd", micro_batches=2)
