"""What stays on a device from step to step.

A GPU has no more memory for this process than its host says.
"""

from __future__ import annotations

import dataclasses
import os

import plain_gpus
import pytest
import torch
from core_hosts import core_host
from micrographs import op_graph
from small_models import CASES, mean_square, random
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplace import cuda
from rlplace.errors import InvalidValue
from rlplace.graphs import capture
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.execute.device_threads import torch_device
from rlplace.measure.execute.residents import Residents, gpu_capacities, limited_memory
from rlplace.measure.execute.shared_heap import SharedHeap
from rlplace.measure.hosts.host import Device, Host


def linear() -> tuple[nn.Linear, OpGraph]:
    model = nn.Linear(4, 2)
    return model, capture(model, torch.ones(3, 4), mean_square, "adam")


def test_devices_and_pytorch_devices() -> None:
    assert {torch_device(device) for device in core_host(2, has_gang=True).devices} == {torch.device("cpu")}
    for name in ("cuda:1", "cuda:1/0", "cuda:1/3"):
        assert torch_device(Device(name, "gpu", "cuda", memory_bytes=1)) == torch.device("cuda", 1)


def test_the_users_tensors_are_copied_once_and_never_touched() -> None:
    model, graph = linear()
    residents = Residents(graph, core_host())
    weight = residents.tensor(graph.names.index("weight"), 0)
    assert torch.equal(weight, model.weight)
    assert weight.data_ptr() != model.weight.data_ptr()
    assert not weight.requires_grad
    assert residents.tensor(graph.names.index("weight"), 1) is weight, "cores share one memory"
    before = model.weight.detach().clone()
    residents.updater([graph.names.index("update_weight")], 0)(torch.ones(2, 4))
    assert torch.equal(model.weight, before)
    assert not torch.equal(weight, before)


def test_what_a_heap_has_for_other_devices() -> None:
    """Sources and states of updates; the other process adopts them as they are, options included."""
    _, graph = linear()
    file = os.memfd_create("rlplace tests")
    heap, other = SharedHeap(file, 0), SharedHeap(file, 0)
    residents = Residents(graph, core_host(), heap=heap)
    weight, update = graph.names.index("weight"), graph.names.index("update_weight")
    devices = [0] * graph.num_ops
    assert residents.held(devices, here=(0,)) == {}
    devices[weight] = devices[update] = 1
    assert residents.held(devices, here=(0,)).keys() == {weight, update}
    rest = {*require_program(graph).sources, *updates_of(graph)} - {weight, update}
    assert residents.held(devices, here=(1,)).keys() == rest
    assert Residents(graph, core_host()).held(devices, here=(0,)) == {}

    state = residents.update_state(update, 1)
    state.spec = dataclasses.replace(state.spec, lr=0.5)
    rank = Residents(graph, core_host(), is_apart=True)
    for op, value in other.unpacked(heap.packed(residents.held(devices, here=(0,)))).items():
        rank.adopt(op, 1, value)
    rank.updater([update], 1)(torch.ones(2, 4))
    assert torch.equal(rank.tensor(weight, 1), residents.tensor(weight, 1))
    torch.testing.assert_close(residents.tensor(weight, 1), linear_weight(graph) - 0.5, rtol=1e-4, atol=1e-4)
    assert float(state.step) == 1.0  # type: ignore[arg-type]
    os.close(file)


def updates_of(graph: OpGraph) -> set[int]:
    return {op for op, target in enumerate(graph.targets) if target.startswith("update.")}


def linear_weight(graph: OpGraph) -> torch.Tensor:
    """As it was at capture."""
    return require_program(graph).sources[graph.names.index("weight")].value.detach()


def test_others_are_asked_for_what_they_have_and_do_it_too() -> None:
    asked: list[tuple[object, ...]] = []

    def ask(*message: object) -> list[object]:
        asked.append(message)
        return [frozenset({(7, "cpu:1")})] if message[0] == "made" else [True]

    _, graph = linear()
    residents = Residents(graph, core_host(), is_apart=True, ask=ask)
    weight = graph.names.index("weight")
    residents.tensor(weight, 0)
    assert residents.made == {(weight, "cpu:0"), (7, "cpu:1")}
    residents.reset()
    residents.keep_only([(7, "cpu:1")])
    assert asked == [("made",), ("reset",), ("keep_only", frozenset({(7, "cpu:1")}))]
    assert residents.made == {(7, "cpu:1")}


def test_reset_restores_what_steps_change_and_nothing_else() -> None:
    case = CASES["input_changed"]()
    graph = capture(case.model, case.inputs, case.loss_fn, "adam")
    residents = Residents(graph, core_host())
    tensors = {name: residents.tensor(graph.names.index(name), 0) for name in ("linear.weight", "input_0", "input_1")}
    update = residents.updater([graph.names.index("update_linear.weight")], 0)

    def change() -> torch.Tensor:
        update(random(6, 4))
        return tensors["linear.weight"].clone()

    first = change()
    tensors["input_0"].fill_(5.0)
    tensors["input_1"].fill_(5.0)
    residents.reset()
    assert torch.equal(tensors["linear.weight"], case.model.linear.weight)
    assert torch.equal(tensors["input_1"], case.inputs[1]), "the step writes to it"
    assert torch.all(tensors["input_0"] == 5.0), "the caller's own"
    assert torch.equal(change(), first), "the optimizer starts anew"


