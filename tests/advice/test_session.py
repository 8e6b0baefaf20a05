"""From words to a verdict: which numbers of micro-batches are tried."""

from __future__ import annotations

from core_hosts import core_host
from random_problems import plain_host

from rlplace.advice.advising import counts_for


def test_one_micro_batch_a_device_is_tried_first() -> None:
    assert counts_for(plain_host(4)) == (4, 8, 2)
    assert counts_for(plain_host(2)) == (2, 4)
    assert counts_for(core_host(2, has_gang=True)) == (2, 4)
    assert counts_for(plain_host(1)) == (2,)
    assert counts_for(plain_host(32)) == (16, 2)
