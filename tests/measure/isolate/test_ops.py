"""Ops by name: where each comes from, and how it is had again where it is not known yet."""

from __future__ import annotations

import faulty_ops  # noqa: F401  # registers its op
import pytest
import torch
from torch._library.custom_ops import OPDEFS

from rlplace.measure.isolate import packing as ops


def test_ops_of_pytorch_need_nothing() -> None:
    assert ops.home_of("aten::add") == ops.OpHome()
    assert ops.find_overload("aten::add", "Tensor", ops.OpHome()) is torch.ops.aten.add.Tensor


def test_a_custom_op_needs_the_module_that_defines_it() -> None:
    home = ops.home_of("rlplace_tests_faults::faulty")
    assert home.modules == ("faulty_ops",)
    assert home.definition is None


def test_an_op_of_a_library_needs_the_module_that_made_it() -> None:
    library = torch.library.Library("rlplace_tests_library", "DEF")
    library.define("plain(Tensor x) -> Tensor")
    try:
        assert ops.home_of("rlplace_tests_library::plain").modules == (__name__,)
    finally:
        library._destroy()


def test_an_op_of_a_main_module_travels_with_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.__module__ = "__main__"
    op = torch.library.custom_op("rlplace_tests_ops::twice", twice, mutates_args=())
    op.register_fake(lambda x: torch.empty_like(x))
    home = ops.home_of("rlplace_tests_ops::twice")
    assert home.modules == ()
    assert home.definition is not None
    assert (home.definition.name, home.definition.function) == ("rlplace_tests_ops::twice", twice)
    monkeypatch.delitem(OPDEFS, "rlplace_tests_ops::twice")
    found = ops.find_overload("rlplace_tests_ops::twice", "default", home)
    assert torch.equal(found(torch.ones(2)), torch.full((2,), 2.0))
    assert "rlplace_tests_ops::twice" in OPDEFS


def test_other_things_are_no_ops() -> None:
    assert ops.reduced(len) is None
    assert ops.reduced(torch.ones(1)) is None
