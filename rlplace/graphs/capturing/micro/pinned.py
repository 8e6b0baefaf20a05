"""`Pinned`: while active, a step is a function of its samples alone: float64, nothing random, fixed statistics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
    """What one loss of negative log-likelihood read.

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
        is_double: whether everything is to be float64.
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
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


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
    least = given.get("low", given.get("from", 0))
    return drawn.fill_(True if drawn.dtype is torch.bool else least)


_PERMUTATIONS: set[Callable[..., Any]] = {aten.randperm.default, aten.randperm.generator}
