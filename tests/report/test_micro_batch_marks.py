"""Shades of micro-batches and the runs of ops that their numbers are written on, by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from micrographs import op_graph

from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.plan import Timeline
from rlplace.report.timeline import is_light, op_colors, runs, shade


def pipeline_stage() -> OpGraph:
    """Two forward ops for each of two micro-batches, one backward op each, an update that both share."""
    graph = op_graph([[], [0], [], [2], [1], [3], [4, 5]], phases=[0, 0, 0, 0, 1, 1, 2])
    return dataclasses.replace(graph, micro_batch=np.array([0, 0, 1, 1, 0, 1, -1]))


def timeline(start_s: list[float], end_s: list[float]) -> Timeline:
    no_index, no_time = np.zeros(0, dtype=np.int32), np.zeros(0)
    return Timeline(
        np.zeros(len(start_s), dtype=np.int32), np.array(start_s), np.array(end_s), no_index, no_index, no_index,
        no_time, no_time, no_time, no_index, np.zeros(0, dtype=np.int64), "simulated",
    )  # fmt: skip


def test_later_micro_batches_are_lighter_and_shared_ops_have_the_plain_colour() -> None:
    shades = [shade("#0072B2", k, 4) for k in range(-1, 4)]
    assert shades[0] == shades[1] == "#0072B2"
    brightness = [sum(int(color[i : i + 2], 16) for i in (1, 3, 5)) for color in shades[1:]]
    assert brightness == sorted(brightness)
    assert len(set(shades[1:])) == 4
    assert shade("#0072B2", 0, 1) == "#0072B2"


def test_colours_follow_phase_and_micro_batch() -> None:
    colors = op_colors(pipeline_stage(), ["#000000", "#800000", "#008000"]).tolist()
    assert colors == ["#000000", "#000000", "#9E9E9E", "#9E9E9E", "#800000", shade("#800000", 1, 2), "#008000"]
    whole = op_graph([[], [0]], phases=[0, 2])
    assert op_colors(whole, ["#000000", "#800000", "#008000"]).tolist() == ["#000000", "#008000"]


def test_ops_of_one_micro_batch_and_phase_in_a_row_are_one_run() -> None:
    times = timeline([0, 1, 2, 3, 5, 6, 7], [1, 2, 3, 4, 6, 7, 8])
    assert runs(range(7), times, pipeline_stage()) == [(0, 2, 0), (2, 4, 2), (5, 6, 4), (6, 7, 5)]


def test_a_break_or_another_micro_batch_ends_a_run() -> None:
    interleaved = timeline([0, 2, 1, 3, 5, 6, 7], [1, 3, 2, 4, 6, 7, 8])
    assert runs(range(4), interleaved, pipeline_stage()) == [(0, 1, 0), (1, 2, 2), (2, 3, 1), (3, 4, 3)]
    broken = timeline([0, 1.5, 3, 4, 5, 6, 7], [1, 2.5, 4, 5, 6, 7, 8])
    assert runs(range(2), broken, pipeline_stage()) == [(0, 1, 0), (1.5, 2.5, 1)]
    assert runs([], broken, pipeline_stage()) == []


@pytest.mark.parametrize(("color", "light"), [("#FFFFFF", True), ("#000000", False), ("#0072B2", False)])
def test_ink_is_chosen_by_luminance(color: str, light: bool) -> None:
    assert is_light(color) is light


def test_micro_batches_that_take_short_turns_have_no_numbers() -> None:
    ops = 400
    graph = dataclasses.replace(op_graph([[]] * ops), micro_batch=np.arange(ops) % 2)
    start_s = [float(op) for op in range(ops)]
    assert runs(range(ops), timeline(start_s, [start + 1 for start in start_s]), graph) == []
    mostly = dataclasses.replace(graph, micro_batch=(np.arange(ops) % 10 == 9).astype(np.int32))
    assert runs(range(ops), timeline(start_s, [start + 1 for start in start_s]), mostly)[0] == (0.0, 399.0, 0)
