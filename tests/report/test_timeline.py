"""Frames of one size for one host, and charts in characters.

Shades of micro-batches and the runs of ops that their numbers are written on, by hand.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from fake_measurer import chain_problem
from matplotlib.image import imread
from micrographs import op_graph
from random_problems import random_problem

from rlplace.errors import InvalidValue
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.problem import Problem, Timeline
from rlplace.measure.simulate.simulator import Simulator
from rlplace.report import save_timeline_png
from rlplace.report.chrome_trace import Slice, Trace
from rlplace.report.drawing import TEXT_COLUMNS, timeline_frame, timeline_text
from rlplace.report.lanes import is_light, runs, shade
from rlplace.report.plots import PHASE_COLORS

WIDTH = 14 * 150


def host(num_devices: int) -> Host:
    names = [f"cpu:{i}" for i in range(num_devices)]
    pairs = [(a, b) for a in names for b in names if a != b]
    return Host(
        "cores",
        tuple(Device(name, "core", "cpu", 1 << 30) for name in names),
        tuple(Link(f"{a}>{b}", 1e9) for a, b in pairs),
        tuple(Route(a, b, (f"{a}>{b}",)) for a, b in pairs),
    )


def drawn(device: list[int], start_s: list[float], end_s: list[float], sent: list[tuple[int, int, int]]) -> Timeline:
    """Transfers as (tensor, source, destination), each during the last tenth of its producer."""
    tensors = [tensor for tensor, _, _ in sent]
    starts, ends = np.array(start_s, dtype=np.float64), np.array(end_s, dtype=np.float64)
    return Timeline(
        np.array(device, dtype=np.int32),
        starts,
        ends,
        np.array(tensors, dtype=np.int32),
        np.array([source for _, source, _ in sent], dtype=np.int32),
        np.array([destination for _, _, destination in sent], dtype=np.int32),
        0.1 * starts[tensors] + 0.9 * ends[tensors],
        ends[tensors],
        np.zeros(0),
        np.zeros(0, dtype=np.int32),
        np.zeros(0, dtype=np.int64),
        "simulated",
    )


def share_of(picture: np.ndarray, color: str) -> float:
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)])
    return float(np.all(np.rint(picture[..., :3] * 255) == rgb, axis=-1).mean())


def test_the_picture_has_the_right_size_and_areas_in_proportion(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    graph = op_graph([[], [0], [1], [1]], 8, phases=[0, 1, 1, 2])
    save_timeline_png(
        path,
        drawn([0, 1, 0, 1], [0, 0.1, 0.4, 0.4], [0.1, 0.4, 1.0, 0.5], [(0, 0, 1), (1, 1, 0)]),
        graph,
        host(2),
        "four ops",
    )
    picture = imread(path)
    lanes_in = 2 * 0.62 + 2 * 0.27 + 5 * 0.07
    assert picture.shape == (round((1.0 + lanes_in + 0.62) * 150), WIDTH, 4)
    forward, backward, update = (share_of(picture, color) for color in list(PHASE_COLORS.values())[:3])
    assert backward > 6 * forward > 0
    assert update == pytest.approx(forward, rel=0.15)
    assert share_of(picture, PHASE_COLORS["transfer"]) > 0


@pytest.mark.parametrize("num_devices", [1, 3, 8])
def test_any_number_of_devices_and_directions_fits(tmp_path: Path, num_devices: int) -> None:
    n = 20 * num_devices**2
    device = [i % num_devices if i % 2 else i // num_devices % num_devices for i in range(n)]
    sent = [(i, device[i], device[i + 1]) for i in range(n - 1) if device[i] != device[i + 1]]
    graph = op_graph([[], *([i] for i in range(n - 1))], 8)
    times = np.arange(n) * 1e-4
    save_timeline_png(
        tmp_path / "t.png", drawn(device, list(times), list(times + 1e-4), sent), graph, host(num_devices)
    )
    height, width, _ = imread(tmp_path / "t.png").shape
    assert width == WIDTH
    assert height <= (1.0 + 16.0 + 0.62) * 150 + 1


def test_ten_thousand_ops_and_an_empty_step_are_drawn(tmp_path: Path) -> None:
    n = 10_000
    times = np.arange(n) * 1e-6
    graph = op_graph([[]] * n, 8, phases=[i * 3 // n for i in range(n)])
    save_timeline_png(
        tmp_path / "many.png",
        drawn([i % 4 for i in range(n)], list(times), list(times + 4e-6), []),
        graph,
        host(4),
    )
    assert share_of(imread(tmp_path / "many.png"), PHASE_COLORS["forward"]) > 0.05
    save_timeline_png(tmp_path / "none.png", drawn([0], [0.0], [0.0], []), op_graph([[]], targets=["input"]), host(1))
    assert imread(tmp_path / "none.png").shape[1] == WIDTH


def test_an_op_on_a_gang_is_drawn_on_each_member(tmp_path: Path) -> None:
    pair = host(2)
    gang = Device("cpu:0-1", "gang", "cpu", 1 << 30, members=("cpu:0", "cpu:1"))
    ends = [(gang.name, device.name) for device in pair.devices]
    hand_overs = tuple(Route(a, b, ()) for pair_ends in ends for a, b in (pair_ends, pair_ends[::-1]))
    gangs = Host("gangs", (*pair.devices, gang), pair.links, pair.routes + hand_overs)
    graph = op_graph([[]], 8)
    save_timeline_png(tmp_path / "one.png", drawn([0], [0.0], [1.0], []), graph, gangs)
    save_timeline_png(tmp_path / "gang.png", drawn([2], [0.0], [1.0], []), graph, gangs)
    one, both = (share_of(imread(tmp_path / name), PHASE_COLORS["forward"]) for name in ("one.png", "gang.png"))
    assert one < both < 2 * one  # twice the area, less the hatching


def test_a_timeline_of_another_graph_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="op_device is '1 entries', expected 2"):
        save_timeline_png(tmp_path / "t.png", drawn([0], [0.0], [1.0], []), op_graph([[], [0]]), host(1))
    assert not list(tmp_path.iterdir())


def test_the_face_imports_no_matplotlib_and_drawing_no_pyplot() -> None:
    code = (
        "import sys, rlplace.report; assert not {'matplotlib', 'rich', 'torch'} & set(sys.modules)\n"
        "rlplace.report.save_timeline_png; assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_micro_batches_have_shades_and_numbers(tmp_path: Path) -> None:
    whole = op_graph([[], [0], [], [2]], 8, phases=[0, 1, 0, 1])
    cut = dataclasses.replace(whole, micro_batch=np.array([0, 0, 1, 1]))
    times = drawn([0, 0, 0, 0], [0.0, 0.25, 0.5, 0.75], [0.25, 0.5, 0.75, 1.0], [])
    for name, graph in (("whole", whole), ("cut", cut)):
        save_timeline_png(tmp_path / f"{name}.png", times, graph, host(1))
    forward = PHASE_COLORS["forward"]
    plain, shaded = (imread(tmp_path / f"{name}.png") for name in ("whole", "cut"))
    assert share_of(plain, shade(forward, 1, 2)) == 0
    assert share_of(shaded, shade(forward, 1, 2)) > 0.03
    assert share_of(shaded, forward) == pytest.approx(share_of(plain, forward) / 2, rel=0.15)


def test_names_are_no_formulas(tmp_path: Path) -> None:
    formula = r"$\frac{$"
    pair = [Device(f"{formula}{k}", "core", "cpu", 1 << 30) for k in range(2)]
    ends = [(pair[k].name, pair[1 - k].name) for k in range(2)]
    routes = tuple(Route(a, b, (f"{a}>{b}",)) for a, b in ends)
    hostile = Host(formula, tuple(pair), tuple(Link(route.links[0], 1e9) for route in routes), routes)
    graph = op_graph([[], [0]], 8, targets=[f"aten.{formula}"] * 2)
    times = drawn([0, 1], [0.0, 0.5], [0.5, 1.0], [(0, 0, 1)])
    save_timeline_png(tmp_path / "t.png", times, graph, hostile, formula)
    assert share_of(imread(tmp_path / "t.png"), PHASE_COLORS["forward"]) > 0


def frame_timeline(problem: Problem, devices: list[int]) -> Timeline:
    simulator = Simulator(problem, threads=1)
    return simulator.timeline(simulator.plan(np.array(devices, dtype=np.int32)))


def test_frames_of_a_host_have_one_size_however_much_is_sent() -> None:
    problem = chain_problem(6, num_devices=3)
    frames = [
        timeline_frame(frame_timeline(problem, devices), problem.graph, problem.host, "A step")
        for devices in ([0] * 6, [0, 1, 2, 0, 2, 1])
    ]
    assert frames[0].shape == frames[1].shape
    assert (frames[0].shape[1:], frames[0].dtype) == ((1050, 3), np.uint8)
    assert (frames[0][-1] == 255).all()
    assert (frames[0] != 255).any()


def test_no_chart_is_taller_than_its_frame() -> None:
    for seed in range(6):
        problem = random_problem(np.random.default_rng(seed), 12)
        assert timeline_frame(Timeline.empty(12), problem.graph, problem.host, "Empty").shape[1] == 1050


def test_text_has_a_lane_for_each_device_in_proportion() -> None:
    problem = chain_problem(3)
    title, first, second, last = timeline_text(
        frame_timeline(problem, [0, 0, 1]), problem.graph, problem.host, "Three"
    ).splitlines()
    assert title == "Three"
    lanes = [line.split("|")[1] for line in (first, second)]
    assert [len(lane) for lane in lanes] == [TEXT_COLUMNS] * 2
    assert lanes[0].rstrip(".") == "#" * lanes[0].count("#")  # from the start, without a break
    assert lanes[0].count("#") == pytest.approx(2 * lanes[1].count("#"), abs=2)
    assert int(first.split()[-3]) == pytest.approx(2 * int(second.split()[-3]), abs=2)
    assert last.startswith("step 3")


def test_an_empty_timeline_is_idle() -> None:
    problem = chain_problem(3)
    lines = timeline_text(Timeline.empty(3), problem.graph, problem.host, "Nothing").splitlines()
    assert all(line.endswith("|   0 % busy") for line in lines[1:-1])


def test_a_timeline_of_another_graph_is_refused() -> None:
    problem = chain_problem(3)
    with pytest.raises(InvalidValue, match="3, one for each op"):
        timeline_frame(Timeline.empty(4), problem.graph, problem.host, "Other")


def pipeline_stage() -> OpGraph:
    """Two forward ops for each of two micro-batches, one backward op each, an update that both share."""
    graph = op_graph([[], [0], [], [2], [1], [3], [4, 5]], phases=[0, 0, 0, 0, 1, 1, 2])
    return dataclasses.replace(graph, micro_batch=np.array([0, 0, 1, 1, 0, 1, -1]))


def micro_timeline(start_s: list[float], end_s: list[float]) -> Timeline:
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


def slices(graph: OpGraph, times: Timeline) -> list[Slice]:
    return list(Trace.of_timeline(times, graph, host(1)).ops)


def runs_of(ops: Iterable[int], times: Timeline, graph: OpGraph) -> list[tuple[float, float, int]]:
    every = slices(graph, times)
    found = runs([every[op] for op in ops], times.step_s)
    return [(start_s, end_s, every.index(first)) for start_s, end_s, first in found]


def test_ops_of_one_micro_batch_and_phase_in_a_row_are_one_run() -> None:
    times = micro_timeline([0, 1, 2, 3, 5, 6, 7], [1, 2, 3, 4, 6, 7, 8])
    assert runs_of(range(7), times, pipeline_stage()) == [(0, 2, 0), (2, 4, 2), (5, 6, 4), (6, 7, 5)]


def test_a_break_or_another_micro_batch_ends_a_run() -> None:
    interleaved = micro_timeline([0, 2, 1, 3, 5, 6, 7], [1, 3, 2, 4, 6, 7, 8])
    assert runs_of(range(4), interleaved, pipeline_stage()) == [(0, 1, 0), (1, 2, 2), (2, 3, 1), (3, 4, 3)]
    broken = micro_timeline([0, 1.5, 3, 4, 5, 6, 7], [1, 2.5, 4, 5, 6, 7, 8])
    assert runs_of(range(2), broken, pipeline_stage()) == [(0, 1, 0), (1.5, 2.5, 1)]
    assert runs_of([], broken, pipeline_stage()) == []


@pytest.mark.parametrize(("color", "light"), [("#FFFFFF", True), ("#000000", False), ("#0072B2", False)])
def test_ink_is_chosen_by_luminance(color: str, light: bool) -> None:
    assert is_light(color) is light


def test_micro_batches_that_take_short_turns_have_no_numbers() -> None:
    ops = 400
    graph = dataclasses.replace(op_graph([[]] * ops), micro_batch=np.arange(ops) % 2)
    start_s = [float(op) for op in range(ops)]
    assert runs_of(range(ops), micro_timeline(start_s, [start + 1 for start in start_s]), graph) == []
    mostly = dataclasses.replace(graph, micro_batch=(np.arange(ops) % 10 == 9).astype(np.int32))
    assert runs_of(range(ops), micro_timeline(start_s, [start + 1 for start in start_s]), mostly)[0] == (0.0, 399.0, 0)
