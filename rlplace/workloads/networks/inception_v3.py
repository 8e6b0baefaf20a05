"""`InceptionV3`: the image classifier of Szegedy et al. 2015 (arXiv:1512.00567), with its auxiliary head.

Sections and figures below are the paper's. Details that it leaves open (the widths inside the blocks, the layers of the
stem) are as in the model that its authors released, whose published count of 27,161,264 parameters this one matches.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss

from rlplace.workloads.catalog import Parts, loss_of
from rlplace.workloads.configs import InceptionV3Config

AUX_WEIGHT = 0.4
"""Weight of the auxiliary head's loss in the released training code (`inception_model.py` of tensorflow/models)."""
LABEL_SMOOTHING = 0.1
"""Share of the target spread over all classes (section 7), on both heads as in the released training code."""

Kernel = int | tuple[int, int]


class InceptionV3Output(NamedTuple):
    """The result of a forward pass."""

    logits: Tensor
    """(B, classes)."""
    aux_logits: Tensor
    """(B, classes), of the auxiliary head."""
    loss: Tensor | None
    """Scalar, where labels were given."""


class InceptionV3(nn.Module):
    """Inception v3 for `config`: stem, blocks A to E, and two heads (table 1)."""

    def __init__(self, config: InceptionV3Config) -> None:
        super().__init__()
        self.stem = stem()
        self.inception_a1 = inception_a(192, pool_channels=32)
        self.inception_a2 = inception_a(256, pool_channels=64)
        self.inception_a3 = inception_a(288, pool_channels=64)
        self.inception_b = inception_b(288)
        self.inception_c1 = inception_c(768, inner=128)
        self.inception_c2 = inception_c(768, inner=160)
        self.inception_c3 = inception_c(768, inner=160)
        self.inception_c4 = inception_c(768, inner=192)
        self.aux_head = AuxHead(768, config)
        self.inception_d = inception_d(768)
        self.inception_e1 = inception_e(1280)
        self.inception_e2 = inception_e(2048)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(2048, config.classes)
        self.loss = SmoothedCrossEntropy()
        self.aux_loss = SmoothedCrossEntropy()

    def forward(self, images: Tensor, labels: Tensor | None = None) -> InceptionV3Output:
        """Logits of both heads, and with `labels` their weighted loss.

        Args:
            images: (B, 3, image_size, image_size) float.
            labels: (B,) int64 class indices.
        """
        # Sizes in brackets are for images of 299 pixels.
        x = self.stem(images)  # (B, 192, 35, 35)
        for block in (
            *(self.inception_a1, self.inception_a2, self.inception_a3),  # (B, 288, 35, 35)
            self.inception_b,  # (B, 768, 17, 17)
            *(self.inception_c1, self.inception_c2, self.inception_c3, self.inception_c4),
        ):
            x = block(x)
        aux_logits = self.aux_head(x)  # (B, classes)
        x = self.inception_e2(self.inception_e1(self.inception_d(x)))  # (B, 2048, 8, 8)
        logits = self.classifier(self.dropout(self.pool(x).flatten(1)))  # (B, classes)
        if labels is None:
            return InceptionV3Output(logits, aux_logits, None)
        loss = self.loss(logits, labels) + AUX_WEIGHT * self.aux_loss(aux_logits, labels)
        return InceptionV3Output(logits, aux_logits, loss)


class ConvNorm(nn.Module):
    """Convolution without bias, batch normalisation, ReLU."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: Kernel, *, stride: int = 1, padding: Kernel = 0
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=padding, bias=False)
        self.norm = nn.BatchNorm2d(out_channels, eps=0.001)
        # The counter serves cumulative averages only; without it a step has no in-place integer op per layer.
        self.norm.num_batches_tracked = None
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) to (B, out, H', W')."""
        return cast(Tensor, self.relu(self.norm(self.conv(x))))


