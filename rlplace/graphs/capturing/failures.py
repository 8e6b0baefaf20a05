"""What a failure of tracing means: which op, where in the user's source, and what to do instead."""

from __future__ import annotations

import contextlib
import logging
import random
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from rlplace.errors import CaptureError

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


@contextlib.contextmanager
def explained(model: nn.Module) -> Iterator[None]:
    """While active, a failure of tracing becomes a `CaptureError` that names the op and the user's line."""
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
        raise CaptureError(
            f"cannot capture the model: {kind}: {message}; op {op or 'unknown'}, in {_module_path(error, model)}, at "
            f"{source or 'an unknown line'}. Hint: {advice}.",
            op=op,
            source=source,
        ) from error
    finally:
        log.disabled = was_disabled


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
