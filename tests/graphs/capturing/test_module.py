"""A captured module: gradients of its outputs come in, those of parameters and inputs go out."""

from __future__ import annotations

import pytest
import torch
from small_models import CASES, Case, random
from torch import Tensor, nn

from rlplace.graphs.capturing.capture import as_call, capture, capture_module
from rlplace.graphs.interpreter import require_program, run_graph
from rlplace.graphs.opgraph import BACKWARD, FORWARD


class Two(nn.Module):
    """Two outputs with a gradient, one without, and one that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.unused = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor, z: Tensor) -> dict[str, object]:
        y = self.linear(x)
        return {"rank": y.argsort(1), "y": y * z, "sum": y.sum(), "name": "two"}


def test_outputs_with_a_gradient_are_told_and_have_a_target_each() -> None:
    captured = capture_module(Two(), (random(3, 4), random(3, 4)), {}, has_backward=True)
    program = require_program(captured.graph)
    assert captured.with_gradient == (1, 2)
    targets = [source for source in program.sources.values() if source.kind == "target"]
    assert [tuple(source.value.shape) for source in targets] == [(3, 4), ()]
    assert set(program.gradients) == {"linear.weight", "linear.bias"}
    assert program.input_gradients == {}
    assert program.result["name"] == "two"


def test_inputs_have_gradients_where_they_are_wanted() -> None:
    x, z = random(3, 4), random(3, 4, seed=2)
    captured = capture_module(Two(), (x, z), {}, has_backward=True, differentiated=(1,))
    assert set(require_program(captured.graph).input_gradients) == {1}
    frozen = Two().requires_grad_(False)
    captured = capture_module(frozen, (x, z), {}, has_backward=True, differentiated=(0, 1))
    assert set(require_program(captured.graph).input_gradients) == {0, 1}
    assert not require_program(captured.graph).gradients


def test_without_a_backward_it_is_the_forward() -> None:
    for model, has_backward in ((Two(), False), (Two().requires_grad_(False), True)):
        captured = capture_module(model, (random(3, 4), random(3, 4)), {}, has_backward=has_backward)
        assert captured.with_gradient == ()
        assert not (captured.graph.phases == BACKWARD).any()


@pytest.mark.parametrize("name", ["linear", "batch_norm_train", "tied", "frozen_and_unused", "attention", "buffers"])
def test_it_has_the_forward_and_the_backward_of_the_step_with_a_loss(name: str) -> None:
    """Each op of the model's own is there once, by its target: what is placed for the one is placed for the other."""
    case: Case = CASES[name]()
    args, kwargs = as_call(case.inputs)
    step = capture(case.model, case.inputs, case.loss_fn)
    module = capture_module(case.model, args, kwargs, has_backward=True).graph

    def forward(graph: object) -> list[tuple[str, str]]:
        pairs = zip(graph.modules, graph.targets, graph.phases, strict=True)  # type: ignore[attr-defined]
        return [
            (path, target) for path, target, phase in pairs if phase == FORWARD and target not in ("input", "constant")
        ]

    found = forward(module)
    assert found == forward(step)[: len(found)]


def test_a_step_knows_its_gradients_and_where_its_backward_begins() -> None:
    case = CASES["frozen_and_unused"]()
    for optimizer in (None, "sgd"):
        graph = capture(case.model, case.inputs, case.loss_fn, optimizer)
        program = require_program(graph)
        assert set(program.gradients) == {"trained.weight", "trained.bias"}
        assert [graph.targets[op] for op in program.seeds] == ["aten.ones_like.default"]
        found = run_graph(graph).gradients
        output = case.loss_fn(case.model(case.inputs))
        expected = torch.autograd.grad(output, [case.model.trained.weight, case.model.trained.bias])  # type: ignore[union-attr]
        torch.testing.assert_close(found["trained.weight"], expected[0])
        torch.testing.assert_close(found["trained.bias"], expected[1])


def test_a_gradient_that_no_update_takes_is_made_where_its_parameter_lives() -> None:
    case = CASES["linear"]()
    graph = capture(case.model, case.inputs, case.loss_fn)
    program = require_program(graph)
    for name, gradient in program.gradients.items():
        parameter, producer = graph.names.index(name), int(graph.tensor_op[program.base(gradient)])
        assert graph.colocation[parameter] == graph.colocation[producer] >= 0
