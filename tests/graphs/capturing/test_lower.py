"""The `OpGraph` of small steps, op by op: views folded, phases, co-location, in-place updates, figures."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import numpy as np
import pytest
import torch
from small_models import CASES, Case, Function, PartlyFrozen, Tied, mean_square, random
from torch import Tensor, nn

from rlplace.graphs import capture, run_graph
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import PHASES, OpGraph
from rlplace.graphs.program import Call, Program, Update


def graph_of(case: Case, optimizer: str | None = "adam") -> OpGraph:
    return capture(case.model, case.inputs, case.loss_fn, optimizer, targets=case.targets)


@functools.cache
def captured(name: str) -> OpGraph:
    return graph_of(CASES[name]())


def program_of(graph: OpGraph) -> Program:
    assert graph.program is not None
    return graph.program


def index(graph: OpGraph, name: str) -> int:
    return graph.names.index(name)


def reads(graph: OpGraph, op: int) -> list[str]:
    tensors = graph.input_tensors[graph.input_offsets[op] : graph.input_offsets[op + 1]]
    return [graph.names[producer] for producer in graph.tensor_op[tensors]]


def test_a_linear_step_op_by_op() -> None:
    """loss = sum(relu(x W' + b)): everything in it can be written down."""
    graph = capture(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.ones(5, 2), torch.sum, "adam")
    assert [(graph.targets[op], graph.modules[op], PHASES[graph.phases[op]]) for op in range(graph.num_ops)] == [
        ("parameter", "0", "forward"),
        ("parameter", "0", "forward"),
        ("input", "", "forward"),
        ("aten.addmm.default", "0", "forward"),
        ("aten.relu.default", "1", "forward"),
        ("aten.sum.default", "", "forward"),
        ("aten.ones_like.default", "", "backward"),
        ("aten.threshold_backward.default", "1", "backward"),
        ("aten.mm.default", "0", "backward"),
        ("aten.sum.dim_IntList", "0", "backward"),
        ("update.adam", "0", "update"),
        ("update.adam", "0", "update"),
    ]
    assert [reads(graph, op) for op in range(graph.num_ops)] == [
        [],
        [],
        [],
        ["0.weight", "0.bias", "input_0"],
        ["addmm"],
        ["relu"],
        ["sum_1"],
        ["relu", "ones_like"],
        ["input_0", "threshold_backward"],
        ["threshold_backward"],
        ["0.weight", "mm"],
        ["0.bias", "sum_2"],
    ]
    assert graph.colocation.tolist() == [0, 1, -1, -1, -1, -1, -1, -1, 0, 1, 0, 1]
    assert list(zip(graph.mutation_op, graph.mutation_tensor, strict=True)) == [(10, 0), (11, 1)]
    assert [graph.names[graph.tensor_op[tensor]] for tensor in graph.output_tensors] == ["sum_1"]
    assert graph.parameter_bytes.tolist() == [24, 12] + [0] * 10
    assert graph.state_bytes.tolist() == [0] * 10 + [2 * 24 + 4, 2 * 12 + 4]
    assert graph.output_bytes.tolist() == [24, 12, 40, 60, 60, 4, 4, 60, 24, 12, 0, 0]
    assert graph.tensor_shapes[3] == (5, 3)
    assert set(graph.tensor_dtypes) == {"float32"}
    assert graph.flops[3] == 2 * 5 * 2 * 3
    assert graph.bytes_moved[4] == 120
    assert graph.flops[10] == 14 * 6
    assert graph.bytes_moved[11] == 3 * 12 + 2 * 28


def test_views_fold_into_their_base_and_cost_nothing() -> None:
    def views(y: Tensor) -> Tensor:
        first, second = y.t().reshape(2, 9).unsqueeze(0).chunk(2, dim=2)[0].split((2, 3), dim=2)
        return first.squeeze(0).permute(1, 0)[::2] * second[..., 0]

    graph = capture(Function(views), random(3, 4))
    assert graph.targets[3:] == ("aten.addmm.default", "aten.clone.default", "aten.mul.Tensor")
    assert reads(graph, index(graph, "mul")) == ["clone"]
    program = program_of(graph)
    assert len(program.views) > 8
    clone = int(graph.output_offsets[index(graph, "clone")])
    call = program.calls[index(graph, "mul")]
    assert isinstance(call, Call)
    assert [program.base(ref) for ref in call.args] == [clone, clone]
    for position, view in enumerate(program.views):
        later = [ref.id for ref in view.args if hasattr(ref, "id")]
        assert all(ref < graph.num_tensors + position for ref in later)


def test_pieces_of_a_split_that_hides_its_aliases_are_views() -> None:
    """A recurrent layer takes its gates apart by `unsafe_split`."""
    graph = capture(nn.LSTM(4, 5), torch.ones(3, 2, 4))
    assert not any("split" in target for target in graph.targets)
    assert any(view.target is torch.ops.aten.unsafe_split.Tensor for view in program_of(graph).views)


def test_an_op_with_several_outputs_has_a_tensor_for_each() -> None:
    graph = graph_of(CASES["max_with_indices"]())
    op = next(op for op in range(graph.num_ops) if graph.targets[op] == "aten.max.dim")
    first, end = graph.output_offsets[op : op + 2]
    assert end - first == 2
    assert graph.tensor_output[first:end].tolist() == [0, 1]
    assert graph.tensor_dtypes[first:end] == ("float64", "int64")
    call = program_of(graph).calls[op]
    assert isinstance(call, Call)
    assert call.returns_tuple
    assert call.outputs == (first, first + 1)


def test_outputs_that_are_no_tensors_have_none() -> None:
    """The gradient of the convolution's input is not wanted: three outputs, two tensors."""
    graph = graph_of(CASES["batch_norm_train"]())
    op = index(graph, "convolution_backward")
    first = graph.output_offsets[op]
    call = program_of(graph).calls[op]
    assert isinstance(call, Call)
    assert call.outputs == (-1, first, first + 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_parameters_live_with_their_update_and_the_producer_of_their_gradient(name: str) -> None:
    graph = captured(name)
    program = program_of(graph)
    for op, call in program.calls.items():
        if isinstance(call, Update):
            parameter = int(graph.tensor_op[call.parameter.id])
            producer = int(graph.tensor_op[program.base(call.gradient)])
            assert graph.colocation[op] == graph.colocation[parameter] == graph.colocation[producer] >= 0
            assert graph.names[op] == f"update_{graph.names[parameter]}"
            assert graph.targets[parameter] == "parameter"
    written = graph.tensor_op[graph.mutation_tensor]
    assert np.array_equal(graph.colocation[written], graph.colocation[graph.mutation_op])
    classes = graph.colocation[graph.colocation >= 0]
    assert np.array_equal(np.unique(classes), np.arange(classes.max(initial=-1) + 1))


@pytest.mark.parametrize("name", CASES)
def test_phases_follow_each_other_and_updates_come_last(name: str) -> None:
    graph = captured(name)
    runs = np.flatnonzero(~graph.is_source)
    producer_phase = graph.phases[graph.tensor_op[graph.input_tensors]]
    assert np.all(producer_phase <= graph.phases[graph.edge_op])
    assert np.all(np.diff((graph.phases[runs] == PHASES.index("update")).astype(int)) >= 0)
    assert {PHASES[phase] for phase in graph.phases[runs]} == set(PHASES)


@pytest.mark.parametrize("name", CASES)
def test_every_argument_is_there_before_it_is_read(name: str) -> None:
    graph = captured(name)
    program = program_of(graph)
    assert program.calls.keys() | program.sources.keys() == set(range(graph.num_ops))
    assert not program.calls.keys() & program.sources.keys()
    assert set(np.flatnonzero(graph.is_source)) == program.sources.keys()
    assert program.num_tensors == graph.num_tensors
    for call in program.calls.values():
        if isinstance(call, Call):
            assert all(graph.num_tensors > tensor >= -1 for tensor in call.outputs)


def test_a_tied_weight_is_one_parameter_updated_once() -> None:
    graph = graph_of(Case(Tied(), torch.tensor([[0, 3], [6, 3]]), mean_square))
    assert [name for name in graph.names if name.startswith("update")] == [
        "update_embedding.weight",
        "update_hidden.weight",
        "update_hidden.bias",
    ]
    update = index(graph, "update_embedding.weight")
    assert reads(graph, update) == ["embedding.weight", "add"]


def test_frozen_and_unused_parameters_are_there_but_not_updated() -> None:
    graph = graph_of(Case(PartlyFrozen(), random(3, 4), mean_square))
    assert [name for name in graph.names if name.startswith("update")] == [
        "update_trained.weight",
        "update_trained.bias",
    ]
    unused = index(graph, "unused.weight")
    assert graph.targets[unused] == "parameter"
    assert unused not in graph.tensor_op[graph.input_tensors]
    assert graph.colocation[[unused, index(graph, "frozen.weight")]].tolist() == [-1, -1]


def test_batch_norm_updates_its_statistics_where_they_live() -> None:
    graph = graph_of(CASES["batch_norm_train"]())
    norm = graph.targets.index("aten._native_batch_norm_legit.default")
    mean, variance = index(graph, "norm.running_mean"), index(graph, "norm.running_var")
    assert (graph.targets[mean], graph.modules[mean], graph.parameter_bytes[mean]) == ("buffer", "norm", 0)
    updated = {(int(op), int(graph.tensor_op[tensor])) for op, tensor in zip(graph.mutation_op, graph.mutation_tensor)}
    assert {(norm, mean), (norm, variance)} <= updated
    assert PHASES[graph.phases[norm]] == "forward"
    store = next(op for op in range(graph.num_ops) if graph.targets[op] == "aten.copy_.default")
    assert PHASES[graph.phases[store]] == "update"
    assert graph.modules[store] == "norm"
    assert reads(graph, store) == ["norm.num_batches_tracked", "add"]
    assert (store, index(graph, "norm.num_batches_tracked")) in updated


def test_constants_are_sources_and_factories_are_ops_that_follow_their_device() -> None:
    graph = graph_of(CASES["constants"]())
    program = program_of(graph)
    constants = [source.value for source in program.sources.values() if source.kind == "constant"]
    assert sorted(value.tolist() for value in constants) == [[0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]]
    followers = {
        graph.targets[op] for op, call in program.calls.items() if isinstance(call, Call) and call.takes_device
    }
    assert {"aten.arange.default", "aten.zeros.default", "aten.full.default", "aten.eye.m"} <= followers
    for call in program.calls.values():
        if isinstance(call, Call) and call.takes_device and not list(refs(call)):
            assert "device" in call.kwargs


def refs(call: Call) -> list[object]:
    return [value for value in call.args if hasattr(value, "id")]


def test_a_target_is_an_input_and_what_a_loss_holds_is_one_constant() -> None:
    graph = graph_of(CASES["targets"]())
    assert graph.targets.count("constant") == 1
    assert [name for name, target in zip(graph.names, graph.targets, strict=True) if target == "input"] == [
        "input_0",
        "target_0",
    ]
    kinds = {source.kind for source in require_program(graph).sources.values()}
    assert kinds == {"parameter", "input", "target", "constant"}


def test_what_nobody_reads_is_left_out() -> None:
    def wasteful(y: Tensor) -> Tensor:
        _ = y.exp().sum()
        return y

    graph = capture(Function(wasteful), random(3, 4))
    assert graph.targets == ("parameter", "parameter", "input", "aten.addmm.default")


def test_equal_calls_share_a_signature_and_names_stay_unique() -> None:
    case = CASES["lstm_cell"]()
    graph = graph_of(case)
    sigmoids = [op for op in range(graph.num_ops) if graph.targets[op] == "aten.sigmoid.default"]
    assert len({graph.signatures[op] for op in sigmoids}) == 1
    assert len(set(graph.names)) == graph.num_ops


def test_a_view_of_several_is_taken_apart_by_getitem() -> None:
    views = program_of(graph_of(CASES["unbind"]())).views
    assert [view.args[1] for view in views if view.target is operator.getitem][:2] == [0, 1]


def test_a_changed_input_is_written_where_it_lives() -> None:
    graph = graph_of(CASES["input_changed"]())
    written = {graph.names[op] for op in graph.tensor_op[graph.mutation_tensor]}
    assert written == {"linear.weight", "linear.bias", "input_1"}


def memory_of(graph: OpGraph, name: str) -> tuple[int, int]:
    return int(graph.parameter_bytes[index(graph, name)]), int(graph.gradient_bytes[index(graph, name)])


def test_memory_of_parameters_gradients_and_state() -> None:
    tied = graph_of(Case(Tied(), torch.tensor([[0, 3], [6, 3]]), mean_square))
    size = Tied().embedding.weight.numel() * 8
    assert memory_of(tied, "embedding.weight") == (size, size)
    assert tied.gradient_bytes.sum() == tied.parameter_bytes.sum()  # a shared weight is counted once
    assert tied.state_bytes[index(tied, "update_embedding.weight")] == 2 * size + 4
    frozen = graph_of(Case(PartlyFrozen(), random(3, 4), mean_square), "momentum")
    parameter_bytes, gradient_bytes = memory_of(frozen, "frozen.weight")
    assert parameter_bytes > 0
    assert gradient_bytes == 0
    assert memory_of(frozen, "unused.weight")[1] == 0
    trained = memory_of(frozen, "trained.weight")[0]
    assert memory_of(frozen, "trained.weight") == (trained, trained)
    assert frozen.state_bytes[index(frozen, "update_trained.weight")] == trained
    assert frozen.state_bytes.sum() == frozen.gradient_bytes.sum()
    assert capture(nn.Linear(4, 2), torch.ones(3, 4)).gradient_bytes.sum() == 0


def test_an_update_holds_a_copy_of_a_gradient_that_is_laid_out_otherwise() -> None:
    graph = graph_of(CASES["transposed_gradient"]())
    scratch = {graph.names[op]: int(graph.workspace_bytes[op]) for op in np.flatnonzero(graph.workspace_bytes)}
    program = program_of(graph)
    for op, call in program.calls.items():
        if isinstance(call, Update):
            parameter = program.sources[int(graph.tensor_op[call.parameter.id])].value
            assert scratch.get(graph.names[op], 0) in (0, parameter.numel() * 8)
    assert scratch


@pytest.mark.parametrize("turned", [lambda h: torch.exp(h * 1j).real, lambda h: (h * (2 - 1j)).imag * 2])
def test_a_gradient_through_a_complex_literal(turned: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, x = nn.Linear(3, 2, dtype=torch.float64), random(4, 3)
    graph = capture(model, x, lambda output: turned(output).sum(), "sgd")
    turned(model(x)).sum().backward()
    found = run_graph(graph)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad)
