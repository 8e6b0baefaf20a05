"""Ops of the user: captured as one op each, run, profiled, and costed as registered.

FLOPs, bytes and signatures of single calls, worked out by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from core_hosts import core_host
from naive_plan import naive_plan, random_devices
from small_models import mean_square
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplace.errors import CaptureError, InvalidValue, UnknownName
from rlplace.graphs import capture, register_cost, run_graph, unregister_cost
from rlplace.graphs.capturing.lower import call_facts, signature, tensor_bytes
from rlplace.graphs.capturing.portable import attention, attention_backward
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.residents import Residents
from rlplace.measure.profiling.profile import profile_costs


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


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.act = Swish()

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.ops.rlplace_test_defined.pair(x)
        return self.act(self.linear(first + second))


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return swish(x, 2.0)


def captured() -> tuple[Custom, Tensor, OpGraph]:
    torch.manual_seed(0)
    model, x = Custom(), torch.randn(3, 4)
    return model, x, capture(model, x, mean_square, "sgd")


def test_each_is_one_op_of_its_module_and_the_step_equals_eager() -> None:
    model, x, graph = captured()
    ops = {graph.targets[op]: op for op in range(graph.num_ops) if graph.targets[op].startswith("rlplace_test")}
    assert {target: (graph.modules[op], int(graph.phases[op])) for target, op in ops.items()} == {
        "rlplace_test_defined.pair.default": ("", 0),
        "rlplace_test.swish.default": ("act", 0),
        "rlplace_test.swish_gradient.default": ("act", 1),
    }
    pair = ops["rlplace_test_defined.pair.default"]
    assert graph.output_bytes[pair] == 4 * (12 + 4)
    step, loss = run_graph(graph), mean_square(model(x))
    torch.testing.assert_close(step.result, loss.detach())
    expected = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(list(step.gradients.values()), list(expected))


def test_unless_registered_the_general_estimate_counts() -> None:
    _, _, graph = captured()
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
        _, _, graph = captured()
    finally:
        unregister_cost(op)
    swishes = graph.targets.index("rlplace_test.swish.default")
    assert (graph.flops[swishes], graph.bytes_moved[swishes], graph.workspace_bytes[swishes]) == (180, 144, 300)
    plain = captured()[2]
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
            captured()
    finally:
        unregister_cost(swish)


def test_a_function_that_fails_is_refused_with_its_own_words() -> None:
    register_cost(swish, bytes_moved=lambda x, output: 1)
    try:
        with pytest.raises(InvalidValue, match=r"bytes_moved.*raised TypeError.*called with the op's own arguments"):
            captured()
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
    _, _, graph = captured()
    assert np.all(graph.workspace_bytes == 0)


def test_a_users_op_runs_where_it_is_placed_and_has_a_profiled_cost() -> None:
    model, x, graph = captured()
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


class Grouped(nn.Module):
    """Rows by group, as experts take their tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, width, 8))
        self.register_buffer("offsets", OFFSETS)

    def forward(self, x: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight.mT, offs=self.offsets).square()


def test_grouped_products_are_captured_with_their_gradients() -> None:
    torch.manual_seed(0)
    model, x = Grouped(12), torch.randn(8, 8)
    step = run_graph(capture(model, x, lambda y: y.mean()))
    expected = model(x).mean()
    expected.backward()
    torch.testing.assert_close(step.result, expected.detach())
    torch.testing.assert_close(step.gradients["weight"], model.weight.grad)


def test_rows_of_grouped_products_that_kernels_pad_are_captured() -> None:
    torch.manual_seed(0)
    model, x = Grouped(7), torch.randn(8, 8)
    torch.testing.assert_close(run_graph(capture(model, x)).result, model(x).detach())
    with pytest.raises(RuntimeError, match="16 bytes"):
        model(x).mean().backward()  # the gradient is not padded
    with pytest.raises(CaptureError, match="in rows of a multiple of 4 items"):
        capture(model, x, lambda y: y.mean())


def test_grouped_products_of_doubles_are_refused_as_eager_does() -> None:
    with pytest.raises(CaptureError, match="in eager as well: RuntimeError: Expected mat_a to be Float32"):
        capture(Grouped(12).double(), torch.randn(8, 8).double())
