"""`resnet50`: the image classifier of He et al. 2015 (arXiv:1512.03385), from `transformers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from rlplace.workloads.workload import WorkloadConfig


@dataclass(frozen=True, slots=True)
class ResNet50Config(WorkloadConfig):
    """Options of `resnet50`; the defaults are its `small` size. Its 50 layers are what they are.

    Example:
        >>> ResNet50Config.paper().image_size
        224
    """

    NAME: ClassVar[str] = "resnet50"
    LEAST: ClassVar[dict[str, int]] = {"image_size": 33, "classes": 2}

    batch: int = 2
    """Images per step."""
    image_size: int = 64
    """Height and width of an image in pixels."""
    classes: int = 1000
    """Number of labels."""
    width: int = 64
    """Channels after the stem; the four stages have 4, 8, 16 and 32 times as many."""

    @classmethod
    def paper(cls) -> Self:
        """Images of 224 pixels and 1,000 classes (section 3.4).

        The paper's batch of 256 is spread over GPUs; 32 images a step is our choice, as in `inception_v3`.
        """
        return cls(batch=32, image_size=224)
