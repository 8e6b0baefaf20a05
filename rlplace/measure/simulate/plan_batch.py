"""`PlanBatch`: plans that were checked once, laid out to be re-timed often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.jit import Ints, Longs
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.compiled import Compiled


class PlanBatch(NamedTuple):
    """B plans, one after the other, or B placements that are still to be planned (then all but `devices` is empty).

    Good on any host with the same devices and kinds of route.

    Attributes:
        devices: (B, N) int32.
        sequence: int32, every plan's sequence.
        sequence_offsets: (B + 1,) int64.
        transfer_tensor: int32, every plan's.
        transfer_destination: int32, every plan's.
        transfer_offsets: (B + 1,) int64.
    """

    devices: Ints
    sequence: Ints
    sequence_offsets: Longs
    transfer_tensor: Ints
    transfer_destination: Ints
    transfer_offsets: Longs


def unplanned(placements: NDArray[np.int32]) -> PlanBatch:
    """Placements (B, N) that are still to be planned."""
    empty, offsets = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)
    return PlanBatch(np.ascontiguousarray(placements), empty, offsets, empty, empty, offsets)


def stack_plans(problem: Problem, p: Compiled, plans: Sequence[Plan]) -> PlanBatch:
    """The plans as one batch, with everything in range; whether they can be followed is not looked at.

    Raises:
        InvalidValue: a plan for other ops, or with an index out of range.
    """
    for plan in plans:
        if plan.num_transfers > p.max_transfers or len(plan.sequence) != p.num_ops + plan.num_transfers:
            raise InvalidValue("sequence", len(plan.sequence), "every op and needed transfer once", where="plan")
        if len(plan.transfer_destination) != plan.num_transfers:
            raise InvalidValue(
                "transfer_destination", len(plan.transfer_destination), f"{plan.num_transfers} entries", where="plan"
            )
        _check_range("sequence", plan.sequence, len(plan.sequence))
        _check_range("transfer_tensor", plan.transfer_tensor, p.num_tensors)
        _check_range("transfer_destination", plan.transfer_destination, p.num_devices)
    devices = [problem.check_placement(plan.devices) for plan in plans]
    return PlanBatch(
        devices=np.stack(devices) if devices else np.zeros((0, p.num_ops), dtype=np.int32),
        sequence=_joined([plan.sequence for plan in plans]),
        sequence_offsets=np.cumsum([0, *(len(plan.sequence) for plan in plans)]),
        transfer_tensor=_joined([plan.transfer_tensor for plan in plans]),
        transfer_destination=_joined([plan.transfer_destination for plan in plans]),
        transfer_offsets=np.cumsum([0, *(plan.num_transfers for plan in plans)]),
    )


def _joined(parts: list[NDArray[np.int32]]) -> Ints:
    return np.concatenate([np.zeros(0, dtype=np.int32), *parts])


def _check_range(name: str, values: NDArray[np.int32], bound: int) -> None:
    if len(values) and (values.min() < 0 or values.max() >= bound):
        raise InvalidValue(name, f"{values.min()}..{values.max()}", f"indices in 0..{bound - 1}", where="plan")
