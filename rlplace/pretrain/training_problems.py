"""`ProblemSource`: the problems that weights are trained on, each a function of a seed and a number.

`random_host`: hosts made of the kinds of devices and wires that presets have.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from rlplace.graphs import OpGraph
from rlplace.graphs.synthetic import synthetic
from rlplace.measure import Host, Problem, resolve_host
from rlplace.measure.hosts.host_file import Wiring, lay_routes
from rlplace.policy.options import PretrainConfig

CAPTURED = (
    ("t5@paper,layers=4", 1),
    ("vit@paper,layers=8", 1),
    ("whisper@paper", 1),
    ("llama@paper,layers=4", 1),
    ("resnet50@paper", 1),
    ("evoformer@paper,blocks=2", 1),
    ("t5@paper,layers=2,batch=32", 1),
    ("vit@paper,layers=4,batch=256", 1),
    ("whisper@paper,layers=3,batch=2", 1),
    ("llama@paper,layers=8,width=1024,heads=16,kv_heads=16,mlp=2752,batch=4,tokens=512", 1),
    ("resnet50@paper,batch=128", 1),
    ("evoformer@paper,blocks=1,residues=128", 1),
    ("vit@paper,layers=4,batch=256", 4),
    ("t5@paper,layers=2,batch=32", 2),
    ("resnet50@paper,batch=128", 2),
)
"""Training steps of models, and into how many micro-batches each is cut."""
BUILT_FOR = "4xV100-pcie"
"""Any simulated host: models are the same on all of them, and never allocated."""
TIGHT, ROOM = 0.12, (1.6, 4.0)
"""Probability that the memory of devices is cut, and to how many times the bytes that a step keeps."""
Range = tuple[float, float]
SHAPES: dict[str, dict[str, Range]] = {
    "layered": {"layers": (6, 24), "width": (3, 12)},
    "fork_join": {"stages": (3, 14), "width": (2, 6), "depth": (1, 3)},
    "series_parallel": {"ops": (40, 240)},
    "recurrent": {"layers": (1, 8), "steps": (6, 30)},
    "mixture_of_experts": {"layers": (2, 8), "experts": (3, 8)},
    "encoder_decoder": {"encoder": (2, 8), "decoder": (2, 8), "heads": (2, 8)},
}
"""Synthetic families, and the least and most of their parameters."""
FLOPS, OUTPUT_BYTES, SPREADS = (1e8, 3e10), (2.0**16, 2.0**25), (0.2, 1.2)
"""Medians of an op's work and output, drawn by their logs, and the spread of both."""


class ProblemSource:
    """Problem number i of a seed is always the same one.

    Args:
        config: which graphs there are.

    Raises:
        UserError: a graph file cannot be read.
    """

    def __init__(self, config: PretrainConfig) -> None:
        self._config = config
        self._real: list[OpGraph | tuple[str, int]] = list(CAPTURED) if config.captured else []
        if config.graphs:
            from rlplace.graphs import load_graph

            self._real += [load_graph(path) for path in config.graphs]  # other machines may not have the files

    def problem(self, stage: int, number: int) -> Problem:
        """A graph on a random host, with estimated costs and the default grouping.

        Args:
            stage: problems of different stages have nothing to do with each other.
            number: which of the stage.
        """
        draw = np.random.default_rng([self._config.seed, stage, number])
        host = random_host(draw)
        if not self._real or draw.random() < self._config.synthetic:
            graph = _synthetic(draw)
        else:
            chosen = self._real[int(draw.integers(len(self._real)))]
            graph = chosen if isinstance(chosen, OpGraph) else _capture(*chosen)
        problem = Problem.estimate(graph, host)
        if draw.random() >= TIGHT:
            return problem
        kept = graph.parameter_bytes + graph.gradient_bytes + graph.state_bytes
        room = float(np.exp(draw.uniform(*np.log(ROOM)))) * (kept.sum() + graph.output_bytes.sum())
        devices = tuple(
            replace(
                device, memory_bytes=min(device.memory_bytes, int(room / host.num_devices) + device.context_bytes + 1)
            )
            for device in host.devices
        )
        return Problem.estimate(graph, replace(host, devices=devices))


@lru_cache(maxsize=64)
def _capture(workload: str, count: int) -> OpGraph:
    """The captured step of a workload, cut into micro-batches."""
    from rlplace.session.prepare import capture_workload
    from rlplace.workloads import build_for, parse_workload

    built = build_for(parse_workload(workload), resolve_host(BUILT_FOR), 0)
    return replace(capture_workload(built, count), program=None)


def _synthetic(draw: np.random.Generator) -> OpGraph:
    family = str(draw.choice(list(SHAPES)))
    params: dict[str, Any] = {
        name: int(draw.integers(int(low), int(high) + 1)) for name, (low, high) in SHAPES[family].items()
    }
    flops, output_bytes = (float(np.exp(draw.uniform(*np.log(bounds)))) for bounds in (FLOPS, OUTPUT_BYTES))
    return synthetic(
        family,
        seed=int(draw.integers(2**31)),
        flops=flops,
        output_bytes=output_bytes,
        spread=float(draw.uniform(*SPREADS)),
        optimizer=str(draw.choice(("sgd", "adam"))),
        **params,
    )


KINDS = ("2xK80", "4xV100-pcie", "4xA100-nvlink", "4xRTX3090-pcie", "8xH100-nvswitch", "RTX4090+RTX3060")
"""Presets whose first device is a kind that hosts are made of."""
WIRES = {"pcie3": (11.4e9, 14e-6), "pcie4": (22e9, 12e-6), "nvlink": (90e9, 2e-6), "nvswitch": (270e9, 2e-6)}
"""Bytes per second and latency in seconds between the devices of a node, as presets have them."""
COUNTS = (2, 3, 4, 6, 8, 16)
"""How many devices there may be."""
ONE_KIND, TWO_NODES, SPREAD = 0.7, 0.3, 0.15
"""Chance that all devices are of a kind, that four and more are on two nodes, and the spread of the log of a rate."""


def random_host(draw: np.random.Generator) -> Host:
    """Two to sixteen devices of one kind, or of two; on one wire, or on two nodes that InfiniBand joins."""
    count = int(draw.choice(COUNTS, p=(0.22, 0.12, 0.28, 0.1, 0.18, 0.1)))
    hosts = [resolve_host(str(name)) for name in draw.choice(KINDS, 2, replace=False)]
    first = count if draw.random() < ONE_KIND else int(draw.integers(1, count))
    kinds = [hosts[0].devices[0]] * first + [hosts[1].devices[0]] * (count - first)
    nodes = 2 if count >= 4 and draw.random() < TWO_NODES else 1
    names = [f"n{d * nodes // count}:{d}" for d in range(count)]
    rate, latency_s = WIRES[str(draw.choice(list(WIRES)))]
    rate *= float(np.exp(SPREAD * draw.normal()))
    wirings = [Wiring(f"wire-{node}", rate, latency_s, ports=(f"n{node}:*",)) for node in range(nodes)]
    wirings += [Wiring("ib", 22e9, 10e-6, ports=("*",))] * (nodes - 1)
    links, routes = lay_routes(wirings, names, "random host")
    devices = [replace(kind, name=name, dispatcher=name[:2]) for kind, name in zip(kinds, names, strict=True)]
    return replace(hosts[0], name="random", devices=tuple(devices), links=links, routes=routes, sources={})
