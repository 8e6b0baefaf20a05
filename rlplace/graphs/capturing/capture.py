"""`capture`: any `nn.Module` as an `OpGraph`.

`capture_module`: forward and backward of a model whose loss is elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError, InvalidValue, UnknownName, refuse_if
from rlplace.graphs.capturing.lower import lower
from rlplace.graphs.capturing.portable import original_of
from rlplace.graphs.capturing.refusals import has_values, warn_of_hooks
from rlplace.graphs.capturing.trace import AsModule, LossFn, Trace, are_tried, trace_once, trace_step
from rlplace.graphs.capturing.untouched import ReadState, check_frozen, recorded
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.micro_batching.cut_step import capture_micro_batches, fake_output
from rlplace.graphs.micro_batching.loss_verdict import ASKED, judge_loss
from rlplace.graphs.micro_batching.slices import BatchDims, plan_slices
from rlplace.graphs.opgraph import BACKWARD, OpGraph
from rlplace.graphs.optimizers import resolve_optimizer
from rlplace.graphs.program import LossByName, LossVerdict, MicroBatches, OptimizerSpec, Origin, SplitPlan, tensors_in
from rlplace.graphs.self_check import StepDiffers, check_step
from rlplace.graphs.splitting.rewrite import split_trace

_log = logging.getLogger(__name__)


def capture(
    model: nn.Module,
    inputs: Any,
    loss_fn: LossFn | None = None,
    optimizer: str | OptimizerSpec | None = None,
    *,
    targets: Any = None,
    micro_batches: int = 1,
    batch_dims: BatchDims | None = None,
    loss: str | LossVerdict = "auto",
    frozen: Sequence[str] = (),
    split: SplitPlan | None = None,
    check: bool = True,
) -> OpGraph:
    """The ATen-level graph of one step of `model`, with its executable `program`.

    With a loss it is a training step: forward, loss, and the gradients of all parameters that require one. With an
    optimizer, the step also updates the parameters in place. Without a loss it is inference: only the forward, under
    `no_grad`.

    The model is traced with fake tensors. Then one step of it runs, and is compared with one step of plain PyTorch:
    loss, outputs, which parameters have a gradient, all gradients, and buffers. What differs is refused. Parameters,
    gradients, buffers, attributes and random states stay as they are. Models without values (fake tensors), of more
    than 2^28 parameters, or too large for the free memory are not compared, and a log message says so.

    Under `torch.autocast` for the device of the model's tensors, its casts are part of the step.

    Labels must be arguments. A step is refused if it reads a tensor that is neither an argument nor part of the model.

    Args:
        model: the model, in the mode (`train` or `eval`) that the step will use.
        inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        loss_fn: called as `loss_fn(output, *targets)`, or as `loss_fn(output, **targets)` for a dict of targets.
            Returns a scalar tensor, or a tuple that begins with one. The step returns the whole tuple, and trains with
            its first tensor.
        optimizer: `sgd`, `momentum`, `adam`, `adamw` or an `OptimizerSpec`; needs a loss.
        targets: further arguments of the loss, e.g. labels: a tensor, a tuple or a dict of tensors. Every step takes
            new targets.
        micro_batches: K, the number of slices of the batch. Forward and backward run once for each slice. Gradients are
            summed, and parameters are updated once. 1 does not cut the batch.
        batch_dims: the dimension to cut, for every tensor of the inputs and then of the targets; None for a shared
            tensor. Or a dict for some tensors. By default dimension 0, if it is as long as that of the first input.
        loss: of micro-batches. `separate`: each slice has its own loss, weighted. `joined`: one loss of the
            concatenated outputs. `auto`: the one of the two that gives the loss of the whole batch. `accumulated`:
            gradient accumulation over the slices. Or the verdict of an equal model with values, which is used
            unchecked.
        frozen: names of attributes (`encoder.calls`) that `forward` or the loss may change, although placed steps do
            not change them. Other attributes that change from step to step are refused.
        split: which ops are split into shards, each an op of its own (tensor parallelism); None splits none. Such a
            graph is placed as any other is.
        check: whether the step is compared with plain PyTorch, here and for each new shape that the placed step meets.

    Raises:
        CaptureError: the model cannot be captured (control flow that depends on data, a tensor from outside, Python
            state that changes from step to step), or the captured step is not that of plain PyTorch.
        InvalidValue: a model, inputs, loss, optimizer or targets of another type; an optimizer or targets without a
            loss; a loss that takes another number of targets; micro-batches that the batch cannot be cut into, or that
            do not give the loss of the whole batch.
        UnknownName: an unknown optimizer, an unknown word for `loss`, or an unknown attribute in `frozen`.

    >>> import torch
    >>> graph = capture(torch.nn.Linear(2, 1), torch.ones(3, 2), lambda y: y.sum(), "sgd")
    >>> [name for name in graph.names if name.startswith("update")]
    ['update_weight', 'update_bias']
    """
    _check_inputs(inputs)
    args, kwargs = as_call(inputs)
    wanted = as_targets(targets)
    _check_types(model, loss_fn)
    model = original_of(model)
    if isinstance(targets, Mapping) and loss_fn is not None:
        loss_fn = LossByName(loss_fn, tuple(targets))
    _check_targets(wanted, loss_fn, kwargs)
    check_frozen(model, loss_fn, _names(frozen))
    warn_of_hooks(model)
    spec = resolve_optimizer(optimizer)
    refuse_if(
        spec is not None and loss_fn is None,
        "loss_fn",
        None,
        "a function of the output",
        where="capture",
        hint="An optimizer needs a loss.",
    )
    refuse_if(
        not isinstance(split, SplitPlan | None),
        "split",
        split,
        "a SplitPlan or None",
        where="capture",
        hint='Only a search chooses a split: `rlplace.place(..., split="auto")`.',
    )
    if not isinstance(loss, (str, LossVerdict)):
        raise InvalidValue("loss", loss, f"one of {', '.join(ASKED)}", where="capture")
    if isinstance(loss, str) and loss not in ASKED:
        raise UnknownName("loss", loss, ASKED)
    with torch.inference_mode(False):  # the step makes gradients of its own, under whatever mode it is captured
        micro = None
        if micro_batches != 1:
            whole = (model, args, kwargs, loss_fn, wanted)
            slicing = plan_slices(*whole, micro_batches, batch_dims)
            micro = MicroBatches(slicing, judge_loss(*whole, slicing, asked=loss) if isinstance(loss, str) else loss)
        origin = Origin(
            model, args, kwargs, loss_fn, wanted, micro=micro, frozen=_names(frozen), split=split, is_checked=check
        )
        graph = capture_step(origin, spec)
        try:
            return checked(graph)
        except StepDiffers as problem:
            if micro is None or loss != "auto" or micro.verdict.kind != "separate":
                raise
            return _joined(origin, spec, problem)


def _joined(origin: Origin, optimizer: OptimizerSpec | None, problem: StepDiffers) -> OpGraph:
    """The step with one loss of all slices, as those of each are not the loss of the batch; else the problem stays."""
    assert origin.micro is not None
    why = "the outputs of the micro-batches are joined for one loss, that of the batch: those of slices differ from it"
    verdict = dataclasses.replace(origin.micro.verdict, kind="joined", weights="mean", why=why)
    micro = dataclasses.replace(origin.micro, verdict=verdict)
    with contextlib.suppress(CaptureError):
        return checked(capture_step(dataclasses.replace(origin, micro=micro), optimizer))
    raise problem


def checked(graph: OpGraph) -> OpGraph:
    """The same graph, once it has been compared with plain PyTorch; not where steps are only tried.

    Raises:
        StepDiffers: it is another step.
    """
    origin = require_program(graph).origin
    if are_tried():
        return graph
    problem = check_step(graph) if origin.is_checked else "check=False"
    if problem:
        is_expected = not origin.is_checked or not has_values(origin.model.parameters())
        level = logging.INFO if is_expected else logging.WARNING
        _log.log(level, "the captured step was not compared with plain PyTorch: %s", problem)
    return graph


def capture_step(origin: Origin, optimizer: OptimizerSpec | None) -> OpGraph:
    """The graph of an earlier capture, or of one that is alike: all is known of how it is cut, and nothing is judged
    anew.

    Args:
        origin: the model to capture; its `autocast` is that of now.
        optimizer: updates the parameters; needs a loss.

    Raises:
        CaptureError: the model cannot be captured.
    """
    is_training = origin.loss_fn is not None
    read = ReadState(origin.model, origin.loss_fn, origin.frozen)
    origin = dataclasses.replace(origin, read=read)
    with torch.inference_mode(False), _uncollected(read):
        if origin.micro is not None:
            return capture_micro_batches(origin, optimizer)
        whole = (origin.args, origin.kwargs, origin.loss_fn, origin.targets)

        def make() -> Trace:
            return trace_step(origin.model, *whole, is_training=is_training, frozen=origin.frozen)

        if origin.split is None:
            trace = make()
        else:
            trace = split_trace(trace_once(origin.model, is_training, make), origin.split)
        return lower(trace, optimizer, dataclasses.replace(origin, autocast=trace.autocast), is_training=is_training)


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as (args, kwargs): a tensor is one argument, a tuple or list several, a dict keyword arguments.

    Raises:
        InvalidValue: anything else.
    """
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    if isinstance(inputs, dict):
        return (), dict(inputs)
    raise InvalidValue("inputs", type(inputs).__name__, "a tensor, a tuple or a dict", where="capture")


