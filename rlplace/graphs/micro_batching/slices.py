"""`plan_slices`: which tensors of a step are cut into micro-batches, and along which dimension; `cut_words` says it.

`run_in_micro_batches`: plain PyTorch, slice after slice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError, InvalidValue, UnknownName, refuse_if
from rlplace.graphs.capturing.trace import LossFn
from rlplace.graphs.program import LossByName, MicroBatches, Slicing, closed, even_sizes, opened

BatchDims = Sequence[int | None] | Mapping[Any, int | None]
"""The user's words: the batch's dimension (None: shared) of every tensor, or of some by name or position."""

_WHERE = "micro-batches"
_HINT = "`batch_dims` says which dimension of every tensor is the batch, None where all micro-batches share it."


def plan_slices(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: LossFn | None,
    targets: Sequence[torch.Tensor],
    count: int,
    batch_dims: BatchDims | None = None,
) -> Slicing:
    """How the tensors of a step are cut into `count` micro-batches, whose sizes differ by one at most.

    Without `batch_dims`, the batch is dimension 0 of the first input that has one, and of every tensor that is as long
    there; other tensors are shared by all micro-batches.

    Args:
        model: named in errors.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        loss_fn: None for inference, which has no targets.
        targets: further arguments of the loss.
        count: micro-batches, K.
        batch_dims: for every tensor among the inputs, then the targets, its dimension of the batch, or None for one
            that is shared. Or a dict of some: by the name of a parameter of `forward` (all tensors in it) or of a
            target, or by the position of a tensor; the others follow the rule above.

    Raises:
        InvalidValue: K is no number from 1 to the batch; no input has a batch, or inputs have batches of different
            size; or `batch_dims` does not fit the tensors.
        UnknownName: `batch_dims` names no keyword argument.
    """
    refuse_if(type(count) is not int or count < 1, "micro_batches", count, "an integer of at least 1", where=_WHERE)
    named = _named_tensors(args, kwargs, targets)
    names, tensors = [name for name, _ in named], [tensor for _, tensor in named]
    num_inputs = len(tensors) - len(targets)
    first = next((tensor for tensor in tensors[:num_inputs] if tensor.dim()), None)
    length = 1 if first is None else first.shape[0]
    dims = [0 if each is first or (length > 1 and each.shape[:1] == (length,)) else None for each in tensors]
    if batch_dims is not None:
        by_name = enumerate(loss_fn.names if isinstance(loss_fn, LossByName) else ())
        aliases = {name: f"target {position}" for position, name in by_name}
        aliases |= _forward_names(model, args)
        dims = _given_dims(batch_dims, names, aliases, tensors, dims)
    lengths = {name: int(tensor.shape[dim]) for (name, tensor), dim in zip(named, dims, strict=True) if dim is not None}
    if not any(dim is not None for dim in dims[:num_inputs]):
        if count == 1:
            return Slicing((None,) * len(tensors), (1,))
        raise InvalidValue(
            "inputs",
            f"{', '.join(f'{name} {tuple(tensor.shape)}' for name, tensor in named[:num_inputs]) or 'no tensor'}",
            f"one with a batch to cut into {count} for {type(model).__name__}",
            where=_WHERE,
            hint=f"Keep the batch whole (K = 1), or say where it is: {_HINT}",
        )
    batch = next(iter(lengths.values()))
    if len(set(lengths.values())) > 1:
        raise InvalidValue(
            "inputs",
            ", ".join(f"{name} of {length}" for name, length in lengths.items()),
            "tensors of the same batch",
            where=_WHERE,
            hint=_HINT,
        )
    if count > batch:
        raise InvalidValue(
            "micro_batches",
            count,
            f"at most the batch, which is {batch} ({cut_words(args, kwargs, targets, Slicing(tuple(dims), (batch,)))})",
            where=_WHERE,
            hint=f"Take fewer micro-batches or a larger batch. {_HINT}",
        )
    return Slicing(tuple(dims), even_sizes(batch, count))


def changes(name: str, slicing: Slicing) -> CaptureError:
    """The refusal of a step whose `forward` changes a tensor that all micro-batches share."""
    return CaptureError(
        f"cannot cut the step into {slicing.num_micro_batches} micro-batches: `forward` changes {name!r}, and every "
        f"micro-batch would change it again; only running statistics of batch norm may change. Capture it with "
        f"micro_batches=1."
    )


def cut_words(args: tuple[Any, ...], kwargs: dict[str, Any], targets: Sequence[torch.Tensor], slicing: Slicing) -> str:
    """Which tensors of a step are cut, along which dimension, and which all micro-batches share, with their shapes.

    Args:
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        targets: further arguments of the loss.
        slicing: how they are cut.
    """
    named = zip(_named_tensors(args, kwargs, targets), slicing.dims, strict=True)
    told = [(f"{name} {tuple(tensor.shape)}", dim) for (name, tensor), dim in named]
    cut = ", ".join(f"{what} along dimension {dim}" for what, dim in told if dim is not None)
    shared = ", ".join(what for what, dim in told if dim is None)
    return f"cut: {cut or 'none'}; shared by all: {shared or 'none'}"


def _named_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], targets: Sequence[torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    """Every tensor among the inputs, as they are flattened, then the targets: the user's name of it, and itself."""
    inputs = {f"input {position}": value for position, value in enumerate(args)}
    given = [*inputs.items(), *kwargs.items(), *((f"target {position}", each) for position, each in enumerate(targets))]
    leaves = ((name, leaf) for name, value in given for leaf in pytree.tree_leaves(value))
    return [(name, leaf) for name, leaf in leaves if isinstance(leaf, torch.Tensor)]


