"""`build`: from a workload that was named to a model, its inputs and its loss, with memory or without."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlplace.errors import InvalidValue
from rlplace.workloads.catalog import CATALOG
from rlplace.workloads.spec import WorkloadSpec, parse_workload
from rlplace.workloads.workload import Size, Workload


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
            from rlplace.workloads.multi import join

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
