"""`Lowered`: ops with what they run, before they are a graph."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rlplace.graphs.capturing import op_work as facts
from rlplace.graphs.capturing.builder import GraphBuilder
from rlplace.graphs.capturing.refusals import check_apart
from rlplace.graphs.opgraph import UPDATE, OpGraph
from rlplace.graphs.optimizers import state_bytes
from rlplace.graphs.program import Call, OptimizerSpec, Origin, Program, Ref, Source, Update, View, map_refs


@dataclass
class Lowered:
    """The ops of a step and how each runs. View k is `Ref(-1 - k)`: the number of tensors is not known yet.

    Attributes:
        built: the columns of the graph.
        sources: by op, where the values of source ops come from.
        calls: by op, how the others run.
        views: in topological order.
        view_values: what each view is, as a fake tensor (or several).
        seeds: ops that make the gradient of the loss.
    """

    built: GraphBuilder = field(default_factory=GraphBuilder)
    sources: dict[int, Source] = field(default_factory=dict)
    calls: dict[int, Call | Update] = field(default_factory=dict)
    views: list[View] = field(default_factory=list)
    view_values: list[Any] = field(default_factory=list)
    seeds: set[int] = field(default_factory=set)

    def base(self, ref: Ref) -> int:
        """The tensor whose memory `ref` shows."""
        return ref.id if ref.id >= 0 else self.views[-1 - ref.id].base

    def value(self, ref: Ref) -> torch.Tensor:
        """What `ref` stands for, as a fake tensor."""
        value = self.built.tensor_values[ref.id] if ref.id >= 0 else self.view_values[-1 - ref.id]
        assert isinstance(value, torch.Tensor)
        return value

    def producer(self, ref: Ref) -> int:
        """The op whose memory `ref` shows."""
        return self.built.tensor_op[self.base(ref)]

    def tensors_of(self, op: int) -> range:
        """The tensors that an op produces."""
        producers = self.built.tensor_op
        return range(bisect_left(producers, op), bisect_right(producers, op))

    def tensor_of(self, op: int) -> int:
        """The tensor that a source op holds."""
        return self.tensors_of(op)[0]

    def add_update(
        self, name: str, parameter: Ref, gradient: Ref, optimizer: OptimizerSpec, together: tuple[int, ...]
    ) -> None:
        """Adds the update of a parameter, which lives with it and with the ops `together`."""
        value = self.value(parameter)
        op = self.built.add_op(
            f"update_{name}",
            f"update.{optimizer.name}",
            name.rpartition(".")[0],
            UPDATE,
            facts.signature(f"update.{optimizer.name}", (value, self.value(gradient)), {}),
            facts.update_facts(optimizer, value, self.value(gradient)),
            (parameter.id, self.base(gradient)),
            state=state_bytes(optimizer, value),
        )
        self.calls[op] = Update(parameter, gradient)
        self.built.mutations.append((op, parameter.id))
        self.built.colocated.append((op, self.built.tensor_op[parameter.id], *together))

    def keep_together(self, parameter: Ref, gradient: Ref) -> None:
        """Has a gradient that no update takes made where its parameter lives."""
        self.built.colocated.append((self.producer(parameter), self.producer(gradient)))

    def check_apart(self) -> None:
        """Refuses sources that share memory with one that is written.

        Raises:
            CaptureError: names both.
        """
        names, producer = self.built.names, self.built.tensor_op
        check_apart(
            {names[op]: source.value for op, source in self.sources.items()},
            {names[producer[tensor]] for _, tensor in self.built.mutations},
        )

    def graph(
        self,
        result: Any,
        results: list[Ref],
        optimizer: OptimizerSpec | None,
        origin: Origin,
        *,
        is_training: bool,
        gradients: Mapping[str, Ref],
        input_gradients: Mapping[int, Ref] | None = None,
    ) -> OpGraph:
        """All of it as a graph with its program.

        Args:
            result: what the step returns, with `Ref` leaves.
            results: those leaves.
            optimizer: of a training step.
            origin: what was captured.
            is_training: whether the step has a backward.
            gradients: of parameters, by dotted name.
            input_gradients: of inputs, by position.
        """
        num_tensors = len(self.built.tensor_op)

        def final(ref: Ref) -> Ref:
            return ref if ref.id >= 0 else Ref(num_tensors - 1 - ref.id)

        program = Program(
            sources=self.sources,
            calls={op: renumbered(call, final) for op, call in self.calls.items()},
            views=tuple(renumbered(view, final) for view in self.views),
            num_tensors=num_tensors,
            result=pytree.tree_map_only(Ref, final, result),
            optimizer=optimizer,
            is_training=is_training,
            origin=origin,
            gradients={name: final(gradient) for name, gradient in gradients.items()},
            input_gradients={position: final(gradient) for position, gradient in (input_gradients or {}).items()},
            seeds=frozenset(self.seeds),
        )
        return self.built.graph(program, sorted({self.base(ref) for ref in results}))


def renumbered(item: Any, function: Any) -> Any:
    """A `Call`, `Update` or `View` with every `Ref` replaced by `function` of it; outputs and bases stay."""
    if isinstance(item, Call):
        return Call(
            item.target,
            map_refs(function, item.args),
            map_refs(function, item.kwargs),
            item.outputs,
            item.returns_tuple,
            item.is_random,
            item.takes_device,
        )
    if isinstance(item, View):
        return View(item.base, item.target, map_refs(function, item.args), map_refs(function, item.kwargs))
    return Update(function(item.parameter), function(item.gradient))
