"""A placed step whose parameters are split into shards is used as any other: whole parameters under their own names."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from core_hosts import core_host, process_host
from loops import assert_same_state
from naive_plan import naive_plan, random_devices
from spmd_ranks import in_ranks
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from rlplace.errors import InvalidValue, RunnerError
from rlplace.export import PlacedModel, PlacedModule, RankModel, to_module, to_step
from rlplace.export.placed.sharded_state import PartTensor, part_tensor
from rlplace.graphs import OpGraph, SplitPlan, capture
from rlplace.graphs.program import Shard, Source
from rlplace.graphs.splitting import rewrite
from rlplace.measure import Host, Placement
from rlplace.measure.hosts.nodes import Nodes

HOST = core_host(2)
PARTS: list[int | tuple[int, ...]] = [2, (3, 1)]
DEFAULT = SplitPlan().classes
UPDATES = [("updates",), ("mlp", "updates")]
TIGHT = 1e-10


class Block(nn.Module):
    """Attention with a fused projection, a layer with a hidden width, and a head that is tied to the words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, rows: Tensor) -> Tensor:
        x = self.words(rows)
        q, k, v = (part.view(*rows.shape, 4, 2).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        y: Tensor = self.head(x + self.down(torch.tanh(self.up(x))))
        return y


def loss_of(y: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(y.flatten(0, 1), labels.flatten())


def block() -> Block:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Block().double()


def batches(count: int, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    pairs = [torch.randint(11, (2, size, 3), generator=generator) for _ in range(count)]
    return [(pair[0], pair[1]) for pair in pairs]


def captured(
    model: nn.Module,
    optimizer: str | None,
    parts: int | tuple[int, ...] | None,
    micro_batches: int = 1,
    classes: tuple[str, ...] = DEFAULT,
) -> OpGraph:
    rows, labels = batches(1)[0]
    cut: dict[str, Any] = (
        {"micro_batches": micro_batches, "batch_dims": (0, 0), "loss": "separate"} if micro_batches > 1 else {}
    )
    split = None if parts is None else SplitPlan(classes, parts)
    graph = capture(model, rows, loss_of, optimizer, targets=labels, split=split, **cut)
    assert graph.num_shards == (1 if split is None else split.num_shards)
    return graph


def placed(graph: OpGraph, host: Host = HOST, seed: int = 0, **options: Any) -> PlacedModel:
    generator = np.random.default_rng(seed)
    return PlacedModel(graph, host, naive_plan(graph, random_devices(graph, 2, generator)), **options)


def eager_loop(model: nn.Module, optimizer: torch.optim.Optimizer, pairs: list[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    for rows, labels in pairs:
        optimizer.zero_grad()
        loss = loss_of(model(rows), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3) if name == "adam" else torch.optim.SGD(parameters, lr=1e-3)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("parts", PARTS)
def test_a_captured_optimizer_trains_as_eager_does(
    parts: int | tuple[int, ...], micro_batches: int, optimizer: str
) -> None:
    model, pairs = block(), batches(3)
    eager = copy.deepcopy(model)
    losses = eager_loop(eager, optimizer_of(optimizer, eager.parameters()), pairs)
    with placed(captured(model, optimizer, parts, micro_batches)) as step:
        assert set(step._state.split) >= {"words.weight", "qkv.weight", "up.weight", "down.weight"}
        found = [float(step(rows, targets=labels)) for rows, labels in pairs]
        assert found == pytest.approx(losses, rel=TIGHT)
        assert_same_state(step.state_dict(), eager.state_dict())
        assert not any(each.is_shown for each in step._state.split.values())  # nobody has asked for whole ones
        step.copy_to(model)
    assert_same_state(model.state_dict(), eager.state_dict())


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("classes", UPDATES)
def test_parameters_that_are_updated_in_parts_are_whole_for_users(
    classes: tuple[str, ...], micro_batches: int, tmp_path: Path
) -> None:
    model, pairs = block(), [*batches(3), *batches(1, size=2)]
    eager = copy.deepcopy(model)
    theirs = torch.optim.Adam(eager.parameters(), lr=1e-3)
    graph = captured(model, "adam", (3, 1), micro_batches, classes)
    assert graph.program is not None
    assert graph.program.split is not None
    assert set(graph.program.split.parameters.values()) == set(classes)
    with placed(graph) as step, placed(captured(model, "adam", 2, classes=classes)) as other:
        for number, (rows, labels) in enumerate(pairs):
            expected = eager_loop(eager, theirs, [(rows, labels)])
            if number == 1:
                step.zero_grad()
                found = step.backward(rows, targets=labels)
                step.optimizer.step()
            else:
                found = step(rows, targets=labels)
            assert float(found) == pytest.approx(expected[0], rel=TIGHT)
        assert_same_state(step.state_dict(), eager.state_dict())
        states = step.optimizer.state_dict()["state"]
        for index, state in theirs.state_dict()["state"].items():
            assert_same_state(states[index], state)
        rows, labels = pairs[0]
        torch.testing.assert_close(step.evaluate(rows), eager(rows).detach(), rtol=TIGHT, atol=TIGHT)
        step.save(tmp_path / "step.safetensors")
        other.load(tmp_path / "step.safetensors")
        eager_loop(eager, theirs, [(rows, labels)])
        for each in (step, other):
            each(rows, targets=labels)
            assert_same_state(each.state_dict(), eager.state_dict())
        step.load_state_dict(block().state_dict())
        assert float(step(rows, targets=labels)) == pytest.approx(loss_of(block()(rows), labels).item(), rel=TIGHT)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("parts", PARTS)
def test_an_own_loop_has_gradients_clipping_and_state_under_the_names_of_the_model(
    parts: int | tuple[int, ...], micro_batches: int
) -> None:
    model, pairs = block(), batches(3)
    eager = copy.deepcopy(model)
    theirs = torch.optim.Adam(eager.parameters(), lr=1e-3)
    with placed(captured(model, None, parts, micro_batches), seed=1) as step:
        ours = torch.optim.Adam(step.parameters(), lr=1e-3)
        for rows, labels in pairs:
            for optimizer in (ours, theirs):
                optimizer.zero_grad()
            step.backward(rows, targets=labels)
            step.backward(rows, targets=labels, loss_scale=0.5)
            (1.5 * loss_of(eager(rows), labels)).backward()
            named = dict(eager.named_parameters())
            assert [name for name, _ in step.named_parameters()] == list(named)
            for name, parameter in step.named_parameters():
                torch.testing.assert_close(parameter.grad, named[name].grad, rtol=TIGHT, atol=TIGHT, msg=name)
            norms = [clip_grad_norm_(each.parameters(), 0.05) for each in (step, eager)]
            torch.testing.assert_close(norms[0], norms[1], rtol=TIGHT, atol=TIGHT)
            ours.step()
            theirs.step()
        assert_same_state(step.state_dict(), eager.state_dict())
        for one, other in zip(ours.state.values(), theirs.state.values(), strict=True):
            assert_same_state(one, other)


def test_the_captured_optimizer_has_whole_states_that_are_shared_with_steps(tmp_path: Path) -> None:
    """Its own steps and those of the graph in turn; a schedule; a checkpoint goes on without a split."""
    model, pairs = block(), batches(6)
    eager = copy.deepcopy(model)
    theirs = torch.optim.Adam(eager.parameters(), lr=1e-3)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(theirs, 0.5)]
    with placed(captured(model, "adam", 2)) as step, placed(captured(block(), "adam", None)) as whole:
        schedules.append(torch.optim.lr_scheduler.ExponentialLR(step.optimizer, 0.5))
        for number, pair in enumerate(pairs[:4]):
            eager_loop(eager, theirs, [pair])
            if number % 2:
                step(pair[0], targets=pair[1])
            else:
                step.zero_grad()
                step.backward(pair[0], targets=pair[1])
                step.optimizer.step()
            for schedule in schedules:
                schedule.step()
        found, expected = step.optimizer.state_dict(), theirs.state_dict()
        for index, state in expected["state"].items():
            assert_same_state(found["state"][index], state)
        step.save(tmp_path / "step.safetensors")
        whole.load(tmp_path / "step.safetensors")
        step.load(tmp_path / "step.safetensors")
        assert whole.lr == step.lr == pytest.approx(1e-3 / 16)
        eager_loop(eager, theirs, pairs[4:])
        for each in (step, whole):
            for rows, labels in pairs[4:]:
                each(rows, targets=labels)
            assert_same_state(each.state_dict(), eager.state_dict())


def test_a_file_of_a_step_that_nobody_has_looked_into_has_whole_states(tmp_path: Path) -> None:
    model, pairs = block(), batches(4)
    with placed(captured(model, "adam", (3, 1))) as step, placed(captured(model, "adam", 2)) as other:
        for rows, labels in pairs[:2]:
            step(rows, targets=labels)
        step.save(tmp_path / "step.safetensors")
        assert not any(each.is_shown or each.state for each in step._state.split.values())
        other.load(tmp_path / "step.safetensors")
        for each in (step, other):
            for rows, labels in pairs[2:]:
                each(rows, targets=labels)
        assert_same_state(other.state_dict(), step.state_dict())


def test_parameters_that_were_seen_show_what_steps_do_and_are_read_by_the_next() -> None:
    model, pairs = block(), batches(3)
    with placed(captured(model, "sgd", 2)) as step:
        seen = dict(step.named_parameters())
        step(pairs[0][0], targets=pairs[0][1])
        state = step.state_dict()
        for name, parameter in seen.items():
            assert torch.equal(parameter, state[name])
        eager = copy.deepcopy(model)
        eager.load_state_dict(state)
        for each in (seen["qkv.weight"], eager.qkv.weight):
            each.data.mul_(0.5)  # which no count of changes tells
        seen["up.weight"].data = seen["up.weight"].data * 2
        eager.up.weight.data.mul_(2)
        assert_same_state(step.state_dict(), eager.state_dict())
        losses = eager_loop(eager, torch.optim.SGD(eager.parameters(), lr=1e-3), pairs[1:])
        assert [float(step(rows, targets=labels)) for rows, labels in pairs[1:]] == pytest.approx(losses, rel=TIGHT)
        assert_same_state(step.state_dict(), eager.state_dict())
        seen["up.weight"].data = torch.zeros(2, 2, dtype=torch.float64)
        with pytest.raises(InvalidValue, match=r"data of up\.weight is .*\(2, 2\).*as captured"):
            step(pairs[0][0], targets=pairs[0][1])


@pytest.mark.parametrize("classes", [("vocabulary",), ("attention", "mlp")])
def test_other_batch_sizes_and_evaluation_have_the_same_parameters(classes: tuple[str, ...]) -> None:
    """In evaluation there is no loss, so that other ops may be split, or none."""
    model, pairs = block(), [*batches(2), *batches(1, size=6), *batches(1, size=3)]
    eager = copy.deepcopy(model)
    rows, labels = pairs[0]
    graph = capture(model, rows, loss_of, "adam", targets=labels, split=SplitPlan(classes, 2))
    losses = eager_loop(eager, torch.optim.Adam(eager.parameters(), lr=1e-3), pairs)
    with placed(graph) as step:
        assert [float(step(rows, targets=labels)) for rows, labels in pairs] == pytest.approx(losses, rel=TIGHT)
        for size in (4, 2):
            rows = batches(1, size=size)[0][0]
            torch.testing.assert_close(step.evaluate(rows), eager(rows).detach(), rtol=TIGHT, atol=TIGHT)
        assert_same_state(step.state_dict(), eager.state_dict())


def test_an_inference_runs_at_several_batch_sizes() -> None:
    model = block().eval()
    graph = capture(model, batches(1)[0][0], split=SplitPlan(parts=2))
    assert graph.num_shards == 2
    with placed(graph) as step:
        for size in (4, 1, 7, 4):
            rows = batches(1, size=size)[0][0]
            torch.testing.assert_close(step(rows), model(rows).detach(), rtol=TIGHT, atol=TIGHT)


@pytest.mark.parametrize("other_shapes", ["capture", "eager"])
def test_a_step_of_another_shape_trains_the_same_shards(other_shapes: Any) -> None:
    model, pairs = block(), [*batches(1), *batches(2, size=2), *batches(1)]
    eager = copy.deepcopy(model)
    losses = eager_loop(eager, torch.optim.Adam(eager.parameters(), lr=1e-3), pairs)
    with placed(captured(model, "adam", (3, 1)), other_shapes=other_shapes) as step:
        assert [float(step(rows, targets=labels)) for rows, labels in pairs] == pytest.approx(losses, rel=TIGHT)
        assert_same_state(step.state_dict(), eager.state_dict())


def test_gradients_of_other_shards_than_those_of_the_first_capture_are_refused() -> None:
    rows, labels = batches(1)[0]
    cut: dict[str, Any] = {"micro_batches": 2, "batch_dims": (0, 0), "loss": "joined"}
    with placed(capture(block(), rows, loss_of, targets=labels, split=SplitPlan(parts=2), **cut)) as step:
        step.backward(rows, targets=labels)
        with pytest.raises(InvalidValue, match="shards of"):
            step.backward(rows[:1], targets=labels[:1])


def test_a_parameter_is_joined_once_for_all_shards_of_another_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[str] = []
    copy_of = Shard.copy

    def counted(shard: Shard, whole: Tensor, part: Tensor, *, is_joined: bool = False) -> None:
        joined.extend([shard.key] * is_joined)
        copy_of(shard, whole, part, is_joined=is_joined)

    with placed(captured(block(), None, 2)) as step:
        whole = step.state_dict()["up.weight"]
        shards = [Shard("up.weight", k, 1, ((4 * k, 4 * k + 4),)) for k in range(2)]
        apart = [(torch.zeros(16, 4).double(), Source("parameter", one.key, whole, shard=one)) for one in shards]
        monkeypatch.setattr(Shard, "copy", counted)
        step._state.follow(apart, is_updating=False)
    assert joined == ["up.weight[0]", "up.weight[1]"]
    assert torch.equal(torch.cat([tensor for tensor, _ in apart], 1), whole)


def test_parameters_show_what_a_step_has_updated_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pairs = block(), batches(2)
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=1e-3)
    with placed(captured(model, "sgd", 2)) as step:
        seen, run = dict(step.named_parameters()), step._first._step.run

        def fails(number: int) -> None:
            run(number)
            raise RunnerError("an op of another device failed")

        monkeypatch.setattr(step._first._step, "run", fails)
        with pytest.raises(RunnerError, match="another device"):
            step(pairs[0][0], targets=pairs[0][1])
        monkeypatch.undo()
        eager_loop(eager, optimizer, pairs[:1])
        assert_same_state(seen, dict(eager.named_parameters()))
        losses = eager_loop(eager, optimizer, pairs[1:])
        assert [float(step(rows, targets=labels)) for rows, labels in pairs[1:]] == pytest.approx(losses, rel=TIGHT)


def test_where_a_rule_is_wrong_evaluation_runs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = block(), batches(1)[0][0]

    def wrong(*_: object) -> bool:
        raise RuntimeError("shapes do not fit")

    with placed(captured(model, "sgd", 2)) as step:
        monkeypatch.setattr(rewrite._Rewriting, "_add_split", wrong)
        torch.testing.assert_close(step.evaluate(rows), model(rows).detach(), rtol=TIGHT, atol=TIGHT)


def module_of(model: nn.Module, graph: OpGraph, host: Host = HOST) -> PlacedModule:
    plan = naive_plan(graph, random_devices(graph, 2, np.random.default_rng(2)))
    names = tuple(device.name for device in host.devices)
    return to_module(model, graph, Placement(plan, graph.fingerprint, host.fingerprint, names), host=host)


@pytest.mark.parametrize(("parts", "classes"), [*((each, DEFAULT) for each in PARTS), (2, UPDATES[0])])
def test_a_module_trains_as_the_model_does(parts: int | tuple[int, ...], classes: tuple[str, ...]) -> None:
    model, pairs = block(), [*batches(2), *batches(1, size=2)]
    eager, placed_module = copy.deepcopy(model), module_of(model, captured(model, "adam", parts, classes=classes))
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (placed_module, eager)]
    for rows, labels in pairs:
        for each, optimizer in zip((placed_module, eager), optimizers, strict=True):
            optimizer.zero_grad()
            waiting = loss_of(each(rows), labels)
            (loss_of(each(rows[:2]), labels[:2]) + waiting).backward()
        for (name, one), other in zip(placed_module.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=TIGHT, atol=TIGHT, msg=name)
        for each in (placed_module, eager):
            clip_grad_norm_(each.parameters(), 0.05)
        for optimizer in optimizers:
            optimizer.step()
    assert any(graph._shards for graph in placed_module._placed.graphs.values())
    assert_same_state(placed_module.state_dict(), eager.state_dict())
    placed_module.eval()
    with torch.no_grad():
        rows = batches(1, size=5)[0][0]
        torch.testing.assert_close(placed_module(rows), eager(rows), rtol=TIGHT, atol=TIGHT)
    placed_module.close()


def test_a_parameter_of_a_module_that_changes_before_the_backward_is_refused() -> None:
    model, (rows, labels) = block(), batches(1)[0]
    module = module_of(model, captured(model, "adam", 2))
    loss = loss_of(module(rows), labels)
    with torch.no_grad():
        module.get_parameter("qkv.weight").mul_(2)
    with pytest.raises(RunnerError, match="modified in place between forward and backward"):
        loss.backward()
    module.close()


@pytest.mark.parametrize("classes", [DEFAULT, UPDATES[0]])
def test_processes_train_as_threads_do(classes: tuple[str, ...]) -> None:
    seen = []
    for host in (HOST, process_host(2)):
        model, pairs = block(), batches(3)
        with placed(captured(model, "adam", (3, 1), classes=classes), host, seed=3) as step:
            found = [step(rows, targets=labels) for rows, labels in pairs]
            optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
            step.zero_grad()
            step.backward(pairs[0][0], targets=pairs[0][1])
            optimizer.step()
            found += [step.evaluate(pairs[0][0]), *step.state_dict().values()]
        with_module = module_of(model, captured(model, "adam", 2, classes=classes), host)
        loss_of(with_module(pairs[0][0]), pairs[0][1]).backward()
        found += [each.grad for each in with_module.parameters() if each.grad is not None]
        with_module.close()
        seen.append(found)
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_a_placement_makes_a_step() -> None:
    model = block()
    graph = captured(model, "adam", (3, 1))
    plan = naive_plan(graph, random_devices(graph, 2, np.random.default_rng(0)))
    placement = Placement(plan, graph.fingerprint, HOST.fingerprint, tuple(each.name for each in HOST.devices))
    with to_step(model, graph, placement, host=HOST) as step:
        rows, labels = batches(1)[0]
        assert float(step(rows, targets=labels)) == pytest.approx(loss_of(model(rows), labels).item(), rel=TIGHT)


def save_together(states: list[dict[str, Any]], path: Path) -> None:
    """Writes the checkpoints of all ranks as they do it at once under torchrun."""
    merged: dict[str, dict[str, Any]] = {section: {} for section in states[0]}
    for state in states:
        for section, named in state.items():
            for key, value in named.items():
                known = merged[section].get(key)
                if isinstance(known, PartTensor):
                    merged[section][key] = part_tensor([*known.parts, *value.parts], value.whole_shape)
                else:
                    merged[section][key] = value
    dcp.save(merged, checkpoint_id=path, no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("micro_batches", "classes"), [(1, DEFAULT), (2, DEFAULT), (2, UPDATES[0])])
def test_ranks_have_shards_and_train_as_eager_does_from_checkpoint_to_checkpoint(
    micro_batches: int, classes: tuple[str, ...], tmp_path: Path
) -> None:
    model, pairs = block(), batches(4)
    eager = copy.deepcopy(model)
    optimizer, losses = torch.optim.Adam(eager.parameters(), lr=1e-3), []
    for rows, labels in pairs:
        optimizer.zero_grad()
        loss = loss_of(eager(rows), labels)
        loss.backward()
        clip_grad_norm_(eager.parameters(), 0.05)
        optimizer.step()
        losses.append(loss.item())
    graph = captured(model, "adam", (3, 1), micro_batches, classes)
    plan = naive_plan(graph, np.maximum(graph.shard, 0).astype(np.int32))

    def work(first: int, last: int, nodes: Nodes) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
        step, found = RankModel(graph, plan, nodes), []
        if first:
            state = step.checkpoint()
            dcp.load(state, checkpoint_id=tmp_path / str(first), no_dist=True)
            step.restore(state)
            assert step.num_steps == first
        for rows, labels in pairs[first:last]:
            step.zero_grad()
            found.append(float(step.backward(rows, targets=labels)))
            step.clip_grad_norm_(0.05)
            step.optimizer.step()
        return found, step.state_dict(), step.checkpoint()

    ranks = in_ranks(2, partial(work, 0, 2))
    assert [found for found, *_ in ranks] == [pytest.approx(losses[:2], rel=TIGHT)] * 2
    for rank, (_, own, _) in enumerate(ranks):
        assert {f"qkv.weight[{rank}]", f"up.bias[{rank}]"} <= own.keys()
        assert "qkv.weight" not in own
    save_together([state for *_, state in ranks], tmp_path / "2")
    ranks = in_ranks(2, partial(work, 2, 4))
    assert [found for found, *_ in ranks] == [pytest.approx(losses[2:], rel=TIGHT)] * 2
    save_together([state for *_, state in ranks], tmp_path / "4")
    plain = {"model": block().state_dict()}
    dcp.load(plain, checkpoint_id=tmp_path / "4", no_dist=True)
    assert_same_state(plain["model"], eager.state_dict())
    with placed(captured(block(), "adam", 2)) as step:  # another split goes on from it
        state = step.checkpoint()
        dcp.load(state, checkpoint_id=tmp_path / "4", no_dist=True)
        step.restore(state)
        expected = loss_of(eager(pairs[0][0]), pairs[0][1]).item()
        assert float(step(pairs[0][0], targets=pairs[0][1])) == pytest.approx(expected, rel=TIGHT)
        eager_loop(eager, optimizer, pairs[:1])
        assert_same_state(step.state_dict(), eager.state_dict())


def test_a_rank_writes_its_shards_into_a_whole_model() -> None:
    model = block()
    graph = captured(model, "adam", 2)
    plan = naive_plan(graph, np.maximum(graph.shard, 0).astype(np.int32))

    def work(nodes: Nodes) -> dict[str, Tensor]:
        step, into = RankModel(graph, plan, nodes), block()
        step.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        with torch.no_grad():
            for parameter in into.parameters():
                parameter.zero_()
        step.copy_to(into)
        wide = block()
        wide.up = nn.Linear(8, 32).double()
        before = copy.deepcopy(wide.state_dict())
        with pytest.raises(InvalidValue, match=r"shape of up\.(weight|bias) is \(32"):
            step.copy_to(wide)
        assert_same_state(wide.state_dict(), before)
        with pytest.raises(InvalidValue, match=r"up\.weight is .*\(2, 2\)"):
            step.load_state_dict({"up.weight": torch.zeros(2, 2, dtype=torch.float64)})
        return into.state_dict()

    one, other = in_ranks(2, work)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(one[name] + other[name], value + 1, msg=name)  # each number is on one rank
