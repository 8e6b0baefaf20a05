"""Shards of parameters on one of several ranks: each is a parameter of its own there, `up.weight[0]`.

`RankShards`: how they come from whole parameters, and go back. `PartTensor`: shards under the name of the parameter,
for `torch.distributed.checkpoint`: it writes each where it is in the whole tensor, and reads it from there, whatever
others have of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from rlplace.errors import refuse_if
from rlplace.graphs.program import Shard

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

Parts = list[tuple[Shard, torch.Tensor]]


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


def part_tensor(parts: Parts, whole_shape: torch.Size) -> PartTensor:
    """The shards of a tensor of some shape, which share the memory of `parts`."""
    plain = [(shard, part.detach()) for shard, part in parts]
    made = torch.Tensor._make_subclass(PartTensor, plain[0][1])
    made.parts, made.whole_shape = plain, whole_shape
    return made


class RankShards:
    """The shards of a rank, of parameters that it does not have all shards of.

    Args:
        shards: by name of the shard.
        shapes: of all parameters of the model, by dotted name.
    """

    def __init__(self, shards: Mapping[str, Shard], shapes: Mapping[str, torch.Size]) -> None:
        self.shards, self.shapes = shards, shapes

    def cut(self, tensors: Mapping[str, torch.Tensor], split: Collection[str]) -> dict[str, torch.Tensor]:
        """Tensors by name, with the shards of this rank in the places of those that are split.

        Args:
            tensors: of whole parameters, or of shards by their own names.
            split: names of parameters that are split, of which this rank has not all shards.

        Raises:
            InvalidValue: a whole tensor has another shape than its parameter.
        """
        found = {name: tensor for name, tensor in tensors.items() if name not in split}
        for name in (name for name in tensors if name in split):
            shape = self.shapes[name]
            refuse_if(
                tensors[name].shape != shape,
                name,
                f"of shape {tuple(tensors[name].shape)}",
                f"{tuple(shape)}",
                where="state",
            )
            found |= {key: shard.of(tensors[name]) for key, shard in self.shards.items() if shard.name == name}
        return found

    def under_names(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """What a checkpoint has, with shards together under the name of their parameter."""
        found: dict[str, Any] = {}
        parts: dict[str, Parts] = {}
        for key, value in named.items():
            shard, name = self.renamed(key)
            if shard is not None and isinstance(value, torch.Tensor) and value.dim():
                parts.setdefault(name, []).append((shard, value))
            else:  # a count of steps, an option: alike for all shards
                found[name] = value
        return found | {name: part_tensor(each, self.shapes[each[0][0].name]) for name, each in parts.items()}

    def renamed(self, key: str) -> tuple[Shard | None, str]:
        """The shard that a key of a checkpoint is of, None without one; and the key with the name of the parameter."""
        for prefix in ("", "state.", "param_groups."):
            name, end, rest = key.removeprefix(prefix).partition("]")
            if key.startswith(prefix) and (shard := self.shards.get(name + end)) is not None:
                return shard, f"{prefix}{shard.name}{rest}"
        return None, key
