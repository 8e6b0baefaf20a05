"""`GradientsOut`: a step that leaves gradients to whoever asks, in the place of updating parameters by them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from rlplace.graphs.optimizers import Updater


class GradientsOut:
    """Where the gradients of a step go: to tensors, while `into` is active; else to updates, or nowhere.

    One is bound to the code of every step that shares its parameters.
    """

    def __init__(self) -> None:
        self._into: Mapping[str, torch.Tensor] | None = None
        self._fresh: Collection[str] = ()
        self._loss_scale = 1.0

    @contextlib.contextmanager
    def into(
        self, tensors: Mapping[str, torch.Tensor], fresh: Collection[str], *, loss_scale: float = 1.0
    ) -> Iterator[None]:
        """While active, gradients are added to tensors, and no parameter is updated.

        Args:
            tensors: by dotted name of their parameters; gradients of others are dropped.
            fresh: names of those that hold nothing yet: they are overwritten.
            loss_scale: the gradients are those of the loss times this.
        """
        self._into, self._fresh, self._loss_scale = tensors, fresh, loss_scale
        try:
            yield
        finally:
            self._into, self._fresh, self._loss_scale = None, (), 1.0

    def taker(self, names: Sequence[str]) -> Updater:
        """Takes the gradients of parameters `names`: drops them if nobody asked."""

        def take(*gradients: torch.Tensor) -> None:
            if self._into is not None:
                self._take(self._into, names, gradients)

        return take

    def instead_of(self, update: Updater, names: Sequence[str]) -> Updater:
        """`update` of parameters `names`, which leaves them as they are while gradients are asked for."""

        def update_or_take(*gradients: torch.Tensor) -> None:
            if self._into is None:
                update(*gradients)
            else:
                self._take(self._into, names, gradients)

        return update_or_take

    def scaled(self, seed: Callable[..., Any]) -> Callable[..., Any]:
        """What makes the gradient of the loss, times the scale of the loss."""

        def scaled_seed(*args: Any, **kwargs: Any) -> Any:
            made = seed(*args, **kwargs)
            return made if self._loss_scale == 1.0 else made.mul_(self._loss_scale)

        return scaled_seed

    def _take(self, into: Mapping[str, torch.Tensor], names: Sequence[str], gradients: Sequence[torch.Tensor]) -> None:
        for name, gradient in zip(names, gradients, strict=True):
            if name in self._fresh:
                into[name].copy_(gradient)
            elif name in into:
                into[name].add_(gradient)