def _given_dims(
    given: object,
    names: Sequence[str],
    aliases: Mapping[str, str],
    tensors: Sequence[torch.Tensor],
    default: Sequence[int | None],
) -> list[int | None]:
    if isinstance(given, Mapping):
        dims = list(default)
        for key, dim in given.items():
            for position in _positions(key, names, aliases):
                dims[position] = _checked_dim(dim, names[position], tensors[position])
        return dims
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InvalidValue(
            "batch_dims", given, "a list or tuple with an entry for every tensor, or a dict of some", where=_WHERE
        )
    refuse_if(
        len(given) != len(tensors),
        "batch_dims",
        tuple(given),
        f"an entry for each of the {len(tensors)} tensors ({', '.join(names)})",
        where=_WHERE,
        hint="A number is the dimension of the batch, None a tensor that all micro-batches share.",
    )
    return [_checked_dim(*entry) for entry in zip(given, names, tensors, strict=True)]


def _forward_names(model: torch.nn.Module, args: tuple[Any, ...]) -> dict[str, str]:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # none that Python can tell
        return {}
    plain = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return {name: f"input {position}" for position, name in enumerate(plain[: len(args)])}


def _positions(key: str | int, names: Sequence[str], aliases: Mapping[str, str]) -> list[int]:
    """The tensors that an entry of a dict is about."""
    if isinstance(key, str) and key.isdecimal():
        key = int(key)
    if type(key) is int:
        refuse_if(
            not 0 <= key < len(names),
            "batch_dims",
            key,
            f"the position of a tensor, 0 to {len(names) - 1}",
            where=_WHERE,
        )
        return [key]
    wanted = aliases.get(str(key), key)
    found = [position for position, name in enumerate(names) if name == wanted]
    if not found:
        raise UnknownName("tensor in batch_dims", str(key), (*names, *aliases))
    return found


def _checked_dim(dim: object, name: str, tensor: torch.Tensor) -> int | None:
    if dim is None:
        return None
    dims = tensor.dim()
    if type(dim) is not int or not -dims <= dim < dims:
        raise InvalidValue(
            f"batch_dims of {name}",
            dim,
            f"a dimension from 0 to {dims - 1} of its shape {tuple(tensor.shape)}, or None" if dims else "None",
            where=_WHERE,
        )
    return dim % dims


def run_in_micro_batches(
    model: Callable[..., Any],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    loss_fn: Callable[..., torch.Tensor] | None,
    targets: tuple[torch.Tensor, ...],
    micro: MicroBatches,
    begin: Callable[[int], object] = int,
) -> Any:
    """The loss, its gradients added to those of the parameters; without a loss the joined output.

    Args:
        model: takes a slice of the inputs.
        call: (args, kwargs) of the whole batch.
        loss_fn: of the output and the targets; None for inference.
        targets: of the whole batch.
        micro: how the batch is cut.
        begin: called with each micro-batch before it runs, and with -1 before a loss of all of them.
    """
    leaves, spec = pytree.tree_flatten(call)
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    parts = [micro.slicing.cut([*inputs, *targets], index) for index in range(micro.slicing.num_micro_batches)]

    def output(index: int) -> Any:
        begin(index)
        given = iter(parts[index])
        args, kwargs = pytree.tree_unflatten(
            [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
        )
        return model(*args, **kwargs)

    if loss_fn is None:
        return _joined([output(index) for index in range(len(parts))], micro.output_dims)
    if micro.verdict.kind == "joined":
        joined = _joined([output(index) for index in range(len(parts))], micro.output_dims)
        begin(-1)
        whole = loss_fn(joined, *targets)
        whole.backward()  # type: ignore[no-untyped-call]
        return whole.detach()
    total: torch.Tensor | None = None
    for index, weight in enumerate(micro.weights):
        loss = loss_fn(output(index), *parts[index][len(inputs) :]) * weight
        loss.backward()  # type: ignore[no-untyped-call]
        total = loss.detach() if total is None else total + loss.detach()
    return total


def _joined(outputs: Sequence[Any], dims: Sequence[int | None]) -> Any:
    """The outputs of micro-batches as one: tensors joined where they grow with the batch, else those of the first."""
    others = [pytree.tree_leaves(each) for each in map(opened, outputs)]
    leaves, spec = pytree.tree_flatten(opened(outputs[0]))
    places = [position for position, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for position, dim in zip(places, dims, strict=True):
        if dim is not None:
            leaves[position] = torch.cat([each[position] for each in others], dim)
    return closed(pytree.tree_unflatten(leaves, spec))
