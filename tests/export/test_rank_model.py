"""Ranks that run their own parts side by side train as plain PyTorch does; here they are threads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from core_hosts import core_host
from naive_plan import naive_plan
from spmd_ranks import eager, in_ranks, reader, reader_batches, reader_graph, scattered
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from rlplace.errors import InvalidValue, RunnerError, UserError
from rlplace.export import PlacedModel, RankModel, to_rank
from rlplace.export.placed import rank_model
from rlplace.measure import Placement
from rlplace.measure.hosts.nodes import Nodes
from rlplace.workloads.configs import Loss

TOLERANCE = 1e-10
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
WHOLE = "ignore:torch.distributed is disabled"
"""What `torch.distributed.checkpoint` says where there is one process."""


def merged(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The state of all ranks; each parameter and buffer is on one of them."""
    assert sum(map(len, states)) == len(set().union(*states))
    return {name: value for state in states for name, value in state.items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=f"{name} differs")


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_train_as_eager_does(micro_batches: int, num_ranks: int) -> None:
    model, batches = reader(), reader_batches(3)
    graph = reader_graph(model, micro_batches)
    plan = scattered(graph, num_ranks, seed=num_ranks)

    def work(nodes: Nodes) -> tuple[list[float], dict[str, Tensor]]:
        step = RankModel(graph, plan, nodes)
        losses = [float(step(rows, late, targets=labels)) for rows, late, labels in batches]
        return losses, step.state_dict()

    found = in_ranks(num_ranks, work)
    losses, trained = eager(model, batches)
    for own, _ in found:
        assert own == pytest.approx(losses, rel=TOLERANCE)
    assert_close(merged([state for _, state in found]), trained.state_dict())


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_an_own_loop_clips_the_gradients_of_all_ranks_together(norm_type: float) -> None:
    model, batches = reader(), reader_batches(3)
    graph = reader_graph(model, optimizer=None)
    devices = scattered(graph, 3).devices.copy()
    is_parameter = np.array([target == "parameter" for target in graph.targets])
    together = np.isin(graph.colocation, graph.colocation[is_parameter]) & (graph.colocation >= 0)
    devices[is_parameter | together] %= 2  # the last rank has none
    plan = naive_plan(graph, devices)

    def work(nodes: Nodes) -> tuple[list[float], list[float], dict[str, Tensor]]:
        step = RankModel(graph, plan, nodes)
        own = list(step.parameters())
        assert bool(own) == (nodes.rank < 2)
        optimizer = torch.optim.SGD([{"params": own}], lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        losses, norms = [], []
        for rows, late, labels in batches:
            step.zero_grad()
            losses.append(float(step.backward(rows, late, targets=labels)))
            norms.append(float(step.clip_grad_norm_(0.05, norm_type)))
            optimizer.step()
            schedule.step()
        return losses, norms, step.state_dict()

    found = in_ranks(3, work)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    losses, norms = [], []
    for rows, late, labels in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(rows, late), labels)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)))
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert min(norms) > 0.05
    for own, own_norms, _ in found:
        assert own == pytest.approx(losses, rel=TOLERANCE)
        assert own_norms == pytest.approx(norms, rel=TOLERANCE)
    assert_close(merged([state for *_, state in found]), model.state_dict())


