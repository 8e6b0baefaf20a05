"""What is built of a workload that was named, and with which seeds."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rlplace.errors import UnknownName
from rlplace.workloads import InceptionV3, build, parse_workload

TINY_NMT = "nmt@layers=1,units=4,batch=2,steps=3,vocab=7"


def test_weights_scale_the_losses():
    one, two = "nmt@layers=1,units=4,batch=2,steps=3,vocab=7", "rnnlm@layers=1,units=4,batch=2,steps=3,vocab=7"
    workload = build(parse_workload(f"multi:{one}*2,{two}*0.25,{one}"))
    assert [name for name, _ in workload.model.named_children()] == ["nmt", "rnnlm", "nmt_2"]
    outputs = workload.model(**workload.inputs)
    first, second, third = (outputs[name].loss for name in ("nmt", "rnnlm", "nmt_2"))
    torch.testing.assert_close(workload.loss_fn(outputs), 2 * first + 0.25 * second + third)
    tokens = [workload.inputs[f"nmt.{index}"] for index in range(3)]
    assert torch.equal(workload.model.nmt(*tokens).loss, first)


@pytest.mark.parametrize("text", [TINY_NMT, "inception_v3@image_size=107,classes=3"])
def test_build(text):
    workload = build(parse_workload(text))
    assert (workload.name, workload.optimizer) == (text, "adam")
    loss = workload.loss_fn(workload.model(*workload.inputs))
    assert loss.shape == ()
    assert loss.isfinite()


def test_same_seed_same_weights_and_inputs():
    def tensors(seed):
        workload = build(parse_workload(TINY_NMT), seed=seed)
        return [*workload.model.parameters(), *workload.inputs]

    assert all(torch.equal(a, b) for a, b in zip(tensors(3), tensors(3), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(tensors(3), tensors(4), strict=True))


def test_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    build(parse_workload(TINY_NMT), seed=5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["nmt", "inception_v3"])
def test_paper_size_is_built_without_memory(name):
    before = torch.get_rng_state()
    with FakeTensorMode():
        workload = build(parse_workload(name), default_size="paper")
    assert all(isinstance(parameter.data, FakeTensor) for parameter in workload.model.parameters())
    assert all(isinstance(tensor, FakeTensor) for tensor in workload.inputs)
    assert torch.equal(torch.get_rng_state(), before)


def test_face_offers_the_models():
    import rlplace.workloads

    assert rlplace.workloads.InceptionV3 is InceptionV3
    assert all(hasattr(rlplace.workloads, name) for name in rlplace.workloads.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = rlplace.workloads.nothing


def test_a_text_can_be_built_at_once() -> None:
    tiny = "nmt@small,layers=1,units=8,steps=2,vocab=20,batch=4"
    first, second = build(tiny), build(parse_workload(tiny))
    assert first.name == second.name == tiny
    with pytest.raises(UnknownName, match="nmtt"):
        build("nmtt")
