from __future__ import annotations

from run_files import trace_of

from rlplace.report.html.modules import OUTSIDE, module_groups
from rlplace.report.html.trace import Slice, Trace


def ops(modules: list[str]) -> tuple[Slice, ...]:
    return Trace.of(trace_of([f"op{k}" for k in range(len(modules))], modules, ["d"]), "t").ops


def test_a_model_of_one_part_is_cut_deeper() -> None:
    inside = ops([f"model.layers.{k % 3}.mlp" for k in range(9)])
    groups = module_groups(inside)
    assert groups.depth == 3
    assert set(groups.names) == {"model.layers.0", "model.layers.1", "model.layers.2"}
    assert not groups.has_others
    assert groups.names[groups.index(inside[1])] == "model.layers.1"
    assert groups.are_alike(inside[0], inside[0])
    assert not groups.are_alike(inside[0], inside[1])


def test_the_longest_have_names_and_the_rest_are_others() -> None:
    found = ops([*["big.x"] * 5, *["small.y"] * 2, "c", "d", "e", ""])
    groups = module_groups(found, most=2)
    assert groups.names == ("big", "small")
    assert groups.has_others
    assert groups.index(found[-1]) == 2
    assert groups.name_of(found[-1]) == OUTSIDE