class Branches(nn.Module):
    """Branches that read one tensor, their outputs concatenated by channel; each is a submodule under its own name."""

    def __init__(self, **branches: nn.Module) -> None:
        super().__init__()
        for name, branch in branches.items():
            self.add_module(name, branch)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) to (B, sum of the branches' channels, H', W')."""
        return torch.cat([branch(x) for branch in self.children()], dim=1)


class AuxHead(nn.Module):
    """The auxiliary classifier with batch normalisation (section 4, figure 8).

    It pools 17 x 17 maps to 5 x 5 (mean of 5 x 5, stride 3), which its second convolution takes to 1 x 1. Smaller maps
    are pooled to 5 x 5 adaptively; so is a batch of one, to 6 x 6, where a 1 x 1 map would leave batch normalisation
    with a single value per channel. Neither changes a parameter.
    """

    def __init__(self, in_channels: int, config: InceptionV3Config) -> None:
        super().__init__()
        wanted = 6 if config.batch == 1 else 5
        pooled = (config.feature_map - 5) // 3 + 1
        self.pool = nn.AvgPool2d(5, stride=3) if pooled >= wanted else nn.AdaptiveAvgPool2d(wanted)
        self.conv1_1x1 = ConvNorm(in_channels, 128, 1)
        self.conv2_5x5 = ConvNorm(128, 768, 5)
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(768, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 768, H, W) to (B, classes)."""
        x = self.pool(x)  # (B, 768, 5, 5)
        x = self.conv2_5x5(self.conv1_1x1(x))  # (B, 768, 1, 1)
        return cast(Tensor, self.classifier(self.global_pool(x).flatten(1)))


class SmoothedCrossEntropy(nn.Module):
    """Mean cross-entropy against labels smoothed by `LABEL_SMOOTHING` (section 7).

    Equal to `nn.CrossEntropyLoss(label_smoothing=LABEL_SMOOTHING)`, which masks in place.
    """

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(B, classes) and (B,) int64 to a scalar."""
        log_probs = torch.log_softmax(logits, dim=1)  # (B, classes)
        return (1 - LABEL_SMOOTHING) * nll_loss(log_probs, labels) - LABEL_SMOOTHING * log_probs.mean()


def stem() -> nn.Sequential:
    """The layers before the first block: (B, 3, 299, 299) to (B, 192, 35, 35)."""
    return chain(
        conv1_3x3=ConvNorm(3, 32, 3, stride=2),  # (B, 32, 149, 149)
        conv2_3x3=ConvNorm(32, 32, 3),  # (B, 32, 147, 147)
        conv3_3x3=ConvNorm(32, 64, 3, padding=1),  # (B, 64, 147, 147)
        pool1=nn.MaxPool2d(3, stride=2),  # (B, 64, 73, 73)
        conv4_1x1=ConvNorm(64, 80, 1),  # (B, 80, 73, 73)
        conv5_3x3=ConvNorm(80, 192, 3),  # (B, 192, 71, 71)
        pool2=nn.MaxPool2d(3, stride=2),  # (B, 192, 35, 35)
    )


def inception_a(in_channels: int, pool_channels: int) -> Branches:
    """Block A (figure 5), 5 x 5 as two 3 x 3: `in_channels` to 224 + `pool_channels` at 35 x 35."""
    return Branches(
        branch_1x1=ConvNorm(in_channels, 64, 1),
        branch_5x5=chain(
            reduce_1x1=ConvNorm(in_channels, 48, 1),
            conv_5x5=ConvNorm(48, 64, 5, padding=2),
        ),
        branch_3x3_double=chain(
            reduce_1x1=ConvNorm(in_channels, 64, 1),
            conv1_3x3=ConvNorm(64, 96, 3, padding=1),
            conv2_3x3=ConvNorm(96, 96, 3, padding=1),
        ),
        branch_pool=pooled_branch(in_channels, pool_channels),
    )


def inception_b(in_channels: int) -> Branches:
    """Block B (figure 10), the first grid reduction: `in_channels` at 35 x 35 to 480 + `in_channels` at 17 x 17."""
    return Branches(
        branch_3x3=ConvNorm(in_channels, 384, 3, stride=2),
        branch_3x3_double=chain(
            reduce_1x1=ConvNorm(in_channels, 64, 1),
            conv1_3x3=ConvNorm(64, 96, 3, padding=1),
            conv2_3x3=ConvNorm(96, 96, 3, stride=2),
        ),
        branch_pool=nn.MaxPool2d(3, stride=2),
    )


def inception_c(in_channels: int, inner: int) -> Branches:
    """Block C (figure 6), 7 x 7 as 1 x 7 and 7 x 1 over `inner` channels: `in_channels` to 768 at 17 x 17."""
    row, column = (1, 7), (7, 1)
    row_padding, column_padding = (0, 3), (3, 0)
    return Branches(
        branch_1x1=ConvNorm(in_channels, 192, 1),
        branch_7x7=chain(
            reduce_1x1=ConvNorm(in_channels, inner, 1),
            conv1_1x7=ConvNorm(inner, inner, row, padding=row_padding),
            conv2_7x1=ConvNorm(inner, 192, column, padding=column_padding),
        ),
        branch_7x7_double=chain(
            reduce_1x1=ConvNorm(in_channels, inner, 1),
            conv1_7x1=ConvNorm(inner, inner, column, padding=column_padding),
            conv2_1x7=ConvNorm(inner, inner, row, padding=row_padding),
            conv3_7x1=ConvNorm(inner, inner, column, padding=column_padding),
            conv4_1x7=ConvNorm(inner, 192, row, padding=row_padding),
        ),
        branch_pool=pooled_branch(in_channels, 192),
    )


def inception_d(in_channels: int) -> Branches:
    """Block D, the second grid reduction: `in_channels` at 17 x 17 to 512 + `in_channels` at 8 x 8."""
    return Branches(
        branch_3x3=chain(
            reduce_1x1=ConvNorm(in_channels, 192, 1),
            conv_3x3=ConvNorm(192, 320, 3, stride=2),
        ),
        branch_7x7_3x3=chain(
            reduce_1x1=ConvNorm(in_channels, 192, 1),
            conv1_1x7=ConvNorm(192, 192, (1, 7), padding=(0, 3)),
            conv2_7x1=ConvNorm(192, 192, (7, 1), padding=(3, 0)),
            conv3_3x3=ConvNorm(192, 192, 3, stride=2),
        ),
        branch_pool=nn.MaxPool2d(3, stride=2),
    )


def inception_e(in_channels: int) -> Branches:
    """Block E (figure 7), 1 x 3 and 3 x 1 side by side: `in_channels` to 2048 at 8 x 8."""
    return Branches(
        branch_1x1=ConvNorm(in_channels, 320, 1),
        branch_3x3=chain(
            reduce_1x1=ConvNorm(in_channels, 384, 1),
            split=split_3x3(384),
        ),
        branch_3x3_double=chain(
            reduce_1x1=ConvNorm(in_channels, 448, 1),
            conv_3x3=ConvNorm(448, 384, 3, padding=1),
            split=split_3x3(384),
        ),
        branch_pool=pooled_branch(in_channels, 192),
    )


def split_3x3(channels: int) -> Branches:
    """A 1 x 3 and a 3 x 1 convolution of one tensor: `channels` to 2 x `channels`."""
    return Branches(
        conv_1x3=ConvNorm(channels, channels, (1, 3), padding=(0, 1)),
        conv_3x1=ConvNorm(channels, channels, (3, 1), padding=(1, 0)),
    )


def pooled_branch(in_channels: int, out_channels: int) -> nn.Sequential:
    """Mean over 3 x 3 at the same size, then a 1 x 1 convolution."""
    return chain(
        pool=nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False),
        conv_1x1=ConvNorm(in_channels, out_channels, 1),
    )


def chain(**layers: nn.Module) -> nn.Sequential:
    """The layers one after another, each under its own name."""
    return nn.Sequential(OrderedDict(layers))


def build(config: InceptionV3Config) -> Parts:
    """The model with images, (B, 3, image_size, image_size), and labels, (B,)."""
    images = torch.randn(config.batch, 3, config.image_size, config.image_size)
    labels = torch.randint(config.classes, (config.batch,))
    return Parts(InceptionV3(config), (images, labels), loss_of, loss="separate")
