"""Verdicts: every rule on figures where it is right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlplace.advice.verdict import NOTHING_TO_RUN, WORDS, Figures, Words, decide

GIB = 1 << 30
SIMULATED = Figures(
    kind="simulated",
    costs="estimated",
    bound_s=0.4,
    bound="total work",
    single_s=1.0,
    single_device="cuda:0",
    single_bytes=3 * GIB,
    single_capacity_bytes=16 * GIB,
    placed_s=0.6,
    num_placements=2000,
    split_s=0.9,
    eager_why="the host is simulated",
)
MEASURED = replace(SIMULATED, kind="measured", costs="profiled", eager_s=0.8)
ASKED = Words("gpt2", "2xA100")


def test_a_placement_that_is_faster_is_worth_it() -> None:
    found = decide(SIMULATED, ASKED)
    assert (found.verdict, found.over) == ("place", "one device")
    assert (found.ratio_found, found.ratio_least) == (pytest.approx(0.6), pytest.approx(0.4))
    assert found.reason == "the best of 2,000 placements takes 600 ms a step, one device 1.00 s"
    assert found.next == "rlplace train gpt2 --host 2xA100"


def test_a_measured_ratio_is_over_eager() -> None:
    found = decide(MEASURED, ASKED)
    assert (found.verdict, found.over) == ("place", "eager")
    assert found.ratio_found == pytest.approx(0.6 / 0.8)
    assert found.ratio_least == pytest.approx(0.4 / 0.8)


def test_eager_that_is_as_fast_stays() -> None:
    for eager_s in (0.5, 0.62):
        found = decide(replace(MEASURED, eager_s=eager_s), ASKED)
        assert (found.verdict, found.next) == ("eager", NOTHING_TO_RUN)
        assert found.ratio_found is not None
        assert found.ratio_found >= 1.0 >= (found.ratio_least or 2.0)
    assert decide(replace(MEASURED, eager_s=0.64), ASKED).verdict == "place"
    assert decide(replace(MEASURED, eager_s=0.7, single_s=0.5, placed_s=0.5), ASKED).verdict == "one-device"


def test_one_device_near_the_best_or_the_bound_stays() -> None:
    near = decide(replace(SIMULATED, placed_s=0.97), ASKED)
    assert near.verdict == "one-device"
    assert near.reason == "everything on cuda:0 takes 1.00 s a step, the best of 2,000 placements 970 ms"
    bound = decide(replace(SIMULATED, placed_s=0.99, bound_s=0.98), ASKED)
    assert bound.reason == "everything on cuda:0 is within 2% of the bound (total work)"
    assert (bound.ratio_found, bound.next) == (1.0, NOTHING_TO_RUN)


def test_a_promising_split_of_the_batch_is_to_be_tried() -> None:
    found = decide(replace(SIMULATED, split_s=0.3), ASKED)
    assert found.verdict == "cut-batch"
    assert "an even split of the batch would take 300 ms a step at best" in found.reason
    assert found.next == "rlplace advise gpt2 --host 2xA100 --micro-batches auto"
    assert (found.ratio_found, found.ratio_least) == (pytest.approx(0.6), pytest.approx(0.3))
    tried = replace(SIMULATED, split_s=0.3, counts=(1, 2), cut_s=0.58, cut_count=2)
    assert decide(tried, ASKED).verdict == "place"


def test_micro_batches_that_are_faster_are_recommended() -> None:
    found = decide(replace(SIMULATED, counts=(1, 2, 4), cut_s=0.45, cut_count=4), ASKED)
    assert (found.verdict, found.next) == ("cut-batch", "rlplace train gpt2 --host 2xA100 --micro-batches 4")
    assert "in 4 micro-batches the best of 2,000 placements takes 450 ms a step, of the whole batch 600 ms" in (
        found.reason
    )
    slightly = decide(replace(SIMULATED, counts=(1, 2), cut_s=0.59, cut_count=2), ASKED)
    assert (slightly.verdict, slightly.next) == ("place", "rlplace train gpt2 --host 2xA100 --micro-batches 2")


def test_what_one_device_beats_is_not_called_the_best() -> None:
    slower = replace(MEASURED, single_s=0.169, placed_s=0.202, split_s=None, bound_s=0.09)
    alone, plain = decide(replace(slower, eager_s=0.3), ASKED), decide(replace(slower, eager_s=0.16), ASKED)
    assert (alone.verdict, plain.verdict) == ("one-device", "eager")
    promised = decide(replace(slower, eager_s=0.3, split_s=0.1), ASKED)
    assert promised.verdict == "cut-batch"
    for found in (alone, plain, promised):
        assert "the best" not in found.reason
        assert "202 ms" in found.reason
        assert "169 ms" in found.reason
    cut = decide(replace(slower, eager_s=0.3, counts=(1, 2), cut_s=0.1, cut_count=2), ASKED)
    assert "of the whole batch 169 ms" in cut.reason


def test_a_step_that_no_device_holds_is_placed() -> None:
    found = decide(replace(SIMULATED, single_s=None, single_bytes=20 * GIB), ASKED)
    assert (found.verdict, found.over, found.ratio_found, found.ratio_least) == ("place", "", None, None)
    assert "no single device holds it: it takes 20.0 GiB of cuda:0's 16.0 GiB" in found.reason


def test_a_step_that_nothing_holds_is_cut() -> None:
    nothing = replace(SIMULATED, single_s=None, placed_s=None, split_s=None, single_bytes=90 * GIB)
    found = decide(nothing, ASKED)
    assert (found.verdict, found.next) == ("cut-batch", "rlplace advise gpt2 --host 2xA100 --micro-batches auto")
    assert "takes 90.0 GiB of cuda:0's 16.0 GiB and none of 2,000 placements" in found.reason
    cut = decide(replace(nothing, counts=(1, 2), cut_s=1.0, cut_count=2), ASKED)
    assert (cut.verdict, cut.next) == ("cut-batch", "rlplace train gpt2 --host 2xA100 --micro-batches 2")
    smaller = decide(replace(nothing, counts=(1, 2, 4)), ASKED)
    assert smaller.verdict == "cut-batch"
    assert "a smaller batch" in smaller.next


def test_a_split_is_named_where_devices_have_time_left() -> None:
    found = decide(replace(SIMULATED, work_s=0.3), ASKED)
    assert "`rlplace train --split auto`" in found.split_of_ops
    assert "2.0 times as long" in found.split_of_ops
    assert 'split="auto"' in decide(replace(SIMULATED, work_s=0.3)).split_of_ops
    for silent in (
        SIMULATED,  # one device, or ops without a program
        replace(SIMULATED, work_s=0.58),  # 0.6 is 3 % above
        replace(SIMULATED, work_s=0.3, split_s=0.3),  # the batch is to be cut first
        replace(MEASURED, work_s=0.3, eager_s=0.31),  # eager has all devices at work
        replace(SIMULATED, work_s=0.3, bound_s=0.59, bound="dispatcher"),  # shards would have more launches
    ):
        assert decide(silent, ASKED).split_of_ops == ""
    cut = replace(SIMULATED, work_s=0.3, split_s=0.3, counts=(1, 2), cut_s=0.58, cut_count=2)
    assert "1.9 times" in decide(cut, ASKED).split_of_ops


def test_in_python_the_next_call_is_given() -> None:
    assert decide(SIMULATED).next == "rlplace.train(problem)"
    assert decide(replace(SIMULATED, split_s=0.3)).next == "rlplace.capture(..., micro_batches=K)"
    cut_already = replace(SIMULATED, placed_s=None, counts=(4,), cut_s=0.5, cut_count=4, split_s=None)
    assert (decide(cut_already).verdict, decide(cut_already).next) == ("place", "rlplace.train(problem)")


def test_what_is_printed_is_plain() -> None:
    told = decide(SIMULATED, ASKED).to_dict()
    assert told["schema"] == 1
    assert told["verdict"] in WORDS
    assert told["figures"]["single_bytes"] == 3 * GIB
