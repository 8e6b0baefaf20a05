"""The compiler of all kernels: compiled once, kept on disk, free of the interpreter lock."""

from __future__ import annotations

import errno
import gc
import glob
import hashlib
import os
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, cast, dataclass_transform, get_args, get_type_hints

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from rlplace.process_settings import unseen

# The file can name a folder of kernels, which numba unpickles, or modules, which it imports. `NUMBA_...` still counts.
with unseen(".numba_config.yaml"):
    from numba import njit, types
    from numba.core import cgutils, config
    from numba.core.caching import CompileResultCacheImpl, FunctionCache
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler import Compiler
    from numba.core.errors import TypingError
    from numba.core.imputils import lower_getattr_generic
    from numba.core.typing.templates import AttributeTemplate, infer_getattr
    from numba.extending import NativeValue, intrinsic, models, register_model, typeof_impl, unbox
    from numba.np.arrayobj import populate_array
    from numba.np.numpy_support import from_dtype

config._config_fname = ""  # it looks for the file again whenever it compiles
config.reload_config()  # type: ignore[no-untyped-call]  # another library may have imported numba before

Function = TypeVar("Function", bound=Callable[..., Any])

Bools = NDArray[np.bool_]
Bytes = NDArray[np.int8]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
BoolTable = Annotated[NDArray[np.bool_], 2]
IntTable = Annotated[NDArray[np.int32], 2]
FloatTable = Annotated[NDArray[np.float64], 2]
"""Fields of a `Block`: arrays of two dimensions; those above have one."""


def kernel(function: Function) -> Function:
    """The function, compiled by numba when it is first called, and kept on disk where a folder can be written to."""
    compiled: Any = njit(nogil=True, pipeline_class=_KernelCompiler)(function)
    if hasattr(compiled, "py_func"):  # otherwise NUMBA_DISABLE_JIT is set
        try:
            compiled._cache = _Cache(function)  # type: ignore[no-untyped-call]
        except RuntimeError:  # numba's: it knows no folder for it
            _warn_not_kept()
    return cast(Function, _of_types(compiled))


_TOLD = "RLPLACE_KERNELS_NOT_KEPT"
"""Set for the processes that this one starts: it has said so."""


@cache
def _warn_not_kept() -> None:
    """Says so once."""
    if _TOLD in os.environ:
        return
    os.environ[_TOLD] = "1"
    warnings.warn(
        "kernels are compiled in each process, for a minute: no folder to keep them can be written to. Set "
        "NUMBA_CACHE_DIR to one.",
        RuntimeWarning,
        stacklevel=2,
    )


def part(function: Function) -> Function:
    """A function that only kernels call: its code is compiled with each kernel that calls it, never alone.

    Numba would optimise it alone first, and generate machine code: a third of the time that compiling took.
    """
    return cast(Function, _of_types(njit(nogil=True, pipeline_class=_PartCompiler)(function)))


def inlined(function: Function) -> Function:
    """A part in the place of each call: a call would count references to every array that it passes."""
    return cast(Function, _of_types(njit(nogil=True, forceinline=True, pipeline_class=_PartCompiler)(function)))


def is_kept(function: Callable[..., Any]) -> bool:
    """Whether the code of a kernel is on disk already: an earlier process has compiled it."""
    kept = cast(Any, function)._cache
    return isinstance(kept, _Cache) and kept.index.is_file()


class _KernelCompiler(Compiler):
    """Numba's compiler without the garbage collector, which would look through all of torch again and again."""

    def _compile_core(self) -> Any:
        is_enabled = gc.isenabled()
        gc.disable()
        try:
            return super()._compile_core()  # type: ignore[no-untyped-call]
        finally:
            if is_enabled:
                gc.enable()


class _PartLibrary(JITCodeLibrary):
    """LLVM's code of a part: it is neither optimised nor made machine code before a kernel takes it in."""

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True


class _PartCompiler(Compiler):
    """Numba's compiler up to LLVM's code."""

    def _compile_core(self) -> Any:
        state = self.state
        state.flags.no_compile = state.flags.no_cpython_wrapper = state.flags.no_cfunc_wrapper = True
        library: Any = _PartLibrary
        state.library = library(state.targetctx.codegen(), state.func_id.func_qualname)
        entry = object().__reduce_ex__  # some builtin: numba knows the part by it, and a call from Python fails
        compiled = super()._compile_core()._replace(entry_point=entry)  # type: ignore[no-untyped-call]
        state.targetctx.insert_user_function(entry, compiled.fndesc, [compiled.library])
        return compiled


