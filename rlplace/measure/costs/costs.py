"""`Costs`: seconds of every op on every device; `estimate_costs` makes them by a roofline, before any measurement."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, refuse_if
from rlplace.graphs.opgraph import OpGraph, read_only
from rlplace.measure.hosts.host import Device, Host
from rlplace.records import Described
from rlplace.say import counted

CostSource = Literal["estimated", "profiled", "given"]


@dataclass(frozen=True, eq=False)
class Costs:
    """Seconds per (op, device).

    Attributes:
        op_time_s: (N, D) float64, >= 0, without launches (`Host.dispatch_s`).
        source: `estimated` (roofline), `profiled` (measured) or `given` (by the graph file).
        workspace_bytes: (N, D) int64, >= 0: measured scratch memory of each op on each device; None uses the values of
            the graph.
        moved_factor: (N,) float64, >= 1: how many times as long each op takes where its largest input was made on
            another device (caches are cold there); None: as long.
    """

    op_time_s: NDArray[np.float64]
    source: CostSource
    workspace_bytes: NDArray[np.int64] | None = None
    moved_factor: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        op_time_s = read_only(self.op_time_s, np.float64)
        object.__setattr__(self, "op_time_s", op_time_s)
        refuse_if(op_time_s.ndim != 2, "op_time_s", op_time_s.shape, "an array of shape (N, D)", where="costs")
        refuse_if(
            not np.all(np.isfinite(op_time_s)) or np.any(op_time_s < 0),
            "op_time_s",
            "a negative or non-finite entry",
            "finite seconds >= 0",
            where="costs",
        )
        if self.workspace_bytes is not None:
            table = read_only(np.array(self.workspace_bytes), np.int64)
            object.__setattr__(self, "workspace_bytes", table)
            refuse_if(
                table.shape != op_time_s.shape,
                "workspace_bytes",
                table.shape,
                f"shape {op_time_s.shape}, as of `op_time_s`",
                where="costs",
            )
            if np.any(table < 0):
                raise InvalidValue("workspace_bytes", int(table.min()), "bytes >= 0", where="costs")
        if self.moved_factor is not None:
            factor = np.array(self.moved_factor, dtype=np.float64)
            factor.flags.writeable = False
            object.__setattr__(self, "moved_factor", factor)
            if factor.shape != op_time_s.shape[:1] or not np.all(np.isfinite(factor) & (factor >= 1)):
                expected = f"{len(op_time_s)} finite factors >= 1, one for each op"
                raise InvalidValue("moved_factor", Described("other factors"), expected, where="costs")

    @staticmethod
    def given(times_s: NDArray[np.float64], host: Host) -> Costs:
        """Costs from the times (N,) of a graph file, the same on every device."""
        return Costs(np.repeat(times_s[:, None], host.num_devices, axis=1), "given")

    def __repr__(self) -> str:
        """In one line: that of a dataclass would print every array."""
        num_ops, num_devices = self.op_time_s.shape
        total_s = self.op_time_s.sum(axis=0)
        whole = f"{total_s.min() * 1e3:.4g} to {total_s.max() * 1e3:.4g} ms in all"
        return f"Costs({self.source}, {counted(num_ops, 'op')} on {counted(num_devices, 'device')}, {whole})"


OpClass = Literal["matmul", "convolution", "attention", "reduction", "gather", "elementwise", "update"]


@dataclass(frozen=True)
class Efficiency:
    """The parts of a device's peaks that ops of one class reach."""

    compute: float
    """Part of the peak FLOP/s of the op's dtype."""
    bandwidth: float
    """Part of the peak memory bandwidth."""
    source: str


_COPY = (
    "p2pBandwidthLatencyTest copies within one GPU at 75 % of peak bandwidth on an H100 (2,500 of 3,350 GB/s, "
    "NVIDIA/nccl issue 1264), 75 % on an A100 (NVIDIA/cuda-samples issue 311), 83 % on a V100 (750 of 900 GB/s, "
    "ginkgo issue 164), 90 % on an RTX 3090 (838 of 936 GB/s, NVIDIA/nccl issue 1127)"
)

