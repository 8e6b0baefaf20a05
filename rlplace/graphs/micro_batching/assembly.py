"""`Assembly`: the graph of K micro-batches, grown from the ops of slices and from single calls between them.

`Parts`: one capture for each size of a slice, and the source ops that the micro-batches are made from.

`Gradients`: from those of micro-batches to the updates of the parameters.

Sums of gradients over micro-batches, grown as they come.

Gradients of embedding tables: lookups of all micro-batches are gathered, and one dense gradient is made of them.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplace.errors import CaptureError
from rlplace.graphs.capturing.constants import memory
from rlplace.graphs.capturing.lower import Facts, Lowered, LoweredStep, call_facts, signature
from rlplace.graphs.capturing.trace import AsSlice, Trace, trace_once, trace_step
from rlplace.graphs.micro_batching.slices import changes, cut_words
from rlplace.graphs.opgraph import BACKWARD, LATER_HALF, UPDATE, GradientSum, OpRow, TensorRow, gradient_sums
from rlplace.graphs.program import (
    Call,
    Cut,
    OptimizerSpec,
    Origin,
    Ref,
    Source,
    SourceKind,
    View,
    map_refs,
    refs_in,
    with_tensors,
)
from rlplace.graphs.random_streams import DrawKey
from rlplace.graphs.splitting.rewrite import split_trace

RefMap = dict[int, Ref]
"""By `Ref.id` in a slice, the `Ref` that stands for it in the assembly."""


_ZEROS = torch.ops.aten.zeros.default


class Assembly:
    """A graph in the making.

    Attributes:
        ops: the columns so far.
        shared_draws: those that are the same in all micro-batches.
    """

    def __init__(self) -> None:
        self.ops = Lowered()
        self.shared_draws: set[DrawKey] = set()
        self._mode = FakeTensorMode()
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of a value, which stays alive with it
        self._known: dict[str, tuple[Facts, Any]] = {}  # by signature: what a call costs, and what it returns

    def add_source(
        self, source: Source, name: str, *, module: str = "", gradient_bytes: int = 0, micro_batch: int = -1
    ) -> Ref:
        """Adds a source op; returns its tensor."""
        return self.ops.add_source(
            named(name, micro_batch),
            source,
            self._twin(source.value),
            module=module,
            gradient_bytes=gradient_bytes,
            micro_batch=micro_batch,
        )

    def copy(self, part: Lowered, chosen: Iterable[int], refs: RefMap, *, micro_batch: int) -> None:
        """Copies the ops `chosen`, in order; `refs` then knows their outputs and the views that they read.

        Args:
            part: of a slice.
            chosen: ops of `part` that run.
            refs: references for tensors that they read and that none of them produces.
            micro_batch: which one the copies belong to.
        """
        built, like, ops = self.ops.built, part.built, self.ops

        def here(ref: Ref) -> Ref:
            return self.here(part, ref, refs)

        ops.folded.update(part.folded)
        empty: dict[tuple[str, str], Ref] = {}  # by module and signature
        for op in chosen:
            call, row = part.calls[op], like.ops[op]
            assert isinstance(call, Call)
            key = row.module, row.signature
            if call.target is _ZEROS and key in empty:  # mean and variance of a batch norm begin with one and the same
                refs[call.outputs[0]] = empty[key]
                continue
            args, kwargs = map_refs(here, call.args), map_refs(here, call.kwargs)
            # built field by field: `dataclasses.replace` takes five times as long, for each of many thousand ops
            new = built.add(
                OpRow(
                    named(row.name, micro_batch),
                    row.target,
                    row.module,
                    row.phase,
                    row.signature,
                    [ops.base(refs[tensor]) for tensor in row.reads],
                    row.flops,
                    row.bytes_moved,
                    row.workspace_bytes,
                    micro_batch=micro_batch,
                    shard=row.shard,
                )
            )
            for output in part.tensors_of(op):
                old = like.tensors[output]
                refs[output] = Ref(
                    built.add_tensor(TensorRow(new, old.output, old.bytes, old.shape, old.dtype, old.value))
                )
            outputs = tuple(-1 if output < 0 else refs[output].id for output in call.outputs)
            if op in part.seeds:
                ops.seeds.add(new)
            ops.calls[new] = Call(
                *(call.target, args, kwargs, outputs, call.returns_tuple),
                draw=self._draw(call.draw, micro_batch),
                takes_device=call.takes_device,
            )
            if call.target is _ZEROS:
                empty[key] = refs[call.outputs[0]]

    def _draw(self, key: DrawKey | None, micro_batch: int) -> DrawKey | None:
        return key if key is None or key in self.shared_draws else replace(key, micro_batch=micro_batch)

    def here(self, part: Lowered, ref: Ref, refs: RefMap) -> Ref:
        """The reference in the assembly for `ref` of `part`; a view that no op has read so far is added."""
        if ref.id not in refs:
            view = part.views[-1 - ref.id]
            args, kwargs = map_refs(lambda other: self.here(part, other, refs), (view.args, view.kwargs))
            refs[ref.id] = self.ops.add_view(
                View(self.ops.base(refs[view.base]), view.target, args, kwargs), part.view_values[-1 - ref.id]
            )
        return refs[ref.id]

    def call(
        self,
        target: torch._ops.OpOverload,
        *args: Any,
        name: str,
        module: str = "",
        phase: int,
        micro_batch: int = -1,
        shard: int = -1,
        **kwargs: Any,
    ) -> Ref:
        """Adds one call that returns one tensor, which comes back; its arguments may hold `Ref`s, `kwargs` none."""
        values = map_refs(self._value, args)
        signed = signature(str(target), values, kwargs)
        if signed not in self._known:
            with self._mode, torch.no_grad():
                output = target(*values, **kwargs)
            self._known[signed] = call_facts(target, values, kwargs, output), output
        cost, output = self._known[signed]
        reads = [self.ops.base(ref) for ref in refs_in(args)]
        op = self.ops.built.add(
            OpRow(
                *(named(name, micro_batch), str(target), module, phase, signed, reads, *cost),
                micro_batch=micro_batch,
                shard=shard,
            )
        )
        tensor = self.ops.add_tensor(op, 0, output)
        self.ops.calls[op] = Call(target, args, kwargs, (tensor,), returns_tuple=False)
        return Ref(tensor)

    def _value(self, ref: Ref) -> torch.Tensor:
        """The fake tensor of `ref`, in the assembly's own mode."""
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
        return self.ops.add_view(View(self.ops.base(shown), target, (shown, *args), {}), value)

    def store(self, place: Ref, value: Ref, *, name: str, together: Iterable[int]) -> None:
        """Adds the copy of `value` into the source tensor `place`; it lives there, and the ops `together` with it."""
        built, ops, target = self.ops.built, self.ops, torch.ops.aten.copy_.default
        values = self._value(place), self._value(value)
        home = ops.producer(place)
        op = built.add(
            OpRow(
                name,
                str(target),
                built.ops[home].module,
                UPDATE,
                signature(str(target), values, {}),
                (place.id, ops.base(value)),
                *call_facts(target, values, {}, values[0]),
            )
        )
        ops.calls[op] = Call(target, (place, value), {}, (), returns_tuple=False)
        built.mutations.append((op, place.id))
        built.together.append((op, home, *together))


