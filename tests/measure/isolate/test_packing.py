"""Packing: what comes out is what went in, its tensors shared among parts and private to each reader.

Ops by name: where each comes from, and how it is registered where it is not known yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import faulty_ops
import pytest
import torch
from torch import nn
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rlplace.measure.isolate import packing as ops
from rlplace.measure.isolate.packing import Packed, Unpacked


@pytest.fixture
def packed() -> Iterator[Packed]:
    made = Packed()
    yield made
    made.close()


def read(packed: Packed) -> Unpacked:
    return Unpacked(packed.seal(), packed.index)


def test_tensors_of_every_kind_come_back(packed: Packed) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "base": base,
        "view": base.t()[1:],
        "half": torch.randn(5).to(torch.bfloat16),
        "empty": torch.empty(0, 7),
        "flags": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "parameter": nn.Parameter(torch.randn(2, 2)),
    }
    packed.add(tensors)
    found = read(packed).get(0)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
        assert (found[name].stride(), found[name].dtype) == (tensor.stride(), tensor.dtype)
    assert isinstance(found["parameter"], nn.Parameter)
    assert found["parameter"].requires_grad
    found["base"][1, 1] = -1.0
    assert found["view"][0, 1] == -1.0, "views show the same memory"


def test_parts_share_tensors_and_readers_do_not(packed: Packed) -> None:
    weight = torch.zeros(1 << 16)
    numbers = [packed.add({"weight": weight}), packed.add([weight.view(4, -1)])]
    file = packed.seal()
    assert packed.index[0] < 2 * weight.nbytes, "it travels once"
    first, second = Unpacked(file, packed.index), Unpacked(file, packed.index)
    first.get(numbers[0])["weight"].fill_(3.0)
    assert first.get(numbers[1])[0].sum() == 3.0 * len(weight)
    assert second.get(numbers[0])["weight"].sum() == 0.0
    assert weight.sum() == 0.0


def test_tied_parameters_stay_tied(packed: Packed) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    packed.add(model)
    found = read(packed).get(0)
    assert found[1].weight is found[0].weight


def test_fake_tensors_stay_fake(packed: Packed) -> None:
    with FakeTensorMode():
        model = nn.Linear(1 << 16, 1 << 16)
    packed.add(model)
    found = read(packed).get(0)
    assert isinstance(found.weight, FakeTensor)
    assert found.weight.shape == (1 << 16, 1 << 16)
    assert sum(packed.index) < 1 << 20


def test_ops_travel_by_name_and_lambdas_by_value(packed: Packed) -> None:
    ops = [torch.ops.aten.add.Tensor, torch.ops.aten.sum, torch.ops.rlplace_tests_faults.faulty.default]
    packed.add([*ops, faulty_ops.faulty, lambda y: y.sum() * 2])
    *found, custom, loss = read(packed).get(0)
    assert all(there is here for there, here in zip(found, ops, strict=True))
    assert custom is faulty_ops.faulty
    assert loss(torch.ones(3)) == 6.0


def test_what_belongs_to_one_process_is_refused(packed: Packed) -> None:
    with pytest.raises(TypeError, match="generator"):
        packed.add(k for k in range(3))


def test_ops_of_pytorch_need_nothing() -> None:
    assert ops.home_of("aten::add") == ops.OpHome()
    assert ops.find_op("aten::add", ops.OpHome(), "Tensor") is torch.ops.aten.add.Tensor


def test_a_custom_op_needs_the_module_that_defines_it() -> None:
    home = ops.home_of("rlplace_tests_faults::faulty")
    assert home.modules == ("faulty_ops",)
    assert home.define is None


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
    assert isinstance(home.define, partial)
    assert home.define.args[:3:2] == ("rlplace_tests_ops::twice", twice)
    monkeypatch.delitem(OPDEFS, "rlplace_tests_ops::twice")
    found = ops.find_op("rlplace_tests_ops::twice", home, "default")
    assert torch.equal(found(torch.ones(2)), torch.full((2,), 2.0))
    assert "rlplace_tests_ops::twice" in OPDEFS


def test_other_things_are_no_ops() -> None:
    assert ops.reduced(len) is None
    assert ops.reduced(torch.ones(1)) is None
