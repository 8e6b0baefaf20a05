"""Split steps equal whole ones: losses, gradients and parameters, and what shards cost."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_hosts import core_host
from naive_plan import naive_plan, random_devices
from small_models import Model
from split_steps import CAST, CLEAN, check_equal
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, mse_loss
from torch.utils.checkpoint import checkpoint

from rlplace import Placement, Problem, Simulator
from rlplace.errors import CaptureError, InvalidValue, RunnerError, UnknownName
from rlplace.export import PlacedModel
from rlplace.graphs import FORWARD, OpGraph, SplitPlan, capture, load_graph, run_graph, save_graph
from rlplace.graphs.splitting import rewrite, shard_ops
from rlplace.measure import load_placement, save_placement
from rlplace.workloads import build


def in_float64(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: in_float64(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(map(in_float64, value))
    return value.double() if value.is_floating_point() else value


def check_workload(
    name: str,
    parts: int | tuple[int, ...],
    micro_batches: int,
    most: float,
    reduce: Any = "owner",
    classes: tuple[str, ...] = SplitPlan().classes,
) -> None:
    work = build(name)
    options: dict[str, Any] = {"batch_dims": work.batch_dims} | ({"loss": work.loss} if micro_batches > 1 else {})
    graph = check_equal(
        work.model.double(),
        in_float64(work.inputs),
        work.loss_fn,
        SplitPlan(classes, parts, reduce),
        most,
        targets=in_float64(work.targets) or None,
        micro_batches=micro_batches,
        **options,
    )
    print(name, f"gathered {graph.program.split.gathered_share:.2%} of the FLOPs")
    assert graph.program.split.gathered_share < 0.05


NAMED = [
    ("gpt2@small,layers=2,vocab=1003", CAST),
    ("llama@small,layers=2,vocab=1003", CAST),
    ("llama@small,layers=1,kv_heads=2,vocab=1003", CAST),
    ("vit@small,layers=2,heads=4", CLEAN),
    ("dlrm@small,hidden=64", CLEAN),
    ("mixtral@small,layers=1,heads=8,kv_heads=4,vocab=1003", CAST),
]


@pytest.mark.parametrize("reduce", ["owner", "chunks"])
@pytest.mark.parametrize(
    ("name", "most"), [NAMED[0], *(pytest.param(*one, marks=pytest.mark.slow) for one in NAMED[1:])]
)
def test_a_step_in_two_shards_is_that_of_the_whole(name: str, most: float, reduce: Any) -> None:
    check_workload(name, 2, 1, most, reduce)


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["owner", "chunks"])
@pytest.mark.parametrize(("name", "most"), [one for one in NAMED if "kv_heads=2" not in one[0]])
@pytest.mark.parametrize(("parts", "micro_batches"), [(2, 2), (4, 1), (4, 2), ((3, 1), 1), ((3, 1), 2)])
def test_a_step_in_shards_and_micro_batches_is_that_of_the_whole(
    name: str, most: float, parts: int | tuple[int, ...], micro_batches: int, reduce: Any
) -> None:
    check_workload(name, parts, micro_batches, most, reduce)


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "reduce"), [(4, "owner"), ((3, 1), "chunks")])
@pytest.mark.parametrize(
    ("name", "most", "micro_batches"),
    [
        ("bert@small,layers=2,vocab=1003", CLEAN, 2),
        ("clip@small,layers=1,heads=4,text_heads=4", CLEAN, 2),
        ("evoformer@small,blocks=1,pair_heads=4", CLEAN, 1),
        ("nmt@small,units=64,steps=4,vocab=1003", CLEAN, 2),
        ("resnet50@small,width=16", CLEAN, 1),
        ("rnnlm@small,units=64,steps=4,vocab=1003", CLEAN, 2),
        ("t5@small,layers=1,vocab=1003", CAST, 2),
        ("whisper@small,layers=1,heads=4,vocab=1003", CLEAN, 2),
    ],
)
def test_every_other_workload_with_products_in_shards_is_the_whole(
    name: str, most: float, micro_batches: int, parts: int | tuple[int, ...], reduce: Any
) -> None:
    check_workload(name, parts, micro_batches, most, reduce)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [NAMED[0], *NAMED[-2:]])
@pytest.mark.parametrize(("parts", "micro_batches"), [((3, 1), 1), (4, 2)])
def test_a_step_with_updates_in_parts_is_that_of_the_whole(
    name: str, most: float, parts: int | tuple[int, ...], micro_batches: int
) -> None:
    check_workload(name, parts, micro_batches, most, classes=("updates",))


def test_more_shards_than_heads_of_keys_split_the_heads_of_queries_in_a_group() -> None:
    """2 heads of keys for 8 of queries: 4 shards have a head of each group, and all the keys."""
    work = build("llama@small,layers=1,heads=8,kv_heads=2,vocab=1003")
    graph = check_equal(work.model.double(), work.inputs, work.loss_fn, SplitPlan(("attention",), 4), CAST)
    shards = [source.shard for source in graph.program.sources.values() if source.shard is not None]
    assert {shard.name.split(".")[-2] for shard in shards} == {"q_proj", "o_proj"}
    assert {len(shard.intervals) for shard in shards} == {2}


class Words(nn.Module):
    """A table by rows tied to the last layer, with dropout in between on demand."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.table, self.hidden, self.back = nn.Embedding(11, 4, padding_idx=3), nn.Linear(4, 6), nn.Linear(6, 4)
        self.dropout = nn.Dropout(dropout)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        return (x + self.back(self.dropout(torch.tanh(self.hidden(x))))) @ self.table.weight.t()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("parts", [2, (3, 1), (1, 1, 2)])
