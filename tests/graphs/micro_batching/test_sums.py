"""How gradients of micro-batches are summed."""

from __future__ import annotations

import torch

from rlplace.graphs.micro_batching.assembly import Assembly, Sum
from rlplace.graphs.opgraph import BACKWARD
from rlplace.graphs.program import Ref, Source


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
