"""`SplitParameter`: a parameter whose shards are apart, as the whole parameter that users see.

Steps read and update the shards. The whole one, under the name that it has in the model, has memory from when it is
asked for. From then on, what is done to it holds for the next step, and it shows what steps did.

`Stored`: one tensor of a model or its optimizer, to be read and overwritten as a whole wherever its parts are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from rlplace.errors import InvalidValue
from rlplace.graphs.optimizers import UpdateState
from rlplace.graphs.program import Program, Shard
from rlplace.measure.execute.shared_heap import Layout


@dataclass(frozen=True, eq=False)
class Stored:
    """A parameter, a buffer, or a tensor of the state of an update.

    Attributes:
        parts: the memory that steps use: the tensor, or that of each shard.
        layout: of the whole; None where parts are no shards, but alike: one tensor, or counts of steps.
        shards: which parts of the whole they are.
        whole: what users see, and may have changed since; None where it is not shown, so that the parts are all.
    """

    parts: Sequence[torch.Tensor]
    layout: Layout | None = None
    shards: tuple[Shard, ...] = ()
    whole: torch.Tensor | None = None

    @property
    def kind(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """Its dtype and shape."""
        part = self.parts[0]
        return (part.dtype, tuple(part.shape)) if self.layout is None else (self.layout.dtype, self.layout.shape)

    def copy(self, device: torch.device | str | None = None) -> torch.Tensor:
        """A copy; by default on the device of the first part."""
        device = device or self.parts[0].device
        if self.layout is None:
            return self._alike.detach().to(device, copy=True)
        dtype, shape, stride = self.layout
        return self.read_into(torch.empty_strided(shape, stride, dtype=dtype, device=device))

    @torch.no_grad()
    def read_into(self, whole: torch.Tensor) -> torch.Tensor:
        """Overwrites a tensor of its shape, and returns it."""
        if self.whole is not None or not self.shards:
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


@dataclass(eq=False, repr=False)
class SplitParameter:
    """One of them.

    Attributes:
        shards: which parts of the parameter they are.
        parts: the tensor of each, where its device reads and updates it.
        states: of its updates; empty where the captured step has none.
        layout: of the whole one.
        whole: the parameter; without elements until `show`.
        state: of the whole one; None until it is shown.
        is_shown: whether the whole one has its values.
    """

    shards: tuple[Shard, ...]
    parts: tuple[torch.Tensor, ...]
    states: tuple[UpdateState, ...]
    layout: Layout
    whole: nn.Parameter
    state: UpdateState | None = None
    is_shown: bool = False

    def stored(self, parts: Sequence[torch.Tensor], whole: torch.Tensor | None = None) -> Stored:
        """One tensor of those of the shards: the parameter, its gradient, or one of its state."""
        return Stored(parts, self.layout, self.shards, whole) if parts[0].dim() else Stored(parts, whole=whole)

    def tensors(self, *, has_state: bool = True) -> list[Stored]:
        """The parameter, and with `has_state` those of the state of its updates."""
        found = [self.stored(self.parts, self.whole.detach() if self.is_shown else None)]
        if has_state and self.states:
            parts = list(zip(*(own.tensors for own in self.states), strict=True))
            wholes: Sequence[torch.Tensor | None] = [None] * len(parts) if self.state is None else self.state.tensors
            found += [self.stored(each, whole) for each, whole in zip(parts, wholes, strict=True)]
        return found

    def show(self, *, has_state: bool = False) -> None:
        """Gives the whole parameter memory and its values, with `has_state` the state of its updates, too."""
        if not self.is_shown:
            self.whole.data, self.is_shown = self.stored(self.parts).copy(), True
        if has_state and self.states and self.state is None:
            self.state = UpdateState(self.states[0].spec, self.whole)
            for each in self.tensors()[1:]:
                each.join()

    def cut(self, *, has_state: bool) -> None:
        """The shards are as the whole parameter is, where it is shown; with `has_state`, those of the state, too."""
        for each in self.tensors(has_state=has_state) if self.is_shown else ():
            each.cut()

    def join(self) -> None:
        """What is shown is as the shards are."""
        for each in self.tensors() if self.is_shown else ():
            each.join()


def split_parameters(
    program: Program, tensors: Mapping[str, torch.Tensor], updates: Mapping[str, UpdateState]
) -> dict[str, SplitParameter]:
    """The parameters of a program that are split, by dotted name: those whose shards are all here.

    Args:
        program: of the graph.
        tensors: of the shards that this process has, by their names.
        updates: of all that are updated, likewise.
    """
    found: dict[str, list[Shard]] = {}
    for source in program.sources.values():
        if source.shard is not None:
            found.setdefault(source.name, []).append(source.shard)
    parameters = dict(program.origin.model.named_parameters()) if found else {}
    made = {}
    for name, each in found.items():
        if any(shard.key not in tensors for shard in each):
            continue  # other ranks have some of them
        shards = tuple(sorted(each, key=lambda shard: shard.index))
        parts, own = tuple(tensors[shard.key] for shard in shards), parameters[name]
        made[name] = SplitParameter(
            shards,
            parts,
            tuple(updates[shard.key] for shard in shards if shard.key in updates),
            Layout.of_copy(own.detach()),
            nn.Parameter(parts[0].detach().narrow(0, 0, 0), requires_grad=own.requires_grad),
        )
    return made


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
