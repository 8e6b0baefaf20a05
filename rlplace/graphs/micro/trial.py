"""`Trial`: a copy of a model, computed in float64 on the CPU, to see what a step is without running the user's own."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from rlplace.graphs.capturing.constants import owner_of
from rlplace.graphs.capturing.portable import uncompiled
from rlplace.graphs.capturing.trace import LossFn, check_alone
from rlplace.graphs.capturing.untouched import PythonState
from rlplace.graphs.micro.assembly import FLOATS, Pinned


@dataclass(frozen=True)
class Stepped:
    """A loss and the gradients of all trainable parameters, in their order; what a step computes."""

    loss: Tensor
    gradients: tuple[Tensor, ...]

    @property
    def is_finite(self) -> bool:
        """Whether there is neither NaN nor infinity in it."""
        return all(bool(torch.isfinite(value).all()) for value in (self.loss, *self.gradients))


@dataclass
class _Kept:
    """A buffer and the value that it has at first."""

    module: nn.Module
    name: str
    now: Tensor
    first: Tensor

    def restore(self) -> None:
        """Takes another tensor where `forward` changed this one: a gradient to come may still need what it became."""
        if self.module._buffers[self.name] is not self.now or self.now._version:
            self.now = self.first.detach().clone()
            self.module._buffers[self.name] = self.now


class Trial:
    """A copy of `model`, its inputs and its loss; what runs here leaves the user's own as they are.

    Args:
        model: copied, to the CPU.
        call: (args, kwargs) of the model.
        loss_fn: copied where it is a module or bound to one; None for inference.
        targets: what the loss takes besides the model's output.
        is_double: whether floats become float64; else they keep their precision.

    Attributes:
        model: the copy.
        tensors: copies of the tensors among the inputs, then the targets.
        num_inputs: how many of them are inputs.
    """

    def __init__(
        self, model: nn.Module, call: Any, loss_fn: LossFn | None, targets: Sequence[Tensor], *, is_double: bool
    ) -> None:
        self.is_double = is_double
        memo: dict[int, Any] = {}
        for value in _tensors_of([model, *owner_of(loss_fn)]):
            if id(value) not in memo:
                memo[id(value)] = self._copied(value)
        with torch.no_grad():
            self.model, self._loss_fn = copy.deepcopy((model, loss_fn), memo)
        self._leaves, self._spec = pytree.tree_flatten(call)
        given = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self.num_inputs = len(given)
        self.tensors = [self._copied(tensor) for tensor in (*given, *targets)]
        modules = [module for owner in (self.model, *owner_of(self._loss_fn)) for module in owner.modules()]
        self._buffers = [
            _Kept(module, name, buffer, buffer.clone())
            for module in dict.fromkeys(modules)  # a loss may be a method of the model
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._state = PythonState((("", module) for module in dict.fromkeys(modules)), has_hooks=False)

    @property
    def has_loss(self) -> bool:
        """Whether a step has a loss; without, it is inference."""
        return self._loss_fn is not None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable ones."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def output(self, tensors: Sequence[Tensor]) -> Any:
        """What the model returns for these inputs (targets may follow); buffers and attributes are as at first."""
        self._state.restore()
        for kept in self._buffers:
            kept.restore()
        inputs = iter(tensors)
        leaves = [next(inputs) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return self.model(*args, **kwargs)

    def loss(self, output: Any, tensors: Sequence[Tensor]) -> Tensor:
        """The loss of an output, and of the targets among `tensors`."""
        assert self._loss_fn is not None
        loss: Tensor = check_alone(self._loss_fn(output, *tensors[self.num_inputs :]))
        return loss.reshape(())

    def step(self, tensors: Sequence[Tensor]) -> Stepped:
        """Loss and gradients for these inputs and targets."""
        loss = self.loss(self.output(tensors), tensors)
        return Stepped(loss.detach(), self.gradients([loss], None))

    def gradients(self, outputs: Sequence[Tensor], seeds: Sequence[Tensor | None] | None) -> tuple[Tensor, ...]:
        """Gradients of all trainable parameters, given those of `outputs`; zeros where these depend on none."""
        found = torch.autograd.grad(outputs, self.parameters, seeds, allow_unused=True)
        pairs = zip(found, self.parameters, strict=True)
        return tuple(torch.zeros_like(p) if g is None else g.detach().to_dense() for g, p in pairs)

    def _copied(self, value: Tensor) -> Tensor:
        dtype = torch.float64 if self.is_double and value.dtype in FLOATS else value.dtype
        made = value.detach().to(device="cpu", dtype=dtype, copy=True)
        if isinstance(value, nn.Parameter):
            made = nn.Parameter(made, value.requires_grad)
            for hook in (value._backward_hooks or {}).values():  # they change the gradient
                made.register_hook(hook)  # type: ignore[no-untyped-call]
        return made


def has_values(model: nn.Module, tensors: Sequence[Tensor]) -> bool:
    """Whether there is memory behind the model's tensors and the given ones: neither fake nor on `meta`."""
    every = (*model.parameters(), *model.buffers(), *tensors)
    return not any(isinstance(value, FakeTensor) or value.device.type == "meta" for value in every)


@contextmanager
def rehearsal(pinned: Pinned, *, is_double: bool) -> Iterator[None]:
    """While active, `pinned` is, no autocast, and floats are float64 by default; random states stay as they are."""
    python, numpy, default = random.getstate(), np.random.get_state(), torch.get_default_dtype()
    with ExitStack() as stack:
        stack.callback(np.random.set_state, numpy)
        stack.callback(random.setstate, python)
        stack.callback(torch.set_default_dtype, default)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(uncompiled())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of a model that sees one sample
        if is_double:
            torch.set_default_dtype(torch.float64)
        stack.enter_context(pinned)
        yield


def _tensors_of(owners: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Parameters, buffers and other tensors that modules hold, in attributes and in collections there."""
    for owner in owners:
        for module in owner.modules():
            for value in vars(module).values():  # parameters and buffers are in dicts there
                if isinstance(value, (Tensor, list, tuple, dict)):
                    yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