def test_a_vocabulary_with_padding_and_ignored_targets(reduction: str, parts: int | tuple[int, ...]) -> None:
    model = Words().double()
    words, labels = torch.randint(11, (5, 3)), torch.randint(11, (15,))
    words[0, 0], labels[:4] = 3, -100

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), labels, reduction=reduction)

    graph = check_equal(model, words, loss_fn, SplitPlan(("vocabulary", "mlp"), parts), CLEAN, targets=labels)
    assert graph.targets.count("rlplace.vocabulary_gradient.default") == graph.num_shards
    assert "aten._log_softmax.default" not in graph.targets


def test_without_a_target_that_counts_gradients_are_zero() -> None:
    labels, split = torch.full((15,), -100), SplitPlan(("vocabulary", "mlp"))
    words = torch.randint(11, (5, 3))
    loss_fn = lambda logits, labels: cross_entropy(logits.flatten(0, 1), labels)  # noqa: E731
    graph = capture(Words().double(), words, loss_fn, "sgd", targets=labels, split=split)
    assert not any(bool(each.any()) for each in run_graph(graph).gradients.values())


def test_labels_and_rows_out_of_range_are_refused() -> None:
    """They are in no shard."""
    words, labels = torch.randint(11, (5, 3)), torch.randint(11, (15,))
    loss_fn = lambda logits, labels: cross_entropy(logits.flatten(0, 1), labels)  # noqa: E731
    graph = capture(Words().double(), words, loss_fn, "sgd", targets=labels, split=SplitPlan(("vocabulary",)))
    plan = naive_plan(graph, random_devices(graph, 2, np.random.default_rng(0)))
    with PlacedModel(graph, core_host(2), plan) as step:
        step(words, targets=labels)
        for wrong in (11, -1):
            with pytest.raises(RunnerError, match="target is not from 0 to 10"):
                step(words, targets=labels.clone().index_fill_(0, torch.tensor(3), wrong))
            with pytest.raises(RunnerError, match="row of a table is not from 0 to 10"):
                step(words.clone().index_fill_(0, torch.tensor(3), wrong), targets=labels)


class Narrow(nn.Module):
    """A hidden width of as many indices as there are shards, and dimensions without any."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.up, self.down, self.dims = nn.Linear(4, 2), nn.Linear(2, 3), dims

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x))
        return self.down(hidden.squeeze(self.dims) if self.dims else hidden.squeeze())


@pytest.mark.parametrize("dims", [(), (1,), (-1, 1)])
def test_shards_of_one_index_keep_their_dimension(dims: tuple[int, ...]) -> None:
    check_equal(Narrow(*dims).double(), torch.randn(5, 1, 4).double(), Tensor.sum, SplitPlan(("mlp",), 2), CLEAN)


def test_a_sum_is_made_before_its_bits_are_read() -> None:
    """The bits of a sum are not the sum of bits."""
    layers = {"up": nn.Linear(4, 6), "down": nn.Linear(6, 4)}
    bits = Model(lambda model, x: model.down(torch.relu(model.up(x))).view(torch.int64), **layers)
    check_equal(bits.double(), torch.randn(3, 4).double(), None, SplitPlan(("mlp",)), CLEAN)


def test_a_rule_that_is_wrong_for_an_op_is_a_capture_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite._Rewriting, "_local_shape", lambda *_: [7, 7])
    with pytest.raises(CaptureError, match=r"cannot split op aten.view.default in module .*shape '\[7, 7\]'"):
        capture(Words(), torch.randint(11, (5, 3)), Tensor.sum, "sgd", split=SplitPlan(("mlp",)))


class Typed(nn.Module):
    """A small table, whose gradient is scaled by how often each row is looked up, before a block."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(2, 8, scale_grad_by_freq=True)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        x = x + self.kinds(kinds)
        return x + self.down(torch.relu(self.up(x)))


