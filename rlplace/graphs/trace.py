"""From a module to an ATen-level fx graph: forward, loss and gradients, with module paths and no mutation."""

from __future__ import annotations

import contextlib
import gc
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError
from rlplace.graphs.functional import functionalise

LossFn = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Trace:
    """A traced step: placeholders in the order `trainable`, `fixed`, `buffers`, `inputs`.

    Attributes:
        module: the fx graph module; its output is (results..., gradients...), flat.
        trainable: dotted names of parameters that have a gradient.
        fixed: dotted names of the other parameters.
        buffers: dotted names.
        values: the tensor behind each placeholder.
        result: what the model (or the loss) returned, with fx's k-th output in place of its k-th tensor.
        num_results: how many outputs are the step's result; the rest are gradients of `trainable`.
    """

    module: torch.fx.GraphModule
    trainable: tuple[str, ...]
    fixed: tuple[str, ...]
    buffers: tuple[str, ...]
    values: tuple[torch.Tensor, ...]
    result: Any
    num_results: int


@dataclass(frozen=True)
class Output:
    """Stands in a traced result for the `index`-th output of the fx graph."""

    index: int


def trace_step(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss_fn: LossFn | None, *, is_training: bool
) -> Trace:
    """The step of `model` as an fx graph; every node knows its module path and phase.

    Raises:
        CaptureError: control flow or an op that depends on the data; names the op and the user's line.
    """
    trainable = {name: p for name, p in model.named_parameters() if is_training and p.requires_grad}
    fixed = {name: p for name, p in model.named_parameters() if name not in trainable}
    buffers = dict(model.named_buffers())
    flat_inputs, input_spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in flat_inputs if isinstance(leaf, torch.Tensor)]
    names = (*trainable, *fixed, *buffers)
    captured: dict[str, Any] = {}

    def step(*flat: torch.Tensor) -> list[torch.Tensor | None]:
        state = dict(zip(names, flat, strict=False))
        inputs = iter(flat[len(names) :])
        leaves = [next(inputs) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat_inputs]
        call_args, call_kwargs = pytree.tree_unflatten(leaves, input_spec)
        if is_training:
            for name in trainable:
                state[name].requires_grad_(True)
        with fx_traceback.annotate({"phase": "forward"}):
            output = torch.func.functional_call(model, state, call_args, call_kwargs)
            _store_replaced(dict(zip(names, flat, strict=False)), state, buffers)
            result = output if loss_fn is None else loss_fn(output)
        if not is_training:
            return _flatten_result(result, captured)
        loss = _check_loss(result)
        setup_stacktrace_preservation_hooks([loss.grad_fn])  # type: ignore[list-item]
        gradients = torch.autograd.grad(loss, flat[: len(trainable)], allow_unused=True)
        return [*_flatten_result(loss, captured), *gradients]

    values = (*trainable.values(), *fixed.values(), *buffers.values(), *tensors)
    grad_mode = torch.enable_grad() if is_training else torch.no_grad()
    with _untouched(model), _annotated(model), _translated(model), _portable(), _uncollected(), grad_mode:
        with fx_traceback.preserve_node_meta(), _use_lazy_graph_module(True):
            module = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*_fakes(values))
        _spread_origins(module)
        module = functionalise(module)
    return Trace(
        module=module,
        trainable=tuple(trainable),
        fixed=tuple(fixed),
        buffers=tuple(buffers),
        values=values,
        result=captured["result"],
        num_results=captured["num_results"],
    )


def _store_replaced(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], buffers: Iterable[str]) -> None:
    """Buffers that `forward` replaced (`self.mean = ...`) are written where they live."""
    replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name in buffers:
        old, new = before[name], after[name]
        if new is old:
            continue
        if not isinstance(new, torch.Tensor) or (new.shape, new.dtype) != (old.shape, old.dtype):
            found = f"{new.dtype} {tuple(new.shape)}" if isinstance(new, torch.Tensor) else type(new).__name__
            raise CaptureError(
                f"`forward` replaced buffer {name!r} by a {found}, expected {old.dtype} {tuple(old.shape)} as before; "
                f"keep its shape and dtype, or keep the value in a plain attribute."
            )
        # a buffer that another one takes over is read before it is written
        replaced.append((old, new.clone() if any(new is other for other in before.values()) else new))
    with torch.no_grad():
        for old, new in replaced:
            old.copy_(new)


