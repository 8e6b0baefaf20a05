"""Checks before, around and after a trace: models, tensors and random draws that no graph can hold are refused.

Failures of tracing as errors that name the op, the line in the user's source, and an alternative.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import random
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

from rlplace.errors import CaptureError, UserError

MOST_NAMED = 8
"""Hooks that a warning names."""


def check_model(model: nn.Module, *, is_training: bool) -> None:
    """Refuses modules that no trace goes through, or that have no shape yet.

    Raises:
        CaptureError: names the module and the right argument.
    """
    for path, module in model.named_modules():
        place = f"module {path}" if path else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            wrong, instead = "is a ScriptModule", "pass the module that it was scripted from"
        elif isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            wrong, instead = f"is a {type(module).__name__}", "pass what it wraps, its `module`"
        elif any(map(nn.parameter.is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False)))):
            wrong, instead = "has lazy parameters without a shape", "call the model once with its inputs first"
        elif is_training and any(
            parameter._post_accumulate_grad_hooks for parameter in module.parameters(recurse=False)
        ):
            wrong = "has parameters with post-accumulate hooks, which would not run"
            instead = "use `register_hook` for what changes a gradient, and an update of ours (`optimizer=...`)"
        else:
            continue
        raise CaptureError(f"cannot capture the model: {place} ({type(module).__name__}) {wrong}; {instead}.")


def warn_of_hooks(model: nn.Module) -> None:
    """Warns of hooks of modules, but for PyTorch's own: they run in captures, and never in a placed step."""
    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    found = [
        f"{path or 'the root'}: {kind} hook {getattr(hook, '__qualname__', type(hook).__name__)}"
        for path, module in model.named_modules()
        for kind in kinds
        for hook in getattr(module, f"_{kind}_hooks").values()
        if not (getattr(hook, "__module__", None) or "").startswith("torch.")
    ]
    if found:
        warnings.warn(
            "hooks of modules run while a step is captured, with tensors that have no values, and never in a placed "
            "step: what they compute is part of the graph, what they record or print is not. "
            f"{'; '.join(found[:MOST_NAMED])}{f'; and {len(found) - MOST_NAMED} more' * (len(found) > MOST_NAMED)}",
            RuntimeWarning,
            stacklevel=3,
        )


def check_devices(
    state: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor] = ()
) -> None:
    """Refuses models that are spread over devices, on `meta`, or elsewhere than their inputs and targets.

    Raises:
        CaptureError: names one tensor of each device.
    """
    named = {
        **state,
        **{f"input {k}": tensor for k, tensor in enumerate(inputs)},
        **{f"target {k}": tensor for k, tensor in enumerate(targets)},
    }
    first: dict[torch.device, str] = {}
    for name, tensor in named.items():
        if tensor.layout is not torch.strided:
            raise CaptureError(
                f"{name} is a sparse tensor ({tensor.layout}), expected dense ones; densify it before (`.to_dense()`)."
            )
        if tensor.dim() or tensor.device.type != "cpu":  # a scalar on the CPU goes with any device
            first.setdefault(tensor.device, name)
    for device, name in first.items():
        if device.type == "meta":
            raise CaptureError(
                f"{name} is on device meta, expected tensors of a real device; build the model and its inputs under "
                f"`torch._subclasses.fake_tensor.FakeTensorMode()` to capture without allocating."
            )
    if len(first) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in first.items())
        raise CaptureError(
            f"the model and its inputs are on {len(first)} devices ({places}), expected one; move them to one device, "
            f"placing them is our part."
        )


def autocast_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype | None:
    """The dtype of the autocast that is active for the device of `tensors`, None without one.

    Raises:
        CaptureError: one is active for another device, where it changes nothing.
    """
    place = next((tensor.device.type for tensor in tensors), "cpu")
    for kind in ("cpu", "cuda"):
        if kind != place and torch.is_autocast_enabled(kind):
            raise CaptureError(
                f'`torch.autocast("{kind}")` is active around the capture of a model on device {place}, where it casts '
                f'nothing; use `torch.autocast("{place}", dtype=...)`, whose casts are captured and run wherever they '
                f"are placed, or make the model one of low precision (`.to(torch.bfloat16)`)."
            )
    return torch.get_autocast_dtype(place) if torch.is_autocast_enabled(place) else None


def check_dense(names: Sequence[str], gradients: Sequence[torch.Tensor | None]) -> None:
    """Refuses sparse gradients.

    Raises:
        CaptureError: names the parameter.
    """
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            raise CaptureError(
                f"the gradient of parameter {name!r} is sparse ({gradient.layout}), expected a dense one: updates and "
                f"transfers are of dense tensors; pass `sparse=False` to its embedding."
            )


