"""Trees of additions: every gradient once, neighbours first, dealt out evenly."""

from __future__ import annotations

from collections import Counter

import pytest

from rlplace.graphs.opgraph import LATER_HALF, gradient_sums


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16, 64])
@pytest.mark.parametrize("turn", [0, 1, 6, LATER_HALF])
def test_every_gradient_is_added_once(count: int, turn: int) -> None:
    sums = gradient_sums(count, turn)
    members = [{part} for part in range(count)]
    for one in sums:
        left, right = members[one.left], members[one.right]
        assert max(left) + 1 == min(right)  # neighbours, in order
        members.append(left | right)
        assert one.last == max(members[-1])
        assert one.micro_batch in members[-1] or one is sums[-1]
    assert len(sums) == count - 1
    assert members[-1] == set(range(count))
    assert [one.micro_batch for one in sums[-1:]] == [-1] * min(len(sums), 1)


def test_few_parts_wait_at_a_time() -> None:
    """In order of micro-batches, with each sum made as soon as it can be."""
    sums = gradient_sums(64)
    waiting, most = 0, 0
    for micro_batch in range(64):
        waiting += 1
        most = max(most, waiting)
        waiting -= sum(one.last == micro_batch for one in sums)
    assert (waiting, most) == (1, 7)


def test_turns_deal_sums_out_evenly() -> None:
    """16 micro-batches on 16 devices: what each receives for sums below the root, over 16 parameters."""
    received: Counter[int] = Counter()
    for turn in range(16):
        home = dict(enumerate(range(16)))
        for number, one in enumerate(gradient_sums(16, turn)[:-1]):
            home[16 + number] = one.micro_batch
            received[one.micro_batch] += sum(home[part] != one.micro_batch for part in (one.left, one.right))
    assert set(received.values()) == {14}


def test_a_sum_goes_with_the_micro_batch_that_completes_it() -> None:
    """8 micro-batches on 4 devices, or on 2: every run of one device is a sum of its own, made there."""
    sums = gradient_sums(8, LATER_HALF)
    assert [one.micro_batch for one in sums] == [1, 3, 3, 5, 7, 7, -1]
    assert [one.last for one in sums] == [1, 3, 3, 5, 7, 7, 7]
