"""`CATALOG`: every named workload, its options, its builder and what must be installed for it; imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlplace.workloads import inception_v3, nmt, rnnlm
from rlplace.workloads.options import WorkloadConfig

if TYPE_CHECKING:
    from rlplace.workloads.workload import Parts


@dataclass(frozen=True, slots=True)
class Family:
    """One named workload."""

    config: type[WorkloadConfig]
    """The class of its options."""
    build: Callable[[Any], Parts]
    """From such options to a model, its inputs and its loss; imports torch."""
    extra: str = ""
    """The extra that brings what it is built from; empty where torch alone does."""


CATALOG: dict[str, Family] = {
    "inception_v3": Family(inception_v3.InceptionV3Config, inception_v3.build),
    "nmt": Family(nmt.NMTConfig, nmt.build),
    "rnnlm": Family(rnnlm.RNNLMConfig, rnnlm.build),
}

CONFIGS: dict[str, type[WorkloadConfig]] = {name: family.config for name, family in CATALOG.items()}
"""Name of every named workload and the class of its options."""
