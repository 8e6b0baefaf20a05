"""Which dimensions are the same, and which a plan splits: by hand, and as PyTorch's DTensor has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as TorchShard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlplace.errors import CaptureError, InvalidValue, UnknownName
from rlplace.graphs import SplitPlan, capture
from rlplace.graphs.capturing.trace import Trace, kept_traces, trace_step
from rlplace.graphs.program import Shard
from rlplace.graphs.splitting.dimensions import Atom, Dimensions, leaves, unify
from rlplace.graphs.splitting.sharded_values import layout_of


def sizes(dim: list[Atom]) -> list[int]:
    return [leaf.size for leaf in leaves(dim)]


def test_a_fused_projection_and_its_heads_have_common_factors() -> None:
    fused, pieces, heads = [Atom(24)], [Atom(3), Atom(8)], [Atom(4), Atom(2)]
    assert unify(fused, pieces)
    assert unify(pieces[1:], heads)
    assert sizes(fused) == [3, 4, 2]
    assert leaves(fused)[1] is leaves(heads)[0]


def test_factors_that_do_not_fit_stay_apart() -> None:
    one, other = [Atom(6), Atom(4)], [Atom(4), Atom(6)]
    assert not unify(one, other)
    assert sizes(one) == [6, 4]


@pytest.mark.parametrize("parts", [2, 4, (3, 1), (1, 2, 5)])
@pytest.mark.parametrize("size", [8, 13, 50257])
def test_bounds_cover_all_indices_by_shares(parts: int | tuple[int, ...], size: int) -> None:
    plan = SplitPlan(parts=parts)
    bounds = plan.bounds(size)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, size, plan.num_shards + 1)
    for share, (start, end) in zip(plan.shares, pairwise(bounds), strict=True):
        assert abs(end - start - size * share / sum(plan.shares)) < 1


def test_a_shard_is_its_intervals_in_order() -> None:
    whole = torch.arange(12).reshape(2, 6)
    assert Shard("w", 1, 1, ((1, 2), (4, 6))).of(whole).tolist() == [[1, 4, 5], [7, 10, 11]]
    assert Shard("w", 1, 0, ((1, 2),)).key == "w[1]"


@pytest.mark.parametrize("parts", [1, (2,), (1, 0), "2"])
def test_parts_that_are_none_are_refused(parts: object) -> None:
    with pytest.raises(InvalidValue, match="parts"):
        SplitPlan(parts=parts)  # type: ignore[arg-type]


def test_a_class_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnknownName, match="attention"):
        SplitPlan(("atention",))


class Block(nn.Module):
    """Two products with a norm before them: the width is needed whole, the hidden width is not."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(4), nn.Linear(4, hidden), nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


def split_of(model: nn.Module, x: Tensor, plan: SplitPlan) -> dict[str, list[Shard]]:
    graph = capture(model, x, lambda y: y.square().sum(), "sgd", split=plan)
    found: dict[str, list[Shard]] = {}
    for source in graph.program.sources.values():
        if source.shard is not None:
            found.setdefault(source.shard.name, []).append(source.shard)
    return found


def test_the_hidden_width_between_two_products_is_split() -> None:
    shards = split_of(Block(), torch.randn(3, 4), SplitPlan(("mlp",), (2, 1)))
    assert {name: [(one.dim, one.intervals) for one in own] for name, own in shards.items()} == {
        "first.weight": [(0, ((0, 4),)), (0, ((4, 6),))],
        "first.bias": [(0, ((0, 4),)), (0, ((4, 6),))],
        "second.weight": [(1, ((0, 4),)), (1, ((4, 6),))],
    }


def test_every_second_width_of_a_stack_is_split() -> None:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.ReLU())))
    shards = split_of(model, torch.randn(3, 8), SplitPlan(("mlp",)))
    assert {name: own[0].dim for name, own in shards.items()} == {
        **{f"{layer}.{name}": 0 for layer in (0, 4) for name in ("weight", "bias")},
        **{f"{layer}.weight": 1 for layer in (2, 6)},
    }


def test_heads_of_a_fused_projection_are_lists_of_intervals() -> None:
    model = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0, batch_first=True)
    shards = split_of(model, torch.randn(2, 3, 8), SplitPlan(("attention",)))
    assert [one.intervals for one in shards["self_attn.in_proj_weight"]] == [
        ((0, 4), (8, 12), (16, 20)),
        ((4, 8), (12, 16), (20, 24)),
    ]
    assert [one.intervals for one in shards["self_attn.out_proj.weight"]] == [((0, 4),), ((4, 8),)]


def test_a_shard_of_size_zero_is_refused_with_the_op_and_its_module() -> None:
    with pytest.raises(CaptureError, match=r"mlp.*addmm.*module first.*runs over 2"):
        split_of(Block(hidden=2), torch.randn(3, 4), SplitPlan(("mlp",), 4))


def test_more_shards_than_heads_are_refused_with_the_number_of_heads() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    with pytest.raises(CaptureError, match=r"cannot split attention by 3: .* runs over 2 heads, or groups of heads"):
        split_of(model, torch.randn(2, 3, 8), SplitPlan(("attention",), 3))


def test_nothing_to_split_is_refused() -> None:
    with pytest.raises(CaptureError, match="tables"):
        split_of(Block(), torch.randn(3, 4), SplitPlan(("tables",)))


def test_heads_that_end_in_pieces_of_different_sizes_are_refused_by_that_op() -> None:
    class Fused(nn.Module):
        """One head of keys and values for four of queries, all from one projection."""

        def __init__(self) -> None:
            super().__init__()
            self.all, self.out = nn.Linear(8, 8 + 2 + 2), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.all(x).split((8, 2, 2), -1)
            query = query.unflatten(-1, (4, 2)).transpose(1, 2)
            found = nn.functional.scaled_dot_product_attention(query, key[:, None], value[:, None], enable_gqa=True)
            return self.out(found.transpose(1, 2).flatten(2))

    with pytest.raises(CaptureError, match=r"cannot split attention.*: op aten.split_with_sizes.default in module the"):
        split_of(Fused(), torch.randn(2, 3, 8), SplitPlan(("attention",)))


def test_what_is_too_short_stays_whole_beside_others_of_its_class() -> None:
    model = nn.Sequential(Block(hidden=2), Block())
    shards = split_of(model, torch.randn(3, 4), SplitPlan(("mlp",), 4))
    assert {name.partition(".")[0] for name in shards} == {"1"}


def test_splits_of_a_step_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, traced = Block(), torch.randn(4, 4), list[int]()

    def captured() -> list[str]:
        plans = [(count, SplitPlan(("mlp",), parts)) for count in (1, 2) for parts in (2, 3)]
        loss = torch.Tensor.sum
        return [capture(model, x, loss, "sgd", micro_batches=count, split=plan).fingerprint for count, plan in plans]

    def counted(model: nn.Module, *given: Any, **options: Any) -> Trace:
        traced.append(id(model))
        return trace_step(model, *given, **options)

    alone = captured()
    monkeypatch.setattr("rlplace.graphs.capturing.capture.trace_step", counted)
    monkeypatch.setattr("rlplace.graphs.micro_batching.assembly.trace_step", counted)
    with kept_traces():
        assert captured() == alone
    assert len(traced) == 2
    assert len(set(alone)) == 4


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
        placements: list[Placement] = [Replicate() if layout is None else TorchShard(layout.dim) for layout in layouts]
        given = [
            DTensor.from_local(tensor.chunk(2, one.dim)[0] if isinstance(one, TorchShard) else tensor, mesh, [one])
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
