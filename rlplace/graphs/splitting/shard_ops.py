"""Ops that shards need and PyTorch has in several steps only: each is one op here, with a formula.

`sum_parts`: a sum from its parts. `shard_rows`, `lookup_rows`: lookups in the rows of a table that a shard holds.
`vocabulary_statistics`, `vocabulary_loss`, `vocabulary_gradient`: a softmax loss whose classes are split; the logarithm
of the sum of exponentials is that of those of the shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlplace.graphs.capturing.portable import logsumexp_dtype

MEAN = 1
"""The number of the reduction `mean` in `nll_loss_forward`; 2 is `sum`."""


def sum_formula(parts: list[Tensor]) -> Tensor:
    """The sum of at least two tensors of one shape, from the first on."""
    total = torch.add(parts[0], parts[1], out=torch.empty_like(parts[0]))
    for part in parts[2:]:
        total += part
    return total


def rows_formula(indices: Tensor, start: int, end: int, padding: int, number: int) -> Tensor:
    """Row numbers within rows `start` to `end - 1`; -1 for other rows and for row `padding`.

    Raises:
        RuntimeError: the shard is the first one, and a row is none of `number`. On a GPU, what waits for it fails.
    """
    if start == 0:
        _check_range(indices, number, "row of a table")
    is_here = (indices >= start) & (indices < end) & (indices != padding)
    return torch.where(is_here, indices - start, -1)


def _check_range(numbers: Tensor, size: int, what: str) -> None:
    """PyTorch's own ops on the whole refuse such numbers; shards would find nothing, and go on."""
    torch._assert_async(((numbers >= 0) & (numbers < size)).all(), f"a {what} is not from 0 to {size - 1}")


def lookup_formula(table: Tensor, rows: Tensor) -> Tensor:
    """(..., width): rows of the table, zeros for row -1."""
    found = torch.nn.functional.embedding(rows.clamp(min=0), table)
    return found.masked_fill_((rows < 0).unsqueeze(-1), 0)


def statistics_formula(logits: Tensor, target: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """(N,) the logarithm of the sum of exponentials over the classes of a shard, and the logit of the target.

    Args:
        logits: (N, classes of the shard).
        target: (N,) numbers among all classes.
        start: the number of the shard's first class; a target outside of the shard has a logit of 0 here.
    """
    dtype = logsumexp_dtype(logits.dtype)
    inner = target - start
    is_here = (inner >= 0) & (inner < logits.shape[1])
    picked = logits.gather(1, inner.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1).to(dtype)
    return torch.logsumexp(logits.to(dtype), 1), picked.masked_fill_(~is_here, 0)


def loss_formula(
    logsumexps: list[Tensor], picked: list[Tensor], target: Tensor, reduction: int, ignore_index: int, num_classes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, the number of targets that count, and (N,) the logarithm of the sum of exponentials over all classes.

    Args:
        logsumexps: (N,) of each shard.
        picked: (N,) logits of the targets, of each shard.
        target: (N,).
        reduction: 1 is a mean over targets that count, 2 a sum.
        ignore_index: the target that does not count.
        num_classes: of all shards.

    Raises:
        RuntimeError: a target that counts is no class. On a GPU, what waits for it fails.
    """
    logsumexp = torch.logsumexp(torch.stack(logsumexps), 0)
    counts = target != ignore_index
    _check_range(torch.where(counts, target, 0), num_classes, "target")
    total = torch.where(counts, logsumexp - torch.stack(picked).sum(0), 0.0).sum()
    number = counts.sum().to(total.dtype)
    return total / number if reduction == MEAN else total, number, logsumexp


def gradient_formula(
    grad: Tensor,
    logits: Tensor,
    logsumexp: Tensor,
    target: Tensor,
    total_weight: Tensor,
    start: int,
    reduction: int,
    ignore_index: int,
) -> Tensor:
    """(N, classes of the shard): the gradient of its logits.

    Args:
        grad: of the loss, a scalar.
        logits: (N, classes of the shard).
        logsumexp: (N,) over all classes.
        target: (N,).
        total_weight: the number of targets that count.
        start: the number of the shard's first class.
        reduction: of the loss.
        ignore_index: the target that does not count.
    """
    inner = target - start
    is_here = (inner >= 0) & (inner < logits.shape[1])
    gradient = torch.exp_(logits.to(logsumexp.dtype) - logsumexp.unsqueeze(1))
    ones = is_here.to(gradient.dtype).neg_().unsqueeze(1)
    gradient.scatter_add_(1, inner.clamp(0, logits.shape[1] - 1).unsqueeze(1), ones)
    each = grad / total_weight if reduction == MEAN else grad
    gradient *= torch.where(target != ignore_index, each, 0.0).unsqueeze(1)  # where none counts, `each` is infinite
    return gradient.to(logits.dtype)


def _fake_sum(parts: list[Tensor]) -> Tensor:
    return torch.empty_like(parts[0])


def _fake_rows(indices: Tensor, *_: Any) -> Tensor:
    return indices.new_empty(indices.shape)


def _fake_lookup(table: Tensor, rows: Tensor) -> Tensor:
    return table.new_empty((*rows.shape, table.shape[1]))


def _fake_statistics(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    each = logits.new_empty(logits.shape[:1], dtype=logsumexp_dtype(logits.dtype))
    return each, torch.empty_like(each)


def _fake_loss(logsumexps: list[Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    first = logsumexps[0]
    return first.new_empty(()), first.new_empty(()), first.new_empty(first.shape)


def _fake_gradient(_: Tensor, logits: Tensor, *__: Any) -> Tensor:
    return logits.new_empty(logits.shape)


_library: Any = torch.library.Library("rlplace", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema, _formula, _fake in (
    ("sum_parts(Tensor[] parts) -> Tensor", sum_formula, _fake_sum),
    ("shard_rows(Tensor indices, int start, int end, int padding, int number) -> Tensor", rows_formula, _fake_rows),
    ("lookup_rows(Tensor table, Tensor rows) -> Tensor", lookup_formula, _fake_lookup),
    (
        "vocabulary_statistics(Tensor logits, Tensor target, int start) -> (Tensor logsumexp, Tensor picked)",
        statistics_formula,
        _fake_statistics,
    ),
    (
        "vocabulary_loss(Tensor[] logsumexps, Tensor[] picked, Tensor target, int reduction, int ignore_index,"
        " int num_classes) -> (Tensor loss, Tensor total_weight, Tensor logsumexp)",
        loss_formula,
        _fake_loss,
    ),
    (
        "vocabulary_gradient(Tensor grad, Tensor logits, Tensor logsumexp, Tensor target, Tensor total_weight,"
        " int start, int reduction, int ignore_index) -> Tensor",
        gradient_formula,
        _fake_gradient,
    ),
):
    _library.define(_schema)
    _name = _schema.partition("(")[0]
    _library.impl(_name, _formula, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rlplace::{_name}", _fake, lib=_library)

sum_parts = torch.ops.rlplace.sum_parts.default
shard_rows = torch.ops.rlplace.shard_rows.default
lookup_rows = torch.ops.rlplace.lookup_rows.default
vocabulary_statistics = torch.ops.rlplace.vocabulary_statistics.default
vocabulary_loss = torch.ops.rlplace.vocabulary_loss.default
vocabulary_gradient = torch.ops.rlplace.vocabulary_gradient.default
