"""Which loss of micro-batches is that of the batch: every verdict on a small net, and what a check leaves as it was."""

from __future__ import annotations

import contextlib
import copy
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from judged_losses import BATCH, CLASSES, ByHand, Labelled, contrastive, judge, labels, mean_loss, net, x
from small_models import Model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from rlplace.errors import CaptureError, InvalidValue, UnknownName
from rlplace.graphs import capture
from rlplace.graphs.micro_batching.loss_verdict import judge_loss
from rlplace.graphs.micro_batching.slices import plan_slices

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


def averages(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return model.linear(x - model.average.clone())


@pytest.mark.parametrize("asked", ["auto", "joined", "separate"])
def test_a_buffer_that_forward_changes_is_the_reason_and_no_other_loss_is_advised(asked: str) -> None:
    model = Model(averages, linear=nn.Linear(5, CLASSES), average=torch.zeros(5))
    with pytest.raises(CaptureError, match=r"changes 'average'.*micro_batches=1") as refused:
        judge(model, x(), nn.CrossEntropyLoss(), labels(), asked=asked)
    assert "loss=" not in str(refused.value)


def balanced() -> nn.Module:
    """Outputs, and a loss of its own that mixes the samples whose first number is not zero."""
    parts = {"linear": nn.Linear(5, CLASSES), "scale": nn.Parameter(torch.ones(()))}
    return Model(lambda model, x: (model.linear(x), (model.scale * x[:, 0]).mean().square()), **parts)


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
        judge(balanced(), given, loss_fn, targets)
    assert ("loss='separate'" in str(refused.value)) is not is_mixed
    with pytest.raises(CaptureError) if is_mixed else contextlib.nullcontext():
        capture(balanced(), given, loss_fn, targets=targets, micro_batches=2, loss="separate")


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
    squeezed = Model(lambda model, x: model.layer(x).squeeze(), layer=nn.Linear(5, 1))
    verdict = judge(squeezed, x(), nn.BCEWithLogitsLoss(), torch.rand(BATCH))
    assert (verdict.kind, verdict.weights, verdict.is_checked) == ("separate", "mean", True)


def test_a_state_that_is_not_cut_is_said_to_need_its_dimension() -> None:
    model = Model(lambda model, x, state: model.lstm(x, state)[0], lstm=nn.GRU(5, 6, batch_first=True))
    given = (model, (x(BATCH, 3, 5), x(1, BATCH, 6)), {}, lambda y: y.square().mean(), ())
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


def masked_layer() -> nn.Module:
    return Model(lambda model, x, mask: model.layer(x) * mask, layer=nn.Linear(5, 6))


@pytest.mark.parametrize("is_judged", [True, False])
def test_a_slice_that_fails_is_said_with_what_is_cut_and_shared(is_judged: bool) -> None:
    given = (masked_layer(), {"x": x(), "mask": torch.rand(BATCH, 1)}, lambda y: y.square().mean(), "sgd")
    told = re.escape("a slice of the batch fails, the whole batch runs (cut: x (8, 5) along dimension 0; shared by all")
    with pytest.raises(CaptureError, match=rf"{told}: mask \(8, 1\)\).*`batch_dims` \(--batch-dims\)") as caught:
        capture(*given, micro_batches=2, batch_dims={"mask": None}, loss="auto" if is_judged else "accumulated")
    assert "loss='accumulated'" not in str(caught.value)


def test_what_fails_whole_is_not_said_of_a_slice() -> None:
    inputs = {"x": x(), "mask": torch.rand(BATCH, 5)}
    with pytest.raises(CaptureError, match="raises by itself, in eager as well") as caught:
        capture(masked_layer(), inputs, lambda y: y.square().mean(), "sgd", micro_batches=2, loss="accumulated")
    assert "slice" not in str(caught.value)


def test_a_batch_in_another_dimension_is_the_first_guess_where_samples_are_mixed() -> None:
    model = Model(lambda model, x: model.rnn(x)[0], rnn=nn.GRU(5, 6))
    message = r"mixed by .*in rnn \(GRU\).*Hint: if the batch is another dimension, say it with `batch_dims`.*; else"
    with pytest.raises(CaptureError, match=rf"{message}.*Now cut: input 0 \(4, 2, 5\) along dimension 0"):
        judge(model, x(4, 2, 5), lambda y: y.square().mean())
    assert capture(model, x(4, 2, 5), lambda y: y.square().mean(), micro_batches=2, batch_dims=(1,)).num_ops


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
    parts = {"body": net(), "scale": nn.Parameter(torch.tensor(0.5))}
    scaled = Model(lambda model, x: (model.body(x), model.scale), **parts)
    verdict = judge(scaled, x(), lambda output: contrastive(output[0] * output[1].exp()))
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
    def named(model: nn.Module, x: Tensor, *, mask: Tensor, times: float, flag: bool = False) -> dict[str, Any]:
        assert flag
        return {"y": model.layer(x) * mask * times, "none": None}

    inputs = {"mask": torch.rand(BATCH, 1), "x": x(), "times": 2.0, "flag": True}
    verdict = judge(Model(named, layer=nn.Linear(5, 6)), inputs, lambda output: output["y"].square().mean())
    assert (verdict.kind, verdict.is_checked) == ("separate", True)


def test_one_micro_batch_is_not_checked() -> None:
    assert judge(nn.Sequential(ByHand(), net()), x(), lambda y: y.square().mean(), count=1).kind == "separate"


def test_what_has_no_values_is_unchecked() -> None:
    with FakeTensorMode():
        model, inputs = net(), torch.randn(BATCH, 5)
    verdict = judge(model, inputs, lambda y: y.square().sum())
    assert (verdict.kind, verdict.weights, verdict.is_checked) == ("separate", "mean", False)
    assert verdict.why == "unchecked: its tensors are fake, without values; a mean over samples is assumed"
    assert judge(model, inputs, lambda y: y.square().sum(), asked="joined").kind == "joined"
    assert judge(model, inputs, None).kind == "joined"
    assert judge(net().to("meta"), x().to("meta"), lambda y: y.square().sum()).is_checked is False


def test_what_takes_too_long_is_unchecked() -> None:
    verdict = judge(net(), x(), lambda y: y.square().mean(), most_work=0.0)
    assert (verdict.kind, verdict.is_checked) == ("separate", False)
    assert "longer than 0 s" in verdict.why


def test_what_cannot_be_computed_is_unchecked() -> None:
    fixed = Model(lambda model, x: model.layer(x).view(BATCH, 6), layer=nn.Linear(5, 6))
    told = r"it cannot be cut so: a slice of the batch fails.*does not run on .*RuntimeError: shape '\[8, 6\]'"
    with pytest.raises(CaptureError, match=told):
        judge(fixed, x(), lambda y: y.square().mean())
    verdict = judge(net(), x(), lambda y: (y - y).log().mean())
    assert "not finite for 4 samples" in verdict.why


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean 'separate'"):
        judge(net(), x(), lambda y: y.square().mean(), asked="separated")


class Stateful(nn.Module):
    """Has all that a check could leave changed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, CLASSES))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(CLASSES))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.steps += 1
        self.mean = self.mean * 0.9
        _ = np.random.random(), random.random(), torch.rand(2)
        return self.body(x) / self.steps


def test_the_model_and_everything_random_stay_as_they_are() -> None:
    model, loss_fn = Stateful().train(), nn.CrossEntropyLoss()
    model.body[0].eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    inputs, targets = x().requires_grad_(), labels()
    before = copy.deepcopy(model)
    given = dict((*model.named_parameters(), *model.named_buffers()))
    versions = {name: tensor._version for name, tensor in given.items()}
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    assert judge(model, inputs, loss_fn, targets).kind == "joined"

    assert torch.equal(torch.get_rng_state(), state[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state[1:]
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()
    assert (model.calls, [m.training for m in model.modules()]) == (0, [m.training for m in before.modules()])
    now = dict((*model.named_parameters(), *model.named_buffers()))
    assert all(now[name] is tensor and tensor._version == versions[name] for name, tensor in given.items())
    for name, tensor in (*before.named_parameters(), *before.named_buffers()):
        assert torch.equal(tensor, given[name]), name
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in model.parameters())
    assert inputs.grad is None


def test_hooks_that_change_gradients_are_part_of_the_step() -> None:
    """Clipped gradients of slices do not add up to the clipped gradient of the batch."""
    model = net()
    model[0].weight.register_hook(lambda gradient: gradient / gradient.norm())
    with pytest.raises(CaptureError, match="neither their sum nor their mean"):
        judge(model, x(), lambda y: y.square().mean(), asked="separate")
