"""What all kernels are made with: compiled once, kept on disk, free of the interpreter lock."""

from __future__ import annotations

import glob
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])

Bools = NDArray[np.bool_]
Bytes = NDArray[np.int8]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]


def kernel(function: Function) -> Function:
    """The function, compiled by numba when it is first called."""
    return cast(Function, njit(cache=True, nogil=True)(function))


def inlined(function: Function) -> Function:
    """The function, compiled into every kernel that calls it: calls would count references to every array passed."""
    return cast(Function, njit(cache=True, nogil=True, forceinline=True)(function))


def is_kept(function: Callable[..., Any]) -> bool:
    """Whether the code of a kernel is on disk already: an earlier process has compiled it."""
    folder, name = Path(cast(Any, function).stats.cache_path), glob.escape(function.__qualname__)
    return any(folder.glob(f"*.{name}-*.nbi"))


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
