"""`build`: from a workload that was named to a model, its inputs and its loss, with memory or without.

`join`: several models on one host as one workload.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlplace.errors import InvalidValue
from rlplace.workloads.catalog import CATALOG
from rlplace.workloads.spec import WorkloadSpec, parse_workload
from rlplace.workloads.workload import BatchDims, Loss, Parts, Size, Workload


def build(spec: WorkloadSpec | str, *, default_size: Size = "small", seed: int = 0) -> Workload:
    """The workload's model, inputs, loss and optimizer; the same seed gives the same weights and inputs.

    The global random state is left as it was. Inside of `without_memory()` nothing is allocated.

    Args:
        spec: from `parse_workload`, or the text itself.
        default_size: the size of a spec that names none.
        seed: of torch's generators while the model and its inputs are made.

    Raises:
        UnknownName: no such size, module or function.
        InvalidValue: the options cannot be had together; or the user's function could not be imported, raised, or
            returned something else than `(model, inputs[, loss_fn[, optimizer[, targets]]])`; or the workload is a
            graph file.
        MissingExtra: the model comes from a package that is not installed.
    """
    if isinstance(spec, str):
        spec = parse_workload(spec)
    if spec.is_file:
        raise InvalidValue(
            "workload",
            str(spec),
            "a name or package.module:function",
            hint="A graph file alone can be simulated, not measured; capture the graph again from its model.",
        )
    with _seeded(seed):
        if spec.is_function:
            from rlplace.workloads.user_function import load

            return load(spec.name)
        if spec.is_multi:
            built = [(part, CATALOG[part.spec.name].build(part.spec.config(default_size))) for part in spec.parts]
            parts = join([(part.spec.name, part.weight, made) for part, made in built])
        else:
            parts = CATALOG[spec.name].build(spec.config(default_size))
    return Workload(
        str(spec),
        parts.model,
        parts.inputs,
        parts.loss_fn,
        "adam",
        batch_dims=parts.batch_dims,
        loss=parts.loss,
    )


@contextmanager
def without_memory() -> Iterator[None]:
    """While active, what is built has shapes but no memory behind it, copies included.

    `copy.deepcopy` of a fake tensor copies its mode too, and tensors of two modes cannot meet in one op: so layers that
    are copies (`nn.TransformerEncoder` makes its own that way) keep the one mode here.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Mode(FakeTensorMode):  # type: ignore[no-untyped-call]
        def __deepcopy__(self, memo: dict[int, Any]) -> Mode:
            return self

    with warnings.catch_warnings(), Mode():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)  # `deepcopy` does
        yield


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    import torch

    from rlplace import cuda

    # `torch.manual_seed` would queue a reseed of GPUs that are not in use yet, and outlive the fork.
    devices = list(range(cuda.num_gpus())) if cuda.is_started() else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            cuda.seed_all(seed)
        yield


class Multi(nn.Module):
    """Models side by side, each a child under its own name; the output is every model's own, by that name."""

    def __init__(self, models: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(name, model)

    def forward(self, **inputs: Tensor) -> dict[str, Any]:
        """Outputs by model; `inputs` are `NAME.0`, `NAME.1`, ... or `NAME.key` of every model."""
        outputs = {}
        for name, model in self.named_children():
            own = {key.removeprefix(f"{name}."): x for key, x in inputs.items() if key.startswith(f"{name}.")}
            args = [own.pop(str(index)) for index in range(len(own)) if str(index) in own]
            outputs[name] = model(*args, **own)
        return outputs


def join(members: Sequence[tuple[str, float, Parts]]) -> Parts:
    """One model of all members, whose loss is the sum of theirs.

    Args:
        members: for each its name (a second `gpt2` becomes `gpt2_2`), the weight of its loss, and what it was built to.
    """
    models: dict[str, nn.Module] = {}
    inputs: dict[str, Tensor] = {}
    losses: dict[str, tuple[float, Any]] = {}
    for position, (plain, weight, parts) in enumerate(members):
        count = 1 + sum(other == plain for other, _, _ in members[:position])
        name = plain if count == 1 else f"{plain}_{count}"
        models[name] = parts.model
        losses[name] = (weight, parts.loss_fn)
        named = parts.inputs.items() if isinstance(parts.inputs, dict) else enumerate(parts.inputs)
        inputs |= {f"{name}.{key}": tensor for key, tensor in named}

    def loss_fn(outputs: dict[str, Any]) -> Tensor:
        return torch.stack([weight * loss(outputs[name]) for name, (weight, loss) in losses.items()]).sum()

    every = [parts for _, _, parts in members]
    dims = tuple(dim for parts in every for dim in _batch_dims(parts))
    return Parts(Multi(models), inputs, loss_fn, dims, _loss([parts.loss for parts in every]))


def _batch_dims(parts: Parts) -> BatchDims:
    """What is cut of one member: as it says, else dimension 0 of tensors as long there as the first."""
    if parts.batch_dims is not None:
        return parts.batch_dims
    tensors = list(parts.inputs.values() if isinstance(parts.inputs, dict) else parts.inputs)
    return tuple(0 if tensor.shape[:1] == tensors[0].shape[:1] else None for tensor in tensors)


def _loss(kinds: Sequence[Loss]) -> Loss:
    """The kind of a sum of losses: accumulated with any that is, one that all have, else to be found."""
    if "accumulated" in kinds:
        return "accumulated"
    return kinds[0] if len(set(kinds)) == 1 else "auto"
