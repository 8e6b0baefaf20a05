"""Which loss of micro-batches is that of the batch: every verdict on a small net."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from judged_losses import BATCH, CLASSES, ByHand, Labelled, contrastive, judge, labels, mean_loss, net, x
from torch import Tensor, nn
from torch.nn import functional

from rlplace.errors import CaptureError, InvalidValue
from rlplace.graphs import capture

SEPARATE: dict[str, tuple[Callable[..., Tensor], Any, str]] = {
    "mean square": (lambda y, t: functional.mse_loss(y, t), x(BATCH, CLASSES), "mean"),
    "sum": (lambda y: y.square().sum(), None, "sum"),
    "sum of a cross-entropy": (nn.CrossEntropyLoss(reduction="sum"), labels(), "sum"),
    "sum over classes, mean over samples": (
        lambda y, t: functional.cross_entropy(y, t, reduction="none").mean(),
        labels(),
        "mean",
    ),
    "binary cross-entropy": (nn.BCEWithLogitsLoss(), torch.rand(BATCH, CLASSES), "mean"),
    "probabilities as labels": (nn.CrossEntropyLoss(), torch.rand(BATCH, CLASSES).softmax(1), "mean"),
}


@pytest.mark.parametrize("name", SEPARATE)
@pytest.mark.parametrize("count", [2, 3, 8])
def test_losses_that_slices_make_are_separate(name: str, count: int) -> None:
    loss_fn, targets, weights = SEPARATE[name]
    verdict = judge(net(), x(), loss_fn, targets, count)
    assert (verdict.kind, verdict.weights, verdict.is_checked) == ("separate", weights, True)
    assert judge(net(), x(), loss_fn, targets, count, asked="separate") == verdict


JOINED: dict[str, tuple[Callable[..., Tensor], Any, str]] = {
    "cross-entropy": (nn.CrossEntropyLoss(), labels(), r"while no label is ignored \(ignore_index=-100\)"),
    "ignored class": (nn.CrossEntropyLoss(ignore_index=0), labels(), r"no label is ignored \(ignore_index=0\)|neither"),
    "class weights": (
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0])),
        torch.ones(BATCH, dtype=torch.long),
        "divides by the weights of the classes",
    ),
    "contrastive": (contrastive, None, "neither their sum nor their mean"),
    "root": (lambda y: y.square().mean().sqrt(), None, "neither their sum nor their mean"),
}


@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("count", [2, 3])
def test_losses_of_the_whole_batch_alone_are_joined(name: str, count: int) -> None:
    loss_fn, targets, why = JOINED[name]
    verdict = judge(net(), x(), loss_fn, targets, count)
    assert (verdict.kind, verdict.is_checked) == ("joined", True)
    assert re.search(why, verdict.why)
    assert judge(net(), x(), loss_fn, targets, count, asked="joined").kind == "joined"


@pytest.mark.parametrize("name", ["class weights", "contrastive", "root"])
def test_separate_losses_that_are_wrong_are_refused_for_joined_ones(name: str) -> None:
    loss_fn, targets, _ = JOINED[name]
    with pytest.raises(InvalidValue, match=r"loss is 'separate', expected 'joined'\. As separate losses: "):
        judge(net(), x(), loss_fn, targets, asked="separate")


def test_separate_losses_of_labels_that_are_never_padded_can_be_asked_for() -> None:
    """The mean over labels that count is the mean over samples as long as all count."""
    verdict = judge(net(), x(), nn.CrossEntropyLoss(), labels(), asked="separate")
    assert (verdict.kind, verdict.weights, verdict.is_checked) == ("separate", "mean", True)
    assert "as long as no label is ignored" in verdict.why
    padded = torch.tensor([0, -100, -100, 1, 2, 3, 1, 0])
    with pytest.raises(InvalidValue, match="loss is 'separate', expected 'joined'"):
        judge(net(), x(), nn.CrossEntropyLoss(), padded, asked="separate")


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, CLASSES)
        self.register_buffer("average", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        y: Tensor = self.linear(x - self.average.clone())
        return y


@pytest.mark.parametrize("asked", ["auto", "joined", "separate"])
def test_a_buffer_that_forward_changes_is_the_reason_and_no_other_loss_is_advised(asked: str) -> None:
    with pytest.raises(CaptureError, match=r"changes 'average'.*micro_batches=1") as refused:
        judge(Averages(), x(), nn.CrossEntropyLoss(), labels(), asked=asked)
    assert "loss=" not in str(refused.value)


class Balanced(nn.Module):
    """Outputs, and a loss of its own that mixes the samples whose first number is not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(5, CLASSES), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), (self.scale * x[:, 0]).mean().square()


