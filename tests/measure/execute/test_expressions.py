"""Calls and views as Python source, and which constants get a name."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rlplace.graphs import capture
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.program import Call, Program, Ref
from rlplace.measure.execute.generate import Constants, Expressions


@pytest.fixture
def program() -> Program:
    """View 0 is the weight, transposed; view 3 is a view of view 1, both of the relu's output, tensor 4."""
    graph = capture(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.ones(5, 2), torch.sum, "adam")
    return require_program(graph)


def call(*args: object, outputs: tuple[int, ...] = (7,), returns_tuple: bool = False, **kwargs: object) -> Call:
    return Call(torch.ops.aten.relu.default, args, kwargs, outputs, returns_tuple)


def test_what_python_has_a_literal_for_is_written_out(program: Program) -> None:
    constants = Constants()
    words = Expressions(program, 0, constants)
    lines, produced = words.call(9, call(1, 0.5, True, None, "sum", [2, (Ref(4),)], ()))
    assert lines == ["t7 = f9(1, 0.5, True, None, 'sum', [2, (t4, )], ())"]
    assert produced == (7,)
    assert not constants.values


def test_other_values_get_one_name_each_over_all_devices(program: Program) -> None:
    constants = Constants()
    first, second = (Expressions(program, device, constants) for device in range(2))
    assert first.call(8, call(math.inf, dtype=torch.float16))[0] == ["t7 = f8(c0, dtype=c1)"]
    assert second.call(9, call(torch.float16, math.inf))[0] == ["t7 = f9(c1, c0)"]
    assert constants.values == {"c0": math.inf, "c1": torch.float16}


def test_outputs_are_unpacked_as_the_op_returns_them(program: Program) -> None:
    words = Expressions(program, 0, Constants())
    assert words.call(9, call(outputs=(7, -1), returns_tuple=True)) == (["t7, _ = f9()"], (7,))
    assert words.call(9, call(outputs=(7,), returns_tuple=True)) == (["t7, = f9()"], (7,))
    assert words.call(9, call(outputs=(-1,))) == (["f9()"], ())


def test_a_view_is_defined_once_after_the_views_that_it_is_of_until_its_tensor_is_dropped(program: Program) -> None:
    words = Expressions(program, 0, Constants())
    view = Ref(program.num_tensors + 3)
    made = ["v1 = g1(t4)", "v3 = g3(v1)"]
    assert words.views([view]) == made
    assert words.name(view) == "v3"
    assert words.views([view]) == []
    assert words.forget(4) == ["v1", "v3"]
    assert words.forget(4) == []
    assert words.views([view]) == made
    words.forget_all()
    assert words.views([view]) == made
