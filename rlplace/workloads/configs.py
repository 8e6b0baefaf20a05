"""The options of every named workload, with the sizes `small` and `paper`; none imports torch.

Those built from `transformers` follow these papers: `bert` Devlin et al. 2018 (arXiv:1810.04805), `clip` Radford et al.
2021 (arXiv:2103.00020), `gpt2` Radford et al. 2019 (Language Models are Unsupervised Multitask Learners), `llama`
Touvron et al. 2023 (arXiv:2302.13971), `mixtral` Jiang et al. 2024 (arXiv:2401.04088), `resnet50` He et al. 2015
(arXiv:1512.03385), `t5` Raffel et al. 2019 (arXiv:1910.10683), `vit` Dosovitskiy et al. 2020 (arXiv:2010.11929) and
`whisper` Radford et al. 2022 (arXiv:2212.04356). Written here: `dlrm` of Naumov et al. 2019 (arXiv:1906.00091),
`evoformer`, the MSA and pair tracks of AlphaFold (Jumper et al. 2021, doi:10.1038/s41586-021-03819-2), and
`inception_v3`, `nmt` and `rnnlm`, which Mirhoseini et al. (2017) place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from rlplace.workloads.workload import WorkloadConfig


@dataclass(frozen=True, slots=True)
class BertConfig(WorkloadConfig):
    """Options of `bert`; the defaults are its `small` size.

    BERT-large is `bert@paper,layers=24,width=1024,heads=16`.

    Example:
        >>> BertConfig.paper().layers
        12
    """

    NAME: ClassVar[str] = "bert"
    LEAST: ClassVar[dict[str, int]] = {"vocab": 2}

    layers: int = 4
    """Transformer layers."""
    width: int = 256
    """Width of a token; feed-forward layers are four times as wide."""
    heads: int = 4
    """Attention heads; a divisor of `width`."""
    batch: int = 4
    """Sequences per step."""
    tokens: int = 64
    """Tokens in a sequence."""
    vocab: int = 8000
    """Number of tokens."""
    dropout: float = 0.0
    """Probability of dropping a feature or an attention weight; 0 keeps the step deterministic."""

    def _check(self) -> None:
        self._require_divisor("heads", "width")

    @classmethod
    def paper(cls) -> Self:
        """BERT-base (section 3): 12 layers, 768 wide, 12 heads, 30,522 word pieces, sequences of 512 tokens.

        The paper's batch of 256 is spread over 16 chips; 16 sequences a step is our choice.
        """
        return cls(layers=12, width=768, heads=12, batch=16, tokens=512, vocab=30522)


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


CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Distinct values of each categorical feature of the Criteo Kaggle data, which the paper's model is made for."""


@dataclass(frozen=True, slots=True)
class DLRMConfig(WorkloadConfig):
    """Options of `dlrm`; the defaults are its `small` size.

    Example:
        >>> sum(DLRMConfig.paper().rows) * DLRMConfig.paper().width
        540201232
    """

    NAME: ClassVar[str] = "dlrm"
    LEAST: ClassVar[dict[str, int]] = {"hidden": 8}

    tables: int = 26
    """Embedding tables, one a categorical feature."""
    max_rows: int = 2000
    """Most rows of a table; a feature with more values shares rows (the k-th table has the k-th of `CRITEO_ROWS`)."""
    width: int = 16
    """Width of an embedding, and of the bottom MLP's output."""
    dense: int = 13
    """Continuous features."""
    lookups: int = 1
    """Rows that a sample reads from each table; they are added."""
    hidden: int = 512
    """Width of the first hidden layer of both MLPs; the second has half, the bottom's third an eighth of it."""
    batch: int = 128
    """Samples per step."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of every table."""
        return tuple(min(CRITEO_ROWS[table % len(CRITEO_ROWS)], self.max_rows) for table in range(self.tables))

    @classmethod
    def paper(cls) -> Self:
        """The paper's model for Criteo Kaggle (section 5): 26 full tables of width 16, 540 million parameters.

        MLPs of 512-256-64-16 and 512-256-1 and the batch of 128 as in the authors' code.
        """
        return cls(max_rows=max(CRITEO_ROWS))


AMINO_ACIDS = 23
"""20 amino acids, unknown, gap and mask."""
DISTANCE_BINS = 64
"""Bins of the distogram (supplement, section 1.9.8)."""


