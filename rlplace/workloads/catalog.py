"""`CATALOG`: every named workload, its options, its builder and what must be installed for it; imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from rlplace.workloads.workload import Parts


@dataclass(frozen=True, slots=True)
class Family:
    """One named workload."""

    config: type[WorkloadConfig]
    """The class of its options."""
    home: str = ""
    """`module:function` of what builds it; by default `build` of the file in `networks/` that has its name."""
    package: str = ""
    """What it is built from; empty where torch alone does."""
    extra: str = ""
    """The extra that brings `package`."""

    def build(self, config: WorkloadConfig) -> Parts:
        """A model, its inputs and its loss at the size that `config` says; imports torch."""
        module, _, function = (self.home or f"rlplace.workloads.networks.{config.NAME}:build").partition(":")
        make: Callable[[WorkloadConfig], Parts] = getattr(importlib.import_module(module), function)
        return make(config)

    @property
    def is_installed(self) -> bool:
        """Whether what it is built from is there."""
        return not self.package or find_spec(self.package) is not None


ZOO = {"package": "transformers", "extra": "zoo"}

CATALOG: dict[str, Family] = {
    "bert": Family(bert.BertConfig, **ZOO),
    "clip": Family(clip.ClipConfig, **ZOO),
    "dlrm": Family(dlrm.DLRMConfig),
    "evoformer": Family(evoformer.EvoformerConfig),
    "gpt2": Family(gpt2.GPT2Config, **ZOO),
    "inception_v3": Family(inception_v3.InceptionV3Config),
    "llama": Family(llama.LlamaConfig, **ZOO),
    "mixtral": Family(mixtral.MixtralConfig, **ZOO),
    "nmt": Family(nmt.NMTConfig),
    "resnet50": Family(resnet50.ResNet50Config, **ZOO),
    "rnnlm": Family(rnnlm.RNNLMConfig),
    "t5": Family(t5.T5Config, **ZOO),
    "vit": Family(vit.ViTConfig, **ZOO),
    "whisper": Family(whisper.WhisperConfig, **ZOO),
}

CONFIGS: dict[str, type[WorkloadConfig]] = {name: family.config for name, family in CATALOG.items()}
"""Name of every named workload and the class of its options."""
