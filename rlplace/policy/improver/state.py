"""`PassState`: what a pass over a placement sees, group after group, as kernels over a batch of placements."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.env.group_arrays import GroupArrays
from rlplace.jit import Bools, Floats, Ints, Longs, inlined, kernel

STATE_FEATURES = ("stays", "load", "load_above", "cut", "cut_in", "cut_out", "reads", "readers", "fullness", "follows")
"""What moving a group to a device would mean, the placement of all others being what it is just then:

- `stays`: 1 where the group is now;
- `load`: time of all that would be there, over an even share of the step;
- `load_above`: that time above the least of any device;
- `cut`, `cut_in`, `cut_out`: seconds that tensors would take between it and its neighbours, in all, from those that it
  reads, and to those that read it, above the least of any device;
- `reads`, `readers`: the shares of the bytes that it reads, and that are read of it, that are there;
- `fullness`: bytes that would be held over room;
- `follows`: 1 where the group decided just before is.

Seconds are in mean costs of a group, as log(1 + x).
"""
Features = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class PassArrays:
    """A problem as the kernels take it; times in mean costs of a group."""

    order: Longs
    cost: Floats
    share: float
    held: Floats
    latency: Floats
    per_byte: Floats
    occupies: Bools
    allowed: Bools
    offsets: Longs
    joined: Longs
    joined_bytes: Floats
    is_in: Bools

    @classmethod
    def of(cls, arrays: GroupArrays) -> PassArrays:
        """Those of the groups in `arrays`."""
        this = np.concatenate((arrays.edge_target, arrays.edge_source))
        other = np.concatenate((arrays.edge_source, arrays.edge_target))
        is_in = np.arange(len(this)) < len(arrays.edge_target)
        by_group = np.lexsort((other, this))
        return cls(
            order=arrays.order,
            cost=arrays.cost_s / arrays.unit_s,
            share=arrays.share_s / arrays.unit_s,
            held=arrays.held_bytes[:, None] / arrays.room_bytes[None, :],
            latency=arrays.latency_s / arrays.unit_s,
            per_byte=arrays.s_per_byte / arrays.unit_s,
            occupies=np.ascontiguousarray(arrays.occupies),
            allowed=np.array(arrays.allowed),
            offsets=np.searchsorted(this[by_group], np.arange(arrays.num_groups + 1)).astype(np.int64),
            joined=other[by_group],
            joined_bytes=np.concatenate((arrays.edge_bytes, arrays.edge_bytes))[by_group],
            is_in=is_in[by_group],
        )


class PassState:
    """B placements in the middle of a pass: groups before the pointer are decided, the others are where they were."""

    def __init__(self, arrays: PassArrays, start_G: NDArray[np.integer], batch_size: int) -> None:
        num_devices = arrays.cost.shape[1]
        self._arrays = arrays
        self.placed_BG = np.repeat(np.asarray(start_G, dtype=np.int32)[None], batch_size, axis=0)
        self._load_BD = np.zeros((batch_size, num_devices))
        self._used_BD = np.zeros((batch_size, num_devices))
        self._latest_B = np.full(batch_size, -1, dtype=np.int64)
        self._features_BDS = np.zeros((batch_size, num_devices, len(STATE_FEATURES)), dtype=np.float32)
        _fill(self.placed_BG, self._load_BD, self._used_BD, arrays.cost, arrays.held, arrays.occupies)

    def look(self, group: int) -> Features:
        """(B, D, S) float32 `STATE_FEATURES` of a group on every device; it is the pass's own array."""
        a = self._arrays
        _look_all(
            group, self._features_BDS, self.placed_BG, self._load_BD, self._used_BD, self._latest_B,
            a.cost, a.share, a.held, a.latency, a.per_byte, a.occupies, a.allowed,
            a.offsets, a.joined, a.joined_bytes, a.is_in,
        )  # fmt: skip
        return self._features_BDS

    def move(self, group: int, devices_B: NDArray[np.integer]) -> None:
        """Puts the group on a device in each placement."""
        a = self._arrays
        _move_all(
            group, np.asarray(devices_B, dtype=np.int32), self.placed_BG, self._load_BD, self._used_BD,
            self._latest_B, a.cost, a.held, a.occupies,
        )  # fmt: skip


def replay(arrays: PassArrays, start_G: NDArray[np.integer], placed_BG: NDArray[np.integer]) -> Features:
    """(B, G, D, S) float32: what a pass from `start_G` saw of each group before it put it where `placed_BG` has it."""
    rows = np.ascontiguousarray(placed_BG, dtype=np.int32)
    shape = (len(rows), *arrays.cost.shape, len(STATE_FEATURES))
    a, features_BGDS = arrays, np.zeros(shape, dtype=np.float32)
    _replay(
        features_BGDS, np.asarray(start_G, dtype=np.int32), rows, a.order,
        a.cost, a.share, a.held, a.latency, a.per_byte, a.occupies, a.allowed,
        a.offsets, a.joined, a.joined_bytes, a.is_in,
    )  # fmt: skip
    return features_BGDS


@kernel
def _fill(placed_BG: Ints, load_BD: Floats, used_BD: Floats, cost: Floats, held: Floats, occupies: Bools) -> None:
    for row in range(placed_BG.shape[0]):
        for group in range(placed_BG.shape[1]):
            _add(1.0, group, placed_BG[row, group], load_BD[row], used_BD[row], cost, held, occupies)


