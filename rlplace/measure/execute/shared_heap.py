"""`SharedHeap`: tensors in memory that the processes of a machine share: one of them makes tensors, all see them."""

from __future__ import annotations

import ctypes
import heapq
import mmap
import os
import threading
import weakref
from collections import defaultdict, deque
from typing import Any, NamedTuple

import torch

FIRST_BYTES = 1 << 26
"""Of the first chunk; each later one is twice as large. Pages that nobody writes to take no memory."""
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
        self._chunks: dict[int, tuple[mmap.mmap, int]] = {}  # by number: the memory, and its address
        self._end = 0  # behind it, nothing was used yet
        self._freed: deque[tuple[int, int]] = deque()  # sizes and places; filled by the garbage collector
        self._empty: dict[int, list[int]] = defaultdict(list)  # by size: places, the first first
        self._lock = threading.Lock()

    def empty(self, layout: Layout) -> torch.Tensor:
        """A new tensor with any values.

        Raises:
            OSError: there is no memory for it.
        """
        num_bytes = max(layout.extent * layout.dtype.itemsize, _LEAST_BYTES)
        size = 1 << (num_bytes - 1).bit_length()
        with self._lock:
            while self._freed:
                freed, at = self._freed.popleft()
                heapq.heappush(self._empty[freed], at)
            if self._empty[size]:
                at = heapq.heappop(self._empty[size])
            else:
                at, chunk = self._end, _chunk_at(self._end)
                while at + size > _begin_of(chunk + 1):
                    chunk += 1
                    at = _begin_of(chunk)
                self._end = at + size
            chunk = _chunk_at(at)
            memory, _ = self._chunk(chunk)
        # the storage keeps `block`, and nothing else does
        block = (ctypes.c_char * num_bytes).from_buffer(memory, at - _begin_of(chunk))
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
        if tensor.numel() == 0:
            return Place(-1, Layout.of(tensor))
        address = tensor.data_ptr() if tensor.device.type == "cpu" else 0
        for chunk, (memory, begin) in self._chunks.items():
            if begin <= address < begin + len(memory):
                return Place(_begin_of(chunk) + address - begin, Layout.of(tensor))
        return None

    def at(self, place: Place) -> torch.Tensor:
        """The tensor at a place that the process that made it told."""
        if place.at < 0:
            return place.layout.tensor(b"", 0)
        chunk = _chunk_at(place.at)
        return place.layout.tensor(self._chunk(chunk)[0], place.at - _begin_of(chunk))

    def _chunk(self, number: int) -> tuple[mmap.mmap, int]:
        if number not in self._chunks:
            begin, end = self._begin + _begin_of(number), self._begin + _begin_of(number + 1)
            if os.fstat(self._file).st_size < end:
                os.ftruncate(self._file, end)
            memory = mmap.mmap(self._file, end - begin, offset=begin)
            self._chunks[number] = memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return self._chunks[number]


def _begin_of(chunk: int) -> int:
    return ((1 << chunk) - 1) * FIRST_BYTES


def _chunk_at(at: int) -> int:
    """The chunk that a place is in.

    >>> [_chunk_at(at) for at in (0, FIRST_BYTES - 1, FIRST_BYTES, 3 * FIRST_BYTES)]
    [0, 0, 1, 2]
    """
    return (at // FIRST_BYTES + 1).bit_length() - 1