def test_gradients_scaled_by_frequency_are_scaled_by_that_of_all_tokens() -> None:
    inputs = (torch.randn(16, 8).double(), torch.randint(2, (16,)))
    check_equal(Typed().double(), inputs, lambda y: (y * y).sum(), SplitPlan(("mlp",), 2, "chunks"), CLEAN)


def test_inference_returns_whole_results() -> None:
    model = Words().double().eval()
    graph = check_equal(model, torch.randint(11, (5, 3)), None, SplitPlan(("vocabulary", "mlp")), CLEAN)
    result = graph.program.base(graph.program.result_refs[0])
    assert graph.shard[graph.tensor_op[result]] == -1


def test_inference_with_labels_kept_out_splits_the_logits() -> None:
    """Its result is detached, after the forward."""
    work = build("llama@small,layers=1,vocab=1003")
    inputs = {"input_ids": work.inputs["input_ids"]}
    graph = capture(work.model.eval(), inputs, split=SplitPlan(("vocabulary",), 4, "chunks"))
    assert graph.program.split.parameters == {"lm_head.weight": "vocabulary"}
    assert set(graph.phases[~graph.is_source]) == {FORWARD}


class Products(nn.Module):
    """Two products; what is between them is the tests'."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Stack(nn.Module):
    """A table that is tied to the last layer, and one that is not, with layers in between."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(24, 8), nn.Embedding(16, 8)
        self.hidden, self.back = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, words: Tensor, places: Tensor) -> Tensor:
        x = self.words(words) + self.places(places)
        return (x + self.back(torch.tanh(self.hidden(x)))) @ self.words.weight.t()


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("parts", [2, (3, 1)])
def test_large_parameters_of_whole_ops_are_updated_in_parts(parts: int | tuple[int, ...], micro_batches: int) -> None:
    words, places, labels = torch.randint(24, (4, 3)), torch.randint(16, (4, 3)), torch.randint(24, (4, 3))

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), labels.flatten())

    plan, options = SplitPlan(("updates",), parts), {"loss": "separate"} if micro_batches > 1 else {}
    given = {"targets": labels, "micro_batches": micro_batches, **options}
    graph = check_equal(Stack().double(), (words, places), loss_fn, plan, CLEAN, **given)
    # all but the table that only lookups read, whose gradient is made of the lookups of all micro-batches
    names = ("words.weight", "hidden.weight", "hidden.bias", "back.weight", "back.bias")
    assert graph.program.split.parameters == dict.fromkeys(names, "updates")
    assert graph.program.split.gathered_share == 0
    shards = [source.shard for source in graph.program.sources.values() if source.shard is not None]
    rows = {2: ((0, 12), (12, 24)), (3, 1): ((0, 18), (18, 24))}[parts]
    assert [one.intervals for one in shards if one.name == "words.weight"] == [(each,) for each in rows]
    # shards of one parameter may be on different devices
    assert all(len(set(graph.shard[graph.colocation == one].tolist()) - {-1}) < 2 for one in range(graph.num_ops))
    # every micro-batch joins each of them once; products of the forward are whole, and so are their gradients
    joins = [
        op for op in range(graph.num_ops) if graph.targets[op] == "aten.cat.default" and graph.phases[op] == FORWARD
    ]
    assert sorted(graph.micro_batch[joins].tolist()) == sorted(5 * ([-1] if micro_batches == 1 else [0, 1]))
    products = [op for op in range(graph.num_ops) if graph.targets[op] in ("aten.mm.default", "aten.addmm.default")]
    assert set(graph.shard[products].tolist()) == {-1}
    # the tied table's lookups are made by the shards, of their rows
    lookups = [op for op in range(graph.num_ops) if graph.targets[op] == "aten.embedding_dense_backward.default"]
    assert sorted(graph.shard[lookups].tolist()) == [-1, 0, 1]


