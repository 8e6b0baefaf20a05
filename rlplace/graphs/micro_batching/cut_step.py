"""`capture_micro_batches`: the graph of a step that is cut along its batch.

Running statistics of batch norm, updated by those of every micro-batch in turn.

`Joined`: the outputs of micro-batches as those of the whole batch, one loss of them, and its gradient cut again.

Which dimension of a model's outputs grows with the batch, found by running it on fake tensors of several batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError
from rlplace.graphs.capturing.lower import Lowered, LoweredStep
from rlplace.graphs.capturing.portable import normalises_batch, portable, statistics_handed_out
from rlplace.graphs.capturing.refusals import explained
from rlplace.graphs.capturing.trace import AsSlice, check_alone, fakes, trace_step
from rlplace.graphs.capturing.untouched import dotted, holding, untouched
from rlplace.graphs.micro_batching.assembly import Assembly, Gradients, Parts, RefMap, running_ops
from rlplace.graphs.opgraph import BACKWARD, FORWARD, UPDATE, OpGraph
from rlplace.graphs.program import Call, OptimizerSpec, Origin, Ref, closed, opened, tensors_in, with_tensors
from rlplace.graphs.random_streams import Draw, DrawKey, Streams

aten = torch.ops.aten


def capture_micro_batches(origin: Origin, optimizer: OptimizerSpec | None) -> OpGraph:
    """The graph of one step in K micro-batches, gradients summed and parameters updated once.

    Each size of a slice is captured once, a joined loss as well; the rest are copies.

    Args:
        origin: the model to capture; its `micro` says how.
        optimizer: updates parameters; needs a loss.

    Raises:
        CaptureError: the model cannot be captured, or not in micro-batches: it changes a buffer, its outputs do not
            grow with the batch, or hooks change its gradients.
    """
    assert origin.micro is not None
    for name, parameter in origin.model.named_parameters():
        if parameter.requires_grad and parameter._backward_hooks:
            raise CaptureError(
                f"parameter {name!r} has a hook on its gradient, which would run once for each of "
                f"{origin.micro.slicing.num_micro_batches} micro-batches and see only theirs; capture with "
                f"micro_batches=1, or change gradients in `forward`."
            )
    if normalises_batch(origin.model):
        verdict = dataclasses.replace(origin.micro.verdict, normalises_batch=True)
        origin = dataclasses.replace(origin, micro=dataclasses.replace(origin.micro, verdict=verdict))
    return _Capture(origin, optimizer).run()


class _Capture:
    def __init__(self, origin: Origin, optimizer: OptimizerSpec | None) -> None:
        assert origin.micro is not None
        self.micro, self.optimizer = origin.micro, optimizer
        self.slicing = self.micro.slicing
        self.assembly = Assembly()
        self.parts = Parts(origin, self.assembly)
        self.is_training = origin.loss_fn is not None
        self.refs: list[RefMap] = []
        self.output_dims: tuple[int | None, ...] = ()

    def run(self) -> OpGraph:
        result, results = self._with_own_losses() if self.parts.has_own_loss else self._joined()
        statistics = []
        for index, refs in enumerate(self.refs):
            step = self.parts.step(index)
            found = [self.assembly.here(step.ops, ref, refs) for ref in step.statistics]
            statistics.append(list(zip(step.trace.norms, found[::2], found[1::2], strict=True)))
        add_running_statistics(self.assembly, self.parts.origin.model, self.parts.state, statistics)
        gradients = self.gradients.finish(self.optimizer) if self.is_training else {}
        origin = dataclasses.replace(
            self.parts.origin,
            autocast=self.parts.step(0).trace.autocast,
            micro=dataclasses.replace(self.micro, output_dims=self.output_dims),
        )
        return self.assembly.ops.graph(
            result, results, self.optimizer, origin, is_training=self.is_training, gradients=gradients
        )

    def _share_draws(self) -> None:
        """Finds the draws that micro-batches share: those of the whole batch that have no part for each sample.

        Gradients that are accumulated share what is seeded: every micro-batch seeds it again.
        """
        steps = list(self.parts.steps.values())
        draws = [
            (call.draw, step.ops.built.tensors[call.outputs[0]].shape)
            for step in steps
            for call in step.ops.calls.values()
            if isinstance(call, Call) and call.draw is not None
        ]
        shapes: dict[DrawKey, torch.Size] = {}

        def noted(key: DrawKey, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            drawn = func(*args, **kwargs)
            shapes[key] = tensors_in(drawn)[0].shape
            return drawn

        if self.micro.verdict.kind == "accumulated":
            self.assembly.shared_draws.update(key for key, _ in draws if key.fixed is not None)
        elif draws:
            origin = self.parts.origin
            fake_output(origin.model, origin.args, origin.kwargs, is_training=self.is_training, draw=noted)
            apart = {key for key, shape in draws if shapes.get(key) != shape}
            self.assembly.shared_draws.update({key for key, _ in draws} - apart)

    def _indices_of_sizes(self) -> list[int]:
        """One micro-batch of each size."""
        return [self.slicing.sizes.index(size) for size in dict.fromkeys(self.slicing.sizes)]

    def _with_own_losses(self) -> tuple[Any, list[Ref]]:
        for index in self._indices_of_sizes():
            self.parts.capture(index, AsSlice(weight=self.micro.weights[index]))
        self.parts.add_sources()
        self._share_draws()
        self.gradients = Gradients(self.assembly, self.parts)
        losses = []
        for index in range(self.slicing.num_micro_batches):
            self.refs.append(self.parts.refs(index))
            self._copy_with_gradients(index)
            step = self.parts.step(index)
            losses.append(self.assembly.here(step.ops, step.results[0], self.refs[index]))
        terms = (  # one by one, each added as soon as it is there
            loss
            if weight == 1.0
            else self.assembly.call(aten.mul.Tensor, loss, weight, name="weighted_loss", phase=FORWARD)
            for loss, weight in zip(losses, self.micro.weights, strict=True)
        )
        add = functools.partial(self.assembly.call, aten.add.Tensor, name="sum_loss", phase=FORWARD)
        loss = functools.reduce(add, terms)
        return loss, [loss]

    def _joined(self) -> tuple[Any, list[Ref]]:
        joined = Joined(self.assembly, self.parts, is_training=self.is_training)
        self.output_dims = tuple(joined.dims)
        for index in self._indices_of_sizes():
            self.parts.capture(index, AsSlice(outputs=joined.differentiated), joined.seeds(index))
        self.parts.add_sources()
        self._share_draws()
        for index in range(self.slicing.num_micro_batches):
            ops, refs = self.parts.step(index).ops, self.parts.refs(index)
            self.refs.append(refs)
            self.assembly.copy(ops, [op for op in running_ops(ops) if _is_forward(ops, op)], refs, micro_batch=index)
        outputs = joined.join(self.refs)
        if not self.is_training:
            return pytree.tree_map_only(Ref, lambda each: outputs[each.id], self.parts.step(0).trace.result), outputs
        loss, seeds = joined.add_loss(outputs)
        self.gradients = Gradients(self.assembly, self.parts)
        for index, refs in enumerate(self.refs):
            last = len(self.parts.step(index).trace.values)  # the gradients of outputs are the last placeholders
            refs.update(zip(range(last - len(seeds[index]), last), seeds[index], strict=True))
            self._copy_with_gradients(index, is_forward_there=True)
        return loss, [loss]

    def _copy_with_gradients(self, index: int, *, is_forward_there: bool = False) -> None:
        step, refs = self.parts.step(index), self.refs[index]
        left_out = self.gradients.left_out(step)
        chosen = [
            op
            for op in running_ops(step.ops)
            if op not in left_out and not (is_forward_there and _is_forward(step.ops, op))
        ]
        self.assembly.copy(step.ops, chosen, refs, micro_batch=index)
        self.gradients.add(index, refs)


def _is_forward(ops: Lowered, op: int) -> bool:
    return ops.built.ops[op].phase == FORWARD


MOST_NORMS = 8
"""How many neighbouring norms keep their statistics together: fewer and larger tensors are sent, and few norms are far
from the stage of a pipeline that they belong to."""

Found = Sequence[tuple[str, Ref, Ref]]
"""Of one micro-batch: path of the norm, mean and unbiased variance of every call, in order."""


def add_running_statistics(
    assembly: Assembly, model: nn.Module, buffers: Mapping[str, Ref], found: Sequence[Found]
) -> None:
    """Adds the updates of batch norms' buffers: running statistics move towards those of each call, in order.

    Each micro-batch joins the statistics of neighbouring norms; the ops that update the buffers from them live there.

    Args:
        assembly: takes the ops.
        model: has the norms.
        buffers: by dotted name.
        found: by micro-batch.
    """
    calls = Counter(path for path, _, _ in found[0])

    def kind(path: str) -> tuple[float | None, int, torch.dtype]:
        momentum: float | None = model.get_submodule(path).momentum  # type: ignore[assignment]
        return momentum, calls[path], assembly.ops.value(buffers[dotted(path, "running_mean")]).dtype

    for (momentum, num_calls, _), group in itertools.groupby(calls, kind):
        paths, most = list(group), 1 if momentum is None else MOST_NORMS
        for start in range(0, len(paths), most):
            _update(assembly, buffers, paths[start : start + most], momentum, num_calls, found)


def _update(
    assembly: Assembly,
    buffers: Mapping[str, Ref],
    paths: Sequence[str],
    momentum: float | None,
    num_calls: int,
    found: Sequence[Found],
) -> None:
    """Adds the update of the buffers of some norms, which live together with all its ops."""
    ops, own, module = assembly.ops, list[int](), paths[-1]

    def call(target: torch._ops.OpOverload, *args: object, **options: Any) -> Ref:
        made = assembly.call(target, *args, name=f"move_{module}", module=module, phase=UPDATE, **options)
        own.append(ops.producer(made))
        return made

    places = [buffers[dotted(path, name)] for name in ("running_mean", "running_var") for path in paths]
    counts = [buffers[name] for path in paths if (name := dotted(path, "num_batches_tracked")) in buffers]
    running = call(aten.cat.default, places, 0)
    for index, statistics in enumerate(found):
        calls = [[each[1:] for each in statistics if each[0] == path] for path in paths]
        joined = [  # of each call, the means and variances of all norms as one tensor
            assembly.call(
                aten.cat.default,
                [each[number][column] for column in (0, 1) for each in calls],
                0,
                name="statistics",
                module=module,
                phase=UPDATE,
                micro_batch=index,
            )
            for number in range(num_calls)
        ]
        for num_seen, values in enumerate(joined, start=index * num_calls + 1):
            if momentum is not None:
                running = call(aten.lerp.Scalar, running, values, momentum)
            else:  # to the average of all so far
                seen = call(aten.add.Tensor, counts[0], num_seen)
                seen = call(aten._to_copy.default, seen, dtype=ops.value(running).dtype)
                running = call(aten.lerp.Tensor, running, values, call(aten.reciprocal.default, seen))
    ends = [0, *itertools.accumulate(ops.value(place).shape[0] for place in places)]
    stores = [
        (place, assembly.view(aten.slice.Tensor, running, 0, start, end))
        for place, (start, end) in zip(places, itertools.pairwise(ends), strict=True)
    ]
    stores += [(count, call(aten.add.Tensor, count, len(found) * num_calls)) for count in counts]
    for place, value in stores:
        assembly.store(place, value, name=f"store_{ops.built.ops[ops.producer(place)].name}", together=own)


class Joined:
    """Joins the model's results for each micro-batch.

    Args:
        assembly: takes the ops.
        parts: the slices, not captured yet.
        is_training: whether there is a loss.

    Attributes:
        dims: for every output tensor the dimension that grows with the batch, or None.
        differentiated: positions of the output tensors that have a gradient.

    Raises:
        CaptureError: outputs do not grow with the batch, or none has a gradient.
    """

    def __init__(self, assembly: Assembly, parts: Parts, *, is_training: bool) -> None:
        self._assembly, self._parts = assembly, parts
        origin, slicing = parts.origin, parts.micro.slicing
        output = fake_output(origin.model, origin.args, origin.kwargs, is_training=is_training)
        self._whole = tensors_in(output)
        self._part = {
            size: tensors_in(fake_output(origin.model, *parts.call(slicing.sizes.index(size)), is_training=is_training))
            for size in dict.fromkeys(slicing.sizes)
        }
        self.dims, *_ = [batch_dims_of(self._whole, part, slicing.batch, size) for size, part in self._part.items()]
        self.differentiated: tuple[int, ...] = ()
        if not is_training:
            return
        if self.dims.count(None) == len(self.dims):
            raise CaptureError(
                "the model returns nothing that grows with the batch (it computes its loss itself), so that the "
                "outputs of micro-batches cannot be joined; return what the loss is made of, and give it as `loss_fn`, "
                "or capture with loss='separate' if the loss is a mean or a sum over samples."
            )
        trace = trace_step(
            _Outputs(output), (), {}, origin.loss_fn, origin.targets, is_training=True, frozen=origin.frozen
        )
        check_alone(trace.result)
        self._loss = LoweredStep(trace)
        self._gradients = dict(zip(trace.trainable, self._loss.gradients, strict=True))
        self.differentiated = tuple(k for k in range(len(self._whole)) if self._gradients.get(_name(k)) is not None)

    def seeds(self, index: int) -> tuple[torch.Tensor, ...]:
        """Stand-ins for the gradients of the outputs of micro-batch `index`."""
        outputs = self._part[self._parts.micro.slicing.sizes[index]]
        likes = (outputs[position].detach() for position in self.differentiated)
        return tuple(torch.empty_like(like, memory_format=torch.contiguous_format) for like in likes)

    def join(self, refs: Sequence[RefMap]) -> list[Ref]:
        """The outputs of the whole batch.

        Args:
            refs: of every micro-batch, whose forward is copied.

        Raises:
            CaptureError: an output that does not grow with the batch depends on it all the same.
        """
        steps = [self._parts.step(index) for index in range(len(refs))]
        outputs = []
        for position, dim in enumerate(self.dims):
            own = [self._assembly.here(step.ops, step.results[position], refs[k]) for k, step in enumerate(steps)]
            if dim is not None:
                outputs.append(self._assembly.call(aten.cat.default, own, dim, name="join", phase=FORWARD))
                continue
            if self._depends_on_batch(steps[0], position):
                raise CaptureError(
                    f"output {position} of the model, {tuple(self._whole[position].shape)}, depends on the batch and "
                    f"does not grow with it, so that the outputs of micro-batches cannot be joined; return one row for "
                    f"each sample, or capture with micro_batches=1."
                )
            outputs.append(own[0])
        return outputs

    def add_loss(self, outputs: Sequence[Ref]) -> tuple[Ref, list[list[Ref]]]:
        """The loss of the whole batch, and by micro-batch the gradients of its outputs, copied out of theirs."""
        step, slicing, trace = self._loss, self._parts.micro.slicing, self._loss.trace
        named = {_name(position): ref for position, ref in enumerate(outputs)}
        state = [named[name] for name in (*trace.trainable, *trace.fixed, *trace.buffers)]
        refs = {**dict(enumerate([*state, *self._parts.targets])), **self._parts.constants(step)}
        self._assembly.copy(step.ops, running_ops(step.ops), refs, micro_batch=-1)
        seeds: list[list[Ref]] = [[] for _ in slicing.sizes]
        for position in self.differentiated:
            gradient = self._gradients[_name(position)]
            assert gradient is not None
            whole, dim = self._assembly.here(step.ops, gradient, refs), self.dims[position]
            home = self._assembly.ops.producer(whole)
            for index, (start, size) in enumerate(zip(slicing.starts, slicing.sizes, strict=True)):
                part: tuple[Any, ...] = ()
                target = aten.zeros_like.default if index else aten.clone.default
                if dim is not None:  # else it does not depend on the batch, and the first micro-batch has made it
                    grown = self._whole[position].shape[dim] // slicing.batch
                    target, part = aten.slice_copy.Tensor, (dim, start * grown, (start + size) * grown)
                seed = self._assembly.call(target, whole, *part, name=f"slice_{index}", phase=BACKWARD)
                self._assembly.ops.built.together.append((home, self._assembly.ops.producer(seed)))
                seeds[index].append(seed)
        return self._assembly.here(step.ops, step.results[0], refs), seeds

    def _depends_on_batch(self, step: LoweredStep, position: int) -> bool:
        """Whether an output of a slice is computed from cut tensors."""
        ops, trace = step.ops, step.trace
        state = len(trace.trainable) + len(trace.fixed) + len(trace.buffers)
        dims = self._parts.micro.slicing.dims[: len(trace.values) - state - trace.num_targets]
        touched = {state + k for k, dim in enumerate(dims) if dim is not None}
        for op, row in enumerate(ops.built.ops):
            if touched.intersection(row.reads):
                touched.update(ops.tensors_of(op))
        return ops.base(step.results[position]) in touched


class _Outputs(nn.Module):
    """Stands for a model that has run: its outputs are parameters where they have a gradient, buffers elsewhere."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        tensors, self._filled = with_tensors(output)
        for position, tensor in enumerate(tensors):
            if tensor.requires_grad:
                self.register_parameter(_name(position), nn.Parameter(tensor.detach()))
            else:
                self.register_buffer(_name(position), tensor.detach())

    def forward(self) -> Any:
        return closed(self._filled(getattr(self, _name(position)) for position in itertools.count()))


