"""Our rules against those of PyTorch's DTensor: the same placements of results for the same placements of arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlplace.graphs.splitting.dimensions import Atom, Dimensions, leaves
from rlplace.graphs.splitting.sharded_values import layout_of

aten = torch.ops.aten

CASES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((4, 6), (6, 8))),
    "bmm": (torch.bmm, ((2, 4, 6), (2, 6, 8))),
    "add": (torch.add, ((4, 6), (4, 6))),
    "broadcast": (torch.mul, ((2, 4, 6), (4, 1))),
    "gelu": (torch.nn.functional.gelu, ((4, 6),)),
    "sum": (lambda x: x.sum(1), ((4, 6),)),
    "sum of all": (torch.sum, ((4, 6),)),
    "transpose": (lambda x: x.transpose(0, 2), ((2, 4, 6),)),
    "permute": (lambda x: x.permute(2, 0, 1), ((2, 4, 6),)),
    "unsqueeze": (lambda x: x.unsqueeze(1), ((4, 6),)),
    "flatten": (lambda x: x.reshape(8, 6), ((4, 2, 6),)),
    "unflatten": (lambda x: x.reshape(4, 2, 6), ((8, 6),)),
    "softmax": (lambda x: torch.softmax(x, 1), ((4, 6),)),
    "layer norm": (lambda x: torch.nn.functional.layer_norm(x, (6,)), ((4, 6),)),
    "stack": (lambda x, y: torch.stack((x, y), 1), ((4, 6), (4, 6))),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    if dist.is_initialized():
        pytest.skip("another process group is there")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", CASES)
def test_results_are_placed_alike(name: str, mesh: DeviceMesh) -> None:
    function, shapes = CASES[name]
    tensors = [torch.randn(shape) for shape in shapes]
    graph = make_fx(function, tracing_mode="fake")(*tensors).graph
    dimensions = Dimensions(graph)
    inputs = graph.find_nodes(op="placeholder")
    (output,) = graph.find_nodes(op="output")
    result = output.args[0]
    atoms = dict.fromkeys(leaf for node in inputs for dim in dimensions.of[node] for leaf in leaves(dim))
    num_compared = 0
    for atom in atoms:
        layouts = [layout_of(dimensions.of[node], atom) for node in inputs]
        if not _can_be_split(dimensions, atom) or any(layout is not None and layout.outer > 1 for layout in layouts):
            continue
        placements: list[Placement] = [Replicate() if layout is None else Shard(layout.dim) for layout in layouts]
        given = [
            DTensor.from_local(tensor.chunk(2, one.dim)[0] if isinstance(one, Shard) else tensor, mesh, [one])
            for tensor, one in zip(tensors, placements, strict=True)
        ]
        found = function(*given)
        assert isinstance(found, DTensor)
        layout = layout_of(dimensions.of[result], atom)
        (place,) = found.placements
        if layout is None:
            assert place.is_partial()
        else:  # a factor that is not the first of its dimension is a strided shard
            assert getattr(place, "dim", None) == layout.dim, (atom.size, place)
            assert getattr(place, "split_factor", 1) == layout.outer
        num_compared += 1
    assert num_compared


def _can_be_split(dimensions: Dimensions, atom: Atom) -> bool:
    return not any(atom in leaves(dim) for use in dimensions.uses.values() for dim in use.whole)
