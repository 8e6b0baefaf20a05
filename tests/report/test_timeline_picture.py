from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from micrographs import op_graph

from rlplace.errors import InvalidValue
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.plan import Timeline
from rlplace.report import save_timeline_png
from rlplace.report.timeline import PHASE_COLORS, TRANSFER_COLOR, shade

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


def timeline(device: list[int], start_s: list[float], end_s: list[float], sent: list[tuple[int, int, int]]) -> Timeline:
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
        timeline([0, 1, 0, 1], [0, 0.1, 0.4, 0.4], [0.1, 0.4, 1.0, 0.5], [(0, 0, 1), (1, 1, 0)]),
        graph,
        host(2),
        "four ops",
    )
    picture = imread(path)
    lanes_in = 2 * 0.62 + 2 * 0.27 + 5 * 0.07
    assert picture.shape == (round((1.0 + lanes_in + 0.62) * 150), WIDTH, 4)
    forward, backward, update = (share_of(picture, color) for color in PHASE_COLORS.values())
    assert backward > 6 * forward > 0
    assert update == pytest.approx(forward, rel=0.15)
    assert share_of(picture, TRANSFER_COLOR) > 0


@pytest.mark.parametrize("num_devices", [1, 3, 8])
def test_any_number_of_devices_and_directions_fits(tmp_path: Path, num_devices: int) -> None:
    n = 20 * num_devices**2
    device = [i % num_devices if i % 2 else i // num_devices % num_devices for i in range(n)]
    sent = [(i, device[i], device[i + 1]) for i in range(n - 1) if device[i] != device[i + 1]]
    graph = op_graph([[], *([i] for i in range(n - 1))], 8)
    times = np.arange(n) * 1e-4
    save_timeline_png(
        tmp_path / "t.png", timeline(device, list(times), list(times + 1e-4), sent), graph, host(num_devices)
    )
    height, width, _ = imread(tmp_path / "t.png").shape
    assert width == WIDTH
    assert height <= (1.0 + 16.0 + 0.62) * 150 + 1


def test_ten_thousand_ops_and_an_empty_step_are_drawn(tmp_path: Path) -> None:
    n = 10_000
    times = np.arange(n) * 1e-6
    graph = op_graph([[]] * n, 8, phases=[i * 3 // n for i in range(n)])
    save_timeline_png(
        tmp_path / "many.png", timeline([i % 4 for i in range(n)], list(times), list(times + 4e-6), []), graph, host(4)
    )
    assert share_of(imread(tmp_path / "many.png"), PHASE_COLORS["forward"]) > 0.05
    save_timeline_png(
        tmp_path / "none.png", timeline([0], [0.0], [0.0], []), op_graph([[]], targets=["input"]), host(1)
    )
    assert imread(tmp_path / "none.png").shape[1] == WIDTH


def test_an_op_on_a_gang_is_drawn_on_each_member(tmp_path: Path) -> None:
    pair = host(2)
    gang = Device("cpu:0-1", "gang", "cpu", 1 << 30, members=("cpu:0", "cpu:1"))
    ends = [(gang.name, device.name) for device in pair.devices]
    hand_overs = tuple(Route(a, b, ()) for pair_ends in ends for a, b in (pair_ends, pair_ends[::-1]))
    gangs = Host("gangs", (*pair.devices, gang), pair.links, pair.routes + hand_overs)
    graph = op_graph([[]], 8)
    save_timeline_png(tmp_path / "one.png", timeline([0], [0.0], [1.0], []), graph, gangs)
    save_timeline_png(tmp_path / "gang.png", timeline([2], [0.0], [1.0], []), graph, gangs)
    one, both = (share_of(imread(tmp_path / name), PHASE_COLORS["forward"]) for name in ("one.png", "gang.png"))
    assert one < both < 2 * one  # twice the area, less the hatching


def test_a_timeline_of_another_graph_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="op_device is '1 entries', expected 2"):
        save_timeline_png(tmp_path / "t.png", timeline([0], [0.0], [1.0], []), op_graph([[], [0]]), host(1))
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
    times = timeline([0, 0, 0, 0], [0.0, 0.25, 0.5, 0.75], [0.25, 0.5, 0.75, 1.0], [])
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
    times = timeline([0, 1], [0.0, 0.5], [0.5, 1.0], [(0, 0, 1)])
    save_timeline_png(tmp_path / "t.png", times, graph, hostile, formula)
    assert share_of(imread(tmp_path / "t.png"), PHASE_COLORS["forward"]) > 0