def _name(position: int) -> str:
    return f"output_{position}"


def fake_output(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_training: bool,
    differentiated: Sequence[int] = (),
    draw: Draw | None = None,
) -> Any:
    """The results of `model`, opened, as fake tensors; in training they require gradients as real ones would.

    Args:
        model: the model, in the mode (`train` or `eval`) that the step will use.
        args: positional arguments.
        kwargs: keyword arguments.
        is_training: whether there are gradients.
        differentiated: positions of the input tensors that require one.
        draw: makes the results of random ops.

    Raises:
        CaptureError: the model cannot run on fake tensors; names the op and the user's line.
    """
    parameters = dict(model.named_parameters())
    state = {**parameters, **dict(model.named_buffers())}
    tensors, filled = with_tensors((args, kwargs))
    twins = fakes([*state.values(), *tensors])
    own = dict(zip(state, twins, strict=False))
    for position in differentiated:
        twins[len(state) + position].requires_grad_(True)
    fake_args, fake_kwargs = filled(twins[len(state) :])
    grad_mode = torch.enable_grad() if is_training else torch.no_grad()
    with (
        untouched(model),
        explained(model),
        statistics_handed_out(model),
        portable(model),
        grad_mode,
        _mode_of(twins),
        Streams(draw).step(),
    ):
        for name, parameter in parameters.items() if is_training else ():
            own[name].requires_grad_(parameter.requires_grad)
        with holding(model, own):
            return opened(model(*fake_args, **fake_kwargs))


