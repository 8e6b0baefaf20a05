"""`CATALOG`: every named workload, its options, its builder and what must be installed for it; imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rlplace.workloads import (
    bert,
    clip,
    dlrm,
    evoformer,
    gpt2,
    inception_v3,
    llama,
    mixtral,
    nmt,
    resnet50,
    rnnlm,
    t5,
    vit,
    whisper,
)
from rlplace.workloads.options import WorkloadConfig
from rlplace.workloads.zoo import EXTRA, PACKAGE

if TYPE_CHECKING:
    from rlplace.workloads.workload import Parts


@dataclass(frozen=True, slots=True)
class Family:
    """One named workload."""

    config: type[WorkloadConfig]
    """The class of its options."""
    build: Callable[[Any], Parts]
    """From such options to a model, its inputs and its loss; imports torch."""
    package: str = ""
    """What it is built from; empty where torch alone does."""
    extra: str = ""
    """The extra that brings `package`."""

    @property
    def is_installed(self) -> bool:
        """Whether what it is built from is there."""
        return not self.package or find_spec(self.package) is not None


ZOO = (PACKAGE, EXTRA)

CATALOG: dict[str, Family] = {
    "bert": Family(bert.BertConfig, bert.build, *ZOO),
    "clip": Family(clip.ClipConfig, clip.build, *ZOO),
    "dlrm": Family(dlrm.DLRMConfig, dlrm.build),
    "evoformer": Family(evoformer.EvoformerConfig, evoformer.build),
    "gpt2": Family(gpt2.GPT2Config, gpt2.build, *ZOO),
    "inception_v3": Family(inception_v3.InceptionV3Config, inception_v3.build),
    "llama": Family(llama.LlamaConfig, llama.build, *ZOO),
    "mixtral": Family(mixtral.MixtralConfig, mixtral.build, *ZOO),
    "nmt": Family(nmt.NMTConfig, nmt.build),
    "resnet50": Family(resnet50.ResNet50Config, resnet50.build, *ZOO),
    "rnnlm": Family(rnnlm.RNNLMConfig, rnnlm.build),
    "t5": Family(t5.T5Config, t5.build, *ZOO),
    "vit": Family(vit.ViTConfig, vit.build, *ZOO),
    "whisper": Family(whisper.WhisperConfig, whisper.build, *ZOO),
}

CONFIGS: dict[str, type[WorkloadConfig]] = {name: family.config for name, family in CATALOG.items()}
"""Name of every named workload and the class of its options."""
