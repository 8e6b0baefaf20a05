"""`Arena`: memory that the processes of a machine share, one process for each rank; `SharedChannel`: a transfer in it.

The producer copies a tensor into its slot, where the destination reads it in place, until its program frees it: `Slots`
says why none is filled before. All signals are POSIX semaphores in that memory. Each is at zero when a step ends, so
all plans use the same ones, and the same slots. A step that was given up leaves signals behind: `Arena.reset` is for
them.
"""

from __future__ import annotations

import _multiprocessing  # type: ignore[import-not-found]
import ctypes
import mmap
import os
import struct
import sys
from typing import Any

import torch

from rlplace.errors import RunnerError
from rlplace.measure.execute.device_threads import Woken
from rlplace.measure.execute.rank_programs import RankPrograms, Slots
from rlplace.measure.execute.shared_heap import Layout, SharedHeap

RECORD_BYTES = 512
"""Of a rank (two signals of 32 bytes), or of a transfer (one), then what goes with them."""
MOST_RANKS = 128
MOST_RECORDS = 1 << 18
SLOTS_AT = MOST_RECORDS * RECORD_BYTES
"""Where slots begin. Pages that nobody writes to take no memory."""
HEAP_AT = 1 << 40
"""Where the heap begins, behind all slots."""
_SIGNAL_BYTES, _FACTS_AT = 32, 64
_ALIGNED = 64
"""Slots begin at multiples of it, as PyTorch's own tensors do: kernels then take the same ways."""
_ABORTED_AT = (MOST_RANKS - 1) * RECORD_BYTES
_LAYOUT, _TASK = "32s q", "q q ?"


Signal = Any
"""A semaphore, of the class that `multiprocessing` has: it is taken by `acquire(block, timeout)`."""


def slot_offsets(slots: Slots) -> tuple[list[int], int]:
    """Where each slot begins, in bytes, and the bytes of all of them.

    >>> slot_offsets(Slots((0, 1), (100, 8)))
    ([0, 128], 192)
    """
    offsets, end = [], 0
    for num_bytes in slots.num_bytes:
        offsets.append(end)
        end += -(-max(num_bytes, 1) // _ALIGNED) * _ALIGNED
    return offsets, end


class Arena:
    """Signals, tasks, slots and other tensors of the ranks of one machine, in a file without a name.

    Args:
        file: its descriptor.

    Attributes:
        file: to be inherited.
        heap: for tensors that are no transfers.
        limit_bytes: most that slots may take.
        num_transfers: the most that any step so far has.
    """

    def __init__(self, file: int) -> None:
        self.file = file
        self.heap = SharedHeap(file, HEAP_AT)
        self.limit_bytes = float("inf")
        self._records = mmap.mmap(file, SLOTS_AT)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._records))
        self._slots: mmap.mmap | None = None
        self.num_transfers = 0
        self.view = memoryview(self._records)

    @classmethod
    def new(cls, num_ranks: int) -> Arena:
        """A fresh one.

        Raises:
            RunnerError: this system has no such signals.
            OSError: there is no memory for it.
        """
        if sys.platform != "linux" or num_ranks >= MOST_RANKS:
            raise RunnerError(f"a process for each of {num_ranks} devices: Linux is needed, and less than {MOST_RANKS}")
        file = os.memfd_create("rlplace")
        os.ftruncate(file, SLOTS_AT + mmap.PAGESIZE)
        arena = cls(file)
        for rank in range(num_ranks):
            arena._make_signal(rank, 0)
            arena._make_signal(rank, 1)
        return arena

    def task_signals(self, rank: int) -> tuple[Signal, Signal]:
        """Those by which a rank is told to start, and tells that it is done."""
        return self._signal(rank, 0), self._signal(rank, 1)

    def transfer_signal(self, transfer: int) -> Signal:
        """That a tensor is in its slot."""
        return self._signal(MOST_RANKS + transfer, 0)

    def set_task(self, rank: int, key: int, step: int) -> None:
        """Says what a rank is to do next."""
        struct.pack_into(_TASK, self._records, rank * RECORD_BYTES + _FACTS_AT, key, step, False)

    def task(self, rank: int) -> tuple[int, int]:
        """What a rank is to do: the key and the number of a step."""
        key, step, _ = struct.unpack_from(_TASK, self._records, rank * RECORD_BYTES + _FACTS_AT)
        return key, step

    def set_failed(self, rank: int) -> None:
        """Says that a rank has an error to tell."""
        struct.pack_into(_TASK, self._records, rank * RECORD_BYTES + _FACTS_AT, 0, 0, True)

    def has_failed(self, rank: int) -> bool:
        """Whether it has."""
        return bool(struct.unpack_from(_TASK, self._records, rank * RECORD_BYTES + _FACTS_AT)[2])

    def make_room(self, num_transfers: int, num_bytes: int) -> None:
        """Makes signals of transfers and memory for slots, before ranks use them.

        Raises:
            MemoryError: the slots would take more than they may.
            RunnerError: there are too many transfers.
        """
        if num_bytes > self.limit_bytes:
            raise MemoryError(f"copies in flight take {num_bytes:,} bytes, of {self.limit_bytes:,.0f} that are left")
        if MOST_RANKS + num_transfers > MOST_RECORDS:
            raise RunnerError(f"{num_transfers} transfers: processes pass at most {MOST_RECORDS - MOST_RANKS} a step")
        for transfer in range(self.num_transfers, num_transfers):
            self._make_signal(MOST_RANKS + transfer, 0)
        self.num_transfers = max(self.num_transfers, num_transfers)
        if SLOTS_AT + num_bytes > os.fstat(self.file).st_size:
            os.ftruncate(self.file, SLOTS_AT + num_bytes)

    def slots(self, num_bytes: int) -> mmap.mmap:
        """The memory of slots, which has been made so large."""
        if self._slots is None or len(self._slots) < num_bytes:
            self._slots = mmap.mmap(self.file, max(num_bytes, mmap.PAGESIZE), offset=SLOTS_AT)
        return self._slots

    @property
    def is_aborted(self) -> bool:
        """Whether the step was given up."""
        return self.view[_ABORTED_AT] != 0

    def abort(self) -> None:
        """Wakes all ranks that wait for each other in a step, which is given up."""
        if self.is_aborted:
            return
        self.view[_ABORTED_AT] = 1
        for transfer in range(self.num_transfers):
            self.transfer_signal(transfer).release()

    def reset(self) -> None:
        """Makes signals as before the first step; no rank may be in one."""
        self.view[_ABORTED_AT] = 0
        for transfer in range(self.num_transfers):
            self._make_signal(MOST_RANKS + transfer, 0)

    def close(self) -> None:
        """Closes the descriptor; the memory is given back with the last process that has it."""
        os.close(self.file)

    def _make_signal(self, record: int, place: int) -> None:
        at = self._address + record * RECORD_BYTES + place * _SIGNAL_BYTES
        if _libc.sem_init(ctypes.c_void_p(at), 1, 0) != 0:
            raise OSError(ctypes.get_errno(), "no signals between processes can be made")

    def _signal(self, record: int, place: int) -> Signal:
        # the semaphore class of `multiprocessing`, on a semaphore that has no name which a killed process would leave
        at = self._address + record * RECORD_BYTES + place * _SIGNAL_BYTES
        made: Signal = _multiprocessing.SemLock._rebuild(at, 1, _multiprocessing.SemLock.SEM_VALUE_MAX, None)
        return made


