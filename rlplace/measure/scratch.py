"""`Scratch`: what the simulator's kernels write, allocated once per thread and used again for every placement."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.compiled import Compiled

POSITION, TRANSFERS = range(2)
"""Places in `Scratch.state`: length of the sequence, number of transfers."""


class Scratch(NamedTuple):
    """Outputs (the plan, and when each item starts and ends) and working memory. K is the most transfers there can be.

    An item is an op `i` or a transfer `num_ops + k`.
    """

    state: NDArray[np.int64]
    sequence: NDArray[np.int32]  # (N + K,)
    transfer_tensor: NDArray[np.int32]  # (K,)
    transfer_destination: NDArray[np.int32]  # (K,)
    start_s: NDArray[np.float64]  # (N + K,)
    end_s: NDArray[np.float64]  # (N + K,)
    peak_bytes: NDArray[np.int64]  # (accounts,)
    load_s: NDArray[np.float64]  # (D + L,)
    # planning
    waiting: NDArray[np.int32]  # (N + K,) what an item still waits for
    ended: NDArray[np.int32]  # (N,) ops that end at one instant
    starters: NDArray[np.int32]  # (K,) transfers that start at one instant
    found: NDArray[np.int32]
    ready_leaf: NDArray[np.int64]  # (D * leaf words,) ready ops of each device: bits, words with bits, words of words
    ready_middle: NDArray[np.int64]
    ready_top: NDArray[np.int64]
    slot_end_s: NDArray[np.float64]  # (slots,) when the running item of a device or of a first link ends
    slot_item: NDArray[np.int32]  # (slots,)
    slot_tail: NDArray[np.int32]  # (slots,)
    slot_next: NDArray[np.int32]  # (K,) the next transfer of the slot
    follower: NDArray[np.int32]  # (K * most links of a route,) transfer that starts when this one ends
    link_last: NDArray[np.int32]  # (L,) place in `follower` of the link's last transfer
    # planning with blocking transfers or gangs
    queue_next: NDArray[np.int32]  # (K * most links of a route,)
    queue_head: NDArray[np.int32]  # (L,)
    queue_tail: NDArray[np.int32]  # (L,)
    link_busy: NDArray[np.bool_]  # (L,)
    copy_key: NDArray[np.int64]  # (K,)
    copy_next: NDArray[np.int32]  # (K,)
    copy_head: NDArray[np.int32]  # (D,)
    copy_cursor: NDArray[np.int32]  # (D,)
    reserved: NDArray[np.int64]  # (D,)
    work_s: NDArray[np.float64]  # (D,) work left at `anchor_s`
    anchor_s: NDArray[np.float64]  # (D,)
    slowdown: NDArray[np.float64]  # (D,)
    # timing
    available_s: NDArray[np.float64]  # (T * D,)
    updated_s: NDArray[np.float64]  # (T,)
    atom_free_s: NDArray[np.float64]  # (D,)
    link_free_s: NDArray[np.float64]  # (L,)
    dispatcher_free_s: NDArray[np.float64]  # (dispatchers,)
    recent_s: NDArray[np.float64]  # (D * run_ahead,)
    recent_place: NDArray[np.int64]  # (D,)
    # memory
    users: NDArray[np.int32]  # (T * D,)
    last_use_s: NDArray[np.float64]  # (T,)
    event_base: NDArray[np.int64]  # (2 * accounts + 1,)
    event_count: NDArray[np.int64]  # (2 * accounts,)
    event_time_s: NDArray[np.float64]
    event_bytes: NDArray[np.int64]
    held_bytes: NDArray[np.int64]  # (accounts,) from start to end of the step


def new_scratch(p: Compiled) -> Scratch:
    """Working memory for one thread."""
    n, t, d, links, k = p.num_ops, p.num_tensors, p.num_devices, p.num_links, p.max_transfers
    most_events = 2 * (2 * n + t + 2 * k)
    return Scratch(
        state=np.zeros(2, np.int64),
        sequence=np.zeros(n + k, np.int32),
        transfer_tensor=np.zeros(k, np.int32),
        transfer_destination=np.zeros(k, np.int32),
        start_s=np.zeros(n + k),
        end_s=np.zeros(n + k),
        peak_bytes=np.zeros(p.num_accounts, np.int64),
        load_s=np.zeros(d + links),
        waiting=np.zeros(n + k, np.int32),
        ended=np.zeros(n, np.int32),
        starters=np.zeros(k, np.int32),
        found=np.zeros(2 * len(p.updates.updater_ops), np.int32),
        ready_leaf=np.zeros(d * p.num_leaf, np.int64),
        ready_middle=np.zeros(d * p.num_middle, np.int64),
        ready_top=np.zeros(d * p.num_top, np.int64),
        slot_end_s=np.zeros(p.num_slots),
        slot_item=np.zeros(p.num_slots, np.int32),
        slot_tail=np.zeros(p.num_slots, np.int32),
        slot_next=np.zeros(k, np.int32),
        follower=np.zeros(k * p.max_route_links, np.int32),
        link_last=np.zeros(links, np.int32),
        queue_next=np.zeros(k * p.max_route_links, np.int32),
        queue_head=np.zeros(links, np.int32),
        queue_tail=np.zeros(links, np.int32),
        link_busy=np.zeros(links, np.bool_),
        copy_key=np.zeros(k, np.int64),
        copy_next=np.zeros(k, np.int32),
        copy_head=np.zeros(d, np.int32),
        copy_cursor=np.zeros(d, np.int32),
        reserved=np.zeros(d, np.int64),
        work_s=np.zeros(d),
        anchor_s=np.zeros(d),
        slowdown=np.zeros(d),
        available_s=np.zeros(t * d),
        updated_s=np.zeros(t),
        atom_free_s=np.zeros(d),
        link_free_s=np.zeros(links),
        dispatcher_free_s=np.zeros(p.num_dispatchers),
        recent_s=np.zeros(d * p.run_ahead),
        recent_place=np.zeros(d, np.int64),
        users=np.zeros(t * d, np.int32),
        last_use_s=np.zeros(t),
        event_base=np.zeros(2 * p.num_accounts + 1, np.int64),
        event_count=np.zeros(2 * p.num_accounts, np.int64),
        event_time_s=np.zeros(most_events),
        event_bytes=np.zeros(most_events, np.int64),
        held_bytes=np.zeros(p.num_accounts, np.int64),
    )
