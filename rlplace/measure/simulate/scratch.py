"""`Scratch`: the memory that the kernels write, allocated once per thread and used again for every placement.

`PlanBatch`: plans that were checked once, laid out to be re-timed many times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.jit import Block, Bytes, Floats, Ints, IntTable, Longs
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.simulate.compiled_problem import Compiled

POSITION, TRANSFERS = range(2)
"""Places in `Scratch.state`: length of the sequence, number of transfers."""
ORIGINAL, KEPT = 1 << 28, 1 << 29
"""Flags in `Scratch.users`: the tensor was made here; it is never freed here."""


class Scratch(Block):
    """Outputs (the plan, and when each item starts and ends) and working memory. K is the most transfers there can be.

    An item is an op `i` or a transfer `num_ops + k`.
    """

    state: Longs
    sequence: Ints  # (N + K + 1,)
    transfer_tensor: Ints  # (K,)
    transfer_destination: Ints  # (K,)
    start_s: Floats  # (N + K,)
    end_s: Floats  # (N + K,)
    peak_bytes: Longs  # (accounts,)
    load_s: Floats  # (D + L,)
    path_s: Floats  # (N,) least seconds from an op's start to the end of the step
    work_left_s: Floats  # (D,) seconds of the ops that a device has not begun
    # planning
    waiting: Ints  # (N + K,) what an item still waits for
    ended: Ints  # (N,) ops that end at one instant
    found: Ints
    ready_leaf: Longs  # (D * leaf words,) ready ops of each device: bits, words with bits, words of words
    ready_middle: Longs
    ready_top: Longs
    slot_end_s: Floats  # (slots + 1,) when the running item of a device or of a first link ends
    slot_end_bits: Longs  # the same memory, read as int64
    slot_item: Ints  # (slots,)
    # timing
    available_s: Floats  # (T * D,)
    updated_s: Floats  # (T,)
    atom_free_s: Floats  # (D,)
    link_free_s: Floats  # (L,)
    dispatcher_free_s: Floats  # (dispatchers,)
    recent_s: Floats  # (D * run_ahead,)
    recent_place: Longs  # (D,)
    # memory
    users: Ints  # (T * D,) users to come of a tensor on an account, with the flags below
    last_use_s: Floats  # (T * D,)
    event_base: Longs  # (2 * accounts + 1,) where each account's allocations begin, then its frees
    event_count: Longs  # (2 * accounts,)
    events: Floats  # pairs of an event's time and its bytes
    event_bytes: Longs  # the same memory, read as int64: bytes are whole numbers
    held_bytes: Longs  # (accounts,) from start to end of the step


def new_scratch(p: Compiled) -> Scratch:
    """Working memory for one thread."""
    n, t, d, links, k = p.num_ops, p.num_tensors, p.num_devices, p.num_links, p.max_transfers
    most_events = 2 * (2 * n + t + 2 * k) + 2 * (d + p.num_accounts)
    events, slot_end_s = np.zeros(2 * most_events), np.zeros(p.num_slots + 1)
    return Scratch(
        state=np.zeros(2, np.int64),
        sequence=np.zeros(n + k + 1, np.int32),
        transfer_tensor=np.zeros(k, np.int32),
        transfer_destination=np.zeros(k, np.int32),
        start_s=np.zeros(n + k),
        end_s=np.zeros(n + k),
        peak_bytes=np.zeros(p.num_accounts, np.int64),
        load_s=np.zeros(d + links),
        path_s=np.zeros(n),
        work_left_s=np.zeros(d),
        waiting=np.zeros(n + k, np.int32),
        ended=np.zeros(n, np.int32),
        found=np.zeros(2 * len(p.updates.updater_ops), np.int32),
        ready_leaf=np.zeros(d * p.num_leaf, np.int64),
        ready_middle=np.zeros(d * p.num_middle, np.int64),
        ready_top=np.zeros(d * p.num_top, np.int64),
        slot_end_s=slot_end_s,
        slot_end_bits=slot_end_s.view(np.int64),
        slot_item=np.zeros(p.num_slots, np.int32),
        available_s=np.zeros(t * d),
        updated_s=np.zeros(t),
        atom_free_s=np.zeros(d),
        link_free_s=np.zeros(links),
        dispatcher_free_s=np.zeros(p.num_dispatchers),
        recent_s=np.zeros(d * p.run_ahead),
        recent_place=np.zeros(d, np.int64),
        users=np.zeros(t * d, np.int32),
        last_use_s=np.zeros(t * d),
        event_base=np.zeros(2 * p.num_accounts + 1, np.int64),
        event_count=np.zeros(2 * p.num_accounts, np.int64),
        events=events,
        event_bytes=events.view(np.int64),
        held_bytes=np.zeros(p.num_accounts, np.int64),
    )


class FastScratch(Block):
    """What only the fast planner needs."""

    slot_tail: Ints  # (slots,)
    arrived: Ints  # (K,) tensors that arrive at one instant
    slot_next: Ints  # (K + 1,) the next transfer of the slot
    follower: Ints  # (K * most links of a route + 1,) transfer that starts when this one ends
    link_last: Ints  # (L,) place in `follower` of the link's last transfer


def new_fast_scratch(p: Compiled) -> FastScratch | None:
    """Working memory for one thread; None where the general planner plans."""
    if p.is_general:
        return None
    return FastScratch(
        slot_tail=np.zeros(p.num_slots, np.int32),
        arrived=np.zeros(p.max_transfers, np.int32),
        slot_next=np.zeros(p.max_transfers + 1, np.int32),
        follower=np.zeros(p.max_transfers * p.max_route_links + 1, np.int32),
        link_last=np.zeros(p.num_links, np.int32),
    )


class EventScratch(Block):
    """What only the general planner needs, and timing event by event.

    A lane is a list of items in plan order that take turns: one for each single device, for each link and, where
    launches cost time, for each dispatcher (`dispatch_order="plan"`) or device's launching thread (`"request"`).
    """

    # planning
    queue_next: Ints  # (K * most links of a route,)
    queue_head: Ints  # (L,)
    queue_tail: Ints  # (L,)
    link_busy: Bytes  # (L,)
    copy_key: Longs  # (K,)
    copy_next: Ints  # (K,)
    copy_head: Ints  # (D,)
    copy_cursor: Ints  # (D,)
    reserved: Longs  # (D,)
    work_s: Floats  # (D,) work left at `anchor_s`
    anchor_s: Floats  # (D,)
    slowdown: Floats  # (D,)
    # timing event by event
    lane_base: Longs  # (lanes + 1,)
    lane_head: Longs  # (lanes,)
    lane_items: Ints
    item_lanes: Ints  # lanes of each item, for each of its turns ...
    item_base: Longs  # (N + K,) ... from here ...
    item_end: Longs  # (N + K,) ... to here
    place: Ints  # place of the item in each of its lanes, aligned with `item_lanes`
    duration_s: Floats  # (N + K,)
    slot: Ints  # (N + K,) where the running item is kept; -1 for items that take no time
    bounded: Ints  # (N + K,) how many of its lanes, the first ones, bound its launch by `run_ahead`
    data_waiting: Ints  # (N + K,)
    first_transfer: Ints  # (T,)
    next_transfer: Ints  # (K,)
    startable: Ints  # (N + K,)
    launch_end_s: Floats  # (dispatchers,)
    launch_lane: Longs  # (dispatchers,)
    request_s: Floats  # (D,)


def new_event_scratch(p: Compiled) -> EventScratch | None:
    """Working memory for one thread; None where the fast planner plans."""
    if not p.is_general:
        return None
    n, k, d, links = p.num_ops, p.max_transfers, p.num_devices, p.num_links
    lanes = d + links + max(d, p.num_dispatchers)
    most_atoms = max(mask.bit_count() for mask in p.atoms.tolist())
    turns = n * (most_atoms + 1) + k * (2 * most_atoms + p.max_route_links + 1)
    return EventScratch(
        queue_next=np.zeros(k * p.max_route_links, np.int32),
        queue_head=np.zeros(links, np.int32),
        queue_tail=np.zeros(links, np.int32),
        link_busy=np.zeros(links, np.int8),
        copy_key=np.zeros(k, np.int64),
        copy_next=np.zeros(k, np.int32),
        copy_head=np.zeros(d, np.int32),
        copy_cursor=np.zeros(d, np.int32),
        reserved=np.zeros(d, np.int64),
        work_s=np.zeros(d),
        anchor_s=np.zeros(d),
        slowdown=np.zeros(d),
        lane_base=np.zeros(lanes + 1, np.int64),
        lane_head=np.zeros(lanes, np.int64),
        lane_items=np.zeros(turns, np.int32),
        item_lanes=np.zeros(turns, np.int32),
        item_base=np.zeros(n + k, np.int64),
        item_end=np.zeros(n + k, np.int64),
        place=np.zeros(turns, np.int32),
        duration_s=np.zeros(n + k),
        slot=np.zeros(n + k, np.int32),
        bounded=np.zeros(n + k, np.int32),
        data_waiting=np.zeros(n + k, np.int32),
        first_transfer=np.zeros(p.num_tensors, np.int32),
        next_transfer=np.zeros(k, np.int32),
        startable=np.zeros(n + k, np.int32),
        launch_end_s=np.zeros(p.num_dispatchers),
        launch_lane=np.zeros(p.num_dispatchers, np.int64),
        request_s=np.zeros(d),
    )


class PlanBatch(Block):
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

    devices: IntTable
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
        if (count := len(plan.transfer_destination)) != plan.num_transfers:
            raise InvalidValue("transfer_destination", count, f"{plan.num_transfers} entries", where="plan")
        for name, values, bound in (
            ("sequence", plan.sequence, len(plan.sequence)),
            ("transfer_tensor", plan.transfer_tensor, p.num_tensors),
            ("transfer_destination", plan.transfer_destination, p.num_devices),
        ):
            if len(values) and (values.min() < 0 or values.max() >= bound):
                expected = f"indices in 0..{bound - 1}"
                raise InvalidValue(name, f"{values.min()}..{values.max()}", expected, where="plan")
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
