"""Packing: a captured program as bytes and tensors in shared memory, for a process that this one starts itself.

It is pickle, which can run code. So it is for one pair of processes alone: the bytes are written by this process into
memory that no other process has a name for, and read by the worker that inherits it. Nothing here opens a file of a
user.

Ops travel by name, with the modules and libraries that must be loaded there to register them.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import mmap
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import cloudpickle
import torch
from torch import nn
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rlplace.graphs import Program
from rlplace.graphs.program import Origin

_ALIGNED = 64
"""Bytes that tensors begin at multiples of."""
Section = tuple[int, int]
"""Where bytes are: offset and size."""


class Packed:
    """Objects packed together: a tensor that several of them hold travels once.

    Attributes:
        index: where the list of all sections is, offset and size in bytes; of a sealed one.
        name: unique.
    """

    def __init__(self) -> None:
        self.name = uuid4().hex
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}  # by address of the storage object
        self._pickles: list[bytes] = []
        self._file = -1
        self.index: Section = (0, 0)

    @classmethod
    def of(cls, file: int, index: Section) -> Packed:
        """A sealed one, of another machine, in this shared memory."""
        packed = cls()
        packed._file, packed.index = file, index
        return packed

    def add(self, obj: Any) -> int:
        """Packs an object; returns its number.

        Raises:
            Exception: any error of its pickling: a part of it belongs to this process alone.
        """
        into = io.BytesIO()
        _Packer(into, self._number_of).dump(obj)
        self._pickles.append(into.getvalue())
        return len(self._pickles) - 1

    def seal(self) -> int:
        """The descriptor of the shared memory, filled; nothing is added after it.

        Tensors are copied into it, those of GPUs too: the user's own stay as they are.

        Raises:
            OSError: there is no memory for it.
        """
        if self._file >= 0:
            return self._file
        storages, objects, end = [], [], 0
        for _, storage in self._storages.values():
            storages.append((end, storage.nbytes()))
            end += -(-storage.nbytes() // _ALIGNED) * _ALIGNED
        for data in self._pickles:
            objects.append((end, len(data)))
            end += len(data)
        listed = json.dumps([storages, objects]).encode()
        self.index = end, len(listed)
        self._file = shared_file(end + len(listed))
        with mmap.mmap(self._file, end + len(listed)) as memory:
            memory[end:] = listed
            for (_, storage), (offset, size) in zip(self._storages.values(), storages, strict=True):
                if size:
                    there = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)
                    there.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
                    del there  # a tensor keeps the memory mapped
            for data, (offset, size) in zip(self._pickles, objects, strict=True):
                memory[offset : offset + size] = data
        self._storages, self._pickles = {}, []
        return self._file

    def close(self) -> None:
        """Gives the shared memory back, once no worker has it either."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _number_of(self, storage: torch.UntypedStorage) -> int:
        return self._storages.setdefault(storage._cdata, (len(self._storages), storage))[0]


def packed_alone(obj: Any) -> bytes:
    """One object as bytes that a connection sends to a process that this one started, which receives the object.

    Raises:
        Exception: any error of its pickling: a part of it belongs to this process alone.
    """
    into = io.BytesIO()
    _Packer(into).dump(obj)
    return into.getvalue()


def without_values(program: Program) -> Program:
    """A program for a process that gets its parameters, inputs and constants in another way, and no model of it."""
    alike = {
        op: dataclasses.replace(source, value=_fake(*_described(source.value)), held=None)
        for op, source in program.sources.items()
    }
    return dataclasses.replace(program, sources=alike, origin=without_model(program.origin), folded=())


def without_model(origin: Origin) -> Origin:
    """The part of the user's objects that placements need: how the batch is cut, and ops are split."""
    return Origin(nn.Module(), (), {}, None, autocast=origin.autocast, micro=origin.micro, split=origin.split)


class Unpacked:
    """The other side of `Packed`: its tensors are private copies of shared pages, made where they are written to.

    Args:
        file: descriptor of the shared memory.
        index: where the list of all sections is.
    """

    def __init__(self, file: int, index: Section) -> None:
        self._memory = mmap.mmap(file, sum(index), access=mmap.ACCESS_COPY)
        self._sections, self._objects = json.loads(self._memory[index[0] :])
        self._storages: dict[int, torch.UntypedStorage] = {}

    def get(self, number: int) -> Any:
        """The object that `Packed.add` gave this number.

        Raises:
            Exception: any error of making it, e.g. of a module that cannot be imported here.
        """
        offset, size = self._objects[number]
        return _Unpacker(io.BytesIO(self._memory[offset : offset + size]), self._storage).load()

    def _storage(self, number: int) -> torch.UntypedStorage:
        if number not in self._storages:
            offset, size = self._sections[number]
            # no buffer of no bytes is taken
            flat = (
                torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=offset) if size else torch.empty(0)
            )
            self._storages[number] = flat.untyped_storage()
        return self._storages[number]


