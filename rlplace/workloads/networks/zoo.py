"""What workloads built from `transformers` configs share: the import, random tokens, weights that are fake."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlplace.errors import MissingExtra

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE, EXTRA = "transformers", "zoo"


def transformers() -> ModuleType:
    """The package `transformers`: models come from its configs with random weights, nothing is downloaded.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module(PACKAGE)
    except ImportError:
        raise MissingExtra(PACKAGE, EXTRA) from None


def tokens(vocab: int, batch: int, length: int) -> Tensor:
    """(batch, length) int64 tokens below `vocab`."""
    import torch

    return torch.randint(vocab, (batch, length))


@contextmanager
def fake_weights_fit() -> Iterator[None]:
    """While active, fake tensors answer no to what is asked of their values.

    `nn.init.trunc_normal_` draws again until no weight lies out of range; fake weights cannot say, and never do.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
                return False
            return func(*args, **(kwargs or {}))

    with Answers():  # type: ignore[no-untyped-call]
        yield
