"""Which ops a device map has together: by hand, for models of one trait each."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from small_models import Model
from split_models import Block, Borrowing, Meeting, OwnScale, Stack, Tied, features, words
from torch import Tensor, nn

from rlplace.graphs import OpGraph, capture
from rlplace.graphs.grouping.module_classes import ModuleClasses, tied_as_modules
from rlplace.graphs.opgraph import FORWARD


def mean(output: Tensor) -> Tensor:
    return output.mean()


def step_of(model: nn.Module) -> OpGraph:
    return capture(model, words() if isinstance(model, Tied) else features(), mean, "adam")


def together(classes: ModuleClasses) -> set[frozenset[str]]:
    """The entries of each class."""
    found: dict[int, set[str]] = {}
    for name, number in classes.entry_class.items():
        found.setdefault(number, set()).add(name)
    return {frozenset(names) for names in found.values()}


def sets(*given: set[str]) -> set[frozenset[str]]:
    return {frozenset(names) for names in given}


def test_a_residual_block_is_whole_and_a_stack_of_them_is_not() -> None:
    graph = step_of(Stack(2))
    classes = ModuleClasses(graph)
    assert together(classes) == sets({"first"}, {"blocks.0"}, {"blocks.1"}, {"last"})
    assert {"blocks.0", "blocks.1"} <= classes.tree.whole
    for path in ("first", "blocks.0.up", "blocks.1.down", "last"):
        entry = path.removesuffix(".up").removesuffix(".down")
        for op in (op for op, module in enumerate(graph.modules) if module == path):
            assert classes.op_class[op] == classes.entry_class[entry], graph.names[op]
    phases = {number: set(graph.phases[classes.op_class == number].tolist()) for number in classes.entry_class.values()}
    assert all(found == {0, 1, 2} for found in phases.values()), "forward, backward and updates are one class"


def test_every_op_has_a_class_and_classes_are_numbered_by_first_op() -> None:
    for model in (Stack(), Tied(), Meeting(), Borrowing(), OwnScale(), Block()):
        found = ModuleClasses(step_of(model)).op_class
        numbers, first = np.unique(found, return_index=True)
        assert numbers.tolist() == list(range(len(numbers)))
        assert np.all(np.diff(first) > 0)


def test_tied_weights_are_one_class() -> None:
    assert together(ModuleClasses(step_of(Tied()))) == sets({"words", "head"}, {"middle"})


def test_a_module_under_two_names_has_both_in_one_class() -> None:
    one = nn.Linear(8, 8)
    twice = Model(lambda model, x: model.again(model.b(model.a(x))), a=one, b=nn.Linear(8, 8), again=one)
    assert together(ModuleClasses(step_of(twice))) == sets({"a", "again"}, {"b"})


def test_outputs_that_meet_are_of_one_class_with_the_op_that_reads_them() -> None:
    graph = step_of(Meeting())
    classes = ModuleClasses(graph)
    assert together(classes) == sets({"left.0"}, {"left.1", "right"}, {"after"})
    (product,) = (op for op in np.flatnonzero(graph.phases == FORWARD) if graph.targets[op] == "aten.mul.Tensor")
    assert classes.op_class[product] == classes.entry_class["right"]


def test_a_module_that_uses_a_childs_weight_by_itself_is_whole() -> None:
    classes = ModuleClasses(step_of(Borrowing()))
    assert together(classes) == sets({"part"}, {"after"})


def test_what_the_root_adds_to_its_input_is_where_inputs_and_its_own_tensors_are() -> None:
    graph = step_of(OwnScale())
    classes = ModuleClasses(graph)
    assert together(classes) == sets({"scale", "layer"}, {"before"}, {"after"})
    assert classes.inputs_class == classes.entry_class["scale"]
    assert classes.op_class[graph.names.index("input_0")] == classes.inputs_class


def test_inputs_that_only_modules_read_are_of_no_class_of_their_own() -> None:
    graph = step_of(Stack())
    classes = ModuleClasses(graph)
    assert classes.inputs_class == -1
    assert classes.op_class[graph.names.index("input_0")] == classes.entry_class["first"]


def test_what_a_class_says_not_to_split_is_whole() -> None:
    class Plain(nn.Module):
        _no_split_modules = ("Sequential",)

        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = part(x)
            return x

    assert together(ModuleClasses(step_of(Plain()))) == sets({"parts.0"}, {"parts.1"})


def test_a_root_without_children_is_one_class() -> None:
    classes = ModuleClasses(step_of(nn.Linear(8, 4)))
    assert dict(classes.entry_class) == {"": 0}
    assert classes.num_classes == 1


def test_a_graph_without_a_program_has_the_classes_that_its_ops_tell_of() -> None:
    graph = step_of(Stack(2))
    alone = ModuleClasses(dataclasses.replace(graph, program=None))
    assert alone.op_class.tolist() == ModuleClasses(graph).op_class.tolist()


def test_tied_as_modules_keeps_the_graphs_own_classes() -> None:
    graph = step_of(Stack())
    tied = tied_as_modules(graph).colocation
    for own in range(int(graph.colocation.max()) + 1):
        assert len(set(tied[graph.colocation == own].tolist())) == 1
    assert tied_as_modules(tied_as_modules(graph)).colocation.tolist() == tied.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "mixtral", "clip"])
def test_models_of_transformers_split_between_their_layers(name: str) -> None:
    pytest.importorskip("transformers")
    from rlplace.session.prepare import capture_workload
    from rlplace.workloads import build, without_memory

    with without_memory():
        workload = build(f"{name}@small")
    classes = ModuleClasses(capture_workload(workload))
    unsplit = {word for module in workload.model.modules() for word in getattr(module, "_no_split_modules", None) or ()}
    layers = [path for path, module in workload.model.named_modules() if type(module).__name__ in unsplit]
    assert layers
    assert set(layers) <= set(classes.entry_class)
    assert len({classes.entry_class[path] for path in layers}) == len(layers), "each can be placed by itself"
    names = set(workload.model.state_dict())
    covered = {name for name in names for entry in classes.entry_class if name == entry or name.startswith(f"{entry}.")}
    assert covered == names, "every parameter and buffer has its entry"


def test_what_a_backward_op_around_units_goes_with() -> None:
    graph = step_of(Meeting())
    classes = ModuleClasses(graph)
    own = [op for op, module in enumerate(graph.modules) if module == "" and graph.phases[op] == 1]
    backward = [op for op in own if graph.targets[op] == "aten.mul.Tensor"]
    assert len(backward) == 2, "the product rule"
    assert {int(classes.op_class[op]) for op in backward} <= {
        classes.entry_class["right"],
        classes.entry_class["after"],
    }