def test_an_inference_has_no_updates_to_split() -> None:
    model, x = Products().eval(), torch.randn(3, 4)
    with pytest.raises(CaptureError, match=r"cannot split updates: .*, and it updates no parameter"):
        capture(model, x, split=SplitPlan(("updates",)))
    graph = capture(model, x, split=SplitPlan(("mlp", "updates")))
    assert set(graph.program.split.parameters.values()) == {"mlp"}


def test_a_width_that_an_op_needs_whole_is_not_split() -> None:
    class Sorted(Products):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).sort(dim=-1).values)

    with pytest.raises(CaptureError, match="mlp"):
        capture(Sorted(), torch.randn(3, 4), split=SplitPlan(("mlp",)))


def test_an_op_of_the_backward_without_a_rule_is_gathered_and_named() -> None:
    class Scaled(torch.autograd.Function):
        """Its forward is by elements, and its backward is not."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.flip(1) * 2

    class Flipped(Products):
        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = Scaled.apply(self.first(x))  # type: ignore[no-untyped-call]
            return self.second(hidden)

    graph = check_equal(Flipped().double(), torch.randn(3, 4).double(), Tensor.sum, SplitPlan(("mlp",)), CLEAN)
    assert [target for _, target, *_ in graph.program.split.gathered] == ["aten.flip.default"]
    assert 0 < graph.program.split.gathered_share < 1


def layers() -> dict[str, nn.Module]:
    return {"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}


def recomputes(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda one: model.down(torch.relu(model.up(one))), x, use_reentrant=False)


def test_a_recomputed_forward_reads_shards_too() -> None:
    model = Model(recomputes, **layers()).double()
    check_equal(model, torch.randn(4, 8).double(), Tensor.sum, SplitPlan(("mlp",)), CLEAN)


def scales(model: nn.Module, x: Tensor) -> Tensor:
    return torch.addmm(model.down.bias, torch.relu(model.up(x)), model.down.weight.t(), beta=0.5)


def squared_mean(found: Tensor, target: Tensor) -> Tensor:
    mean = found.mean()
    return mean * mean + 0.0 * target.sum()


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model.down(torch.relu(model.up(x)))


@pytest.mark.parametrize(("forward", "loss_fn"), [(scales, mse_loss), (plain, squared_mean)])
def test_products_with_factors_and_squares_of_sums_are_those_of_the_whole(forward: Any, loss_fn: Any) -> None:
    x, target = torch.randn(4, 8).double(), torch.randn(4, 8).double()
    check_equal(Model(forward, **layers()).double(), x, loss_fn, SplitPlan(("mlp",)), CLEAN, targets=target)


class Normed(nn.Module):
    """Two pairs of products, with a residual sum and a norm in between."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.norm = Products(), Products(), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.norm(x + self.one(x)))


def shapes(graph: OpGraph, target: str, shard: int) -> list[tuple[int, ...]]:
    """Of the first tensor of each op of a shard."""
    ops = [op for op, own in enumerate(graph.targets) if f".{target}." in own and graph.shard[op] == shard]
    return [graph.tensor_shapes[np.flatnonzero(graph.tensor_op == op)[0]] for op in ops]


def test_chunks_of_tokens_are_summed_normed_and_joined_by_their_shards() -> None:
    x = torch.randn(9, 4).double()
    graph = check_equal(Normed().double(), x, None, SplitPlan(("mlp",), (2, 1), "chunks"), CLEAN)
    for shard, tokens in ((0, 6), (1, 3)):
        assert shapes(graph, "native_layer_norm", shard) == [(tokens, 4)]
        assert shapes(graph, "sum_parts", shard) == [(tokens, 4)] * 2
        assert shapes(graph, "cat", shard) == [(9, 4)]
    assert shapes(graph, "cat", -1) == [(9, 4)]  # what the step returns
    assert not shapes(graph, "sum_parts", -1)
    owner = check_equal(Normed().double(), x, None, SplitPlan(("mlp",), (2, 1)), CLEAN)
    assert shapes(owner, "sum_parts", -1) == [(9, 4)] * 2


