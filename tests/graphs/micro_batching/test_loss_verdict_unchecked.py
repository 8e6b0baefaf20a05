"""Losses that are not checked, and what a check leaves as it was."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from judged_losses import BATCH, CLASSES, ByHand, judge, labels, net, x
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplace.errors import CaptureError, UnknownName


def test_one_micro_batch_is_not_checked() -> None:
    assert judge(nn.Sequential(ByHand(), net()), x(), lambda y: y.square().mean(), count=1).kind == "separate"


def test_what_has_no_values_is_unchecked() -> None:
    with FakeTensorMode():
        model, inputs = net(), torch.randn(BATCH, 5)
    verdict = judge(model, inputs, lambda y: y.square().sum())
    assert (verdict.kind, verdict.weights, verdict.is_checked) == ("separate", "mean", False)
    assert verdict.why == "unchecked: its tensors are fake, without values; a mean over samples is assumed"
    assert judge(model, inputs, lambda y: y.square().sum(), asked="joined").kind == "joined"
    assert judge(model, inputs, None).kind == "joined"
    assert judge(net().to("meta"), x().to("meta"), lambda y: y.square().sum()).is_checked is False


def test_what_takes_too_long_is_unchecked() -> None:
    verdict = judge(net(), x(), lambda y: y.square().mean(), most_work=0.0)
    assert (verdict.kind, verdict.is_checked) == ("separate", False)
    assert "longer than 0 s" in verdict.why


def test_what_cannot_be_computed_is_unchecked() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).view(BATCH, 6)

    with pytest.raises(
        CaptureError,
        match=r"it cannot be cut so: a slice of the batch fails.*does not run on .*RuntimeError: shape '\[8, 6\]'",
    ):
        judge(Fixed(), x(), lambda y: y.square().mean())
    verdict = judge(net(), x(), lambda y: (y - y).log().mean())
    assert "not finite for 4 samples" in verdict.why


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean 'separate'"):
        judge(net(), x(), lambda y: y.square().mean(), asked="separated")


class Stateful(nn.Module):
    """Has all that a check could leave changed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, CLASSES))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(CLASSES))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.steps += 1
        self.mean = self.mean * 0.9
        _ = np.random.random(), random.random(), torch.rand(2)
        y: Tensor = self.body(x) / self.steps
        return y


def test_the_model_and_everything_random_stay_as_they_are() -> None:
    model, loss_fn = Stateful().train(), nn.CrossEntropyLoss()
    model.body[0].eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    inputs, targets = x().requires_grad_(), labels()
    before = copy.deepcopy(model)
    given = dict((*model.named_parameters(), *model.named_buffers()))
    versions = {name: tensor._version for name, tensor in given.items()}
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    assert judge(model, inputs, loss_fn, targets).kind == "joined"

    assert torch.equal(torch.get_rng_state(), state[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state[1:]
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()
    assert (model.calls, [m.training for m in model.modules()]) == (0, [m.training for m in before.modules()])
    now = dict((*model.named_parameters(), *model.named_buffers()))
    assert all(now[name] is tensor and tensor._version == versions[name] for name, tensor in given.items())
    for name, tensor in (*before.named_parameters(), *before.named_buffers()):
        assert torch.equal(tensor, given[name]), name
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in model.parameters())
    assert inputs.grad is None


def test_hooks_that_change_gradients_are_part_of_the_step() -> None:
    """Clipped gradients of slices do not add up to the clipped gradient of the batch."""
    model = net()
    model[0].weight.register_hook(lambda gradient: gradient / gradient.norm())
    with pytest.raises(CaptureError, match="neither their sum nor their mean"):
        judge(model, x(), lambda y: y.square().mean(), asked="separate")
