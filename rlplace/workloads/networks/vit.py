"""`build`: the model of `vit` with its inputs and its loss."""

from __future__ import annotations

import torch

from rlplace.workloads.configs.vit import ViTConfig
from rlplace.workloads.networks.zoo import fake_weights_fit, transformers
from rlplace.workloads.workload import Parts, loss_of


def build(config: ViTConfig) -> Parts:
    """The model with images, (B, 3, image_size, image_size), and labels, (B,)."""
    hf = transformers()
    with fake_weights_fit():
        model = hf.ViTForImageClassification(
            hf.ViTConfig(
                hidden_size=config.width,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                intermediate_size=4 * config.width,
                hidden_dropout_prob=config.dropout,
                attention_probs_dropout_prob=config.dropout,
                image_size=config.image_size,
                patch_size=config.patch_size,
                num_labels=config.classes,
            )
        )
    inputs = {
        "pixel_values": torch.randn(config.batch, 3, config.image_size, config.image_size),
        "labels": torch.randint(config.classes, (config.batch,)),
    }
    return Parts(model, inputs, loss_of, loss="separate")
