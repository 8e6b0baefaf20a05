"""Which tensors a graph may hold as constants: those of the model. Labels are arguments, never taken from outside.

`referenced`: tensors that functions take from outside of themselves, under the names that their authors gave them.

Where a traced op comes from: the module that called it, in the forward and in the backward.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import math
import operator
import sys
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError
from rlplace.graphs.capturing.functional import live_nodes, mutates
from rlplace.graphs.capturing.refusals import is_installed, line_of_user
from rlplace.graphs.program import Folded
from rlplace.graphs.random_streams import DrawKey

aten = torch.ops.aten

_LIFTS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}
"""The op that traced literals (`torch.tensor([1.0, 2.0])`) go through, and no other tensor."""
_READERS = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
    Tensor.__index__, Tensor.equal, Tensor.allclose, Tensor.is_nonzero, torch.equal, torch.allclose, torch.is_nonzero,
}  # fmt: skip
"""They turn the values of tensors into Python's, which leave no trace in the graph."""
_OF_ARRAYS = {torch.from_numpy, torch.as_tensor, torch.asarray, torch.tensor}
_ADVICE = (
    "Labels are arguments: `capture(model, inputs, loss_fn, optimizer, targets=...)` with `loss_fn(output, *targets)`, "
    "then `step(*inputs, targets=...)` with those of each batch. What `forward` needs of a batch is an input of the "
    "model, and a constant belongs in a module (`register_buffer`, or a plain attribute)"
)


