"""Running statistics of batch norm, updated by those of every micro-batch in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from rlplace.graphs.capturing.micro.assembly import Assembly
from rlplace.graphs.opgraph import UPDATE
from rlplace.graphs.program import Ref

aten = torch.ops.aten

MOST_NORMS = 8
"""How many neighbouring norms keep their statistics together: fewer and larger tensors are sent, and few norms are far
from the stage of a pipeline that they belong to."""

Found = Sequence[tuple[str, Ref, Ref]]
"""Of one micro-batch: path of the norm, mean and unbiased variance of every call, in order."""


@dataclass(frozen=True)
class _Norms:
    """Norms that are updated together.

    Attributes:
        paths: of their modules.
        momentum: theirs; None for averages over all batches so far.
        num_calls: how often each runs in a forward.
    """

    paths: tuple[str, ...]
    momentum: float | None
    num_calls: int


def add_running_statistics(
    assembly: Assembly, model: nn.Module, buffers: Mapping[str, Ref], found: Sequence[Found]
) -> None:
    """Adds what batch norms do to their buffers: running statistics move towards those of each call, in order.

    Each micro-batch joins the statistics of neighbouring norms; what updates the buffers from them lives there.

    Args:
        assembly: takes the ops.
        model: has the norms.
        buffers: by dotted name.
        found: by micro-batch.
    """
    for norms in _together(model, buffers, assembly, found[0]):
        _Update(assembly, buffers, norms).add(found)


def _together(model: nn.Module, buffers: Mapping[str, Ref], assembly: Assembly, found: Found) -> list[_Norms]:
    calls: dict[str, int] = {}
    for path, _, _ in found:
        calls[path] = calls.get(path, 0) + 1
    groups: list[_Norms] = []
    kinds: list[object] = []
    for path, num_calls in calls.items():
        norm = model.get_submodule(path)
        assert isinstance(norm, _BatchNorm)
        kind = norm.momentum, num_calls, assembly.ops.value(buffers[_named(path, "running_mean")]).dtype
        is_like = bool(groups) and kinds[-1] == kind and norm.momentum is not None
        if is_like and len(groups[-1].paths) < MOST_NORMS:
            groups[-1] = _Norms((*groups[-1].paths, path), norm.momentum, num_calls)
        else:
            groups.append(_Norms((path,), norm.momentum, num_calls))
            kinds.append(kind)
    return groups


class _Update:
    """The update of some norms' buffers; all its ops live with them."""

    def __init__(self, assembly: Assembly, buffers: Mapping[str, Ref], norms: _Norms) -> None:
        self._assembly, self._buffers, self._norms = assembly, buffers, norms
        self._own: list[int] = []
        self._num_seen = 0

    def add(self, found: Sequence[Found]) -> None:
        places = [
            self._buffers[_named(path, name)] for name in ("running_mean", "running_var") for path in self._norms.paths
        ]
        running = self._call(aten.cat.default, places, 0)
        for index, statistics in enumerate(found):
            for values in self._flat(index, statistics):
                running = self._moved(running, values)
        start = 0
        stores = []
        for place in places:
            end = start + self._assembly.ops.value(place).shape[0]
            stores.append((place, self._assembly.view(aten.slice.Tensor, running, 0, start, end)))
            start = end
        num_batches = len(found) * self._norms.num_calls
        for path in self._norms.paths:
            count = self._count(path)
            if count is not None:
                stores.append((count, self._call(aten.add.Tensor, count, num_batches)))
        for place, value in stores:
            name = self._assembly.ops.built.names[self._assembly.ops.built.tensor_op[place.id]]
            self._assembly.store(place, value, name=f"store_{name}", together=self._own)

    def _flat(self, index: int, statistics: Found) -> list[Ref]:
        """The means and variances of all norms as one tensor, for each call in a micro-batch."""
        calls: dict[str, list[tuple[Ref, Ref]]] = {path: [] for path in self._norms.paths}
        for path, mean, variance in statistics:
            if path in calls:
                calls[path].append((mean, variance))
        return [
            self._assembly.call(
                aten.cat.default,
                [each[number][column] for column in (0, 1) for each in calls.values()],
                0,
                name="statistics",
                module=self._norms.paths[-1],
                phase=UPDATE,
                micro_batch=index,
            )
            for number in range(self._norms.num_calls)
        ]

    def _moved(self, running: Ref, values: Ref) -> Ref:
        """Running statistics after one more call: moved by the momentum; without one, to the average of all so far."""
        if self._norms.momentum is not None:
            return self._call(aten.lerp.Scalar, running, values, self._norms.momentum)
        (path,) = self._norms.paths
        count = self._count(path)
        self._num_seen += 1
        assert count is not None
        seen = self._call(aten.add.Tensor, count, self._num_seen)
        seen = self._call(aten._to_copy.default, seen, dtype=self._assembly.ops.value(running).dtype)
        return self._call(aten.lerp.Tensor, running, values, self._call(aten.reciprocal.default, seen))

    def _count(self, path: str) -> Ref | None:
        return self._buffers.get(_named(path, "num_batches_tracked"))

    def _call(self, target: torch._ops.OpOverload, *args: object, dtype: torch.dtype | None = None) -> Ref:
        options = {} if dtype is None else {"dtype": dtype}
        module = self._norms.paths[-1]
        made = self._assembly.call(target, *args, name=f"move_{module}", module=module, phase=UPDATE, **options)  # type: ignore[arg-type]
        self._own.append(self._assembly.ops.producer(made))
        return made


def _named(path: str, buffer: str) -> str:
    return f"{path}.{buffer}" if path else buffer