@pytest.mark.parametrize(("batch", "tokens", "chunk"), [(4, 6, (1, 6, 4)), (2, 8, (2, 2, 4)), (5, 8, (5, 2, 4))])
def test_the_dimension_of_the_most_even_chunks_is_cut(batch: int, tokens: int, chunk: tuple[int, ...]) -> None:
    x, target = (torch.randn(batch, tokens, 4).double() for _ in range(2))
    plan = SplitPlan(("mlp",), 4, "chunks")
    graph = check_equal(Normed().double(), x, mse_loss, plan, CLEAN, targets=target)
    assert shapes(graph, "native_layer_norm", 3) == [chunk]


def test_without_a_token_for_each_shard_sums_have_an_owner() -> None:
    graph = check_equal(Normed().double(), torch.randn(2, 4).double(), None, SplitPlan(("mlp",), 3, "chunks"), CLEAN)
    assert len(shapes(graph, "sum_parts", -1)) == 2


def test_a_placed_step_in_chunks_trains_as_eager_does() -> None:
    model, x, target = Normed().double(), torch.randn(9, 4).double(), torch.randn(9, 4).double()
    graph = capture(model, x, mse_loss, "sgd", targets=target, split=SplitPlan(("mlp",), 2, "chunks"))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-3), []
    plan = naive_plan(graph, random_devices(graph, 2, np.random.default_rng(0)))
    with PlacedModel(graph, core_host(2), plan) as step:
        found = [float(step(x, targets=target)) for _ in range(3)]
    for _ in range(3):
        loss = mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert found == pytest.approx(losses, rel=CLEAN)


@pytest.mark.parametrize("reduce", ["owner", "chunks"])
def test_shards_of_experts_add_their_tokens_and_pick_them_from_chunks(reduce: Any) -> None:
    work = build("mixtral@small,layers=1,vocab=1003")
    split = SplitPlan(("experts",), reduce=reduce)
    graph = capture(work.model, work.inputs, work.loss_fn, "sgd", targets=work.targets or None, split=split)
    for target in ("index_add",) if reduce == "owner" else ("index_select", "index_add"):
        assert shapes(graph, target, 0)
        assert shapes(graph, target, 0) == shapes(graph, target, 1)
        assert not shapes(graph, target, -1)


def test_random_ops_of_shards_are_named() -> None:
    graph = capture(Words(0.5), torch.randint(11, (5, 3)), lambda y: y.sum(), "sgd", split=SplitPlan(("mlp",)))
    assert [module for _, _, module in graph.program.split.random] == ["dropout"]


def test_shards_share_the_work_and_stay_with_their_parameters() -> None:
    work = build("gpt2@small,layers=1,vocab=1003")
    whole = capture(work.model, work.inputs, work.loss_fn, "adam")
    graph = capture(work.model, work.inputs, work.loss_fn, "adam", split=SplitPlan(parts=2))
    flops = [float(graph.flops[graph.shard == index].sum()) for index in (0, 1)]
    assert flops[0] == pytest.approx(flops[1], rel=0.02)
    assert sum(flops) > 0.9 * float(whole.flops.sum())
    assert float(graph.flops.sum()) < 1.05 * float(whole.flops.sum())
    assert graph.parameter_bytes.sum() == whole.parameter_bytes.sum()
    assert graph.state_bytes.sum() == pytest.approx(whole.state_bytes.sum(), rel=1e-4)  # Adam counts steps by shard
    for colocated in np.unique(graph.colocation[graph.colocation >= 0]):
        assert len(np.unique(graph.shard[graph.colocation == colocated])) == 1


def test_a_file_keeps_the_column(tmp_path: Path) -> None:
    graph = capture(Words(), torch.randint(11, (5, 3)), lambda y: y.sum(), "sgd", split=SplitPlan(("mlp",)))
    save_graph(graph, tmp_path / "graph.json")
    assert np.array_equal(load_graph(tmp_path / "graph.json").shard, graph.shard)
    assert np.array_equal(OpGraph.from_networkx(graph.to_networkx()).shard, graph.shard)
    assert dataclasses.replace(graph, shard=np.full(graph.num_ops, -1)).num_shards == 1