@dataclass(frozen=True, slots=True)
class EvoformerConfig(WorkloadConfig):
    """Options of `evoformer`; the defaults are its `small` size. A step is one protein.

    Example:
        >>> EvoformerConfig.paper().blocks
        48
    """

    NAME: ClassVar[str] = "evoformer"
    LEAST: ClassVar[dict[str, int]] = {"residues": 2}

    blocks: int = 2
    """Evoformer blocks, each with its own weights."""
    sequences: int = 16
    """Sequences in the multiple sequence alignment (MSA)."""
    residues: int = 24
    """Residues of the protein."""
    msa_width: int = 64
    """Width of the MSA track."""
    pair_width: int = 32
    """Width of the pair track, and of the triangle multiplications."""
    heads: int = 4
    """Attention heads over the MSA."""
    pair_heads: int = 2
    """Attention heads over pairs."""
    head_width: int = 16
    """Width of a head, and of the vectors whose outer product updates the pairs."""

    @classmethod
    def paper(cls) -> Self:
        """Initial training (supplement, section 1.6 and table 4): 48 blocks, 128 sequences, crops of 256 residues.

        MSA 256 wide with 8 heads, pairs 128 wide with 4 heads, heads 32 wide. The paper recomputes every block in the
        backward pass to fit it in memory (section 1.11.8); a captured step does not: `blocks` is what to reduce.
        """
        return cls(
            blocks=48, sequences=128, residues=256, msa_width=256, pair_width=128, heads=8, pair_heads=4, head_width=32
        )


@dataclass(frozen=True, slots=True)
class GPT2Config(WorkloadConfig):
    """Options of `gpt2`; the defaults are its `small` size.

    The paper's four sizes: `gpt2@paper` itself, medium `gpt2@paper,layers=24,width=1024,heads=16`, large
    `gpt2@paper,layers=36,width=1280,heads=20`, XL `gpt2@paper,layers=48,width=1600,heads=25`.

    Example:
        >>> GPT2Config.paper().tokens
        1024
    """

    NAME: ClassVar[str] = "gpt2"
    LEAST: ClassVar[dict[str, int]] = {"vocab": 2, "tokens": 2}

    layers: int = 4
    """Transformer layers."""
    width: int = 256
    """Width of a token; feed-forward layers are four times as wide."""
    heads: int = 4
    """Attention heads; a divisor of `width`."""
    batch: int = 4
    """Sequences per step."""
    tokens: int = 64
    """Tokens in a sequence."""
    vocab: int = 8000
    """Number of tokens."""
    dropout: float = 0.0
    """Probability of dropping a feature or an attention weight; 0 keeps the step deterministic."""

    def _check(self) -> None:
        self._require_divisor("heads", "width")

    @classmethod
    def paper(cls) -> Self:
        """The smallest of the paper's four (table 2): 12 layers, 768 wide, 50,257 tokens, contexts of 1,024 tokens.

        The paper's batch of 512 takes many machines; 8 sequences a step is our choice.
        """
        return cls(layers=12, width=768, heads=12, batch=8, tokens=1024, vocab=50257)


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