EFFICIENCIES: dict[OpClass, Efficiency] = {
    "matmul": Efficiency(
        0.7, 0.8,
        "Dao 2023 (FlashAttention-2, arXiv:2307.08691, section 1): optimised GEMMs reach 80-90 % of peak on an A100; "
        "argued: the layers of a model are smaller than those GEMMs, and their last wave of tiles is not full.",
    ),
    "convolution": Efficiency(
        0.5, 0.8,
        "argued: an implicit GEMM (Chetlur et al. 2014, cuDNN, arXiv:1410.0759) over fewer channels than a matmul has "
        "columns, with addresses to compute and edges to mask: below a matmul.",
    ),
    "attention": Efficiency(
        0.5, 0.8, "Dao 2023 (FlashAttention-2, arXiv:2307.08691, abstract): 50-73 % of peak on an A100; the lower end."
    ),
    "reduction": Efficiency(
        0.7, 0.55,
        "argued: statistics first, then their use: three passes over memory where two tensors are counted, so two "
        "thirds of what a copy reaches.",
    ),
    "gather": Efficiency(
        0.7, 0.4,
        "argued: rows at random, each rounded up to 32-byte sectors, and atomics or a sort on the way back: half of "
        "what a copy reaches.",
    ),
    "elementwise": Efficiency(0.7, 0.8, _COPY),
    "update": Efficiency(0.7, 0.7, "argued: elementwise, over four or more tensors at once: a little below a copy."),
}  # fmt: skip

_CLASS_NAMES: dict[OpClass, str] = {
    "matmul": """
        mm bmm addmm baddbmm addbmm matmul linear mv addmv dot vdot ger addr einsum bilinear _scaled_mm _int_mm lstm gru
        rnn_tanh rnn_relu _cudnn_rnn _cudnn_rnn_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward
    """,
    "convolution": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc",
    "reduction": """
        sum mean prod var std var_mean std_mean amax amin aminmax max min argmax argmin any all norm linalg_vector_norm
        logsumexp logcumsumexp cumsum cumprod cummax cummin topk sort argsort median mode nansum count_nonzero
        nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss l1_loss smooth_l1_loss
        binary_cross_entropy binary_cross_entropy_with_logits kl_div vocabulary_statistics vocabulary_loss
    """,
    "gather": """
        embedding embedding_dense_backward embedding_backward _embedding_bag _embedding_bag_forward_only index
        index_select index_put _index_put_impl index_add index_copy index_fill gather gather_backward scatter
        scatter_add scatter_reduce take take_along_dim masked_select masked_scatter nonzero unique _unique2
        repeat_interleave lookup_rows
    """,
}
_CLASS_PARTS: dict[str, OpClass] = {
    "convolution": "convolution",
    "attention": "attention",
    "softmax": "reduction",
    "_norm": "reduction",
    "pool": "reduction",
}
_CLASS_OF: dict[str, OpClass] = {name: kind for kind, names in _CLASS_NAMES.items() for name in names.split()}

