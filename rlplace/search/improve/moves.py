"""`Neighbourhood`: structured moves from placements of groups to near ones, for all chains of a search at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping.groups import Grouping
from rlplace.jit import Ints, is_kept
from rlplace.measure.problem import Problem
from rlplace.search.groups import allowed_devices
from rlplace.search.improve.move_kernels import COPY, DRAWS, propose_moves

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


@dataclass(frozen=True, eq=False)
class Neighbourhood:
    """What moves know about G groups on D devices.

    Attributes:
        allowed: (G, D) bool, devices where a group may be.
        movable: groups that may be on more than one device.
        order: (G,) groups in order of their first op.
        module_order: (G,) groups in order of the module that most of their time is in, then of their first op.
        pairs: (P, 2) groups that a tensor joins, producer first.
        neighbour_offsets, neighbours: CSR (G + 1,), the groups that a tensor joins to each.
        blocks: (L, G) the block of each group on each of L coarser levels.
        rows, columns: (G,) the cell of each group's first op; (0,) without a table.
        place, module_place: (G,) where each group is in `order` and in `module_order`.
    """

    allowed: NDArray[np.bool_]
    movable: Ints
    order: Ints
    module_order: Ints
    pairs: Ints
    neighbour_offsets: Ints
    neighbours: Ints
    blocks: Ints
    rows: Ints
    columns: Ints
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
            problem: what is placed.
            grouping: what moves together.
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
            generator: `DRAWS` numbers a row are drawn from it, whatever the move.
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
                self.allowed,
                self.movable,
                self.order,
                self.module_order,
                self.pairs,
                self.neighbour_offsets,
                self.neighbours,
                self.blocks,
                self.rows,
                self.columns,
                self.movable if focus is None else focus,
                focus_share,
                self.place,
                self.module_place,
            )
        return moved


def are_kernels_kept() -> bool:
    """Whether the kernels of annealing were compiled by an earlier process; they are the last that a search calls."""
    return is_kept(propose_moves)


def main_modules(problem: Problem, grouping: Grouping) -> NDArray[np.int64]:
    """(G,) int64: the module that most of each group's mean time is in, numbered in order of first appearance."""
    number: dict[str, int] = {}
    modules = [number.setdefault(name, len(number)) for name in problem.graph.modules]
    return main_labels(problem, grouping, np.array(modules, dtype=np.int64))


def main_labels(problem: Problem, grouping: Grouping, label_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """(G,) int64: the label that most of each group's mean time has; the smallest where several have as much.

    Args:
        problem: what is placed.
        grouping: its groups, or finer or coarser ones.
        label_N: (N,) a label of each op, 0 or more.
    """
    count = int(label_N.max(initial=0)) + 1
    keys, place = np.unique(grouping.op_group.astype(np.int64) * count + label_N, return_inverse=True)
    time_s = np.bincount(place, weights=problem.costs.op_time_s.mean(axis=1))
    heaviest_last = np.lexsort((-keys, time_s, keys // count))
    labels = np.zeros(grouping.num_groups, dtype=np.int64)
    labels[keys[heaviest_last] // count] = keys[heaviest_last] % count
    return labels