class ConstantCheck(TorchFunctionMode):
    """Refuses tensors from outside of the model: a graph would hold those of the first batch for ever.

    While active it sees every torch function that is called: it notes which line reads a tensor from outside, and
    refuses where its values leave for Python. Afterwards `check` judges the constants of the traced graph.

    Args:
        model: its modules hold constants, in attributes and in lists, tuples, sets and dicts in attributes.
        loss_fn: likewise, where it is a module or a method of one, or reaches one.
        arguments: inputs and targets of the step.
        trainable: parameters with a gradient, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        arguments: Iterable[Tensor],
        trainable: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self._model, self._loss_fn = model, loss_fn
        held = [*_held((model, *owner_of(loss_fn)))]
        self._held = {_storage(value) for value in held if isinstance(value, Tensor)}
        self._held_arrays = [value for value in held if isinstance(value, np.ndarray)]
        self._arguments = {memory(tensor) for tensor in arguments}
        self._changing = {*self._arguments, *map(memory, [*model.parameters(), *model.buffers()])}
        self._trainable = {_storage(tensor): name for name, tensor in trainable.items()}
        self._lines: dict[int, str] = {}
        self._seen: dict[int, Tensor] = {}  # by storage
        self._read: set[int] = set()

    def __torch_function__(
        self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():  # it follows modes too, and calls nothing
            return func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "__set__" and getattr(func, "__self__", None) is Tensor.data:
            name, line = _attribute(self._model, args[0]), line_of_user(traceback.extract_stack())
            raise CaptureError(
                f"cannot capture the model: `{name or 'a tensor'}.data = ...` in `forward`"
                f"{f', at {line}' if line else ''}. A graph cannot give a tensor other memory, so placed steps would "
                f"leave it as it is. Hint: write the new values in place, `with torch.no_grad(): "
                f"{name or 'tensor'}.copy_(...)`.",
                source=line,
            )
        if _is_in_place(func) and isinstance(args[0], nn.Parameter) and not _is_traced(args[0]):
            line = line_of_user(traceback.extract_stack())
            raise CaptureError(
                f"cannot capture the model: the loss writes to parameter `{self._attribute_name(args[0])}` in place"
                f"{f', at {line}' if line else ''}, which every placed step would leave as it is. Hint: change it "
                f"between steps, outside of the loss: a placed step takes what it holds then.",
                source=line,
            )
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and not _is_traced(value):
                storage = _storage(value)
                if getattr(func, "__name__", "") != "__get__":  # its device, say, is no value of it
                    self._seen.setdefault(storage, value)
                if storage not in self._lines:
                    self._lines[storage] = line_of_user(traceback.extract_stack())
                if func in _READERS:
                    self._require_held(value, is_read=True)
                    self._read.add(storage)
            elif isinstance(value, np.ndarray) and func in _OF_ARRAYS:
                self._require_own(value, line_of_user(traceback.extract_stack()))
        return func(*args, **(kwargs or {}))

    def check(self, module: torch.fx.GraphModule) -> None:
        """Judges the constants of the traced graph.

        Raises:
            CaptureError: names the tensor as the user does, or gives its dtype and shape and the place where it is
                read.
        """
        for node in module.graph.find_nodes(op="get_attr"):
            value = operator.attrgetter(str(node.target))(module)
            is_literal = all(user.target in _LIFTS for user in node.users)
            if is_literal and isinstance(value, Tensor) and _is_of_an_array(value):
                self._require_own(value.numpy())
            if is_literal or not isinstance(value, Tensor):  # the latter is refused where the graph is lowered
                continue
            name = self._trainable.get(_storage(value))
            if name is not None and any(_custom(user).get("phase") == "forward" for user in node.users):
                raise CaptureError(
                    f"the step reads parameter {name!r} other than as an attribute of its module"
                    f"{self._at(value, node)}, so that a part of its gradient would be lost. Hint: compute what the "
                    f"loss needs of it in `forward`, from the attribute, and return it.",
                    source=self._lines.get(_storage(value), ""),
                )
            self._require_held(value, node)

    def folded(self, module: torch.fx.GraphModule) -> Iterator[Folded]:
        """Constants of modules that the graph holds as numbers (`self.scale.item()`), and not as tensors."""
        live = live_nodes(module.graph, mutates)
        constants = [operator.attrgetter(str(node.target))(module) for node in live if node.op == "get_attr"]
        kept = {_storage(value) for value in constants if isinstance(value, Tensor)}
        for storage, value in self._seen.items():
            is_number = storage in self._read or (storage in self._held and storage not in kept)
            if is_number and memory(value) not in self._changing and not value.is_inference():
                yield Folded(self._attribute_name(value) or "a tensor of the model or the loss", value, value._version)

    def check_gradients(self, loss: Tensor) -> None:
        """Judges the tensors that the gradient of the loss reaches besides the model's parameters.

        Raises:
            CaptureError: one of them requires a gradient (a temperature in the loss, a layer in a list), and would stay
                as it is without a word.
        """
        leaves = (getattr(node, "variable", None) for node in nodes_behind(loss))
        for value in (leaf for leaf in leaves if leaf is not None):
            if isinstance(value, FakeTensor) or _storage(value) in self._trainable:  # the latter is left to `check`
                continue
            name = self._attribute_name(value, ("loss_fn", self._loss_fn)) or self._name(
                functools.partial(operator.is_, value)
            )
            line = self._lines.get(_storage(value), "")
            what = f"`{name}`" if name else "a tensor"
            raise CaptureError(
                f"the loss depends on {what} {tuple(value.shape)}, which requires a gradient and is no parameter of "
                f"the model{f', at {line}' if line else ''}. It would never be updated. Hint: make it a parameter of "
                f"the model (in a submodule, whose result `forward` returns), or freeze it where it is a constant "
                f"(`requires_grad_(False)`).",
                source=line,
            )

    def _require_held(self, value: Tensor, node: torch.fx.Node | None = None, *, is_read: bool = False) -> None:
        """Refuses a tensor that no module holds, or whose values, read as numbers now, change from step to step."""
        storage, changes = _storage(value), memory(value) in self._changing
        if (storage in self._held or memory(value) in self._arguments) and not (is_read and changes):
            return
        reached = [found for _, found in self._reached() if isinstance(found, nn.Module)]
        if not changes and any(isinstance(found, Tensor) and _storage(found) == storage for found in _held(reached)):
            self._held.add(storage)
            return
        name = self._name(lambda other: isinstance(other, Tensor) and _storage(other) == storage)
        looks = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        raise _refusal(name, looks, self._lines.get(storage, ""), "" if node is None else self._at(value, node))

    def _require_own(self, array: np.ndarray[Any, Any], line: str = "") -> None:
        """Refuses an array that the functions reach, and no module holds."""

        def is_it(other: object) -> bool:
            return isinstance(other, np.ndarray) and np.may_share_memory(array, other)

        if not any(map(is_it, self._held_arrays)) and (name := self._name(is_it)):
            raise _refusal(name, f"NumPy {array.dtype} {array.shape}", line)

    def _reached(self) -> Iterator[tuple[str, object]]:
        yield from referenced([self._loss_fn, *forwards(self._model)])

    def _name(self, is_it: Callable[[object], bool]) -> str:
        return next((name for name, value in self._reached() if is_it(value)), "")

    def _attribute_name(self, value: Tensor, first: Named | None = None) -> str:
        """The holder of a tensor, as the user writes it: a module that the step reaches; empty where none does."""
        reached = (first or ("", self._model), *self._reached())
        found = ((path, _attribute(each, value)) for path, each in reached if isinstance(each, nn.Module))
        return next((f"{path}.{name}".strip(".") for path, name in found if name), "")

    def _at(self, value: Tensor, node: torch.fx.Node) -> str:
        if line := self._lines.get(_storage(value)):
            return f", at {line}"
        reader = next(iter(node.users))
        return f", by op {reader.target} in {module_of(reader) or 'the root or `loss_fn`'}"


def _refusal(name: str, looks: str, line: str, at: str = "") -> CaptureError:
    what = f"`{name}` ({looks})" if name else f"a tensor ({looks})"
    at = at or (f", at {line}" if line else "")
    return CaptureError(
        f"cannot capture the model: the step takes {what} from outside of the model{at}. Every step would repeat "
        f"the values that it has now. Hint: {_ADVICE}.",
        source=line,
    )


def _is_traced(value: Tensor) -> bool:
    """Whether a tensor was made by the trace, or stands for others inside of `torch.vmap` and `torch.func.grad`."""
    return isinstance(value, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(value)


def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    is_method = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return is_method or name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")


def _attribute(model: nn.Module, value: Tensor) -> str:
    """The dotted name of a tensor of a model; empty where it is none."""
    names = (
        f"{path}.{name}".strip(".")
        for path, module in model.named_modules()
        for held in (module._parameters, module._buffers, vars(module))
        for name, each in held.items()
        if each is value
    )
    return next(names, "")


def _is_of_an_array(value: Tensor) -> bool:
    """Whether a literal came from `torch.from_numpy`, which no function mode sees: it shows memory of NumPy's."""
    is_plain = value.device.type == "cpu" and value.layout is torch.strided and not isinstance(value, FakeTensor)
    return is_plain and not value.untyped_storage().resizable()


