"""`referenced`: what functions take from outside of themselves, under the names that their authors gave it."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import nn

MOST_VALUES = 20_000
"""How many values are looked at, nearest first: a function may reach a whole data set."""

Named = tuple[str, object]
_Cached = functools._lru_cache_wrapper


def referenced(functions: Iterable[object]) -> Iterator[Named]:
    """Tensors, NumPy arrays, modules and `lru_cache`s that functions can reach without being given them, nearest first.

    Followed are closures, globals, defaults, arguments of `functools.partial`, the object that a method belongs to,
    functions that are called, and whatever lists, tuples, sets, dicts and plain objects hold. Modules are not entered:
    what they hold is theirs.

    Yields:
        The expression that names it, as in `batch['y']`, and the value.
    """
    left: deque[Named] = deque(("", function) for function in functions)
    seen: dict[int, object] = {}  # keeps what was made on the way, so that an id stays the name of one object
    while left and len(seen) < MOST_VALUES:
        name, value = left.popleft()
        if id(value) in seen or isinstance(value, (str, bytes, int, float, complex, type(None))):
            continue
        seen[id(value)] = value
        if isinstance(value, (torch.Tensor, np.ndarray, nn.Module)):
            yield name, value
        elif isinstance(value, _Cached):
            yield name, value
            left.append((name, value.__wrapped__))
        else:
            left.extend(_below(name, value))


def forwards(model: nn.Module) -> Iterator[object]:
    """The functions of a model that are the user's own: methods of its modules, and functions in their attributes."""
    kinds = {kind: None for module in model.modules() for kind in type(module).__mro__}
    for kind in kinds:
        if not kind.__module__.startswith(("torch.", "builtins")):
            yield from (value for value in vars(kind).values() if isinstance(value, (types.FunctionType, _Cached)))
    for module in model.modules():
        yield from (value for value in vars(module).values() if callable(value) and not isinstance(value, nn.Module))


def _below(name: str, value: object) -> Iterator[Named]:
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, Set)):
        yield from ((f"{name}[{position}]", item) for position, item in enumerate(value))
    elif isinstance(value, functools.partial):
        yield name, value.func
        yield from ((f"argument {position} of the partial", item) for position, item in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
        yield name, value.__func__
    elif isinstance(value, types.FunctionType):
        if not value.__module__ or not value.__module__.startswith("torch."):
            yield from _of_function(value)
    elif isinstance(value, types.ModuleType):
        return  # only what a function names in it, see `_of_function`
    elif hasattr(value, "__dict__"):
        prefix = f"{name}." if name else ""
        yield from ((f"{prefix}{key}", item) for key, item in vars(value).items() if not key.startswith("__"))
        call: Any = getattr(type(value), "__call__", None)  # noqa: B004 - the function, not whether there is one
        if isinstance(call, types.FunctionType):
            yield name, call


def _of_function(function: Callable[..., Any]) -> Iterator[Named]:
    code: types.CodeType = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # nothing was assigned to it yet
            continue
    names = _names(code)
    for name in names:
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        if not isinstance(value, types.ModuleType):
            yield name, value
        elif not value.__name__.startswith(("torch", "numpy")):
            yield from ((f"{name}.{other}", vars(value)[other]) for other in names if other in vars(value))
    positional = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _names(code: types.CodeType) -> list[str]:
    """Global names and attributes that the code, or a function defined in it, mentions."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return [*code.co_names, *(name for const in inner for name in _names(const))]
