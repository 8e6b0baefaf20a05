"""`SharedHeap`: tensors in memory that the processes of a machine share: one of them makes tensors, all see them.

A message says where a tensor is (`packed`), and the process that reads it has the same tensor (`unpacked`).
"""

from __future__ import annotations

import ctypes
import heapq
import io
import mmap
import os
import pickle
import resource
import threading
import weakref
from collections import defaultdict, deque
from functools import cached_property
from typing import Any, NamedTuple

import torch

HEAP_BYTES = 4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
"""Of address space, of which a process has 128 TiB: four times the machine's memory, since sizes are rounded up, and
pages that nobody writes to take none."""
_LEAST_BYTES = 64


class Layout(NamedTuple):
    """How a tensor is laid out in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """That of a tensor itself."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride())

    @classmethod
    def of_copy(cls, tensor: torch.Tensor) -> Layout:
        """That of a copy of a tensor."""
        return cls.of(torch.empty_like(tensor, device="meta"))

    @property
    def extent(self) -> int:
        """Elements from the first to the last one."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def tensor(self, memory: Any, at: int) -> torch.Tensor:
        """The tensor that begins `at` bytes into some memory, which it keeps."""
        with torch.inference_mode(False):
            if self.extent == 0:
                return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
            flat = torch.frombuffer(memory, dtype=self.dtype, count=self.extent, offset=at)
            # not by a view: autograd refuses to change those in place
            made = torch.empty(0, dtype=self.dtype)
            return made.set_(flat.untyped_storage(), 0, self.shape, self.stride)


class Place(NamedTuple):
    """Where a tensor is in a heap: `at` bytes from its beginning."""

    at: int
    layout: Layout


class SharedHeap:
    """Memory for tensors in a file without a name.

    A tensor has its memory until no tensor of the process that made it shows it; the others may use it until then.

    Args:
        file: its descriptor.
        begin: where the heap begins in it, in bytes; nothing else is behind it.
    """

    def __init__(self, file: int, begin: int) -> None:
        self._file, self._begin = file, begin
        self._end = 0  # behind it, nothing was used yet
        self._freed: deque[tuple[int, int]] = deque()  # sizes and places; filled by the garbage collector
        self._empty: dict[int, list[int]] = defaultdict(list)  # by size: places, the first first
        self._lock = threading.Lock()

    def empty(self, layout: Layout) -> torch.Tensor:
        """A new tensor with any values.

        Raises:
            MemoryError: there is no room for it.
        """
        num_bytes = max(layout.extent * layout.dtype.itemsize, _LEAST_BYTES)
        size = 1 << (num_bytes - 1).bit_length()
        memory, _ = self._memory
        with self._lock:
            while self._freed:
                freed, at = self._freed.popleft()
                heapq.heappush(self._empty[freed], at)
            if self._empty[size]:
                at = heapq.heappop(self._empty[size])
            elif (at := self._end) + size > len(memory):
                raise MemoryError(f"{num_bytes:,} bytes for a tensor: {at:,} of {len(memory):,} bytes were given away")
            else:
                self._end += size
        # the storage keeps `block`, and nothing else does
        block = (ctypes.c_char * num_bytes).from_buffer(memory, at)
        weakref.finalize(block, self._freed.append, (size, at)).atexit = False
        return layout.tensor(block, 0)

    def home(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself where it is here, else a copy that is."""
        if self.place(tensor) is not None:
            return tensor
        with torch.no_grad():
            return self.empty(Layout.of_copy(tensor)).copy_(tensor)

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor is; None where it is in other memory."""
        memory, begin = self._memory
        at = tensor.data_ptr() - begin if tensor.device.type == "cpu" else -1
        at = at if tensor.numel() else 0  # without elements it is anywhere
        return Place(at, Layout.of(tensor)) if 0 <= at < len(memory) else None

    def at(self, place: Place) -> torch.Tensor:
        """The tensor at a place that the process that made it told."""
        return place.layout.tensor(self._memory[0], place.at)

    def packed(self, message: Any) -> bytes:
        """A message to another process; all of its tensors must be here."""
        into = io.BytesIO()
        pickler = pickle.Pickler(into, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = self._named  # type: ignore[method-assign]
        pickler.dump(message)
        return into.getvalue()

    def unpacked(self, packed: bytes) -> Any:
        """The message that another process packed, with the tensors themselves."""
        unpickler = pickle.Unpickler(io.BytesIO(packed))  # noqa: S301 - of a process that this one started, or that started it
        unpickler.persistent_load = self.at  # type: ignore[method-assign]
        return unpickler.load()

    def _named(self, obj: Any) -> Place | None:
        place = self.place(obj) if isinstance(obj, torch.Tensor) else None
        assert place is not None or not isinstance(obj, torch.Tensor), "other processes do not see this tensor"
        return place

    @cached_property
    def _memory(self) -> tuple[mmap.mmap, int]:
        """All of it, and its address."""
        limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)  # as some batch systems set it
        size = HEAP_BYTES if limit_bytes < 0 else min(HEAP_BYTES, limit_bytes // 4)
        if os.fstat(self._file).st_size < self._begin + HEAP_BYTES:
            os.ftruncate(self._file, self._begin + HEAP_BYTES)
        memory = mmap.mmap(self._file, size, offset=self._begin)
        return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))