def nodes_behind(value: Tensor) -> Iterator[Any]:
    """The nodes of autograd that a backward from `value` may run."""
    left: list[Any] = [value.grad_fn]
    seen: set[Any] = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        left.extend(following for following, _ in node.next_functions)


def owner_of(loss_fn: object) -> Iterator[nn.Module]:
    """The module that a loss is, or is a method of, if any."""
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    if isinstance(loss_fn, types.MethodType):
        loss_fn = loss_fn.__self__
    if isinstance(loss_fn, nn.Module):
        yield loss_fn


def _held(modules: Iterable[nn.Module]) -> Iterator[Tensor | np.ndarray[Any, Any]]:
    """All tensors and arrays that modules hold."""

    def below(name: str, value: object) -> Iterator[Named]:
        if isinstance(value, nn.Module):
            yield from ((name, held) for each in (value, *own_classes([value])) for held in vars(each).values())
        elif isinstance(value, (dict, list, tuple, set, frozenset)):
            yield from ((name, held) for held in (value.values() if isinstance(value, dict) else value))

    found = (value for _, value in _walk((("", module) for module in modules), below))
    return (value for value in found if isinstance(value, (Tensor, np.ndarray)))


def _walk(
    start: Iterable[Named], below: Callable[[str, object], Iterator[Named]], most: float = math.inf
) -> Iterator[Named]:
    """Values that can be reached, each once and nearest first, at most so many; plain numbers and texts aside."""
    left = deque(start)
    seen: dict[int, object] = {}  # keeps what was made on the way, so that an id stays the name of one object
    while left and len(seen) < most:
        name, value = left.popleft()
        if id(value) in seen or isinstance(value, (str, bytes, int, float, complex, type(None))):
            continue
        seen[id(value)] = value
        yield name, value
        with contextlib.suppress(Exception):  # raised by attributes of an object of the user's
            left.extend([*below(name, value)])


