"""`clip`: the two towers of Radford et al. 2021 (arXiv:2103.00020), one for images and one for texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rlplace.workloads.options import WorkloadConfig

if TYPE_CHECKING:
    from torch import Tensor

    from rlplace.workloads.workload import Parts


@dataclass(frozen=True, slots=True)
class ClipConfig(WorkloadConfig):
    """Options of `clip`; the defaults are its `small` size.

    Example:
        >>> ClipConfig.paper().tokens
        77
    """

    NAME: ClassVar[str] = "clip"
    LEAST: ClassVar[dict[str, int]] = {"vocab": 3}

    layers: int = 2
    """Transformer layers in each tower."""
    width: int = 192
    """Width of a patch in the image tower; feed-forward layers are four times as wide."""
    heads: int = 3
    """Attention heads of the image tower; a divisor of `width`."""
    text_width: int = 128
    """Width of a token in the text tower."""
    text_heads: int = 2
    """Attention heads of the text tower; a divisor of `text_width`."""
    shared_width: int = 128
    """Width of the space where images and texts are compared."""
    batch: int = 4
    """Pairs of an image and a text per step."""
    image_size: int = 96
    """Height and width of an image in pixels."""
    patch_size: int = 32
    """Height and width of a patch in pixels; a divisor of `image_size`."""
    tokens: int = 32
    """Tokens in a text."""
    vocab: int = 4000
    """Number of tokens."""

    def _check(self) -> None:
        self._require_divisor("heads", "width")
        self._require_divisor("text_heads", "text_width")
        self._require_divisor("patch_size", "image_size")

    @classmethod
    def paper(cls) -> Self:
        """ViT-B/32 (table 20): 12 layers a tower, 768 and 512 wide, images of 224 pixels, texts of 77 tokens.

        The paper's batch of 32,768 is spread over hundreds of GPUs; 64 pairs a step is our choice.
        """
        return cls(
            layers=12,
            width=768,
            heads=12,
            text_width=512,
            text_heads=8,
            shared_width=512,
            batch=64,
            image_size=224,
            patch_size=32,
            tokens=77,
            vocab=49408,
        )


def build(config: ClipConfig) -> Parts:
    """The model with texts, (B, tokens), and images, (B, 3, image_size, image_size); pairs are their own labels."""
    import torch

    from rlplace.workloads.workload import Parts
    from rlplace.workloads.zoo import tokens, transformers

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
    import torch
    from torch.nn.functional import cross_entropy

    logits_BB: Tensor = output.logits_per_text
    pairs_B = torch.arange(logits_BB.shape[0], device=logits_BB.device)
    return (cross_entropy(logits_BB, pairs_B) + cross_entropy(logits_BB.t(), pairs_B)) / 2
