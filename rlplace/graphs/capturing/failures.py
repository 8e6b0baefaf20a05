"""What a failure of tracing means: which op, where in the user's source, and what to do instead."""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

from rlplace.errors import CaptureError

aten = torch.ops.aten

_DEPENDS_ON_DATA = (
    "what runs there depends on the values of tensors, which a graph cannot hold; compute it with tensor ops "
    "(torch.where, masks), or pass it as a plain argument"
)
_DEPENDENT = r"DataDependent|DynamicOutputShape"
_ADVICE = (
    (
        r"_pack_padded_sequence",
        "how a sequence is packed depends on the lengths of each batch; run the layer on the padded tensor, and mask "
        "what it returns for the padding",
    ),
    (_DEPENDENT, _DEPENDS_ON_DATA),
    (
        r"\.numpy\(\)|__format__|can't convert",
        "the values of tensors are not there while a graph is made; keep to tensor ops, and print or convert what the "
        "step returns",
    ),
    (
        r"no fake impl|abstract impl|UnsupportedOperator|fake tensor.*support",
        "tracing runs ops on fake tensors, without values; say what this op returns (shapes, dtypes) with its "
        "`register_fake`",
    ),
    (
        r"no autograd formula|autograd kernel was not registered|derivative for .* is not implemented",
        "the loss goes through this op; say how to differentiate it with `torch.library.register_autograd`, or capture "
        "inference (leave `loss_fn` out)",
    ),
    (
        r"alias annotations|mutates_args",
        "a custom op must return new tensors instead of writing to its arguments (`mutates_args=()`); write what it "
        "returns into a buffer afterwards (`buffer.copy_(...)`)",
    ),
    (
        r"leaf Variable|leaf variable",
        "parameters change in the optimizer's update only; keep what `forward` changes in a buffer "
        "(`register_buffer`), or compute a new tensor",
    ),
    (
        r"modified by an inplace operation",
        "the backward needs a value that an in-place op has overwritten, eagerly too; use the op's out-of-place form "
        "(`inplace=False`)",
    ),
    (
        r"Expected more than 1 value per channel",
        "batch norm in training needs two samples or more in every micro-batch: fewer micro-batches or a larger batch; "
        "for the last batch of an epoch `drop_last=True` in the `DataLoader`, or `other_shapes='eager'`",
    ),
    (
        r"dynamo|torch\.compile",
        "drop the decorator `@torch.compile` (`torch.compile(...)`): rlplace places the ops itself",
    ),
    (r"same device|DeviceMismatch", "move the model and its inputs to one device; placing them is our part"),
    (
        r"backward through the graph a second time",
        "`forward` and `loss_fn` must not call `backward`; return the loss",
    ),
)
_RUN_EAGERLY = "run the model eagerly with the same inputs first; if that works, move this code out of the model"
_OF_DISTRIBUTIONS = (
    "`torch.distributions` checks its arguments, which reads their values; pass it `validate_args=False`"
)
_DTYPES = (
    r"dtype|scalar type|same type|Integral inputs|predicate to be bool|LongTensor|data type|Input type|used as indices"
)
MOST_PARAMETERS = 1 << 26
"""Larger models are not copied to see whether they raise by themselves."""

Step = Callable[[nn.Module, Callable[..., Any] | None], object]
"""Runs a model and its loss, without a backward, on what the step is captured with."""


class _Wrong(Exception):
    """An op that is given tensors of dtypes that it does not take."""


def dtype_words(named: Mapping[str, Sequence[torch.Tensor]]) -> str:
    """How to get dtypes right: what they are of inputs, targets and parameters, and how to cast.

    Args:
        named: the tensors of each kind.
    """
    kinds = []
    for name, tensors in named.items():
        dtypes = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        kinds += [f"{name} {', '.join(dtypes)}"] if dtypes else []
    return (
        f"now {'; '.join(kinds)}: cast them (`.long()` for indices and labels of classes, `.float()`, or whatever the "
        f"parameters are, for values)"
    )


def check_dtypes(module: GraphModule, again: Callable[[], object], advice: str) -> None:
    """Refuses ops whose dtypes differ in ways that fake tensors let pass and real ones do not.

    Args:
        module: as traced.
        again: traces once more, to find the user's line.
        advice: what to do.

    Raises:
        CaptureError: names the op, its dtypes and the line.
    """
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        values = [each.meta.get("val") if isinstance(each, Node) else each for each in node.args]
        if not (wrong := _wrong_dtypes(node.target, values)):
            continue
        source = ""
        try:
            with _RaiseOnWrong():  # type: ignore[no-untyped-call]
                again()
        except _Wrong as error:
            source = user_line(error)
        except Exception:  # of a function that takes no other mode: the line stays unknown
            pass
        raise CaptureError(
            f"cannot capture the model: op {node.target} takes {wrong}, at {source or _calling_line()}. Hint: "
            f"{advice}.",
            op=str(node.target),
            source=source,
        )


class _RaiseOnWrong(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, the first op with wrong dtypes raises where the user calls it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _wrong_dtypes(func, args):
            raise _Wrong
        return func(*args, **(kwargs or {}))


_PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.mv.default,
    aten.dot.default,
}
_LABELLED = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
_NORMS = {aten.native_layer_norm.default: 2, aten.native_batch_norm.default: 1, aten.native_group_norm.default: 1}
"""With the position of their weight."""