def memory(value: Tensor) -> tuple[Any, ...]:
    """The memory that a tensor shows, and how it shows it."""
    return _storage(value), value.storage_offset(), value.shape, value.stride(), value.dtype


def _storage(value: Tensor) -> int:
    """The storage of tensors that share memory; nothing for a sparse one, whose memory is not one piece."""
    return value.untyped_storage()._cdata if value.layout is torch.strided else id(value)


MOST_VALUES = 20_000
"""How many values are looked at, nearest first: a function may reach a whole data set."""

Named = tuple[str, object]
_Cached = functools._lru_cache_wrapper


def referenced(functions: Iterable[object]) -> Iterator[Named]:
    """Tensors, NumPy arrays, modules and `lru_cache`s that functions can reach without being given them, nearest first.

    Followed are closures, globals, defaults, arguments of `functools.partial`, the object that a method belongs to,
    functions that are called, and the entries of lists, tuples, sets, dicts and plain objects. Modules are not entered:
    their tensors are their own.

    Yields:
        The expression that names it, as in `batch['y']`, and the value.
    """
    kinds = (torch.Tensor, np.ndarray, nn.Module, _Cached)
    found = _walk((("", function) for function in functions), _below, MOST_VALUES)
    return ((name, value) for name, value in found if isinstance(value, kinds))


def forwards(model: nn.Module) -> Iterator[object]:
    """The functions of a model that are the user's own: methods of its modules, and functions in their attributes."""
    for kind in own_classes(model.modules()):
        yield from (value for value in vars(kind).values() if isinstance(value, (types.FunctionType, _Cached)))
    for module in model.modules():
        yield from (value for value in vars(module).values() if callable(value) and not isinstance(value, nn.Module))


def own_classes(values: Iterable[object]) -> list[type]:
    """The classes of modules or other objects, and those that these extend, that are the user's own."""
    kinds = {kind: None for value in values for kind in type(value).__mro__}
    return [kind for kind in kinds if kind.__module__.partition(".")[0] not in ("torch", "builtins", "abc", "typing")]


