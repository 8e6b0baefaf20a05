"""`clip`: the two towers of Radford et al. 2021 (arXiv:2103.00020), one for images and one for texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from rlplace.workloads.workload import WorkloadConfig


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
