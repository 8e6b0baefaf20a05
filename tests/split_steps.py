"""Whether a split step is equal to the whole one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlplace.graphs import OpGraph, SplitPlan, capture, run_graph

CLEAN = 1e-10
"""For steps whose ops are all in float64."""
CAST = 1e-6
"""For those that cast to float32 on the way: the losses of `transformers`, and its root-mean-square norms."""


def joined(graph: OpGraph, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of parameters under their own names, put together from those of the shards."""
    assert graph.program is not None
    wholes = {name: each for name, each in found.items() if not name.endswith("]")}
    shards = [source.shard for source in graph.program.sources.values() if source.shard is not None]
    for name in dict.fromkeys(shard.name for shard in shards if shard.key in found):
        pieces: list[tuple[int, Tensor]] = []
        own = [shard for shard in shards if shard.name == name]
        for shard in own:
            sizes = [end - start for start, end in shard.intervals]
            parts = found[shard.key].split(sizes, shard.dim)
            pieces += [(start, part) for (start, _), part in zip(shard.intervals, parts, strict=True)]
        wholes[name] = torch.cat([part for _, part in sorted(pieces, key=lambda piece: piece[0])], own[0].dim)
    return wholes


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Of all tensors together, relative to the norm of `one`."""
    assert one.keys() == other.keys()
    norm = sum(float(value.double().square().sum()) for value in one.values())
    return float(sum(float((one[name] - other[name]).double().square().sum()) for name in one) / norm) ** 0.5


def check_equal(
    model: nn.Module,
    inputs: Any,
    loss_fn: Any,
    split: SplitPlan,
    most: float,
    *,
    micro_batches: int = 1,
    **options: Any,
) -> OpGraph:
    """The split graph, whose step is that of the whole one."""
    options |= {"micro_batches": micro_batches}
    whole = capture(model, inputs, loss_fn, "sgd" if loss_fn else None, **options)
    graph = capture(model, inputs, loss_fn, "sgd" if loss_fn else None, split=split, **options)
    one, other = run_graph(whole), run_graph(graph)
    assert float((one.result - other.result).abs().max()) <= most * float(one.result.abs().max())
    assert loss_fn is None or distance(one.gradients, joined(graph, other.gradients)) <= most
    assert distance(one.state, joined(graph, other.state)) <= most
    assert graph.num_shards == split.num_shards
    return graph
