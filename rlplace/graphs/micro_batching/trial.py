"""`Pinned`: while active, a step is a function of its samples alone: float64, nothing random, fixed statistics.

`Trial`: a copy of a model, computed in float64 on the CPU, to see what a step is without running the user's own.
"""

from __future__ import annotations

import copy
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
MOST_COMPARED = 4
"""Numbers in a tensor, at most, that are noted where another is compared with it: a few labels, not a batch of them."""
DRAWN = 0.5
"""What a random op of floats draws instead: neither nothing nor everything."""


class TimeUp(Exception):
    """The time of a check is over."""


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
        compared: the numbers that tensors were compared with; NaN where one was with itself, as `isnan` does.
        normalises_batch: whether batch normalisation would have used the statistics of the batch.
    """

    def __init__(self, *, is_double: bool, deadline: float = math.inf) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.labels: list[Labels] = []
        self.compared: set[float] = set()
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
        if func.overloadpacket in _COMPARISONS:
            self._note_comparison(args)
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

    def _note_comparison(self, args: tuple[Any, ...]) -> None:
        one, other = args[0], args[-1]
        if one is other:  # so, too, where there is one alone
            self.compared.add(math.nan)
        elif isinstance(other, (int, float)):
            self.compared.add(float(other))
        elif isinstance(other, Tensor) and other.numel() <= MOST_COMPARED and not other.is_complex():
            self.compared.update(other.flatten().tolist())


_COMPARISONS = {aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.isnan}
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
        given, self._filled = with_tensors(call)
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
