"""Parameters of a model whose shards are apart: on devices of this process, or on several ranks.

`Stored`: one tensor of a model or its optimizer, to be read and overwritten as a whole wherever its parts are.

`SplitParameter`: a parameter all of whose shards are here, as the whole parameter that users see. Steps read and update
the shards. The whole one, under the name that it has in the model, has memory from when it is asked for. From then on,
what is done to it holds for the next step, and it shows what steps did.

`PartTensor`: shards of one rank under the name of the parameter, for `torch.distributed.checkpoint`: it writes each
where it is in the whole tensor, and reads it from there, whatever others have of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlplace.errors import InvalidValue
from rlplace.graphs.optimizers import UpdateState
from rlplace.graphs.program import Shard
from rlplace.measure.execute.shared_heap import Layout

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

Parts = list[tuple[Shard, torch.Tensor]]


@dataclass(frozen=True, eq=False)
class Stored:
    """A parameter, a buffer, or a tensor of the state of an update.

    Attributes:
        parts: the memory that steps use: the tensor, or that of each shard that is here.
        layout: of the whole; None where parts are no shards, but alike: one tensor, or counts of steps.
        shards: which parts of the whole they are.
        whole: what users see, and may have changed since; None where it is not shown, so that the parts are all.
    """

    parts: Sequence[torch.Tensor]
    layout: Layout | None = None
    shards: Sequence[Shard] = ()
    whole: torch.Tensor | None = None

    @property
    def kind(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """Its dtype and shape."""
        dtype, shape, _ = Layout.of(self.parts[0]) if self.layout is None else self.layout
        return dtype, shape

    def copy(self, device: torch.device | str | None = None) -> torch.Tensor:
        """A copy; by default on the device of the first part."""
        device = device or self.parts[0].device
        if self.layout is None:
            return self._alike.detach().to(device, copy=True)
        dtype, shape, stride = self.layout
        return self.read_into(torch.empty_strided(shape, stride, dtype=dtype, device=device))

    @torch.no_grad()
    def read_into(self, whole: torch.Tensor) -> torch.Tensor:
        """Overwrites a tensor of its shape, of which shards that are not here stay; returns it."""
        if self.whole is not None or self.layout is None:
            return whole.copy_(self._alike)
        for shard, part in zip(self.shards, self.parts, strict=True):
            shard.copy(whole, part, is_joined=True)
        return whole

    @torch.no_grad()
    def write(self, value: torch.Tensor) -> None:
        """Overwrites it by a tensor of its shape."""
        if self.whole is not None:
            self.whole.copy_(value)
        elif self.shards:
            for shard, part in zip(self.shards, self.parts, strict=True):
                shard.copy(value, part)
        else:
            for part in self.parts:
                part.copy_(value)

    def cut(self) -> None:
        """The parts are as what users see."""
        if self.whole is not None:
            replace(self, whole=None).write(self.whole)

    def join(self) -> None:
        """What users see is as the parts are."""
        if self.whole is not None:
            replace(self, whole=None).read_into(self.whole)

    @property
    def _alike(self) -> torch.Tensor:
        return self.parts[0] if self.whole is None else self.whole


class SplitParameter:
    """A parameter of this process whose shards are all here.

    Args:
        own: the model's.
        shards: which parts of the parameter they are, in order.
        parts: the tensor of each, where its device reads and updates it.
        states: of their updates; empty where the captured step has none.

    Attributes:
        layout: of the whole one.
        parameter: the whole one; without elements until `show`.
        state: of its update; None until it is shown.
        is_shown: whether the whole one has its values.
    """

    def __init__(
        self,
        own: nn.Parameter,
        shards: Sequence[Shard],
        parts: Sequence[torch.Tensor],
        states: Sequence[UpdateState],
    ) -> None:
        self.shards, self.states, self._parts = shards, states, parts
        self.layout = Layout.of_copy(own.detach())
        self.parameter = nn.Parameter(parts[0].detach().narrow(0, 0, 0), requires_grad=own.requires_grad)
        self.state: UpdateState | None = None
        self.is_shown = False

    @property
    def value(self) -> Stored:
        """The parameter itself."""
        return self.stored(self._parts, self.parameter.detach() if self.is_shown else None)

    @property
    def moments(self) -> list[Stored]:
        """The tensors of the state of its update, as `UpdateState` lists them."""
        parts = list(zip(*(own.tensors for own in self.states), strict=True))
        wholes: Sequence[torch.Tensor | None] = [None] * len(parts) if self.state is None else self.state.tensors
        return [self.stored(each, whole) for each, whole in zip(parts, wholes, strict=True)]

    def stored(self, parts: Sequence[torch.Tensor], whole: torch.Tensor | None = None) -> Stored:
        """One tensor of those of the shards: the parameter, its gradient, or one of its state."""
        return Stored(parts, self.layout, self.shards, whole) if parts[0].dim() else Stored(parts, whole=whole)

    def show(self, *, has_state: bool = False) -> None:
        """Gives the whole parameter memory and its values, with `has_state` the state of its update, too."""
        if not self.is_shown:
            self.parameter.data, self.is_shown = self.value.copy(), True
        if has_state and self.states and self.state is None:
            self.state = UpdateState(self.states[0].spec, self.parameter)
            for each in self.moments:
                each.join()

    def cut(self, *, has_state: bool) -> None:
        """The shards are as the whole parameter is, where it is shown; with `has_state`, those of the state, too."""
        for each in (self.value, *(self.moments if has_state else ())) if self.is_shown else ():
            each.cut()

    def join(self) -> None:
        """What is shown is as the shards are."""
        for each in (self.value, *self.moments) if self.is_shown else ():
            each.join()


def other_shards(name: str) -> InvalidValue:
    """The error where a graph of the same model needs other shards than those that are there."""
    return InvalidValue(
        f"shards of {name}",
        "other ones for inputs of these shapes",
        "those of the first capture",
        where="placed step",
        hint="Capture a step of its own for these, or take a split whose classes are found for all of your inputs "
        "(`vocabulary` may not be, without the loss).",
    )


class PartTensor(torch.Tensor):
    """Shards of one tensor that this process has.

    It shows the memory of the first of them. Made by `part_tensor`.
    """

    parts: Parts
    whole_shape: torch.Size

    def chunks(self) -> Iterator[tuple[torch.Size, torch.Tensor]]:
        """Where each run of indices begins in the whole tensor, and its values."""
        for shard, part in self.parts:
            at = 0
            for start, end in shard.intervals:
                offsets = [0] * part.dim()
                offsets[shard.dim] = start
                yield torch.Size(offsets), part.narrow(shard.dim, at, end - start)
                at += end - start

    def size(self, dim: int | None = None) -> Any:
        """Of the whole tensor, which checkpoints compare with what they have."""
        return self.whole_shape if dim is None else self.whole_shape[dim]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offsets, chunk.shape) for offsets, chunk in self.chunks()]

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.whole_shape
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(chunk for offsets, chunk in self.chunks() if offsets == index.offset)


def part_tensor(parts: Parts, whole_shape: Sequence[int]) -> PartTensor:
    """The shards of a tensor of some shape, which share the memory of `parts`."""
    plain = [(shard, part.detach()) for shard, part in parts]
    made = torch.Tensor._make_subclass(PartTensor, plain[0][1])
    made.parts, made.whole_shape = plain, torch.Size(whole_shape)
    return made