@pytest.mark.parametrize("is_mixed", [False, True])
def test_separate_losses_are_advised_where_they_are_right_for_the_whole_batch(is_mixed: bool) -> None:
    given = x(16, 5)
    given[:, 0] = 0
    if is_mixed:
        given[5, 0], given[9, 0] = 1, 2  # no sample that a check of a few takes
    targets = torch.arange(16) % CLASSES

    def loss_fn(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        return functional.cross_entropy(output[0], labels) + output[1]

    with pytest.raises(CaptureError, match="neither a loss each") as refused:
        judge(Balanced(), given, loss_fn, targets)
    assert ("loss='separate'" in str(refused.value)) is not is_mixed
    with pytest.raises(CaptureError) if is_mixed else contextlib.nullcontext():
        capture(Balanced(), given, loss_fn, targets=targets, micro_batches=2, loss="separate")


def test_tokens_are_padded_too() -> None:
    model = nn.Sequential(nn.Embedding(CLASSES, 6), nn.Linear(6, CLASSES))
    tokens = labels(BATCH, 5)

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    assert judge(model, tokens, loss_fn, tokens).kind == "joined"
    assert (
        judge(model, tokens, lambda y, t: functional.cross_entropy(y.mT, t, reduction="sum"), tokens).weights == "sum"
    )


def test_a_padded_label_may_count_for_nothing_and_slices_still_agree() -> None:
    verdict = judge(net(), x(), lambda y, t: functional.cross_entropy(y, t, reduction="none").mean(), labels())
    assert verdict.kind == "separate"
    assert "label" not in verdict.why


class Shifted(nn.Module):
    """Predicts its input's next token, whose padding is class 0: the labels are the input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(CLASSES, 6), nn.Linear(6, CLASSES))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.body(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)


def test_labels_inside_of_the_model_cannot_be_joined() -> None:
    inputs = {"x": x(), "labels": labels()}
    with pytest.raises(
        CaptureError, match=r"neither a loss each \(.*ignore_index=-100.*\) nor one together \(.*scalar"
    ):
        judge(Labelled(functional.cross_entropy), inputs, mean_loss)
    assert judge(Labelled(functional.cross_entropy), inputs, mean_loss, asked="separate").weights == "mean"
    verdict = judge(Labelled(nn.CrossEntropyLoss(reduction="sum")), inputs, mean_loss)
    assert (verdict.kind, verdict.weights) == ("separate", "sum")
    tokens = torch.tensor([[1, 2, 3, 1], [2, 3, 1, 2], [3, 1, 2, 2], [1, 1, 3, 2]])
    with pytest.raises(CaptureError, match=r"ignore_index=0.*`loss='accumulated'`"):
        judge(Shifted(), tokens, lambda loss: loss)
    with pytest.raises(InvalidValue, match=r"loss is 'joined', expected 'separate'.*already a scalar"):
        judge(Shifted(), tokens, lambda loss: loss, asked="joined")


def test_a_loss_inside_of_the_model_that_mixes_samples_is_refused_by_name() -> None:
    inputs = {"x": x(), "labels": labels()}
    message = r"mixed by aten\.mm\.default in the root \(Labelled\).*Hint: return the model's outputs"
    with pytest.raises(CaptureError, match=message) as caught:
        judge(Labelled(lambda logits, _: contrastive(logits)), inputs, mean_loss)
    assert caught.value.op == "aten.mm.default"


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("asked", ["auto", "separate", "joined"])
def test_a_model_that_mixes_samples_is_refused_by_name(asked: str, count: int) -> None:
    model = nn.Sequential(nn.Linear(5, 6), ByHand(), nn.Linear(6, 2))
    with pytest.raises(
        CaptureError, match=r"mixed by aten\.mean\.dim in 1 \(ByHand\)\. .*`loss='accumulated'`"
    ) as caught:
        judge(model, x(), lambda y: y.square().sum(), count=count, asked=asked)
    assert caught.value.op == "aten.mean.dim"
    assert judge(model, x(), lambda y: y.square().sum(), count=count, asked="accumulated").kind == "accumulated"


def test_attention_over_the_batch_mixes_and_over_tokens_does_not() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    assert judge(layer, x(BATCH, 3, 8), lambda y: y.square().mean()).kind == "separate"
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=False)
    with pytest.raises(CaptureError, match=r"mixed by aten\..* in self_attn \(MultiheadAttention\)"):
        judge(layer, x(BATCH, 3, 8), lambda y: y.square().mean())


def test_alike_samples_do_not_hide_what_mixes_them() -> None:
    for samples in (torch.ones(BATCH, 5), torch.zeros(BATCH, 5)):
        with pytest.raises(CaptureError, match="ByHand"):
            judge(nn.Sequential(ByHand(), net()), samples, lambda y: y.square().mean())


def test_batch_norm_is_compared_on_fixed_statistics() -> None:
    for norm in (nn.BatchNorm1d(6), nn.BatchNorm1d(6, track_running_stats=False), nn.BatchNorm1d(6, momentum=None)):
        verdict = judge(nn.Sequential(nn.Linear(5, 6), norm, nn.Linear(6, 2)), x(), lambda y: y.square().mean())
        assert (verdict.kind, verdict.normalises_batch) == ("separate", True)
        assert "statistics of each micro-batch" in verdict.why
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).eval()
    assert not judge(model, x(), lambda y: y.square().mean()).normalises_batch
    with pytest.raises(CaptureError, match="ByHand"):
        judge(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), ByHand()), x(), lambda y: y.square().mean())


def test_instances_are_no_batch() -> None:
    verdict = judge(nn.InstanceNorm1d(3, affine=True), x(BATCH, 3, 7), lambda y: y.square().mean())
    assert (verdict.kind, verdict.normalises_batch) == ("separate", False)


class Noisy(nn.Module):
    """Draws in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, dropout=0.5, batch_first=True)
        self.alpha = nn.AlphaDropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x + torch.randn_like(x))
        y = functional.dropout2d(self.alpha(y)[..., None], 0.2, training=True)[..., 0]
        y = y + torch.rand(y.shape[-1]) + torch.bernoulli(torch.sigmoid(y)) + torch.randint(3, y.shape)
        return functional.rrelu(functional.dropout(y, 0.1), training=True) + functional.gumbel_softmax(y, dim=-1)