def _flatten_result(result: Any, captured: dict[str, Any]) -> list[torch.Tensor | None]:
    leaves, spec = pytree.tree_flatten(result)
    tensors: list[torch.Tensor | None] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[position] = Output(len(tensors))
            tensors.append(leaf.detach())
        elif not isinstance(leaf, (bool, int, float, str, type(None))):
            raise CaptureError(
                f"the model returned a {type(leaf).__name__} ({leaf!r}) among its outputs, expected tensors and plain "
                f"constants; return tensors, or wrap the model in one that does."
            )
    captured["result"], captured["num_results"] = pytree.tree_unflatten(leaves, spec), len(tensors)
    return tensors


def _check_loss(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise CaptureError(f"the loss is {shape}, expected a scalar tensor; reduce it (`.mean()`) in `loss_fn`.")
    if loss.grad_fn is None:
        raise CaptureError(
            "the loss does not depend on any parameter that requires a gradient; unfreeze one, or capture inference "
            "(leave `loss_fn` out)."
        )
    return loss


def _fakes(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Fake twins without symbols: whatever depends on data then fails where it happens, on the user's own line."""
    mode = detect_fake_mode(values) or FakeTensorMode(allow_non_fake_inputs=True)
    return [
        value.detach() if isinstance(value, FakeTensor) else mode.from_tensor(value.detach(), static_shapes=True)
        for value in values
    ]


@contextlib.contextmanager
def _portable() -> Iterator[None]:
    """While active, attention and recurrent layers come apart into ops that every backend has and can be placed."""
    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """While active, Python looks for no cycles among the objects of the trace: all of them stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Afterwards attributes that `forward` set (a cache, a counter) are what they were: they hold traced values."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)


@contextlib.contextmanager
def _annotated(model: nn.Module) -> Iterator[None]:
    """While active, every traced op carries the dotted path of the innermost module that called it."""
    entered: list[contextlib.AbstractContextManager[Any]] = []
    handles = []

    def enter(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            context = fx_traceback.annotate({"module": path})
            context.__enter__()
            entered.append(context)

        return hook

    def leave(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    try:
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(enter(path)))
            handles.append(module.register_forward_hook(leave, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _spread_origins(module: torch.fx.GraphModule) -> None:
    """Gives backward ops the module of the forward op whose autograd node they run (same `seq_nr`)."""
    owner: dict[int, str] = {}
    lost: set[torch.fx.Node] = set()
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        custom = dict(node.meta.get("custom") or {})
        if custom.get("phase") == "forward":
            owner.setdefault(node.meta.get("seq_nr", -1), custom.get("module", ""))
        else:
            origin = owner.get(node.meta.get("seq_nr", -1))
            custom = {"phase": "backward", "module": origin or ""}
            if origin is None or node.meta.get("is_gradient_acc"):
                lost.add(node)
        node.meta["custom"] = custom
    for node in module.graph.nodes:
        if node in lost:  # a sum of gradients runs under no autograd node: it belongs to the module of what it sums
            modules = ((source.meta.get("custom") or {}).get("module") for source in node.all_input_nodes)
            node.meta["custom"]["module"] = next(filter(None, modules), "")


@contextlib.contextmanager
def _translated(model: nn.Module) -> Iterator[None]:
    """While active, a failure of tracing becomes a `CaptureError` that names the op and the user's line."""
    log = logging.getLogger("torch._subclasses.fake_tensor")  # it prints the traceback of what is raised all the same
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        dependent = any(word in type(error).__name__ for word in ("DataDependent", "DynamicOutputShape"))
        op = str(getattr(error, "func", "") or ("aten._local_scalar_dense" if dependent else ""))
        module = _module_path(error, model)
        source = _user_line(error)
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        advice = (
            "what runs there depends on the values of tensors, which a graph cannot hold; compute it with tensor ops "
            "(torch.where, masks), or pass it as a plain argument"
            if dependent
            else "run the model eagerly with the same inputs first; if that works, move this code out of the model"
        )
        raise CaptureError(
            f"cannot capture the model: {cause}; op {op or 'unknown'}, in {module}, at "
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


def _user_line(error: BaseException) -> str:
    own = str(Path(__file__).parent)
    torch_root = str(Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith((own, torch_root, "<")) and "/contextlib.py" not in frame.filename:
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return ""