def _below(name: str, value: object) -> Iterator[Named]:
    if isinstance(value, dict):  # other mappings run code of their own, some only to refuse
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"{name}[{position}]", item) for position, item in enumerate(value))
    elif isinstance(value, functools.partial):
        yield name, value.func
        yield from ((f"argument {position} of the partial", item) for position, item in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
        yield name, value.__func__
    elif isinstance(value, types.FunctionType):
        if not str(value.__module__).startswith("torch."):
            yield from read_by(value)
    elif isinstance(value, _Cached):
        yield name, value.__wrapped__
    elif isinstance(value, (Tensor, np.ndarray, nn.Module, types.ModuleType)):
        return  # of a module of Python's only what a function names in it, see `read_by`
    elif isinstance(attributes := getattr(value, "__dict__", None), dict):
        prefix = f"{name}." if name else ""
        yield from ((f"{prefix}{key}", item) for key, item in attributes.items() if not str(key).startswith("__"))
        call: Any = getattr(type(value), "__call__", None)  # noqa: B004 - the function, not whether there is one
        if isinstance(call, types.FunctionType):
            yield name, call


def read_by(function: Callable[..., Any]) -> Iterator[Named]:
    """The values of these, and those of its defaults, with the expressions that name them."""
    for name, holder, key in places_of(function):
        with contextlib.suppress(ValueError):  # nothing was assigned to it yet
            yield name, holder.cell_contents if isinstance(holder, types.CellType) else holder[key]
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def places_of(function: Callable[..., Any]) -> Iterator[tuple[str, Any, str]]:
    """The variables that a function reads from outside: its closure and its globals, also in modules of Python's.

    Yields:
        The expression that names it, then the cell of the closure, or the globals and the key there.
    """
    code: types.CodeType = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield name, cell, name
    loaded, attributes, imported = _names(code)
    own, package = function.__globals__, str(function.__globals__.get("__package__") or "")
    yield from ((name, own, name) for name in loaded if name in own and not isinstance(own[name], types.ModuleType))
    paths = (
        ".".join(filter(None, (package.rsplit(".", level - 1)[0] if level else "", name))) for level, name in imported
    )
    modules = {path: sys.modules[path] for path in paths if path in sys.modules and not is_installed(path)}
    modules |= {name: own[name] for name in loaded if isinstance(own.get(name), types.ModuleType)}
    modules |= {
        f"{name}.{key}": value
        for name, module in modules.items()
        for key in attributes
        if isinstance(value := vars(module).get(key), types.ModuleType)
    }
    yield from (
        (f"{name}.{key}", vars(module), key)
        for name, module in modules.items()
        if not module.__name__.startswith(("torch", "numpy"))
        for key in attributes
        if key in vars(module)
    )


@functools.lru_cache(maxsize=1 << 14)
def _names(code: types.CodeType) -> tuple[list[Any], list[Any], list[Any]]:
    """Global names that the code, or a function defined in it, reads; the attributes that it reads or imports; and the
    modules that it imports, each behind its number of dots."""
    found: tuple[dict[Any, None], ...] = ({}, {}, {})  # dicts keep the order
    loaded, attributes, imported = found
    for index, step in enumerate(steps := [*dis.get_instructions(code)]):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loaded[step.argval] = None
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            attributes[step.argval] = None
        elif step.opname == "IMPORT_NAME":
            imported[steps[index - 2].argval, step.argval] = None
        elif isinstance(step.argval, types.CodeType):
            for names, inner in zip(found, _names(step.argval), strict=True):
                names.update(dict.fromkeys(inner))
    return [*loaded], [*attributes], [*imported]


@contextlib.contextmanager
def annotated(model: nn.Module) -> Iterator[None]:
    """While active, every traced op carries the dotted path of the innermost module that called it.

    A module that is called twice, or that has several names, has one path: the first of `named_modules`.
    """
    entered: list[contextlib.AbstractContextManager[Any]] = []

    def enter(path: str, _: nn.Module) -> None:
        entered.append(fx_traceback.annotate({"module": path}))
        entered[-1].__enter__()

    def leave() -> None:
        entered.pop().__exit__(None, None, None)

    with calls_told(model, enter, leave):
        try:
            yield
        finally:
            while entered:  # hooks do not run after every kind of failure
                leave()


@contextlib.contextmanager
def calls_told(model: nn.Module, enter: Callable[[str, nn.Module], None], leave: Callable[[], None]) -> Iterator[None]:
    """While active, `enter` is told of every call of a module, with its path, before it, and `leave` behind it."""
    handles = []
    try:
        for path, module in model.named_modules():
            handles += [
                module.register_forward_pre_hook(lambda own, _, path=path: enter(path, own)),
                module.register_forward_hook(lambda *_: leave(), always_call=True),
            ]
        yield
    finally:
        for handle in handles:
            handle.remove()


def spread_origins(module: torch.fx.GraphModule) -> None:
    """Gives every node its phase and its module, `""` for the root and for nodes outside of the model.

    A backward op belongs to the module of the forward op whose autograd node it runs (same `seq_nr`), unless a module
    called it itself (a recomputed forward). A sum of gradients runs under no autograd node: it belongs to the module of
    its summands. A constant belongs to the first module that reads it.
    """
    owner: dict[int, str] = {}
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        custom, number = _custom(node), node.meta.get("seq_nr", -1)
        path, is_forward = custom.get("module"), custom.get("phase") == "forward"
        if is_forward:
            path = path or ""
            owner.setdefault(number, path)
        elif path is None and not node.meta.get("is_gradient_acc"):
            path = owner.get(number)
        if path is None:
            path = next(filter(None, map(module_of, node.all_input_nodes)), owner.get(number, ""))
        node.meta["custom"] = {**custom, "phase": "forward" if is_forward else "backward", "module": path}
    for node in module.graph.find_nodes(op="get_attr"):
        node.meta["custom"] = {"module": next(map(module_of, node.users), "")}


def module_of(node: torch.fx.Node) -> str:
    """The dotted path of the module that a node came from."""
    return str(_custom(node).get("module") or "")


def draw_of(node: torch.fx.Node) -> DrawKey | None:
    """The draw that a node of a trace makes; None for one that draws no random numbers."""
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return _custom(node)["draw"] if is_random else None  # what is traced again has the notes of all that it is made of


def _custom(node: torch.fx.Node) -> dict[str, Any]:
    return node.meta.get("custom") or {}
