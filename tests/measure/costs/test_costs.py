"""`Costs`: its tables, and roofline costs against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from micrographs import op_graph

from rlplace.errors import InvalidValue
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import EFFICIENCIES, Costs, estimate_costs, op_class, op_dtypes
from rlplace.measure.hosts.host import Device, Host, Route
from rlplace.measure.hosts.resolve import resolve_host

SECONDS = np.ones((2, 3))


def test_scratch_is_a_table_like_that_of_seconds() -> None:
    costs = Costs(SECONDS, "profiled", np.array([[1, 2, 3], [0, 0, 0]]))
    assert costs.workspace_bytes.dtype == np.int64
    assert not costs.workspace_bytes.flags.writeable
    assert Costs(SECONDS, "profiled").workspace_bytes is None


@pytest.mark.parametrize("table", [np.zeros((2, 2)), np.zeros(6), np.full((2, 3), -1)])
def test_other_scratch_is_refused(table: np.ndarray) -> None:
    with pytest.raises(InvalidValue, match="workspace_bytes"):
        Costs(SECONDS, "profiled", table)


def chain(
    targets: Sequence[str], flops: Sequence[float], bytes_moved: Sequence[float], dtypes: Sequence[str] | None = None
) -> OpGraph:
    """A chain: every op has one output and reads the one before it."""
    n = len(targets)
    graph = op_graph([[], *([i] for i in range(n - 1))], 4, targets=targets, flops=flops)
    kinds = tuple(dtypes or ("float32",) * n)
    return replace(graph, bytes_moved=np.array(bytes_moved), tensor_shapes=((1,),) * n, tensor_dtypes=kinds)


def device(**facts: object) -> Device:
    figures: dict[str, object] = {"peak_flops_per_s": {"float32": 10e12}, "memory_bandwidth_bytes_per_s": 100e9}
    return Device("d", "gpu", "simulated", 1, **(figures | facts))  # type: ignore[arg-type]


def seconds(graph: OpGraph, *devices: Device) -> list[float]:
    """Costs of the last op of `graph` on each device."""
    named = [replace(one, name=f"d{index}") for index, one in enumerate(devices)]
    pairs = [(a, b) for a in named for b in named if a is not b]
    host = Host("h", tuple(named), (), tuple(Route(a.name, b.name, ()) for a, b in pairs))
    return list(estimate_costs(graph, host).op_time_s[-1].tolist())


def test_a_v100_multiplies_square_matrices_at_seven_tenths_of_its_peak() -> None:
    # 1024^3 float32: 2 * 2^30 FLOPs at 0.7 * 15.7 TFLOP/s, 195 us; 3 * 4 MiB at 0.8 * 900 GB/s would take 17 us.
    graph = chain(["input", "aten.mm.default"], [0, 2 * 2**30], [0, 3 * 2**22])
    costs = estimate_costs(graph, resolve_host("8xV100-dgx1"))
    assert costs.source == "estimated"
    assert costs.op_time_s.shape == (2, 8)
    assert costs.op_time_s[1] == pytest.approx(195.4e-6, rel=1e-3)
    # In float16 the tensor cores take 2 * 2^30 / (0.7 * 125 TFLOP/s) = 24.5 us.
    half = chain(["input", "aten.mm.default"], [0, 2 * 2**30], [0, 3 * 2**21], ["float16"] * 2)
    assert estimate_costs(half, resolve_host("8xV100-dgx1")).op_time_s[1] == pytest.approx(24.54e-6, rel=1e-3)


@pytest.mark.parametrize(
    ("target", "flops", "bytes_moved", "expected_s"),
    [
        ("aten.mm.default", 7e9, 1.0, 1e-3),  # 7e9 / (0.7 * 10e12)
        ("aten.convolution_backward.default", 5e9, 1.0, 1e-3),  # 5e9 / (0.5 * 10e12)
        ("aten._scaled_dot_product_flash_attention.default", 5e9, 1.0, 1e-3),
        ("aten.relu.default", 1e6, 80e6, 1e-3),  # 80e6 / (0.8 * 100e9)
        ("aten.native_layer_norm.default", 1e6, 55e6, 1e-3),  # 55e6 / (0.55 * 100e9)
        ("aten.embedding.default", 0.0, 40e6, 1e-3),  # 40e6 / (0.4 * 100e9)
        ("update.adam", 1e6, 70e6, 1e-3),  # 70e6 / (0.7 * 100e9)
        ("aten.add.Tensor", 1.0, 8.0, 5e-6),  # the launch
        ("aten.mm.default", 0.0, 0.0, 5e-6),
    ],
)
def test_takes_the_longest_of_compute_memory_and_launch(
    target: str, flops: float, bytes_moved: float, expected_s: float
) -> None:
    graph = chain(["input", target], [0, flops], [0, bytes_moved])
    assert seconds(graph, device(launch_s=5e-6)) == [pytest.approx(expected_s)]


@pytest.mark.parametrize("target", ["input", "parameter", "buffer", "constant", "state"])
def test_what_is_there_already_takes_nothing(target: str) -> None:
    graph = chain([target, "aten.relu.default"], [1e9, 0], [1e9, 0])
    op_time_s = estimate_costs(graph, Host("h", (device(launch_s=5e-6),))).op_time_s
    assert op_time_s.tolist() == [[0.0], [5e-6]]


def test_each_device_by_its_own_figures() -> None:
    graph = chain(["input", "aten.mm.default"], [0, 7e9], [0, 1.0])
    gang = device(peak_flops_per_s={"float32": 20e12}, cores=(0, 1))
    assert seconds(graph, device(), gang) == [pytest.approx(1e-3), pytest.approx(0.5e-3)]


def test_dtype_is_the_first_floating_output_else_input() -> None:
    targets = ["input", "aten.mm.default", "aten.argmax.default", "aten.index.Tensor", "aten.relu.default"]
    dtypes = ["int64", "bfloat16", "int64", "int64", "float64"]
    graph = chain(targets, [0] * 5, [0] * 5, dtypes)
    assert op_dtypes(graph) == ["float32", "bfloat16", "bfloat16", "float32", "float64"]


def test_dtype_is_the_first_of_several_outputs() -> None:
    graph = chain(["input", "aten.var_mean.correction", "aten.relu.default"], [0] * 3, [0] * 3)
    graph = replace(
        graph,
        tensor_op=np.array([0, 1, 1, 1, 2]),
        tensor_output=np.array([0, 0, 1, 2, 0]),
        tensor_bytes=np.full(5, 4),
        tensor_shapes=((1,),) * 5,
        tensor_dtypes=("float32", "int64", "float16", "float64", "int32"),
        input_tensors=np.array([0, 3]),
    )
    assert op_dtypes(graph) == ["float32", "float16", "float64"]


def test_missing_dtype_falls_back_to_float32() -> None:
    graph = chain(["input", "aten.mm.default"], [0, 7e9], [0, 1.0], ["bfloat16"] * 2)
    assert seconds(graph, device()) == [pytest.approx(1e-3)]
    assert seconds(graph, device(peak_flops_per_s={"float32": 10e12, "bfloat16": 0.0})) == [pytest.approx(1e-3)]


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        ({"peak_flops_per_s": {}}, "peak_flops_per_s"),
        ({"peak_flops_per_s": {"float16": 1e12}}, "peak_flops_per_s"),
        ({"memory_bandwidth_bytes_per_s": 0.0}, "memory_bandwidth_bytes_per_s"),
    ],
)
def test_missing_figures_are_named(facts: dict[str, object], field: str) -> None:
    graph = chain(["input", "aten.mm.default"], [0, 7e9], [0, 1.0])
    with pytest.raises(InvalidValue, match=f"device 'd0': {field} is .* profile the graph") as caught:
        seconds(graph, device(**facts))
    assert caught.value.field == field


def test_figures_that_no_op_needs_may_be_missing() -> None:
    graph = chain(["input", "aten.relu.default"], [1e9, 0], [1e9, 0])
    assert seconds(graph, device(peak_flops_per_s={}, memory_bandwidth_bytes_per_s=0.0, launch_s=1e-6)) == [1e-6]


def shaped(target: str, *, flops: float, bytes_moved: float, shape: tuple[int, ...]) -> OpGraph:
    """An input and an op with an output of a shape."""
    return replace(chain(["input", target], [0, flops], [0, bytes_moved]), tensor_shapes=((1,), shape))


@pytest.mark.parametrize(
    ("shape", "summands", "expected_s"),
    [
        # 64 tiles on 80 multiprocessors, 0.8 waves: 0.8 / 1.3 of 0.85 * 15.7 TFLOP/s, and 3 us.
        ((1024, 1024), 1024, 264.5e-6),
        # Half of it: 0.4 waves, of which 0.4 / 0.9 is reached, so 0.7 of the time.
        ((1024, 512), 1024, 184.0e-6),
        # One tile with sums in 1,024 pieces: 12.8 waves, of which 12.8 / 13.3 is reached.
        ((128, 128), 2**20, 2.678e-3),
        # Less than one tile counts as one: 1/80 waves, 0.0125 / 0.5125.
        ((16, 16), 1024, 1.611e-6 + 3e-6),
    ],
)
def test_small_products_have_few_waves_of_tiles(shape: tuple[int, int], summands: int, expected_s: float) -> None:
    flops = 2.0 * shape[0] * shape[1] * summands
    graph = shaped("aten.mm.default", flops=flops, bytes_moved=1.0, shape=shape)
    costs = estimate_costs(graph, resolve_host("8xV100-dgx1"), by_size=True)
    assert costs.source == "estimated"
    assert costs.op_time_s[1] == pytest.approx(expected_s, rel=1e-3)


def test_small_transfers_of_memory_take_their_start() -> None:
    # 8 MB at 0.8 * 1,555 GB/s, 6.43 us, and 2.3 us; a thousandth of it is the start alone.
    host = resolve_host("4xA100-nvlink")
    large = shaped("aten.relu.default", flops=1.0, bytes_moved=8e6, shape=(1000, 1000))
    small = shaped("aten.relu.default", flops=1.0, bytes_moved=8e3, shape=(1000,))
    assert estimate_costs(large, host).op_time_s[1] == pytest.approx(6.431e-6, rel=1e-3)
    assert estimate_costs(large, host, by_size=True).op_time_s[1] == pytest.approx(8.731e-6, rel=1e-3)
    assert estimate_costs(small, host, by_size=True).op_time_s[1] == pytest.approx(2.306e-6, rel=1e-3)


def test_products_by_size_need_a_known_kind() -> None:
    host = Host("h", (device(),))
    with pytest.raises(InvalidValue, match="device 'd': kind is 'gpu', expected a kind whose multiproc"):
        estimate_costs(shaped("aten.mm.default", flops=1.0, bytes_moved=1.0, shape=(8, 8)), host, by_size=True)
    relu = shaped("aten.relu.default", flops=1.0, bytes_moved=80e6, shape=(8, 8))
    assert estimate_costs(relu, host, by_size=True).op_time_s[1] == pytest.approx(1e-3)


MEASURED = {  # TFLOP/s of n x n products in PyTorch, n = 1024, 2048 and 4096, and the most at any n
    ("8xV100-dgx1", "float32"): (10.56, 12.71, 13.85, 14.51),  # zzc0721/torch-performance-test-data issue 140
    ("8xV100-dgx1", "float16"): (57.30, 78.23, 95.73, 97.36),
    ("4xA100-nvlink", "float32"): (8.99, 9.69, 15.52, 17.56),  # issue 108
    ("4xA100-nvlink", "float16"): (83.66, 214.73, 241.49, 241.49),
    ("8xH100-nvswitch", "float32"): (37.39, 49.58, 51.88, 51.88),  # issue 79
    ("8xH100-nvswitch", "float16"): (179.13, 645.12, 760.04, 760.04),
}


def test_products_by_size_are_nearer_to_measured_ones() -> None:
    missed: dict[bool, float] = {}
    for by_size in (True, False):
        errors = []
        for (name, dtype), (*measured, most) in MEASURED.items():
            rates = []
            for n in (1024, 2048, 4096, 8192):
                graph = shaped("aten.mm.default", flops=2.0 * n**3, bytes_moved=6.0 * n**2, shape=(n, n))
                graph = replace(graph, tensor_dtypes=(dtype, dtype))
                rates.append(2.0 * n**3 / estimate_costs(graph, resolve_host(name), by_size=by_size).op_time_s[1, 0])
            errors += np.abs(np.array(rates[:3]) / rates[3] - np.array(measured) / most).tolist()
        missed[by_size] = float(np.mean(errors))
    assert missed[True] < 0.6 * missed[False]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("aten.addmm.default", "matmul"),
        ("aten.bmm.default", "matmul"),
        ("rlplace.attention.default", "attention"),
        ("rlplace.attention_backward.default", "attention"),
        ("aten.convolution.default", "convolution"),
        ("aten.conv2d.default", "convolution"),
        ("aten.mkldnn_rnn_layer.default", "matmul"),
        ("aten._efficient_attention_backward.default", "attention"),
        ("aten._log_softmax_backward_data.default", "reduction"),
        ("aten.native_batch_norm_backward.default", "reduction"),
        ("aten.max_pool2d_with_indices.default", "reduction"),
        ("aten.sum.dim_IntList", "reduction"),
        ("aten.embedding_dense_backward.default", "gather"),
        ("aten._index_put_impl_.default", "gather"),
        ("aten.linalg_vector_norm.default", "reduction"),
        ("aten.normal_functional.default", "elementwise"),
        ("aten.maximum.default", "elementwise"),
        ("aten.cat.default", "elementwise"),
        ("aten.add_.Tensor", "elementwise"),
        ("prims.convert_element_type.default", "elementwise"),
        ("update.momentum", "update"),
        ("relu", "elementwise"),
    ],
)
def test_op_classes(target: str, expected: str) -> None:
    assert op_class(target) == expected


def test_every_efficiency_is_a_part_and_has_a_source() -> None:
    for efficiency in EFFICIENCIES.values():
        assert 0 < efficiency.compute <= 1
        assert 0 < efficiency.bandwidth <= 1
        assert len(efficiency.source) > 20
