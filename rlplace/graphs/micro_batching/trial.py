"""`Trial`: a copy of a model, computed in float64 on the CPU, to see what a step is without running the user's own.

`Pinned`: while active, a step is a function of its samples alone: float64, nothing random, fixed statistics.
"""

from __future__ import annotations

import copy
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rlplace.graphs.capturing.constants import owner_of
from rlplace.graphs.capturing.portable import uncompiled
from rlplace.graphs.capturing.trace import LossFn, check_alone
from rlplace.graphs.capturing.untouched import PythonState
from rlplace.graphs.program import with_tensors

aten = torch.ops.aten

FLOATS = {torch.float16, torch.bfloat16, torch.float32}
"""What becomes float64."""
DRAWN = 0.5
"""What a random op of floats draws instead: neither nothing nor everything."""


class TimeUp(BaseException):
    """The time of a check is over; no `Exception`, so that no model or loss catches it."""


@dataclass(frozen=True)
class Labels:
    """The labels that one loss of negative log-likelihood read.

    Attributes:
        ignore_index: the label of what does not count.
        num_ignored: how many had it.
        is_mean: whether it divides by how many labels count.
        is_weighted: whether it divides by the weights of the classes that occur.
    """

    ignore_index: int
    num_ignored: int
    is_mean: bool
    is_weighted: bool