def shared_file(num_bytes: int) -> int:
    """The descriptor of nameless memory of that size that a child process can inherit; a nameless file elsewhere.

    Raises:
        OSError: there is no memory for it.
    """
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("rlplace")
    else:
        with tempfile.TemporaryFile(prefix="rlplace-") as opened:
            file = os.dup(opened.fileno())
    os.ftruncate(file, num_bytes)
    return file


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles objects that cannot be imported elsewhere by value, ops by name, and storages by number."""

    def __init__(self, into: io.BytesIO, number_of: Callable[[torch.UntypedStorage], int] | None = None) -> None:
        super().__init__(into)
        self._number_of = number_of

    def persistent_id(self, obj: Any) -> tuple[int, torch.dtype | None] | None:
        if self._number_of is None:
            return None
        if isinstance(obj, torch.storage.TypedStorage):
            return self._number_of(obj._untyped_storage), obj.dtype
        return (self._number_of(obj), None) if isinstance(obj, torch.UntypedStorage) else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FakeTensor):
            return _fake, _described(obj)
        found = reduced(obj)
        return super().reducer_override(obj) if found is None else found


class _Unpacker(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, storage: Callable[[int], torch.UntypedStorage]) -> None:
        super().__init__(source)
        self._storage = storage

    def persistent_load(self, pid: tuple[int, torch.dtype | None]) -> Any:
        number, dtype = pid
        storage = self._storage(number)
        if dtype is None:
            return storage
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _described(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype, str, bool]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device), tensor.requires_grad


def _fake(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str, requires_grad: bool
) -> torch.Tensor:
    """A tensor without values."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return made.requires_grad_(requires_grad)


_BUILT_IN = frozenset(("aten", "prim", "prims", "higher_order"))
_FILE = re.compile(r"registered at (?P<path>[^\n]+?\.py):\d+")


@dataclass(frozen=True)
class OpHome:
    """Where an op comes from.

    Attributes:
        modules: to be imported, in this order, so that it is registered.
        libraries: shared libraries to be loaded, as `torch.ops.load_library` did.
        define: defines an op whose module cannot be imported elsewhere (a notebook's, a script's), else None.
    """

    modules: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    define: Callable[[], None] | None = None


def reduced(obj: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """How an op is made again from its packed form; None for anything that is no op.

    Args:
        obj: an overload, a packet, a higher-order op, a `CustomOpDef`, or anything else.
    """
    if isinstance(obj, OpOverload):
        return find_op, (obj._schema.name, home_of(obj._schema.name), obj._overloadname)
    if isinstance(obj, OpOverloadPacket):
        return find_op, (obj._qualified_op_name, home_of(obj._qualified_op_name))
    if isinstance(obj, HigherOrderOperator):
        return find_op, (f"higher_order::{obj.__name__}", OpHome())
    if isinstance(obj, CustomOpDef):
        return find_custom_op, (obj._qualname, home_of(obj._qualname))
    return None


def home_of(name: str) -> OpHome:
    """Where the op `namespace::op` comes from; nothing is needed for PyTorch's own."""
    namespace = name.split("::", maxsplit=1)[0]
    if namespace in _BUILT_IN:
        return OpHome()
    libraries = tuple(sorted(map(str, torch.ops.loaded_libraries)))
    if (custom := OPDEFS.get(name)) is not None:
        module = custom._init_fn.__module__
        if _is_importable(module):
            return OpHome((module,), libraries)
        given = custom._schema, custom._init_fn, tuple(custom._backend_fns.items()), custom._abstract_fn
        return OpHome((), libraries, partial(_define, name, *given))
    files = {str(Path(match["path"]).resolve()) for match in _FILE.finditer(torch._C._dispatch_dump(name))}
    modules = [
        module
        for module, loaded in list(sys.modules.items())
        if _is_importable(module)
        and (module == namespace or str(Path(getattr(loaded, "__file__", None) or "/").resolve()) in files)
    ]
    return OpHome(tuple(sorted(modules)), libraries)


def find_op(name: str, home: OpHome, overload: str = "") -> Any:
    """All overloads of the op, or one of them, registered here if they were not.

    Raises:
        ImportError, AttributeError: it cannot be.
    """
    namespace, _, op = name.partition("::")
    for library in home.libraries:
        if library not in torch.ops.loaded_libraries:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    for module in home.modules:
        importlib.import_module(module)
    if home.define is not None and name not in OPDEFS:
        home.define()
    packet = getattr(getattr(torch.ops, namespace), op)
    return getattr(packet, overload) if overload else packet


def find_custom_op(name: str, home: OpHome) -> CustomOpDef:
    """The result of `torch.library.custom_op`, registered here if it was not; raises as `find_op`."""
    find_op(name, home)
    return cast(CustomOpDef, OPDEFS[name])


def _is_importable(module: str) -> bool:
    """Whether another process can import it: neither `__main__` nor one that was made at run time."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return module != "__main__" and spec is not None and spec.origin is not None


def _define(
    qualified: str,
    schema: str,
    function: Callable[..., Any],
    kernels: tuple[tuple[str | None, Callable[..., Any]], ...],
    fake: Callable[..., Any] | None,
) -> None:
    """Defines a `torch.library.custom_op` again."""
    namespace, _, name = qualified.partition("::")
    op = CustomOpDef(namespace, name, schema, function)
    for device, kernel in kernels:
        op.register_kernel(device)(kernel)
    if fake is not None:
        op.register_fake(fake)
