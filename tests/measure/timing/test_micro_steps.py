"""Eager steps in micro-batches, and placed ones beside them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from naive_plan import naive_plan
from placed_steps import HOST, NUM_STEPS, run_placed
from small_models import Case, ConvNorm, Function, mean_square, random
from torch.nn import functional

from rlplace.errors import InvalidValue
from rlplace.export.formats import check_export
from rlplace.export.placed.placed_model import PlacedModel
from rlplace.graphs import capture
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.problem import Plan
from rlplace.measure.timing.eager_step import EagerStep

LABELS = torch.tensor([0, 5, 2, 4, 1])


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    made = Crew(HOST.devices)
    yield made
    made.stop()


def joined_case() -> Case:
    loss = functional.cross_entropy
    return Case(Function(torch.tanh), random(5, 4), loss, targets=(LABELS,))


def captured(case: Case, count: int = 2) -> OpGraph:
    return capture(case.model, case.inputs, case.loss_fn, "adam", targets=case.targets, micro_batches=count)


def apart(graph: OpGraph) -> Plan:
    """Micro-batch k on core k, what is shared on the first."""
    return naive_plan(graph, np.maximum(graph.micro_batch, 0).astype(np.int32))


CASES = {
    "separate": lambda: Case(Function(torch.tanh), random(5, 4), mean_square),
    "joined": joined_case,
    "batch norm": lambda: Case(ConvNorm(), random(5, 2, 5, 5), mean_square),
}


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_on_cores_of_their_own_train_as_eager_does(name: str, crew: Crew) -> None:
    graph = captured(CASES[name]())
    eager = EagerStep(graph, HOST, num_threads=1, in_micro_batches=name == "batch norm")
    run, _ = run_placed(graph, HOST, apart(graph), crew)
    losses = []
    for _ in range(NUM_STEPS):
        eager()
        losses.append(eager.loss.clone().reshape(()))
    torch.testing.assert_close(run.losses, losses, rtol=1e-9, atol=1e-9)
    for state, value in eager.state_dict().items():
        torch.testing.assert_close(run.state[state], value.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_an_exported_step_is_checked(name: str) -> None:
    graph = captured(CASES[name]())
    assert check_export(graph, HOST, apart(graph)).ok


@pytest.mark.parametrize("name", CASES)
def test_an_eager_step_in_micro_batches_is_that_of_the_whole(name: str) -> None:
    """But for batch norm, whose statistics are those of a micro-batch."""
    graph = captured(CASES[name]())
    whole, parts = EagerStep(graph, HOST), EagerStep(graph, HOST, in_micro_batches=True)
    whole()
    parts()
    assert torch.allclose(whole.loss, parts.loss) == (name != "batch norm")


def test_a_placed_step_takes_the_whole_batch() -> None:
    case = joined_case()
    placed = PlacedModel(captured(case), HOST, apart(captured(case)), other_shapes="refuse")
    try:
        loss = case.loss_fn(case.model(case.inputs), LABELS).detach()
        torch.testing.assert_close(placed(case.inputs, targets=LABELS), loss)
        other = placed(case.inputs + 1, targets=LABELS)
        assert not torch.equal(other, loss)
        for size in (4, 6):
            with pytest.raises(InvalidValue, match=rf"input_0 is .*\({size}, 4\).*expected .*\(5, 4\)"):
                placed(random(size, 4), targets=LABELS)
    finally:
        placed.close()


def test_inference_returns_the_whole_output() -> None:
    case = joined_case()
    graph = capture(case.model, case.inputs, micro_batches=2)
    placed = PlacedModel(graph, HOST, apart(graph))
    eager = EagerStep(graph, HOST, in_micro_batches=True)
    try:
        eager()
        x = random(5, 4, seed=9)
        torch.testing.assert_close(placed(x), case.model(x).detach())
        torch.testing.assert_close(eager.loss, case.model(case.inputs).detach())
    finally:
        placed.close()