def test_what_is_random_is_the_same_for_all() -> None:
    assert judge(Noisy(), x(BATCH, 3, 5), lambda y: y.square().mean()).kind == "separate"


def test_samples_in_random_order_are_mixed() -> None:
    class Shuffled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.5 * x[torch.randperm(len(x))]

    with pytest.raises(CaptureError, match=r"aten\.index\.Tensor in 1 \(Shuffled\)"):
        judge(nn.Sequential(nn.Linear(5, 6), Shuffled()), x(), lambda y: y.square().mean())


def test_casts_and_attributes_stay_in_double() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(5, 6).bfloat16(), torch.tensor(2.0)
            self.frequencies = [torch.ones(6), {"more": torch.ones(6)}]

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x.to(torch.bfloat16)).float() * self.scale * torch.ones(6)
            return torch.softmax(y, -1, dtype=torch.float32) * self.frequencies[0] + self.frequencies[1]["more"]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        verdict = judge(Mixed(), x(), lambda y: y.square().mean())
    assert (verdict.kind, verdict.is_checked) == ("separate", True)


def test_what_runs_in_single_precision_alone_is_checked_in_it() -> None:
    class Single(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype is not torch.float32:
                raise TypeError("float32 alone")
            return x

    verdict = judge(nn.Sequential(nn.Linear(5, 6), Single()), x(), lambda y: y.square().mean())
    assert (verdict.kind, verdict.is_checked) == ("separate", True)
    with pytest.raises(CaptureError, match="ByHand"):
        judge(nn.Sequential(nn.Linear(5, 6), Single(), ByHand()), x(), lambda y: y.square().mean())


def test_a_squeeze_that_fails_on_one_sample_does_not_refuse_slices_of_two() -> None:
    class Squeezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).squeeze()

    verdict = judge(Squeezed(), x(), nn.BCEWithLogitsLoss(), torch.rand(BATCH))
    assert (verdict.kind, verdict.weights, verdict.is_checked) == ("separate", "mean", True)
