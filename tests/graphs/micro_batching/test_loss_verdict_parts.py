"""What is cut, shared and joined while a loss is judged, and what is said of a slice that fails."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from judged_losses import BATCH, ByHand, contrastive, judge, labels, net, x
from torch import Tensor, nn

from rlplace.errors import CaptureError, InvalidValue
from rlplace.graphs.capturing.capture import capture
from rlplace.graphs.micro_batching.loss_verdict import judge_loss
from rlplace.graphs.micro_batching.slices import plan_slices


def test_a_state_that_is_not_cut_is_said_to_need_its_dimension() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.GRU(5, 6, batch_first=True)

        def forward(self, x: Tensor, state: Tensor) -> Tensor:
            return self.lstm(x, state)[0]

    args = (x(BATCH, 3, 5), x(1, BATCH, 6))
    given = (Recurrent(), args, {}, lambda y: y.square().mean(), ())
    with pytest.raises(
        CaptureError, match=r"it cannot be cut so: a slice of the batch fails.*does not run on a slice.*`batch_dims`"
    ):
        judge_loss(*given, plan_slices(*given, 2))
    assert judge_loss(*given, plan_slices(*given, 2, (0, 1))).kind == "separate"


def test_a_model_that_fails_on_a_slice_has_no_loss_to_blame() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
    with pytest.raises(CaptureError, match=r"it cannot be cut so: a slice .* more than 1 value per channel"):
        judge(model, x(3, 5), lambda y: y.square().mean(), count=3)


def test_sparse_gradients_are_compared_as_others_are() -> None:
    found = judge(nn.Embedding(9, 4, sparse=True), labels(BATCH, 3), lambda y: y.square().mean())
    assert (found.kind, found.weights, found.is_checked) == ("separate", "mean", True)


class Masked(nn.Module):
    """Takes a mask of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * mask
        return y


@pytest.mark.parametrize("is_judged", [True, False])
def test_a_slice_that_fails_is_said_with_what_is_cut_and_shared(is_judged: bool) -> None:
    given = (Masked(), {"x": x(), "mask": torch.rand(BATCH, 1)}, lambda y: y.square().mean(), "sgd")
    told = re.escape("a slice of the batch fails, the whole batch runs (cut: x (8, 5) along dimension 0; shared by all")
    with pytest.raises(CaptureError, match=rf"{told}: mask \(8, 1\)\).*`batch_dims` \(--batch-dims\)") as caught:
        capture(*given, micro_batches=2, batch_dims={"mask": None}, loss="auto" if is_judged else "accumulated")
    assert "loss='accumulated'" not in str(caught.value)


def test_what_fails_whole_is_not_said_of_a_slice() -> None:
    inputs = {"x": x(), "mask": torch.rand(BATCH, 5)}
    with pytest.raises(CaptureError, match="raises by itself, in eager as well") as caught:
        capture(Masked(), inputs, lambda y: y.square().mean(), "sgd", micro_batches=2, loss="accumulated")
    assert "slice" not in str(caught.value)


def test_a_batch_in_another_dimension_is_the_first_guess_where_samples_are_mixed() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(5, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0]

    message = r"mixed by .*in rnn \(GRU\).*Hint: if the batch is another dimension, say it with `batch_dims`.*; else"
    with pytest.raises(CaptureError, match=rf"{message}.*Now cut: input 0 \(4, 2, 5\) along dimension 0"):
        judge(Recurrent(), x(4, 2, 5), lambda y: y.square().mean())
    assert capture(Recurrent(), x(4, 2, 5), lambda y: y.square().mean(), micro_batches=2, batch_dims=(1,)).num_ops


def test_flat_targets_are_shared_and_need_joined_outputs() -> None:
    model = nn.Linear(5, 2)
    verdict = judge(model, x(BATCH, 3, 5), lambda y, t: (y.flatten() - t).square().mean(), torch.randn(BATCH * 6))
    assert verdict.kind == "joined"
    assert "does not run on a slice" in verdict.why


def test_outputs_that_cannot_be_joined_are_said() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y @ y.t()

    with pytest.raises(
        CaptureError, match=r"mm\.default in the root \(Square\).*shape \(4, 4\) for 4 samples and \(3, 3\) for 3"
    ):
        judge(Square(), x(), lambda y: y.square().mean())


def test_an_output_that_all_slices_share_is_joined_with_the_others() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = net(), nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.body(x), self.scale

    verdict = judge(Scaled(), x(), lambda output: contrastive(output[0] * output[1].exp()))
    assert verdict.kind == "joined"


def test_inference_joins_its_outputs() -> None:
    verdict = judge(net(), x(), None)
    assert (verdict.kind, verdict.is_checked) == ("joined", True)
    with pytest.raises(CaptureError, match=r"mixed by aten\.mean\.dim in 0 \(ByHand\)"):
        judge(nn.Sequential(ByHand(), net()), x(), None)
    with pytest.raises(InvalidValue, match="loss is 'separate', expected 'auto' or 'joined' without a `loss_fn`"):
        judge(net(), x(), None, asked="separate")


def test_inference_is_not_told_to_accumulate_gradients() -> None:
    class Summed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum()

    with pytest.raises(CaptureError, match=r"aten.sum.default .* else micro_batches=1 keeps the batch whole\."):
        judge(Summed(5, 4), x(), None)


def test_keyword_arguments_and_other_inputs_are_given_as_they_are() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 6)

        def forward(self, x: Tensor, *, mask: Tensor, times: float, flag: bool = False) -> dict[str, Any]:
            assert flag
            return {"y": self.layer(x) * mask * times, "none": None}

    inputs = {"mask": torch.rand(BATCH, 1), "x": x(), "times": 2.0, "flag": True}
    verdict = judge(Named(), inputs, lambda output: output["y"].square().mean())
    assert (verdict.kind, verdict.is_checked) == ("separate", True)