@pytest.mark.parametrize("loss", ["separate", "joined"])
def test_a_rank_reads_the_parts_of_a_batch_that_it_names_and_no_others(loss: Loss) -> None:
    model, batches = reader(), reader_batches(2)
    graph = reader_graph(model, micro_batches=3, loss=loss)
    plan = naive_plan(graph, np.where(graph.colocation >= 0, 0, np.maximum(graph.micro_batch, 0)))

    def work(nodes: Nodes) -> tuple[list[float], tuple[Any, ...]]:
        step = RankModel(graph, plan, nodes)
        losses = []
        for batch in batches:
            own = [torch.full_like(each, math.nan if each.is_floating_point() else 10**6) for each in batch]
            for target, source, parts in zip(own, batch, step.reads, strict=True):
                for part in parts:
                    target[part] = source[part]
            rows, late, labels = own
            losses.append(float(step(rows, late, targets=labels)))
        return losses, step.reads

    found = in_ranks(3, work)
    for rank, (losses, reads) in enumerate(found):
        assert losses == pytest.approx(eager(model, batches)[0], rel=TOLERANCE)
        own_samples = ((slice(2 * rank, 2 * rank + 2),),)
        of_labels = own_samples if loss == "separate" else ((...,), (), ())[rank]  # one loss, of the whole batch
        assert reads == (own_samples, own_samples, of_labels)


def test_a_batch_that_is_not_cut_is_read_by_one_rank() -> None:
    graph = reader_graph(reader())
    plan = naive_plan(graph, np.zeros(graph.num_ops, dtype=np.int32))
    assert in_ranks(2, lambda nodes: RankModel(graph, plan, nodes).reads) == [((...,),) * 3, ((),) * 3]


def test_ranks_with_different_placements_are_refused() -> None:
    graph = reader_graph(reader())

    def work(nodes: Nodes) -> str:
        with pytest.raises(RunnerError) as caught:
            RankModel(graph, scattered(graph, 2, seed=nodes.rank), nodes)
        return str(caught.value)

    for said in in_ranks(2, work):
        assert said.startswith("rank 1 has another step than rank 0")
        assert "must build the same model" in said


def test_a_second_model_of_the_same_ranks_has_keys_of_its_own() -> None:
    """The store holds addresses, steps and layouts of the first: validly signed, and of no use."""
    model, ((rows, late, labels),) = reader(), reader_batches(1)
    graph = reader_graph(model)
    plans = [scattered(graph, 2, seed=seed) for seed in (0, 1)]

    def work(nodes: Nodes) -> list[float]:
        steps = [RankModel(graph, plan, nodes) for plan in plans]
        return [float(step(rows, late, targets=labels)) for step in steps]

    losses, _ = eager(model, [(rows, late, labels)])
    assert in_ranks(2, work) == [pytest.approx(losses * 2, rel=TOLERANCE)] * 2


def test_after_a_failure_no_step_runs() -> None:
    model = reader()
    graph = reader_graph(model)
    (rows, late, labels), *_ = reader_batches(1)

    def work(nodes: Nodes) -> None:
        step = RankModel(graph, scattered(graph, 1), nodes)
        with pytest.raises(RunnerError, match=r"op 'embedding'.* on here/cpu:0: IndexError"):
            step(rows + 100, late, targets=labels)
        with pytest.raises(RunnerError, match=r"a step failed on this rank.*max-restarts"):
            step(rows, late, targets=labels)

    in_ranks(1, work)


def test_one_rank_saves_no_file() -> None:
    graph = reader_graph(reader())

    def work(nodes: Nodes) -> None:
        step = RankModel(graph, scattered(graph, 1), nodes)
        for refused in (step.save, step.load):
            with pytest.raises(UserError, match=r"torch\.distributed\.checkpoint\.save"):
                refused("file")

    in_ranks(1, work)


def test_as_many_processes_as_devices_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = reader()
    graph, host = reader_graph(model), core_host(3)
    names = tuple(device.name for device in host.devices)
    placement = Placement(scattered(graph, 3), graph.fingerprint, host.fingerprint, names)

    def work(nodes: Nodes) -> None:
        monkeypatch.setattr(rank_model, "join", lambda: nodes)
        with pytest.raises(InvalidValue, match=r"ranks is 1, expected 3, one for each device .*cpu:0, cpu:1, cpu:2"):
            to_rank(model, graph, placement)

    in_ranks(1, work)
    with pytest.raises(InvalidValue, match="expected of type Module"):
        to_rank(graph, model, placement)  # type: ignore[arg-type]


