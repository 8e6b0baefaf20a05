"""From a module to an ATen-level fx graph: forward, loss and gradients, with module paths and no mutation.

Where the backward of a traced step begins: at its loss, or at outputs whose gradients are given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError
from rlplace.graphs.capturing.constants import ConstantCheck, annotated, nodes_behind, spread_origins
from rlplace.graphs.capturing.functional import functionalise
from rlplace.graphs.capturing.portable import Statistics, portable, statistics_handed_out, uncompiled
from rlplace.graphs.capturing.refusals import (
    autocast_dtype,
    check_dense,
    check_devices,
    check_dtypes,
    check_model,
    dtype_words,
    explained,
    has_values,
    no_numbers_drawn,
)
from rlplace.graphs.capturing.untouched import (
    check_draws_alike,
    check_steps_alike,
    holding,
    untouched,
    watched_state,
)
from rlplace.graphs.program import CONSTANTS, Folded, Ref, Shard, SplitReport, loss_of, opened, tensors_in, with_tensors
from rlplace.graphs.random_streams import DrawKey, Streams

LossFn = Callable[..., torch.Tensor]
"""Of the model's output, and of the targets where there are any."""


@dataclass(frozen=True)
class Trace:
    """A traced step: placeholders in the order `trainable`, `fixed`, `buffers`, inputs, targets.

    Attributes:
        module: the fx graph module; its output is (results..., gradients...), flat.
        trainable: dotted names of parameters that have a gradient.
        fixed: dotted names of the other parameters.
        buffers: dotted names.
        values: the tensor behind each placeholder.
        num_targets: how many of the last ones are targets.
        result: the results of the model (or the loss), with `Ref(k)` in place of its k-th tensor, for fx's k-th output.
        num_results: how many outputs are the step's result; the rest are gradients of `trainable`.
        autocast: the dtype of the one that was active around the trace.
        norms: batch norms that hand out their statistics: the last outputs are a mean and a variance for each call.
        input_gradients: positions among the input tensors of those whose gradients follow those of `trainable`.
        folded: constants that were read as numbers.
        shards: of parameters that are split: by the name of each shard, which part it is.
        split: what became of the split of the step.
    """

    module: torch.fx.GraphModule
    trainable: tuple[str, ...]
    fixed: tuple[str, ...]
    buffers: tuple[str, ...]
    values: tuple[torch.Tensor, ...]
    num_targets: int
    result: Any
    num_results: int
    autocast: torch.dtype | None
    norms: tuple[str, ...] = ()
    input_gradients: tuple[int, ...] = ()
    folded: tuple[Folded, ...] = ()
    shards: Mapping[str, Shard] = field(default_factory=dict)
    split: SplitReport | None = None


