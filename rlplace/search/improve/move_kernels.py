"""The kinds of moves from a placement of groups to near ones, and the kernel that makes them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.jit import Floats, Ints, kernel

ONE, NEIGHBOUR, SWAP, WINDOW, MODULE, CLUSTER, COPY = range(7)
"""One group elsewhere; a group to a neighbour's device; two groups change places; consecutive groups, in order of their
first op or of their module, to one device; a group with the neighbours that share its device, to another; consecutive
rows of a table to where the row before or after them is, cell by cell."""
DRAWS = 32
"""Uniform draws that a move may use."""
_TRIES = 6


@kernel
def propose_moves(
    moved: NDArray[np.int32],
    draws: Floats,
    chances: Floats,
    max_window: int,
    allowed: NDArray[np.bool_],
    movable: Ints,
    order: Ints,
    module_order: Ints,
    pairs: Ints,
    neighbour_offsets: Ints,
    neighbours: Ints,
    blocks: Ints,
    rows: Ints,
    columns: Ints,
    focus: Ints,
    focus_share: float,
    place: Ints,
    module_place: Ints,
) -> None:
    """Moves each row of `moved` (C, G) by its `draws` (C, DRAWS); the rest as in `Neighbourhood`."""
    num_groups, num_devices = allowed.shape
    for c in range(len(moved)):
        row, u = moved[c], draws[c]
        is_focused = len(focus) > 0 and u[DRAWS - 4] < focus_share
        leaders = focus if is_focused else movable  # one of these begins a move
        kind = 0
        while kind < COPY and u[0] >= chances[kind]:
            kind += 1
        changed = False
        if kind == NEIGHBOUR and is_focused:
            changed = _join_neighbour(row, u, leaders, allowed, neighbour_offsets, neighbours, blocks)
        elif kind == NEIGHBOUR and len(pairs):
            first = int(u[2] * len(pairs))
            for step in range(len(pairs)):  # the first cut pair from a random one on
                pair = pairs[(first + step) % len(pairs)]
                a, b = (pair[0], pair[1]) if u[1] < 0.5 else (pair[1], pair[0])
                if row[a] != row[b] and allowed[a, row[b]]:
                    _move(row, a, row[b], blocks, u[DRAWS - 3], allowed)
                    changed = True
                    break
        elif kind == SWAP:
            for attempt in range(_TRIES):
                a = leaders[int(u[1 + 2 * attempt] * len(leaders))]
                b = movable[int(u[2 + 2 * attempt] * len(movable))]
                if row[a] != row[b] and allowed[a, row[b]] and allowed[b, row[a]]:
                    row[a], row[b] = row[b], row[a]
                    changed = True
                    break
        elif kind in (WINDOW, MODULE):
            line = order if kind == WINDOW else module_order
            # short windows as often as long ones
            length = int(2.0 * (min(max_window, num_groups) / 2.0) ** u[1] + 0.5)
            first = int(u[2] * num_groups)
            if is_focused:
                group = leaders[int(u[2] * len(leaders))]
                at = place[group] if kind == WINDOW else module_place[group]
                first = max(at - int(u[5] * length), 0)
            device = int(u[3] * num_devices) if u[4] < 0.3 else row[line[max(first - 1, 0)]]
            for at in range(first, min(first + length, num_groups)):
                if row[line[at]] != device and allowed[line[at], device]:
                    row[line[at]] = device
                    changed = True
        elif kind == CLUSTER:
            group = leaders[int(u[1] * len(leaders))]
            home, device = row[group], _another(row[group], allowed[group], u[2])
            row[group] = device
            changed = True
            for edge in range(neighbour_offsets[group], neighbour_offsets[group + 1]):
                other = neighbours[edge]
                if row[other] == home and allowed[other, device]:
                    row[other] = device
        elif kind == COPY and len(rows):
            changed = _copy(row, u, allowed, rows, columns)
        if not changed:
            group = leaders[int(u[DRAWS - 1] * len(leaders))]
            _move(row, group, _another(row[group], allowed[group], u[DRAWS - 2]), blocks, u[DRAWS - 3], allowed)


@kernel
def _join_neighbour(
    row: Ints,
    u: Floats,
    groups: Ints,
    allowed: NDArray[np.bool_],
    neighbour_offsets: Ints,
    neighbours: Ints,
    blocks: Ints,
) -> bool:
    """Puts one of `groups` where a neighbour is, or the neighbour where it is: the first cut pair from a random one."""
    first = int(u[2] * len(groups))
    for step in range(len(groups)):
        group = groups[(first + step) % len(groups)]
        begin = neighbour_offsets[group]
        count = neighbour_offsets[group + 1] - begin
        for edge in range(count):
            other = neighbours[begin + (int(u[3] * count) + edge) % count]
            a, b = (other, group) if u[1] < 0.5 else (group, other)
            if row[a] == row[b]:
                continue
            if not allowed[a, row[b]]:
                a, b = b, a
            if allowed[a, row[b]]:
                _move(row, a, row[b], blocks, u[DRAWS - 3], allowed)
                return True
    return False


@kernel
def _copy(row: Ints, u: Floats, allowed: NDArray[np.bool_], rows: Ints, columns: Ints) -> bool:
    """Puts some rows of the table where the one before or after them is, half of the time without column 0."""
    num_rows = rows.max() + 1
    length = int((max(num_rows // 2, 2) / 2.0) ** u[1] + 0.5)  # short ones as often as long ones
    first = int(u[2] * num_rows)
    source = first - 1 if u[3] < 0.5 else first + length
    if source < 0 or source >= num_rows:
        return False
    device = np.full(columns.max() + 1, -1, np.int32)
    for group in range(len(row)):
        if rows[group] == source and device[columns[group]] < 0:
            device[columns[group]] = row[group]
    if u[4] < 0.5:
        device[0] = -1
    changed = False
    for group in range(len(row)):
        if first <= rows[group] < first + length:
            to = device[columns[group]]
            if to >= 0 and row[group] != to and allowed[group, to]:
                row[group] = to
                changed = True
    return changed


@kernel
def _move(row: Ints, group: int, device: int, blocks: Ints, u: float, allowed: NDArray[np.bool_]) -> None:
    """Puts `group` on `device`, with those of its block, on a level drawn by `u`, that are where it is."""
    level, home = int(u * (len(blocks) + 1)) - 1, row[group]
    row[group] = device
    if level >= 0:
        for other in range(len(row)):
            if blocks[level, other] == blocks[level, group] and row[other] == home and allowed[other, device]:
                row[other] = device


@kernel
def _another(device: int, allowed: NDArray[np.bool_], u: float) -> int:
    """A device that is allowed and is not `device`, by the draw `u`."""
    count = 0
    for other in range(len(allowed)):
        if allowed[other] and other != device:
            count += 1
    skip = int(u * count)
    for other in range(len(allowed)):
        if allowed[other] and other != device:
            if skip == 0:
                return other
            skip -= 1
    return device