@dataclass_transform(frozen_default=True)
class Block:
    """Many arrays and numbers that a kernel takes as one argument.

    A subclass declares its fields with types of this module (`Floats`, `IntTable`, ...), `int`, `float`, `bool`, or
    another block. A kernel gets the address of a table of addresses. A named tuple would do the same, but numba passes
    each array of it as seven arguments from function to function: the simulator took twice as long to compile.

    Raises:
        TypeError: a field is missing or unknown, or an array of another type, or of another layout than C.
    """

    _layout: ClassVar[dict[str, tuple[int, Any, int]]]
    _words: Longs

    def __init__(self, *values: Any, **named: Any) -> None:
        layout = layout_of(type(self))
        named |= dict(zip(layout, values))
        if named.keys() != layout.keys():
            raise TypeError(f"{type(self).__name__} takes {', '.join(layout)}; got {', '.join(named)}")
        words: list[int] = []
        for name, (_, kind, _) in layout.items():
            value = named[name]
            if isinstance(kind, types.Array):
                if from_dtype(value.dtype) != kind.dtype or value.ndim != kind.ndim or not value.flags.c_contiguous:
                    raise TypeError(f"{name} is {value.dtype} of {value.ndim} dimensions, expected {kind}")
                words += [value.ctypes.data, *value.shape]
            elif isinstance(kind, _BlockType):
                words.append(value.address)
            else:
                words.append(int(np.float64(value).view(np.int64)) if kind is types.float64 else int(value))
        self.__dict__.update(named, _words=np.array(words, dtype=np.int64))
        self.__dict__["address"] = self._words.ctypes.data

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def __reduce__(self) -> tuple[Any, ...]:
        """How to pickle it: by its fields, as addresses hold in one process alone."""
        return partial(type(self), **self.to_dict()), ()

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return {name: self.__dict__[name] for name in layout_of(type(self))}

    def replace(self, **changed: Any) -> Any:
        """The same with other values of some fields."""
        return type(self)(**{**self.to_dict(), **changed})


class _BlockType(types.Type):
    """Numba's type of a subclass of `Block`."""

    def __init__(self, kind: type[Block]) -> None:
        self.kind = kind
        super().__init__(f"{kind.__module__}.{kind.__qualname__}")


_BLOCK_TYPES: dict[type[Block], _BlockType] = {}
_NUMBERS = {int: types.int64, float: types.float64, bool: types.boolean}


def _block_type(kind: type[Block]) -> _BlockType:
    return _BLOCK_TYPES.setdefault(kind, _BlockType(kind))


def layout_of(kind: type[Block]) -> dict[str, tuple[int, Any, int]]:
    """For each field of a block its first word of 8 bytes, numba's type, and the number of dimensions."""
    if "_layout" not in kind.__dict__:
        layout: dict[str, tuple[int, Any, int]] = {}
        word = 0
        for name, hint in get_type_hints(kind, include_extras=True).items():
            if name in ("_layout", "_words"):
                continue
            if hint in _NUMBERS:
                layout[name] = word, _NUMBERS[hint], 0
            elif isinstance(hint, type) and issubclass(hint, Block):
                layout[name] = word, _block_type(hint), 0
            else:
                ndim = hint.__metadata__[0] if hasattr(hint, "__metadata__") else 1
                array = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
                scalar = get_args(array)[-1]  # until NumPy 2.4 the last argument is dtype[scalar]
                dtype = from_dtype(np.dtype((get_args(scalar) or (scalar,))[0]))
                layout[name] = word, types.Array(dtype, ndim, "C"), ndim
            word += 1 + layout[name][2]
        kind._layout = layout
    return kind._layout


@typeof_impl.register(Block)
def _typeof_block(value: Block, context: Any) -> _BlockType:
    return _block_type(type(value))


@register_model(_BlockType)
class _BlockModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.IntType(64).as_pointer())  # type: ignore[no-untyped-call]


@unbox(_BlockType)  # type: ignore[no-untyped-call,untyped-decorator]
def _unbox_block(kind: Any, value: Any, c: Any) -> Any:
    address = c.pyapi.object_getattr_string(value, "address")
    words = c.builder.inttoptr(c.pyapi.long_as_longlong(address), ir.IntType(64).as_pointer())
    c.pyapi.decref(address)
    return NativeValue(words)  # type: ignore[no-untyped-call]


@infer_getattr
class _BlockFields(AttributeTemplate):
    key = _BlockType

    def generic_resolve(self, kind: Any, name: str) -> Any:  # type: ignore[override]
        return layout_of(kind.kind)[name][1] if name in layout_of(kind.kind) else None


