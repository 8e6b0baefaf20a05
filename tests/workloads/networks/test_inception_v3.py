from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from rlplace.workloads import InceptionV3Config
from rlplace.workloads.networks.inception_v3 import (
    AUX_WEIGHT,
    LABEL_SMOOTHING,
    InceptionV3,
    SmoothedCrossEntropy,
    inception_a,
    inception_b,
    inception_c,
    inception_d,
    inception_e,
)

# With 1000 classes and the auxiliary head, as published with every release of the network.
PUBLISHED_PARAMETERS = 27_161_264


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    config = InceptionV3Config(classes=10)
    model = InceptionV3(config)
    images = torch.randn(config.batch, 3, config.image_size, config.image_size)
    return model, images, torch.tensor([7])


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def conv(in_channels, out_channels, kernel):
    """Parameters of a convolution over `kernel` pixels without bias, and of its normalisation."""
    return in_channels * out_channels * kernel + 2 * out_channels


def test_parameter_count_is_the_published_one_also_with_other_classes(small):
    with FakeTensorMode():
        assert count(InceptionV3(InceptionV3Config())) == PUBLISHED_PARAMETERS
    # Only the two classifiers depend on the classes: a weight per feature and a bias for each.
    assert count(small[0]) == PUBLISHED_PARAMETERS - (2048 + 1 + 768 + 1) * (1000 - 10)


def test_block_parameters_and_channels():
    blocks = {
        inception_a(192, 32): (
            256,
            conv(192, 64, 1)
            + (conv(192, 48, 1) + conv(48, 64, 25))
            + (conv(192, 64, 1) + conv(64, 96, 9) + conv(96, 96, 9))
            + conv(192, 32, 1),
        ),
        inception_b(288): (768, conv(288, 384, 9) + (conv(288, 64, 1) + conv(64, 96, 9) + conv(96, 96, 9))),
        inception_c(768, 160): (
            768,
            conv(768, 192, 1)
            + (conv(768, 160, 1) + conv(160, 160, 7) + conv(160, 192, 7))
            + (conv(768, 160, 1) + 3 * conv(160, 160, 7) + conv(160, 192, 7))
            + conv(768, 192, 1),
        ),
        inception_d(768): (
            1280,
            (conv(768, 192, 1) + conv(192, 320, 9)) + (conv(768, 192, 1) + 2 * conv(192, 192, 7) + conv(192, 192, 9)),
        ),
        inception_e(1280): (
            2048,
            conv(1280, 320, 1)
            + (conv(1280, 384, 1) + 2 * conv(384, 384, 3))
            + (conv(1280, 448, 1) + conv(448, 384, 9) + 2 * conv(384, 384, 3))
            + conv(1280, 192, 1),
        ),
    }
    for block, (channels, parameters) in blocks.items():
        in_channels = next(m for m in block.modules() if isinstance(m, nn.Conv2d)).in_channels
        assert block(torch.zeros(2, in_channels, 5, 5)).shape[1] == channels
        assert count(block) == parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("image_size", "batch"), [(75, 2), (107, 1), (149, 1), (149, 4), (299, 1), (299, 32), (380, 2)]
)
def test_every_allowed_size_runs(image_size, batch):
    config = InceptionV3Config(batch=batch, image_size=image_size, classes=5)
    with FakeTensorMode():
        model = InceptionV3(config)
        images = torch.empty(batch, 3, image_size, image_size)
        output = model(images, torch.zeros(batch, dtype=torch.int64))
        assert output.logits.shape == output.aux_logits.shape == (batch, 5)
        assert output.loss.shape == ()
        maps = model.inception_b(model.inception_a3(model.inception_a2(model.inception_a1(model.stem(images)))))
        assert maps.shape == (batch, 768, config.feature_map, config.feature_map)


@pytest.mark.parametrize(
    ("image_size", "batch", "expected"),
    [(299, 32, nn.AvgPool2d), (299, 1, nn.AdaptiveAvgPool2d), (149, 4, nn.AdaptiveAvgPool2d)],
)
def test_auxiliary_head_pools_adaptively_only_where_it_must(image_size, batch, expected):
    with FakeTensorMode():
        model = InceptionV3(InceptionV3Config(batch=batch, image_size=image_size))
    assert isinstance(model.aux_head.pool, expected)


def test_every_convolution_is_normalised(small):
    modules = list(small[0].modules())
    convolutions = [m for m in modules if isinstance(m, nn.Conv2d)]
    norms = [m for m in modules if isinstance(m, nn.BatchNorm2d)]
    assert len(convolutions) == len(norms) == 96
    assert all(m.bias is None for m in convolutions)


def test_gradient_reaches_every_parameter(small):
    model, images, labels = small
    loss = model(images, labels).loss
    assert loss.isfinite()
    for (name, _), gradient in zip(model.named_parameters(), torch.autograd.grad(loss, list(model.parameters()))):
        assert gradient.isfinite().all(), name
        assert gradient.abs().sum() > 0, name


def test_smallest_image_trains(small):
    torch.manual_seed(0)
    model = InceptionV3(InceptionV3Config(batch=2, image_size=75, classes=3))
    loss = model(torch.randn(2, 3, 75, 75), torch.tensor([0, 2])).loss
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, list(model.parameters())))


def test_smoothed_cross_entropy_is_torchs():
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 7), torch.tensor([0, 3, 6, 3])
    expected = nn.CrossEntropyLoss(label_smoothing=LABEL_SMOOTHING)(logits, labels)
    torch.testing.assert_close(SmoothedCrossEntropy()(logits, labels), expected)


def test_loss_weighs_both_heads_and_is_deterministic_without_dropout(small):
    model, images, labels = small
    cross_entropy = nn.CrossEntropyLoss(label_smoothing=LABEL_SMOOTHING)
    output = model(images, labels)
    expected = cross_entropy(output.logits, labels) + AUX_WEIGHT * cross_entropy(output.aux_logits, labels)
    torch.testing.assert_close(output.loss, expected)
    assert model(images).loss is None
    assert torch.equal(model(images, labels).loss, model(images, labels).loss)


def test_dropout_acts_before_the_classifier():
    torch.manual_seed(0)
    model = InceptionV3(InceptionV3Config(image_size=107, classes=3, dropout=0.5))
    images = torch.randn(1, 3, 107, 107)
    first, second = model(images), model(images)
    assert not torch.equal(first.logits, second.logits)
    assert torch.equal(first.aux_logits, second.aux_logits)


@pytest.mark.slow
def test_captured_step_changes_nothing_in_place():
    config = InceptionV3Config(image_size=107, classes=3)
    with FakeTensorMode():
        model = InceptionV3(config)
        inputs = (torch.randn(1, 3, 107, 107), torch.zeros(1, dtype=torch.int64))
        graph = make_fx(lambda *args: torch.autograd.grad(model(*args).loss, list(model.parameters())))(*inputs).graph
    targets = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert targets.count(torch.ops.aten.convolution.default) == 96
    assert not [target for target in targets if target._schema.is_mutable]
