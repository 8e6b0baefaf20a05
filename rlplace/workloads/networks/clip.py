"""`build`: the model of `clip` with its inputs and its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from rlplace.workloads.clip import ClipConfig
from rlplace.workloads.networks.zoo import tokens, transformers
from rlplace.workloads.workload import Parts


def build(config: ClipConfig) -> Parts:
    """The model with texts, (B, tokens), and images, (B, 3, image_size, image_size); pairs are their own labels."""
    hf = transformers()
    end = config.vocab - 1
    text = {
        "vocab_size": config.vocab,
        "hidden_size": config.text_width,
        "intermediate_size": 4 * config.text_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.text_heads,
        "max_position_embeddings": config.tokens,
        "projection_dim": config.shared_width,
        "pad_token_id": 0,
        "bos_token_id": end - 1,
        "eos_token_id": end,
    }
    vision = {
        "hidden_size": config.width,
        "intermediate_size": 4 * config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "projection_dim": config.shared_width,
    }
    model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=config.shared_width))
    words_BT = tokens(end, config.batch, config.tokens - 1)
    inputs = {
        "input_ids": torch.cat((words_BT, torch.full((config.batch, 1), end)), dim=1),
        "pixel_values": torch.randn(config.batch, 3, config.image_size, config.image_size),
    }
    return Parts(model, inputs, contrastive_loss)


def contrastive_loss(output: Any) -> Tensor:
    """Mean cross-entropy of finding the image of every text and the text of every image (figure 3)."""

    logits_BB: Tensor = output.logits_per_text
    pairs_B = torch.arange(logits_BB.shape[0], device=logits_BB.device)
    return (cross_entropy(logits_BB, pairs_B) + cross_entropy(logits_BB.t(), pairs_B)) / 2