def as_targets(targets: Any) -> tuple[torch.Tensor, ...]:
    """Targets as a tuple, those of a dict in its order: a tensor is one, None is none.

    Raises:
        InvalidValue: anything else than tensors.
    """
    if targets is None:
        return ()
    if isinstance(targets, torch.Tensor):
        return (targets,)
    expected = "a tensor, a tuple or a dict of tensors"
    if not isinstance(targets, (Mapping, tuple, list)):
        raise InvalidValue("targets", type(targets).__name__, expected, hint=_hint_for(targets))
    is_named = isinstance(targets, Mapping)
    given = dict(targets) if isinstance(targets, Mapping) else dict(enumerate(targets))
    for key, target in given.items():
        if not isinstance(target, torch.Tensor) or (is_named and not isinstance(key, str)):
            raise InvalidValue(
                f"targets[{key!r}]",
                type(target).__name__,
                "a tensor, by the name of an argument" if is_named else expected,
                hint=_hint_for(target),
            )
    return tuple(given.values())


def _names(frozen: Sequence[str]) -> tuple[str, ...]:
    if isinstance(frozen, str) or not all(isinstance(name, str) for name in frozen):
        raise InvalidValue("frozen", frozen, "a list of names of attributes", where="capture")
    return tuple(frozen)


