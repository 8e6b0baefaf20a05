"""How ops travel to another process: by name, with what must be imported there for the name to mean something."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

_BUILT_IN = frozenset(("aten", "prim", "prims", "higher_order"))
_FILE = re.compile(r"registered at (?P<path>[^\n]+?\.py):\d+")


@dataclass(frozen=True)
class OpHome:
    """Where an op comes from.

    Attributes:
        modules: to be imported, in this order, so that it is registered.
        libraries: shared libraries to be loaded, as `torch.ops.load_library` did.
        definition: of an op whose module cannot be imported elsewhere (a notebook's, a script's), else None.
    """

    modules: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    definition: Definition | None = None


@dataclass(frozen=True)
class Definition:
    """A `torch.library.custom_op`, enough to define it again.

    Attributes:
        name: `namespace::op`.
        schema: without the name.
        function: what it computes.
        kernels: by kind of device; None is every other kind.
        fake: what it computes on fake tensors, if it was given.
    """

    name: str
    schema: str
    function: Callable[..., Any]
    kernels: tuple[tuple[str | None, Callable[..., Any]], ...]
    fake: Callable[..., Any] | None


def reduced(obj: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """How an op is made again from what travels; None for anything that is no op.

    Args:
        obj: an overload, a packet, a higher-order op, a `CustomOpDef`, or anything else.
    """
    if isinstance(obj, OpOverload):
        name = obj._schema.name
        return find_overload, (name, obj._overloadname, home_of(name))
    if isinstance(obj, OpOverloadPacket):
        name = obj._qualified_op_name
        return find_packet, (name, home_of(name))
    if isinstance(obj, HigherOrderOperator):
        return find_higher_order, (obj.__name__,)
    if isinstance(obj, CustomOpDef):
        return find_custom_op, (obj._qualname, home_of(obj._qualname))
    return None


def home_of(name: str) -> OpHome:
    """Where the op `namespace::op` comes from; nothing is needed for PyTorch's own."""
    namespace = name.split("::", maxsplit=1)[0]
    if namespace in _BUILT_IN:
        return OpHome()
    libraries = tuple(sorted(map(str, torch.ops.loaded_libraries)))
    custom = OPDEFS.get(name)
    if custom is not None:
        module = custom._init_fn.__module__
        if _is_importable(module):
            return OpHome((module,), libraries)
        return OpHome((), libraries, _definition(custom))
    files = {str(Path(match["path"]).resolve()) for match in _FILE.finditer(torch._C._dispatch_dump(name))}
    modules = [
        module
        for module, loaded in list(sys.modules.items())
        if _is_importable(module)
        and (module == namespace or str(Path(getattr(loaded, "__file__", None) or "/").resolve()) in files)
    ]
    return OpHome(tuple(sorted(modules)), libraries)


def find_overload(name: str, overload: str, home: OpHome) -> OpOverload[..., Any]:
    """The overload of the op, registered here if it was not.

    Raises:
        ImportError, AttributeError: it cannot be.
    """
    found: OpOverload[..., Any] = getattr(find_packet(name, home), overload)
    return found


def find_packet(name: str, home: OpHome) -> OpOverloadPacket[..., Any]:
    """All overloads of the op, registered here if they were not; raises as `find_overload`."""
    namespace, _, op = name.partition("::")
    for library in home.libraries:
        if library not in torch.ops.loaded_libraries:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    for module in home.modules:
        importlib.import_module(module)
    if home.definition is not None and name not in OPDEFS:
        _define(home.definition)
    found: OpOverloadPacket[..., Any] = getattr(getattr(torch.ops, namespace), op)
    return found


def find_higher_order(name: str) -> HigherOrderOperator:
    """The higher-order op of that name."""
    found: HigherOrderOperator = getattr(torch.ops.higher_order, name)
    return found


def find_custom_op(name: str, home: OpHome) -> CustomOpDef:
    """What `torch.library.custom_op` gave, registered here if it was not; raises as `find_overload`."""
    find_packet(name, home)
    found: CustomOpDef = OPDEFS[name]
    return found


def _is_importable(module: str) -> bool:
    """Whether another process can import it: neither `__main__` nor one that was made at run time."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return module != "__main__" and spec is not None and spec.origin is not None


def _definition(op: CustomOpDef) -> Definition:
    return Definition(op._qualname, op._schema, op._init_fn, tuple(op._backend_fns.items()), op._abstract_fn)


def _define(definition: Definition) -> None:
    namespace, _, name = definition.name.partition("::")
    op = CustomOpDef(namespace, name, definition.schema, definition.function)
    for device, function in definition.kernels:
        op.register_kernel(device)(function)
    if definition.fake is not None:
        op.register_fake(definition.fake)