MULTIPROCESSORS = {
    "Tesla K80": 13,
    "Tesla V100-PCIE-16GB": 80,
    "Tesla V100-SXM2-16GB": 80,
    "NVIDIA A100-SXM4-40GB": 108,
    "NVIDIA A100-SXM4-80GB": 108,
    "NVIDIA H100 80GB HBM3": 132,
    "NVIDIA GeForce RTX 3060": 28,
    "NVIDIA GeForce RTX 3090": 82,
    "NVIDIA GeForce RTX 4090": 128,
}
"""Multiprocessors of a device by its kind, for costs by size: NVIDIA's white papers of these architectures (the K80's
for one of its two GPUs)."""
TILED: frozenset[OpClass] = frozenset({"matmul", "convolution", "attention"})
"""Classes whose output is computed in tiles, each by one multiprocessor."""
TILE = 128 * 128
"""Elements of a tile: between the 256 x 128 and 64 x 64 of cuBLAS (NVIDIA, Matrix Multiplication Background User's
Guide, section 2.3: larger tiles are more efficient, smaller ones make more of them)."""
DEPTH = 1024
"""Summands of one piece of a tile. Argued: the sums of few and deep tiles are split (NVIDIA, CUTLASS, Efficient GEMM:
split-K), but those of 1,024 by 1,024 matrices, measured below, reach what their 64 tiles do."""
LAST_WAVE = 0.5
"""Part of a wave that is lost on average: w waves of tiles take as long as the next whole number of them (section 3.2
of that guide), which is w + 1/2 if any remainder is as likely as another.

It is near published float32 products of PyTorch: of n by n matrices, n = 1024, 2048 and 4096, a V100 reaches 0.73,
0.88 and 0.95 of the best at any n (zzc0721/torch-performance-test-data issue 140; here 0.62, 0.93, 0.99), an A100 0.51,
0.55, 0.88 (issue 108; here 0.54, 0.90, 0.99), an H100 0.72, 0.96, 1.00 (issue 79; here 0.49, 0.89, 0.98)."""
WHOLE_WAVES = 0.85 / EFFICIENCIES["matmul"].compute
"""How much more than in `EFFICIENCIES` the tiled classes reach where waves are full: 80-90 % of the peak for products
(Dao 2023), while those figures are argued from layers whose last wave is not full."""


def estimate_costs(graph: OpGraph, host: Host, *, by_size: bool = False) -> Costs:
    """Roofline costs (Williams, Waterman & Patterson 2009, Communications of the ACM 52(4)) of `graph` on `host`.

    An op takes `max(flops / (peak * compute), bytes_moved / (bandwidth * bandwidth_part))` with the efficiencies of its
    class (`EFFICIENCIES`), and never less than the device's `launch_s`; parameters, inputs and constants take nothing.
    The peak is that of the op's dtype, else that of `float32`.

    With `by_size`, small ops run below these figures. An op takes `launch_s` *and* its work: a kernel of V bytes takes
    a start of 2.2 us on a V100 and an H200, of 2.6 us on an A100, and V over the bandwidth (te42kyfo/gpu-benches,
    gpu-small-kernels, whose fit this is). Of the compute part of `TILED` ops, w / (w + `LAST_WAVE`) is reached, where w
    is the number of their tiles over that of `MULTIPROCESSORS`.

    Args:
        graph: N ops.
        host: D devices.
        by_size: whether efficiency depends on the size of an op.

    Raises:
        InvalidValue: A device without the figures that the graph needs.
    """
    classes = [op_class(target) for target in graph.targets]
    compute = np.array([EFFICIENCIES[name].compute for name in classes])
    bandwidth = np.array([EFFICIENCIES[name].bandwidth for name in classes])
    dtypes = np.array(op_dtypes(graph))
    runs = ~graph.is_source
    tiles = _tiles(graph, np.array([name in TILED for name in classes])) if by_size else None
    op_time_s = np.zeros((graph.num_ops, host.num_devices))
    for column, device in enumerate(host.devices):
        peak_flops_per_s = _peaks(device, dtypes, runs & (graph.flops > 0))
        if device.memory_bandwidth_bytes_per_s <= 0 and np.any(graph.bytes_moved[runs] > 0):
            _lack(device, "memory_bandwidth_bytes_per_s", device.memory_bandwidth_bytes_per_s)
        compute_s = graph.flops / (peak_flops_per_s * compute)
        memory_s = graph.bytes_moved / ((device.memory_bandwidth_bytes_per_s or np.inf) * bandwidth)
        busy_s = np.maximum(compute_s, memory_s)
        if tiles is not None:
            busy_s = np.maximum(compute_s / _reached(device, tiles), memory_s) + device.launch_s
        op_time_s[runs, column] = np.maximum(busy_s, device.launch_s)[runs]
    return Costs(op_time_s, "estimated")


