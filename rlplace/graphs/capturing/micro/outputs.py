"""Which dimension of a model's outputs grows with the batch, found by running it on fake tensors of several batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError
from rlplace.graphs.capturing.failures import explained
from rlplace.graphs.capturing.micro.norms import statistics_handed_out
from rlplace.graphs.capturing.portable import portable
from rlplace.graphs.capturing.trace import fakes
from rlplace.graphs.capturing.untouched import call_with, untouched


def fake_output(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_training: bool,
    differentiated: Sequence[int] = (),
) -> Any:
    """What `model` returns, its tensors fake; in training they require gradients as real ones would.

    Args:
        model: in the mode that it is to run in.
        args: positional arguments.
        kwargs: keyword arguments.
        is_training: whether there are gradients.
        differentiated: positions of the input tensors that require one.

    Raises:
        CaptureError: the model cannot run on fake tensors; names the op and the user's line.
    """
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    twins = fakes([*state.values(), *tensors])
    own = dict(zip(state, twins, strict=False))
    given = iter(twins[len(state) :])
    for position in differentiated:
        twins[len(state) + position].requires_grad_(True)
    fake_args, fake_kwargs = pytree.tree_unflatten(
        [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
    )
    grad_mode = torch.enable_grad() if is_training else torch.no_grad()
    with untouched(model), explained(model), statistics_handed_out(model), portable(model), grad_mode, _mode_of(twins):
        if is_training:
            for name, parameter in model.named_parameters():
                own[name].requires_grad_(parameter.requires_grad)
        return call_with(model, own, fake_args, fake_kwargs)


@contextlib.contextmanager
def _mode_of(twins: Sequence[torch.Tensor]) -> Iterator[None]:
    """While active, tensors that are made are fake as `twins` are, and real ones may join them."""
    mode = next((twin.fake_mode for twin in twins if isinstance(twin, FakeTensor)), FakeTensorMode())
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode:
            yield
    finally:
        mode.allow_non_fake_inputs = before


def tensors_in(output: Any) -> list[torch.Tensor]:
    """The tensors among the outputs of a model, in order."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def batch_dims_of(
    whole: Sequence[torch.Tensor], part: Sequence[torch.Tensor], batch: int, size: int
) -> list[int | None]:
    """For each output, the dimension that grows with the batch; None for one of the same shape for every batch.

    Args:
        whole: outputs of the whole batch.
        part: outputs of a slice.
        batch: samples of the whole batch.
        size: samples of the slice, fewer.

    Raises:
        CaptureError: an output is another for a slice than in proportion to its samples.
    """
    dims: list[int | None] = []
    for position, (one, other) in enumerate(zip(whole, part, strict=False)):
        differing = [dim for dim, (a, b) in enumerate(zip(one.shape, other.shape, strict=False)) if a != b]
        fits = len(differing) <= 1 and all(one.shape[dim] * size == other.shape[dim] * batch for dim in differing)
        if len(whole) != len(part) or one.dim() != other.dim() or not fits:
            raise CaptureError(
                f"output {position} of the model is {tuple(one.shape)} for {batch} samples and {tuple(other.shape)} "
                f"for {size}, expected one dimension that grows with the batch: the outputs of micro-batches cannot "
                f"be joined. Capture it with micro_batches=1."
            )
        dims.append(differing[0] if differing else None)
    return dims
