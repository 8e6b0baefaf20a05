"""What `trace_step` hands on: ATen calls that write nowhere, with phase and module; and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import CASES, Function, Model, Tied, Writes, mean_square, random
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rlplace.errors import CaptureError
from rlplace.graphs import BACKWARD, capture
from rlplace.graphs.capturing.capture import as_call
from rlplace.graphs.capturing.trace import Trace, trace_step
from rlplace.graphs.opgraph import OpGraph
from rlplace.workloads import build, parse_workload

aten = torch.ops.aten


def trace(model: nn.Module, inputs: Any, loss_fn: Callable[[Any], Tensor] | None = mean_square) -> Trace:
    args, kwargs = as_call(inputs)
    return trace_step(model, args, kwargs, loss_fn, is_training=loss_fn is not None)


def calls(traced: Trace) -> list[torch.fx.Node]:
    return [node for node in traced.module.graph.nodes if node.op == "call_function"]


def targets(traced: Trace) -> set[str]:
    return {str(node.target) for node in calls(traced)}


def modules_of(traced: Trace, target: Any) -> list[tuple[str, str]]:
    return [
        (node.meta["custom"]["phase"], node.meta["custom"].get("module", ""))
        for node in calls(traced)
        if node.target is target
    ]


def test_placeholders_come_in_the_order_that_the_trace_names() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].bias.requires_grad_(False)
    traced = trace(model, torch.ones(3, 4))
    assert traced.trainable == ("0.weight", "1.weight", "1.bias")
    assert traced.fixed == ("0.bias",)
    assert traced.buffers == ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert len(traced.values) == 8
    assert traced.num_results == 1


def test_backward_ops_carry_the_module_of_the_forward_op_they_differentiate() -> None:
    body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    traced = trace(Model(lambda model, x: model.body(x) + model.body(x * 2), body=body), torch.ones(3, 4))
    assert modules_of(traced, aten.tanh.default) == [("forward", "body.1")] * 2
    assert modules_of(traced, aten.tanh_backward.default) == [("backward", "body.1")] * 2
    assert modules_of(traced, aten.addmm.default) == [
        ("forward", "body.0"),
        ("forward", "body.2"),
        ("forward", "body.0"),
        ("forward", "body.2"),
    ]
    assert [module for phase, module in modules_of(traced, aten.mm.default) if phase == "backward"] == [
        "body.2",
        "body.2",
        "body.0",
        "body.2",
        "body.2",
        "body.0",
    ]


def test_ops_of_the_root_stay_at_the_root_and_sums_of_gradients_go_to_what_they_sum() -> None:
    traced = trace(Tied().float(), torch.tensor([[0, 3], [6, 3]]))
    assert modules_of(traced, aten.tanh_backward.default) == [("backward", "")]
    assert modules_of(traced, aten.mean.default) == [("forward", "")]
    assert modules_of(traced, aten.add.Tensor) == [("backward", "head")]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("inception_v3@batch=2,image_size=75,classes=3", marks=pytest.mark.slow),
        "nmt@units=8,vocab=11,steps=3,batch=2",
    ],
)
def test_nearly_every_op_of_a_workload_knows_its_module(name: str) -> None:
    workload = build(parse_workload(name))
    traced = trace(workload.model, workload.inputs, workload.loss_fn)
    known = [bool(node.meta["custom"].get("module")) for node in calls(traced)]
    assert sum(known) >= 0.95 * len(known)
    paths = dict(workload.model.named_modules())
    assert all(node.meta["custom"].get("module", "") in paths for node in calls(traced))


def test_recurrent_layers_come_apart() -> None:
    found = targets(trace(nn.LSTM(4, 5), torch.ones(3, 2, 4), lambda output: output[0].sum()))
    assert "aten.addmm.default" in found
    assert not any("mkldnn" in target for target in found)


@pytest.mark.parametrize("name", ["writes", "buffers", "in_place", "batch_norm_train", "batch_norm_shared"])
def test_nothing_is_written_but_buffers_at_the_end_and_statistics_by_their_norm(name: str) -> None:
    case = CASES[name]()
    traced = trace(case.model, case.inputs, case.loss_fn)
    mutating = [
        node
        for node in calls(traced)
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    ]
    for node in mutating:
        assert node.target in (aten.copy_.default, aten._native_batch_norm_legit.default)
        written = node.args[3:5] if node.target is aten._native_batch_norm_legit.default else node.args[:1]
        assert all(isinstance(target, torch.fx.Node) and target.op == "placeholder" for target in written)


def test_one_batch_norm_is_one_op_that_updates_its_statistics() -> None:
    case = CASES["batch_norm_train"]()
    found = [str(node.target) for node in calls(trace(case.model, case.inputs))]
    assert found.count("aten._native_batch_norm_legit.default") == 1
    assert found.count("aten.copy_.default") == 1  # the counter of batches
    shared = CASES["batch_norm_shared"]()
    found = [str(node.target) for node in calls(trace(shared.model, shared.inputs))]
    assert found.count("aten._native_batch_norm_legit_functional.default") == 2
    assert found.count("aten.copy_.default") == 3


def test_a_model_that_writes_nowhere_is_traced_once_and_writes_become_scatters() -> None:
    model = nn.Linear(4, 2)
    assert "aten.copy_.default" not in targets(trace(model, torch.ones(3, 4)))
    model = Writes()
    found = targets(trace(model, (random(3, 4), torch.tensor([2, 0]))))
    assert {"aten.slice_scatter.default", "aten.index_put.default"} <= found


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(4, dtype=torch.int64), None])
def test_a_buffer_replaced_by_something_else_is_refused(value: Tensor | None) -> None:
    def replaces(model: nn.Module, x: Tensor) -> Tensor:
        model.mean = value
        return x

    with pytest.raises(CaptureError, match=r"replaced buffer 'mean'.*float32 \(4,\)"):
        trace(Model(replaces, mean=torch.zeros(4)), torch.ones(3, 4), None)


def test_autocast_is_part_of_the_step() -> None:
    def product(y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return functional.linear(y, y).float()

    traced = trace(Function(product, dtype=torch.float32), torch.ones(3, 4))
    assert "aten._to_copy.default" in targets(traced)


class Exponent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].cos()


def inner() -> nn.Module:
    model = Model(lambda model, x: Exponent.apply(model.linear(x)) + model.shift, linear=nn.Linear(4, 4))
    model.shift = torch.arange(4.0)
    return model


def outer() -> nn.Module:
    one = inner()
    return Model(lambda model, x: model.again(torch.tanh(model.inner(x))), inner=one, again=one)


def modules_of_ops(graph: OpGraph, target: str) -> list[tuple[bool, str]]:
    return [
        (bool(graph.phases[op] == BACKWARD), graph.modules[op])
        for op in range(graph.num_ops)
        if graph.targets[op] == target
    ]


def test_a_module_with_two_names_has_the_first_and_functions_belong_to_who_calls_them() -> None:
    graph = capture(outer(), torch.ones(3, 4), mean_square, "sgd")
    assert modules_of_ops(graph, "aten.addmm.default") == [(False, "inner.linear")] * 2
    assert modules_of_ops(graph, "aten.tanh.default") == [(False, "")]
    assert modules_of_ops(graph, "aten.tanh_backward.default") == [(True, "")]
    assert modules_of_ops(graph, "aten.exp.default") == [(False, "inner")] * 2
    assert modules_of_ops(graph, "aten.cos.default") == [(True, "inner")] * 2
    assert modules_of_ops(graph, "constant") == [(False, "inner")]
    assert modules_of_ops(graph, "update.sgd") == [(False, "inner.linear")] * 2
    # sums of gradients belong to the parameter that they are of
    sums = [module for is_backward, module in modules_of_ops(graph, "aten.add.Tensor") if is_backward]
    assert sums == ["inner.linear"] * 2


def test_a_recomputed_forward_keeps_its_modules_and_is_backward() -> None:
    def recomputes(model: nn.Module, x: Tensor) -> Tensor:
        return model.head(checkpoint(model.inner, torch.sin(x), use_reentrant=False, preserve_rng_state=False))

    model = Model(recomputes, inner=inner(), head=nn.Linear(4, 2))
    graph = capture(model, torch.ones(3, 4), mean_square, "sgd")
    assert modules_of_ops(graph, "aten.addmm.default") == [
        (False, "inner.linear"),
        (False, "head"),
        (True, "inner.linear"),
    ]
    assert modules_of_ops(graph, "aten.cos.default") == [(True, "inner")]
    assert [name for name, target in zip(graph.names, graph.targets, strict=True) if target == "parameter"] == [
        "inner.linear.weight",
        "inner.linear.bias",
        "head.weight",
        "head.bias",
    ]
    assert graph.targets.count("constant") == 1  # `shift`, and no stale copy of a parameter
