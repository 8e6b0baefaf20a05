"""`Assembly`: the graph of K micro-batches, grown from the ops of slices and from single calls between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplace.graphs.capturing import op_work as facts
from rlplace.graphs.capturing.lowered import Lowered
from rlplace.graphs.opgraph import FORWARD, UPDATE
from rlplace.graphs.program import Call, Ref, Source, View, map_refs, refs_in

RefMap = dict[int, Ref]
"""By `Ref.id` in a slice, the `Ref` that stands for it in the assembly."""


_ZEROS = torch.ops.aten.zeros.default


class Assembly:
    """A graph in the making.

    Attributes:
        ops: what is there so far.
    """

    def __init__(self) -> None:
        self.ops = Lowered()
        self._mode = FakeTensorMode()
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of a value, which stays alive with it
        self._known: dict[str, tuple[facts.Facts, Any]] = {}  # by signature: what a call costs, and what it returns

    def add_source(
        self, source: Source, name: str, *, module: str = "", gradient_bytes: int = 0, micro_batch: int = -1
    ) -> Ref:
        """Adds a source op; what comes back is its tensor."""
        built, value = self.ops.built, source.value
        target = "input" if source.kind == "target" else source.kind  # a target of the loss is placed as an input is
        size = facts.tensor_bytes(value) if source.kind == "parameter" else 0
        op = built.add_op(
            named(name, micro_batch),
            target,
            module,
            FORWARD,
            target,
            facts.NOTHING,
            parameter_bytes=size,
            micro_batch=micro_batch,
        )
        built.gradient_bytes[op] = gradient_bytes
        self.ops.sources[op] = source
        return Ref(built.add_tensor(op, 0, self._twin(value)))

    def copy(self, part: Lowered, chosen: Iterable[int], refs: RefMap, *, micro_batch: int) -> None:
        """Copies the ops `chosen`, in order; `refs` then knows their outputs and the views that they read.

        Args:
            part: of a slice.
            chosen: ops of `part` that run.
            refs: what stands for the tensors that they read and that none of them produces.
            micro_batch: which one the copies belong to.
        """
        built, like, ops = self.ops.built, part.built, self.ops

        def here(ref: Ref) -> Ref:
            found = refs.get(ref.id)
            return found if found is not None else self._add_view(part, ref, refs, here)

        empty: dict[tuple[str, str], Ref] = {}  # by module and signature
        for op in chosen:
            call = part.calls[op]
            assert isinstance(call, Call)
            if call.target is _ZEROS:  # mean and variance of a batch norm begin with one and the same
                key = like.modules[op], like.signatures[op]
                if key in empty:
                    refs[call.outputs[0]] = empty[key]
                    continue
            args, kwargs = map_refs(here, call.args), map_refs(here, call.kwargs)
            reads = tuple(sorted({ops.base(refs[tensor]) for tensor in like.reads[op]}))
            new = len(built.names)
            built.names.append(named(like.names[op], micro_batch))
            built.targets.append(like.targets[op])
            built.modules.append(like.modules[op])
            built.phases.append(like.phases[op])
            built.signatures.append(like.signatures[op])
            built.facts.append(like.facts[op])
            built.reads.append(reads)
            built.parameter_bytes.append(0)
            built.gradient_bytes.append(0)
            built.state_bytes.append(0)
            built.micro_batches.append(micro_batch)
            tensor = len(built.tensor_op)
            outputs = []
            for output in part.tensors_of(op):
                built.tensor_op.append(new)
                built.tensor_output.append(like.tensor_output[output])
                built.tensor_values.append(like.tensor_values[output])
                refs[output] = Ref(tensor)
                tensor += 1
            for output in call.outputs:
                outputs.append(-1 if output < 0 else refs[output].id)
            if op in part.seeds:
                ops.seeds.add(new)
            ops.calls[new] = Call(
                call.target, args, kwargs, tuple(outputs), call.returns_tuple, call.is_random, call.takes_device
            )
            if call.target is _ZEROS:
                empty[like.modules[op], like.signatures[op]] = refs[call.outputs[0]]

    def here(self, part: Lowered, ref: Ref, refs: RefMap) -> Ref:
        """What stands for `ref` of `part`; views that nobody read so far are made."""

        def own(other: Ref) -> Ref:
            return self.here(part, other, refs)

        return refs[ref.id] if ref.id in refs else self._add_view(part, ref, refs, own)

    def _add_view(self, part: Lowered, ref: Ref, refs: RefMap, here: Callable[[Ref], Ref]) -> Ref:
        ops, view = self.ops, part.views[-1 - ref.id]
        args, kwargs = map_refs(here, view.args), map_refs(here, view.kwargs)
        ops.views.append(View(ops.base(refs[view.base]), view.target, args, kwargs))
        ops.view_values.append(part.view_values[-1 - ref.id])
        refs[ref.id] = new = Ref(-len(ops.views))
        return new

    def call(
        self,
        target: torch._ops.OpOverload,
        *args: Any,
        name: str,
        module: str = "",
        phase: int,
        micro_batch: int = -1,
        **kwargs: Any,
    ) -> Ref:
        """Adds one call that returns one tensor, which comes back; its arguments may hold `Ref`s, `kwargs` none."""
        values = map_refs(self._value, args)
        signature = facts.signature(str(target), values, kwargs)
        if signature not in self._known:
            with self._mode, torch.no_grad():
                output = target(*values, **kwargs)
            self._known[signature] = facts.call_facts(target, values, kwargs, output), output
        known, output = self._known[signature]
        reads = tuple(self.ops.base(ref) for ref in refs_in(args))
        op = self.ops.built.add_op(
            named(name, micro_batch), str(target), module, phase, signature, known, reads, micro_batch=micro_batch
        )
        tensor = self.ops.built.add_tensor(op, 0, output)
        self.ops.calls[op] = Call(target, args, kwargs, (tensor,), returns_tuple=False)
        return Ref(tensor)

    def _value(self, ref: Ref) -> torch.Tensor:
        """What `ref` stands for, as a fake tensor of the assembly's own mode."""
        return self._twin(self.ops.value(ref))

    def _twin(self, value: torch.Tensor) -> torch.Tensor:
        if id(value) not in self._twins:
            with self._mode:
                twin = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
            self._twins[id(value)] = value, twin
        return self._twins[id(value)][1]

    def view(self, target: torch._ops.OpOverload, shown: Ref, *args: Any) -> Ref:
        """A view of `shown`, which costs nothing."""
        with self._mode:
            value = target(self._value(shown), *args)
        self.ops.views.append(View(self.ops.base(shown), target, (shown, *args), {}))
        self.ops.view_values.append(value)
        return Ref(-len(self.ops.views))

    def store(self, place: Ref, value: Ref, *, name: str, together: Iterable[int]) -> None:
        """Adds the copy of `value` into the source tensor `place`; it lives there, and the ops `together` with it."""
        built, ops, target = self.ops.built, self.ops, torch.ops.aten.copy_.default
        values = self._value(place), self._value(value)
        home = built.tensor_op[place.id]
        op = built.add_op(
            name,
            str(target),
            built.modules[home],
            UPDATE,
            facts.signature(str(target), values, {}),
            facts.call_facts(target, values, {}, values[0]),
            (place.id, ops.base(value)),
        )
        ops.calls[op] = Call(target, (place, value), {}, (), returns_tuple=False)
        built.mutations.append((op, place.id))
        built.colocated.append((op, home, *together))


def named(name: str, micro_batch: int) -> str:
    """The name of a micro-batch's copy of an op."""
    return name if micro_batch < 0 else f"{name}.mb{micro_batch}"
