"""Signals between a gang and its members, on a chain of ops by hand."""

from __future__ import annotations

import numpy as np
import torch
from core_hosts import core_host
from naive_plan import naive_plan
from torch import nn

from rlplace.graphs import capture
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.execute.generate import GangSignals, gang_signals

GANG = 2
NONE = GangSignals({}, {}, 0)


def chain() -> OpGraph:
    """Op 0 is the input; 1 to 4 follow each other."""
    return capture(nn.Sequential(nn.ReLU(), nn.Sigmoid(), nn.Tanh(), nn.ReLU()), torch.ones(3))


def signals_of(devices: list[int], *, is_handover: bool = True, second: tuple[int, ...] = ()) -> GangSignals:
    graph, host = chain(), core_host(2, has_gang=True)
    plan = naive_plan(graph, np.array(devices, dtype=np.int32))
    return gang_signals(graph, host, plan, [is_handover] * plan.num_transfers, second)


def test_members_alone_wait_for_nobody() -> None:
    assert signals_of([0, 0, 1, 0, 1]) == NONE
    assert signals_of([GANG] * 5) == NONE


def test_a_gang_waits_for_each_member_that_was_busy_and_they_for_it() -> None:
    signals = signals_of([0, 0, 1, GANG, 0])
    assert signals.waits == {3: [0, 1], 4: [2]}
    assert signals.sets == {1: [0], 2: [1], 3: [2]}
    assert signals.count == 3


def test_sources_and_hand_overs_keep_nobody_busy_and_copies_do() -> None:
    assert signals_of([GANG, 0, 0, 0, 0]) == NONE
    handed, copied = (signals_of([0, 0, GANG, GANG, 1], is_handover=is_handover) for is_handover in (True, False))
    assert (handed.sets, handed.waits) == ({1: [0], 3: [1]}, {2: [0], 4: [1]})
    assert (copied.sets, copied.waits) == ({1: [0], 3: [1]}, {5: [0], 6: [1]})  # items 5 and 6 are the copies


def test_the_second_part_begins_when_all_are_done() -> None:
    signals = signals_of([0, 0, 1, GANG, 0], second=(3, 4))
    assert signals == GangSignals({3: [0]}, {4: [0]}, 1)