@contextlib.contextmanager
def _mode_of(twins: Sequence[torch.Tensor]) -> Iterator[None]:
    """While active, tensors that are made are fake as `twins` are, and real ones may join them."""
    mode = next((twin.fake_mode for twin in twins if isinstance(twin, FakeTensor)), FakeTensorMode())
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode:
            yield
    finally:
        mode.allow_non_fake_inputs = before


def batch_dims_of(
    whole: Sequence[torch.Tensor], part: Sequence[torch.Tensor], batch: int, size: int
) -> list[int | None]:
    """For each output, the dimension that grows with the batch; None for one of the same shape for every batch.

    Args:
        whole: outputs of the whole batch.
        part: outputs of a slice.
        batch: samples of the whole batch.
        size: samples of the slice, fewer.

    Raises:
        CaptureError: an output is another for a slice than in proportion to its samples.
    """
    dims: list[int | None] = []
    for position, (one, other) in enumerate(zip(whole, part, strict=False)):
        differing = [dim for dim, (a, b) in enumerate(zip(one.shape, other.shape, strict=False)) if a != b]
        fits = len(differing) <= 1 and all(one.shape[dim] * size == other.shape[dim] * batch for dim in differing)
        if len(whole) != len(part) or one.dim() != other.dim() or not fits:
            raise CaptureError(
                f"output {position} of the model is {tuple(one.shape)} for {batch} samples and {tuple(other.shape)} "
                f"for {size}, expected one dimension that grows with the batch: the outputs of micro-batches cannot "
                f"be joined. Capture it with micro_batches=1."
            )
        dims.append(differing[0] if differing else None)
    return dims