def _check_types(model: object, loss_fn: object) -> None:
    refuse_if(
        not isinstance(model, nn.Module),
        "model",
        f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__,
        "a torch.nn.Module",
        where="capture",
    )
    loss_fn = loss_fn.func if isinstance(loss_fn, LossByName) else loss_fn
    if isinstance(loss_fn, type):
        raise InvalidValue(
            "loss_fn",
            f"the class {loss_fn.__name__}",
            "a function of the model's output",
            where="capture",
            hint=f"Make an instance: `{loss_fn.__name__}(...)`.",
        )
    refuse_if(
        loss_fn is not None and not callable(loss_fn),
        "loss_fn",
        type(loss_fn).__name__,
        "a function of the model's output that returns a scalar",
        where="capture",
    )


def _check_inputs(inputs: Any) -> None:
    """Refuses values that look like tensors and are none."""
    leaves = pytree.tree_leaves(inputs, is_leaf=lambda value: isinstance(value, PackedSequence))
    refuse_if(
        any(isinstance(leaf, PackedSequence) for leaf in leaves),
        "inputs",
        "a packed sequence",
        "tensors",
        where="capture",
        hint="How it is packed depends on the lengths of each batch, which a graph cannot hold: pass the padded "
        "tensor (`torch.nn.utils.rnn.pad_packed_sequence`), and a mask where padding counts.",
    )
    wrong = next((leaf for leaf in leaves if isinstance(leaf, np.ndarray)), None)
    if wrong is not None:
        raise InvalidValue("inputs", "a NumPy array", "tensors", where="capture", hint=_hint_for(wrong))
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves) and has_numbers(inputs):
        raise InvalidValue("inputs", "a list of numbers", "tensors", where="capture", hint=_hint_for([0.0]))


def has_numbers(value: Any) -> bool:
    """Whether `value` is or holds a list of numbers: values that a user of NumPy takes for tensors."""
    if isinstance(value, list) and value and all(isinstance(item, (int, float)) for item in value):
        return True
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(map(has_numbers, items))


def _hint_for(value: object) -> str:
    """How to make tensors of `value`; empty where its type does not say."""
    if isinstance(value, np.ndarray):
        return "Pass `torch.from_numpy(...)` of it."
    return "Pass `torch.tensor(...)` of it." if isinstance(value, (list, int, float)) else ""