def trace_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: LossFn | None,
    targets: tuple[torch.Tensor, ...] = (),
    *,
    is_training: bool,
    part: AsSlice | AsModule | None = None,
    frozen: Collection[str] = (),
) -> Trace:
    """The step of `model` as an fx graph; every node knows its module path and phase.

    Args:
        model: the model, in the mode (`train` or `eval`) that the step will use.
        args: positional arguments of the model.
        kwargs: keyword arguments.
        loss_fn: of the output and the targets.
        targets: further arguments of the loss.
        is_training: whether there are gradients.
        part: given for the step of one micro-batch of several, and for that of a module whose loss is elsewhere.
        frozen: attributes that the step may change as Python does; they stay as they are.

    Raises:
        CaptureError: control flow or an op that depends on the data; names the op and the user's line. Or a tensor
            from outside of the model, or Python state that changes from step to step; names it.
    """
    check_model(model, is_training=is_training)
    trainable = {name: p for name, p in model.named_parameters() if is_training and p.requires_grad}
    fixed = {name: p for name, p in model.named_parameters() if name not in trainable}
    buffers = dict(model.named_buffers())
    tensors, filled = with_tensors((args, kwargs))
    names = (*trainable, *fixed, *buffers)
    captured: dict[str, Any] = {}
    constants = ConstantCheck(model, loss_fn, (*tensors, *targets), trainable)
    differentiated = part.inputs if isinstance(part, AsModule) else ()

    def step(*flat: torch.Tensor) -> list[torch.Tensor | None]:
        handed_out.clear()
        state = dict(zip(names, flat, strict=False))
        given = flat[len(names) + len(tensors) :]  # targets
        wanted = [*flat[: len(trainable)], *(flat[len(names) + position] for position in differentiated)]
        for value in wanted:
            value.requires_grad_(True)
        call_args, call_kwargs = filled(flat[len(names) :])
        for name, parameter in trainable.items():
            for hook in (parameter._backward_hooks or {}).values():  # they change the gradient
                state[name].register_hook(hook)  # type: ignore[no-untyped-call]
        with fx_traceback.annotate({"phase": "forward"}), constants:
            with holding(model, state):
                output = model(*call_args, **call_kwargs)
            result = opened(output if loss_fn is None else loss_fn(output, *given))
        gradients: Sequence[torch.Tensor | None] = ()
        if is_training:
            ends, seeds = backward_ends(result, list(given), part)
            for end in ends:
                constants.check_gradients(end)
            setup_stacktrace_preservation_hooks([end.grad_fn for end in ends if end.grad_fn is not None])
            with holding(model, state):  # of a forward that runs again
                gradients = gradients_of(ends, wanted, seeds)
            check_dense(tuple(trainable), gradients[: len(trainable)])
        # a forward that runs again replaces buffers again, and hands out statistics again
        replaced = _replaced(dict(zip(names, flat, strict=False)), state, buffers)
        captured["replaced"] = [names.index(name) for name in replaced]
        statistics = _statistics(handed_out, captured)
        return [*_flatten_result(result, captured), *gradients, *statistics, *replaced.values()]

    values = (*trainable.values(), *fixed.values(), *buffers.values(), *tensors, *targets)
    grad_mode = torch.enable_grad() if is_training else torch.no_grad()

    def eagerly(model: nn.Module, loss_fn: LossFn | None) -> None:
        given = [value.detach().clone() for value in (*tensors, *targets)]
        call_args, call_kwargs = filled(given)
        with uncompiled(), grad_mode:
            output = model(*call_args, **call_kwargs)
            if loss_fn is not None:
                loss_fn(output, *given[len(tensors) :])

    mode = _mode_of(values)
    dtypes = dtype_words({"inputs": tensors, "targets": targets, "parameters": [*trainable.values(), *fixed.values()]})

    def make() -> torch.fx.GraphModule:
        twins = [_twin(value, mode) for value in values]
        with fx_traceback.preserve_node_meta(), annotated(model), streams.step():
            return make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*twins)

    streams = Streams(_marked)
    check_devices({**trainable, **fixed, **buffers}, tensors, targets)
    autocast = autocast_dtype(values)
    none: contextlib.AbstractContextManager[list[Statistics]] = contextlib.nullcontext([])
    with (
        statistics_handed_out(model) if isinstance(part, AsSlice) else none as handed_out,
        untouched(model, loss_fn),
        explained(model, loss_fn, eagerly if has_values(values) else None, dtypes),
        portable(model),
        _use_lazy_graph_module(True),  # the code of the graph modules made on the way is never run
        grad_mode,
    ):
        state = watched_state(model, loss_fn)
        with no_numbers_drawn(again=make):
            module = make()
        result = dict(captured)
        check_steps_alike(model, module, make, state, watched_state(model, loss_fn), frozen)
        check_draws_alike(module, make, is_left=streams.is_left)
        captured.update(result)
        check_dtypes(module, make, dtypes)
        spread_origins(module)
        constants.check(module)
        module = functionalise(module, captured["replaced"])
    return Trace(
        module=module,
        trainable=tuple(trainable),
        fixed=tuple(fixed),
        buffers=tuple(buffers),
        values=values,
        num_targets=len(targets),
        result=captured["result"],
        num_results=captured["num_results"],
        autocast=autocast,
        norms=captured["norms"],
        input_gradients=differentiated,
        folded=tuple(constants.folded(module)),
    )


