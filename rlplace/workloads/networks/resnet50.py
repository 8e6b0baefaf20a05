"""`build`: the model of `resnet50` with its inputs and its loss."""

from __future__ import annotations

import torch

from rlplace.workloads.configs.resnet50 import ResNet50Config
from rlplace.workloads.networks.zoo import transformers
from rlplace.workloads.workload import Parts, loss_of


def build(config: ResNet50Config) -> Parts:
    """The model with images, (B, 3, image_size, image_size), and labels, (B,)."""
    hf = transformers()
    model = hf.ResNetForImageClassification(
        hf.ResNetConfig(
            embedding_size=config.width,
            hidden_sizes=[config.width * factor for factor in (4, 8, 16, 32)],
            num_labels=config.classes,
        )
    )
    inputs = {
        "pixel_values": torch.randn(config.batch, 3, config.image_size, config.image_size),
        "labels": torch.randint(config.classes, (config.batch,)),
    }
    return Parts(model, inputs, loss_of, loss="separate")
