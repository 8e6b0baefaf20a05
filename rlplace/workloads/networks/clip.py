"""`build`: the model of `clip` with its inputs and its loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rlplace.workloads.configs.clip import ClipConfig
from rlplace.workloads.networks.zoo import tokens, transformers
from rlplace.workloads.workload import Parts


class Embeddings(NamedTuple):
    """What a forward pass returns."""

    texts: Tensor
    """(B, shared_width) of length 1."""
    images: Tensor
    """(B, shared_width) of length 1."""
    log_scale: Tensor
    """Scalar, learned: the logarithm of what similarities are multiplied by."""


class Towers(nn.Module):
    """The towers of a `CLIPModel` and their projections; every pair of image and text is embedded on its own.

    Similarities are left to the loss: they are of all texts with all images of a batch, which may be cut before.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.text_model, self.vision_model = model.text_model, model.vision_model
        self.visual_projection, self.text_projection = model.visual_projection, model.text_projection
        self.logit_scale = model.logit_scale

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Embeddings:
        """Embeddings of texts, (B, tokens), and images, (B, 3, image_size, image_size)."""
        images = self.visual_projection(self.vision_model(pixel_values=pixel_values).pooler_output)
        texts = self.text_projection(self.text_model(input_ids=input_ids).pooler_output)
        images, texts = images / length(images), texts / length(texts)
        return Embeddings(texts, images, self.logit_scale)


def length(vectors_BW: Tensor) -> Tensor:
    """(B, 1)."""
    return vectors_BW.pow(2).sum(dim=-1, keepdim=True).pow(0.5)


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
    return Parts(Towers(model), inputs, contrastive_loss, loss="joined")


def contrastive_loss(output: Embeddings) -> Tensor:
    """Mean cross-entropy of finding the image of every text and the text of every image (figure 3)."""

    logits_BB = torch.matmul(output.texts, output.images.t()) * output.log_scale.exp()
    pairs_B = torch.arange(logits_BB.shape[0], device=logits_BB.device)
    return (cross_entropy(logits_BB, pairs_B) + cross_entropy(logits_BB.t(), pairs_B)) / 2