def named(name: str, micro_batch: int) -> str:
    """The name of a micro-batch's copy of an op."""
    return name if micro_batch < 0 else f"{name}.mb{micro_batch}"


class Parts:
    """The step of a micro-batch, captured once for each size.

    Args:
        origin: the model to capture; its `micro` says how it is cut.
        assembly: takes the source ops.

    Attributes:
        has_own_loss: whether each micro-batch has a loss.
        steps: by size.
    """

    def __init__(self, origin: Origin, assembly: Assembly) -> None:
        assert origin.micro is not None
        self.origin, self.micro, self._assembly = origin, origin.micro, assembly
        self.has_own_loss = origin.loss_fn is not None and origin.micro.verdict.kind != "joined"
        inputs, self._filled = with_tensors((origin.args, origin.kwargs))
        self._tensors, self._num_inputs = [*inputs, *origin.targets], len(inputs)
        self.steps: dict[int, LoweredStep] = {}
        self._shared: list[Ref] = []  # parameters and buffers
        self._given: list[list[Ref]] = []  # by position of an input or target, for each micro-batch
        self._constants: dict[tuple[Any, ...], Ref] = {}

    def tensors(self, index: int) -> list[torch.Tensor]:
        """Inputs and targets of micro-batch `index`: parts of those that are cut, laid out as a copy of them is."""
        slicing = self.micro.slicing
        return [
            whole if dim is None else _dense(Cut(dim, slicing.starts[index], slicing.sizes[index]).of(whole))
            for whole, dim in zip(self._tensors, slicing.dims, strict=True)
        ]

    def call(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the model for micro-batch `index`."""
        return self._filled(self.tensors(index))  # type: ignore[no-any-return]

    def capture(self, index: int, part: AsSlice, seeds: tuple[torch.Tensor, ...] = ()) -> None:
        """Captures the step for the size of micro-batch `index`.

        Args:
            index: of the micro-batch.
            part: the model to capture.
            seeds: gradients of outputs, where the loss is joined.

        Raises:
            CaptureError: the model cannot be captured, or on a slice alone; or the step changes a tensor that all
                micro-batches share, other than running statistics of batch norm, or reads running statistics that it
                updates.
        """
        make = functools.partial(self._trace, index, part, seeds)
        if self.origin.split is None:
            trace = make()
        else:
            about = (self.micro.slicing.sizes, index, part)
            trace = make() if seeds else trace_once(self.origin.model, about, make)
            trace = split_trace(trace, self.origin.split)
            self._check_split(trace)
        step = LoweredStep(trace)
        self._assembly.ops.split = trace.split
        built = step.ops.built
        if built.mutations:
            changed = built.ops[built.tensors[built.mutations[0][1]].op].name
            raise changes(changed, self.micro.slicing)
        first = len(step.trace.trainable) + len(step.trace.fixed)
        read = {tensor for row in built.ops for tensor in row.reads}
        for tensor, name in enumerate(step.trace.buffers, start=first):
            if tensor in read and name.rpartition(".")[0] in step.trace.norms:
                raise CaptureError(
                    f"cannot cut the step into {self.micro.slicing.num_micro_batches} micro-batches: it reads "
                    f"{name!r}, which batch norm updates, so that every micro-batch would wait for the one before. "
                    f"Capture it with micro_batches=1."
                )
        self.steps[self.micro.slicing.sizes[index]] = step

    def _check_split(self, trace: Trace) -> None:
        """Refuses micro-batches of different sizes whose parameters are split in different ways."""
        for step in self.steps.values():
            if step.trace.shards != trace.shards:
                key = min(key for key, _ in set(step.trace.shards.items()) ^ set(trace.shards.items()))
                raise CaptureError(
                    f"micro-batches of different sizes split {key!r} in different ways; capture with as many "
                    f"micro-batches as go into the batch, or leave `split` out."
                )

    def _trace(self, index: int, part: AsSlice, seeds: tuple[torch.Tensor, ...]) -> Trace:
        """The step of micro-batch `index`; says so where it fails and that of the whole batch does not."""
        origin, (args, kwargs) = self.origin, self.call(index)
        has_loss = part.weight is not None
        try:
            return trace_step(
                origin.model,
                args,
                kwargs,
                origin.loss_fn if has_loss else None,
                tuple(self.tensors(index)[self._num_inputs :]) if has_loss else seeds,
                is_training=has_loss or bool(seeds),
                part=part,
                frozen=origin.frozen,
            )
        except CaptureError as error:
            whole = (origin.args, origin.kwargs, origin.loss_fn, origin.targets)
            # raises what fails in both
            trace_step(origin.model, *whole, is_training=origin.loss_fn is not None, frozen=origin.frozen)
            cut = cut_words(origin.args, origin.kwargs, origin.targets, self.micro.slicing)
            raise CaptureError(
                f"cannot cut the step into {self.micro.slicing.num_micro_batches} micro-batches: a slice of the batch "
                f"fails, the whole batch runs ({cut}). `batch_dims` (--batch-dims) says which dimension of every "
                f"tensor is the batch. Of the slice: {str(error).partition(' Hint: ')[0]}",
                op=error.op,
                source=error.source,
            ) from error

    def add_sources(self) -> None:
        """Adds parameters, buffers, inputs and targets to the graph: each once, or once a micro-batch where it is cut.

        Targets belong to the whole batch where micro-batches have no loss of their own.
        """
        first = next(iter(self.steps.values()))
        state = len(first.trace.trainable) + len(first.trace.fixed) + len(first.trace.buffers)
        built, slicing = first.ops.built, self.micro.slicing
        self._shared = [
            self._assembly.add_source(
                first.ops.sources[op],
                row.name,
                module=row.module,
                gradient_bytes=row.gradient_bytes,
            )
            for op, row in enumerate(built.ops[:state])
        ]
        parts = [self.tensors(index) for index in range(slicing.num_micro_batches)]
        for position, (whole, dim) in enumerate(zip(self._tensors, slicing.dims, strict=True)):
            kind: SourceKind = "input" if position < self._num_inputs else "target"
            key = str(position if kind == "input" else position - self._num_inputs)
            if dim is None or (kind == "target" and not self.has_own_loss):
                ref = self._assembly.add_source(Source(kind, key, whole.detach()), f"{kind}_{key}")
                self._given.append([ref] * slicing.num_micro_batches)
                continue
            self._given.append(
                [
                    self._assembly.add_source(
                        Source(kind, key, parts[index][position].detach(), cut), f"{kind}_{key}", micro_batch=index
                    )
                    for index, cut in enumerate(map(Cut, itertools.repeat(dim), slicing.starts, slicing.sizes))
                ]
            )

    @property
    def state(self) -> dict[str, Ref]:
        """Parameters and buffers of the graph, by dotted name."""
        trace = next(iter(self.steps.values())).trace
        return dict(zip((*trace.trainable, *trace.fixed, *trace.buffers), self._shared, strict=True))

    @property
    def targets(self) -> list[Ref]:
        """Targets of the whole batch, where micro-batches have no loss of their own."""
        return [refs[0] for refs in self._given[self._num_inputs :]]

    def step(self, index: int) -> LoweredStep:
        """The step of micro-batch `index`."""
        return self.steps[self.micro.slicing.sizes[index]]

    def refs(self, index: int) -> RefMap:
        """References for the placeholders and constants of micro-batch `index`."""
        given = self._given if self.has_own_loss else self._given[: self._num_inputs]
        placeholders = [*self._shared, *(refs[index] for refs in given)]
        return {**dict(enumerate(placeholders)), **self.constants(self.step(index))}

    def constants(self, step: LoweredStep) -> RefMap:
        """References for the constants of a captured step: one for all that read the same memory."""
        found = {}
        for op, source in step.ops.sources.items():
            if source.kind == "constant":
                row, key = step.ops.built.ops[op], memory(source.value)
                if key not in self._constants:
                    self._constants[key] = self._assembly.add_source(source, row.name, module=row.module)
                found[step.ops.tensors_of(op)[0]] = self._constants[key]
        return found


def running_ops(ops: Lowered) -> list[int]:
    """The ops of a slice that run."""
    return [op for op in range(len(ops.built.ops)) if op not in ops.sources]


def _dense(part: torch.Tensor) -> torch.Tensor:
    """The part itself where a copy of it is laid out alike, else contiguous."""
    return part if torch.empty_like(part).stride() == part.stride() else part.contiguous()


aten = torch.ops.aten


class Gradients:
    """Sums the gradients of micro-batches as they come; gathers the lookups in embedding tables.

    Args:
        assembly: takes the ops.
        parts: with a captured step for every size, and the source ops.
    """

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        self._assembly, self._parts, self._producer = assembly, parts, assembly.ops.producer
        steps = list(parts.steps.values())
        self._tables = dict(zip(map(id, steps), tables(steps), strict=True))
        self._names = steps[0].trace.trainable
        self._state = parts.state
        self._count = parts.micro.slicing.num_micro_batches
        # parameters whose gradient is one tensor in every slice share a sum
        found: dict[tuple[Ref | None, ...], int] = {}
        columns = zip(*(step.gradients for step in steps), strict=True)
        self._alias = [found.setdefault(gradients, position) for position, gradients in enumerate(columns)]
        self._sums = {position: Sum(self._count, functools.partial(self._add, position)) for position in found.values()}
        self._refs: list[RefMap] = []

    def left_out(self, step: LoweredStep) -> set[int]:
        """Ops of a slice that are not copied: gradients of tables, made once for all of them."""
        return {op for table in self._tables[id(step)].values() for op in table.replaced}

    def add(self, index: int, refs: RefMap) -> None:
        """Takes the gradients of micro-batch `index`, whose ops are copied."""
        step = self._parts.step(index)
        self._refs.append(refs)
        for position, total in self._sums.items():
            table = self._tables[id(step)].get(position)
            terms = [step.gradients[position]] if table is None else list(table.rest)
            own = [self._assembly.here(step.ops, term, refs) for term in terms if term is not None]
            add = functools.partial(self._add, position, index)
            total.add(index, functools.reduce(add, own) if own else None)

    def finish(self, optimizer: OptimizerSpec | None) -> dict[str, Ref]:
        """Makes the gradients of tables, and adds the updates; a parameter, its gradient's root and its update live
        together.

        Returns:
            The gradient of each parameter that has one, by dotted name.
        """
        roots: dict[int, tuple[Ref, tuple[int, ...]]] = {}
        for position, total in self._sums.items():
            home = self._producer(self._state[self._names[position]])
            gradient = total.root
            together = [self._producer(gradient)] if gradient is not None and total.is_sum else []
            for made, ops in self._looked_up(position):
                together += ops
                if gradient is None:
                    gradient = made
                else:
                    gradient = self._add(position, -1, gradient, made)
                    together.append(self._producer(gradient))
            if gradient is not None:
                roots[position] = gradient, tuple(together)
            if together:
                self._assembly.ops.built.together.append((home, *together))
        pairs = zip(self._names, self._alias, strict=True)
        found = {name: roots[position] for name, position in pairs if position in roots}
        if optimizer is not None:
            for name, (gradient, tied) in found.items():
                self._assembly.ops.add_update(name, self._state[name], gradient, optimizer, tied)
        return {name: gradient for name, (gradient, _) in found.items()}

    def _looked_up(self, position: int) -> list[tuple[Ref, list[int]]]:
        """For each lookup in a table, its dense gradient over all micro-batches, and the ops that make it."""
        own = [self._tables[id(self._parts.step(index))].get(position) for index in range(self._count)]
        made = []
        for lookups in zip(*(table.lookups if table else () for table in own), strict=True):  # all have one, or none
            gathered = []
            for what in ("gradients", "indices"):
                parts = [
                    self._assembly.here(self._parts.step(index).ops, getattr(lookup, what), self._refs[index])
                    for index, lookup in enumerate(lookups)
                ]
                gathered.append(self._call(position, what, aten.cat.default, parts, lookups[0].dim))
            dense = self._call(
                position, "gradient", aten.embedding_dense_backward.default, *gathered, *lookups[0].options
            )
            made.append((dense, [self._producer(each) for each in (*gathered, dense)]))
        return made

    def _add(self, position: int, micro_batch: int, one: Ref, other: Ref) -> Ref:
        return self._call(position, "sum", aten.add.Tensor, one, other, micro_batch=micro_batch)

    def _call(self, position: int, word: str, target: torch._ops.OpOverload, *args: Any, micro_batch: int = -1) -> Ref:
        """Adds an op of the backward that belongs to the module of the parameter at `position`."""
        name, source = self._names[position], self._producer(self._state[self._names[position]])
        return self._assembly.call(
            target,
            *args,
            name=f"{word}_{name}",
            module=name.rpartition(".")[0],
            phase=BACKWARD,
            micro_batch=micro_batch,
            shard=self._assembly.ops.built.ops[source].shard,
        )


class Sum:
    """The sum of one gradient over micro-batches, in the tree of `gradient_sums`, each part with its later half.

    Args:
        count: K.
        add: adds the op that sums two parts, called with the micro-batch that it goes with and the parts.
    """

    def __init__(self, count: int, add: Callable[[int, Ref, Ref], Ref]) -> None:
        self._count, self._add = count, add
        self._parts: list[Ref | None] = [None] * (2 * count - 1)
        self._due: dict[int, list[tuple[int, GradientSum]]] = {}  # by micro-batch, what it completes, and its part
        for part, one in enumerate(gradient_sums(count, LATER_HALF), start=count):
            self._due.setdefault(one.last, []).append((part, one))

    @property
    def root(self) -> Ref | None:
        """The whole sum; None where no micro-batch has a gradient."""
        return self._parts[-1]

    @property
    def is_sum(self) -> bool:
        """Whether it adds anything up: else it is the gradient of a single micro-batch, or none."""
        return self.root not in (None, *self._parts[: self._count])

    def add(self, micro_batch: int, gradient: Ref | None) -> None:
        """Takes the gradient of a micro-batch, and adds up the sums that it completes."""
        self._parts[micro_batch] = gradient
        for part, one in self._due.get(micro_batch, ()):
            left, right = self._parts[one.left], self._parts[one.right]
            self._parts[part] = self._add(one.micro_batch, left, right) if left and right else left or right


@dataclass(frozen=True)
class Lookup:
    """A dense gradient of a table, from one lookup in it.

    Attributes:
        gradients: of the lookups.
        indices: of its rows.
        options: rows of the table, padding index, and whether gradients are scaled by frequency.
        dim: the dimension along which lookups of micro-batches are joined.
    """

    gradients: Ref
    indices: Ref
    options: tuple[int, int, bool]
    dim: int = 0


@dataclass(frozen=True)
class Table:
    """The gradient of a parameter that is a sum of lookups, and of others where the table is tied to a layer.

    Attributes:
        lookups: whose gradients are made once for all micro-batches.
        rest: further summands.
        replaced: ops of the slice that make the lookups' gradients, or add them up.
    """

    lookups: tuple[Lookup, ...]
    rest: tuple[Ref, ...]
    replaced: frozenset[int]


def tables(steps: Sequence[LoweredStep]) -> list[dict[int, Table]]:
    """For each of some slices of different sizes: by position, the parameters whose gradients are gathered.

    They are the same for all slices: those whose lookups can be joined along one dimension.
    """
    found = [_tables_of(step) for step in steps]
    joined: list[dict[int, Table]] = [{} for _ in steps]
    for position in set.intersection(*map(set, found)):
        own = [each[position] for each in found]
        dims = [
            _dim([tuple(step.ops.value(each.indices).shape) for step, each in zip(steps, lookups, strict=True)])
            for lookups in zip(*(table.lookups for table in own), strict=False)
        ]
        kinds = {(len(table.rest), tuple(lookup.options for lookup in table.lookups)) for table in own}
        if len(kinds) > 1 or None in dims:
            continue
        for table, kept in zip(own, joined, strict=True):
            lookups = tuple(replace(each, dim=dim or 0) for each, dim in zip(table.lookups, dims, strict=True))
            kept[position] = replace(table, lookups=lookups)
    return joined


def _dim(shapes: Sequence[tuple[int, ...]]) -> int | None:
    """The one dimension in which shapes differ; the first where none does; None where there is no such dimension."""
    if not shapes[0] or len({len(shape) for shape in shapes}) > 1:
        return None
    differing = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    return None if len(differing) > 1 else (differing or [0])[0]


def _tables_of(step: LoweredStep) -> dict[int, Table]:
    ops = step.ops
    readers = Counter(tensor for row in ops.built.ops for tensor in row.reads)
    readers.update(ops.base(ref) for ref in (*step.results, *step.statistics, *filter(None, step.gradients)))
    found = {}
    for position, gradient in enumerate(step.gradients):
        lookups: list[Lookup] = []
        rest: list[Ref] = []
        replaced: set[int] = set()
        left = [] if gradient is None else [gradient]
        while left:
            ref = left.pop()
            call = ops.calls.get(ops.producer(ref)) if ref.id >= 0 and readers[ref.id] == 1 else None
            target = call.target if isinstance(call, Call) else None
            if isinstance(call, Call) and target is aten.add.Tensor and _adds_alike(step, ref, call):
                left += reversed(call.args)
            elif isinstance(call, Call) and target is aten.embedding_dense_backward.default and not call.args[4]:
                lookups.append(Lookup(call.args[0], call.args[1], call.args[2:5]))
            else:
                rest.append(ref)
                continue
            replaced.add(ops.producer(ref))
        if lookups:
            found[position] = Table(tuple(lookups), tuple(rest), frozenset(replaced))
    return found


def _adds_alike(step: LoweredStep, total: Ref, call: Call) -> bool:
    """Whether `total` is the plain sum of two tensors of its shape."""
    if call.kwargs or len(call.args) != 2 or not all(isinstance(each, Ref) for each in call.args):
        return False
    return len({step.ops.value(each).shape for each in (total, *call.args)}) == 1
