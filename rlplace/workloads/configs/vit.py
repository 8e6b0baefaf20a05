"""`vit`: the vision transformer of Dosovitskiy et al. 2020 (arXiv:2010.11929), from `transformers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from rlplace.workloads.workload import WorkloadConfig


@dataclass(frozen=True, slots=True)
class ViTConfig(WorkloadConfig):
    """Options of `vit`; the defaults are its `small` size.

    ViT-Large is `vit@paper,layers=24,width=1024,heads=16`.

    Example:
        >>> ViTConfig.paper().patch_size
        16
    """

    NAME: ClassVar[str] = "vit"
    LEAST: ClassVar[dict[str, int]] = {"classes": 2}

    layers: int = 4
    """Transformer layers."""
    width: int = 192
    """Width of a patch; feed-forward layers are four times as wide."""
    heads: int = 3
    """Attention heads; a divisor of `width`."""
    batch: int = 4
    """Images per step."""
    image_size: int = 112
    """Height and width of an image in pixels."""
    patch_size: int = 16
    """Height and width of a patch in pixels; a divisor of `image_size`."""
    classes: int = 1000
    """Number of labels."""
    dropout: float = 0.0
    """Probability of dropping a feature or an attention weight; 0 keeps the step deterministic."""

    def _check(self) -> None:
        self._require_divisor("heads", "width")
        self._require_divisor("patch_size", "image_size")

    @classmethod
    def paper(cls) -> Self:
        """ViT-Base with patches of 16 pixels (table 1): 12 layers, 768 wide, 12 heads, images of 224 pixels.

        The paper's batch of 4,096 is spread over many chips; 32 images a step is our choice.
        """
        return cls(layers=12, width=768, heads=12, batch=32, image_size=224)