def test_what_is_not_needed_is_dropped_and_made_anew_as_at_capture() -> None:
    model, graph = linear()
    residents = Residents(graph, core_host())
    weight, bias, update = (graph.names.index(name) for name in ("weight", "bias", "update_weight"))
    kept = residents.tensor(bias, 0)
    residents.updater([update], 0)(torch.ones(2, 4))
    assert residents.made == {(weight, "cpu"), (bias, "cpu"), (update, "cpu")}
    assert residents.keep_only({residents.at(bias, 1), residents.at(update, 0)}) is False, "not on a GPU"
    assert residents.made == {(bias, "cpu"), (update, "cpu")}
    assert residents.tensor(bias, 0) is kept
    assert torch.equal(residents.tensor(weight, 0), model.weight)


def test_setting_a_tensor_keeps_its_memory() -> None:
    _, graph = linear()
    residents = Residents(graph, core_host())
    op = graph.names.index("input_0")
    resident = residents.tensor(op, 0)
    residents.set_tensor(op, 0, torch.full((3, 4), 7.0))
    assert residents.tensor(op, 0) is resident
    assert torch.all(resident == 7.0)


@pytest.mark.parametrize("value", [torch.ones(2, 4), torch.ones(3, 4, dtype=torch.float64)])
def test_another_shape_or_dtype_is_refused(value: torch.Tensor) -> None:
    _, graph = linear()
    hint = r"shapes that it was captured with" if value.dtype == torch.float32 else r"Cast it: `\.to\(torch\.float32\)`"
    with pytest.raises(InvalidValue, match=hint) as refused:
        Residents(graph, core_host()).set_tensor(graph.names.index("input_0"), 0, value)
    assert refused.value.field == "input_0"


def test_fake_tensors_get_values_of_their_shape_the_same_for_one_seed() -> None:
    with FakeTensorMode():
        model, inputs = nn.Embedding(5, 4), torch.zeros(3, dtype=torch.int64)
    graph = capture(model, inputs, mean_square, "sgd")
    weight, tokens = graph.names.index("weight"), graph.names.index("input_0")
    one, same, other = (Residents(graph, core_host(), seed=seed) for seed in (0, 0, 1))
    assert type(one.tensor(weight, 0)) is torch.Tensor
    assert one.tensor(weight, 0).shape == (5, 4)
    assert torch.equal(one.tensor(weight, 0), same.tensor(weight, 0))
    assert not torch.equal(one.tensor(weight, 0), other.tensor(weight, 0))
    assert torch.equal(one.tensor(tokens, 0), torch.zeros(3, dtype=torch.int64)), "a valid index everywhere"
    one.tensor(weight, 0).zero_()
    one.reset()
    assert torch.equal(one.tensor(weight, 0), same.tensor(weight, 0))


def test_a_graph_without_a_program_has_no_values() -> None:
    with pytest.raises(InvalidValue, match="capture it again"):
        Residents(op_graph([[]]), core_host())


def parts() -> Host:
    devices = plain_gpus.gpu_host(3, 1000).devices
    named = zip(devices, ("cuda:0/0", "cuda:0/1", "cuda:1/0"), (100, 150, 0), strict=True)
    host = core_host(3)
    names = {f"cpu:{k}": device for k, device in enumerate(("cuda:0/0", "cuda:0/1", "cuda:1/0"))}
    return dataclasses.replace(
        host,
        devices=tuple(dataclasses.replace(each, name=name, context_bytes=held) for each, name, held in named),
        routes=tuple(
            dataclasses.replace(route, source=names[route.source], destination=names[route.destination])
            for route in host.routes
        ),
    )


def test_parts_of_a_gpu_add_up() -> None:
    assert gpu_capacities(parts().devices) == {torch.device("cuda", 0): 900 + 850, torch.device("cuda", 1): 1000}
    assert gpu_capacities(core_host(2).devices) == {}


def test_limits_end_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = plain_gpus.install(monkeypatch)
    limits = limited_memory(parts().devices)
    limits.__enter__()
    assert calls.limits == [("cuda:0", 1750), ("cuda:1", 1000)]
    assert limits.__exit__(ValueError, ValueError("boom"), None) is False
    assert calls.limits[2:] == [("cuda:0", cuda.UNLIMITED), ("cuda:1", cuda.UNLIMITED)]


def test_a_lost_gpu_does_not_hide_what_lost_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch asks a GPU how much memory it has when its limit changes, and a lost one answers nothing."""

    def limit(_: torch.device, num_bytes: int) -> None:
        if num_bytes == cuda.UNLIMITED:
            raise RuntimeError(says)

    monkeypatch.setattr(cuda, "limit_memory", limit)
    says = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(ValueError, match="boom"), limited_memory(parts().devices):
        raise ValueError("boom")
    says = "invalid device ordinal"
    with pytest.raises(RuntimeError, match="ordinal"), limited_memory(parts().devices):
        pass
