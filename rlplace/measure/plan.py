"""`Plan`: a placement with every order fixed, as it will run."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlplace.say import counted


@dataclass(frozen=True, eq=False)
class Plan:
    """One global sequence of ops and transfers; every static order is this sequence, filtered.

    The order of ops on a device, of transfers on a link and of launches on a dispatcher are sub-sequences of
    `sequence`. Since it is one topological order, no set of threads that follow it can deadlock.

    Attributes:
        devices: (N,) int32, device of each op.
        transfer_tensor: (K,) int32, tensor that each transfer carries ...
        transfer_destination: (K,) int32, ... and the device it goes to (the source is the producer's device).
        sequence: (N + K,) int32, op i as `i`, transfer k as `N + k`, in order of planned start.
    """

    devices: NDArray[np.int32]
    transfer_tensor: NDArray[np.int32]
    transfer_destination: NDArray[np.int32]
    sequence: NDArray[np.int32]

    def __post_init__(self) -> None:
        for name in ("devices", "transfer_tensor", "transfer_destination", "sequence"):
            array = np.ascontiguousarray(getattr(self, name), dtype=np.int32)
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    @cached_property
    def fingerprint(self) -> str:
        """Of devices, transfers and every order: equal plans run alike."""
        digest = hashlib.sha256()
        for array in (self.devices, self.transfer_tensor, self.transfer_destination, self.sequence):
            digest.update(len(array).to_bytes(8, "little") + array.tobytes())
        return digest.hexdigest()[:32]

    @property
    def num_transfers(self) -> int:
        return len(self.transfer_tensor)

    def __repr__(self) -> str:
        """In one line: that of a dataclass would print every array."""
        on = f"{counted(len(self.devices), 'op')} on {counted(len(np.unique(self.devices)), 'device')}"
        return f"Plan({on}, {counted(self.num_transfers, 'transfer')})"