class Pinned(TorchDispatchMode):
    """Makes ops of one step comparable with those of another that has more or fewer samples.

    Casts to lower precision stay in float64; a random op returns a constant (a permutation the reverse order); batch
    normalisation uses its running statistics, mean 0 and variance 1 where it has none, and changes nothing.

    Args:
        is_double: whether floats become float64.
        deadline: in the time of `time.monotonic`; an op after it raises `TimeUp`.

    Attributes:
        labels: one entry for every loss of negative log-likelihood that ran.
        normalises_batch: whether batch normalisation would have used the statistics of the batch.
    """

    def __init__(self, *, is_double: bool, deadline: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.labels: list[Labels] = []
        self.normalises_batch = False
        self._is_double, self._deadline = is_double, deadline

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if time.monotonic() > self._deadline:
            raise TimeUp
        kwargs = kwargs or {}
        if self._is_double and func is not aten.view.dtype:
            args = tuple(map(_widened, args))
            kwargs = {key: _widened(value) for key, value in kwargs.items()}
        if func in _NORMS:
            return self._normalised(_named(func, args, kwargs), func)
        if func in _NORM_BACKWARDS:
            given = _named(func, args, kwargs)
            if given.get("train", given.get("update")):
                mean, variance = _statistics(given)
                return aten.native_batch_norm_backward.default(
                    given["grad_out"], given["input"], given.get("weight"), mean, variance, None, None, False,
                    given["eps"], given["output_mask"],
                )  # fmt: skip
        if func in _LOSSES:
            self._note(_named(func, args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            return _drawn(func, args, kwargs)
        return func(*args, **kwargs)

    def _normalised(self, given: dict[str, Any], func: Any) -> Any:
        x: Tensor = given["input"]
        if given.get("training", func is aten._batch_norm_with_update.default):
            self.normalises_batch |= x.shape[0] > 1  # instances are normalised as channels of one sample
        mean, variance = _statistics(given)
        done = aten.native_batch_norm.default(
            x, given.get("weight"), given.get("bias"), mean, variance, False, given["momentum"], given["eps"]
        )
        return (*done, x.new_empty(0, dtype=torch.uint8)) if len(func._schema.returns) == 4 else done

    def _note(self, given: dict[str, Any]) -> None:
        ignored = given["target"] == given["ignore_index"]
        is_mean = given["reduction"] == 1
        is_weighted = is_mean and given.get("weight") is not None
        self.labels.append(Labels(given["ignore_index"], int(ignored.sum()), is_mean, is_weighted))


_NORMS = {
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._batch_norm_with_update.default,
}
_NORM_BACKWARDS = {aten.native_batch_norm_backward.default, aten.batch_norm_backward.default}
_LOSSES = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in FLOATS else value


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by their names in the schema of an op."""
    return {**dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)), **kwargs}


def _statistics(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Mean and variance that batch normalisation takes as given."""
    x: Tensor = given["input"]
    mean, variance = given.get("running_mean"), given.get("running_var")
    if mean is None or variance is None:
        return x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    return mean, variance


def _drawn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a random op returns here: the same for a sample wherever it stands in its batch."""
    if func is aten.native_dropout.default:
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    if func is aten.rrelu_with_noise.default:
        args[1].fill_(1.0)
        return func(*args[:4], False)
    drawn = func(*args, **kwargs)
    if not isinstance(drawn, Tensor):  # fused attention, whose dropout comes apart before where there is any
        return drawn
    if func in _PERMUTATIONS:
        return drawn.copy_(torch.arange(len(drawn) - 1, -1, -1, dtype=drawn.dtype, device=drawn.device))
    if drawn.is_floating_point() or drawn.is_complex():
        return drawn.fill_(DRAWN)
    given = _named(func, args, kwargs)
    return drawn.fill_(True if drawn.dtype is torch.bool else given.get("low", given.get("from", 0)))


_PERMUTATIONS: set[Callable[..., Any]] = {aten.randperm.default, aten.randperm.generator}


@dataclass(frozen=True)
class Stepped:
    """A loss and the gradients of all trainable parameters, in their order; what a step computes."""

    loss: Tensor
    gradients: tuple[Tensor, ...]

    @property
    def is_finite(self) -> bool:
        """Whether there is neither NaN nor infinity in it."""
        return all(bool(torch.isfinite(value).all()) for value in (self.loss, *self.gradients))


class Trial:
    """A copy of `model`, its inputs and its loss; what runs here leaves the user's own as they are.

    Args:
        model: copied, to the CPU.
        call: (args, kwargs) of the model.
        loss_fn: copied where it is a module or bound to one; None for inference.
        targets: what the loss takes besides the model's output.
        is_double: whether floats become float64; else they keep their precision.
        deadline: in the time of `time.monotonic`; an op after it raises `TimeUp`.

    Attributes:
        model: the copy.
        tensors: copies of the tensors among the inputs, then the targets.
        num_inputs: how many of them are inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Any,
        loss_fn: LossFn | None,
        targets: Sequence[Tensor],
        *,
        is_double: bool,
        deadline: float,
    ) -> None:
        self.is_double, self._deadline = is_double, deadline
        own = {id(value): value for value in _tensors_of([model, *owner_of(loss_fn)])}
        memo: dict[int, Any] = {key: self._copied(value) for key, value in own.items()}
        with torch.no_grad():
            self.model, self._loss_fn = copy.deepcopy((model, loss_fn), memo)
        given, self._filled = with_tensors(call)
        self.num_inputs = len(given)
        self.tensors = [self._copied(tensor) for tensor in (*given, *targets)]
        # once each: a loss may be a method of the model
        modules = {each: None for owner in (self.model, *owner_of(self._loss_fn)) for each in owner.modules()}
        self._buffers = [
            (module._buffers, name, buffer)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._state = PythonState((("", module) for module in modules), has_hooks=False)

    @contextmanager
    def rehearsal(self) -> Iterator[Pinned]:
        """While active, ops are pinned, without autocast, in float64 by default; random states stay as they are."""
        python, numpy, default = random.getstate(), np.random.get_state(), torch.get_default_dtype()
        plain = torch.autocast("cpu", enabled=False)
        with torch.random.fork_rng(devices=[]), plain, uncompiled(), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a model that sees one sample
            try:
                torch.set_default_dtype(torch.float64 if self.is_double else default)
                with Pinned(is_double=self.is_double, deadline=self._deadline) as pinned:
                    yield pinned
            finally:
                torch.set_default_dtype(default)
                random.setstate(python)
                np.random.set_state(numpy)

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
        for (
            buffers,
            name,
            first,
        ) in self._buffers:  # a gradient to come may need what the last became
            buffers[name] = first.detach().clone()
        args, kwargs = self._filled(tensors)
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


def _tensors_of(owners: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Parameters, buffers and other tensors that modules hold, in attributes and in collections there."""
    for owner in owners:
        for module in owner.modules():
            for value in vars(module).values():  # parameters and buffers are in dicts there
                if isinstance(value, (Tensor, list, tuple, dict)):
                    yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
