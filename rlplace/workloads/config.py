"""`InceptionV3Config`, `NMTConfig`: the options of the built-in workloads, checked without importing torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Self

from rlplace.errors import InvalidValue

Size = Literal["small", "paper"]
SIZES: tuple[Size, ...] = ("small", "paper")


@dataclass(frozen=True, slots=True)
class InceptionV3Config:
    """Options of `inception_v3`; the defaults are its `small` size.

    Raises:
        InvalidValue: an option is of the wrong type or out of range, or one small image leaves batch normalisation
            with a single value per channel, which cannot be normalised.

    Example:
        >>> InceptionV3Config.paper().feature_map
        17
    """

    batch: int = 1
    """Images per step."""
    image_size: int = 149
    """Height and width of an image in pixels."""
    classes: int = 1000
    """Number of labels."""
    dropout: float = 0.0
    """Probability of dropping a feature before the classifier; 0 keeps the step deterministic."""

    def __post_init__(self) -> None:
        where = "workload inception_v3"
        _check_count("batch", self.batch, 1, where)
        _check_count("image_size", self.image_size, 75, where)
        _check_count("classes", self.classes, 2, where)
        _check_number("dropout", self.dropout, where)
        if not 0 <= self.dropout < 1:
            raise InvalidValue("dropout", self.dropout, "at least 0 and below 1", where=where)
        if self.batch == 1 and self.image_size < 107:
            raise InvalidValue(
                "image_size",
                self.image_size,
                "at least 107 for a batch of 1",
                where=where,
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
    def small(cls) -> Self:
        """One image of 149 pixels: less than a second a step on one core."""
        return cls()

    @classmethod
    def paper(cls) -> Self:
        """32 images of 299 pixels, as Szegedy et al. (2015) train it (section 8)."""
        return cls(batch=32, image_size=299)


@dataclass(frozen=True, slots=True)
class NMTConfig:
    """Options of `nmt`; the defaults are its `small` size.

    Raises:
        InvalidValue: an option is of the wrong type or out of range.

    Example:
        >>> NMTConfig.paper().units
        1024
    """

    layers: int = 2
    """LSTM layers in the encoder, and as many in the decoder."""
    units: int = 512
    """Width of the embeddings, of every LSTM cell and of the attention."""
    batch: int = 64
    """Sentence pairs per step."""
    steps: int = 10
    """Tokens in every source and every target sentence, thus the time steps that each side is unrolled over."""
    vocab: int = 4000
    """Number of tokens, the same in both languages."""
    bidirectional: bool = False
    """Whether the encoder's first layer also reads the source from its end."""

    def __post_init__(self) -> None:
        where = "workload nmt"
        for name in ("layers", "units", "batch", "steps"):
            _check_count(name, getattr(self, name), 1, where)
        _check_count("vocab", self.vocab, 2, where)
        if not isinstance(self.bidirectional, bool):
            raise InvalidValue("bidirectional", self.bidirectional, "true or false", where=where)

    @classmethod
    def small(cls) -> Self:
        """2 + 2 layers of 512 units over 10 steps: about half a second a step on one core."""
        return cls()

    @classmethod
    def paper(cls) -> Self:
        """The two-layer translation model of Mirhoseini et al. (2017), with figures from where they are published.

        Two layers a side, as Mirhoseini et al. (2018) call the model of the 2017 paper; 1,024 units and a vocabulary
        of 32,000 word pieces as in GNMT (Wu et al. 2016); sentences of up to 50 tokens as in Bahdanau et al. (2015).
        The batch of 64 is our choice.
        """
        return cls(layers=2, units=1024, batch=64, steps=50, vocab=32000)


WorkloadConfig = InceptionV3Config | NMTConfig

CONFIGS: dict[str, type[InceptionV3Config] | type[NMTConfig]] = {
    "inception_v3": InceptionV3Config,
    "nmt": NMTConfig,
}
"""Name of every built-in workload and the class of its options."""


def _check_count(name: str, value: object, least: int, where: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidValue(name, value, f"an integer of at least {least}", where=where)


def _check_number(name: str, value: object, where: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise InvalidValue(name, value, "a finite number", where=where)
