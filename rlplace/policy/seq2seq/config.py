"""`Seq2SeqConfig`: the size of the policy `seq2seq`; importing it imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rlplace.decode import check_ranges
from rlplace.errors import InvalidValue
from rlplace.policy.sizes import MOST_WIDTH


@dataclass(frozen=True)
class Seq2SeqConfig:
    """Sizes of the policy `seq2seq`, and how its logits are bounded."""

    hidden: int = 64
    """Width of the decoder, and of the encoder's two directions together."""
    type_embedding: int = 16
    """Width of the embedding of an op type."""
    device_embedding: int = 16
    """Width of the embedding of a device."""
    attention: int = 16
    """Width of the layer that scores groups for attention."""
    tanh_constant: float = 5.0
    """C of the logits C tanh(u / T)."""
    temperature: float = 1.0
    """T of the logits C tanh(u / T)."""

    def __post_init__(self) -> None:
        widths = ("hidden", "type_embedding", "device_embedding", "attention")
        check_ranges(self, "seq2seq", dict.fromkeys(widths, (1, MOST_WIDTH)))
        if self.hidden % 2:
            raise InvalidValue("hidden", self.hidden, "an even number, shared by two directions", where="seq2seq")
        for name in ("tanh_constant", "temperature"):
            if not getattr(self, name) > 0:
                raise InvalidValue(name, getattr(self, name), "more than 0", where="seq2seq")
