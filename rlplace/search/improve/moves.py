"""`Neighbourhood`: structured moves from placements of groups to near ones, for all chains of a search at once.

The kinds of moves from a placement of groups to near ones, and the kernel that makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs import Grouping
from rlplace.jit import Block, BoolTable, Floats, Ints, IntTable, is_kept, kernel, part
from rlplace.measure import Problem
from rlplace.search.groupings import allowed_devices, main_modules

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
    near: Neighbourhood,
    focus: Ints,
    focus_share: float,
) -> None:
    """Moves each row of `moved` (C, G) by its `draws` (C, DRAWS); the rest as in `Neighbourhood`.

    A row has `DRAWS` numbers for any move, so that the generator does not depend on the moves that came before: u[0]
    picks the kind; u[1], u[2], ... are the kind's own (which groups, how many, which device). The last four are the
    same for all kinds: u[-4] whether the move begins with a group of `focus`, u[-3] on which level the blocks of moved
    groups follow them, u[-2] the device and u[-1] the group of the move that is made where the kind finds none.
    """
    num_groups, num_devices = near.allowed.shape
    for c in range(len(moved)):
        row, u = moved[c], draws[c]
        is_focused = len(focus) > 0 and u[DRAWS - 4] < focus_share
        leaders = focus if is_focused else near.movable  # one of these begins a move
        # the kind of the move: the first whose cumulative chance is above the draw
        kind = 0
        while kind < COPY and u[0] >= chances[kind]:
            kind += 1
        changed = False
        if kind == NEIGHBOUR and is_focused:
            changed = _join_neighbour(row, u, leaders, near)
        elif kind == NEIGHBOUR and len(near.pairs):
            first = int(u[2] * len(near.pairs))
            for step in range(len(near.pairs)):  # the first cut pair from a random one on
                pair = near.pairs[(first + step) % len(near.pairs)]
                a, b = (pair[0], pair[1]) if u[1] < 0.5 else (pair[1], pair[0])
                if row[a] != row[b] and near.allowed[a, row[b]]:
                    _move(row, a, row[b], near, u[DRAWS - 3])
                    changed = True
                    break
        elif kind == SWAP:
            for attempt in range(_TRIES):
                a = leaders[int(u[1 + 2 * attempt] * len(leaders))]
                b = near.movable[int(u[2 + 2 * attempt] * len(near.movable))]
                if row[a] != row[b] and near.allowed[a, row[b]] and near.allowed[b, row[a]]:
                    row[a], row[b] = row[b], row[a]
                    changed = True
                    break
        elif kind in (WINDOW, MODULE):
            line = near.order if kind == WINDOW else near.module_order
            # short windows as often as long ones
            length = int(2.0 * (min(max_window, num_groups) / 2.0) ** u[1] + 0.5)
            first = int(u[2] * num_groups)
            if is_focused:
                group = leaders[int(u[2] * len(leaders))]
                at = near.place[group] if kind == WINDOW else near.module_place[group]
                first = max(at - int(u[5] * length), 0)
            device = int(u[3] * num_devices) if u[4] < 0.3 else row[line[max(first - 1, 0)]]
            for at in range(first, min(first + length, num_groups)):
                if row[line[at]] != device and near.allowed[line[at], device]:
                    row[line[at]] = device
                    changed = True
        elif kind == CLUSTER:
            group = leaders[int(u[1] * len(leaders))]
            home, device = row[group], _another(row[group], near.allowed[group], u[2])
            row[group] = device
            changed = True
            for edge in range(near.neighbour_offsets[group], near.neighbour_offsets[group + 1]):
                other = near.neighbours[edge]
                if row[other] == home and near.allowed[other, device]:
                    row[other] = device
        elif kind == COPY and len(near.rows):
            changed = _copy(row, u, near)
        if not changed:
            group = leaders[int(u[DRAWS - 1] * len(leaders))]
            _move(row, group, _another(row[group], near.allowed[group], u[DRAWS - 2]), near, u[DRAWS - 3])


@part
def _join_neighbour(row: Ints, u: Floats, groups: Ints, near: Neighbourhood) -> bool:
    """Puts one of `groups` where a neighbour is, or the neighbour where it is: the first cut pair from a random one."""
    first = int(u[2] * len(groups))
    for step in range(len(groups)):
        group = groups[(first + step) % len(groups)]
        begin = near.neighbour_offsets[group]
        count = near.neighbour_offsets[group + 1] - begin
        for edge in range(count):
            other = near.neighbours[begin + (int(u[3] * count) + edge) % count]
            a, b = (other, group) if u[1] < 0.5 else (group, other)
            if row[a] == row[b]:
                continue
            if not near.allowed[a, row[b]]:
                a, b = b, a
            if near.allowed[a, row[b]]:
                _move(row, a, row[b], near, u[DRAWS - 3])
                return True
    return False


@part
def _copy(row: Ints, u: Floats, near: Neighbourhood) -> bool:
    """Puts some rows of the table where the one before or after them is, half of the time without column 0."""
    num_rows = near.num_rows
    length = int((max(num_rows // 2, 2) / 2.0) ** u[1] + 0.5)  # short ones as often as long ones
    first = int(u[2] * num_rows)
    source = first - 1 if u[3] < 0.5 else first + length
    if source < 0 or source >= num_rows:
        return False
    device = np.empty(near.num_columns, np.int32)
    device[:] = -1
    for group in range(len(row)):
        if near.rows[group] == source and device[near.columns[group]] < 0:
            device[near.columns[group]] = row[group]
    if u[4] < 0.5:
        device[0] = -1
    changed = False
    for group in range(len(row)):
        if first <= near.rows[group] < first + length:
            to = device[near.columns[group]]
            if to >= 0 and row[group] != to and near.allowed[group, to]:
                row[group] = to
                changed = True
    return changed


@part
def _move(row: Ints, group: int, device: int, near: Neighbourhood, u: float) -> None:
    """Puts `group` on `device`, with those of its block, on a level drawn by `u`, that are where it is."""
    level, home = int(u * (len(near.blocks) + 1)) - 1, row[group]
    row[group] = device
    if level >= 0:
        for other in range(len(row)):
            if (
                near.blocks[level, other] == near.blocks[level, group]
                and row[other] == home
                and near.allowed[other, device]
            ):
                row[other] = device


@part
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


CHANCES = (0.25, 0.35, 0.1, 0.1, 0.1, 0.1, 0.0)
"""How often each kind of move is tried by default ..."""
TABLE_CHANCES = (*CHANCES[:COPY], 0.15)
"""... and where groups have a table."""


@dataclass(frozen=True, eq=False)
class Table:
    """Cells that ops are in, such as runs of layers by micro-batches.

    Attributes:
        rows: (N,) int32, from 0 on.
        columns: (N,) int32, from 0 on; those of column 0, such as parameters, may stay when their row moves.
    """

    rows: NDArray[np.int32]
    columns: NDArray[np.int32]


class Neighbourhood(Block):
    """Facts for moves about G groups on D devices.

    Attributes:
        allowed: (G, D) bool, devices where a group may be.
        movable: groups that may be on more than one device.
        order: (G,) groups in order of their first op.
        module_order: (G,) groups in order of the module that most of their time is in, then of their first op.
        pairs: (P, 2) groups that a tensor joins, producer first.
        neighbour_offsets, neighbours: CSR (G + 1,), the groups that a tensor joins to each.
        blocks: (L, G) the block of each group on each of L coarser levels.
        rows, columns: (G,) the cell of each group's first op; (0,) without a table.
        num_rows, num_columns: how many of each; 0 without a table.
        place, module_place: (G,) where each group is in `order` and in `module_order`.
    """

    allowed: BoolTable
    movable: Ints
    order: Ints
    module_order: Ints
    pairs: IntTable
    neighbour_offsets: Ints
    neighbours: Ints
    blocks: IntTable
    rows: Ints
    columns: Ints
    num_rows: int
    num_columns: int
    place: Ints
    module_place: Ints

    @classmethod
    def of(
        cls,
        problem: Problem,
        grouping: Grouping | None = None,
        coarse: Sequence[Grouping] = (),
        table: Table | None = None,
    ) -> Neighbourhood:
        """The neighbourhood of placements of `grouping`'s groups; of the problem's own by default.

        Args:
            problem: the problem to place.
            grouping: the groups that move.
            coarse: groupings whose groups are moved as blocks.
            table: cells of ops, whose rows follow each other.
        """
        grouping = problem.grouping if grouping is None else grouping
        graph, op_group, num_groups = problem.graph, grouping.op_group, grouping.num_groups
        allowed = allowed_devices(problem, grouping)
        first_op = np.unique(op_group, return_index=True)[1]
        a, b = op_group[graph.tensor_op[graph.input_tensors]], op_group[graph.edge_op]
        pairs = np.unique(np.stack((a[a != b], b[a != b]), axis=1), axis=0).astype(np.int32)
        both = np.unique(np.concatenate((pairs, pairs[:, ::-1])), axis=0)
        modules = main_modules(problem, grouping)
        rows = columns = np.zeros(0, dtype=np.int32)
        if table is not None:  # without the rows that no group begins in
            rows = np.unique(table.rows[first_op], return_inverse=True)[1].astype(np.int32)
            columns = table.columns[first_op].astype(np.int32)
        order, module_order = np.argsort(first_op, kind="stable"), np.lexsort((first_op, modules))
        return cls(
            allowed=allowed,
            movable=np.flatnonzero(allowed.sum(axis=1) > 1).astype(np.int32),
            order=order.astype(np.int32),
            module_order=module_order.astype(np.int32),
            pairs=pairs,
            neighbour_offsets=np.searchsorted(both[:, 0], np.arange(num_groups + 1)).astype(np.int32),
            neighbours=both[:, 1].astype(np.int32),
            blocks=np.array([level.op_group[first_op] for level in coarse], np.int32).reshape(-1, num_groups),
            rows=rows,
            columns=columns,
            num_rows=int(rows.max(initial=-1)) + 1,
            num_columns=int(columns.max(initial=-1)) + 1,
            place=np.argsort(order).astype(np.int32),
            module_place=np.argsort(module_order).astype(np.int32),
        )

    def propose(
        self,
        placements: NDArray[np.int32],
        generator: np.random.Generator,
        chances: Sequence[float],
        max_window: int,
        *,
        focus: NDArray[np.int32] | None = None,
        focus_share: float = 0.0,
    ) -> NDArray[np.int32]:
        """(C, G) int32: each of `placements` (C, G) after one move; unchanged only where nothing may move.

        Args:
            placements: one row a chain.
            generator: `DRAWS` numbers a row are drawn from it, for any move.
            chances: (7,) how often each kind of move is tried, `ONE` to `COPY`; where a move changes nothing or may
                not be, one group is moved elsewhere.
            max_window: longest window of consecutive groups.
            focus: (F,) int32, movable groups that a share of the moves begins with.
            focus_share: that share, 0 to 1.
        """
        moved = np.array(placements, dtype=np.int32)
        if len(self.movable):
            draws = generator.random((len(moved), DRAWS))
            propose_moves(
                moved,
                draws,
                np.cumsum(chances) / np.sum(chances),
                max(max_window, 2),
                self,
                self.movable if focus is None else focus,
                focus_share,
            )
        return moved


def are_kernels_kept() -> bool:
    """Whether the kernels of annealing were compiled by an earlier process; they are the last that a search calls."""
    return is_kept(propose_moves)