def _tiles(graph: OpGraph, is_tiled: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(N,) float64: tiles of the largest output of each op, times the pieces of their sums; nan for other ops."""
    elements = np.ones(graph.num_ops)
    np.maximum.at(elements, graph.tensor_op, [float(math.prod(shape)) for shape in graph.tensor_shapes])
    pieces = np.maximum(graph.flops / (2 * elements * DEPTH), 1.0)
    return np.where(is_tiled & (graph.flops > 0), np.maximum(elements / TILE, 1.0) * pieces, np.nan)


def _reached(device: Device, tiles: NDArray[np.float64]) -> NDArray[np.float64]:
    """(N,) float64: parts of the compute efficiencies that ops reach with so many tiles; 1 for those without."""
    if np.all(np.isnan(tiles)):
        return np.ones(len(tiles))
    if device.kind not in MULTIPROCESSORS:
        known = f"a kind whose multiprocessors are known: {', '.join(MULTIPROCESSORS)}"
        raise InvalidValue("kind", device.kind, known, where=f"costs by size, device {device.name!r}")
    waves = tiles / MULTIPROCESSORS[device.kind]
    return np.where(np.isnan(tiles), 1.0, WHOLE_WAVES * waves / (waves + LAST_WAVE))


@cache
def op_class(target: str) -> OpClass:
    """The class of an ATen target, by its name.

    Example:
        >>> op_class("aten.addmm.default"), op_class("aten.native_layer_norm.default"), op_class("update.adam")
        ('matmul', 'reduction', 'update')
    """
    namespace, _, rest = target.partition(".")
    if namespace == "update":
        return "update"
    name = (rest or namespace).partition(".")[0].rstrip("_")
    if name in _CLASS_OF:
        return _CLASS_OF[name]
    return next((kind for part, kind in _CLASS_PARTS.items() if part in name), "elementwise")


def op_dtypes(graph: OpGraph) -> list[str]:
    """The dtype that each op computes in, (N,): its first floating output's, else its first floating input's.

    Ops that touch no floating tensor count as `float32`.
    """
    is_floating = np.array([dtype.startswith(("float", "bfloat")) for dtype in graph.tensor_dtypes], dtype=np.bool_)
    chosen = np.full(graph.num_ops, graph.num_tensors)
    reads = is_floating[graph.input_tensors]
    np.minimum.at(chosen, graph.edge_op[reads], graph.input_tensors[reads])
    writes = np.flatnonzero(is_floating)[::-1]
    chosen[graph.tensor_op[writes]] = writes
    dtypes = (*graph.tensor_dtypes, "float32")
    return [dtypes[tensor] for tensor in chosen.tolist()]


def _peaks(device: Device, dtypes: NDArray[np.str_], needed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(N,) float64 FLOP/s of `device`; infinite for the ops that need none."""
    peak_flops_per_s = np.full(len(dtypes), np.inf)
    for dtype in np.unique(dtypes[needed]).tolist():
        peak = device.peak_flops_per_s.get(dtype, 0.0) or device.peak_flops_per_s.get("float32", 0.0)
        if peak <= 0:
            _lack(device, "peak_flops_per_s", device.peak_flops_per_s)
        peak_flops_per_s[needed & (dtypes == dtype)] = peak
    return peak_flops_per_s


def _lack(device: Device, field: str, actual: object) -> None:
    raise InvalidValue(
        field,
        actual,
        "the figure that an estimate needs (`float32` at least)" if field == "peak_flops_per_s" else "more than 0",
        where=f"device {device.name!r}",
        hint="Give it in the host file, or profile the graph on this host instead.",
    )
