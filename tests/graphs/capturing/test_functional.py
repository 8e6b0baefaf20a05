"""Writes taken out of a graph: every kind of view and op that they go through gives what eager PyTorch gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_models import Function, Model, assert_equals_eager, mean_square, random
from torch import Tensor, nn

from rlplace.errors import CaptureError
from rlplace.graphs import capture, run_graph
from rlplace.graphs.capturing import functional
from rlplace.graphs.program import Call


def through_slices(y: Tensor) -> Tensor:
    z = y * 2
    z[:, 1:3].add_(1)
    z[0].mul_(3)
    return z + y


def through_a_chain(y: Tensor) -> Tensor:
    z = y.clone()
    z.view(-1)[2:9].view(7, 1).transpose(0, 1).add_(torch.arange(7, dtype=y.dtype))
    z.t().unsqueeze(0).permute(2, 0, 1)[1].mul_(5)
    return z


def through_pieces(y: Tensor) -> Tensor:
    z = y.detach().clone()
    first, second = z.split((2, 4), dim=1)
    second.mul_(2)
    first.add_(1)
    z.unbind(0)[2].neg_()
    third = z.unbind(1)
    third[-1].zero_()
    return y * z + torch.cat((second, first), 1)


def through_a_diagonal(y: Tensor) -> Tensor:
    z = y.clone()
    z.diagonal().fill_(7)
    return z @ z.t()


def read_before_and_after(y: Tensor) -> Tensor:
    z = y.detach() * 1
    view, before = z[1], z.sum()
    z.exp_()
    z[0] += view
    return y * view.clone() * before + z.relu_()


def of_a_result(y: Tensor) -> Tensor:
    z = y.clone().add_(1).mul_(2)
    z.t().add_(1).neg_()[2:4].zero_()
    return z


def copies(y: Tensor) -> Tensor:
    z, w = torch.zeros_like(y), torch.empty(3, 6, dtype=y.dtype)
    z.copy_(y)
    w.copy_(y[0])
    z[:, 0].copy_(y[:, 1])
    y = y * 2
    return z * w + y


def masks(y: Tensor) -> Tensor:
    z = y.clone()
    z.masked_fill_(z > 0, 3.0)
    z[[0, 2], [1, 1]] = 5.0
    z.clamp_(max=4.0).index_fill_(1, torch.tensor([3]), -1.0)
    z.scatter_(0, torch.tensor([2, 0, 1])[:, None].expand(3, 6), y)
    return z.cumsum_(0)


def through_windows(y: Tensor) -> Tensor:
    z = y.clone()
    z.unfold(1, 2, 2)[:, 1].add_(1)
    return z


def through_windows_with_gaps(y: Tensor) -> Tensor:
    z = y.clone()
    z.unfold(1, 2, 3)[:, :, 0] = 7.0  # columns 0 and 3; 2 and 5 are in no window
    return z


def through_overlapping_windows(y: Tensor) -> Tensor:
    z = y.clone()
    z.unfold(1, 4, 1)[:, ::2] = 7.0  # columns 0 to 5, some in two windows
    z.unfold(1, 3, 1)[:, 1].mul_(3)  # columns 1 to 3, which other windows show too
    return z * y


def through_patches(y: Tensor) -> Tensor:
    z = y.clone()
    patches = z.unfold(0, 2, 2).unfold(1, 2, 3)  # of rows 0 and 1, and of columns 0, 1, 3 and 4
    patches[0, 1].mul_(5)
    return z + patches.sum()


def through_windows_of_a_part(y: Tensor) -> Tensor:
    z = y.t().clone(memory_format=torch.preserve_format)
    z[1:].unfold(0, 2, 3).transpose(1, 2)[1].copy_(y[:2, :3])
    z.t().unfold(1, 3, 3)[0, 0, 1:2].add_(y[0, 1])
    return z


def through_strides(y: Tensor) -> Tensor:
    z = y.clone()
    z.as_strided((3, 2), (6, 3), 1).mul_(2)
    return z


COVERED = [
    through_slices, through_a_chain, through_pieces, through_a_diagonal, read_before_and_after, of_a_result, copies,
    masks, through_windows, through_windows_with_gaps, through_overlapping_windows, through_patches,
    through_windows_of_a_part,
]  # fmt: skip


def check(function: Callable[[Tensor], Tensor]) -> None:
    graph = assert_equals_eager(Function(function), random(3, 4), mean_square)
    for call in graph.program.calls.values():
        assert not isinstance(call, Call) or not call.target._schema.is_mutable


@pytest.mark.parametrize("function", COVERED)
def test_writes_are_settled_in_the_graph(function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "_traced_again", lambda _: pytest.fail("traced twice"))
    check(function)


def test_writes_that_the_rules_do_not_cover_are_settled_by_a_second_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    again = functional._traced_again
    monkeypatch.setattr(functional, "_traced_again", lambda module: seen.append(module) or again(module))
    check(through_strides)
    assert len(seen) == 1


def test_windows_beside_what_a_second_trace_settles_are_refused() -> None:
    with pytest.raises(CaptureError, match="unfold"):
        capture(Function(lambda y: through_strides(y) + through_windows_with_gaps(y)), random(3, 4))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", ["train", "eval", "no statistics", "twice"])
def test_batch_norm_either_way(kind: str, again: bool) -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        y = model.norm(x)
        if again:
            y = y.clone()
            y.as_strided((6, 2), (4, 2), 1).add_(1)
        return model.norm(y) if kind == "twice" else y

    norm = nn.BatchNorm1d(4, track_running_stats=kind != "no statistics", dtype=torch.float64)
    assert_equals_eager(Model(forward, norm=norm).train(kind != "eval"), random(6, 4), lambda y: (y**3).sum())


def test_a_swap_of_buffers_reads_both_before_it_writes_either() -> None:
    def swap(model: nn.Module, x: Tensor) -> Tensor:
        model.one, model.other = model.other, model.one
        return x + model.one

    model = Model(swap, one=torch.tensor([1.0, 2.0]), other=torch.tensor([3.0, 4.0]))
    step = run_graph(capture(model, torch.zeros(2)))
    assert step.result.tolist() == [3.0, 4.0]
    assert step.state["one"].tolist() == [3.0, 4.0]
    assert step.state["other"].tolist() == [1.0, 2.0]


class Average(nn.Module):
    """Keeps a running average that it reads, with a gradient, before it replaces it."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.in_place = in_place
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.mean
        if self.in_place:
            self.mean.data.mul_(2.0)
        self.mean = self.mean * 0.9 + y.mean(0) * 0.1
        return y


def test_a_buffer_is_replaced_after_the_backward_has_read_it() -> None:
    assert_equals_eager(Average(), random(3, 4, dtype=torch.float32), mean_square)


def test_of_two_changes_of_a_buffer_the_last_one_stays() -> None:
    model, x = Average(in_place=True), random(3, 4, dtype=torch.float32)
    graph = capture(model, x)
    assert graph.targets.count("aten.copy_.default") == 1
    step, expected = run_graph(graph), model(x)
    torch.testing.assert_close(step.result, expected.detach())
    torch.testing.assert_close(step.state["mean"], model.mean.detach())


def test_an_old_value_of_a_buffer_that_is_returned_stays_old() -> None:
    def counts(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        old = model.count
        model.count = model.count + 1
        return x * model.count, old, old[1:]

    step = run_graph(capture(Model(counts, count=torch.arange(4.0)), torch.ones(4)))
    assert [value.tolist() for value in step.result] == [[1, 2, 3, 4], [0, 1, 2, 3], [1, 2, 3]]
    assert step.state["count"].tolist() == [1, 2, 3, 4]
