"""`mixing_ops`: the ops of a forward that give a sample something else when it stands in another batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlplace.graphs.capturing.micro.pinned import Pinned, TimeUp
from rlplace.graphs.capturing.micro.trial import Trial, rehearsal
from rlplace.graphs.slicing import Slicing

aten = torch.ops.aten

MOST_NAMED = 3


@dataclass(frozen=True)
class MixingOp:
    """An op that mixes samples.

    Attributes:
        target: the ATen op.
        module: dotted path and class of the module that called it.
    """

    target: str
    module: str

    def __str__(self) -> str:
        return f"{self.target} in {self.module}"


def mixing_ops(
    trial: Trial, tensors: Sequence[Tensor], slicing: Slicing, deadline: float, *, with_loss: bool
) -> list[MixingOp]:
    """The first ops whose result for a slice is no slice of their result for the batch, though their arguments are.

    Args:
        trial: the step.
        tensors: its inputs and targets.
        slicing: how they are cut.
        deadline: in the time of `time.monotonic`; what was not found by then is not.
        with_loss: whether to look at the loss too, not at the model alone.
    """
    size = max(1, slicing.batch // 2)  # code often differs for one sample
    halves = Slicing(slicing.dims, (slicing.batch - size, size))
    watch = _Watch(trial, slicing.batch, slicing.batch - size, size)

    def run(given: Sequence[Tensor]) -> None:
        pinned = Pinned(is_double=trial.is_double, deadline=deadline)
        with rehearsal(pinned, is_double=trial.is_double), torch.no_grad(), watch.calls(), watch:
            output = trial.output(given)
            if with_loss:
                trial.loss(output, given)

    run(halves.cut(tensors, 1))
    watch.is_whole = True
    with suppress(TimeUp, _Enough):
        run(tensors)
    return watch.found


_UNFILLED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
"""What they return is whatever lay there."""


class _Enough(Exception):
    """As many ops are found as anybody wants to read."""


class _Watch(TorchDispatchMode):
    """Keeps what every op returns for a slice, then compares it with what it returns for the whole batch."""

    def __init__(self, trial: Trial, batch: int, start: int, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_whole = False
        self.found: list[MixingOp] = []
        self._trial, self._cut = trial, (batch, start, size)
        self._of_slice: dict[tuple[str, int], tuple[Any, list[Tensor]]] = {}
        self._counts: Counter[str] = Counter()
        self._mixed: dict[int, Tensor] = {}
        self._running: list[str] = []

    @contextmanager
    def calls(self) -> Iterator[None]:
        """While active, the watch knows which module runs."""
        handles = []
        for path, module in self._trial.model.named_modules():
            name = f"{path or 'the root'} ({type(module).__name__})"
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name)))
            handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._running.clear()
            self._counts.clear()

    def _leave(self) -> None:
        if self._running:
            self._running.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _UNFILLED:
            return result
        outputs = [value for value in _flat((result,)) if value.is_floating_point()]
        module = self._running[-1] if self._running else "the loss"
        place = (module, self._counts[module])
        self._counts[module] += 1
        if not self.is_whole:
            self._of_slice[place] = func, [value.detach().clone() for value in outputs]
        elif place in self._of_slice and self._of_slice[place][0] is func:  # else a slice took another path there
            inputs = _flat((*args, *(kwargs or {}).values()))
            self._compare(MixingOp(str(func), module), inputs, outputs, self._of_slice[place][1])
        return result

    def _compare(self, op: MixingOp, inputs: list[Tensor], outputs: list[Tensor], expected: list[Tensor]) -> None:
        is_mixed = any(id(value) in self._mixed for value in inputs)
        is_same = all(_is_slice(part, whole, *self._cut) for part, whole in zip(expected, outputs, strict=False))
        if is_same or not inputs:  # what a step makes of nothing (positions, zeros) is no sample
            return
        self._mixed.update({id(value): value for value in outputs})
        if not is_mixed and op not in self.found:
            self.found.append(op)
            if len(self.found) == MOST_NAMED:
                raise _Enough


def _flat(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _flat(value)
    return found


def _is_slice(part: Tensor, whole: Tensor, batch: int, start: int, size: int) -> bool:
    """Whether `part` is what belongs to `size` of `batch` samples in `whole`, whichever dimension counts them.

    A dimension may hold the samples among others, before or behind them, as in (B * tokens) or (heads * B).
    """
    if part.dim() != whole.dim():
        return False
    scaled = [dim for dim in range(part.dim()) if part.shape[dim] != whole.shape[dim]]
    if not scaled:
        return _is_close(part, whole)
    dim = scaled[0]
    others, left = divmod(whole.shape[dim], batch)
    if len(scaled) > 1 or left or part.shape[dim] != others * size:
        return False
    for before in range(1, others + 1):
        if others % before == 0:
            split = whole.reshape(*whole.shape[:dim], before, batch, others // before, *whole.shape[dim + 1 :])
            if _is_close(part, split.narrow(dim + 1, start, size).reshape(part.shape)):
                return True
    return False


def _is_close(one: Tensor, other: Tensor) -> bool:
    rtol = 1e-6 if one.dtype is torch.float64 else 1e-3
    return bool(torch.isclose(one, other, rtol=rtol, atol=rtol * 1e-3, equal_nan=True).all())