@kernel
def _look_all(
    group: int,
    features_BDS: Features,
    placed_BG: Ints,
    load_BD: Floats,
    used_BD: Floats,
    latest_B: Longs,
    cost: Floats,
    share: float,
    held: Floats,
    latency: Floats,
    per_byte: Floats,
    occupies: Bools,
    allowed: Bools,
    offsets: Longs,
    joined: Longs,
    joined_bytes: Floats,
    is_in: Bools,
) -> None:
    scratch = np.empty((5, cost.shape[1]))
    for row in range(placed_BG.shape[0]):
        _look(
            group, features_BDS[row], placed_BG[row], load_BD[row], used_BD[row], latest_B[row], scratch,
            cost, share, held, latency, per_byte, occupies, allowed, offsets, joined, joined_bytes, is_in,
        )  # fmt: skip


@kernel
def _move_all(
    group: int,
    devices_B: Ints,
    placed_BG: Ints,
    load_BD: Floats,
    used_BD: Floats,
    latest_B: Longs,
    cost: Floats,
    held: Floats,
    occupies: Bools,
) -> None:
    for row in range(len(devices_B)):
        _add(-1.0, group, placed_BG[row, group], load_BD[row], used_BD[row], cost, held, occupies)
        _add(1.0, group, devices_B[row], load_BD[row], used_BD[row], cost, held, occupies)
        placed_BG[row, group] = devices_B[row]
        latest_B[row] = devices_B[row]


@kernel
def _replay(
    features_BGDS: Features,
    start_G: Ints,
    placed_BG: Ints,
    order: Longs,
    cost: Floats,
    share: float,
    held: Floats,
    latency: Floats,
    per_byte: Floats,
    occupies: Bools,
    allowed: Bools,
    offsets: Longs,
    joined: Longs,
    joined_bytes: Floats,
    is_in: Bools,
) -> None:
    num_groups, num_devices = cost.shape
    scratch = np.empty((5, num_devices))
    begin_load, begin_used = np.zeros(num_devices), np.zeros(num_devices)
    for group in range(num_groups):
        _add(1.0, group, start_G[group], begin_load, begin_used, cost, held, occupies)
    for row in range(len(placed_BG)):
        now, load, used, latest = start_G.copy(), begin_load.copy(), begin_used.copy(), -1
        for group in order:
            _look(
                group, features_BGDS[row, group], now, load, used, latest, scratch,
                cost, share, held, latency, per_byte, occupies, allowed, offsets, joined, joined_bytes, is_in,
            )  # fmt: skip
            device = placed_BG[row, group]
            _add(-1.0, group, now[group], load, used, cost, held, occupies)
            _add(1.0, group, device, load, used, cost, held, occupies)
            now[group] = device
            latest = device


@inlined
def _add(
    sign: float, group: int, device: int, load: Floats, used: Floats, cost: Floats, held: Floats, occupies: Bools
) -> None:
    used[device] += sign * held[group, device]
    for other in range(len(load)):
        if occupies[device, other]:
            load[other] += sign * cost[group, device]


@inlined
def _look(
    group: int,
    features_DS: Features,
    placed: Ints,
    load: Floats,
    used: Floats,
    latest: int,
    scratch: Floats,
    cost: Floats,
    share: float,
    held: Floats,
    latency: Floats,
    per_byte: Floats,
    occupies: Bools,
    allowed: Bools,
    offsets: Longs,
    joined: Longs,
    joined_bytes: Floats,
    is_in: Bools,
) -> None:
    num_devices, here = len(load), placed[group]
    scratch[:] = 0.0
    cut_in, cut_out, reads, readers, busy = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4]
    in_bytes, out_bytes = 0.0, 0.0
    for edge in range(offsets[group], offsets[group + 1]):
        home, size = placed[joined[edge]], joined_bytes[edge]
        if is_in[edge]:
            reads[home] += size
            in_bytes += size
        else:
            readers[home] += size
            out_bytes += size
        for d in range(num_devices):
            if d != home and is_in[edge]:
                cut_in[d] += latency[home, d] + size * per_byte[home, d]
            elif d != home:
                cut_out[d] += latency[d, home] + size * per_byte[d, home]
    least_load, least_in, least_out, least_cut = np.inf, np.inf, np.inf, np.inf
    for d in range(num_devices):
        there = 0.0
        for other in range(num_devices):
            if occupies[d, other]:
                without = load[other] - cost[group, here] if occupies[here, other] else load[other]
                there = max(there, without)
        busy[d] = there + cost[group, d]
        if allowed[group, d]:
            least_load = min(least_load, busy[d])
            least_in, least_out = min(least_in, cut_in[d]), min(least_out, cut_out[d])
            least_cut = min(least_cut, cut_in[d] + cut_out[d])
    for d in range(num_devices):
        features_DS[d, 0] = 1.0 if d == here else 0.0
        features_DS[d, 1] = busy[d] / share
        features_DS[d, 2] = math.log1p(busy[d] - least_load if allowed[group, d] else 0.0)
        features_DS[d, 3] = math.log1p(max(cut_in[d] + cut_out[d] - least_cut, 0.0))
        features_DS[d, 4] = math.log1p(max(cut_in[d] - least_in, 0.0))
        features_DS[d, 5] = math.log1p(max(cut_out[d] - least_out, 0.0))
        features_DS[d, 6] = reads[d] / in_bytes if in_bytes > 0.0 else 0.0
        features_DS[d, 7] = readers[d] / out_bytes if out_bytes > 0.0 else 0.0
        features_DS[d, 8] = used[d] + (held[group, d] if d != here else 0.0)
        features_DS[d, 9] = 1.0 if d == latest else 0.0