def _marked(key: DrawKey, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a random op, whose node knows which draw it is."""
    with fx_traceback.annotate({"draw": key}):
        return func(*args, **kwargs)


_kept: ContextVar[dict[Hashable, tuple[nn.Module, Trace]] | None] = ContextVar("kept", default=None)


@contextlib.contextmanager
def kept_traces() -> Iterator[None]:
    """Inside, steps are tried: those that are split in several ways are traced once, and none is compared with plain
    PyTorch. Their models and inputs have to stay as they are."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def are_tried() -> bool:
    """Whether steps are only tried now, inside of `kept_traces`."""
    return _kept.get() is not None


def trace_once(model: nn.Module, about: Hashable, make: Callable[[], Trace]) -> Trace:
    """The trace of a step of `model` that `make` makes; inside `kept_traces` the first one that is alike.

    Args:
        model: the model.
        about: equal for steps of it that are alike.
        make: traces one.
    """
    kept = _kept.get()
    if kept is None:
        return make()
    if (id(model), about) not in kept:
        kept[id(model), about] = model, make()
    return kept[id(model), about][1]


def _replaced(
    before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], buffers: Collection[str]
) -> dict[str, torch.Tensor]:
    """The new values of buffers that `forward` replaced (`self.mean = ...`)."""
    replaced = {}
    for name in [name for name in before if after[name] is not before[name]]:
        if name not in buffers:
            raise CaptureError(
                f"`forward` replaces parameter {name!r} by another one, which placed steps would not take. Write the "
                f"new values in place (`with torch.no_grad(): {name}.copy_(...)`), or make it a buffer."
            )
        old, new = before[name], after[name]
        if not isinstance(new, torch.Tensor) or (new.shape, new.dtype) != (old.shape, old.dtype):
            found = f"{new.dtype} {tuple(new.shape)}" if isinstance(new, torch.Tensor) else type(new).__name__
            raise CaptureError(
                f"`forward` replaced buffer {name!r} by a {found}, expected {old.dtype} {tuple(old.shape)} as before; "
                f"keep its shape and dtype, or keep the value in a plain attribute."
            )
        replaced[name] = new.detach()
    return replaced


def _statistics(handed_out: Iterable[Statistics], captured: dict[str, Any]) -> list[torch.Tensor]:
    """A mean and a variance for each call of a batch norm that hands out its own."""
    captured["norms"] = tuple(path for path, *_ in handed_out)
    return [value.detach() for _, *values in handed_out for value in values]


def _flatten_result(result: Any, captured: dict[str, Any]) -> list[torch.Tensor | None]:
    leaves, spec = pytree.tree_flatten(result)
    tensors: list[torch.Tensor | None] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[position] = Ref(len(tensors))
            tensors.append(leaf.detach())
        elif not isinstance(leaf, CONSTANTS):
            raise CaptureError(
                f"the model returned a {type(leaf).__name__} ({leaf!r}) among its outputs, expected tensors and plain "
                f"constants; return tensors, or wrap the model in one that does."
            )
    captured["result"], captured["num_results"] = pytree.tree_unflatten(leaves, spec), len(tensors)
    return tensors


