"""The `OpGraph` of small steps, op by op, with FLOPs, bytes and signatures of calls and of ops of the user."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from core_hosts import core_host
from naive_plan import naive_plan, random_devices
from small_models import CASES, Case, Function, Model, PartlyFrozen, Tied, assert_equals_eager, mean_square, random
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplace.errors import CaptureError, InvalidValue, UnknownName
from rlplace.graphs import capture, register_cost, run_graph, unregister_cost
from rlplace.graphs.capturing.lower import call_facts, signature, tensor_bytes
from rlplace.graphs.capturing.portable import attention, attention_backward
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import PHASES, OpGraph
from rlplace.graphs.program import Call, Program, Update
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.residents import Residents
from rlplace.measure.profiling.profile import profile_costs


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


@torch.library.custom_op("rlplace_test::swish", mutates_args=())
def swish(x: Tensor, scale: float) -> Tensor:
    return torch.nn.functional.silu(x) * scale


@torch.library.custom_op("rlplace_test::swish_gradient", mutates_args=())
def swish_gradient(gradient: Tensor, x: Tensor, scale: float) -> Tensor:
    s = torch.sigmoid(x)
    return gradient * scale * s * (1 + x * (1 - s))


@swish.register_fake
def _(x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


@swish_gradient.register_fake
def _(gradient: Tensor, x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


def keep(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


def differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return swish_gradient(gradient, *ctx.saved_tensors, ctx.scale), None


swish.register_autograd(differentiate, setup_context=keep)


@pytest.fixture(autouse=True)
def _pair() -> Iterator[None]:
    """An op of two outputs, defined by its schema, without a gradient."""
    with torch.library._scoped_library("rlplace_test_defined", "FRAGMENT") as library:
        library.define("pair(Tensor x) -> (Tensor, Tensor)")
        library.impl("pair", lambda x: (x.sin(), x.cos().sum(0)), "CPU")
        torch.library.register_fake(
            "rlplace_test_defined::pair", lambda x: (torch.empty_like(x), x.new_empty(x.shape[1:])), lib=library
        )
        yield


def custom(model: nn.Module, x: Tensor) -> Tensor:
    first, second = torch.ops.rlplace_test_defined.pair(x)
    return model.act(model.linear(first + second))


def custom_step() -> tuple[nn.Module, Tensor, OpGraph]:
    torch.manual_seed(0)
    model = Model(custom, linear=nn.Linear(4, 6), act=Model(lambda _, x: swish(x, 2.0)))
    x = torch.randn(3, 4)
    return model, x, capture(model, x, mean_square, "sgd")


def test_each_is_one_op_of_its_module_and_the_step_equals_eager() -> None:
    model, x, graph = custom_step()
    ops = {graph.targets[op]: op for op in range(graph.num_ops) if graph.targets[op].startswith("rlplace_test")}
    assert {target: (graph.modules[op], int(graph.phases[op])) for target, op in ops.items()} == {
        "rlplace_test_defined.pair.default": ("", 0),
        "rlplace_test.swish.default": ("act", 0),
        "rlplace_test.swish_gradient.default": ("act", 1),
    }
    pair = ops["rlplace_test_defined.pair.default"]
    assert graph.output_bytes[pair] == 4 * (12 + 4)
    assert_equals_eager(model, x, mean_square)


def test_unless_registered_the_general_estimate_counts() -> None:
    _, _, graph = custom_step()
    op = graph.targets.index("rlplace_test.swish.default")
    assert (graph.flops[op], graph.bytes_moved[op], graph.workspace_bytes[op]) == (18, 2 * 72, 0)


@pytest.mark.parametrize("op", ["rlplace_test::swish", "rlplace_test::swish.default", swish, "packet", "overload"])
def test_a_registered_cost_is_that_of_the_call(op: Any) -> None:
    packet = torch.ops.rlplace_test.swish
    op = {"packet": packet, "overload": packet.default}.get(op, op) if isinstance(op, str) else op
    register_cost(
        op,
        flops=lambda x, scale, output: 5 * output.numel() * scale,
        workspace_bytes=lambda x, scale, output: x.shape[0] * 100,
    )
    try:
        _, _, graph = custom_step()
    finally:
        unregister_cost(op)
    swishes = graph.targets.index("rlplace_test.swish.default")
    assert (graph.flops[swishes], graph.bytes_moved[swishes], graph.workspace_bytes[swishes]) == (180, 144, 300)
    plain = custom_step()[2]
    assert plain.flops[swishes] == 18
    assert graph.fingerprint == plain.fingerprint


def test_a_registered_cost_goes_before_pytorchs_own_formula_and_an_overload_before_its_op() -> None:
    x, mm = torch.ones(2, 2), torch.ops.aten.mm.default
    register_cost("aten::mm", flops=lambda a, b, output: 7, bytes_moved=lambda a, b, output: 8.5)
    register_cost("aten::mm.default", flops=lambda a, b, output: 9)
    try:
        assert call_facts(mm, (x, x), {}, x) == (9.0, 32.0, 0)
        unregister_cost("aten::mm.default")
        assert call_facts(mm, (x, x), {}, x) == (7.0, 8.5, 0)
    finally:
        unregister_cost("aten::mm")
    assert call_facts(mm, (x, x), {}, x) == (16.0, 32.0, 0)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "many", None, True])
def test_a_figure_that_is_none_is_refused(value: Any) -> None:
    register_cost(swish, flops=lambda x, scale, output: value)
    try:
        with pytest.raises(InvalidValue, match=r"cost of rlplace_test.swish.default: flops is .*number >= 0"):
            custom_step()
    finally:
        unregister_cost(swish)


def test_a_function_that_fails_is_refused_with_its_own_words() -> None:
    register_cost(swish, bytes_moved=lambda x, output: 1)
    try:
        with pytest.raises(InvalidValue, match=r"bytes_moved.*raised TypeError.*called with the op's own arguments"):
            custom_step()
    finally:
        unregister_cost(swish)


def test_only_ops_have_costs() -> None:
    with pytest.raises(UnknownName, match="did you mean 'rlplace_test::swish'"):
        register_cost("rlplace_test::swosh")
    with pytest.raises(UnknownName, match=r"rlplace_test::swish.default"):
        register_cost("rlplace_test::swish.defualt")
    with pytest.raises(InvalidValue, match="namespace::name"):
        register_cost("swish")
    with pytest.raises(InvalidValue, match="namespace::name"):
        register_cost(torch.relu)
    with pytest.raises(InvalidValue, match="a function of the op's arguments"):
        register_cost(swish, flops=3)  # type: ignore[arg-type]


def test_scratch_is_counted_where_every_backend_takes_it() -> None:
    x = torch.ones(8, 4)
    facts = call_facts(torch.ops.aten.logsumexp.default, (x, [1]), {}, x.logsumexp(1))
    assert facts.workspace_bytes == 4 * (32 + 8)
    _, _, graph = custom_step()
    assert np.all(graph.workspace_bytes == 0)


def test_a_users_op_runs_where_it_is_placed_and_has_a_profiled_cost() -> None:
    model, x, graph = custom_step()
    host = core_host(2)
    ours = [op for op in range(graph.num_ops) if graph.targets[op].startswith("rlplace_test")]
    devices = random_devices(graph, 2, np.random.default_rng(1))
    crew = Crew(host.devices)
    try:
        step = PlacedStep(graph, host, naive_plan(graph, devices), Residents(graph, host), crew)
        step.run(0)
        torch.testing.assert_close(step.result, mean_square(model(x)).detach())
    finally:
        crew.stop()
    costs = profile_costs(graph, host, num_steps=2, warmup=1)
    assert np.all(costs.op_time_s[ours] > 0)


aten = torch.ops.aten


def facts(target: Any, *args: Any, **kwargs: Any) -> tuple[float, float]:
    return call_facts(target, args, kwargs, target(*args, **kwargs))[:2]


def test_bytes_of_a_tensor_count_its_elements_not_its_memory() -> None:
    assert tensor_bytes(torch.zeros(3, 4)) == 48
    assert tensor_bytes(torch.zeros(3, 4, dtype=torch.bfloat16)) == 24
    assert tensor_bytes(torch.zeros(1).expand(5)) == 20
    assert tensor_bytes(torch.zeros(0, 4)) == 0


def test_a_matrix_product_multiplies_and_adds() -> None:
    # (2, 3) x (3, 5): 2 * 2 * 3 * 5 operations; 6 + 15 + 10 floats
    assert facts(aten.mm.default, torch.zeros(2, 3), torch.zeros(3, 5)) == (60.0, 124.0)


def test_attention_and_its_backward() -> None:
    query, key = torch.zeros(1, 2, 3, 4), torch.zeros(1, 1, 5, 4)  # two query heads read one key head
    products = 2.0 * 2 * 3 * 5 * 4
    rest = (None, True, None)
    # two products; queries 24, keys 20, values 20, output 24 and logarithms 6 floats
    assert facts(attention, query, key, key.clone(), *rest) == (2 * products, 4.0 * 94)
    # five products; gradient 24 and all of those, and three gradients, 24 + 20 + 20
    saved = (query, key, key.clone(), torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3))
    assert facts(attention_backward, torch.zeros(1, 2, 3, 4), *saved, *rest) == (5 * products, 4.0 * 182)


def test_a_convolution_and_its_backward() -> None:
    x, weight = torch.zeros(1, 2, 5, 5), torch.zeros(3, 2, 3, 3)
    options = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    # 3 x 3 places, 3 channels, each 2 * 3 * 3 products; 50 + 54 + 27 floats
    assert facts(aten.convolution.default, x, weight, *options) == (2.0 * 9 * 3 * 18, 4.0 * 131)
    gradient = torch.zeros(1, 3, 3, 3)
    args = (gradient, x, weight, None, *options[1:], [True, True, False])
    flops, moved = facts(aten.convolution_backward.default, *args)
    assert flops == 2 * (2.0 * 9 * 3 * 18)
    assert moved == 4.0 * (27 + 50 + 54 + 50 + 54)


def test_an_elementwise_op_counts_its_larger_side_and_each_input_once() -> None:
    x = torch.zeros(4, 4)
    assert facts(aten.relu.default, x) == (16.0, 128.0)
    assert facts(aten.mul.Tensor, x, x) == (32.0, 128.0)
    assert facts(aten.sum.default, x) == (16.0, 68.0)
    assert facts(aten.cat.default, [x, torch.zeros(2, 4)]) == (24.0, 192.0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (((torch.zeros(2, 3),), {}), ((torch.zeros(3, 2),), {})),
        (((torch.zeros(2, 3),), {}), ((torch.zeros(2, 3, dtype=torch.float64),), {})),
        (((torch.zeros(2, 3),), {}), ((torch.zeros(3, 2).t(),), {})),
        (((torch.zeros(2), 1), {}), ((torch.zeros(2), 2), {})),
        (((torch.zeros(2),), {"dim": 0}), ((torch.zeros(2),), {"dim": 1})),
        ((([torch.zeros(2)],), {}), (([torch.zeros(2), torch.zeros(2)],), {})),
    ],
)
def test_signatures_tell_calls_apart_that_may_cost_differently(one: Any, other: Any) -> None:
    assert signature("op", *one) != signature("op", *other)


def test_a_signature_reads_like_a_call_and_forgets_values() -> None:
    assert (
        signature("aten.add.Tensor", (torch.ones(2, 3), 1), {"alpha": 2})
        == "aten.add.Tensor(float32(2, 3), 1, alpha=2)"
    )
    assert signature("op", (torch.ones(2),), {}) == signature("op", (torch.zeros(2),), {})


OFFSETS = torch.tensor([2, 2, 8], dtype=torch.int32)
GROUPED = {
    "rows": ((8, 8), (3, 8, 12), OFFSETS, 2 * 8 * 8 * 12),  # each row passes one matrix of (8, 12)
    "sums": ((12, 8), (8, 4), OFFSETS, 2 * 12 * 8 * 4),  # 8 = 2 + 0 + 6 are summed in three groups
    "columns": ((3, 4, 8), (8, 8), OFFSETS, 2 * 4 * 8 * 8),
    "each": ((3, 4, 8), (3, 8, 12), None, 2 * 3 * 4 * 8 * 12),
}


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_cost_and_return_what_kernels_do(kind: str, transposed: bool, dtype: torch.dtype) -> None:
    left, right, offsets, flops = GROUPED[kind]
    if dtype is torch.bfloat16:  # rows of 16 bytes
        left, right = (*left[:-1], 8), (*right[:-1], 8)
        flops = flops * right[-1] // GROUPED[kind][1][-1]
    one = torch.randn(left, dtype=dtype)
    other = torch.randn(*right[:-2], *(right[:-3:-1] if transposed else right[-2:]), dtype=dtype)
    other = other.mT if transposed else other
    real = torch._grouped_mm(one, other, offs=offsets)
    with FakeTensorMode() as mode:
        twins = [None if each is None else mode.from_tensor(each) for each in (one, other, offsets)]
        fake = torch._grouped_mm(*twins[:2], offs=twins[2])
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    facts = call_facts(torch.ops.aten._grouped_mm.default, (one, other, offsets), {}, real)
    assert facts.flops == flops


def grouped(width: int) -> nn.Module:
    """Rows by group, as experts take their tokens."""
    torch.manual_seed(0)

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return torch._grouped_mm(x, model.weight.mT, offs=model.offsets).square()

    return Model(forward, weight=nn.Parameter(torch.randn(3, width, 8)), offsets=OFFSETS)


def test_grouped_products_are_captured_with_their_gradients() -> None:
    assert_equals_eager(grouped(12), torch.randn(8, 8), Tensor.mean)


def test_rows_of_grouped_products_that_kernels_pad_are_captured() -> None:
    model, x = grouped(7), torch.randn(8, 8)
    torch.testing.assert_close(run_graph(capture(model, x)).result, model(x).detach())
    with pytest.raises(RuntimeError, match="16 bytes"):
        model(x).mean().backward()  # the gradient is not padded
    with pytest.raises(CaptureError, match="in rows of a multiple of 4 items"):
        capture(model, x, lambda y: y.mean())


def test_grouped_products_of_doubles_are_refused_as_eager_does() -> None:
    with pytest.raises(CaptureError, match="in eager as well: RuntimeError: Expected mat_a to be Float32"):
        capture(grouped(12).double(), torch.randn(8, 8).double())
