"""`whisper`: the speech recogniser of Radford et al. 2022 (arXiv:2212.04356), from `transformers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from rlplace.workloads.options import WorkloadConfig

if TYPE_CHECKING:
    from rlplace.workloads.workload import Parts


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


def build(config: WhisperConfig) -> Parts:
    """The model with spectrograms, (B, mels, frames), and transcripts as labels, (B, tokens)."""
    import torch

    from rlplace.workloads.workload import Parts, loss_of
    from rlplace.workloads.zoo import tokens, transformers

    hf = transformers()
    model = hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            vocab_size=config.vocab,
            num_mel_bins=config.mels,
            d_model=config.width,
            encoder_layers=config.layers,
            encoder_attention_heads=config.heads,
            encoder_ffn_dim=4 * config.width,
            decoder_layers=config.layers,
            decoder_attention_heads=config.heads,
            decoder_ffn_dim=4 * config.width,
            max_source_positions=config.frames // 2,
            max_target_positions=config.tokens,
            dropout=config.dropout,
            attention_dropout=config.dropout,
            activation_dropout=config.dropout,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )
    inputs = {
        "input_features": torch.randn(config.batch, config.mels, config.frames),
        "labels": tokens(config.vocab, config.batch, config.tokens),
    }
    return Parts(model, inputs, loss_of)
