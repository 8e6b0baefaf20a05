"""A step split into stages computes what it did, and every stage reads from the one before it alone.

Which modules a stage may begin with.
"""

from __future__ import annotations

import operator

import numpy as np
import pytest
import torch
from pipelined_models import Skipping, skipping_batch, skipping_loss
from torch import nn
from torch.distributed.pipelining import Pipe

from rlplace.errors import InvalidValue
from rlplace.export.pipeline import boundaries, check_split, places_of
from rlplace.export.stages import WholeStep, name_in_model, split_step
from rlplace.graphs import capture
from rlplace.search.parallel.layouts import step_roles

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
BEGINS = ("model.blocks.0", "model.blocks.1", "model.blocks.3")


def skipping() -> WholeStep:
    torch.manual_seed(0)
    return WholeStep(Skipping(), skipping_loss, None, 1)


def stage_reads(pipe: Pipe) -> list[list[str]]:
    """For each stage what it reads: `input`, or the names of stages."""
    found = []
    for node in pipe.split_gm.graph.nodes:
        if node.op == "call_module":
            sources = [arg.args[0] if arg.target is operator.getitem else arg for arg in node.args]
            found.append(sorted({"input" if one.op == "placeholder" else one.name for one in sources}))
    return found


def test_the_loss_of_a_whole_step_has_one_element() -> None:
    step, batch = skipping(), skipping_batch()
    expected = skipping_loss(step.model(*batch[:2]), batch[2])
    assert step(*batch).shape == (1,)
    assert step(*batch).item() == expected.item()


class Named(nn.Module):
    def forward(self, *, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a - b


def test_inputs_go_by_their_names() -> None:
    step = WholeStep(Named(), lambda output: (output.sum(), output), ("b", "a"), 0)
    assert step(torch.ones(2), torch.zeros(2)).item() == -2.0


def test_stages_compute_what_the_step_did() -> None:
    batch = skipping_batch()
    expected = skipping()(*batch)
    pipe, _ = split_step(skipping(), batch, BEGINS)
    assert pipe.num_stages == 4
    (loss,) = torch.utils._pytree.tree_leaves(pipe(*batch))
    torch.testing.assert_close(loss, expected)


def test_gradients_of_stages_are_those_of_the_step() -> None:
    """Backward from stage to stage, as a schedule does; no gradient comes out of a region without."""
    batch, whole = skipping_batch(), skipping()
    whole(*batch).backward()
    pipe, _ = split_step(skipping(), batch, BEGINS)
    stages = [pipe.get_stage_module(index) for index in range(pipe.num_stages)]
    received: list[list[torch.Tensor]] = [list(batch)]
    sent: list[list[torch.Tensor]] = []
    for stage in stages:
        made = stage(*received[-1])
        sent.append(list(made) if isinstance(made, (list, tuple)) else [made])
        received.append([value.detach().requires_grad_(value.is_floating_point()) for value in sent[-1]])
    assert all(value.is_contiguous() for values in sent for value in values)
    gradients: list[torch.Tensor | None] = [torch.ones(1)]
    for values, inputs in zip(reversed(sent), reversed(received[:-1]), strict=True):
        pairs = [(value, gradient) for value, gradient in zip(values, gradients, strict=True) if value.requires_grad]
        torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
        gradients = [value.grad for value in inputs]
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                known = found.get(name_in_model(name), torch.zeros_like(parameter))
                found[name_in_model(name)] = known + parameter.grad
    parameters = whole.model.named_parameters()
    expected = {name: each.grad for name, each in parameters if each.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


class Casting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.first(x)
        return self.second(x.float())


def test_a_region_of_another_kind_is_refused() -> None:
    step = WholeStep(Casting(), torch.sum, None, 0)
    with pytest.raises(TypeError, match="wrap_with_autocast makes a region of its own, which a stage cannot hold"):
        split_step(step, [torch.ones(2, 4)], ["model.second"])


def test_a_stage_reads_from_the_one_before_it_alone() -> None:
    pipe, _ = split_step(skipping(), skipping_batch(), BEGINS)
    assert stage_reads(pipe) == [["input"], ["submod_pp_0"], ["submod_pp_1"], ["submod_pp_2"]]


def test_a_parameter_of_several_stages_is_known() -> None:
    pipe, shared = split_step(skipping(), skipping_batch(), BEGINS)
    known = {name_in_model(names[0]): sorted(names) for names in shared}
    assert known == {"words.weight": [0, 3], "twice.weight": [0, 3], "twice.bias": [0, 3]}
    names = [name for name, _ in pipe.get_stage_module(3).named_parameters() if "twice" in name]
    assert len(names) == 2, "the second call's are those of the first"


class Tied(nn.Module):
    """One parameter under three names, two of them in the second half."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.middle, self.again = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.again.weight = self.words.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.words(rows)) + self.again(rows))


def test_names_of_one_parameter_in_a_stage_stay_one() -> None:
    step = WholeStep(Tied(), torch.sum, None, 0)
    pipe, (names,) = split_step(step, [torch.tensor([1, 2])], ["model.middle"])
    assert sorted(names) == [0, 1]
    second = pipe.get_stage_module(1)
    assert second.get_parameter("model.again.weight") is second.get_parameter("model.head.weight")
    assert second.get_parameter(names[1]) is not pipe.get_stage_module(0).get_parameter(names[0])


def test_modules_that_run_once_and_not_first() -> None:
    found = boundaries(skipping(), skipping_batch())
    assert found[:2] == ["model.gate", "model.blocks.0"]
    assert "model.words" not in found, "it is the first"
    assert "model.twice" not in found, "it runs twice"
    assert "model.blocks.0.norm" not in found, "the block begins with it"
    assert [path for path in found if path.count(".") == 2] == [f"model.blocks.{index}" for index in range(4)]


def test_places_ascend_in_the_order_of_the_model() -> None:
    late, rows, labels = skipping_batch()
    graph = capture(Skipping(), (late, rows), skipping_loss, "sgd", targets=labels, micro_batches=2, loss="separate")
    step = step_roles(graph)
    kept, places = places_of(graph, step, boundaries(skipping(), skipping_batch()))
    assert [path for path in kept if path.count(".") == 2] == [f"model.blocks.{index}" for index in range(4)]
    assert np.all(np.diff(places) > 0)
    at = dict(zip(kept, places.tolist(), strict=True))
    inside = [
        int(place)
        for place, module, phase in zip(step.op_position, graph.modules, graph.phases, strict=True)
        if module.startswith("blocks.2") and phase == 0
    ]
    assert at["model.blocks.2"] <= min(inside)
    assert max(inside) < at["model.blocks.3"]


def test_shared_parameters_are_named() -> None:
    step = skipping()
    shared = check_split(step, skipping_batch(), ["model.blocks.1"])
    assert {name.partition(".")[0] for name in shared} == {"words", "twice"}
    assert not step.get_submodule("model.blocks.1")._forward_pre_hooks, "a copy was split"


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x) if x.sum() > 0 else self.first(x)


def test_what_cannot_be_traced_is_refused_with_the_reason() -> None:
    step = WholeStep(Branching(), torch.sum, None, 0)
    with pytest.raises(
        InvalidValue, match=r"model is 'Branching', expected one that `torch\.export` can trace"
    ) as said:
        boundaries(step, [torch.ones(2, 4)])
    assert "It cannot trace it: " in str(said.value)
    assert len(str(said.value).splitlines()) == 1