_libc = ctypes.CDLL(None, use_errno=True)


def shared_channels(arena: Arena, made: RankPrograms, slots: Slots, rank: int) -> dict[int, SharedChannel]:
    """The channels of a rank, by transfer that it sends or receives, in the slots of its machine."""
    plan = made.plan
    offsets, num_bytes = slot_offsets(slots)
    memory = arena.slots(num_bytes)
    arena.num_transfers = max(arena.num_transfers, plan.num_transfers)
    ends = zip(made.sources, plan.transfer_destination.tolist(), made.has_slot, strict=True)
    own = [k for k, (source, to, has_slot) in enumerate(ends) if has_slot and rank in (source, to)]
    return {k: SharedChannel(arena, k, memory, offsets[slots.of[k]]) for k in own}


class SharedChannel:
    """One transfer of a plan between two processes, used once a step.

    The layout of its tensor is told in the first step, by the producer, which alone knows it.

    Args:
        arena: with its signals.
        transfer: its index.
        memory: with its slot.
        at: where the slot begins, in bytes.
    """

    def __init__(self, arena: Arena, transfer: int, memory: mmap.mmap, at: int) -> None:
        self._arena, self._view = arena, arena.view
        self._memory, self._at = memory, at
        self._facts_at = (MOST_RANKS + transfer) * RECORD_BYTES + _FACTS_AT
        self._tensor: torch.Tensor | None = None
        ready = arena.transfer_signal(transfer)
        self.wait_ready, self._set_ready = ready.acquire, ready.release

    def send(self, tensor: torch.Tensor) -> None:
        """Copies the tensor into its slot, for the destination."""
        if self._tensor is None:
            self._tensor = self._announced(tensor)
        self._tensor.copy_(tensor)
        self._set_ready()

    def take(self) -> torch.Tensor:
        """The tensor in its slot, once it is ready there."""
        if self._view[_ABORTED_AT]:
            raise Woken
        if self._tensor is None:
            self._tensor = self._as_announced()
        return self._tensor

    def abort(self) -> None:
        """Wakes all ranks that wait in the step."""
        self._arena.abort()

    def _announced(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype, shape, stride = Layout.of_copy(tensor)
        name = str(dtype).removeprefix("torch.").encode()
        layout = f"{_LAYOUT} {2 * len(shape)}q"
        struct.pack_into(layout, self._view, self._facts_at, name, len(shape), *shape, *stride)
        return self._as_announced()

    def _as_announced(self) -> torch.Tensor:
        name, num_dims = struct.unpack_from(_LAYOUT, self._view, self._facts_at)
        sizes = struct.unpack_from(f"{2 * num_dims}q", self._view, self._facts_at + struct.calcsize(_LAYOUT))
        dtype: Any = getattr(torch, name.rstrip(b"\0").decode())
        return Layout(dtype, sizes[:num_dims], sizes[num_dims:]).tensor(self._memory, self._at)
