"""The options of every named workload, with the sizes `small` and `paper`; none imports torch.

`ZOO`: the models that are built from `transformers`, one row each. Written here: `dlrm` of Naumov et al. 2019
(arXiv:1906.00091), `evoformer`, the MSA and pair tracks of AlphaFold (Jumper et al. 2021,
doi:10.1038/s41586-021-03819-2), and `inception_v3`, `nmt` and `rnnlm`, which Mirhoseini et al. (2017) place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import ClassVar, Literal, Self, cast

from rlplace.errors import refuse_if

Loss = Literal["auto", "separate", "joined", "accumulated"]
"""How the micro-batches of a step make its loss; `auto` is found by a check."""
Size = Literal["small", "paper"]
SIZES: tuple[Size, ...] = ("small", "paper")
MOST = 1 << 31
"""Largest value of an integer: tensors count their elements."""
COPIES = ("layers", "blocks", "steps", "experts", "tables")
"""Options that count modules that are built one by one."""
MOST_COPIES = 10_000
"""Largest value of those: more would take hours to build."""


@dataclass(frozen=True, slots=True)
class WorkloadConfig(ABC):
    """Options of a named workload; the defaults are its `small` size.

    An option is an integer of at least 1 (or of the value in `LEAST`), a share from 0 up to but not including 1, or a
    bool.

    Raises:
        InvalidValue: an option is of the wrong type or out of range, or options exclude each other.
    """

    NAME: ClassVar[str]
    """The name of the workload."""
    LEAST: ClassVar[dict[str, int]] = {}
    """Smallest value of integers that must exceed 1."""

    def __post_init__(self) -> None:
        for option in fields(self):
            name, value, kind = option.name, getattr(self, option.name), type(cast(object, option.default))
            least, most = self.LEAST.get(name, 1), MOST_COPIES if name in COPIES else MOST
            is_whole, is_share = type(value) is int, type(value) in (int, float)
            rules = {
                int: (is_whole and least <= value <= most, f"an integer of at least {least} and at most {most:,}"),
                float: (is_share and 0 <= value < 1, "a number of at least 0 and below 1"),
                bool: (type(value) is bool, "true or false"),
            }
            is_right, expected = rules.get(kind, rules[bool])
            self._require(is_right, name, expected)
        self._check()

    @classmethod
    def small(cls) -> Self:
        """A step of well under a second on one core."""
        return cls()

    @classmethod
    @abstractmethod
    def paper(cls) -> Self:
        """The size of the paper."""

    def _check(self) -> None:  # noqa: B027 - most options never exclude each other
        """Raises where options, each valid alone, exclude each other."""

    def _require(self, is_met: bool, name: str, expected: str, hint: str = "") -> None:
        refuse_if(not is_met, name, getattr(self, name), expected, where=f"workload {self.NAME}", hint=hint)


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
        backward pass to fit it in memory (section 1.11.8); a captured step does not: `blocks` is the option to reduce.
        """
        return cls(
            blocks=48, sequences=128, residues=256, msa_width=256, pair_width=128, heads=8, pair_heads=4, head_width=32
        )


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
    """Probability of dropping an input of a layer, or an output of the last (Zaremba et al. 2014); 0 is
    deterministic."""

    @classmethod
    def paper(cls) -> Self:
        """Two layers, as Mirhoseini et al. (2017) place, at the `large` figures of Zaremba et al. (2014, section 4.1).

        1,500 units, 35 steps, the 10,000 words of the Penn Treebank. The batch of 64 is our choice, as in `nmt`.
        """
        return cls(layers=2, units=1500, batch=64, steps=35, vocab=10000)


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a model of the zoo.

    Attributes:
        small: its value in the size `small`.
        paper: its value in the size `paper`.
        doc: its description.
        least: its smallest value, of an integer.
        divides: the option that it must divide.
        leaves_even: whether the quotient must be even as well: rotary positions take a head's features in pairs.
        most: the option that it must not exceed.
        is_even: whether it must be even.
    """

    small: int | float
    paper: int | float
    doc: str
    least: int = 1
    divides: str = ""
    leaves_even: bool = False
    most: str = ""
    is_even: bool = False


@dataclass(frozen=True, slots=True)
class Draw:
    """A random input: integers below `high`, which names an option or is a number; normal numbers where it is None."""

    high: str | int | None
    shape: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class ZooModel:
    """A model of `transformers`, with random or fake weights: its options, its config and its inputs.

    Attributes:
        doc: the paper, its size `paper`, and larger sizes.
        model: the class of the model.
        config: the class of its config.
        options: by name.
        arguments: of the config: an option by its name, `4*width`, `width//heads`, `vocab-1`, or a constant.
        inputs: keyword arguments of the model, in the order in which they are drawn; a text copies another input.
        loss: how micro-batches make the loss.
    """

    doc: str
    model: str
    config: str
    options: Mapping[str, Option]
    arguments: Mapping[str, object]
    inputs: Mapping[str, Draw | str]
    loss: Loss = "separate"

    def options_type(self, name: str) -> type[WorkloadConfig]:
        """The class of the options."""
        options = self.options

        def check(config: WorkloadConfig) -> None:
            for key, option in options.items():
                value = getattr(config, key)
                if option.divides:
                    whole = getattr(config, option.divides)
                    config._require(whole % value == 0, key, f"a divisor of {option.divides}={whole}")
                    is_even = whole // value % 2 == 0 or not option.leaves_even
                    config._require(is_even, key, f"a divisor of {option.divides}={whole} that leaves an even part")
                if option.most:
                    most = getattr(config, option.most)
                    config._require(value <= most, key, f"at most {option.most}={most}")
                config._require(value % 2 == 0 or not option.is_even, key, "an even number")

        def paper(cls: type[WorkloadConfig]) -> WorkloadConfig:
            return cls(**{key: option.paper for key, option in options.items()})

        return make_dataclass(
            f"{name.capitalize()}Config",
            [(key, type(option.small), field(default=option.small)) for key, option in options.items()],
            bases=(WorkloadConfig,),
            namespace={
                "__doc__": self.doc,
                "NAME": name,
                "LEAST": {key: option.least for key, option in options.items() if option.least > 1},
                "paper": classmethod(paper),
                "_check": check,
            },
            frozen=True,
            slots=True,
        )


_DROPOUT = Option(0.0, 0.0, "Probability of dropping a feature or an attention weight; 0 keeps the step deterministic.")
_OWN_LABELS: dict[str, Draw | str] = {"input_ids": Draw("vocab", ("batch", "tokens")), "labels": "input_ids"}
"""Tokens are their own labels, shifted by one inside of the model."""
_LABELLED_IMAGES: dict[str, Draw | str] = {
    "pixel_values": Draw(None, ("batch", 3, "image_size", "image_size")),
    "labels": Draw("classes", ("batch",)),
}


_LLAMA: dict[str, object] = {
    "vocab_size": "vocab",
    "hidden_size": "width",
    "intermediate_size": "mlp",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "max_position_embeddings": "tokens",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": False,
}


_ENCODER: dict[str, object] = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "4*width",
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), "dropout"),
}


def _transformer(layers: tuple[int, int], width: tuple[int, int], heads: tuple[int, int]) -> dict[str, Option]:
    """Options of a stack of transformer layers, each as (small, paper)."""
    return {
        "layers": Option(*layers, "Transformer layers; of two stacks, in each."),
        "width": Option(*width, "Width of a token or patch; feed-forward layers are four times as wide."),
        "heads": Option(*heads, "Attention heads.", divides="width"),
    }


ZOO: dict[str, ZooModel] = {
    "bert": ZooModel(
        """Devlin et al. 2018 (arXiv:1810.04805): BERT-base (section 3), 30,522 word pieces, sequences of 512 tokens.

        The paper's batch of 256 is spread over 16 chips; 16 sequences a step is our choice. BERT-large is
        `bert@paper,layers=24,width=1024,heads=16`.
        """,
        "BertForPreTraining",
        "BertConfig",
        options=_transformer((4, 12), (256, 768), (4, 12))
        | {
            "batch": Option(4, 16, "Sequences per step."),
            "tokens": Option(64, 512, "Tokens in a sequence."),
            "vocab": Option(8000, 30522, "Number of tokens.", least=2),
            "dropout": _DROPOUT,
        },
        arguments={
            **_ENCODER,
            "vocab_size": "vocab",
            "max_position_embeddings": "tokens",
        },
        inputs={
            "input_ids": Draw("vocab", ("batch", "tokens")),
            "labels": Draw("vocab", ("batch", "tokens")),
            "next_sentence_label": Draw(2, ("batch",)),
        },
    ),
    "clip": ZooModel(
        """Radford et al. 2021 (arXiv:2103.00020): ViT-B/32 (table 20), images of 224 pixels, texts of 77 tokens.

        The paper's batch of 32,768 is spread over hundreds of GPUs; 64 pairs a step is our choice. Pairs are their own
        labels.
        """,
        "CLIPModel",
        "CLIPConfig",
        options=_transformer((2, 12), (192, 768), (3, 12))
        | {
            "text_width": Option(128, 512, "Width of a token in the text tower; `width` is of the image tower."),
            "text_heads": Option(2, 8, "Attention heads of the text tower.", divides="text_width"),
            "shared_width": Option(128, 512, "Width of the space where images and texts are compared."),
            "batch": Option(4, 64, "Pairs of an image and a text per step."),
            "image_size": Option(96, 224, "Height and width of an image in pixels."),
            "patch_size": Option(32, 32, "Height and width of a patch in pixels.", divides="image_size"),
            "tokens": Option(32, 77, "Tokens in a text."),
            "vocab": Option(4000, 49408, "Number of tokens.", least=3),
        },
        arguments={
            "text_config": {
                "vocab_size": "vocab",
                "hidden_size": "text_width",
                "intermediate_size": "4*text_width",
                "num_hidden_layers": "layers",
                "num_attention_heads": "text_heads",
                "max_position_embeddings": "tokens",
                "projection_dim": "shared_width",
                "pad_token_id": 0,
                "bos_token_id": "vocab-2",
                "eos_token_id": "vocab-1",
            },
            "vision_config": {
                "hidden_size": "width",
                "intermediate_size": "4*width",
                "num_hidden_layers": "layers",
                "num_attention_heads": "heads",
                "image_size": "image_size",
                "patch_size": "patch_size",
                "projection_dim": "shared_width",
            },
            "projection_dim": "shared_width",
        },
        inputs={
            "input_ids": Draw("vocab-1", ("batch", "tokens-1")),
            "pixel_values": Draw(None, ("batch", 3, "image_size", "image_size")),
        },
        loss="joined",
    ),
    "gpt2": ZooModel(
        """Radford et al. 2019 (Language Models are Unsupervised Multitask Learners): the smallest of four (table 2).

        50,257 tokens, contexts of 1,024 tokens. The paper's batch of 512 takes many machines; 8 sequences a step is our
        choice. Medium is `gpt2@paper,layers=24,width=1024,heads=16`, large `gpt2@paper,layers=36,width=1280,heads=20`,
        XL `gpt2@paper,layers=48,width=1600,heads=25`.
        """,
        "GPT2LMHeadModel",
        "GPT2Config",
        options=_transformer((4, 12), (256, 768), (4, 12))
        | {
            "batch": Option(4, 8, "Sequences per step."),
            "tokens": Option(64, 1024, "Tokens in a sequence.", least=2),
            "vocab": Option(8000, 50257, "Number of tokens.", least=2),
            "dropout": _DROPOUT,
        },
        arguments={
            "vocab_size": "vocab",
            "n_positions": "tokens",
            "n_embd": "width",
            "n_layer": "layers",
            "n_head": "heads",
            "resid_pdrop": "dropout",
            "embd_pdrop": "dropout",
            "attn_pdrop": "dropout",
            "bos_token_id": 0,
            "eos_token_id": 0,
            "use_cache": False,
        },
        inputs=_OWN_LABELS,
    ),
    "llama": ZooModel(
        """Touvron et al. 2023 (arXiv:2302.13971): LLaMA-7B (table 2), 32,000 tokens, contexts of 2,048 tokens.

        The paper's batch of 4 million tokens takes many machines; one sequence a step is our choice. LLaMA-13B is
        `llama@paper,layers=40,width=5120,heads=40,kv_heads=40,mlp=13824`.
        """,
        "LlamaForCausalLM",
        "LlamaConfig",
        options={
            "layers": Option(4, 32, "Transformer layers."),
            "width": Option(256, 4096, "Width of a token."),
            "heads": Option(4, 32, "Attention heads.", divides="width", leaves_even=True),
            "kv_heads": Option(4, 32, "Heads of keys and values.", divides="heads"),
            "mlp": Option(688, 11008, "Width of the gated feed-forward layers."),
            "batch": Option(4, 1, "Sequences per step."),
            "tokens": Option(64, 2048, "Tokens in a sequence.", least=2),
            "vocab": Option(8000, 32000, "Number of tokens.", least=2),
        },
        arguments=_LLAMA,
        inputs=_OWN_LABELS,
    ),
    "mixtral": ZooModel(
        """Jiang et al. 2024 (arXiv:2401.04088): Mixtral 8x7B (table 1), 2 of 8 experts a token.

        The paper's context is 32,768 tokens; one sequence of 2,048 a step is our choice. Its experts drop no token;
        ours have the room of Switch (Fedus et al. 2021), 1.25 of an even share.
        """,
        "MixtralForCausalLM",
        "MixtralConfig",
        options={
            "layers": Option(2, 32, "Transformer layers."),
            "width": Option(128, 4096, "Width of a token."),
            "heads": Option(4, 32, "Attention heads.", divides="width", leaves_even=True),
            "kv_heads": Option(2, 8, "Heads of keys and values.", divides="heads"),
            "mlp": Option(256, 14336, "Width of an expert's gated feed-forward layers."),
            "experts": Option(4, 8, "Experts in a layer."),
            "chosen": Option(2, 2, "Experts that a token is sent to.", most="experts"),
            "capacity": Option(
                125, 125, "Tokens that an expert has room for, in percent of an even share (see `Experts`)."
            ),
            "batch": Option(2, 1, "Sequences per step."),
            "tokens": Option(32, 2048, "Tokens in a sequence.", least=2),
            "vocab": Option(4000, 32000, "Number of tokens.", least=2),
        },
        arguments=_LLAMA | {"num_local_experts": "experts", "num_experts_per_tok": "chosen"},
        inputs=_OWN_LABELS,
        loss="accumulated",
    ),
    "resnet50": ZooModel(
        """He et al. 2015 (arXiv:1512.03385): images of 224 pixels and 1,000 classes (section 3.4); always 50 layers.

        The paper's batch of 256 is spread over GPUs; 32 images a step is our choice, as in `inception_v3`.
        """,
        "ResNetForImageClassification",
        "ResNetConfig",
        options={
            "batch": Option(2, 32, "Images per step."),
            "image_size": Option(64, 224, "Height and width of an image in pixels.", least=33),
            "classes": Option(1000, 1000, "Number of labels.", least=2),
            "width": Option(64, 64, "Channels after the stem; the four stages have 4, 8, 16 and 32 times as many."),
        },
        arguments={
            "embedding_size": "width",
            "hidden_sizes": ["4*width", "8*width", "16*width", "32*width"],
            "num_labels": "classes",
        },
        inputs=_LABELLED_IMAGES,
    ),
    "t5": ZooModel(
        """Raffel et al. 2019 (arXiv:1910.10683): the paper's baseline, T5-base (section 3.1), 32,128 tokens.

        Sources of 512 tokens, of which 15 % in spans of 3 are predicted: targets of 114, as in the authors' code. The
        paper's batch of 128 is spread over many chips; 8 pairs a step is our choice. T5-large is
        `t5@paper,layers=24,width=1024,heads=16`.
        """,
        "T5ForConditionalGeneration",
        "T5Config",
        options=_transformer((2, 12), (256, 768), (4, 12))
        | {
            "batch": Option(4, 8, "Pairs of texts per step."),
            "tokens": Option(64, 512, "Tokens in a source text."),
            "target_tokens": Option(32, 114, "Tokens in a target text."),
            "vocab": Option(8000, 32128, "Number of tokens.", least=2),
            "dropout": _DROPOUT,
        },
        arguments={
            "vocab_size": "vocab",
            "d_model": "width",
            "d_kv": "width//heads",
            "d_ff": "4*width",
            "num_layers": "layers",
            "num_heads": "heads",
            "dropout_rate": "dropout",
            "decoder_start_token_id": 0,
            "use_cache": False,
        },
        inputs={
            "input_ids": Draw("vocab", ("batch", "tokens")),
            "labels": Draw("vocab", ("batch", "target_tokens")),
        },
    ),
    "vit": ZooModel(
        """Dosovitskiy et al. 2020 (arXiv:2010.11929): ViT-Base with patches of 16 pixels (table 1).

        The paper's batch of 4,096 is spread over many chips; 32 images a step is our choice. ViT-Large is
        `vit@paper,layers=24,width=1024,heads=16`.
        """,
        "ViTForImageClassification",
        "ViTConfig",
        options=_transformer((4, 12), (192, 768), (3, 12))
        | {
            "batch": Option(4, 32, "Images per step."),
            "image_size": Option(112, 224, "Height and width of an image in pixels."),
            "patch_size": Option(16, 16, "Height and width of a patch in pixels.", divides="image_size"),
            "classes": Option(1000, 1000, "Number of labels.", least=2),
            "dropout": _DROPOUT,
        },
        arguments={
            **_ENCODER,
            "image_size": "image_size",
            "patch_size": "patch_size",
            "num_labels": "classes",
        },
        inputs=_LABELLED_IMAGES,
    ),
    "whisper": ZooModel(
        """Radford et al. 2022 (arXiv:2212.04356): Whisper's `base` (table 1), 30 s of 80 mels, 448 of 51,865 tokens.

        The paper's batch of 256 is spread over many GPUs; 8 recordings a step is our choice. Whisper's own sizes from
        its `small` on: `whisper@paper,layers=12,width=768,heads=12`, then 24 layers, 1,024 wide, 16 heads, and 32
        layers, 1,280 wide, 20 heads. The encoder's positions are sinusoids that are never trained.
        """,
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        options={
            "layers": Option(2, 6, "Transformer layers in the encoder, and as many in the decoder."),
            "width": Option(192, 512, "Width of a frame or token.", least=4, is_even=True),
            "heads": Option(3, 8, "Attention heads.", divides="width"),
            "batch": Option(2, 8, "Recordings per step."),
            "mels": Option(80, 80, "Frequencies of a spectrogram."),
            "frames": Option(200, 3000, "Spectra in a recording, 100 a second.", least=2, is_even=True),
            "tokens": Option(32, 448, "Tokens in a transcript."),
            "vocab": Option(8000, 51865, "Number of tokens.", least=2),
            "dropout": _DROPOUT,
        },
        arguments={
            "vocab_size": "vocab",
            "num_mel_bins": "mels",
            "d_model": "width",
            "encoder_layers": "layers",
            "encoder_attention_heads": "heads",
            "encoder_ffn_dim": "4*width",
            "decoder_layers": "layers",
            "decoder_attention_heads": "heads",
            "decoder_ffn_dim": "4*width",
            "max_source_positions": "frames//2",
            "max_target_positions": "tokens",
            **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), "dropout"),
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
            "use_cache": False,
        },
        inputs={
            "input_features": Draw(None, ("batch", "mels", "frames")),
            "labels": Draw("vocab", ("batch", "tokens")),
        },
    ),
}
"""Models of `transformers`; their `small` sizes take well under a second a step on one core."""