class _Found(BaseException):
    """Raised at the line that is looked for."""


@contextlib.contextmanager
def no_numbers_drawn(again: Callable[[], object]) -> Iterator[None]:
    """Refuses code that draws from Python's or NumPy's own generator: the graph would hold the same draw for ever.

    Args:
        again: runs the watched code again, to find the line that draws.

    Raises:
        CaptureError: something was drawn; both generators are as they were before.
    """
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    finally:
        now, before = np.random.get_state(legacy=False)["state"], numpy["state"]
        is_of_numpy = now["pos"] != before["pos"] or not np.array_equal(now["key"], before["key"])
        drawn = "Python" if random.getstate() != python else "NumPy" if is_of_numpy else ""
        random.setstate(python)
        np.random.set_state(numpy)
    if failure is not None and not (drawn and re.search(_DEPENDENT, type(failure).__name__)):
        raise failure
    if not drawn:
        return
    source, settings, profile = "", "", sys.getprofile()
    try:
        sys.setprofile(functools.partial(_raise_on_draw, numpy["state"]["pos"]))
        again()
    except (_Found, Exception) as error:
        source, settings = user_line(error), _read_there(error)
    finally:
        sys.setprofile(profile)
        random.setstate(python)
        np.random.set_state(numpy)
    raise CaptureError(
        f"cannot capture the model: it draws from {drawn}'s random generator, at {source or 'an unknown line'}. Every "
        f"step would repeat that one draw. Hint: draw with torch (`torch.rand`), which is part of the graph and seeded "
        f"for every step, or draw outside and pass the number as an argument{settings}.",
        source=source,
    ) from failure


def _raise_on_draw(before: int, _: FrameType, event: str, called: Any) -> None:
    """Of Python's generator as it is called, of NumPy's, whose calls no profiler sees, by where its state is then."""
    is_of_python = event == "c_call" and getattr(called, "__self__", None) is random._inst
    if is_of_python or np.random.get_state(legacy=False)["state"]["pos"] != before:
        sys.setprofile(None)
        raise _Found


aten = torch.ops.aten

