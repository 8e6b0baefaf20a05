"""`whisper`: the speech recogniser of Radford et al. 2022 (arXiv:2212.04356), from `transformers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from rlplace.workloads.workload import WorkloadConfig


@dataclass(frozen=True, slots=True)
class WhisperConfig(WorkloadConfig):
    """Options of `whisper`; the defaults are its `small` size.

    Whisper's own sizes from its `small` on: `whisper@paper,layers=12,width=768,heads=12`, then 24 layers, 1,024 wide,
    16 heads, and 32 layers, 1,280 wide, 20 heads. The encoder's positions are sinusoids that are never trained.

    Example:
        >>> WhisperConfig.paper().frames
        3000
    """

    NAME: ClassVar[str] = "whisper"
    LEAST: ClassVar[dict[str, int]] = {"vocab": 2, "frames": 2}

    layers: int = 2
    """Transformer layers in the encoder, and as many in the decoder."""
    width: int = 192
    """Width of a frame or token; feed-forward layers are four times as wide."""
    heads: int = 3
    """Attention heads; a divisor of `width`, which is even."""
    batch: int = 2
    """Recordings per step."""
    mels: int = 80
    """Frequencies of a spectrogram."""
    frames: int = 200
    """Spectra in a recording, 100 a second; the encoder's convolutions halve it, so it is even."""
    tokens: int = 32
    """Tokens in a transcript."""
    vocab: int = 8000
    """Number of tokens."""
    dropout: float = 0.0
    """Probability of dropping a feature or an attention weight; 0 keeps the step deterministic."""

    def _check(self) -> None:
        self._require_divisor("heads", "width")
        self._require(self.width % 2 == 0 and self.width > 2, "width", "an even number above 2")
        self._require(self.frames % 2 == 0, "frames", "an even number")

    @classmethod
    def paper(cls) -> Self:
        """Whisper's `base` (table 1): 6 + 6 layers, 512 wide, 8 heads; 30 s of 80 mels, 448 of 51,865 tokens.

        The paper's batch of 256 is spread over many GPUs; 8 recordings a step is our choice.
        """
        return cls(layers=6, width=512, heads=8, batch=8, mels=80, frames=3000, tokens=448, vocab=51865)
