"""`SplitParameter`: a parameter whose shards are apart, as the whole parameter that users see.

Steps read and update the shards. The whole one, under the name that it has in the model, has memory from when it is
asked for. From then on, what is done to it holds for the next step, and it shows what steps did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rlplace.errors import InvalidValue
from rlplace.graphs.optimizers import UpdateState
from rlplace.graphs.program import Program, Shard
from rlplace.measure.execute.residents import Residents
from rlplace.measure.execute.shared_heap import Layout


@dataclass(eq=False, repr=False)
class SplitParameter:
    """One of them.

    Attributes:
        shards: which parts of the parameter they are.
        parts: the tensor of each, where its device reads and updates it.
        states: of its updates; empty where the captured step has none.
        whole: the parameter; without elements until `show`.
        state: of the whole one; None until it is shown.
        layout: of the whole one.
        device: that it is on.
    """

    shards: tuple[Shard, ...]
    parts: tuple[torch.Tensor, ...]
    states: tuple[UpdateState, ...]
    whole: nn.Parameter
    state: UpdateState | None = None

    def __post_init__(self) -> None:
        data = self.whole.data
        self.layout, self.device = Layout.of(data), data.device
        self._is_shown = True
        self.hide(has_state=True)

    def new(self) -> torch.Tensor:
        """A tensor with any values that is laid out as the whole parameter."""
        dtype, shape, stride = self.layout
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    @property
    def is_shown(self) -> bool:
        """Whether the whole parameter has its values."""
        return self._is_shown

    def show(self, *, has_state: bool = False) -> None:
        """Gives the whole parameter memory and its values, with `has_state` the state of its updates, too."""
        if not self.is_shown:
            self.whole.data, self._is_shown = self.join_into(self.new(), self.parts), True
        if has_state and self.states and self.state is None:
            self.state = UpdateState(self.states[0].spec, self.whole)
            self._join_state()

    def hide(self, *, is_shown: bool = False, has_state: bool = False) -> None:
        """Gives the memory back, unless `is_shown`; that of the state only with `has_state`."""
        if not is_shown:
            self.whole.data, self._is_shown = self.whole.data.new_empty(0), False
        if has_state:
            self.state = None

    def cut(self, *, has_state: bool) -> None:
        """The shards are as the whole parameter is, where it is shown; with `has_state`, those of the state, too."""
        if self.is_shown:
            for shard, part in zip(self.shards, self.parts, strict=True):
                shard.copy(self.whole.detach(), part)
        if has_state and self.state is not None:
            for shard, own in zip(self.shards, self.states, strict=True):
                for whole, part in zip(self.state.moments, own.moments, strict=True):
                    shard.copy(whole, part)
                if own.step is not None and self.state.step is not None:
                    own.step.copy_(self.state.step)

    def join(self) -> None:
        """What is shown is as the shards are."""
        if self.is_shown:
            self.join_into(self.whole, self.parts)
        if self.state is not None:
            self._join_state()

    def join_into(self, whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Writes tensors of the shards into one of the shape of the parameter, and returns it."""
        with torch.no_grad():
            for shard, part in zip(self.shards, parts, strict=True):
                shard.copy(whole.detach(), part, is_joined=True)
        return whole

    def _join_state(self) -> None:
        assert self.state is not None
        for index, whole in enumerate(self.state.moments):
            self.join_into(whole, [own.moments[index] for own in self.states])
        if self.state.step is not None and self.states[0].step is not None:
            self.state.step.copy_(self.states[0].step)


def split_parameters(
    program: Program,
    devices: Sequence[int],
    residents: Residents,
    tensors: Mapping[str, torch.Tensor],
    updates: Mapping[str, UpdateState],
) -> dict[str, SplitParameter]:
    """The parameters of a program that are split, by dotted name: those whose shards are all here.

    Args:
        program: of the graph.
        devices: of its ops.
        residents: of the graph.
        tensors: of the shards that this process has, by their names.
        updates: of all that are updated, likewise.
    """
    found: dict[str, list[tuple[int, Shard]]] = {}
    for op, source in program.sources.items():
        if source.shard is not None:
            found.setdefault(source.shard.name, []).append((devices[op], source.shard))
    parameters = dict(program.origin.model.named_parameters()) if found else {}
    made = {}
    for name, each in found.items():
        if any(shard.key not in tensors for _, shard in each):
            continue  # other ranks have some of them
        each.sort(key=lambda placed: placed[1].index)
        shards = tuple(shard for _, shard in each)
        own = parameters[name]
        with residents.settled():
            like = torch.empty_like(own.detach(), device=residents.place(each[0][0]))
            made[name] = SplitParameter(
                shards,
                tuple(tensors[shard.key] for shard in shards),
                tuple(updates[shard.key] for shard in shards if shard.key in updates),
                nn.Parameter(like, requires_grad=own.requires_grad),
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