def test_a_placement_of_a_split_step_says_how_it_is_split(tmp_path: Path) -> None:
    graph = capture(Words(), torch.randint(11, (5, 3)), lambda y: y.sum(), "sgd", split=SplitPlan(("mlp",), (3, 1)))
    problem = Problem.estimate(graph, "4xV100-pcie")
    placement = Placement.of(problem, Simulator(problem).plan(np.zeros(graph.num_ops, dtype=np.int32)))
    assert placement.split == SplitPlan(("mlp",), (3, 1))
    save_placement(placement, tmp_path / "placement.json")
    assert load_placement(tmp_path / "placement.json").split == placement.split
    data = placement.to_dict()
    assert data["split"] == {"classes": "mlp", "parts": "3:1"}
    assert Placement.from_dict({key: data[key] for key in data if key != "split"}, "old").split is None
    for wrong in ({"parts": "1"}, {"parts": "0:1"}, {"classes": "heads"}, {"classes": "none"}, {"parts": 2}):
        with pytest.raises((InvalidValue, UnknownName)):
            Placement.from_dict(data | {"split": data["split"] | wrong}, "f.json")


@pytest.mark.parametrize(
    ("classes", "parts", "plan"),
    [
        ("none", "2", None),
        ("attention,mlp", "2", SplitPlan(("attention", "mlp"), 2)),
        (" mlp ", "3:1", SplitPlan(("mlp",), (3, 1))),
    ],
)
def test_words_are_a_plan(classes: str, parts: str, plan: SplitPlan | None) -> None:
    assert SplitPlan.parse(classes, parts) == plan
    assert plan is None or SplitPlan.parse(**plan.words) == plan


@pytest.mark.parametrize(
    ("classes", "parts", "match"),
    [
        ("auto", "2", "split is 'auto', expected none, or some of vocabulary,attention,mlp,experts,tables,updates"),
        ("", "2", "classes"),
        ("none,mlp", "2", "class to split"),
        ("atention", "2", "did you mean 'attention'"),
        ("mlp", "1", "parts"),
        ("mlp", "1025", "parts is"),
        ("mlp", "3:0", "parts"),
        ("mlp", "3,1", "split_parts is"),
        ("mlp", "-2", "split_parts is"),
    ],
)
def test_other_words_are_refused(classes: str, parts: str, match: str) -> None:
    with pytest.raises((InvalidValue, UnknownName), match=match):
        SplitPlan.parse(classes, parts)


@pytest.mark.parametrize("parts", [1025, (10_000, 1), (1,) * 1025])
def test_a_plan_has_words_or_is_refused(parts: int | tuple[int, ...]) -> None:
    with pytest.raises(InvalidValue, match="parts is"):
        SplitPlan(("mlp",), parts)


def test_a_word_in_place_of_a_plan_is_refused_with_what_to_write() -> None:
    with pytest.raises(InvalidValue, match=r"classes is 'mlp', expected a tuple, as \(\"mlp\",\)"):
        SplitPlan("mlp")  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match=r"split is 'auto', expected a SplitPlan or None.*rlplace\.place"):
        capture(Words(), torch.randint(11, (5, 3)), Tensor.sum, "sgd", split="auto")  # type: ignore[arg-type]


def test_the_ops_of_shards_are_their_formulas() -> None:
    """Against PyTorch's own loss and lookup on the whole."""
    logits, target = torch.randn(6, 9, dtype=torch.float64, requires_grad=True), torch.tensor([0, 4, 8, 3, -100, 5])
    loss = cross_entropy(logits, target)
    (expected,) = torch.autograd.grad(loss, logits)
    bounds = [(0, 4), (4, 9)]
    with torch.no_grad():
        parts = [shard_ops.vocabulary_statistics(logits[:, a:b], target, a) for a, b in bounds]
        found, number, logsumexp = shard_ops.vocabulary_loss(
            [each for each, _ in parts], [each for _, each in parts], target, 1, -100, 9
        )
        one = torch.ones((), dtype=torch.float64)
        gradients = [
            shard_ops.vocabulary_gradient(one, logits[:, a:b], logsumexp, target, number, a, 1, -100) for a, b in bounds
        ]
    assert torch.allclose(found, loss, rtol=1e-12)
    assert torch.allclose(torch.cat(gradients, 1), expected, rtol=1e-12, atol=1e-15)
    table, words = torch.randn(9, 3), torch.tensor([[0, 4], [8, 3]])
    rows = [shard_ops.shard_rows(words, a, b, -1, 9) for a, b in bounds]
    looked_up = [shard_ops.lookup_rows(table[a:b], row) for (a, b), row in zip(bounds, rows, strict=True)]
    assert torch.equal(shard_ops.sum_parts(looked_up), embedding(words, table))