@lower_getattr_generic(_BlockType)  # type: ignore[no-untyped-call,untyped-decorator]
def _get_field(context: Any, builder: Any, kind: Any, value: Any, name: str) -> Any:
    """A field, read from the table: numbers as they are, arrays without an owner, as the block holds them."""
    word, field, ndim = layout_of(kind.kind)[name]

    def read(place: int) -> Any:
        loaded = builder.load(builder.gep(value, [ir.Constant(ir.IntType(32), place)]))
        loaded.set_metadata("invariant.load", builder.module.add_metadata([]))  # no kernel writes the table itself
        return loaded

    if isinstance(field, types.Array):
        array = context.make_array(field)(context, builder)
        size = context.get_abi_sizeof(context.get_value_type(field.dtype))
        shape = [read(word + 1 + axis) for axis in range(ndim)]
        strides = [ir.Constant(ir.IntType(64), size)]
        for extent in reversed(shape[1:]):
            strides.insert(0, builder.mul(strides[0], extent))
        data = builder.inttoptr(read(word), array.data.type)
        item = ir.Constant(ir.IntType(64), size)
        populate_array(array, data, shape, strides, item, None)  # type: ignore[no-untyped-call]
        return array._getvalue()
    if isinstance(field, _BlockType):
        return builder.inttoptr(read(word), ir.IntType(64).as_pointer())
    if field is types.float64:
        return builder.bitcast(read(word), ir.DoubleType())
    return builder.trunc(read(word), ir.IntType(1)) if field is types.boolean else read(word)


@cache
def sources() -> str:
    """16 hex digits over the files of the package that make kernels, or that kernels are made of."""
    texts = (path.read_bytes() for path in Path(__file__).parent.rglob("*.py"))
    digests = sorted(hashlib.sha256(text).digest() for text in texts if b"rlplace.jit" in text)
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


class _Known:
    """Of numba's ways to a folder: none below the current one, which may be a stranger's, unless the user named it.

    Without a home, or where `XDG_CACHE_HOME` is empty, numba's own folder is there; it unpickles what it finds in one.
    """

    def ensure_cache_path(self: Any) -> None:
        path = self.get_cache_path()
        named: str = config.CACHE_DIR  # type: ignore[attr-defined]
        if not os.path.isabs(path) and not (named and path.startswith(named)):
            raise OSError(errno.ENOENT, "no cache folder of this user is known")
        super().ensure_cache_path()  # type: ignore[misc]


class _CacheFiles(CompileResultCacheImpl):
    """Names of the files, with the sources of all kernels in them."""

    _locator_classes: ClassVar[list[type]] = [  # type: ignore[misc, assignment]
        type(each.__name__, (_Known, each), {}) for each in CompileResultCacheImpl._locator_classes
    ]

    def get_filename_base(self, fullname: str, abiflags: str) -> str:
        name = super().get_filename_base(fullname, abiflags)  # type: ignore[no-untyped-call]
        return f"{name}-{sources()}"


class _Cache(FunctionCache):
    """Compiled code on disk, of these sources alone.

    Numba knows by itself whether the file of a kernel was edited, but not that of a helper that is compiled into it.
    Processes of two versions share no file, and compiled kernels replace those of other versions.
    """

    _impl_class = _CacheFiles

    @property
    def index(self) -> Path:
        """The index file of the cache."""
        return Path(self.cache_path, f"{self._impl.filename_base}.nbi")

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except OSError:  # no space is left, say: the kernel runs all the same
            _warn_not_kept()
            return
        name = glob.escape(self.index.name.partition("-")[0])
        for path in self.index.parent.glob(f"{name}-*.nb[ci]"):
            if sources() not in path.name:
                path.unlink(missing_ok=True)


def _of_types(compiled: Any) -> Any:
    """The compiled function; a call from another kernel compiles it for types, never for values.

    Numba would compile it anew for every constant argument, also for the constant that a variable begins with.
    """
    if hasattr(compiled, "py_func"):
        template = compiled.get_call_template
        general: Callable[[Any], Any] = types.unliteral
        compiled.get_call_template = lambda args, kws: template(
            tuple(map(general, args)), {name: general(arg) for name, arg in kws.items()}
        )
    return compiled


if TYPE_CHECKING:

    def lowest_bit(word: int) -> int:
        """Place of the lowest set bit of a word that is not 0."""

    Array = TypeVar("Array", bound=NDArray[Any])

    def pointer(array: Array) -> Array:
        """The array's memory, to be indexed without a look at the sign of the index; 1-D only."""

else:

    @intrinsic
    def lowest_bit(typing_context, word):
        """Place of the lowest set bit of a word that is not 0."""

        def generate(context, builder, signature, arguments):
            return builder.cttz(arguments[0], cgutils.true_bit)

        return types.int64(types.int64), generate

    @intrinsic
    def pointer(typing_context, array):
        """The array's memory, to be indexed without a look at the sign of the index; 1-D only."""
        if array.ndim != 1 or array.layout != "C":
            raise TypingError(f"a pointer needs a contiguous 1-D array, got {array}")

        def generate(context, builder, signature, arguments):
            return context.make_array(array)(context, builder, arguments[0]).data

        return types.CPointer(array.dtype)(array), generate