def _check_targets(targets: tuple[torch.Tensor, ...], loss_fn: LossFn | None, kwargs: dict[str, Any]) -> None:
    if loss_fn is None:
        refuse_if(
            targets,
            "loss_fn",
            None,
            "a function of the output and the targets",
            where="capture",
            hint="Targets are for the loss; what the model itself takes belongs in `inputs`.",
        )
        return
    refuse_if(
        targets and "targets" in kwargs,
        "targets",
        "given",
        "None, as the model has an argument of that name",
        where="capture",
        hint="A placed step could not tell `targets=` of the model from those of the loss: pass all as inputs.",
    )
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # of a builtin: only calling it would tell
        return
    names = loss_fn.names if isinstance(loss_fn, LossByName) else ()
    expected = (
        f"one of the output and of the targets {', '.join(names)}, `loss_fn(output, **targets)`"
        if names
        else f"one of the output and of {len(targets)} targets, `loss_fn(output, *targets)`"
    )
    try:
        signature.bind(None, *(() if names else targets), **dict.fromkeys(names))
    except TypeError as error:
        raise InvalidValue(
            "loss_fn",
            f"a function of ({', '.join(signature.parameters)})",
            expected,
            where="capture",
            hint=f"Labels are passed with `capture(..., targets=...)` ({error}).",
        ) from error


@contextlib.contextmanager
def _uncollected(read: ReadState | None) -> Iterator[None]:
    """While active, Python looks for no cycles among the objects of the trace: all of them stay.

    What traces set themselves is free in the state that they read.
    """
    was_enabled, token = gc.isenabled(), recorded.set(read)
    gc.disable()
    try:
        yield
    finally:
        recorded.reset(token)
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class CapturedModule:
    """A forward with its backward.

    Attributes:
        graph: with its program, whose targets are gradients of outputs, whose result are the outputs.
        with_gradient: positions among the output tensors of those that have one, in the order of the targets.
    """

    graph: OpGraph
    with_gradient: tuple[int, ...]


def capture_module(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    has_backward: bool,
    differentiated: tuple[int, ...] = (),
    frozen: tuple[str, ...] = (),
    split: SplitPlan | None = None,
    check: bool = True,
    read: ReadState | None = None,
) -> CapturedModule:
    """A forward and its backward; where no output has a gradient, the forward alone.

    Args:
        model: the model, in the mode (`train` or `eval`) that the step will use.
        args: positional arguments.
        kwargs: keyword arguments.
        has_backward: whether to add one.
        differentiated: positions among the input tensors of those whose gradients are wanted.
        frozen: attributes that `forward` may change as Python does.
        split: which ops are split into shards, as far as they can be without the loss.
        check: whether it is compared with plain PyTorch, for any gradients of its outputs.
        read: the Python state that later calls compare.

    Raises:
        CaptureError: the model cannot be captured, writes to its inputs, or reads in its backward a tensor that its
            forward has changed since.
    """
    seeds: dict[int, torch.Tensor] = {}
    if has_backward:
        outputs = tensors_in(fake_output(model, args, kwargs, is_training=True, differentiated=differentiated))
        seeds = {k: torch.empty_like(output.detach()) for k, output in enumerate(outputs) if output.requires_grad}
    part = AsModule(tuple(seeds), differentiated) if seeds else None
    given = tuple(seeds.values())
    with _uncollected(read):
        trace = trace_step(model, args, kwargs, None, given, is_training=part is not None, part=part, frozen=frozen)
    if split is not None:
        with contextlib.suppress(CaptureError):
            trace = split_trace(trace, split)
    origin = Origin(model, args, kwargs, None, given, autocast=trace.autocast, is_checked=check, read=read)
    graph = lower(trace, None, origin, is_training=part is not None)
    _check_writes(graph)
    return CapturedModule(checked(graph), tuple(seeds))


def _check_writes(graph: OpGraph) -> None:
    sources = require_program(graph).sources
    for op, tensor in zip(graph.mutation_op.tolist(), graph.mutation_tensor.tolist(), strict=True):
        source = sources[int(graph.tensor_op[tensor])]
        name = graph.names[int(graph.tensor_op[tensor])]
        if source.kind == "input":
            raise CaptureError(
                f"`forward` writes to {name}, expected inputs that stay as they are: a placed module cannot tell "
                f"autograd of the change. Clone the input first (`x = x.clone()`).",
                op=graph.names[op],
            )
        readers = graph.edge_op[graph.input_tensors == tensor]
        late = readers[graph.phases[readers] == BACKWARD].tolist()
        if late:
            raise CaptureError(
                f"the backward (op {graph.names[late[0]]}) reads {name} as it was before `forward` changed it, which a "
                f"placed module does not keep; read a copy in `forward` (`{source.key}.clone()`).",
                op=graph.names[late[0]],
            )
