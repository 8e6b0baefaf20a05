"""FLOPs, bytes and signatures of single calls, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlplace.graphs.capturing.lower import call_facts, signature, tensor_bytes
from rlplace.graphs.capturing.portable import attention, attention_backward

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
