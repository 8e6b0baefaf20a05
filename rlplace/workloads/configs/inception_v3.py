"""`inception_v3`: the image classifier of Szegedy et al. (2015) that Mirhoseini et al. (2017) place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from rlplace.workloads.workload import WorkloadConfig


@dataclass(frozen=True, slots=True)
class InceptionV3Config(WorkloadConfig):
    """Options of `inception_v3`; the defaults are its `small` size.

    One small image leaves batch normalisation with a single value per channel, which cannot be normalised, and is
    refused.

    Example:
        >>> InceptionV3Config.paper().feature_map
        17
    """

    NAME: ClassVar[str] = "inception_v3"
    LEAST: ClassVar[dict[str, int]] = {"image_size": 75, "classes": 2}

    batch: int = 1
    """Images per step."""
    image_size: int = 149
    """Height and width of an image in pixels."""
    classes: int = 1000
    """Number of labels."""
    dropout: float = 0.0
    """Probability of dropping a feature before the classifier; 0 keeps the step deterministic."""

    def _check(self) -> None:
        self._require(
            self.batch > 1 or self.image_size >= 107,
            "image_size",
            "at least 107 for a batch of 1",
            hint="Smaller images end in one value per channel, which batch normalisation cannot use; try batch=2.",
        )

    @property
    def feature_map(self) -> int:
        """Height and width of the 768-channel maps, which the auxiliary head reads: 17 for 299 pixels."""
        after_conv3 = (self.image_size - 3) // 2 + 1 - 2
        after_conv5 = (after_conv3 - 3) // 2 + 1 - 2
        after_stem = (after_conv5 - 3) // 2 + 1
        return (after_stem - 3) // 2 + 1

    @classmethod
    def paper(cls) -> Self:
        """32 images of 299 pixels, as Szegedy et al. (2015) train it (section 8)."""
        return cls(batch=32, image_size=299)