@pytest.mark.filterwarnings(WHOLE)
@pytest.mark.parametrize("has_own", [False, True])
def test_a_checkpoint_goes_on_in_plain_pytorch_and_back(has_own: bool, tmp_path: Path) -> None:
    """One process with all of the model; each rank adds its part under the same names."""
    model, batches = reader(), reader_batches(6)
    losses, trained = eager(model, batches)
    graph = reader_graph(model, optimizer=None if has_own else "adamw")

    def placed() -> tuple[PlacedModel, torch.optim.Optimizer]:
        step = PlacedModel(graph, core_host(2), scattered(graph, 2))
        return step, torch.optim.AdamW(step.parameters(), lr=1e-3) if has_own else step.optimizer

    def run(step: PlacedModel, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
        found = []
        for rows, late, labels in (batches[number] for number in numbers):
            step.zero_grad()
            found.append(float(step.backward(rows, late, targets=labels)))
            optimizer.step()
        return found

    step, optimizer = placed()
    assert run(step, optimizer, range(2)) == pytest.approx(losses[:2], rel=TOLERANCE)
    optimizer.param_groups[0]["weight_decay"] = 0.01  # as it is: options are in a checkpoint
    dcp.save(step.checkpoint(optimizer), checkpoint_id=tmp_path / "2", no_dist=True)
    step.close()

    other = reader()
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    other.unused.requires_grad_(requires_grad=False)  # no gradient reaches it
    plain = torch.optim.AdamW([each for each in other.parameters() if each.requires_grad], lr=0.5)
    state = {"model": other.state_dict(), "optim": get_optimizer_state_dict(other, plain, options=FLAT)}
    dcp.load(state, checkpoint_id=tmp_path / "2")
    other.load_state_dict(state["model"])
    set_optimizer_state_dict(other, plain, state["optim"], options=FLAT)
    assert plain.param_groups[0]["lr"] == 1e-3
    found, _ = eager(other, batches[2:4], plain)
    assert found == pytest.approx(losses[2:4], rel=TOLERANCE)
    state = {"model": other.state_dict(), "optim": get_optimizer_state_dict(other, plain, options=FLAT)}
    dcp.save(state, checkpoint_id=tmp_path / "4", no_dist=True)

    step, optimizer = placed()
    loaded = step.checkpoint(optimizer)
    assert loaded.pop("rlplace")["num_steps"] == 0
    # parameters that get no gradient have no options there
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(loaded, checkpoint_id=tmp_path / "4", planner=planner)
    step.restore(loaded, optimizer)
    assert run(step, optimizer, range(4, 6)) == pytest.approx(losses[4:], rel=TOLERANCE)
    assert_close(step.state_dict(), trained.state_dict())
    step.close()


@pytest.mark.filterwarnings(WHOLE)
def test_a_checkpoint_before_the_first_step_is_its_beginning(tmp_path: Path) -> None:
    model, batches = reader(), reader_batches(2)
    graph = reader_graph(model, optimizer=None)
    step = PlacedModel(graph, core_host(2), scattered(graph, 2))
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-3)
    before = step.state_dict()
    dcp.save(step.checkpoint(optimizer), checkpoint_id=tmp_path / "0", no_dist=True)
    assert_close(step.state_dict(), before)
    assert {float(state["step"]) for state in optimizer.state.values()} == {0.0}
    assert all(parameter.grad is None for parameter in step.parameters())
    found = []
    for rows, late, labels in batches:
        step.zero_grad()
        found.append(float(step.backward(rows, late, targets=labels)))
        optimizer.step()
    assert found == pytest.approx(eager(model, batches)[0], rel=TOLERANCE)
    with pytest.raises(InvalidValue, match=r"over `step\.parameters"):
        step.checkpoint(torch.optim.AdamW(model.parameters()))
    step.close()