_DEPENDENT = r"DataDependent|DynamicOutputShape"
_ADVICE = (
    (
        r"_pack_padded_sequence",
        "how a sequence is packed depends on the lengths of each batch; run the layer on the padded tensor, and mask "
        "what it returns for the padding",
    ),
    (
        r"_ctc_loss",
        "how much CTC keeps depends on the lengths of the labels; capture with another loss of the same outputs "
        "(`output.logits.mean()`) and train the placed module of it (`rlplace.export.to_module`), whose loss is "
        "computed outside",
    ),
    (
        _DEPENDENT,
        "what runs there depends on the values of tensors, which a graph cannot hold; compute it with tensor ops "
        "(torch.where, masks), or pass it as a plain argument",
    ),
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
        "write to a parameter under `torch.no_grad()`, keep what `forward` changes in a buffer (`register_buffer`), or "
        "compute a new tensor",
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
_DTYPES = (
    r"dtype|scalar type|same type|Integral inputs|predicate to be bool|LongTensor|data type|Input type|used as indices"
)
MOST_PARAMETERS = 1 << 26
"""Larger models are not copied to see whether they raise by themselves."""

Step = Callable[[nn.Module, Callable[..., Any] | None], object]
"""Runs a model and its loss, without a backward, on the arguments of the capture."""


def dtype_words(named: Mapping[str, Sequence[torch.Tensor]]) -> str:
    """How to get dtypes right: of inputs, targets and parameters, and how to cast them.

    Args:
        named: the tensors of each kind.
    """
    dtypes = {name: dict.fromkeys(str(each.dtype).removeprefix("torch.") for each in named[name]) for name in named}
    kinds = [f"{name} {', '.join(found)}" for name, found in dtypes.items() if found]
    return (
        f"now {'; '.join(kinds)}: cast them (`.long()` for indices and labels of classes, `.float()`, or whatever the "
        f"parameters are, for values)"
    )


def check_dtypes(module: GraphModule, again: Callable[[], object], advice: str) -> None:
    """Refuses ops whose dtypes differ in ways that fake tensors let pass and real ones do not.

    Args:
        module: as traced.
        again: traces once more, to find the user's line.
        advice: the remedy.

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
        except _Found as error:
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
            raise _Found
        return func(*args, **(kwargs or {}))


_PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.mv.default,
    aten.dot.default,
}
_NORMS = {aten.native_layer_norm.default: 2, aten.native_batch_norm.default: 1, aten.native_group_norm.default: 1}
"""With the position of their weight."""


def _wrong_dtypes(op: Any, values: Sequence[Any]) -> str:
    """The dtypes that an op does not take, in words; "" where all are right."""
    if op in _PRODUCTS:
        found = {value.dtype: None for value in values if isinstance(value, torch.Tensor)}
        return "" if len(found) < 2 else f"tensors of {' and '.join(map(str, found))}, expected one dtype"
    if op in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default):
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
        dtypes: the remedy where dtypes differ.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")  # it prints the traceback of what is raised all the same
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        kind, message = type(error).__name__, str(error).splitlines()[0] if str(error) else ""
        message = message if len(message) <= 300 else f"{message[:300]}..."
        dependent = re.search(_DEPENDENT, kind) is not None
        op = str(getattr(error, "func", "") or ("aten._local_scalar_dense" if dependent else ""))
        source = user_line(error)
        advice = next((text for pattern, text in _ADVICE if re.search(pattern, f"{kind}: {message}")), _RUN_EAGERLY)
        files = (Path(frame.f_code.co_filename).as_posix() for frame, _ in traceback.walk_tb(error.__traceback__))
        if dependent and any("torch/distributions/" in file for file in files):
            advice = (
                "`torch.distributions` checks its arguments, which reads their values; pass it `validate_args=False`"
            )
        elif dependent:
            advice += _read_there(error, model)
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


def has_values(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether there is memory behind all of them: none is fake or on `meta`."""
    return not any(isinstance(each, FakeTensor) or each.is_meta for each in tensors)


def _raised_by(model: nn.Module, loss_fn: Callable[..., Any] | None, eagerly: Step) -> Exception | None:
    """The error of a copy of the model and its loss; None where it runs, or cannot be copied."""
    held = [*model.parameters(), *model.buffers()]
    if not has_values(held) or sum(each.numel() for each in held) > MOST_PARAMETERS:
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


def _calling_line() -> str:
    """The line that called rlplace from Python; unknown on the command line."""
    package = str(Path(__file__).parents[2])
    frames = traceback.extract_stack()
    if any(frame.filename.startswith(f"{package}/cli/") for frame in frames):
        return "an unknown line"
    outside = traceback.StackSummary.from_list([each for each in frames if not each.filename.startswith(package)])
    return line_of_user(outside) or "an unknown line"


_DRAWS = {"rand", "rand_like", "randint", "random", "uniform", "uniform_", "bernoulli", "bernoulli_"}


def _read_there(error: BaseException, model: nn.Module | None = None) -> str:
    """What the failing code of a module reads that decides whether it fails, and what to do about it.

    An input of the model, by the words of the line; where numbers are drawn, switches and probabilities (LayerDrop,
    SpecAugment).
    """
    places = traceback.walk_tb(error.__traceback__)
    found = [each for each in places if isinstance(each[0].f_locals.get("self"), nn.Module)]
    if not found:
        return ""
    (frame, line), owner = found[-1], found[-1][0].f_locals["self"]
    place, _, text = user_line(error).partition(" in ")
    if owner is model and place == f"{frame.f_code.co_filename}:{line}":
        words = re.findall(r"\w+", text)
        if read := [f"`{name}`" for name in inspect.signature(model.forward).parameters if name in words]:
            return f"; leave {', '.join(read)} out of the inputs, and compute what needs it in `loss_fn`, or outside"
    holders = {"self.config": getattr(owner, "config", None), "self": owner}
    settings = [
        f"`{name}.{key}` ({value})"
        for name, holder in holders.items()
        for key in frame.f_code.co_names
        if key != "training" and isinstance(value := getattr(holder, "__dict__", {}).get(key), (bool, float)) and value
    ]
    is_drawn = isinstance(error, _Found) or _DRAWS.intersection(frame.f_code.co_names)
    return f"; it reads {', '.join(settings)}: 0 or False turns it off" if is_drawn and settings else ""


def _module_path(error: BaseException, model: nn.Module) -> str:
    """The innermost module that was running."""
    paths = {id(module): path for path, module in model.named_modules()}
    running = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [each for each in running if isinstance(each, nn.Module) and paths.get(id(each))]
    return f"module {paths[id(found[-1])]} ({type(found[-1]).__name__})" if found else "the root module"


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
    own = (each for each in reversed(frames) if not each.filename.startswith(foreign))
    return next((f"{each.filename}:{each.lineno} in {each.name}: {each.line}" for each in own), "")


@functools.lru_cache(maxsize=1 << 14)
def is_installed(name: str | None) -> bool:
    """Whether a module of Python's comes with a package, whose code and globals nobody changes."""
    return str(name).partition(".")[0] in sys.stdlib_module_names | {"torch", "numpy", "rlplace"} or (
        "-packages" in str(vars(sys.modules.get(str(name), sys)).get("__file__"))
    )
