"""Which tensors of a step are cut, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rlplace.errors import InvalidValue, UnknownName
from rlplace.graphs.micro_batching.slices import plan_slices
from rlplace.graphs.program import Slicing


def plan(inputs: Any, count: int, dims: Any = None, targets: tuple[torch.Tensor, ...] = ()) -> Slicing:
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    return plan_slices(nn.Identity(), args, kwargs, None, targets, count, dims)


def zeros(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(shape) for shape in shapes)


def test_by_default_all_that_is_as_long_as_the_first_input_is_cut_there() -> None:
    inputs = (*zeros((5, 3), (1, 3), (), (3, 5)), 2.0, [torch.zeros(5)])
    slicing = plan(inputs, 2, targets=zeros((5,), (4,)))
    assert slicing == Slicing((0, None, None, None, 0, 0, None), (3, 2))
    assert [part.shape[0] for part in slicing.cut([torch.zeros(5, 3)] * 7, 1)] == [2, 5, 5, 5, 2, 2, 5]


def test_the_first_input_is_the_first_with_a_dimension() -> None:
    assert plan(zeros((), (4, 2)), 4) == Slicing((None, 0), (1, 1, 1, 1))


def test_keyword_arguments_are_cut_as_they_are_flattened() -> None:
    inputs = {"y": torch.zeros(6, 2), "x": {"b": torch.zeros(6), "a": torch.zeros(2, 6)}}
    assert plan(inputs, 3) == Slicing((0, 0, None), (2, 2, 2))
    assert plan(inputs, 3, {2: 1}) == Slicing((0, 0, 1), (2, 2, 2))
    inputs["x"] = torch.zeros(2, 6)
    assert plan(inputs, 3, {"x": -1}) == Slicing((0, 1), (2, 2, 2))
    assert plan(inputs, 2, {"x": 0, "y": 1}) == Slicing((1, 0), (1, 1))


def test_dimensions_are_given_for_every_tensor() -> None:
    assert plan(zeros((7, 4), (4, 4)), 2, (1, None)) == Slicing((1, None), (2, 2))
    assert plan(zeros((7, 4)), 3, [-1], targets=()) == Slicing((1,), (2, 1, 1))
    assert plan(zeros((7, 4)), 4, [1, 0], targets=zeros((4,))) == Slicing((1, 0), (1, 1, 1, 1))


def test_one_micro_batch_needs_no_batch() -> None:
    assert plan(zeros(()), 1) == Slicing((None,), (1,))
    assert plan((), 1) == Slicing((), (1,))
    assert plan(zeros((3, 4), (3, 4)), 1, (None, None)) == Slicing((None, None), (1,))


@pytest.mark.parametrize("count", [0, -2, 2.0, True, "2", None])
def test_a_count_is_a_number_from_one(count: Any) -> None:
    with pytest.raises(InvalidValue, match=r"micro_batches is .*, expected an integer of at least 1"):
        plan(zeros((4, 4)), count)


NO_BATCH = r"expected one with a batch to cut into 2 for Identity.*`batch_dims` says"


@pytest.mark.parametrize(
    ("inputs", "count", "dims", "targets", "message"),
    [
        (zeros((7, 4)), 5, (1,), (), r"is 5, expected at most the batch, which is 4 \(cut: .* along dimension 1"),
        (zeros((1, 4), (7, 4)), 2, None, (), "micro_batches is 2, expected at most the batch, which is 1"),
        *((inputs, 2, None, (), NO_BATCH) for inputs in ((), zeros(()), (2.0,))),
        (zeros((4, 3)), 2, (None, 0), zeros((4,)), r"inputs is 'input 0 \(4, 3\)', expected one with a batch"),
        (zeros((7, 4)), 2, (0, 0), zeros((4,)), "is 'input 0 of 7, target 0 of 4', expected tensors of the same batch"),
        (zeros((4, 3), ()), 2, (0, 0), (), "batch_dims of input 1 is 0, expected None"),
    ],
)
def test_what_has_no_batch_of_that_size_is_refused(
    inputs: Any, count: int, dims: Any, targets: Any, message: str
) -> None:
    with pytest.raises(InvalidValue, match=message):
        plan(inputs, count, dims, targets=targets)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ((0,), r"batch_dims is \(0,\), expected an entry for each of the 2 tensors \(input 0, target 0\)"),
        ((0, 1), r"batch_dims of target 0 is 1, expected a dimension from 0 to 0 of its shape \(4,\), or None"),
        ((-3, 0), "batch_dims of input 0 is -3"),
        ((True, 0), "batch_dims of input 0 is True"),
        ((0, "0"), "batch_dims of target 0 is '0'"),
        ("00", "batch_dims is '00', expected a list or tuple"),
        (0, "batch_dims is 0, expected a list or tuple"),
        ({2: 0}, "batch_dims is 2, expected the position of a tensor, 0 to 1"),
    ],
)
def test_dimensions_that_do_not_fit_are_refused(dims: Any, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        plan(zeros((4, 3)), 2, dims, targets=zeros((4,)))


class Two(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return x * mask


@pytest.mark.parametrize("key", ["mask", "input 1", "1", 1])
def test_a_positional_input_is_named_as_forward_names_it(key: Any) -> None:
    inputs = zeros((4, 3), (4, 3), (4,))
    assert plan_slices(Two(), inputs, {}, None, (), 2, {key: None}).dims == (0, None, 0)
    with pytest.raises(UnknownName, match="did you mean 'mask'"):
        plan_slices(Two(), inputs, {}, None, (), 2, {"masks": None})
    with pytest.raises(UnknownName, match="others"):  # there are none, one or many
        plan_slices(Two(), inputs, {}, None, (), 2, {"others": None})


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'input_ids'"):
        plan({"input_ids": torch.zeros(4, 3)}, 2, {"input_id": 0})