def fakes(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Fake twins without symbols: code that depends on data then fails where it happens, on the user's own line."""
    mode = _mode_of(values)
    return [_twin(value, mode) for value in values]


def _mode_of(values: Iterable[torch.Tensor]) -> FakeTensorMode:
    own = (value.fake_mode for value in values if isinstance(value, FakeTensor))
    return detect_fake_mode() or next(own, None) or FakeTensorMode(allow_non_fake_inputs=True)


def _twin(value: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    if not isinstance(value, FakeTensor) and not value.is_inference():
        return mode.from_tensor(value.detach(), static_shapes=True)
    if isinstance(value, FakeTensor) and value.fake_mode is mode:
        return value.detach()
    # an inference tensor could not be saved for the backward; and `copy.deepcopy` of a fake tensor copies its mode too,
    # as `nn.TransformerEncoder` does with its layers
    with mode:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


@dataclass(frozen=True)
class AsModule:
    """How the step of a module differs from one with a loss: the gradients of its outputs are given, as targets.

    Attributes:
        outputs: positions, among the tensors that the model returns, of those whose gradients are given.
        inputs: positions, among the input tensors, of those whose gradients are wanted.
    """

    outputs: tuple[int, ...]
    inputs: tuple[int, ...] = ()


@dataclass(frozen=True)
class AsSlice:
    """How the step of one micro-batch differs from a whole one; its batch norms hand out their statistics.

    Attributes:
        weight: the gradient of its loss: a constant, so that no backward waits for a loss. None where it has no loss
            of its own.
        outputs: the tensors among the model's outputs that have a gradient, which is given in place of targets; of a
            training step without a loss of its own.
    """

    weight: float | None = None
    outputs: tuple[int, ...] = ()


def backward_ends(
    result: Any, given: list[torch.Tensor], part: AsSlice | AsModule | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Where the backward of a traced step begins, and with which gradients.

    Args:
        result: the results of the model (or the loss).
        given: the gradients of outputs that `part` takes as given.
        part: of a micro-batch or a module; None for a whole step with a loss.

    Raises:
        CaptureError: the loss is no scalar, or depends on no parameter; or that of a micro-batch is more than the loss.
    """
    if part is None:
        loss = _check_loss(loss_of(result))
        with fx_traceback.annotate({"seed": True}):
            return [loss], [torch.ones_like(loss, memory_format=torch.preserve_format)]
    if isinstance(part, AsSlice) and part.weight is not None:
        loss = _check_loss(check_alone(result))
        with fx_traceback.annotate({"seed": True}):
            return [loss], [torch.full(loss.shape, part.weight, dtype=loss.dtype, device=loss.device)]
    return [tensors_in(result)[position] for position in part.outputs], given


def gradients_of(
    ends: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor | None] | None
) -> Sequence[torch.Tensor | None]:
    """Gradients of `ends`, given their own, as `.backward()` leaves them in `wanted`; None where it leaves none.

    A Function of the user's, and a reentrant checkpoint, may run a backward of its own on the side: `autograd.grad`
    skips those that no wanted tensor is behind, and refuses or loses what they leave.
    """
    if not any(map(_is_of_user, (node for end in ends for node in nodes_behind(end)))):
        return torch.autograd.grad(ends, wanted, seeds, allow_unused=True)
    torch.autograd.backward(ends, seeds)
    found = [value.grad for value in wanted]
    for value in wanted:
        value.grad = None
    return found


def _is_of_user(node: object) -> bool:
    """Whether a node of autograd runs a Function that is not ours: our attention has no backward of its own."""
    is_function = isinstance(node, BackwardCFunction)
    return is_function and not getattr(type(node), "_forward_cls", object).__module__.startswith("rlplace.")


def check_alone(returned: Any) -> Any:
    """The result of a loss function for micro-batches, if it is the loss alone.

    Raises:
        CaptureError: it is.
    """
    if isinstance(returned, (list, tuple)):
        raise CaptureError(
            f"the loss function returned a {type(returned).__name__}, expected the loss alone: what else it returns "
            f"belongs to the whole batch, which micro-batches do not see. Return the loss alone, or capture with "
            f"micro_batches=1."
        )
    return returned


def _check_loss(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise CaptureError(
            f"the loss is {shape}, expected a scalar tensor, or a tuple that begins with one; reduce it (`.mean()`) in "
            f"`loss_fn`."
        )
    if loss.grad_fn is None:
        raise CaptureError(
            "the loss does not depend on any parameter that requires a gradient; unfreeze one, or capture inference "
            "(leave `loss_fn` out)."
        )
    return loss
