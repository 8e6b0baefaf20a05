"""What all kernels are made with: compiled once, kept on disk, free of the interpreter lock."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from rlplace.process import unseen

# The file can name a folder of kernels, which numba unpickles, or modules, which it imports. `NUMBA_...` still counts.
with unseen(".numba_config.yaml"):
    from numba import njit, types
    from numba.core import cgutils, config
    from numba.core.caching import CompileResultCacheImpl, FunctionCache
    from numba.core.errors import TypingError
    from numba.extending import intrinsic

config._config_fname = ""  # it looks for the file again whenever it compiles
config.reload_config()  # type: ignore[no-untyped-call]  # another library may have imported numba before

Function = TypeVar("Function", bound=Callable[..., Any])

Bools = NDArray[np.bool_]
Bytes = NDArray[np.int8]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]


def kernel(function: Function) -> Function:
    """The function, compiled by numba when it is first called."""
    return _kept(function, njit(nogil=True)(function))


def inlined(function: Function) -> Function:
    """The function, compiled into every kernel that calls it: calls would count references to every array passed."""
    return _kept(function, njit(nogil=True, forceinline=True)(function))


def is_kept(function: Callable[..., Any]) -> bool:
    """Whether the code of a kernel is on disk already: an earlier process has compiled it."""
    return cast(_Cache, cast(Any, function)._cache).index.is_file()


@cache
def sources() -> str:
    """16 hex digits over the files of the package that make kernels, or what kernels are made of."""
    package, digests = Path(__file__).parent, []
    for folder, _, names in os.walk(package):
        for name in names:
            if name.endswith(".py") and b"rlplace.jit" in (text := Path(folder, name).read_bytes()):
                digests.append(hashlib.sha256(text).digest())
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()[:16]


class _CacheFiles(CompileResultCacheImpl):
    """Names of the files, with the sources of all kernels in them."""

    def get_filename_base(self, fullname: str, abiflags: str) -> str:
        name = super().get_filename_base(fullname, abiflags)  # type: ignore[no-untyped-call]
        return f"{name}-{sources()}"


class _Cache(FunctionCache):
    """Compiled code on disk, of these sources alone.

    Numba knows by itself whether the file of a kernel was edited, but not that of a helper that is compiled into it.
    Processes of two versions share no file, and what is compiled takes the place of other versions'.
    """

    _impl_class = _CacheFiles

    @property
    def index(self) -> Path:
        """The file that says what is there."""
        return Path(self.cache_path, f"{self._impl.filename_base}.nbi")

    def save_overload(self, sig: Any, data: Any) -> None:
        super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        name = glob.escape(self.index.name.partition("-")[0])
        for path in self.index.parent.glob(f"{name}-*.nb[ci]"):
            if sources() not in path.name:
                path.unlink(missing_ok=True)


def _kept(function: Function, compiled: Any) -> Function:
    """The compiled function, its code kept on disk; a call from another kernel compiles it for types, never for values.

    Numba would compile it anew for every constant argument, also for the constant that a variable begins with.
    """
    if hasattr(compiled, "py_func"):  # otherwise NUMBA_DISABLE_JIT is set
        compiled._cache = _Cache(function)  # type: ignore[no-untyped-call]
        template = compiled.get_call_template
        general: Callable[[Any], Any] = types.unliteral
        compiled.get_call_template = lambda args, kws: template(
            tuple(map(general, args)), {name: general(arg) for name, arg in kws.items()}
        )
    return cast(Function, compiled)


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