@dataclass(frozen=True, slots=True)
class LlamaConfig(WorkloadConfig):
    """Options of `llama`; the defaults are its `small` size.

    LLaMA-13B is `llama@paper,layers=40,width=5120,heads=40,kv_heads=40,mlp=13824`.

    Example:
        >>> LlamaConfig.paper().mlp
        11008
    """

    NAME: ClassVar[str] = "llama"
    LEAST: ClassVar[dict[str, int]] = {"vocab": 2, "tokens": 2}

    layers: int = 4
    """Transformer layers."""
    width: int = 256
    """Width of a token."""
    heads: int = 4
    """Attention heads; a divisor of `width`, which leaves each head an even width."""
    kv_heads: int = 4
    """Heads of keys and values; a divisor of `heads`."""
    mlp: int = 688
    """Width of the gated feed-forward layers."""
    batch: int = 4
    """Sequences per step."""
    tokens: int = 64
    """Tokens in a sequence."""
    vocab: int = 8000
    """Number of tokens."""

    def _check(self) -> None:
        self._require_divisor("heads", "width")
        self._require_divisor("kv_heads", "heads")
        self._require(self.width // self.heads % 2 == 0, "heads", f"to leave width={self.width} even heads")

    @classmethod
    def paper(cls) -> Self:
        """LLaMA-7B (table 2): 32 layers, 4,096 wide, 32 heads, 32,000 tokens, contexts of 2,048 tokens.

        The paper's batch of 4 million tokens takes many machines; one sequence a step is our choice.
        """
        return cls(layers=32, width=4096, heads=32, kv_heads=32, mlp=11008, batch=1, tokens=2048, vocab=32000)


@dataclass(frozen=True, slots=True)
class MixtralConfig(WorkloadConfig):
    """Options of `mixtral`; the defaults are its `small` size.

    Example:
        >>> MixtralConfig.paper().experts
        8
    """

    NAME: ClassVar[str] = "mixtral"
    LEAST: ClassVar[dict[str, int]] = {"vocab": 2, "tokens": 2}

    layers: int = 2
    """Transformer layers."""
    width: int = 128
    """Width of a token."""
    heads: int = 4
    """Attention heads; a divisor of `width`, which leaves each head an even width."""
    kv_heads: int = 2
    """Heads of keys and values; a divisor of `heads`."""
    mlp: int = 256
    """Width of an expert's gated feed-forward layers."""
    experts: int = 4
    """Experts in a layer."""
    chosen: int = 2
    """Experts that a token is sent to; at most `experts`."""
    capacity: int = 125
    """Tokens that an expert has room for, in percent of an even share; the others skip it (see `Experts`)."""
    batch: int = 2
    """Sequences per step."""
    tokens: int = 32
    """Tokens in a sequence."""
    vocab: int = 4000
    """Number of tokens."""

    def _check(self) -> None:
        self._require_divisor("heads", "width")
        self._require_divisor("kv_heads", "heads")
        self._require(self.width // self.heads % 2 == 0, "heads", f"to leave width={self.width} even heads")
        self._require(self.chosen <= self.experts, "chosen", f"at most experts={self.experts}")

    @classmethod
    def paper(cls) -> Self:
        """Mixtral 8x7B (table 1): 32 layers, 4,096 wide, 32 heads, 8 of keys and values, 2 of 8 experts a token.

        The paper's context is 32,768 tokens; one sequence of 2,048 a step is our choice. Its experts drop no token;
        ours have the room of Switch (Fedus et al. 2021), 1.25 of an even share.
        """
        return cls(
            layers=32,
            width=4096,
            heads=32,
            kv_heads=8,
            mlp=14336,
            experts=8,
            chosen=2,
            batch=1,
            tokens=2048,
            vocab=32000,
        )


@dataclass(frozen=True, slots=True)
class NMTConfig(WorkloadConfig):
    """Options of `nmt`; the defaults are its `small` size.

    Example:
        >>> NMTConfig.paper().units
        1024
    """

    NAME: ClassVar[str] = "nmt"
    LEAST: ClassVar[dict[str, int]] = {"vocab": 2}

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

    @classmethod
    def paper(cls) -> Self:
        """The two-layer translation model of Mirhoseini et al. (2017), with figures from where they are published.

        Two layers a side, as Mirhoseini et al. (2018) call the model of the 2017 paper; 1,024 units and a vocabulary
        of 32,000 word pieces as in GNMT (Wu et al. 2016); sentences of up to 50 tokens as in Bahdanau et al. (2015).
        The batch of 64 is our choice.
        """
        return cls(layers=2, units=1024, batch=64, steps=50, vocab=32000)


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


@dataclass(frozen=True, slots=True)
class RNNLMConfig(WorkloadConfig):
    """Options of `rnnlm`; the defaults are its `small` size.

    The larger models of Jozefowicz et al. (2016) are within reach: `rnnlm@paper,units=8192,steps=20,vocab=793471` is
    their two layers of 8,192 units without projection.

    Example:
        >>> RNNLMConfig.paper().units
        1500
    """

    NAME: ClassVar[str] = "rnnlm"
    LEAST: ClassVar[dict[str, int]] = {"vocab": 2}

    layers: int = 2
    """LSTM layers."""
    units: int = 384
    """Width of the embedding and of every LSTM cell."""
    batch: int = 32
    """Sequences per step."""
    steps: int = 12
    """Tokens in every sequence, thus the time steps that the layers are unrolled over."""
    vocab: int = 4000
    """Number of tokens."""
    dropout: float = 0.0
    """Probability of dropping what enters a layer or leaves the last (Zaremba et al. 2014); 0 is deterministic."""

    @classmethod
    def paper(cls) -> Self:
        """Two layers, as Mirhoseini et al. (2017) place, at the `large` figures of Zaremba et al. (2014, section 4.1).

        1,500 units, 35 steps, the 10,000 words of the Penn Treebank. The batch of 64 is our choice, as in `nmt`.
        """
        return cls(layers=2, units=1500, batch=64, steps=35, vocab=10000)


@dataclass(frozen=True, slots=True)
class T5Config(WorkloadConfig):
    """Options of `t5`; the defaults are its `small` size.

    T5-large is `t5@paper,layers=24,width=1024,heads=16`.

    Example:
        >>> T5Config.paper().tokens, T5Config.paper().target_tokens
        (512, 114)
    """

    NAME: ClassVar[str] = "t5"
    LEAST: ClassVar[dict[str, int]] = {"vocab": 2}

    layers: int = 2
    """Transformer layers in the encoder, and as many in the decoder."""
    width: int = 256
    """Width of a token; feed-forward layers are four times as wide."""
    heads: int = 4
    """Attention heads; a divisor of `width`."""
    batch: int = 4
    """Pairs of texts per step."""
    tokens: int = 64
    """Tokens in a source text."""
    target_tokens: int = 32
    """Tokens in a target text."""
    vocab: int = 8000
    """Number of tokens."""
    dropout: float = 0.0
    """Probability of dropping a feature or an attention weight; 0 keeps the step deterministic."""

    def _check(self) -> None:
        self._require_divisor("heads", "width")

    @classmethod
    def paper(cls) -> Self:
        """The paper's baseline, T5-base (section 3.1): 12 + 12 layers, 768 wide, 12 heads, 32,128 tokens.

        Sources of 512 tokens, of which 15 % in spans of 3 are predicted: targets of 114, as in the authors' code. The
        paper's batch of 128 is spread over many chips; 8 pairs a step is our choice.
        """
        return cls(layers=12, width=768, heads=12, batch=8, tokens=512, target_tokens=114, vocab=32128)


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