def _wrong_dtypes(op: Any, values: Sequence[Any]) -> str:
    """The dtypes that an op does not take, in words; "" where all are right."""
    if op in _PRODUCTS:
        found = {value.dtype: None for value in values if isinstance(value, torch.Tensor)}
        return "" if len(found) < 2 else f"tensors of {' and '.join(map(str, found))}, expected one dtype"
    if op in _LABELLED:
        right = values[1].dtype in (torch.int64, torch.uint8)
        return "" if right else f"labels of {values[1].dtype}, expected torch.int64"
    if op is aten.binary_cross_entropy.default:
        right = values[0].dtype == values[1].dtype
        return "" if right else f"targets of {values[1].dtype}, expected {values[0].dtype} as the output is"
    weight = values[_NORMS[op]] if op in _NORMS else None
    if not isinstance(weight, torch.Tensor) or values[0].dtype in (weight.dtype, torch.bfloat16, torch.float16):
        return ""
    return f"inputs of {values[0].dtype} and weights of {weight.dtype}, expected one dtype"


@contextlib.contextmanager
def explained(
    model: nn.Module, loss_fn: Callable[..., Any] | None = None, eagerly: Step | None = None, dtypes: str = ""
) -> Iterator[None]:
    """While active, a failure of tracing becomes a `CaptureError` that names the op and the user's line.

    Args:
        model: that is traced.
        loss_fn: of its output.
        eagerly: runs a copy of both, to see whether they fail by themselves; None where that cannot be.
        dtypes: what to do where dtypes differ.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")  # it prints the traceback of what is raised all the same
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        kind, message = type(error).__name__, str(error).splitlines()[0] if str(error) else ""
        message = message if len(message) <= 300 else f"{message[:300]}..."
        dependent = re.search(_DEPENDENT, kind) is not None
        op = str(getattr(error, "func", "") or ("aten._local_scalar_dense" if dependent else ""))
        source = user_line(error)
        advice = next((text for pattern, text in _ADVICE if re.search(pattern, f"{kind}: {message}")), _RUN_EAGERLY)
        if dependent and any("torch/distributions/" in frame for frame in _files(error)):
            advice = _OF_DISTRIBUTIONS
        what = f"cannot capture the model: {kind}: {message}"
        if advice is _RUN_EAGERLY:
            own = None if eagerly is None else _raised_by(model, loss_fn, eagerly)
            advice = dtypes if dtypes and re.search(_DTYPES, message) else _RUN_EAGERLY
            if own is not None:
                first = str(own).splitlines()[0][:300] if str(own) else ""
                what = f"the model or its loss raises by itself, in eager as well: {type(own).__name__}: {first}"
                source = user_line(own) or source
                advice = "correct it there, or what it is given" if advice is _RUN_EAGERLY else advice
        raise CaptureError(
            f"{what}; op {op or 'unknown'}, in {_module_path(error, model)}, at {source or _calling_line()}. "
            f"Hint: {advice}.",
            op=op,
            source=source,
        ) from error
    finally:
        log.disabled = was_disabled


def _raised_by(model: nn.Module, loss_fn: Callable[..., Any] | None, eagerly: Step) -> Exception | None:
    """What a copy of the model and its loss raises; None where it runs, or cannot be copied."""
    held = [*model.parameters(), *model.buffers()]
    if any(isinstance(each, FakeTensor) or each.is_meta for each in held):
        return None
    if sum(each.numel() for each in held) > MOST_PARAMETERS:
        return None
    try:
        copies = copy.deepcopy((model, loss_fn))
    except Exception:  # of the user's objects
        return None
    devices = sorted({each.device.index for each in held if each.is_cuda})
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            eagerly(*copies)
        except Exception as error:
            return error
    return None


def _files(error: BaseException) -> Iterator[str]:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield Path(frame.f_code.co_filename).as_posix()


def _calling_line() -> str:
    """The line that called rlplace from Python; unknown on the command line."""
    package = str(Path(__file__).parents[2])
    frames = traceback.extract_stack()
    if any(frame.filename.startswith(f"{package}/cli/") for frame in frames):
        return "an unknown line"
    outside = traceback.StackSummary.from_list([each for each in frames if not each.filename.startswith(package)])
    return line_of_user(outside) or "an unknown line"


def _module_path(error: BaseException, model: nn.Module) -> str:
    """The innermost module that was running."""
    paths = {id(module): path for path, module in model.named_modules()}
    found = "the root module"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        running = frame.f_locals.get("self")
        if isinstance(running, nn.Module) and paths.get(id(running)):
            found = f"module {paths[id(running)]} ({type(running).__name__})"
    return found


def user_line(error: BaseException) -> str:
    """The innermost line of the traceback that is neither ours nor PyTorch's nor Python's, "" without one."""
    return line_of_user(traceback.extract_tb(error.__traceback__))


def line_of_user(frames: traceback.StackSummary) -> str:
    """The innermost line that is neither ours nor PyTorch's nor Python's, "" without one."""
    foreign = (
        str(Path(__file__).parents[1]),
        str(Path(torch.__file__).parent),
        random.__file__,
        contextlib.__file__,
        "<",
    )
    for frame in reversed(frames):
        if not frame.filename.startswith(foreign):
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return ""
